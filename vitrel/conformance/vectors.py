"""The numbers behind a result of a check: inputs, what its definition makes of them, and what was seen in the model.

They are few and plain, so that a port in another language can test against them: one head, one window, a few channels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrel.conformance.embedding import Derived, difference, right_rules
from vitrel.conformance.measure import Bias, Located, Rotation, as_pairs, maps, pairing, plain_content

CHANNELS = 8  # of embeddings; all follow the same rule


Later = Callable[[], "Vectors"]  # makes the numbers when a report takes them, since most comparisons hold and are many


class Vectors(NamedTuple):
    """The numbers of one comparison at one place of a model: expected and seen values, and inputs of the expected ones."""

    expected: Tensor | None  # by the definition from the inputs; None where it names no values
    seen: Tensor | None  # in the model; None where it fails
    inputs: dict[str, Any]  # {name: Tensor, number, text or list}

    def to_dict(self) -> dict[str, Any]:
        """Return {"inputs", "expected", "seen"} for JSON: tensors as {"dtype", "shape", "data"}, null for infinity and NaN."""
        return {"inputs": {name: _plain(value) for name, value in self.inputs.items()}} | {
            name: _plain(getattr(self, name)) for name in ("expected", "seen")
        }


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    kind = str(value.dtype).removeprefix("torch.")
    data = value.detach().flatten().tolist()
    if value.is_floating_point():
        data = [float(f"{number:.9g}") if math.isfinite(number) else None for number in data]  # float32 to the bit
    return {"dtype": kind, "shape": list(value.shape), "data": data}


def given(expected: Tensor | None, seen: Tensor | None, **inputs: Any) -> Later | None:
    """Return a function that makes the `Vectors` of these values, for a finding; None if expected and seen are both None."""
    return None if expected is None and seen is None else partial(Vectors, expected, seen, inputs)


def outputs(expected: Tensor, seen: Tensor | None, images: Tensor, seed: int = 0) -> Later | None:
    """Return a function that makes the `Vectors` of outputs for `images` of `pseudo_random`, told by their shape and `seed`."""
    return given(expected, seen, images={"shape": list(images.shape), "seed": seed})


def pseudo_random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return float32 values between -1 and 1 that any language can compute: x = hash(index + seed * 1,000,003) / 2^31 - 1.

    The index counts in row-major order. The hash is n ^= n >> 16; n *= 0x45d9f3b; n ^= n >> 16; n *= 0x45d9f3b; n ^= n >> 16,
    in unsigned 32 bits.
    """
    n = torch.arange(math.prod(shape)) + seed * 1_000_003
    for _ in range(2):
        n = ((n ^ (n >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return ((n ^ (n >> 16)) / 2.0**31 - 1).float().view(shape)


def angles(found: Located, turn: Rotation) -> Vectors:
    """Return `Vectors` of the angles of queries [h, w, P] in radians: as seen, and of the first patch plus mean steps.

    They are those of the head that differs most, of P pairs of channels.
    """
    seen = as_pairs(maps(found, found.query), turn.pairs)[0].angle()  # [H, h, w, P]
    steps = turn.steps[0].nan_to_num(0.0)  # [H, 2, P]
    y, x = torch.meshgrid(*(torch.arange(n) for n in turn.grid), indexing="ij")
    expected = seen[:, :1, :1] + y[..., None] * steps[:, None, None, 0] + x[..., None] * steps[:, None, None, 1]
    apart = torch.atan2((expected - seen).sin(), (expected - seen).cos()).abs()
    head = int(apart.flatten(1).amax(1).argmax())
    about = {
        "pairs": turn.pairs,
        "first": seen[head, 0, 0],
        "down": steps[head, 0],
        "right": steps[head, 1],
        "grid": list(turn.grid),
    }
    return Vectors(torch.atan2(expected.sin(), expected.cos())[head], seen[head], about)


def norms(found: Located, turn: Rotation) -> Vectors:
    """Return `Vectors` of the lengths of queries in P pairs of channels [h, w, P]: as seen, and those of the first patch.

    They are those of the head that differs most; the pairs are those of the rotation, or else the best pairing.
    """
    pairs = turn.pairs or pairing(found)
    seen = as_pairs(maps(found, found.query), pairs)[0].abs()
    head = int((seen - seen[:, :1, :1]).abs().flatten(1).amax(1).argmax())
    return Vectors(seen[head, :1, :1].expand_as(seen[head]), seen[head], {"pairs": pairs})


def biases(found: Located, rows: Bias) -> Vectors:
    """Return `Vectors` of logits [N, N] of the first window: as seen, and by_offset[y_i - y_j + h - 1, x_i - x_j + w - 1].

    They are those of N patches in the head that differs most; NaN where a mask hides the pair or the table has no such offset.
    """
    real = found.tokens[0] >= 0
    places = found.places[0][real]
    offset = places[:, None] - places
    h, w = rows.window
    inside = ((offset[..., 0].abs() < h) & (offset[..., 1].abs() < w))[None]
    y, x = (offset[..., axis].clamp(1 - n, n - 1) + n - 1 for axis, n in ((0, h), (1, w)))
    shown = inside & found.visible[0][real][:, real]
    expected, seen = (part.double().masked_fill(~shown, math.nan)
                      for part in (rows.by_offset[:, y, x], found.logits[0, 0][:, real][:, :, real]))  # fmt: skip
    head = int((expected - seen).abs().nan_to_num(0).flatten(1).amax(1).argmax())
    return Vectors(expected[head], seen[head], {"by_offset": rows.by_offset[head], "places": places})


def rotated_prefix(found: Located) -> Vectors:
    """Return `Vectors` of queries of P prefix tokens [H, P, D]: as seen, and their content before rotation (None: unknown)."""
    plain, rows = plain_content(found, 0), found.query[0, 0][:, found.tokens[0] < 0]
    return Vectors(None if plain is None else plain[0][:, None].expand_as(rows), rows, {})


def prefix_biases(found: Located) -> Vectors:
    """Return `Vectors` of the logits of P prefix tokens to N patches, [H, P, N]; expected are those to the first patch."""
    rows = found.logits[0, 0][:, found.tokens[0] < 0][..., found.tokens[0] >= 0]
    return Vectors(rows[..., :1].expand_as(rows), rows, {})


def position(turn: Rotation | None, rows: Bias | None) -> Vectors:
    """Return `Vectors` without expected values: steps of the queries [H, 2, P] in radians, or else biases [H, 2h-1, 2w-1]."""
    return Vectors(None, turn.steps[0] if turn is not None and turn.pairs else rows and rows.by_offset, {})


def embedding(one: Derived) -> Vectors:
    """Return `Vectors` of the first channels of an embedding [h, w, C]: seen, and by the nearest right rule from its master."""
    found, master = one.found, one.master
    rules = [
        (difference(value.to(found.patches), found.patches), name, value) for name, value in right_rules(master, found.grid)
    ]
    _, rule, expected = min(rules, key=lambda each: each[0])
    about = {"master": master.patches[..., :CHANNELS], "grid": list(found.grid), "rule": rule}
    return Vectors(expected[..., :CHANNELS], found.patches[..., :CHANNELS], about)


def window(found: Located, slots: Tensor, expected: Tensor) -> Vectors:
    """Return `Vectors` of which slots see each other, [N, N], of the window that differs most from `expected` [W, N, N]."""
    which = int((expected != found.visible).flatten(1).sum(1).argmax())
    about = {"grid": list(found.grid), "slots": slots, "tokens": found.tokens[which], "places": found.places[which]}
    return Vectors(expected[which], found.visible[which], about)
