"""docs/founding_documents.md from founding_documents.json: every worked example, what the documents print, where it is wrong.

The five tokens are also shown term by term, as `vitrel.explain` prints them; a text that differs from the stored numbers is
refused.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "founding_documents.json"
PAGE = Path(__file__).parents[2] / "docs" / "founding_documents.md"
ABOUT = {  # {example: (what it shows, how vitrel computes it)}
    "five_tokens_log_decay": (
        "attention of five tokens in a row, each key weakened by its distance",
        '`"log_decay", decay=0.3`',
    ),
    "five_tokens_no_decay": ("the same without position", '`"none"`'),
    "five_tokens_offsets": ("the offsets of five tokens", "`vitrel.Grid(1, 5).offsets()`"),
    "lambda_exercise": ("how strong the decay must be for a token to attend to itself", '`"log_decay", decay=0` and `1.0`'),
    "linear_decay": ("distance itself in place of its logarithm", '`"alibi", learnable=True`, slope 0.3'),
    "asymmetric_exercise": (
        "a weaker decay for earlier tokens",
        '`"log_decay", directional=True` learns one; here a `"table"`',
    ),
    "three_tokens_content": ("scores without position, for the next five", '`"none"`'),
    "three_tokens_additive": ("a bias for each offset", '`"table"`, `"clipped"` or `"factorized"`'),
    "three_tokens_shaw_keys": ("a vector for each offset, added to the keys", '`"shaw", values=False`'),
    "three_tokens_alibi_signed": ("a slope with the sign of the offset", '`"table"` with rows -m Δ'),
    "three_tokens_alibi_symmetric": ("a slope with distance", '`"alibi", learnable=True`, slope 0.1'),
    "three_tokens_rope": ("queries and keys rotated by their positions", '`"rope_mixed"`, frequency π/6'),
    "four_variants": ("bias, Shaw, RoPE and ALiBi side by side", "the four before"),
    "square_content": ("scores without position on a grid of two rows and two columns", '`"none"`'),
    "square_absolute": ("a vector for each patch, added to queries and keys", '`"absolute"`'),
    "square_absolute_terms": ("absolute position taken apart", '`vitrel.explain` of `"absolute"`'),
    "square_relative": (
        "a bias for each offset (dy, dx), in both sign conventions",
        '`"table"`, `set_biases(..., offset=...)`; `vitrel.inspect.plot.offset_maps` draws it, as after 7.5 in 000',
    ),
    "square_listed": ("biases of single pairs of patches", "`set_biases(..., offset=...)` in both readings"),
    "content_outweighs_bias": (
        "content overrides a negative bias",
        '`"table"`',
    ),
    "square_targets": ("where each patch looks", "the largest logits of the example before"),
    "four_heads": ("four heads with a direction each", '`"table"`; `vitrel.inspect.plot.offset_maps` draws them'),
    "clip": ("offsets beyond a radius share its row", '`"clipped", radius=2`'),
    "stored_biases": ("what a stored list of biases adds", '`"clipped", radius=2`'),
    "t5_groups": ("groups of distances against T5's buckets", '`"t5", num_buckets=32, max_distance=128`'),
    "t5_buckets": (
        "near offsets have a bucket each, far ones share logarithmic buckets",
        '`"t5", num_buckets=32, max_distance=128`',
    ),
    "t5_exercise": ("buckets of five distances", '`"t5", num_buckets=32, max_distance=128`'),
    "t5_demo": ("buckets of the listing's distances", '`"t5", num_buckets=32, max_distance=128`'),
    "relative_shift": ("rows of offsets moved into rows of keys by padding and reshaping", "`examples/skew.py`"),
    "length_analysis": ("attention spreads as the sequence grows", "the entropy of `vitrel.explain(...).weights`"),
    "sizes": ("how many rows and parameters tables have", "the parameters of `table`, `t5`"),
    "sizes_of_listings": ("the parameters that the listings count", "the parameters of `shaw`, `transformer_xl`, `t5`"),
    "sentence": ("distances between words", "`vitrel.Grid(1, 6).offsets()`"),
    "steps_between_tokens": ("how far apart tokens are", "`vitrel.Grid(1, 6).offsets()`"),
    "shifted_sentence": ("offsets do not change when all tokens are shifted", '`"log_decay", decay=0.3`'),
    "figures": ("figures in running text", '`"log_decay", decay=0.3`'),
}
EXPLORER = {  # {example: (section of the explorer, what to choose there)}
    "five_tokens_log_decay": ("trace", "as it opens"),
    "five_tokens_no_decay": ("trace", "decay: none"),
    "lambda_exercise": ("trace", "strength λ"),
    "linear_decay": ("trace", "decay: linear"),
    "asymmetric_exercise": ("trace", "λ 0.15, later keys × 2"),
    "square_content": ("story", "No position"),
    "square_absolute": ("story", "Absolute"),
    "square_relative": ("story", "Relative; the sign of the offset"),
    "square_targets": ("story", "★ and arrows"),
    "square_listed": ("story", "this query and key"),
    "content_outweighs_bias": ("story", "Content against bias"),
    "four_heads": ("story", "Head 1 to Head 4, on 2×2 patches"),
    "clip": ("clipping", "as it opens"),
    "stored_biases": ("clipping", "L 3, R 2, the biases typed in"),
    "t5_buckets": ("buckets", "as it opens"),
    "t5_groups": ("buckets", "all buckets of one axis"),
    "t5_exercise": ("buckets", "offset"),
    "t5_demo": ("buckets", "offset"),
    "figures": ("weights", "query sat"),
}
SECTIONS = {  # {anchor: title} of the explorer
    "story": "Four patches",
    "clipping": "Clipping",
    "weights": "Standard against biased weights",
    "trace": "The calculation line by line",
    "buckets": "T5 buckets",
}
NAMES = {  # what a quantity is called on the page; one of a single example as "example.quantity"
    "raw": "q.k",
    "scaled": "s q.k",
    "log_distance": "log(1 + distance)",
    "bias_by_distance": "bias",
    "biased": "s q.k + bias",
    "shifted": "less the maximum",
    "sums": "sum of exponentials",
    "change": "change of the weight",
    "output_rows": "output",
    "weights_without": "weights without decay",
    "becomes_maximum_at": "lambda at which The becomes the maximum",
    "exceeds_half_at": "lambda at which The exceeds one half",
    "near_linear": "weight of the nearest eight keys, linear decay",
    "near_log": "weight of the nearest eight keys, log-decay",
    "mat_to_The": "weight that mat gives The",
    "relative_pos": "j - i",
    "sums_of_query_0": "k + r of query 0",
    "three_tokens_shaw_keys.sums": "k + r",
    "dots": "product",
    "keys": "k + P",
    "row_0": "products of query 0",
    "logits_key_query": "logits, list read as key - query",
    "query_key": "targets, list read as query - key",
    "key_query": "targets, list read as key - query",
    "biases_query_key": "bias, list read as query - key",
    "biases_key_query": "bias, list read as key - query",
    "content_position": "(b) s q.P_j",
    "position_content": "(c) s P_i.k",
    "position_position": "(d) s P_i.P_j",
    "four_variants.shaw": "Shaw",
    "four_variants.rope": "RoPE",
    "four_variants.alibi": "ALiBi",
    "count": "number of biases",
    "clipped": "offsets, limited",
    "exact_up_to": "last distance with a bucket of its own",
    "ranges": "distances",
    "last": "last bucket",
    "negative_adds": "added for a later key",
    "buckets_per_group": "number of buckets",
    "first_and_last_bucket": "first and last bucket",
    "by_distance": "buckets by distance alone",
    "relative_shift.shifted": "after the shift",
    "above": "positions above 1 %",
    "window_rows": "rows of the window's table",
    "window_reach": "largest offset in the window",
    "offsets_of_8": "offsets of 8 tokens",
    "offsets_of_2048": "offsets of 2048 tokens",
    "offsets_of_4096": "offsets of 4096 tokens",
    "t5_parameters": "parameters of T5",
    "one_per_distance_parameters": "parameters with one for each distance",
    "shaw_rows": "rows of Shaw's table",
    "shaw_parameters": "parameters of Shaw",
    "xl_parameters": "parameters u and v of Transformer-XL",
    "The_the": "The to the",
    "cat_sat": "cat to sat",
    "The_mat": "The to mat",
    "steps": "offset",
    "change_of_offsets": "greatest change of an offset",
    "offset_difference": "greatest difference of offsets",
    "bias_difference": "greatest difference of biases",
    "penalty_ratio": "decay of distance 4 over that of 1",
    "sat_to_itself": "weight that sat gives itself",
    "sat_to_itself_without": "the same without decay",
}
# {quantity, or example.quantity: (rows or None, columns)} where these are not "query" and "key". Each is a list of names, a
# kind whose members are numbered, or the name of an input.
LABELS = {
    "log_distance": (None, [f"distance {d}" for d in range(5)]),
    "bias_by_distance": (None, [f"distance {d}" for d in range(5)]),
    "output": ("query", "channel"),
    "output_rows": ("query", "channel"),
    "near_linear": (None, ["64 tokens", "1024 tokens"]),
    "near_log": (None, ["64 tokens", "1024 tokens"]),
    "mat_to_The": (None, ["earlier and later keys alike", "earlier keys decay less"]),
    "sums_of_query_0": ([f"key {j}" for j in range(3)], "channel"),
    "three_tokens_shaw_keys.sums": ([f"query {i}, key {j}" for i in range(3) for j in range(3)], "channel"),
    "rotated": ([f"token {i}" for i in range(3)], "channel"),
    "keys": ([f"key {j}" for j in range(4)], "channel"),
    "query_key": ("query", ["keys"]),
    "key_query": ("query", ["keys"]),
    "biases_query_key": (None, ["query 2, key 0", "query 0, key 2", "query 3, key 0"]),
    "biases_key_query": (None, ["query 0, key 1", "query 2, key 3"]),
    "four_heads.weights": (None, ["right", "left", "below", "below right"]),
    "ranges": ([f"bucket {i}" for i in range(8, 15)], ["from", "to"]),
    "last": (["from", "number"], []),
    "buckets_per_group": (None, ["0 to 16", "17 to 32", "33 to 64"]),
    "first_and_last_bucket": (["0 to 16", "17 to 32", "33 to 64"], ["first", "last"]),
    "t5_exercise.buckets": (None, "distances"),
    "t5_demo.buckets": (None, "offsets"),
    "by_distance": (None, "distances"),
    "entropy": (None, "lengths"),
    "above": (None, "lengths"),
    "steps": (None, ["token 3 after 1", "token 5 after 3"]),
}
OF_QUERIES = ("maximum", "sums")  # one number for each query
INTRODUCTION = """# The founding documents' worked examples

vitrel grew out of five documents that teach relative position by examples small enough to work through by hand: five tokens in
a row, three tokens, a grid of four patches. Here are all of them: the inputs, the exact values, what the documents print, and
whether it agrees. They check any implementation. {playable} of the {count} can be played with in
[the explorer](../tools/explorer/page/page.html); the table of [all examples](#all-examples) says where.

| document | about | its examples |
|---|---|---|
| 000 | absolute and relative position, biases, RoPE, ALiBi | [2×2 grid](#square-content), \
[content against bias](#content-outweighs-bias), [clipping](#clip), [three tokens](#three-tokens-content) |
| 001 | relative position bias, with five exercises | [five tokens](#five-tokens-log-decay), [T5's buckets](#t5-buckets), \
exercises [1](#lambda-exercise), [2](#linear-decay), [3](#asymmetric-exercise), [4](#t5-exercise), [5](#sizes) |
| 002 | listings of Shaw, Transformer-XL and T5 | [relative shift](#relative-shift), [buckets](#t5-demo), \
[length](#length-analysis), [sizes](#sizes-of-listings) |
| 003 | the four terms of Transformer-XL | [four terms](#square-absolute-terms), [distances](#sentence) |
| 004 | Shaw, XLNet, T5 and DeBERTa in prose | formulas only; XLNet's two streams, over patches: \
[examples/two_stream.py](../examples/two_stream.py), [what it measured](../results/two_stream/README.md) |

How to read it: an offset is query minus key unless named otherwise, in patches, (dy, dx) on a grid; rows are queries, columns
keys, unless they are named otherwise (the line in italics names the columns); two numbers in brackets after "query, key" are
these two; everything counts from 0; s = 1/√d for d channels; x stands for q = k = v; h and w are the sides of the grid. Exact
values have four digits, printed ones agree where they are right in the digits printed (**bold** where not). "Returned" is what
a document's listing computes but the document does not print.

`python tests/golden/make.py` writes this page from `tests/golden/founding_documents.json`. Tests recompute every number, within
{tolerance}, by vitrel's functions, which equal the oracles (`tests/oracles`), double loops that use nothing of the package.

## Where a printed value is wrong

<!-- misprints -->

| example | where: printed / exact | reason |
|---|---|---|
{misprints}

<!-- /misprints -->

{verdicts}

## Where a sentence is wrong

<!-- statements -->

| document | it says | right |
|---|---|---|
{statements}

<!-- /statements -->

## All examples

<!-- contents -->

| example | document | what it shows | in vitrel | in the explorer |
|---|---|---|---|---|
{contents}

<!-- /contents -->

<!-- examples -->
"""
END = """<!-- /examples -->
"""
TRACE = """### Term by term

```python
print(vitrel.explain(q, k, v, position="log_decay", decay={decay}, tokens={tokens}))
```
```
{text}
```
"""


def compact(value) -> str:
    """One-line text of a JSON value: a row of numbers between brackets, names before their values."""
    if isinstance(value, dict):
        return " ".join(f"{name} {compact(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "[" + (", " if value and isinstance(value[0], list | dict) else " ").join(map(compact, value)) + "]"
    return str(value)


def listed(entry: dict) -> str:
    """A bias of an offset: (0, +1): -0.2."""
    dy, dx = (f"{x:+d}" if x else "0" for x in entry["offset"])
    return f"({dy}, {dx}): {entry['value']}"


def lines(values, indent="") -> Iterator[str]:
    """A name and its value a line; the rows of a matrix below each other."""
    for name, value in values.items():
        name = title(name)
        if isinstance(value, list) and isinstance(value[0], list | dict):
            names = [name] + [" " * len(name)] * (len(value) - 1)
            yield from (
                f"{indent}{label} {listed(row) if isinstance(row, dict) else compact(row)}"
                for label, row in zip(names, value, strict=True)
            )
        else:
            yield f"{indent}{name} {compact(value)}"


def title(name: str) -> str:
    """An example's name in words."""
    return name.replace("_", " ")


def link(name: str, text: str | None = None) -> str:
    """A link to the section of an example."""
    return f"[{text or title(name)}](#{name.replace('_', '-')})"


def printed_values(case: dict) -> dict:
    """{quantity: what the document prints, or its listing returns}."""
    return case.get("printed") or case.get("returned") or {}


def same(case: dict, quantity: str, printed, exact) -> bool:
    """True if a printed number is the exact one to the printed digits; of a list, which no digits have, if it is the same."""
    if isinstance(exact, list):
        return printed == exact
    digits = case["digits"] if isinstance(case["digits"], int) else case["digits"][quantity]
    return abs(printed - exact) <= 0.5001 * 10**-digits + 5e-5 * (digits < 4)  # exact itself is rounded to four digits


def disagreements(case: dict, quantity: str) -> list[list[int]]:
    """Entries of a printed quantity that differ from the exact one, each a list of indices; [[]] of a single number."""

    def entries(printed, exact, place, depth):
        if depth and isinstance(exact, dict):
            exact = [exact[name] for name in printed]
            printed = list(printed.values())
        if depth and isinstance(exact, list):
            pairs = zip(printed, exact, strict=False)  # a document may print the first rows alone
            return [entry for i, pair in enumerate(pairs) for entry in entries(*pair, [*place, i], depth - 1)]
        return [] if same(case, quantity, printed, exact) else [place]

    ragged = quantity in ("query_key", "key_query")  # lists of keys, compared as a whole
    return entries(printed_values(case)[quantity], case["expected"][quantity], [], 1 if ragged else 2)


def at(values, entry):
    """The value of a list of lists at a list of indices."""
    for i in entry:
        values = values[i]
    return values


def name_of(example: str, quantity: str) -> str:
    """A quantity in words."""
    return NAMES.get(f"{example}.{quantity}") or NAMES.get(quantity) or title(quantity)


def labels(example: str, case: dict, quantity: str) -> tuple[list[str] | None, list[str]]:
    """Names of the rows, None of a quantity that is one row, and of the columns; none of a single number."""
    exact, inputs = case["expected"][quantity], case["inputs"]
    tokens = inputs.get("tokens")
    if not isinstance(exact, list | dict):
        return None, []
    nested = isinstance(next(iter(exact.values())) if isinstance(exact, dict) else exact[0], list)

    def numbered(kind: str, number: int) -> list[str]:
        named = tokens and kind in ("query", "key") and len(tokens) == number
        return list(tokens) if named else [f"{kind} {i}" for i in range(number)]

    width = len(next(iter(exact.values())) if isinstance(exact, dict) else exact[0]) if nested else len(exact)
    default = ("query", "key") if nested else (None, "query" if quantity in OF_QUERIES else "key")
    rows, columns = LABELS.get(f"{example}.{quantity}") or LABELS.get(quantity) or default
    if isinstance(rows, str):
        rows = numbered(rows, len(exact))
    if isinstance(columns, str):
        of_input = [f"{columns.removesuffix('s')} {x}" for x in inputs.get(columns, [])]
        columns = of_input or numbered(columns, width)
    return rows, columns


def place(example: str, case: dict, quantity: str, entry: list[int]) -> str:
    """An entry of a quantity in words: the names of its row and column."""
    rows, columns = labels(example, case, quantity)
    names = [rows[entry[0]]] if rows else []
    if len(entry) > len(names):
        names.append(columns[entry[-1]])
    return " ".join(names) if len(names) < 2 or names[1].startswith("key") else ", ".join(names)


def misprint_row(name: str, case: dict, misprint: dict) -> str:
    """A row of the table of misprints."""
    printed, exact = printed_values(case)[misprint["of"]], case["expected"][misprint["of"]]
    groups: dict[str, list[str]] = {}  # entries of the same pair of values together
    for entry in misprint["entries"]:
        pair = f"{compact(at(printed, entry))} / {compact(at(exact, entry))}"
        groups.setdefault(pair, []).append(place(name, case, misprint["of"], entry))
    values = "; ".join(f"{' and '.join(places)}: {pair}" for pair, places in groups.items())
    if len(misprint["entries"]) > 8 and all(at(printed, entry) == -at(exact, entry) for entry in misprint["entries"]):
        values = f"all {len(misprint['entries'])} entries off the diagonal have the opposite sign"
    returned = ", returned by the listing" if "returned" in case else ""
    return f"| {link(name)}, {name_of(name, misprint['of'])}{returned} | {values} | {misprint['reason']} |"


def rows(example: str, case: dict) -> Iterator[str]:
    """Rows of an example's table: quantity, exact, printed, whether they agree; of a matrix a row that names its columns, then
    one for each of its rows."""
    cells = 2 + 2 * bool(printed_values(case))
    for quantity, exact in case["expected"].items():
        printed, wrong = printed_values(case).get(quantity), []
        if printed is not None:
            wrong = disagreements(case, quantity)
        names, columns = labels(example, case, quantity)
        if columns:
            yield f"| **{name_of(example, quantity)}** | {heading(columns)} |" + " |" * (cells - 2)
        keys = list(exact) if isinstance(exact, dict) else range(len(exact)) if names else [None]
        for i, row in enumerate(keys):
            label = names[i] if names else "" if columns else name_of(example, quantity)
            if names and not columns:
                label = f"{name_of(example, quantity)}, {label}"
            values, number = (exact if row is None else exact[row]), len(columns)
            if quantity == "ranges":
                values = values[:number]  # the bucket itself is the row's name
            if printed is None or (names and i >= len(printed)):
                yield f"| {label} | {spaced(values)} |" + " | |" * bool(printed_values(case))
                continue
            found = printed if row is None else printed[row]
            if quantity == "ranges":
                found = found[:number]
            here = [entry[1:] if names else entry for entry in wrong if not names or entry[0] == i]
            if [] in here:
                verdict, marked = "**no**", f"**{spaced(found)}**"
            else:
                marks = {entry[0] for entry in here}
                marked = " ".join(f"**{x}**" if j in marks else str(x) for j, x in enumerate(found)) if marks else spaced(found)
                verdict = f"**{len(marks)} of {len(found)} differ**" if marks else "yes"
            yield f"| {label} | {spaced(values)} | {marked} | {verdict} |"


def heading(columns: list[str]) -> str:
    """The names of columns in italics, a word that all begin with once: *key 0 1 2*."""
    first = columns[0].split(" ")[0]
    if len(columns) > 1 and all(len(c.split(" ")) == 2 and c.startswith(f"{first} ") for c in columns):
        return f"*{first} {' '.join(column.split(' ')[1] for column in columns)}*"
    return f"*{(' ' if all(' ' not in column for column in columns) else '; ').join(columns)}*"


def verdicts(cases: dict) -> str:
    """How many of the examples without a misprint agree in all printed values, in all returned ones, or print none."""
    right = [case for case in cases.values() if not case["misprints"]]
    printed = sum("printed" in case for case in right)
    returned = sum("returned" in case for case in right)
    none = len(right) - printed - returned
    return (
        f"In {printed} of the other {len(right)} examples every printed value agrees, in {returned} every returned one; "
        f"{none} have values that the documents do not print."
    )


def played(name: str) -> str:
    """Where in the explorer an example can be played with."""
    if name not in EXPLORER:
        return ""
    anchor, choice = EXPLORER[name]
    return f"[{SECTIONS[anchor]}](../tools/explorer/page/page.html#{anchor}): {choice}"


def spaced(values) -> str:
    """A number, or numbers with spaces between."""
    return " ".join(map(str, values)) if isinstance(values, list) else str(values)


def section(name: str, case: dict, first: dict) -> str:
    """One example: its rule, inputs, and values; inputs that are those of the `first` example are not repeated."""
    inputs, shared = case["inputs"], ""
    parts = ("h", "w", "tokens", "q", "k", "v")
    if case is not first and all(inputs.get(part) == first["inputs"][part] for part in parts):
        inputs = {part: value for part, value in inputs.items() if part not in parts}
        shared = f" The tokens and q, k, v are those of {link('five_tokens_log_decay')}."
    head = [f"## {title(name)}", "", f"Document {case['document']}. Rule: {case['rule']}.{shared}", ""]
    if case["document"].startswith("not"):
        head[2] = f"{case['document'].capitalize()}. Rule: {case['rule']}.{shared}"
    if "answer" in case:
        head += [f"Answer: {case['answer']}", ""]
    given = ["```", *lines(inputs), "```", ""]
    printed = f" {'returned' if 'returned' in case else 'printed'} | agrees |" if printed_values(case) else ""
    table = [f"| | exact |{printed}", "|---|---|" + "---|---|" * bool(printed), *rows(name, case), ""]
    return "\n".join([*head, *given, *table])


def trace(documents: dict) -> str:
    """The five tokens step by step; ValueError where vitrel's numbers are not the stored ones."""
    from vitrel.inspect.explain import explain  # only here: the oracles and their golden files need no vitrel

    case, bare = documents["cases"]["five_tokens_log_decay"], documents["cases"]["five_tokens_no_decay"]
    q, k, v, decay, tokens = (case["inputs"][name] for name in ("q", "k", "v", "lambda", "tokens"))
    steps = explain(q, k, v, position="log_decay", decay=decay, tokens=tokens)
    checks = {name: (getattr(steps, name)[0], case["expected"][name]) for name in ("weights", "output")}
    for row, values in bare["expected"]["output_rows"].items():
        checks[f"row {row} of the output without position"] = steps.output_without[0, int(row)], values
    for name, (computed, stored) in checks.items():
        if not np.allclose(computed, stored, rtol=0, atol=documents["tolerance"]):
            raise ValueError(
                f"vitrel.explain differs from the stored numbers of the five tokens in {name}:\n{computed}\n{stored}"
            )
    return TRACE.format(decay=decay, tokens=json.dumps(tokens), text=steps)


def page() -> str:
    """The text of the page."""
    documents = json.loads(SOURCE.read_text())
    cases = documents["cases"]
    first = cases["five_tokens_log_decay"]
    misprints = [misprint_row(name, case, misprint) for name, case in cases.items() for misprint in case["misprints"]]
    head = INTRODUCTION.format(
        tolerance=documents["tolerance"],
        misprints="\n".join(misprints),
        verdicts=verdicts(cases),
        playable=len(EXPLORER),
        count=len(cases),
        statements="\n".join(f"| {s['document']} | {s['says']} | {s['right']} |" for s in documents["statements"]),
        contents="\n".join(
            f"| {link(name)} | {case['document']} | {ABOUT[name][0]} | {ABOUT[name][1]} | {played(name)} |"
            for name, case in cases.items()
        ),
    )
    sections = [section(name, case, first) + ("\n" + trace(documents) if case is first else "") for name, case in cases.items()]
    return "\n".join([head, *sections, END])
