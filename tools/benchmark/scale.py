"""The suite of cost against size: time and memory of global attention from 196 to 16,384 tokens, for every encoding.

Memory is the most that the tensors of one call hold at once, outputs, gradients and the encoding's own tensors included; the
index [N, N] that a peer caches is added to it. A process that needs more than LIMIT fails, which is a row of the results.
"""

import resource
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.benchmark.engine import Case, Contender, Visit
from tools.benchmark.worker import Repeats
from vitrel.grid import Grid
from vitrel.ops import attention
from vitrel.position import POSITIONS, create_position

DENSE = "dense bias, as in timm"
FLUSHED = "pape, denormals flushed"
HEADS, WIDTH, LIMIT = 2, 64, 6 * 2**30
SIDES, QUICK_SIDES = (14, 32, 48, 64, 128), (4, 8)
_STATM = Path("/proc/self/statm")  # its first number is the size of the address space in pages


def scale_cases(quick: bool) -> list[Case]:
    """Return a case for every encoding in attention, for none, and for a dense bias; a process visits all sizes."""
    encodings = [name for name, encoding in POSITIONS.items() if encoding.site == "attention"]
    names = ["none", "table", DENSE] if quick else ["none", *encodings, FLUSHED, DENSE]
    return [_case(name, QUICK_SIDES if quick else SIDES) for name in dict.fromkeys(names)]


def _case(name: str, sides: tuple[int, ...]) -> Case:
    visits = [
        Visit(f"{mode}, {side * side} tokens", {"side": side, "training": mode == "training"}, _row(name, side))
        for mode in ("inference", "training")
        for side in sides
    ]
    contender = Contender(name, "peer" if name == DENSE else "ours", {"name": name}, None)
    build = f"{__name__}:ScaleCall"
    return Case(f"scale {name}", build, (contender,), tuple(visits), Repeats(0, 0), kind="size")


def _row(name: str, side: int) -> dict[str, int]:
    return {"tokens": side * side, "kept_bytes": 8 * side**4 if name == DENSE else 0}


class ScaleCall:
    """The call of a worker: attention with an encoding on one image of side x side tokens, with `training` also backward."""

    def __init__(self, name: str, side: int, training: bool):
        if _STATM.exists():
            limit = LIMIT + int(_STATM.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.manual_seed(0)
        self.dense = name == DENSE
        torch.set_flush_denormal(name == FLUSHED)
        key = "table" if self.dense else name.partition(",")[0]
        self.encoding = create_position(key, Grid(14, 14), HEADS, WIDTH)
        self.set(side, training)

    def set(self, side: int, training: bool) -> None:
        """Draw inputs of another size."""
        self.grid, self.training = Grid(side, side), training
        drawn = torch.randn(1, side * side, 4, HEADS, WIDTH)
        *self.qkv, self.grad = drawn.permute(2, 0, 3, 1, 4)
        self.index = None
        if self.dense:
            self.index = self.grid.index()
            self.table = torch.randn(self.grid.classes(), HEADS, requires_grad=True)

    def __call__(self) -> dict[str, Tensor]:
        q, k, v = (x.detach().requires_grad_(self.training) for x in self.qkv)
        with torch.set_grad_enabled(self.training):
            if self.dense:
                bias = self.table[self.index.flatten()].unflatten(0, self.index.shape).permute(2, 0, 1).contiguous()[None]
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
            else:
                out = attention(q, k, v, self.encoding(self.grid), self.grid)
        if self.training:
            out.backward(self.grad)
            self.encoding.zero_grad()
        return {"output": out.detach()}
