"""`diagnose`: the effects of other image sizes on position in any model, found without training and without data.

Resampled tables, coordinates normalized by the window and angles scaled to the grid give two tokens at the same distance
another bias than in training, without an error. vitrel's encodings are compared by their terms, timm's modules by their tables,
MLPs and rotary embeddings.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import PatchEmbed, to_2tuple
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
from vitrel.common.tables import aligned
from vitrel.grid import Grid
from vitrel.inspect.any_model import (
    ModelAtSize,
    StageWindows,
    at_size,
    checked_size,
    coordinate_bias,
    model_name,
    patch_grid,
    shared_offsets,
    trained_size,
)
from vitrel.inspect.footprint import Leaks, leaks_by_block
from vitrel.models.backbone import Backbone
from vitrel.models.create import create_model
from vitrel.ops.reference import rows_by_offset
from vitrel.position import PositionEncoding
from vitrel.position.terms import Terms, parts_of

_ROUNDING = 1e-4  # changes of at most this are rounding


class BiasChange(NamedTuple):
    """Layers in which the bias or rotation at an offset differs from that at the trained size.

    A "bias" is any row of a table (also of query, key and value tables); a "rotation" is compared by its angles from the first
    token to the neighbors below and right.
    """

    what: str  # "bias" | "rotation"
    layers: int
    largest: float  # largest change: of a bias in units of its standard deviation, of a rotation in radians


class StageDiagnosis(NamedTuple):
    """The blocks of one stage: those on one grid with one window."""

    block: str  # the one whose tokens see most across a border, or the last examined; the first if none was
    windows: StageWindows
    leaks: Leaks | None  # of that block; None: its windows are strided, or no block of the stage could run alone
    padded: float  # share of tokens that attend to padding, 0 to 1, in the block where it is largest
    frozen: bool  # several windows that no block shifts, although other blocks of the model do shift

    @property
    def leaking(self) -> float:
        """Share of tokens that see across a border, 0 to 1."""
        return 0.0 if self.leaks is None else float(self.leaks.across.float().mean())

    def to_dict(self) -> dict[str, Any]:
        """The fields and properties as numbers, strings, tuples and dictionaries, without the maps of tokens."""
        windows = self.windows._asdict() | {"padded_share": self.windows.padded_share}
        rows, columns = ((), ()) if self.leaks is None else (self.leaks.rows, self.leaks.columns)
        return {
            "block": self.block, "windows": windows, "examined": self.leaks is not None, "rows": rows, "columns": columns,
            "leaking": self.leaking, "padded": self.padded, "frozen": self.frozen,
        }  # fmt: skip


@dataclass(frozen=True)
class SizeDiagnosis:
    """Effects of images of `size` (h, w) pixels on position in a model; with a `refusal` the other fields have no meaning."""

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
    """Effects of other image sizes than `trained`, (h, w) pixels, on position in `model`; `print` shows them as a table."""

    model: str
    trained: Size
    sizes: tuple[SizeDiagnosis, ...]

    @property
    def findings(self) -> dict[str, str]:
        """{kind: sentence} of what was found.

        The kinds are "refused", "replaced", "bias", "unseen", "borders", "padding", "frozen" and "unread".
        """
        found = {kind: [(line, text) for line in self.sizes if (text := tell(line))] for kind, (_, tell) in _FINDINGS.items()}
        return {
            kind: _FINDINGS[kind][0].format(at=self._at(lines), text=lines[-1][1]) for kind, lines in found.items() if lines
        }

    def _at(self, affected: Sequence[tuple[SizeDiagnosis, str]]) -> str:
        sizes = format_size(affected[-1][0].size)
        return sizes if len(affected) == 1 else f"{len(affected)} of {len(self.sizes)} sizes, the last {sizes}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as numbers, strings, tuples and dictionaries, without the maps of tokens, and the findings."""
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
            lines.append("? not examined: strided windows (/), or blocks that cannot run alone")
        elif windowed and not {"borders", "padding"} & self.findings.keys():
            lines.append("no token sees across a border or attends to padding")
        return "\n".join(lines)


def diagnose(
    model: str | nn.Module,
    size: int | Size | Sequence[int | Size],
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Diagnosis:
    """Diagnose position in a model at several image sizes: replaced values, changed biases, leaks and padding.

    A size that the model does not take is a `refusal` in the result. The model is brought to a size by
    `vitrel.inspect.any_model.at_size`, and is not changed.

    Args:
        model: a model, or a name for timm.create_model, which gets random weights.
        size: of the images in pixels: an int, (h, w), or a list of them.
        progress: called before each size, for example with "test_vit at 160x160".
        options: of timm.create_model for a name: `dynamic_img_size=True` is another way in which many models of timm take a
            size.

    Raises:
        ValueError: the name is unknown, a size is not positive whole numbers, or the model is on the meta device.
        TypeError: options are given with a model, or are not those of the named one.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    sizes = [checked_size(one) for one in (size if isinstance(size, list) else [size])]
    if isinstance(model, str):
        model = _created(model, **options)
    elif options:
        raise TypeError(f"options {', '.join(options)} are for a name; here the model is already built")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{model_name(model)} is on the meta device and has no values to examine; pass its name instead")
    lines = []
    for one in sizes:
        if progress is not None:
            progress(f"{model_name(model)} at {format_size(one)}")
        lines.append(_at_one_size(model, one))
    return Diagnosis(model_name(model), trained_size(model), tuple(lines))


def _created(name: str, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = create_model(name, **options).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)  # resampling does not change a table of zeros
    return model


def _at_one_size(model: nn.Module, size: Size) -> SizeDiagnosis:
    try:
        found = at_size(model, size)
    except ValueError as error:
        return SizeDiagnosis(size, str(error))
    encodings = found.trace.encodings
    changes = _own_bias_changes(encodings)
    unseen = max((encoding.unseen(grid) for encoding, grid in encodings), default=None)
    saturated = max((encoding.saturated(grid) for encoding, grid in encodings), default=None)
    if not isinstance(model, Backbone):
        grids = (patch_grid(model, one) or (1, 1) for one in (trained_size(model), size))
        changes += _timm_bias_changes(model, found.model, *grids)
    embed, unread = getattr(found.model, "patch_embed", None), (0, 0)
    if isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        unread = tuple(n % p for n, p in zip(size, embed.patch_size, strict=True))
    stages = tuple(_stages(found))
    return SizeDiagnosis(size, "", found.resampled, changes, unseen, saturated, stages, unread, found.trace.attends)


@torch.no_grad()
def _own_bias_changes(encodings: Iterable[tuple[PositionEncoding, Grid]]) -> tuple[BiasChange, ...]:
    """Changes in vitrel's encodings between their training grid and the grid paired with each (see `Trace.encodings`).

    At most one change per kind, with the number of layers and the largest change. What encodings add to tokens, and
    temperatures, are not compared.
    """
    return _summed(
        change
        for encoding, grid in encodings
        for part in parts_of(encoding)
        if part.grid is not None and part.grid[:2] != grid[:2]
        for change in _terms_changes(part(part.grid), part(grid), part.grid, grid)
    )


@torch.no_grad()
def _timm_bias_changes(before: nn.Module, after: nn.Module, old: Size, new: Size) -> tuple[BiasChange, ...]:
    """Changes in timm's modules from `before` to `after`, one model at two sizes with patch grids `old` and `new` (h, w)."""
    changes = []
    for name, module in before.named_modules():
        if isinstance(module, PositionEncoding):
            continue
        other = after.get_submodule(name)
        for pair in (
            (coordinate_bias(module, module), coordinate_bias(module, other)),
            (_timm_table(module), _timm_table(other)),
        ):
            if pair[0] is not None:
                changes.append(BiasChange("bias", 1, _relative_change(*pair)))
        if hasattr(module, "get_embed") and old != new:
            angles = [_neighbors(_rotation(m, grid).chunk(2, -1), grid) for m, grid in ((module, old), (other, new))]
            changes.append(BiasChange("rotation", 1, _angle_change(*angles)))
    return _summed(changes)


def _terms_changes(a: Terms, b: Terms, old: Grid, new: Grid) -> Iterator[BiasChange]:
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


def _timm_table(module: nn.Module) -> Tensor | None:
    """The bias table [2h-1, 2w-1, H] of a module of timm; None if it has none."""
    table = getattr(module, "relative_position_bias_table", None)
    if not isinstance(table, Tensor):
        return None
    if table.dim() == 3:
        return table.movedim(0, -1)
    h, w = to_2tuple(module.window_size)
    return table[: (2 * h - 1) * (2 * w - 1)].unflatten(0, (2 * h - 1, 2 * w - 1))


def _rotation(rope: nn.Module, grid: Size) -> Tensor:
    """Sines and cosines [..., h*w, 2D] of timm's rotary embedding on a grid."""
    embed = rope.get_embed(shape=list(grid))
    return embed if embed.shape[-2] == grid[0] * grid[1] else rope.get_embed()  # a module built for one grid ignores the shape


def _relative_change(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tables [..., 2h-1, 2w-1, D] at shared offsets, over the standard deviation of `a`."""
    old, new = shared_offsets(a, b)
    change = (old - new).abs().max()
    return float(change / a.std(correction=0)) if change > 0 else 0.0


def _neighbors(sin_and_cos: Sequence[Tensor], grid: Size) -> Tensor:
    """Angles [2, ..., D] from the first token to its neighbors below and right, from sines and cosines [..., h*w, D]."""
    sin, cos = (part.unflatten(-2, grid) for part in sin_and_cos)
    first, below, right = ((..., y, x, slice(None)) for y, x in ((0, 0), (min(1, grid[0] - 1), 0), (0, min(1, grid[1] - 1))))
    return torch.stack(
        [
            torch.atan2(sin[to] * cos[first] - cos[to] * sin[first], cos[to] * cos[first] + sin[to] * sin[first])
            for to in (below, right)
        ]
    )


def _angle_change(a: Tensor, b: Tensor) -> float:
    """Largest difference of angles, in radians, 0 to pi."""
    difference = torch.remainder(a - b + torch.pi, 2 * torch.pi) - torch.pi
    return float(difference.abs().max())


def _summed(changes: Iterable[BiasChange]) -> tuple[BiasChange, ...]:
    """One change per kind ("bias", "rotation"): the number of changes as `layers`, and the largest of them."""
    lines: dict[str, BiasChange] = {}
    for change in changes:
        if change.largest > _ROUNDING:
            total = lines.get(change.what, BiasChange(change.what, 0, 0.0))
            lines[change.what] = BiasChange(change.what, total.layers + 1, max(total.largest, change.largest))
    return tuple(lines.values())


def _stages(found: ModelAtSize) -> Iterator[StageDiagnosis]:
    blocks = found.trace.blocks
    shifts = any(any(block.shift or ()) for block in blocks)
    for line in found.windows:
        kind = line.grid, line.window, line.strided
        alike = [block for block in blocks if (block.grid, block.window, block.strided) == kind]
        several = any(s == 0 and n > m for s, n, m in zip(line.shift, line.grid, line.window or line.grid, strict=True))
        frozen = shifts and len(alike) > 1 and alike[0].shift is not None and several
        leaks = leaks_by_block(alike)
        # if none leaks, the last: shifted
        name = max(reversed(leaks), key=lambda name: int(leaks[name].across.sum()), default=alike[0].name)
        padded = max((float(other.padding.float().mean()) for other in leaks.values()), default=0.0)
        yield StageDiagnosis(name, line, leaks.get(name), padded, frozen)


def _table(sizes: Sequence[SizeDiagnosis]) -> list[str]:
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
    """Cells of a stage: tokens, window, shift, share of tokens that see across a border, share that attend to padding."""
    windows = stage.windows
    if windows.window is None:
        return _short(windows.grid), "global", "-", "-", "-"
    shift = _short(windows.shift) if any(windows.shift) else "-"
    shares = "??" if stage.leaks is None else [_percent(share) if share else "-" for share in (stage.leaking, stage.padded)]
    return _short(windows.grid), _short(windows.window) + "/" * windows.strided, shift, shares[0], shares[1]


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
    return f"{_percent(worst.leaking)} of stage {number}, in {worst.block}: {lines}"


def _padded(line: SizeDiagnosis) -> str:
    number, share = max(((n, s.padded) for n, s in enumerate(line.stages, 1)), key=lambda one: one[1], default=(0, 0.0))
    return f"{_percent(share)} of stage {number}" if share else ""


def _frozen(line: SizeDiagnosis) -> str:
    return ", ".join(f"stage {number}" for number, stage in enumerate(line.stages, 1) if stage.frozen)


def _unread(line: SizeDiagnosis) -> str:
    return f"{line.unread[0]} rows and {line.unread[1]} columns" if any(line.unread) else ""


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
    """Sorted numbers with runs shortened: 0, 5, 6, 7 -> "0, 5-7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _short(pair: Size) -> str:
    return str(pair[0]) if pair[0] == pair[1] else format_size(pair)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
