"""docs/founding_documents.md from founding_documents.json: every worked example, what the documents print, where it is wrong.

The five tokens are also shown step by step, as `vitrel.explain` prints them; a trace that differs from the stored numbers is
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
    "three_tokens_additive": ("a bias for each offset", '`"table"`, `"clipped"` or `"factorised"`'),
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
        '`"table"`, `set_biases(..., offset=...)`',
    ),
    "square_targets": ("where each patch looks", "the largest logits of the example before"),
    "four_heads": ("four heads with a direction each", '`"table"`; `vitrel.inspect.plot.directions` draws them'),
    "clip": ("offsets beyond a radius share its row", '`"clipped", radius=2`'),
    "t5_buckets": (
        "near offsets have a bucket each, far ones share logarithmic buckets",
        '`"t5", num_buckets=32, max_distance=128`',
    ),
    "t5_exercise": ("buckets of five distances", '`"t5", num_buckets=32, max_distance=128`'),
    "t5_demo": ("buckets of the listing's distances", '`"t5", num_buckets=32, max_distance=128`'),
    "relative_shift": ("rows of offsets moved into rows of keys by padding and reshaping", "`examples/skew.py`"),
    "length_analysis": ("attention spreads as the sequence grows", "`vitrel.inspect.plot.attention_span`, `spans`"),
    "sizes": ("how many rows and parameters tables have", "the parameters of `table`, `t5`"),
    "sizes_of_listings": ("the parameters that the listings count", "the parameters of `shaw`, `transformer_xl`, `t5`"),
    "sentence": ("distances between words", "`vitrel.Grid(1, 6).offsets()`"),
    "figures": ("figures in running text", '`"log_decay", decay=0.3`'),
}
INTRODUCTION = """# The founding documents' worked examples

vitrel grew out of five documents that teach relative position by examples small enough to work through by hand: five tokens in
a row, three tokens, a grid of four patches. Here are all of them: the inputs, the exact values, what the documents print, and
whether it agrees. They check any implementation. Most can be played with in [the explorer](explorer.html).

| document | about | its examples |
|---|---|---|
| 000 | absolute and relative position, biases, RoPE, ALiBi | [2×2 grid](#square-content), [clipping](#clip), \
[three tokens](#three-tokens-content) |
| 001 | relative position bias, with five exercises | [five tokens](#five-tokens-log-decay), [T5's buckets](#t5-buckets), \
exercises [1](#lambda-exercise), [2](#linear-decay), [3](#asymmetric-exercise), [4](#t5-exercise), [5](#sizes) |
| 002 | listings of Shaw, Transformer-XL and T5 | [relative shift](#relative-shift), [buckets](#t5-demo), \
[length](#length-analysis), [sizes](#sizes-of-listings) |
| 003 | the four terms of Transformer-XL | [four terms](#square-absolute-terms), [distances](#sentence) |
| 004 | Shaw, XLNet, T5 and DeBERTa in prose | formulas only |

How to read it: an offset is query minus key unless named otherwise, in patches, (dy, dx) on a grid; rows are queries, columns
keys; both count from 0; s = 1/√d for d channels; x stands for q = k = v; h and w are the sides of the grid. Exact values have
four digits, printed ones agree where they are right in the digits printed (**bold** where not). "Returned" is what a document's
listing computes but the document does not print.

`python tests/golden/make.py` writes this page from `tests/golden/founding_documents.json`. Tests recompute every number, within
{tolerance}, by vitrel's public functions, and by the oracles (`tests/oracles`), double loops that use nothing of the package.

## Where a printed value is wrong

<!-- misprints -->

| example | entries: printed / exact | reason |
|---|---|---|
{misprints}

<!-- /misprints -->

In the other {unharmed} examples every printed value agrees.

## Where a sentence is wrong

<!-- statements -->

| document | it says | right |
|---|---|---|
{statements}

<!-- /statements -->

## All examples

<!-- contents -->

| example | document | what it shows | in vitrel |
|---|---|---|---|
{contents}

<!-- /contents -->

<!-- examples -->
"""
END = """<!-- /examples -->
"""
TRACE = """### Step by step

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


def lines(values, indent="") -> Iterator[str]:
    """A name and its value a line; the rows of a matrix below each other."""
    for name, value in values.items():
        if isinstance(value, list) and isinstance(value[0], list | dict):
            labels = [name] + [" " * len(name)] * (len(value) - 1)
            yield from (f"{indent}{label} {compact(row)}" for label, row in zip(labels, value, strict=True))
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


def misprint_row(name: str, case: dict, misprint: dict) -> str:
    """A row of the table of misprints."""
    printed, exact = printed_values(case)[misprint["of"]], case["expected"][misprint["of"]]
    groups: dict[str, list[str]] = {}  # entries of the same pair of values together
    for entry in misprint["entries"]:
        pair = f"{compact(at(printed, entry))} / {compact(at(exact, entry))}"
        groups.setdefault(pair, []).append("(" + ", ".join(map(str, entry)) + ")")
    values = "; ".join(f"{' '.join(places)} {pair}" for pair, places in groups.items())
    returned = ", returned by the listing" if "returned" in case else ""
    return f"| {link(name)}, {misprint['of']}{returned} | {values} | {misprint['reason']} |"


def rows(case: dict) -> Iterator[str]:
    """Rows of an example's table: quantity, exact, printed, whether they agree; one for each row of a matrix."""
    for quantity, exact in case["expected"].items():
        printed, wrong = printed_values(case).get(quantity), []
        if printed is not None:
            wrong = disagreements(case, quantity)
        nested = isinstance(exact, dict) or (isinstance(exact, list) and isinstance(exact[0], list))
        names = list(exact) if isinstance(exact, dict) else range(len(exact)) if nested else [None]
        for i, row in enumerate(names):
            label = quantity if row is None else f"{quantity} {row}"
            values = exact if row is None else exact[row]
            if printed is None or (nested and i >= len(printed)):
                yield f"| {label} | {spaced(values)} |" + " | |" * bool(printed_values(case))
                continue
            found = printed if row is None else printed[row]
            here = [entry[1:] if nested else entry for entry in wrong if not nested or entry[0] == i]
            if [] in here:
                verdict, marked = "**no**", f"**{spaced(found)}**"
            else:
                marks = {entry[0] for entry in here}
                marked = " ".join(f"**{x}**" if j in marks else str(x) for j, x in enumerate(found)) if marks else spaced(found)
                verdict = f"**{len(marks)} of {len(found)} differ**" if marks else "yes"
            yield f"| {label} | {spaced(values)} | {marked} | {verdict} |"


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
    given = ["```", *lines(inputs), "```", ""]
    printed = f" {'returned' if 'returned' in case else 'printed'} | agrees |" if printed_values(case) else ""
    table = [f"| | exact |{printed}", "|---|---|" + "---|---|" * bool(printed), *rows(case), ""]
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
        unharmed=sum(not case["misprints"] for case in cases.values()),
        statements="\n".join(f"| {s['document']} | {s['says']} | {s['right']} |" for s in documents["statements"]),
        contents="\n".join(
            f"| {link(name)} | {case['document']} | {ABOUT[name][0]} | {ABOUT[name][1]} |" for name, case in cases.items()
        ),
    )
    sections = [section(name, case, first) + ("\n" + trace(documents) if case is first else "") for name, case in cases.items()]
    return "\n".join([head, *sections, END])
