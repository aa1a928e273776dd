"""What `vitrel.diagnose` found: as tables and sentences (`str`), and as plain values (`to_dict`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vitrel.inspect.bias import BiasChange
from vitrel.inspect.positions import PositionChange
from vitrel.inspect.resolution_report import Pair
from vitrel.inspect.trace import StageWindows
from vitrel.sizes import format_size


@dataclass(frozen=True)
class StageDiagnosis:
    """The blocks on one grid with one window, `block` the one that leaks or the first; pairs are (h, w) in tokens.

    Rows and columns are those whose tokens see the opposite border, pairs those that see each other only across it.
    """

    block: str
    windows: StageWindows
    looked: bool  # False: the blocks could not be run by themselves, so that nothing below is known
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    row_pairs: int = 0
    column_pairs: int = 0
    leaking: float = 0.0  # share of the tokens that see across a border, 0 to 1
    padded: float = 0.0  # share of the tokens that attend to padding, in the block where it is largest
    frozen: bool = False  # several windows, and no block shifts them, although elsewhere in the model blocks do
    map: np.ndarray | None = field(default=None, compare=False, repr=False)  # [h, w]: 1 sees across, 2 padding, 3 both
    token: Pair = (0, 0)  # (row, column) of one that sees most across
    sees: np.ndarray | None = field(default=None, compare=False, repr=False)  # [h, w]: 1 that token sees, 2 across a border


@dataclass(frozen=True)
class SizeDiagnosis:
    """A model at images of `size` (h, w) pixels."""

    size: Pair
    refusal: str  # why it does not take the size, else ""
    resized: dict[str, int] = field(default_factory=dict)
    changes: tuple[BiasChange, ...] = ()
    stages: tuple[StageDiagnosis, ...] = ()
    unread: Pair = (0, 0)  # rows below and columns right of the image that no patch holds
    positions: tuple[PositionChange, ...] = ()
    unexamined: tuple[str, ...] = ()  # what meets the image and could not be compared with the trained size


@dataclass(frozen=True)
class WayDiagnosis:
    """A model brought to every size in one way: "as built", "dynamic_img_size=True", "set_input_size()", "img_size="."""

    way: str
    sizes: tuple[SizeDiagnosis, ...]
    graphs: int | str | None = None  # torch.compile's for all sizes, or why it failed; None: not asked for


@dataclass(frozen=True)
class Diagnosis:
    """What happens to position in `model` at other sizes than the `trained` one, (h, w) pixels. Print it."""

    model: str
    trained: Pair
    versions: dict[str, str]
    ways: tuple[WayDiagnosis, ...]

    @property
    def findings(self) -> dict[str, dict[str, str]]:
        """{way: {kind: sentence}}, without ways in which nothing was found. The kinds are the keys of `_SENTENCES`."""
        found = {way.way: {kind: tell(way.sizes) for kind, tell in _SENTENCES.items()} for way in self.ways}
        found = {way: {kind: text for kind, text in kinds.items() if text} for way, kinds in found.items()}
        return {way: kinds for way, kinds in found.items() if kinds}

    @property
    def unexamined(self) -> dict[str, str]:
        """{way: sentence} of what could not be examined: there no finding does not say that nothing changes."""
        return {way.way: told for way in self.ways if (told := _not_examined(way.sizes))}

    def to_dict(self) -> dict[str, Any]:
        """All fields as numbers, strings, lists and dictionaries, without the maps of tokens, and the findings."""
        plain = asdict(self, dict_factory=lambda items: {k: v for k, v in items if k not in ("map", "sees")})
        for way, told in zip(plain["ways"], self.ways, strict=True):
            for line, size in zip(way["sizes"], told.sizes, strict=True):
                line["changes"] = [change._asdict() for change in size.changes]
                line["positions"] = [change._asdict() for change in size.positions]
                for stage, of in zip(line["stages"], size.stages, strict=True):
                    stage["windows"] = of.windows._asdict() | {"padded_share": of.windows.padded_share}
        return _plain(plain) | {"findings": self.findings, "unexamined": self.unexamined}

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.model}, made for {format_size(self.trained)} px ({versions})"]
        for way in self.ways:
            lines += ["", f"{way.way}{_compiled(way)}", *_table(way.sizes)]
        lines += ["", *self._found()]
        windowed = [stage for way in self.ways for line in way.sizes for stage in line.stages if stage.windows.window]
        if not any(line.stages or line.refusal for way in self.ways for line in way.sizes):
            lines.append("no attention can be seen in it")
        elif any(not stage.looked for stage in windowed):
            lines.append("? not asked: strided windows (/), or blocks that cannot run alone")
        elif windowed and not any({"borders", "padding"} & kinds.keys() for kinds in self.findings.values()):
            lines.append("no token sees across a border or attends to padding")
        return "\n".join(lines)

    def _found(self) -> Iterator[str]:
        if not self.findings and not self.unexamined:
            yield "found nothing: no value is replaced, no bias changes"
        for title, told in (
            ("found", {way: kinds.values() for way, kinds in self.findings.items()}),
            ("not examined", {way: [text] for way, text in self.unexamined.items()}),
        ):
            yield from [title] if told else []
            for way, texts in told.items():
                yield f"  {way}"
                yield from (f"    {text}" for text in texts)


def _compiled(way: WayDiagnosis) -> str:
    if isinstance(way.graphs, int):
        return f": torch.compile makes {way.graphs} graphs of {len(way.sizes)} sizes"
    return "" if way.graphs is None else f": torch.compile {way.graphs}"


def _table(sizes: Iterable[SizeDiagnosis]) -> list[str]:
    position = any(line.positions or line.unexamined for line in sizes)  # no column where there is nothing to say
    lines = [["size", "replaced", "bias", *["position"] * position]]
    lines[0] += ["tokens", "windows", "shift", "see across", "attend to padding"]
    for line in sizes:
        if line.refusal:
            lines.append([format_size(line.size), f"refused: {line.refusal}", *[""] * (len(lines[0]) - 2)])
            continue
        replaced = f"{sum(line.resized.values()):,}" if line.resized else "-"
        cells = [format_size(line.size), replaced, "changes" if line.changes else "-"]
        cells += ["changes" if line.positions else "?" if line.unexamined else "-"] * position
        columns = [(_short(s.windows.grid), *_stage(s)) for s in line.stages] or [("no attention seen",) + ("-",) * 4]
        lines.append([*cells, *(" ".join(cells) for cells in zip(*columns, strict=True))])
    plain = [line for line in lines if not line[1].startswith("refused")]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    return ["  " + "  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)).rstrip() for line in lines]


def _stage(stage: StageDiagnosis) -> tuple[str, str, str, str]:
    """Window, shift, share that sees across, share that attends to padding."""
    windows = stage.windows
    if windows.window is None:
        return "global", "-", "-", "-"
    shift = _short(windows.shift) if any(windows.shift) else "-"
    window = _short(windows.window) + ("/" if windows.strided else "")
    if not stage.looked:
        return window, shift, "?", "?"
    return window, shift, *(_percent(share) if share else "-" for share in (stage.leaking, stage.padded))


Sizes = Sequence[SizeDiagnosis]


def _refused(sizes: Sizes) -> str:
    there = [line for line in sizes if line.refusal]
    return "" if not there else f"refused {_at(there, sizes)}: {there[0].refusal} ({format_size(there[0].size)})"


def _interpolated(sizes: Sizes) -> str:
    there = [line for line in sizes if line.resized]
    rules = dict.fromkeys(f"{rule}, {n:,} values" for line in there for rule, n in line.resized.items())
    return "" if not there else f"replaced {_at(there, sizes)}: {'; '.join(rules)}"


def _other_bias(sizes: Sizes) -> str:
    there = [line for line in sizes if line.changes]
    if not there:
        return ""
    worst = max((change for line in there for change in line.changes), key=lambda change: change.largest)
    size = next(line.size for line in there if worst in line.changes)
    amount = f"{worst.largest:.2g} {'of its standard deviation' if worst.what == 'bias' else 'radians'}"
    where = f"up to {amount} in {worst.layers} layer{'s' * (worst.layers > 1)} ({format_size(size)})"
    return f"another {worst.what} at one and the same offset {_at(there, sizes)}: {where}"


def _other_position(sizes: Sizes) -> str:
    there = [line for line in sizes if line.positions]
    if not there:
        return ""
    line, worst = max(((line, change) for line in there for change in line.positions), key=lambda found: found[1].largest)
    names = len({change.name for change in line.positions})
    more = f" and {names - 1} more" if names > 1 else ""
    where = f"up to {worst.largest:.2g} of {worst.of:.2g} in {worst.name}{more} ({format_size(line.size)})"
    return f"other values at one and the same token {_at(there, sizes)}: {where}"


def _not_examined(sizes: Sizes) -> str:
    there = [line for line in sizes if line.unexamined]
    names = list(dict.fromkeys(name for line in there for name in line.unexamined))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"whether tokens keep their position {_at(there, sizes)}: {', '.join(names[:3])}{more}" if there else ""


def _across(sizes: Sizes) -> str:
    there = [line for line in sizes if any(stage.leaking for stage in line.stages)]
    if not there:
        return ""
    line, number, stage = max(_numbered(there), key=lambda found: found[2].leaking)
    (h, w), lines = stage.windows.grid, []
    for name, leaking, n, pairs in (
        ("rows", stage.rows, h, stage.row_pairs),
        ("columns", stage.columns, w, stage.column_pairs),
    ):
        lines += [f"{name} {_runs(leaking)} of {n}, {pairs} pairs"] if leaking else []
    where = f"{format_size(line.size)}, stage {number}, {stage.block}: {'; '.join(lines)}"
    return f"tokens see across opposite borders {_at(there, sizes)}: up to {_percent(stage.leaking)} of a stage ({where})"


def _padded(sizes: Sizes) -> str:
    there = [line for line in sizes if any(stage.padded for stage in line.stages)]
    if not there:
        return ""
    line, number, stage = max(_numbered(there), key=lambda found: found[2].padded)
    where = f"{_percent(stage.padded)} of a stage ({format_size(line.size)}, stage {number})"
    return f"tokens attend to padding {_at(there, sizes)}: up to {where}"


def _frozen(sizes: Sizes) -> str:
    there = [line for line in sizes if any(stage.frozen for stage in line.stages)]
    stages = dict.fromkeys(f"stage {number}" for _, number, stage in _numbered(there) if stage.frozen)
    return "" if not there else f"windows that never shift {_at(there, sizes)}: {', '.join(stages)}"


def _unread(sizes: Sizes) -> str:
    there = [line for line in sizes if any(line.unread)]
    texts = [f"{down} rows and {right} columns of {format_size(line.size)}" for line in there for down, right in [line.unread]]
    return "" if not there else f"pixels that no patch holds {_at(there, sizes)}: {'; '.join(texts)}"


_SENTENCES = {
    "refused": _refused,
    "interpolated": _interpolated,
    "bias": _other_bias,
    "position": _other_position,
    "borders": _across,
    "padding": _padded,
    "frozen": _frozen,
    "unread": _unread,
}


def _numbered(sizes: Sizes) -> Iterator[tuple[SizeDiagnosis, int, StageDiagnosis]]:
    return ((line, number, stage) for line in sizes for number, stage in enumerate(line.stages, 1))


def _at(there: Sizes, sizes: Sizes) -> str:
    return f"at {len(there)} of {len(sizes)} sizes" if len(sizes) > 1 else f"at {format_size(there[0].size)}"


def _runs(numbers: Sequence[int]) -> str:
    """0, 5, 6, 7 -> "0, 5-7"."""
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


def _short(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else format_size(pair)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
