"""`diagnose`: what other image sizes do to position in any model, found without training and without data.

Resampled tables, coordinates normalized by the window and angles scaled to the grid give two tokens at the same distance
another bias than in training, without an error. vitrel's encodings are compared by their terms, other models by the biases and
rotations that enter their attention (`vitrel.inspect.any_model.trace`).
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size, short_size
from vitrel.common.tables import aligned
from vitrel.grid import Grid
from vitrel.inspect.any_model import (
    REFUSALS,
    LocatedCall,
    ModelAtSize,
    StageWindows,
    Trace,
    at_size,
    checked_size,
    examinable,
    model_name,
    shared_offsets,
    trace,
    trained_size,
)
from vitrel.inspect.leaks import Leaks, find_leaks
from vitrel.inspect.recorder import rotates
from vitrel.models.backbone import Backbone
from vitrel.ops.reference import rows_by_offset
from vitrel.position import PositionEncoding
from vitrel.position.terms import Terms, parts_of

_ROUNDING = 1e-4  # changes of at most this are rounding


class BiasChange(NamedTuple):
    """A number of layers whose bias or rotation at an offset differs from that at the trained size.

    A "bias" is any row of a table (also of query, key and value tables). A "rotation" is compared by its angles between the
    first token and its neighbors below and right. `layers` counts each table and each shared encoding once. `largest` is the
    largest change: of a bias in standard deviations of its values at the trained size, of a rotation in radians.
    """

    what: str  # "bias" | "rotation"
    layers: int
    largest: float  # largest change: of a bias in units of its standard deviation, of a rotation in radians


class StageDiagnosis(NamedTuple):
    """Leaks and padding in one stage: the blocks that have the same grid, window and kind (strided or not).

    `layer` is the path of the attention whose tokens see most across a border, and `leaks` are its `Leaks`, None if it has no
    windows of neighbors. `padded` is the share of tokens that attend to padding, in the layer where it is largest. `frozen` is
    True if no block of several shifts its windows along an axis with several, although other blocks of the model shift theirs.
    """

    layer: str  # the attention whose tokens see most across a border, or the last examined; the first if none was
    windows: StageWindows
    leaks: Leaks | None  # of that layer; None: attention is global, or its windows are strided
    padded: float  # share of tokens that attend to padding, 0 to 1, in the layer where it is largest
    frozen: bool  # several windows that no block shifts, although other blocks of the model do shift

    @property
    def leaking(self) -> float:
        """Share of the tokens of `layer` that attend to the opposite border of the image, 0 to 1; 0 without `leaks`."""
        return 0.0 if self.leaks is None else float(self.leaks.across.float().mean())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and properties as plain values.

        Of `leaks` these are "rows" and "columns", () where it is None, and "examined", False where it is None.
        """
        windows = self.windows._asdict() | {"padded_share": self.windows.padded_share}
        rows, columns = ((), ()) if self.leaks is None else (self.leaks.rows, self.leaks.columns)
        return {
            "layer": self.layer, "windows": windows, "examined": self.leaks is not None, "rows": rows, "columns": columns,
            "leaking": self.leaking, "padded": self.padded, "frozen": self.frozen,
        }  # fmt: skip


@dataclass(frozen=True)
class SizeDiagnosis:
    """What images of `size` (h, w) pixels do to position in a model; with a `refusal` the other fields have no meaning.

    `unseen` is the share of offsets that no pair of training tokens had, in the layer where it is largest, None if unknown;
    `saturated` the share of offsets that are unseen but read a trained edge row, None without encodings of vitrel. `unread` are
    the rows below and columns right of all patches, in pixels. `attends` is False if the model has no attention.
    """

    size: Size
    refusal: str = ""  # why the model does not take the size, or ""
    resampled: dict[str, int] = field(default_factory=dict)  # {name and policy: number of values that are replaced}
    changes: tuple[BiasChange, ...] = ()
    unseen: float | None = None  # share of offsets that no pair of training tokens had; None: the model has no vitrel encoding
    saturated: float | None = None  # the part of `unseen` that reads a trained edge row or far bucket
    stages: tuple[StageDiagnosis, ...] = ()
    unread: Size = (0, 0)  # rows below and columns at the right of the image that no patch contains
    attends: bool = True  # False: the model has no attention; True without `stages`: the grids of its attention are unknown


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose` for a model made for `trained` (h, w) pixels; `print` shows it as a table with sentences."""

    model: str
    trained: Size
    sizes: tuple[SizeDiagnosis, ...]

    @property
    def findings(self) -> dict[str, str]:
        """{kind: sentence} of all that was found; a sentence says at how many sizes, and describes the last of them.

        The kinds are "refused", "replaced", "bias", "unseen", "borders" (tokens attend across them), "padding" (tokens attend
        to it), "frozen" (windows that never shift) and "unread" (pixels that no patch contains).
        """
        found = {kind: [(line, text) for line in self.sizes if (text := tell(line))] for kind, (_, tell) in _FINDINGS.items()}
        return {
            kind: _FINDINGS[kind][0].format(at=self._at(lines), text=lines[-1][1]) for kind, lines in found.items() if lines
        }

    def _at(self, affected: Sequence[tuple[SizeDiagnosis, str]]) -> str:
        """Return the size of a finding, of several "2 of 3 sizes, the last 448x448"; `affected` has their (diagnosis, text)."""
        sizes = format_size(affected[-1][0].size)
        return sizes if len(affected) == 1 else f"{len(affected)} of {len(self.sizes)} sizes, the last {sizes}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, the findings and the versions of timm and torch as plain values, without the maps of tokens."""
        sizes = [
            vars(line) | {"changes": [c._asdict() for c in line.changes], "stages": [s.to_dict() for s in line.stages]}
            for line in self.sizes
        ]
        versions = {"timm": timm.__version__, "torch": torch.__version__}
        about = {"model": self.model, "trained": self.trained, "versions": versions, "sizes": sizes}
        return about | {"findings": self.findings}

    def __str__(self) -> str:
        lines = [f"{self.model}, made for {format_size(self.trained)} px (timm {timm.__version__}, torch {torch.__version__})"]
        lines += [*_table(self.sizes), "", *(text for kind, text in self.findings.items() if kind != "refused")]
        taken = [line for line in self.sizes if not line.refusal]
        windowed = [stage for line in taken for stage in line.stages if stage.windows.window]
        if not self.findings:
            lines.append("found nothing: no value is replaced, no bias changes")
        if taken and not any(line.attends for line in taken):
            lines.append("the model has no attention")
        elif any(line.attends and not line.stages for line in taken):
            lines.append("? not examined: attention on tokens whose grid is unknown; its windows may leak or hold padding")
        elif any(stage.leaks is None for stage in windowed):
            lines.append("? not examined: strided windows (/)")
        elif windowed and not {"borders", "padding"} & self.findings.keys():
            lines.append("no token sees across a border or attends to padding")
        return "\n".join(lines)


def diagnose(
    model: str | nn.Module,
    size: int | Size | Sequence[int | Size] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Diagnosis:
    """Diagnose position in a model at several image sizes: replaced values, changed biases, leaks and padding.

    The model is brought to a size by `vitrel.inspect.any_model.at_size`, and is not changed. For a size that it does not take,
    the result has a `refusal`. Tables of zeros, as they are initialized, are filled with noise in a copy, since resampling does
    not change zeros.

    Args:
        model: any model, or a name or import path as of `vitrel.check`, which gets random weights.
        size: of the images in pixels: an int, (h, w), or a list of them; None: the size that the model was built for, one and a
            half and two times it, rounded down to whole patches.
        progress: called before each size, for example with "test_vit at 160x160".
        options: of timm.create_model for a name: `dynamic_img_size=True` is another way in which many models of timm take a
            size.

    Raises:
        ValueError: the name is unknown, a size is not positive whole numbers, or the model is on the meta device.
        TypeError: options are given with a model, or are not those of the named one.
    """
    sizes = None if size is None else [checked_size(one) for one in (size if isinstance(size, list) else [size])]
    model = examinable(model, **options)
    trained, before, lines = trained_size(model), None, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, about the code of other libraries
        for one in sizes or _default_sizes(model):
            if progress is not None:
                progress(f"{model_name(model)} at {format_size(one)}")
            try:
                found = at_size(model, one)
            except ValueError as error:
                lines.append(SizeDiagnosis(one, str(error)))
                continue
            if before is None and not isinstance(model, Backbone):
                with contextlib.suppress(*REFUSALS):
                    before = found.trace if found.model is model and one == trained else trace(model, trained)
            lines.append(_at_one_size(found, one, before))
    return Diagnosis(model_name(model), trained, tuple(lines))


def _default_sizes(model: nn.Module) -> list[Size]:
    """Return the size that a model was built for, one and a half and two times it, rounded down to whole patches."""
    patch = next((m.stride for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == m.kernel_size), (1, 1))
    native = trained_size(model)
    return [tuple(max(1, int(n * f) // p) * p for n, p in zip(native, patch, strict=True)) for f in (1, 1.5, 2)]  # type: ignore[misc]


def _at_one_size(found: ModelAtSize, size: Size, before: Trace | None) -> SizeDiagnosis:
    """Return what images of `size` (h, w) pixels do to a model that was brought to them, `found`.

    `before` is the trace at the size that the model was built for; None for a vitrel model, or if that size was refused.
    """
    encodings = found.trace.encodings
    changes = _own_bias_changes(encodings)
    unseen = [encoding.unseen(grid) for encoding, grid in encodings]
    saturated = max((encoding.saturated(grid) for encoding, grid in encodings), default=None)
    if before is not None:
        theirs, more = _changes(before.calls, found.trace.calls)
        changes, unseen = _summed([*changes, *theirs]), [*unseen, *more]
    embed, unread = getattr(found.model, "patch_embed", None), (0, 0)
    if isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        unread = tuple(n % p for n, p in zip(size, embed.patch_size, strict=True))
    stages = tuple(_stages(found))
    most = max(unseen, default=None)
    return SizeDiagnosis(size, "", found.resampled, changes, most, saturated, stages, unread, found.trace.attends)


@torch.no_grad()
def _own_bias_changes(encodings: Iterable[tuple[PositionEncoding, Grid]]) -> tuple[BiasChange, ...]:
    """Return how vitrel's encodings change between their training grid and the grid that each is paired with.

    There is at most one change per kind ("bias", "rotation"), as of `_summed`. What encodings add to tokens, and temperatures,
    are not compared.
    """
    return _summed(
        change
        for encoding, grid in encodings
        for part in parts_of(encoding)
        if part.grid is not None and part.grid[:2] != grid[:2]
        for change in _terms_changes(part(part.grid), part(grid), part.grid, grid)
    )


def _changes(before: Sequence[LocatedCall], after: Sequence[LocatedCall]) -> tuple[list[BiasChange], list[float]]:
    """Return how bias and rotation change from a model's calls at one size to those at another, and shares of unseen offsets.

    Calls are paired in order; pairs of other names, or without a grid, are skipped. A share, 0 to 1, is given for each pair
    with a bias or rotation that is the same at the offsets of both sizes: that of the offsets at the other size that the first
    does not have, so that no pair of tokens has trained them.
    """
    changes, unseen = [], []
    for old, new in zip(before, after, strict=False):
        if old.grid is None or new.grid is None or old.name != new.name:
            continue
        found = []
        if old.bias is not None and new.bias is not None:
            found.append(BiasChange("bias", 1, _relative_change(old.bias, new.bias)))
        if old.rotation and new.rotation:
            angles = _angles(old), _angles(new)
            if angles[0] is not None and angles[1] is not None:
                found.append(BiasChange("rotation", 1, _angle_change(*angles)))
        changes += found
        if found and all(change.largest <= _ROUNDING for change in found):
            native, at = (call.window or call.grid[:2] for call in (old, new))
            trained = [(2 * min(n, m) - 1) / (2 * m - 1) for n, m in zip(native, at, strict=True)]
            unseen.append(1 - trained[0] * trained[1])
    return changes, unseen


def _angles(call: LocatedCall) -> Tensor | None:
    """Return the angles of `_neighbors` from a call's rotation, not empty; None without sines or cosines for its whole grid."""
    grid = call.window or call.grid[:2]
    parts = {rotates(part): part for part in call.rotation}
    first = call.rotation[0]
    sin, cos = (first.imag, first.real) if first.is_complex() else (parts.get(0.0), parts.get(1.0))
    if sin is None or cos is None or cos.shape[-2] < grid[0] * grid[1] or sin.shape != cos.shape:
        return None
    return _neighbors([part[..., -grid[0] * grid[1] :, :].float() for part in (sin, cos)], grid)


def _terms_changes(a: Terms, b: Terms, old: Grid, new: Grid) -> Iterator[BiasChange]:
    """Yield the change of each table and of the rotation from terms `a` on the grid `old` to terms `b` on the grid `new`."""
    for first, second in zip(a.tables, b.tables, strict=True):
        pairs = [(x, y) for x, y in zip(first[1:], second[1:], strict=True) if x is not None]
        pairs = [(x[-1], y[-1]) if isinstance(x, tuple) else (x, y) for x, y in pairs]  # gated: (weights, rows)
        pairs = [(x.unsqueeze(-1), y.unsqueeze(-1)) if x.dim() == 2 else (x, y) for x, y in pairs]  # biases: [H, R]
        rows = ((rows_by_offset(x, first.axis, old), rows_by_offset(y, first.axis, new)) for x, y in pairs)
        yield BiasChange("bias", 1, max(_relative_change(x, y) for x, y in rows))
    if a.rotary is not None:
        angles = [
            _neighbors([part[..., grid.prefix :, :] for part in terms.rotary[::-1]], grid[:2])
            for terms, grid in ((a, old), (b, new))
        ]
        yield BiasChange("rotation", 1, _angle_change(*angles))


def _relative_change(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tables [..., 2h-1, 2w-1, D] at shared offsets, in standard deviations of `a`."""
    old, new = shared_offsets(a, b)
    change = (old - new).abs().nan_to_num().max()
    return float(change / a[~a.isnan()].std(correction=0)) if change > 0 else 0.0


def _neighbors(sin_and_cos: Sequence[Tensor], grid: Size) -> Tensor:
    """Return the angles (radians) from the first token to that below and that right of it, stacked as [2, ..., D].

    They follow from sines and cosines [..., h*w, D] of tokens on an h x w `grid`.
    """
    sin, cos = (part.unflatten(-2, grid) for part in sin_and_cos)
    first, below, right = ((..., y, x, slice(None)) for y, x in ((0, 0), (min(1, grid[0] - 1), 0), (0, min(1, grid[1] - 1))))
    return torch.stack(
        [
            torch.atan2(sin[to] * cos[first] - cos[to] * sin[first], cos[to] * cos[first] + sin[to] * sin[first])
            for to in (below, right)
        ]
    )


def _angle_change(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors of angles, in radians, 0 to pi."""
    difference = torch.remainder(a - b + torch.pi, 2 * torch.pi) - torch.pi
    return float(difference.abs().max())


def _summed(changes: Iterable[BiasChange]) -> tuple[BiasChange, ...]:
    """Return one change for each kind that changes beyond rounding: the number of such changes as `layers`, and the largest."""
    lines: dict[str, BiasChange] = {}
    for change in changes:
        if change.largest > _ROUNDING:
            total = lines.get(change.what, BiasChange(change.what, 0, 0.0))
            lines[change.what] = BiasChange(change.what, total.layers + 1, max(total.largest, change.largest))
    return tuple(lines.values())


def _stages(found: ModelAtSize) -> Iterator[StageDiagnosis]:
    """Yield the diagnosis of each stage of a model that was brought to a size, in the order of `found.windows`."""
    calls = [call for call in found.trace.calls if call.grid is not None]
    shifts = any(any(call.shift) for call in calls)
    for line in found.windows:
        kind = line.grid, line.window, line.strided
        alike = [call for call in calls if (call.grid[:2], call.window, call.strided) == kind]
        several = any(s == 0 and n > m for s, n, m in zip(line.shift, line.grid, line.window or line.grid, strict=True))
        leaks = {call.name: leak for call in _different(alike) if (leak := find_leaks(call)) is not None}
        # if none leaks, the last: shifted
        name = max(reversed(leaks), key=lambda name: int(leaks[name].across.sum()), default=alike[0].name)
        padded = max((float(other.padding.float().mean()) for other in leaks.values()), default=0.0)
        yield StageDiagnosis(name, line, leaks.get(name), padded, shifts and len(alike) > 1 and several and not line.strided)


def _different(calls: Sequence[LocatedCall]) -> list[LocatedCall]:
    """Return the calls without those that equal an earlier one in `tokens` and in the pairs visible to any head."""
    kinds: list[LocatedCall] = []
    for call in calls:
        for other in kinds:
            masks = call.visible, other.visible
            same = masks[0] is masks[1] or (None not in masks and torch.equal(*(mask.any(1) for mask in masks)))
            if torch.equal(call.tokens, other.tokens) and same:
                break
        else:
            kinds.append(call)
    return kinds


def _table(sizes: Sequence[SizeDiagnosis]) -> list[str]:
    """Return the lines of the table that `print` shows: the titles, and one line for each size, also for those refused."""
    lines = [["size", "replaced", "bias", "tokens", "windows", "shift", "see across", "attend to padding"]]
    for line in sizes:
        if line.refusal:
            lines.append([format_size(line.size), f"refused: {line.refusal}", *[""] * (len(lines[0]) - 2)])
            continue
        replaced = f"{sum(line.resampled.values()):,}" if line.resampled else "-"
        unknown = ("?",) * 5 if line.attends else ("no attention", *("-",) * 4)
        columns = [_stage_cells(stage) for stage in line.stages] or [unknown]
        cells = (" ".join(cells) for cells in zip(*columns, strict=True))
        lines.append([format_size(line.size), replaced, "changes" if line.changes else "-", *cells])
    plain = [line for line in lines if not line[1].startswith("refused")]
    return [f"  {line}" for line in aligned(lines, like=plain)]


def _stage_cells(stage: StageDiagnosis) -> tuple[str, str, str, str, str]:
    """Return a stage's cells as text: tokens, window, shift, share seeing across a border, share attending to padding."""
    windows = stage.windows
    if windows.window is None:
        return short_size(windows.grid), "global", "-", "-", "-"
    shift = short_size(windows.shift) if any(windows.shift) else "-"
    shares = "??" if stage.leaks is None else [_percent(share) if share else "-" for share in (stage.leaking, stage.padded)]
    return short_size(windows.grid), short_size(windows.window) + "/" * windows.strided, shift, shares[0], shares[1]


def _replaced(line: SizeDiagnosis) -> str:
    return "; ".join(f"{policy}, {n:,} values" for policy, n in line.resampled.items())


def _other_bias(line: SizeDiagnosis) -> str:
    units = {"bias": "of its standard deviation", "rotation": "radians"}
    return "; ".join(f"{c.what} by up to {c.largest:.2g} {units[c.what]}, layers: {c.layers}" for c in line.changes)


def _unseen(line: SizeDiagnosis) -> str:
    if not line.unseen:
        return ""
    edge = f" ({_percent(line.saturated)} read a trained edge)" if line.saturated else ""
    return _percent(line.unseen) + edge


def _across(line: SizeDiagnosis) -> str:
    number, worst = max(enumerate(line.stages, 1), key=lambda stage: stage[1].leaking, default=(0, None))
    if worst is None or worst.leaks is None or not worst.leaking:
        return ""
    named = zip(("rows", "columns"), (worst.leaks.rows, worst.leaks.columns), worst.windows.grid, strict=True)
    lines = "; ".join(f"{name} {_runs(leaking)} of {n}" for name, leaking, n in named if leaking)
    return f"{_percent(worst.leaking)} of stage {number}, in {worst.layer}: {lines}"


def _padded(line: SizeDiagnosis) -> str:
    number, share = max(((n, s.padded) for n, s in enumerate(line.stages, 1)), key=lambda one: one[1], default=(0, 0.0))
    return f"{_percent(share)} of stage {number}" if share else ""


def _frozen(line: SizeDiagnosis) -> str:
    return ", ".join(f"stage {number}" for number, stage in enumerate(line.stages, 1) if stage.frozen)


def _unread(line: SizeDiagnosis) -> str:
    return f"rows: {line.unread[0]}, columns: {line.unread[1]}" if any(line.unread) else ""


_FINDINGS: dict[str, tuple[str, Callable[[SizeDiagnosis], str]]] = {  # {kind: (sentence, the text of a size or "")}
    "refused": ("refused at {at}: {text}", lambda line: line.refusal),
    "replaced": ("replaced at {at}: {text}", _replaced),
    "bias": ("another bias or rotation at the same offset at {at}: {text}", _other_bias),
    "unseen": ("offsets that training did not have at {at}: {text}", _unseen),
    "borders": ("tokens see across opposite borders at {at}: {text}", _across),
    "padding": ("tokens attend to padding at {at}: {text}", _padded),
    "frozen": ("windows that never shift at {at}: {text}", _frozen),
    "unread": ("pixels that no patch contains at {at}: {text}", _unread),
}


def _runs(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text in which runs, also of two, are shortened: 0, 5, 6, 7 -> "0, 5-7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
