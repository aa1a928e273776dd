"""docs/founding_documents.md from founding_documents.json: each worked example, its exact values, and what was misprinted.

The five tokens are also shown step by step, as `vitrel.explain` prints them; a trace that differs from the stored numbers is
refused.
"""

import json
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "founding_documents.json"
PAGE = Path(__file__).parents[2] / "docs" / "founding_documents.md"
TOKENS = ("The", "t1", "t2", "t3", "t4")  # of the five, only the name of the first is on record
ABOUT = {  # {example: (what it shows, how to have it from vitrel)}
    "five_tokens_log_decay": (
        "attention of five tokens in a row, each key weakened by its distance",
        '`"log_decay", decay=0.3`',
    ),
    "five_tokens_no_decay": ("the same without position", '`"none"`'),
    "lambda_exercise": ("how strong the decay must be for a token to attend to itself", '`"log_decay", decay=1.0`'),
    "linear_decay": ("distance itself in place of its logarithm", '`"alibi", learnable=True`, slope 0.3'),
    "three_tokens_content": ("scores without position, for the next five", '`"none"`'),
    "three_tokens_additive": ("a bias for each offset", '`"table"`, `"clipped"` or `"factorised"`'),
    "three_tokens_shaw_keys": ("a vector for each offset, added to the keys", '`"shaw", values=False`'),
    "three_tokens_alibi_signed": ("a slope with the sign of the offset", '`"table"` with rows -m Δ'),
    "three_tokens_alibi_symmetric": ("a slope with distance", '`"alibi", learnable=True`, slope 0.1'),
    "three_tokens_rope": ("queries and keys turned by their positions", '`"rope_mixed"`, frequency π/6'),
    "square_content": ("scores without position on a grid of two rows and two columns", '`"none"`'),
    "square_absolute": ("a vector for each place, added to queries and keys", '`"absolute"`'),
    "square_relative": ("a bias for each offset (dy, dx); it has no symmetry, so that a wrong sign shows", '`"table"`'),
    "clip": ("offsets beyond a radius share its row", '`"clipped", radius=2`'),
    "t5_buckets": ("near offsets have a bucket each, far ones share logarithmic buckets", '`"t5"`'),
    "relative_shift": ("rows of offsets moved into rows of keys by padding and reshaping", "`examples/skew.py`"),
    "sizes": ("how many rows and parameters tables have", "the parameters of `table`, `t5`, `shaw`"),
}
INTRODUCTION = """# The founding documents' worked examples

vitrel grew out of documents that teach relative position by examples small enough to work through by hand: five tokens in a
row, three tokens, a grid of four. This page gives all of them with their inputs and exact values, to check an implementation
against, whichever it is, and says where a value that the documents print is wrong.

It is written by `python tests/golden/make.py` from `tests/golden/founding_documents.json`, never by hand. Every value was
computed from the documents' own inputs and is given to four digits. The tests hold two independent computations to it, within
{tolerance}: the oracles (`tests/oracles`), double loops that use nothing of the package, and vitrel itself, whose
[trace](#step-by-step) of the first example is below.

How to read it: an offset is query minus key, in patches, (dy, dx) on a grid; rows are queries and columns keys; both count
from 0; d is the number of channels; logits are what softmax takes; h and w are the sides of the grid; x stands for q = k = v.

## Where a printed value is wrong

| example | entries | printed | right | reason |
|---|---|---|---|---|
{misprints}

"Not on record" means that only the fact of the difference is known, not the figures printed. In the other {unharmed} examples
no printed value is known to differ.

## All examples

| example | what it shows | `position=` in vitrel |
|---|---|---|
{contents}
"""
TRACE = """### Step by step

What vitrel computes from these inputs, as it prints it. Only the name of the first token is on record; t1 to t4 stand for the
others.

```python
print(vitrel.explain(q, k, v, position="log_decay", decay={decay}, tokens={tokens}))
```
```
{text}
```
"""


def compact(value):
    """One-line text of a JSON value: a row of numbers between brackets, names before their values."""
    if isinstance(value, dict):
        return " ".join(f"{name} {compact(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "[" + (", " if isinstance(value[0], list | dict) else " ").join(map(compact, value)) + "]"
    return str(value)


def lines(values, indent=""):
    """A name and its value a line; the rows of a matrix below each other."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{name}"
            yield from lines(value, indent + "  ")
        elif isinstance(value, list) and isinstance(value[0], list | dict):
            yield from (f"{indent}{label} {compact(row)}" for label, row in zip(labels(name, value), value, strict=True))
        else:
            yield f"{indent}{name} {compact(value)}"


def labels(name, rows):
    """The name beside the first row, as many spaces beside the others."""
    return [name] + [" " * len(name)] * (len(rows) - 1)


def title(name):
    """An example's name in words."""
    return name.replace("_", " ")


def link(name, text=None):
    """To the section of an example."""
    return f"[{text or title(name)}](#{name.replace('_', '-')})"


def misprint_row(name, misprint):
    """A row of the table of misprints."""
    if misprint["entries"]:
        where = ", ".join(f"({i}, {j})" for i, j in misprint["entries"])
    else:
        where = f"{misprint['count']} entries" if "count" in misprint else "the table"
    printed = "not on record" if misprint["printed"] is None else f"`{compact(misprint['printed'])}`"
    right = link(name, "all of them below") if misprint["right"] is None else f"`{compact(misprint['right'])}`"
    return f"| {title(name)}, {misprint['of']} | {where} | {printed} | {right} | {misprint['reason']} |"


def section(name, case, first):
    """One example: its rule, inputs and exact values; inputs that are those of the `first` example are not repeated."""
    inputs, same = case["inputs"], ""
    if case is not first and all(inputs.get(part) == first["inputs"][part] for part in "hwqkv"):
        inputs = {part: value for part, value in inputs.items() if part not in "hwqkv"}
        same = f" The grid and q, k, v are those of {link('five_tokens_log_decay')}."
    wrong = " Misprinted in part, [see above](#where-a-printed-value-is-wrong)." if case["misprints"] else ""
    given, exact = ["```", *lines(inputs), "```", ""], ["```", *lines(case["expected"]), "```", ""]
    return "\n".join(
        [f"## {title(name)}", "", f"Rule: {case['rule']}.{wrong}{same} Inputs:", "", *given, "Exact values:", "", *exact]
    )


def trace(documents):
    """The five tokens step by step; ValueError where vitrel's numbers are not the stored ones."""
    from vitrel.inspect.explain import explain  # only here: the oracles and their golden files need no vitrel

    case, bare = documents["cases"]["five_tokens_log_decay"], documents["cases"]["five_tokens_no_decay"]
    q, k, v, decay = (case["inputs"][name] for name in ("q", "k", "v", "lambda"))
    found = explain(q, k, v, position="log_decay", decay=decay, tokens=TOKENS)
    checks = {name: (getattr(found, name)[0], case["expected"][name]) for name in ("weights", "output")}
    for row, values in bare["expected"]["output_rows"].items():
        checks[f"row {row} of the output without position"] = found.output_without[0, int(row)], values
    for name, (made, stored) in checks.items():
        if not np.allclose(made, stored, rtol=0, atol=documents["tolerance"]):
            raise ValueError(f"vitrel.explain differs from the stored numbers of the five tokens in {name}:\n{made}\n{stored}")
    return TRACE.format(decay=decay, tokens=json.dumps(TOKENS), text=found)


def page():
    """The text of the page."""
    documents = json.loads(SOURCE.read_text())
    cases = documents["cases"]
    first = cases["five_tokens_log_decay"]
    head = INTRODUCTION.format(
        tolerance=documents["tolerance"],
        misprints="\n".join(misprint_row(name, misprint) for name, case in cases.items() for misprint in case["misprints"]),
        unharmed=sum(not case["misprints"] for case in cases.values()),
        contents="\n".join(f"| {link(name)} | {ABOUT[name][0]} | {ABOUT[name][1]} |" for name in cases),
    )
    sections = [section(name, case, first) + ("\n" + trace(documents) if case is first else "") for name, case in cases.items()]
    return "\n".join([head, *sections])
