"""Bytes counted from operators, and the Triton kernels' against the addresses that they load and store in the interpreter.

The interpreter must be chosen before triton is imported, so test_triton_window.py runs this module once more, in a new process.
"""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import ROOT
from tools.benchmark.roofline import PAGE, RESULTS, Case, load, page, rows
from tools.benchmark.traffic import MemoryEfficient, Traffic, touched
from vitrel import Grid, Table, Terms

pytest.importorskip("triton")

from triton.runtime import interpreter, jit

from vitrel.ops.backends import triton_backend, triton_window

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interprets = pytest.mark.skipif(not INTERPRETED, reason="test_triton_window.py runs it in a process of its own")
counts = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")


def moved(function, *inputs):
    with MemoryEfficient(), Traffic() as counted:
        function(*inputs)
    return [tuple(launch) for launch in counted.launches]


@counts
def test_operators():
    x, row, index = torch.zeros(6, 10), torch.zeros(10).expand(6, 10), torch.zeros(2, dtype=torch.int64)
    assert moved(lambda: x.mT.unflatten(1, (2, 3)).detach()[1]) == []  # views
    assert moved(lambda: x + row) == [("add", 280, 240)]  # of an expanded tensor what lies in memory
    assert moved(lambda: x.mul_(2)) == [("mul_", 240, 240)]
    assert moved(lambda: x.mT.contiguous().to(torch.float16)) == [("clone", 240, 240), ("_to_copy", 240, 120)]
    assert moved(lambda: torch.empty(5).copy_(x[0, :5])) == [("copy_", 20, 20)]
    assert moved(lambda: x.new_zeros(5)) == [("new_zeros", 0, 20)]
    assert moved(lambda: x.index_select(0, index)) == [("index_select", 80 + 16, 80)]  # of a table what is looked up
    assert moved(lambda: x.index_add_(0, index, row[:2].clone()))[1] == ("index_add_", 80 + 16 + 80, 80)
    assert moved(lambda: torch.cat((x, row))) == [("cat", 280, 480)]


@counts
def test_attention_with_a_learned_bias():
    """A copy aligns the rows of the bias, and its gradient has no expanded axis."""
    q, k, v = torch.empty(3, 4, 2, 49, 32, device="meta", dtype=torch.bfloat16, requires_grad=True).unbind()
    bias = torch.empty(1, 2, 49, 49, device="meta", dtype=torch.bfloat16, requires_grad=True)

    def step():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.autograd.grad(out, (bias, q), torch.empty_like(out))

    x, table, statistics = 4 * 2 * 49 * 32 * 2, 2 * 49 * 49 * 2, 4 * 2 * 64 * 4
    found = {name: (read, written) for name, read, written in moved(step)}
    assert found["constant_pad_nd"] in ((table, table * 56 // 49), (table * 56 // 49, table))
    read, written = found["_scaled_dot_product_efficient_attention"]
    assert read == 3 * x + table and x + statistics <= written <= x + statistics + 16
    read, written = found["_scaled_dot_product_efficient_attention_backward"]
    assert 5 * x + table + statistics <= read <= 5 * x + table + statistics + 16 and written == 3 * x + 4 * table
    assert found["sum"] == (4 * table, table)


@counts
def test_geometry_are_not_counted():
    from vitrel.ops.window import window_mask

    assert moved(lambda: window_mask(9, 9, (4, 4), (2, 2), torch.float32, torch.device("meta"))) == []


@counts
def test_the_committed_table():
    """`python -m tools.benchmark.roofline` was run after the last change of the fused kernels."""
    found, versions = load(RESULTS / "results.csv")
    assert page(found, versions) in (ROOT / PAGE).read_text("utf-8")
    committed = [row for row in found if (row.model, row.image, row.method) == ("Swin-T", 224, "fused")]
    assert sorted(committed) == sorted(rows(Case("Swin-T", 224), methods=("fused",)))


@counts
def test_the_goal():
    """Fused window attention moves at most a quarter of SDPA's bytes: Swin-T, 224 px, batch 64, forward."""
    found = rows(Case("Swin-T", 224), ("forward",), ("SDPA", "fused"))
    sdpa, fused = (sum(row.bytes for row in found if row.method == method) for method in ("SDPA", "fused"))
    tokens = sum(
        depth * 64 * side**2 * 96 * 2**stage for stage, (depth, side) in enumerate(((2, 56), (2, 28), (6, 14), (2, 7)))
    )
    assert 4 * 2 * tokens <= fused <= 1.001 * 4 * 2 * tokens, "qkv is read once, the output written once, in bfloat16"
    assert fused <= 0.25 * sdpa


@counts
def test_every_kernel_has_an_entry():
    """Forward and backward, in windows of one and of several tiles, and everywhere."""
    for case in (
        Case("Swin-T", 112, {"depths": (1,), "num_heads": (3,), "window_size": 12}),
        Case("ViT-B table", 48, {"depth": 1}),
    ):
        training, forward = (rows(case, (mode,), ("fused",), batch=2)[0] for mode in ("training", "forward"))
        assert training.launches > forward.launches and training.bytes > 2 * forward.bytes
    with pytest.raises(KeyError, match="does not say what triton_window"):
        touched(triton_window._rows, (), {})


@pytest.fixture
def launched(monkeypatch):
    """Every launch is compared with ACCESSES; list of the kernels' names."""
    builder, names, loads, stores = interpreter.InterpreterBuilder, [], [], []
    load, store, add = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def loaded(pointer, mask):
        addresses = pointer.data[mask.data]
        loads.append(addresses[~np.isin(addresses, np.concatenate([*stores, []]))])  # what it wrote itself is in a cache

    def stored(pointer, mask):
        stores.append(pointer.data[mask.data])

    def loads_masked(self, pointer, mask, *args):
        loaded(pointer, mask)
        return load(self, pointer, mask, *args)

    def stores_masked(self, pointer, value, mask, *args):
        stored(pointer, mask)
        return store(self, pointer, value, mask, *args)

    def adds(self, kind, pointer, value, mask, *args):
        loaded(pointer, mask), stored(pointer, mask)
        return add(self, kind, pointer, value, mask, *args)

    monkeypatch.setattr(builder, "create_masked_load", loads_masked)
    monkeypatch.setattr(builder, "create_masked_store", stores_masked)
    monkeypatch.setattr(builder, "create_atomic_rmw", adds)

    def item(kernel, grid):
        def launch(*args, **kwargs):
            loads.clear(), stores.clear()
            kernel.run(*args, grid=grid, warmup=False, **kwargs)
            names.append(kernel.__name__)
            check(kernel, touched(kernel, args, kwargs), *(np.unique(np.concatenate(found)) for found in (loads, stores)))

        return launch

    monkeypatch.setattr(jit.KernelInterface, "__getitem__", item)
    monkeypatch.setattr(triton_window, "PROGRAMS", 1)  # a program serves several windows
    monkeypatch.setattr(triton_window, "BACKWARD_PROGRAMS", 1)
    return names


def check(kernel, expected, *addresses):
    total = [0, 0]
    for name, tensor, *fractions in expected:
        first, n = tensor.data_ptr(), tensor.numel()
        for i, (found, fraction) in enumerate(zip(addresses, fractions, strict=True)):
            inside = int(((found >= first) & (found < first + n * tensor.element_size())).sum())
            assert inside == round(n * fraction), f"{kernel.__name__} {('reads', 'writes')[i]} {inside} of {n} of {name}"
            total[i] += inside
    assert total == [len(found) for found in addresses], "tensors that are no arguments"


@interprets
@pytest.mark.parametrize(("grid", "window", "heads"), [((5, 9), (4, 6), 2), ((9, 10), (9, 8), 1)])
def test_the_window_kernels(grid, window, heads, launched):
    """Tables and tokens are touched completely, padding is neither loaded nor stored; windows of one and of several tiles."""
    classes = (2 * window[0] - 1) * (2 * window[1] - 1)
    leaves = qkv, table, angle = [
        torch.randn(size).requires_grad_()
        for size in ((1, *grid, 3 * heads * 16), (heads, classes), (heads, window[0] * window[1], 8))
    ]
    terms = Terms(rotary=(angle.cos(), angle.sin()), tables=(Table(bias=table),))
    triton_backend.window_attention(qkv, terms, Grid(*grid), window, (2, 3), heads).sum().backward()
    assert launched[0] == "_forward" and len(launched) > 1 and all(x.grad.any() for x in leaves)


@interprets
@pytest.mark.parametrize("axes", ["", "hw"])
def test_the_global_kernels(axes, launched):
    grid = Grid(5, 7)
    q, k, v = (torch.randn(2, 2, 35, 16).requires_grad_() for _ in range(3))
    tables = [Table(bias=torch.randn(2, grid.classes()).requires_grad_())]
    tables += [Table(axis, query=torch.randn(2, grid.classes(axis), 16)) for axis in axes]
    triton_backend.attention(q, k, v, Terms(tables=tuple(tables)), grid).sum().backward()
    assert launched == ["_forward", "_queries", "_keys", "_table"]
