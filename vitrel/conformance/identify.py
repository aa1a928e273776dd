"""The encoding of a model, named from what surveys measure: kind, base, unit, pairs, window, rule at another size."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
from vitrel.conformance.embedding import Derived, single_axis
from vitrel.conformance.measure import (
    SAME,
    Bias,
    Located,
    Rotation,
    window_slots,
)
from vitrel.conformance.survey import Survey

_FLAT = 1e-4  # radians; a step below it is none: the slowest band of a base of 10,000 and 64 channels has 2.4e-4


class Identity(NamedTuple):
    """The position that one module of a model adds: its kind, and {name: value} of details such as the base of frequencies."""

    where: str
    kind: str  # "rope_axial", "table", "absolute", ... or "none"
    details: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join([self.kind, *(f"{name} {value}" for name, value in self.details.items())])


def identify(surveys: dict[Size, Survey], model: nn.Module, embeddings: list[Derived]) -> list[Identity]:
    """Return the encodings of a model at the first size of `surveys`, in pixels: of embeddings, then of attention in order.

    The other sizes show units and resampling. If nothing is found, the result is "none" (of each attention in windows, or one
    of the model) if equal patches give equal queries and keys everywhere; if not, or if an attention was not located, one "not
    identified". `embeddings` are those of `derived`.
    """
    first, *others = surveys.values()
    found = [_embedding(one, embeddings) for one in embeddings if one.size == first.size]
    for n, attention in enumerate(first.attentions):
        same = [s.attentions[n] for s in others if len(s.attentions) == len(first.attentions)]
        found += _attention(attention, same, model)
    if all(one.kind == "none" for one in found):
        none = first.attentions and not first.unlocated and first.alike
        return found if found and none else [Identity("", "none" if none else "not identified", {})]
    return found


def summary(found: list[Identity]) -> list[str]:
    """Return a line of text for each different encoding, ending in "(12 layers)" if it was found 12 times, "" if once."""
    counts = Counter(str(one) for one in found)
    return [text if n == 1 else f"{text} ({n} layers)" for text, n in counts.items()]


def _attention(found: Located, others: list[Located], model: nn.Module) -> list[Identity]:
    """Return the encodings in one attention, rotation first; without any "none" for windows, else []. `others`: other sizes."""
    made, details = [], _windows(found)
    if found.rotation is not None:
        made.append(Identity(found.where, *named_rotation(found.rotation, [other.rotation for other in others])))
    if found.bias is not None:
        made.append(Identity(found.where, *named_bias(found.bias, model)))
    if details:
        kinds = [Identity(one.where, one.kind, one.details | details) for one in made]
        return kinds or [Identity(found.where, "none", details)]
    return made


def _windows(found: Located) -> dict[str, Any]:
    """Return {"window": "7x7", "shift": "3x3"} in tokens, without "shift" if 0; {} if global, or slots are of unknown order."""
    slots = window_slots(found)
    if slots is None or (found.windows == 1 and found.tokens.shape[1] == found.grid[0] * found.grid[1]):
        return {}
    shape, _ = slots
    first = found.places[found.tokens >= 0].view(-1, 2)[0]
    shift = tuple(int(at) % m if n > m else 0 for at, m, n in zip(first, shape, found.grid, strict=True))
    return {"window": format_size(shape)} | ({"shift": format_size(shift)} if any(shift) else {})


def named_rotation(turn: Rotation, others: Sequence[Rotation | None] = ()) -> tuple[str, dict[str, Any]]:
    """Return the kind of a rotation and its details.

    Args:
        turn: the rotation at one size.
        others: the same layer's at other sizes, from which the unit of positions follows; without them it is patches.

    Returns:
        The kind ("rope_axial", "rope_normalized", "rope_mixed", "rope over the number of the token", "rotation of no pairs" or
        "none") and its details, {} for the last two: pairs ("half", "interleaved" or "quarter"), and by kind heads ("one for
        all" or "each its own"), first (the axis of the first pair, "y" or "x"), base (absent if not geometric), unit.
    """
    if not turn.pairs:
        return "rotation of no pairs", {}
    steps = turn.steps[0]  # [H, 2, P]
    down, right = steps[:, 0], steps[:, 1]
    active = (down.abs() > _FLAT) | (right.abs() > _FLAT)
    both = (down.abs() > _FLAT) & (right.abs() > _FLAT)
    details: dict[str, Any] = {"pairs": turn.pairs}
    if not bool(active.any()):
        return "none", {}
    if bool(both.any()):
        ratio = (right - down / turn.grid[1]).abs().max()
        if float(ratio) < SAME:
            return "rope over the number of the token", details
        return "rope_mixed", details | {"heads": "one for all" if bool((steps == steps[:1]).all()) else "each its own"}
    axes = ["y" if bool(down[0, i].abs() > _FLAT) else "x" for i in range(down.shape[1]) if bool(active[0, i])]
    details["first"] = axes[0]
    unit = _unit(turn, [other for other in others if other is not None])
    base = frequency_base(down[0] if axes[0] == "y" else right[0])
    if base:
        details["base"] = float(f"{base:.4g}")
    return ("rope_axial" if unit == "patches" else "rope_normalized"), details | {"unit": unit}


def frequency_base(steps: Tensor) -> float:
    """Return the base b of frequencies b^(-t/n) from n angles per step in their order; 0 if they are no geometric series.

    Angles of 0 are dropped first. Fewer than three are no series.
    """
    found = steps[steps.abs() > _FLAT].abs().double()
    if len(found) < 3:
        return 0.0
    ratios = (found[1:] / found[:-1])[len(found) // 4 :]  # the first angles may exceed pi
    if float(ratios.max() - ratios.min()) > 0.01 * float(ratios.mean()) or not 0 < float(ratios.mean()) < 1:
        return 0.0
    return float(ratios.median()) ** -len(found)


def _unit(turn: Rotation, others: list[Rotation]) -> str:
    """Return what positions are measured in, as the change of angles with the grid shows: "patches", or a share of the grid.

    A share is one of "height and width" or of the "longer side"; "another" if none fits; "patches" without `others`.
    """
    bands = turn.steps[0][0]
    slow = [int((axis.abs() + 9 * (axis.abs() < _FLAT)).argmin()) for axis in bands]  # the slowest band cannot exceed pi
    for name, of in (("patches", lambda n, g: 1.0), ("height and width", lambda n, g: n), ("longer side", lambda n, g: max(g))):
        same = [
            abs(float(one.steps[0][0, axis, slow[axis]]) * of(one.grid[axis], one.grid)
                / (float(bands[axis, slow[axis]]) * of(turn.grid[axis], turn.grid)) - 1)
            for one in others for axis in (0, 1) if abs(float(bands[axis, slow[axis]])) > _FLAT
        ]  # fmt: skip
        if all(error < 1e-2 for error in same):
            return name
    return "another"


def named_bias(rows: Bias, model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return the kind of a bias and its details, from its values by offset and the model's parameters.

    The first that fits is taken: "decomposed" or "shaw" (depend on content), those of `_of_distance`, "factorized", "cpb",
    "table". Details: "biases" (their range or dependence, in words) of content and "cpb", "sign" of "table"; else none.
    """
    if rows.content > SAME:
        kind = "decomposed" if _separates(rows.by_offset) else "shaw"
        return kind, {"biases": "depend on queries or keys"}
    distance = _of_distance(rows.by_offset)
    if distance:
        return distance, {}
    sign = _memory(rows, model)
    if _separates(rows.by_offset):
        return "factorized", {}
    low, high = float(rows.by_offset.nan_to_num(0).min()), float(rows.by_offset.nan_to_num(0).max())
    if not sign and low >= 0 and 1 < high <= 16:
        return "cpb", {"biases": "0 to 16, computed"}
    return "table", {"sign": sign} if sign else {}


def _offsets(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return dy and dx, each [2h-1, 2w-1], of the entries of a table [H, 2h-1, 2w-1]."""
    h, w = (n // 2 for n in table.shape[1:])
    y, x = torch.meshgrid(torch.arange(-h, h + 1), torch.arange(-w, w + 1), indexing="ij")
    return y.double(), x.double()


def _of_distance(table: Tensor) -> str:
    """Return a name, such as "alibi (L1)" or "log_decay", if the bias of every head is such a function of distance, else ""."""
    y, x = _offsets(table)
    distances = {"euclidean": (y**2 + x**2).sqrt(), "L1": y.abs() + x.abs(), "squared": y**2 + x**2}
    seen = ~table.isnan().any(0)
    scale = table[:, seen].amax() - table[:, seen].amin()
    for name, distance in distances.items():
        at = distance[seen]
        columns = torch.stack((at, torch.ones_like(at)), -1)
        fit = torch.linalg.lstsq(columns, table[:, seen].T).solution
        if float((columns @ fit - table[:, seen].T).abs().max()) < SAME * float(scale):
            return f"alibi ({name})" if float(fit[0].max()) <= 0 else f"bias linear in the distance ({name}), growing"
    at, worst = distances["euclidean"][seen], 0.0
    for head in table[:, seen]:
        errors = []
        for b in torch.logspace(-3, 3, 241, dtype=torch.float64):
            columns = torch.stack((torch.log1p(b * at), torch.ones_like(at)), -1)
            errors.append(float((columns @ torch.linalg.lstsq(columns, head[:, None]).solution - head[:, None]).abs().max()))
        worst = max(worst, min(errors))
    if worst < 0.01 * float(scale):
        return "log_decay"
    return ""


def _separates(table: Tensor) -> bool:
    """Return whether a table [H, 2h-1, 2w-1], or its middle if offsets are unseen (NaN), is a function of dy plus one of dx."""
    if bool(table.isnan().any()):
        h, w = (n // 4 for n in table.shape[1:])
        table = table[:, h : -h or None, w : -w or None]
        if bool(table.isnan().any()):
            return False
    rest = table - table.mean(1, keepdim=True) - table.mean(2, keepdim=True) + table.mean((1, 2), keepdim=True)
    return float(rest.abs().max()) < SAME * float(table.max() - table.min()) and float(table.max() - table.min()) > 0


def _memory(rows: Bias, model: nn.Module) -> str:
    """Return how a parameter that holds the table counts offsets: "query - key", "key - query", or "" if none holds it."""
    heads, (height, width) = len(rows.by_offset), rows.by_offset.shape[1:]
    table = rows.by_offset.flatten(1)
    seen = ~table.isnan().any(0)
    for value in model.parameters():
        for both in (value, value.T) if value.dim() == 2 else ():
            if both.shape[0] == heads and both.shape[1] in (height * width, height * width + 3):
                held = both[:, : height * width].double()
                for name, one in (("query - key", held), ("key - query", held.flip(1))):
                    if torch.allclose(one[:, seen], table[:, seen], atol=1e-5):
                        return name
    return ""


def _embedding(first: Derived, all_sizes: list[Derived]) -> Identity:
    """Return the identity of an embedding: "sincos", or "absolute" with the first rule that resamples it (no common error)."""
    if single_axis(first.found):
        return Identity(first.found.where, "sincos", {})
    same = [one.how for one in all_sizes if one.found.where == first.found.where and one.how is not None]
    rules = [how.rule for how in same if how.kind in ("right", "centers") and how.rule != "unchanged"]
    return Identity(first.found.where, "absolute", {"resampled": rules[0]} if rules else {})
