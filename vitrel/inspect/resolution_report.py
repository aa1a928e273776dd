"""`resolution_report`: grids, windows and encodings of a vitrel model at an image size, computed without running the model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn

from vitrel.common.sizes import Size, format_size
from vitrel.common.tables import aligned
from vitrel.grid import Grid
from vitrel.inspect.any_model import StageWindows, TracedBlock, checked_size, stage_windows, window_and_shift
from vitrel.models.backbone import Backbone
from vitrel.position import key_of
from vitrel.position.log_n import temperature
from vitrel.position.terms import parts_of, sum_counts


@dataclass(frozen=True)
class EncodingReport:
    """One position encoding, for all layers that use it alike; a composition has one entry for each part."""

    key: str
    site: str  # "tokens" | "attention"
    layers: int
    grid: Size  # at this image size
    trained: Size  # training grid of its parameters
    at_larger_grid: str  # at grids larger than the training grid: "nothing changes" | "evaluated" | "resampled" | "nothing"
    policy: str  # policy in use, "" if there is no choice
    policies: tuple[str, ...]
    parameters: int
    resampled: dict[str, int]  # {policy: parameter values resampled}
    unseen: float  # share of the offset cells that no training pair had, 0 to 1
    saturated: float  # the part of `unseen` that reads a trained edge row or far bucket
    temperature: float | None  # factor of the logits if log_n is on

    @property
    def effect(self) -> str:
        """The effect of this size on the encoding, in words."""
        policies = " + ".join(self.resampled)
        if self.at_larger_grid == "nothing":
            words = "no position"
        elif self.grid == self.trained:
            words = "as trained"
        elif policies:
            words = f"resampled by {policies}" if any(self.resampled.values()) else f"read by {policies}"
        else:
            words = "read as trained" if self.at_larger_grid == "resampled" else self.at_larger_grid
        if not any(self.resampled.values()):
            words += ", far offsets read a trained edge" if self.saturated else ""
            words += ", at unseen offsets" if self.unseen > self.saturated + 1e-9 else ""  # tolerance for sums of floats
        return words + ("" if self.temperature is None else f", logits x {self.temperature:.3f} (log_n)")


@dataclass(frozen=True)
class ResolutionReport:
    """Grids, windows and encodings of a model at one image size; `print` shows them as tables, `to_dict` is for JSON.

    `size`, `trained_size`, `patch` and `image_padding` (below, right) are (h, w) in pixels. `trained_size` is the size that the
    model was built for, whose grids its position parameters have. `unseen` and `saturated` are the maxima over the encodings.
    """

    size: Size
    trained_size: Size
    patch: Size
    image_padding: Size
    grid: Size
    trained_grid: Size
    prefix: int
    parameters: int
    resampled: dict[str, int]
    unseen: float
    saturated: float
    stages: tuple[StageWindows, ...]  # the blocks on one token grid
    encodings: tuple[EncodingReport, ...]

    @property
    def resampled_values(self) -> int:
        """Number of parameter values that forward resamples at this size."""
        return sum(self.resampled.values())

    def to_dict(self) -> dict[str, Any]:
        """All fields as numbers, strings, tuples and dictionaries, with `resampled_values` and each encoding's `effect`."""
        stages = [
            stage._asdict() | {"window_count": stage.window_count, "padded_share": stage.padded_share} for stage in self.stages
        ]
        encodings = [vars(encoding) | {"effect": encoding.effect} for encoding in self.encodings]
        return vars(self) | {"stages": stages, "encodings": encodings, "resampled_values": self.resampled_values}

    def __str__(self) -> str:
        policies = " + ".join(self.resampled)
        filled = f", padded by {_added(self.image_padding)} to whole patches" if any(self.image_padding) else ""
        prefix = f" and {self.prefix} prefix" if self.prefix else ""
        return "\n".join(
            (
                f"image     {format_size(self.size)} px, built for {format_size(self.trained_size)}{filled}",
                f"tokens    {format_size(self.grid)}{prefix}, trained on {format_size(self.trained_grid)}; "
                f"patches of {format_size(self.patch)} px",
                f"values    {self.resampled_values:,} of {self.parameters:,} resampled ({policies or 'nothing'})",
                f"offsets   {_percent(self.unseen)} unseen, {_percent(self.saturated)} read a trained edge instead",
                "",
                *_stage_lines(self.stages),
                "",
                *_encoding_lines(self.encodings),
            )
        )


def resolution_report(model: Backbone, size: int | Size) -> ResolutionReport:
    """Report grids, windows and encodings of a model at an image size.

    Args:
        model: a ViT or Swin of vitrel.
        size: of the images in pixels, an int or (h, w).

    Raises:
        ValueError: the size is not one or two whole numbers, or smaller than a patch.
    """
    patch, trained_size = to_2tuple(model.patch_embed.patch_size), to_2tuple(model.patch_embed.img_size)
    size = checked_size(size)
    if size[0] < patch[0] or size[1] < patch[1]:
        raise ValueError(
            f"size {format_size(size)} is smaller than one patch of {format_size(patch)} pixels; choose a larger one"
        )
    grid = model.token_grid(size)
    with torch.device("cpu"):  # some encodings compute counts from small tensors, which have no values on the meta device
        return ResolutionReport(
            size=size,
            trained_size=trained_size,
            patch=patch,
            image_padding=(-size[0] % patch[0], -size[1] % patch[1]),
            grid=grid[:2],
            trained_grid=model.token_grid(trained_size)[:2],
            prefix=grid.prefix,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            resampled=model.resampled(size),
            unseen=model.unseen(size),
            saturated=model.saturated(size),
            stages=tuple(line for blocks, at in stages(model, grid) for line in _windows(blocks, at)),
            encodings=_alike(_encodings(model, size, trained_size)),
        )


def stages(model: Backbone, grid: Grid) -> Iterator[tuple[Sequence[nn.Module], Grid]]:
    """(blocks, token grid) of each stage of a model whose patches form `grid`.

    A plain ViT has one entry for the blocks of each window size and one for its global blocks, ordered by their first block.
    """
    if model.window_size is None:  # a plain ViT: one entry for the blocks of each window, one for the global blocks
        for window in dict.fromkeys(block.window for block in model.blocks):
            yield [block for block in model.blocks if block.window == window], grid
        return
    for stage in model.layers:
        if not isinstance(stage.downsample, nn.Identity):
            grid = Grid((grid.h + 1) // 2, (grid.w + 1) // 2)
        yield stage.blocks, grid


def _windows(blocks: Sequence[nn.Module], grid: Grid) -> tuple[StageWindows, ...]:
    traced = (TracedBlock("", block, grid[:2], (), "", *window_and_shift(block, grid[:2]), None) for block in blocks)
    return stage_windows(traced)


def _encodings(model: Backbone, size: Size, trained_size: Size) -> Iterator[EncodingReport]:
    for (encoding, grid), (_, trained) in zip(model.encodings(size), model.encodings(trained_size), strict=True):
        factor = None if encoding.temperature == "none" else float(temperature(trained, grid, encoding.temperature))
        for part in parts_of(encoding):
            yield EncodingReport(
                key=key_of(part),
                site=part.site,
                layers=1,
                grid=grid[:2],
                trained=(part.grid or trained)[:2],  # of the part itself, which a window policy does not change
                at_larger_grid=part.at_larger_grid,
                policy=part.policy if part.policies else "",
                policies=part.policies,
                parameters=sum(parameter.numel() for parameter in part.parameters()),
                resampled=part.resampled(grid),
                unseen=part.unseen(grid),
                saturated=part.saturated(grid),
                temperature=factor if part.site == "attention" else None,
            )


def _alike(lines: Iterable[EncodingReport]) -> tuple[EncodingReport, ...]:
    """Merge layers that differ in numbers of values alone; list "none" only if there is no other encoding."""
    merged: dict[EncodingReport, EncodingReport] = {}
    for line in lines:
        kind = replace(line, parameters=0, resampled=tuple(line.resampled))  # a tuple, to be hashed
        total = merged.get(kind)
        if total is not None:
            resampled = sum_counts((total.resampled, line.resampled))
            line = replace(line, layers=total.layers + 1, parameters=total.parameters + line.parameters, resampled=resampled)
        merged[kind] = line
    return tuple(line for line in merged.values() if line.at_larger_grid != "nothing") or tuple(merged.values())


def _stage_lines(stages: Iterable[StageWindows]) -> list[str]:
    lines = [["stage", "blocks", "tokens", "window", "windows", "padding", "", "shift"]]
    for number, s in enumerate(stages, 1):
        window = "global" if s.window is None else format_size(s.window)
        share = _percent(s.padded_share) if any(s.padding) else ""
        cells = [f"{number}", f"{s.blocks}", format_size(s.grid), window, format_size(s.window_count), _added(s.padding), share]
        lines.append([*cells, format_size(s.shift) if any(s.shift) else "-"])
    return aligned(lines)


def _encoding_lines(encodings: Iterable[EncodingReport]) -> list[str]:
    lines = [["encoding", "acts on", "layers", "grid", "trained", "policy [in use]", "parameters", "resampled", "unseen"]]
    lines[0] += ["saturated", "at this size"]
    for e in encodings:
        policies = ", ".join(f"[{p}]" if p == e.policy and len(e.policies) > 1 else p for p in e.policies) or "-"
        counts = [f"{e.parameters:,}", f"{sum(e.resampled.values()):,}", _percent(e.unseen), _percent(e.saturated)]
        lines.append([e.key, e.site, f"{e.layers}", format_size(e.grid), format_size(e.trained), policies, *counts, e.effect])
    return aligned(lines)


def _added(pair: Size) -> str:
    return f"{pair[0]} below, {pair[1]} right" if any(pair) else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
