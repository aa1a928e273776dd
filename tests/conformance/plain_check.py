"""Recompute what a file of `vitrel check --json` expects, as a port in another language would: Python alone, no package."""

import json
import math
import sys
from pathlib import Path


def nested(array):
    """The values of an array by its shape."""
    data = array["data"]
    for n in reversed(array["shape"][1:]):
        data = [data[i : i + n] for i in range(0, len(data), n)]
    return data


def apart(a, b):
    """The largest difference of two flat lists."""
    return max(abs(x - y) for x, y in zip(a["data"], b["data"], strict=True))


def weights(old, new):
    """Bilinear interpolation between patch centers with antialias, by axis: for each new row, the weight of each old one."""
    scale = old / new
    rows = []
    for i in range(new):
        row = [max(0.0, 1 - abs((j + 0.5 - (i + 0.5) * scale) / max(scale, 1))) for j in range(old)]
        rows.append([value / sum(row) for value in row])
    return rows


def resampled(master, grid):
    """A master [h0, w0, C] at a grid (h, w), flat."""
    down, right = weights(len(master), grid[0]), weights(len(master[0]), grid[1])
    places = [(a, b, y, x) for y, a in enumerate(down) for x, b in enumerate(right)]
    return [
        sum(a[i] * b[j] * master[i][j][c] for i in range(len(master)) for j in range(len(master[0])))
        for a, b, _, _ in places
        for c in range(len(master[0][0]))
    ]


def angles(about):
    """Angles [h, w, P] in (-pi, pi], flat: those of the first patch plus y steps down and x to the right."""
    bands = list(zip(*(about[name]["data"] for name in ("first", "down", "right")), strict=True))
    h, w = about["grid"]
    sums = [first + y * down + x * right for y in range(h) for x in range(w) for first, down, right in bands]
    return [math.atan2(math.sin(angle), math.cos(angle)) for angle in sums]


def biases(about):
    """Biases [N, N] of a table [2h-1, 2w-1] by the offset of query minus key, flat."""
    table, places = nested(about["by_offset"]), nested(about["places"])
    h, w = (len(table) + 1) // 2, (len(table[0]) + 1) // 2
    return [table[a[0] - b[0] + h - 1][a[1] - b[1] + w - 1] for a in places for b in places]


def pseudo_random(number, seed):
    """The first values of the image that a model is given."""
    values = []
    for n in range(seed * 1_000_003, seed * 1_000_003 + number):
        for _ in range(2):
            n = ((n ^ (n >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        values.append((n ^ (n >> 16)) / 2**31 - 1)
    return values


def largest(mine, theirs):
    return max(abs(a - b) for a, b in zip(mine, theirs["data"], strict=True))


report = json.loads(Path(sys.argv[1]).read_text())
assert not {"torch", "numpy", "vitrel"} & {*sys.modules}
for one in [*report["findings"], *report["passed"].values()]:
    if not one:
        continue
    about = one["vectors"]
    inputs, expected = about["inputs"], about["expected"]
    rule = inputs.get("rule", "").removesuffix(", antialias")
    mine = None
    if rule == "bilinear":
        mine = resampled(nested(inputs["master"]), inputs["grid"])
    elif "first" in inputs and "pairs" in inputs:
        mine = angles(inputs)
    elif "by_offset" in inputs:
        mine = biases(inputs)
    if mine is not None:
        print(one["check"], bool(one["found"]), largest(mine, expected) < 1e-5, apart(expected, about["seen"]) < 1e-5)
print(pseudo_random(4, 1))
