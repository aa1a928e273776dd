"""Memory traffic of attention in whole models, computed; writes results/roofline and a table into docs/performance.md.

    python -m tools.benchmark.roofline            # a minute on a CPU; no GPU is used
    python -m tools.benchmark.roofline --table    # the tables again, from results/roofline/results.csv

Counted is what attention does between the linear layers: from q, k and v (in timm's windows, from the normalized tokens) to the
input of the output projection, eager, everything in bfloat16. How bytes are counted: tools.benchmark.traffic.
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from tools.benchmark.models import MODELS
from tools.benchmark.samples import ROOT
from tools.benchmark.tables import markdown
from tools.benchmark.traffic import MemoryEfficient, Traffic
from tools.study.pages import fill_pages
from vitrel.common.files import atomic_write, commit, write_cells
from vitrel.common.machine import installed_version
from vitrel.grid import Grid
from vitrel.layers import Block
from vitrel.ops import sdpa
from vitrel.ops.backends import triton_backend

BATCH = 64
OURS = {"SDPA": sdpa, "fused": triton_backend}
METHODS = ("timm without SDPA", "timm with SDPA", *OURS)
MODES = ("forward", "training")
VERSIONS = ("torch", "timm", "triton")
RESULTS, PAGE = ROOT / "results" / "roofline", "docs/performance.md"
LEGEND = """Computed, not measured: batch {batch}, bfloat16, PyTorch's operators as in eager mode; timm {timm}, torch \
{torch}. GB (10^9 bytes) read and written by attention between the linear layers: windows, heads, bias, softmax, products. \
Every operator and every launch of a Triton kernel reads each element of its inputs and writes each element of its outputs \
once, scaled_dot_product_attention too (its memory-efficient kernel, with the copy that aligns the bias). What a launch loads \
repeatedly, keys and values by the tiles of queries and the bias table, is assumed to stay in the L2 cache; what one operator \
leaves there for the next is not counted. timm's Swin is without SDPA unless TIMM_FUSED_ATTN=2, its ViT with it. fused: the \
Triton kernels, with the tiles of an H200. Milliseconds: these bytes at {bandwidths}, and after the semicolon the attention's \
matrix products alone at {peaks} TFLOP/s; the larger of the two is the least time."""


class Gpu(NamedTuple):
    """Memory bandwidth, bytes/s, and peak of dense bfloat16 products with float32 sums, FLOP/s."""

    bandwidth: float
    peak: float


GPUS = {"H200": Gpu(4.3e12, 989e12), "A100": Gpu(2.0e12, 312e12), "RTX 4090": Gpu(1.0e12, 165e12)}


class Case(NamedTuple):
    """A model of tools.benchmark.models at an image size; `args` are arguments of both libraries."""

    model: str
    image: int
    args: dict[str, Any] = {}  # noqa: RUF012


CASES = (
    *(Case(model, *size) for model in ("Swin-T", "Swin-B") for size in ((224,), (384, {"window_size": 12}))),
    *(Case("ViT-B table", image) for image in (224, 448, 1024)),
)


class Row(NamedTuple):
    """Traffic of the attention of one stage (of all blocks in a ViT) by one method; `launches`: operators and kernels."""

    model: str
    image: int
    batch: int
    stage: int
    mode: str
    method: str
    launches: int
    bytes_read: int
    bytes_written: int
    flops: float

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


def rows(case: Case, modes: Iterable[str] = MODES, methods: Iterable[str] = METHODS, batch: int = BATCH) -> list[Row]:
    """Return the traffic of a model by stage."""
    found = []
    for method in methods:
        for stage, calls in enumerate(_stages(case, method, batch), 1):
            for mode in modes:
                counted = [traffic(call, mode == "training") for call in calls]
                flops = sum(call.flops for call in calls) * (3.5 if mode == "training" else 1.0)
                sums = [sum(values) for values in zip(*((len(t.launches), t.read, t.written) for t in counted), strict=True)]
                found.append(Row(case.model, case.image, batch, stage, mode, method, *sums, flops))
    return found


class Call(NamedTuple):
    """Attention of a block: a function of `x`, the parameters that get gradients, and its products' operations, forward."""

    function: Callable[[Tensor], Tensor]
    x: Tensor
    parameters: tuple[Tensor, ...]
    flops: float


def traffic(call: Call, training: bool) -> Traffic:
    """Return what a call launches, with `training` the gradients of x and of the parameters too."""
    with torch.set_grad_enabled(training), MemoryEfficient(), Traffic() as counted:
        out = call.function(call.x)
        if training:
            torch.autograd.grad(out, (call.x, *call.parameters), torch.empty_like(out))
    return counted


def _stages(case: Case, method: str, batch: int) -> Iterator[list[Call]]:
    """Yield the calls of the attention of all blocks of a stage; a ViT is one stage."""
    with torch.device("meta"):
        spec = MODELS[case.model]
        name, args = (spec.ours, spec.ours_args) if method in OURS else (spec.timm, spec.timm_args)
        args = {key: value for key, value in args.items() if key != "dynamic_img_size"}  # timm's mask would not be a buffer
        net = timm.model_entrypoint(name)(img_size=case.image, **args | case.args).to(torch.bfloat16)
        windowed = hasattr(net, "layers")
        for number, stage in enumerate(net.layers if windowed else [net]):
            side = case.image // (4 * 2**number if windowed else 16)
            make = _ours if method in OURS else _timm
            yield [make(block, method, side, batch) for block in stage.blocks]


def _ours(block: Block, method: str, side: int, batch: int) -> Call:
    attn, grid, backend = block.attn, Grid(side, side), OURS[method]
    width = attn.proj.in_features

    def windowed(qkv: Tensor) -> Tensor:
        return backend.window_attention(qkv, block.position(block.window), grid, attn.window, attn.shift, attn.num_heads)

    def everywhere(qkv: Tensor) -> Tensor:
        return backend.attention(*attn.heads(qkv), block.position(grid), grid).transpose(1, 2).flatten(2)

    if attn.window is None:
        return _call(everywhere, (batch, grid.tokens, 3 * width), grid.tokens, width, block.position)
    return _call(windowed, (batch, side, side, 3 * width), block.window.tokens, width, block.position)


def _timm(block: nn.Module, method: str, side: int, batch: int) -> Call:
    attn = block.attn
    width = attn.qkv.in_features
    attn.qkv, attn.proj, attn.fused_attn = _Linear(3 * width), _Linear(width), "with SDPA" in method
    if hasattr(block, "window_size"):
        return _call(block._attn, (batch, side, side, width), block.window_area, width, attn)
    return _call(attn, (batch, side * side, width), side * side, width, attn.rel_pos)


def _call(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], keys: int, width: int, position: nn.Module) -> Call:
    """width: C, of all heads. position: the module with the parameters that get gradients."""
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    return Call(function, x, tuple(position.parameters()), 4.0 * math.prod(shape[:-1]) * keys * width)


class _Linear(nn.Module):
    """Stands for a linear layer, whose traffic is not attention's."""

    def __init__(self, out_features: int):
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return _Uncounted.apply(x, self.out_features)


class _Uncounted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = x.shape[-1]
        return x.new_empty(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(*grad.shape[:-1], ctx.width), None


def page(found: list[Row], versions: dict[str, str], stages: bool = False) -> str:
    """Return the legend and the table, a line per model, image and mode, with `stages` also one per stage."""
    gpus = GPUS.values()
    legend = LEGEND.format(
        batch=found[0].batch,
        bandwidths=", ".join(f"{gpu.bandwidth / 1e12:.1f}" for gpu in gpus) + " TB/s",
        peaks=", ".join(f"{gpu.peak / 1e12:.0f}" for gpu in gpus),
        **versions,
    )
    body = []
    for model, image, mode in dict.fromkeys((row.model, row.image, row.mode) for row in found):
        own = [row for row in found if (row.model, row.image, row.mode) == (model, image, mode)]
        numbers = sorted({row.stage for row in own})
        body.append([f"{model} {image}, {mode}", *_cells(own)])
        if stages and len(numbers) > 1:
            body += [[f"stage {n}", *_cells([row for row in own if row.stage == n])] for n in numbers]
    head = ["", *METHODS, "fused / SDPA", *(f"{name}, ms: SDPA, fused; products" for name in GPUS)]
    return "\n".join([legend, "", *markdown(head, "|---|" + "---:|" * (len(head) - 1), body)])


def _cells(own: list[Row]) -> list[str]:
    sums = {method: sum(row.bytes for row in own if row.method == method) for method in METHODS}
    flops = sum(row.flops for row in own if row.method == "SDPA")
    times = [
        f"{_ms(sums['SDPA'] / gpu.bandwidth)}, {_ms(sums['fused'] / gpu.bandwidth)}; {_ms(flops / gpu.peak)}"
        for gpu in GPUS.values()
    ]
    return [*(f"{count / 1e9:.2f}" for count in sums.values()), f"{sums['fused'] / sums['SDPA']:.3f}", *times]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def load(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of results.csv and the versions of the libraries."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    types = Row.__annotations__
    return [Row(**{name: types[name](line[name]) for name in types}) for line in lines], {
        name: lines[0][name] for name in VERSIONS
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--table", action="store_true", help="compute nothing, write the tables again")
    args = parser.parse_args(argv)
    path = RESULTS / "results.csv"
    if not args.table:
        RESULTS.mkdir(parents=True, exist_ok=True)
        versions = {name: installed_version(name) or "none" for name in VERSIONS} | {"commit": commit(ROOT)}
        found = [row for case in CASES for row in rows(case)]
        write_cells(path, [(*Row._fields, *versions), *((*row, *versions.values()) for row in found)])
    found, versions = load(path)
    with atomic_write(RESULTS / "table.md") as part:
        part.write_text(f"# Memory traffic of attention\n\n{page(found, versions, stages=True)}\n", "utf-8")
    fill_pages(ROOT, {PAGE: [("roofline", page(found, versions))]})
    print(page(found, versions))


if __name__ == "__main__":
    main()
