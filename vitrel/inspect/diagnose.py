"""`diagnose`: the effects of other image sizes on position in any model, found without training and without data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from timm.layers import PatchEmbed
from torch import nn

from vitrel.common.modules import evaluating
from vitrel.common.sizes import Size, format_size
from vitrel.common.tables import aligned
from vitrel.inspect.any_model import (
    REFUSALS,
    ModelAtSize,
    StageWindows,
    TracedBlock,
    at_size,
    changed_for_size,
    checked_size,
    model_name,
    patch_grid,
    reason,
    refusal,
    replaced_parameters,
    stays_itself,
    trained_size,
)
from vitrel.inspect.footprint import Leaks, leaks_by_block
from vitrel.inspect.position_changes import (
    BiasChange,
    IndependentValues,
    PositionChange,
    common_grids,
    independent_values,
    names_compared,
    own_bias_changes,
    timm_bias_changes,
    token_changes,
)
from vitrel.models.backbone import Backbone
from vitrel.models.create import create_model, on_meta


@dataclass(frozen=True)
class StageDiagnosis:
    """The blocks of one stage: those on one grid with one window.

    `block` names the block described: of those examined, the one whose tokens see most across a border, or the last if none
    does; the first of all if none was examined. `rows` and `columns` are those whose tokens see the opposite border;
    `row_pairs` and `column_pairs` count the pairs (query row, key row) and (query column, key column) across it.
    """

    block: str
    windows: StageWindows
    examined: bool  # False: the blocks could not run alone, and the fields below have no meaning
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    row_pairs: int = 0
    column_pairs: int = 0
    leaking: float = 0.0  # share of tokens that see across a border, 0 to 1
    padded: float = 0.0  # share of tokens that attend to padding, 0 to 1, in the block where it is largest
    frozen: bool = False  # several windows that no block shifts, although other blocks of the model do shift
    map: np.ndarray | None = field(default=None, compare=False, repr=False)  # [h, w]: 1 sees across, 2 padding, 3 both
    token: tuple[int, int] = (0, 0)  # (row, column) of the token that sees most across a border
    sees: np.ndarray | None = field(default=None, compare=False, repr=False)  # [h, w]: 1 seen by it, 2 across a border


@dataclass(frozen=True)
class SizeDiagnosis:
    """Effects of images of `size` (h, w) pixels on position in a model; with a `refusal` the other fields have no meaning."""

    size: Size
    refusal: str  # why the model does not take the size, or ""
    resampled: dict[str, int] = field(default_factory=dict)
    changes: tuple[BiasChange, ...] = ()
    stages: tuple[StageDiagnosis, ...] = ()
    unread: Size = (0, 0)  # rows below and columns at the right of the image that no patch contains
    positions: tuple[PositionChange, ...] = ()
    unexamined: tuple[str, ...] = ()  # names of values that could not be compared with the trained size
    attends: bool = True  # False: the model has no attention; True without `stages`: the grids of its attention are unknown


@dataclass(frozen=True)
class WayDiagnosis:
    """Results for one way to adapt a model to a size: "as built", "dynamic_img_size=True", "set_input_size()", "img_size=".

    `diagnose` joins ways with equal results into one, with their names joined by " or ".
    """

    way: str
    sizes: tuple[SizeDiagnosis, ...]
    graphs: int | str | None = None  # number of graphs of torch.compile for all sizes, or why it failed; None: not counted


@dataclass(frozen=True)
class Diagnosis:
    """Effects of other image sizes than `trained`, (h, w) pixels, on position in `model`; `print` shows them as a table."""

    model: str
    trained: Size
    versions: dict[str, str]
    ways: tuple[WayDiagnosis, ...]

    @property
    def findings(self) -> dict[str, dict[str, str]]:
        """{way: {kind: sentence}}, without ways that have no finding. The kinds are the keys of `_FINDINGS`."""
        return {way.way: kinds for way in self.ways if (kinds := _sentences(way.sizes))}

    @property
    def unexamined(self) -> dict[str, str]:
        """{way: sentence} naming the values that could not be examined; they may change although no finding says so."""
        texts = {way.way: _text_of(way.sizes, lambda line: line.unexamined, _not_examined) for way in self.ways}
        return {way: text for way, text in texts.items() if text}

    def to_dict(self) -> dict[str, Any]:
        """All fields as numbers, strings, lists and dictionaries, without the maps of tokens, and the findings."""
        plain = asdict(self, dict_factory=lambda items: {k: v for k, v in items if k not in ("map", "sees")})
        for way, diagnosis in zip(plain["ways"], self.ways, strict=True):
            for line, size in zip(way["sizes"], diagnosis.sizes, strict=True):
                line["changes"] = [change._asdict() for change in size.changes]
                line["positions"] = [change._asdict() for change in size.positions]
                for stage, result in zip(line["stages"], size.stages, strict=True):
                    stage["windows"] = result.windows._asdict() | {"padded_share": result.windows.padded_share}
        return _plain(plain) | {"findings": self.findings, "unexamined": self.unexamined}

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.model}, made for {format_size(self.trained)} px ({versions})"]
        for way in self.ways:
            lines += ["", f"{way.way}{_compiled(way)}", *_table(way.sizes)]
        lines += ["", *self._found()]
        windowed = [stage for way in self.ways for line in way.sizes for stage in line.stages if stage.windows.window]
        taken = [line for way in self.ways for line in way.sizes if not line.refusal]
        if taken and not any(line.attends for line in taken):
            lines.append("the model has no attention")
        elif any(line.attends and not line.stages for line in taken):
            lines.append("? not examined: attention on tokens whose grid is unknown; its windows may leak or hold padding")
        elif any(not stage.examined for stage in windowed):
            lines.append("? not examined: strided windows (/), or blocks that cannot run alone")
        elif windowed and not any({"borders", "padding"} & kinds.keys() for kinds in self.findings.values()):
            lines.append("no token sees across a border or attends to padding")
        return "\n".join(lines)

    def _found(self) -> Iterator[str]:
        if not self.findings and not self.unexamined:
            yield "found nothing: no value is replaced, no bias changes"
        for title, sentences in (
            ("found", {way: kinds.values() for way, kinds in self.findings.items()}),
            ("not examined", {way: [text] for way, text in self.unexamined.items()}),
        ):
            yield from [title] if sentences else []
            for way, texts in sentences.items():
                yield f"  {way}"
                yield from (f"    {text}" for text in texts)


def diagnose(
    model: str | nn.Module,
    size: int | Size | Sequence[int | Size],
    compile: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Diagnose position in a model at several image sizes: interpolated values, changed biases, leaks and padding.

    Values that cannot be examined are named in the result, and a size that the model does not take is a `refusal` in it.

    Args:
        model: a name for timm.create_model (with random weights, in every way in which timm can adapt it to a size), or a model
            (in the way of `vitrel.inspect.any_model.at_size`), which is not changed.
        size: of the images in pixels: an int, (h, w), or a list of them.
        compile: count the graphs of torch.compile over the sizes too, which takes seconds per size and clears the cache of
            torch.compile.
        progress: called with a line before each step that can take seconds, for example "test_vit at 160x160, as built:
            forward".

    Raises:
        ValueError: the name is unknown, a size is not positive whole numbers, or the model is on the meta device.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    sizes = [checked_size(one) for one in (size if isinstance(size, list) else [size])]
    if isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{model_name(model)} is on the meta device and has no values to examine; pass its name instead")
    named = isinstance(model, str)
    name = model if isinstance(model, str) else model_name(model)

    def step(text: str) -> None:
        if progress is not None:
            progress(f"{name}{text}")

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(model, str):
            step(": building")
        base = _created(model) if isinstance(model, str) else model
        trained = trained_size(base)
        reference = cache(lambda base: independent_values(base, trained))
        ways = [_way_diagnosis(way, trained, sizes, compile, named, reference, step) for way in _ways(model, base, step)]
    versions = {"timm": timm.__version__, "torch": torch.__version__}
    return Diagnosis(model_name(base), trained, versions, tuple(_merged(ways)))


def count_graphs(models: Iterable[tuple[nn.Module, Size]], before: Callable[[Size], None] = lambda size: None) -> int | str:
    """Number of graphs that torch.compile(dynamic=True) makes for images [2, C, h, w] of every (model, (h, w) in pixels).

    A model that occurs several times is compiled once and then called at its further sizes; no code is generated. If a call
    fails, "failed: " and the class of the exception are returned instead. The models run in eval mode and are left as they
    were; what torch.compile has cached is cleared before and after. before: called with each size in turn.
    """
    from torch._dynamo.testing import CompileCounter  # here, because importing torch._dynamo is slow

    counter = CompileCounter()
    compiled: dict[int, tuple[Callable, nn.Module]] = {}
    torch._dynamo.reset()
    with ExitStack() as modes:
        modes.callback(torch._dynamo.reset)
        for model, size in models:
            before(size)
            try:
                if id(model) not in compiled:
                    modes.enter_context(evaluating(model))
                    compiled[id(model)] = torch.compile(model, backend=counter, dynamic=True), model
                with torch.no_grad():
                    image = torch.zeros(2, getattr(model, "in_chans", 3), *size, device=next(model.parameters()).device)
                    compiled[id(model)][0](image)
            except Exception as error:  # forward and the compiler may raise anything
                return f"failed: {type(error).__name__}"
    return counter.frame_count


class _Way(NamedTuple):
    name: str
    base: nn.Module
    at: Callable[[Size], ModelAtSize]
    same_weights: bool  # True: the models for other sizes have the weights of `base`, resampled where needed


_Step = Callable[[str], None]  # reports the next step
_Positions = tuple[tuple[PositionChange, ...], tuple[str, ...]]  # changes, and names of values that cannot be examined
_Reference = Callable[[nn.Module], IndependentValues]  # a model's values at the size it was made for


def _ways(model: str | nn.Module, base: nn.Module, step: _Step) -> Iterator[_Way]:
    """The ways to adapt `model` to a size: for a name, every way that timm has; for a module, only that of `at_size`.

    base: the module itself, or the module created by that name.
    """
    if stays_itself(base):
        yield _Way("as built", base, lambda size: at_size(base, size), True)
    else:
        if isinstance(model, str) and _accepts(model, dynamic_img_size=True):
            step(", dynamic_img_size=True: building")
            dynamic = _created(model, dynamic_img_size=True)
            yield _Way("dynamic_img_size=True", dynamic, lambda size: at_size(dynamic, size), True)
        yield _Way("set_input_size()", base, lambda size: at_size(base, size), True)
    if isinstance(model, str) and not isinstance(base, Backbone) and _accepts(model, img_size=trained_size(base)):

        def built(size: Size) -> ModelAtSize:
            return changed_for_size(base, timm.create_model(model, img_size=size).eval(), size, values=False)

        yield _Way("img_size=", base, built, False)


def _created(name: str, **keywords: bool) -> nn.Module:
    model = create_model(name, **keywords).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)  # resampling does not change a table of zeros
    return model


def _accepts(name: str, **arguments) -> bool:
    try:
        with on_meta():
            timm.create_model(name, **arguments)
    except TypeError:
        return False
    return True


def _way_diagnosis(
    way: _Way, trained: Size, sizes: Sequence[Size], compile: bool, named: bool, reference: _Reference, step: _Step
) -> WayDiagnosis:
    lines, models = [], []
    for size in sizes:
        step(f" at {format_size(size)}, {way.name}: forward")
        try:
            found = way.at(size)
            positions = _positions(way, found.model, trained, size, reference)
        except REFUSALS as error:
            notes = [] if named else getattr(error, "__notes__", [])  # another way to build it is among those of a name
            lines.append(SizeDiagnosis(size, refusal="; ".join([reason(error), *notes])))
            continue
        step(f" at {format_size(size)}, {way.name}: windows")
        lines.append(_size_diagnosis(way, found, trained, size, positions))
        models += [(found.model, size)] if compile else []
    if not compile:
        return WayDiagnosis(way.name, tuple(lines))
    graphs = count_graphs(models, lambda size: step(f" at {format_size(size)}, {way.name}: torch.compile"))
    return WayDiagnosis(way.name, tuple(lines), graphs)


def _positions(way: _Way, model: nn.Module, trained: Size, size: Size, reference: _Reference) -> _Positions:
    """Changes of values at the same token from `trained` to `size`, and names of values that cannot be examined.

    Both are empty for vitrel's models and at the trained size. ValueError if a table is too short for the size.
    """
    if isinstance(model, Backbone) or size == trained:
        return (), ()
    replaced = replaced_parameters(way.base, model, way.same_weights)
    reported = replaced | names_compared(way.base, *_patches(way, trained, size))
    instead = {} if way.same_weights else {name: v for name, v in way.base.named_parameters() if name not in replaced}
    try:
        before = reference(way.base)
    except REFUSALS as error:
        return (), (f"forward at {format_size(trained)} ({reason(error)})",)
    try:
        after = independent_values(model, size, reported, instead)
    except IndexError as error:  # a table shorter than the grid; a trace on the meta device does not notice
        raise refusal(model, size, error) from error
    except REFUSALS as error:
        return (), (f"forward ({reason(error)})",)
    return token_changes(before, after, common_grids(model, trained, size))


def _patches(way: _Way, *sizes: Size) -> list[Size]:
    return [patch_grid(way.base, size) or (1, 1) for size in sizes]


def _size_diagnosis(way: _Way, found: ModelAtSize, trained: Size, size: Size, positions: _Positions) -> SizeDiagnosis:
    changed = own_bias_changes(found.trace.encodings)
    if not isinstance(found.model, Backbone):
        old, new = _patches(way, trained, size)
        changed += timm_bias_changes(way.base, found.model, old, new, tables=way.same_weights)
    embed, unread = getattr(found.model, "patch_embed", None), (0, 0)
    if isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        unread = tuple(n % p for n, p in zip(size, embed.patch_size, strict=True))
    stages, attends = tuple(_stages(found)), found.trace.attends
    return SizeDiagnosis(size, "", found.resampled, changed, stages, unread, *positions, attends)


def _stages(found: ModelAtSize) -> Iterator[StageDiagnosis]:
    blocks = found.trace.blocks
    shifts = any(any(block.shift or ()) for block in blocks)
    for line in found.windows:
        kind = line.grid, line.window, line.strided
        alike = [block for block in blocks if (block.grid, block.window, block.strided) == kind]
        yield _stage_diagnosis(line, alike, leaks_by_block(alike), shifts)


def _stage_diagnosis(
    line: StageWindows, blocks: Sequence[TracedBlock], found: Mapping[str, Leaks], shifts: bool
) -> StageDiagnosis:
    never = [s == 0 and n > m for s, n, m in zip(line.shift, line.grid, line.window or line.grid, strict=True)]
    frozen = shifts and len(blocks) > 1 and blocks[0].shift is not None and any(never)
    if not found:
        return StageDiagnosis(blocks[0].name, line, examined=False, frozen=frozen)
    name: str = max(reversed(found), key=lambda name: int(found[name].across.sum()))  # if none leaks, the last: shifted
    leaks = found[name]
    return StageDiagnosis(
        name,
        line,
        examined=True,
        rows=leaks.rows,
        columns=leaks.columns,
        row_pairs=leaks.row_pairs,
        column_pairs=leaks.column_pairs,
        leaking=_share(leaks.across),
        padded=max(_share(other.padding) for other in found.values()),
        frozen=frozen,
        map=(leaks.across.int() + 2 * leaks.padding.int()).numpy(),
        token=leaks.token,
        sees=leaks.sees.numpy(),
    )


def _merged(ways: Sequence[WayDiagnosis]) -> Iterator[WayDiagnosis]:
    """Yield one diagnosis for all ways with equal results at every size and equal graphs, with their names joined by " or "."""
    equal: dict[tuple, list[WayDiagnosis]] = {}
    for way in ways:
        equal.setdefault((repr(way.sizes), way.graphs), []).append(way)
    for same in equal.values():
        yield WayDiagnosis(" or ".join(way.way for way in same), same[0].sizes, same[0].graphs)


def _share(tokens: torch.Tensor) -> float:
    return float(tokens.float().mean())


def _compiled(way: WayDiagnosis) -> str:
    if isinstance(way.graphs, int):
        return f": torch.compile makes {way.graphs} graphs of {len(way.sizes)} sizes"
    return "" if way.graphs is None else f": torch.compile {way.graphs}"


def _table(sizes: Iterable[SizeDiagnosis]) -> list[str]:
    position = any(line.positions or line.unexamined for line in sizes)  # no column if every cell would be empty
    lines = [["size", "replaced", "bias", *["position"] * position]]
    lines[0] += ["tokens", "windows", "shift", "see across", "attend to padding"]
    for line in sizes:
        if line.refusal:
            lines.append([format_size(line.size), f"refused: {line.refusal}", *[""] * (len(lines[0]) - 2)])
            continue
        replaced = f"{sum(line.resampled.values()):,}" if line.resampled else "-"
        cells = [format_size(line.size), replaced, "changes" if line.changes else "-"]
        cells += ["changes" if line.positions else "?" if line.unexamined else "-"] * position
        unknown = ("?",) * 5 if line.attends else ("no attention", *("-",) * 4)
        columns = [(_short(s.windows.grid), *_stage_cells(s)) for s in line.stages] or [unknown]
        lines.append([*cells, *(" ".join(cells) for cells in zip(*columns, strict=True))])
    plain = [line for line in lines if not line[1].startswith("refused")]
    return [f"  {line}" for line in aligned(lines, like=plain)]


def _stage_cells(stage: StageDiagnosis) -> tuple[str, str, str, str]:
    """Cells of a stage: window, shift, share of tokens that see across a border, share that attend to padding."""
    windows = stage.windows
    if windows.window is None:
        return "global", "-", "-", "-"
    shift = _short(windows.shift) if any(windows.shift) else "-"
    window = _short(windows.window) + ("/" if windows.strided else "")
    if not stage.examined:
        return window, shift, "?", "?"
    leaking, padded = (_percent(share) if share else "-" for share in (stage.leaking, stage.padded))
    return window, shift, leaking, padded


_Affects = Callable[[SizeDiagnosis], Any]  # true for a size that has the finding
_Tell = Callable[[Sequence[SizeDiagnosis], str], str]  # the sentence, from the affected sizes and "at 3 of 4 sizes"


def _sentences(sizes: Sequence[SizeDiagnosis]) -> dict[str, str]:
    """{kind: sentence} of all findings, in the order of `_FINDINGS`."""
    return {kind: text for kind, (affects, tell) in _FINDINGS.items() if (text := _text_of(sizes, affects, tell))}


def _text_of(sizes: Sequence[SizeDiagnosis], affects: _Affects, tell: _Tell) -> str:
    """What `tell` says of the sizes that `affects` is true for; "" if there are none."""
    affected = [line for line in sizes if affects(line)]
    if not affected:
        return ""
    several = f"{len(affected)} of {len(sizes)} sizes"
    return tell(affected, f"at {several if len(sizes) > 1 else format_size(affected[0].size)}")


def _refused(affected: Sequence[SizeDiagnosis], at: str) -> str:
    return f"refused {at}: {affected[0].refusal} ({format_size(affected[0].size)})"


def _interpolated(affected: Sequence[SizeDiagnosis], at: str) -> str:
    rules = dict.fromkeys(f"{rule}, {n:,} values" for line in affected for rule, n in line.resampled.items())
    return f"replaced {at}: {'; '.join(rules)}"


def _other_bias(affected: Sequence[SizeDiagnosis], at: str) -> str:
    line, worst = max(((line, change) for line in affected for change in line.changes), key=lambda found: found[1].largest)
    amount = f"{worst.largest:.2g} {'of its standard deviation' if worst.what == 'bias' else 'radians'}"
    where = f"up to {amount} in {worst.layers} layer{'s' * (worst.layers > 1)} ({format_size(line.size)})"
    return f"another {worst.what} at the same offset {at}: {where}"


def _other_position(affected: Sequence[SizeDiagnosis], at: str) -> str:
    line, worst = max(((line, change) for line in affected for change in line.positions), key=lambda found: found[1].largest)
    names = len({change.name for change in line.positions})
    more = f" and {names - 1} more" if names > 1 else ""
    where = f"up to {worst.largest:.2g} of {worst.of:.2g} in {worst.name}{more} ({format_size(line.size)})"
    return f"other values at the same token {at}: {where}"


def _not_examined(affected: Sequence[SizeDiagnosis], at: str) -> str:
    names = list(dict.fromkeys(name for line in affected for name in line.unexamined))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"whether tokens keep their position {at}: {', '.join(names[:3])}{more}"


def _across(affected: Sequence[SizeDiagnosis], at: str) -> str:
    line, number, stage = max(_numbered(affected), key=lambda found: found[2].leaking)
    (h, w), lines = stage.windows.grid, []
    for name, leaking, n, pairs in (
        ("rows", stage.rows, h, stage.row_pairs),
        ("columns", stage.columns, w, stage.column_pairs),
    ):
        lines += [f"{name} {_runs(leaking)} of {n}, {pairs} pairs"] if leaking else []
    where = f"{format_size(line.size)}, stage {number}, {stage.block}: {'; '.join(lines)}"
    return f"tokens see across opposite borders {at}: up to {_percent(stage.leaking)} of a stage ({where})"


def _padded(affected: Sequence[SizeDiagnosis], at: str) -> str:
    line, number, stage = max(_numbered(affected), key=lambda found: found[2].padded)
    where = f"{_percent(stage.padded)} of a stage ({format_size(line.size)}, stage {number})"
    return f"tokens attend to padding {at}: up to {where}"


def _frozen(affected: Sequence[SizeDiagnosis], at: str) -> str:
    stages = dict.fromkeys(f"stage {number}" for _, number, stage in _numbered(affected) if stage.frozen)
    return f"windows that never shift {at}: {', '.join(stages)}"


def _unread(affected: Sequence[SizeDiagnosis], at: str) -> str:
    texts = [f"{line.unread[0]} rows and {line.unread[1]} columns of {format_size(line.size)}" for line in affected]
    return f"pixels that no patch contains {at}: {'; '.join(texts)}"


_FINDINGS: dict[str, tuple[_Affects, _Tell]] = {
    "refused": (lambda line: line.refusal, _refused),
    "interpolated": (lambda line: line.resampled, _interpolated),
    "bias": (lambda line: line.changes, _other_bias),
    "position": (lambda line: line.positions, _other_position),
    "borders": (lambda line: any(stage.leaking for stage in line.stages), _across),
    "padding": (lambda line: any(stage.padded for stage in line.stages), _padded),
    "frozen": (lambda line: any(stage.frozen for stage in line.stages), _frozen),
    "unread": (lambda line: any(line.unread), _unread),
}


def _numbered(sizes: Sequence[SizeDiagnosis]) -> Iterator[tuple[SizeDiagnosis, int, StageDiagnosis]]:
    return ((line, number, stage) for line in sizes for number, stage in enumerate(line.stages, 1))


def _runs(numbers: Sequence[int]) -> str:
    """Sorted numbers with runs shortened: 0, 5, 6, 7 -> "0, 5-7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _short(pair: Size) -> str:
    return str(pair[0]) if pair[0] == pair[1] else format_size(pair)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
