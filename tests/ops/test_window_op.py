"""vitrel::window_layout: graphs for any size hold the operator and nothing of its arithmetic, all others the reverse."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental import _config as fx_config

from vitrel import Grid, Table, Terms
from vitrel.ops import attention, window_attention
from vitrel.ops.exporting import exporting
from vitrel.ops.window import windows
from vitrel.ops.window_op import window_layout, window_layout_op

CPU = torch.device("cpu")
# Not divisible by the window, one window along an axis, one window in all, one token, divisible.
GRIDS = [(9, 13), (3, 14), (4, 3), (1, 1), (8, 12)]
SEVERAL = [(9, 13), (8, 16), (6, 10)]
WINDOWS = [((4, 3), (0, 0)), ((4, 3), (2, 1))]


class Attend(torch.nn.Module):
    """Window attention with a table, over [B, h, w, 3 * 2 * 8]."""

    def __init__(self, window=(4, 3), shift=(2, 1)):
        super().__init__()
        self.window, self.shift = Grid(*window), shift
        self.table = torch.nn.Parameter(torch.randn(2, self.window.classes()) * 0.5)

    def forward(self, qkv):
        terms, grid = Terms(tables=(Table(bias=self.table),)), Grid(*qkv.shape[1:3])
        return window_attention(qkv, terms, grid, self.window[:2], self.shift, 2, backend="sdpa")


def dynamic_image(b, h, w, **keywords):
    """Channels stay as they are, the rest may vary."""
    qkv = torch.randn(b, h, w, 3 * 2 * 8, **keywords)
    for dim in range(3):
        torch._dynamo.maybe_mark_dynamic(qkv, dim)
    return qkv


@pytest.mark.parametrize(("window", "shift"), WINDOWS)
def test_operator(window, shift):
    """Its fake tensors have the sizes, types and strides of the real ones, with symbols for sizes too."""
    for h, w in GRIDS:
        torch.library.opcheck(window_layout_op, (h, w, window, shift, CPU))


@pytest.mark.parametrize(("window", "shift"), WINDOWS)
def test_compiled_layout(window, shift):
    """One graph for any size, whose only work is the operator."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layout = torch.compile(
        lambda x: window_layout(*x.shape, window, shift, x.device), backend=counter, fullgraph=True, dynamic=True
    )
    for h, w in (grid for grid in GRIDS if 1 not in grid):  # a size of 1 is always a graph of its own
        for found, expected in zip(layout(torch.empty(h, w)), windows(h, w, window, shift), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count == 1
    called = {str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"}
    assert called == {"vitrel.window_layout.default", "<built-in function getitem>"}


def test_a_graph_of_one_size_has_the_arithmetic_inlined():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    layout = torch.compile(
        lambda x: window_layout(*x.shape, (4, 3), (2, 1), x.device), backend=counter, fullgraph=True, dynamic=False
    )
    assert all(map(torch.equal, layout(torch.empty(9, 13)), windows(9, 13, (4, 3), (2, 1))))
    code = str(counter.graphs[0].graph)
    assert "arange" in code and "vitrel" not in code


def test_traces_hold_pytorchs_own_operators():
    traced = torch.jit.trace(lambda x: window_layout(*x.shape, (4, 3), (2, 1), x.device).source, torch.empty(9, 13))
    assert "aten::arange" in str(traced.graph) and "vitrel::" not in str(traced.graph)


def test_compiled_attention_learns():
    """Outputs and gradients over sizes that one compiled graph serves."""
    torch._dynamo.reset()
    model, counter = Attend(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for h, w in SEVERAL:
        qkv = dynamic_image(2, h, w, requires_grad=True)
        weight, found = torch.randn(2, h, w, 2 * 8), []
        for run in (compiled, model):
            out = run(qkv)
            found.append([out, *torch.autograd.grad((out * weight).sum(), [qkv, model.table])])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1
    assert "window_layout" in counter.graphs[0].print_readable(print_output=False)


@pytest.mark.slow
def test_inductor_at_any_size():
    torch._dynamo.reset()
    model = Attend().eval()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for h, w in SEVERAL:
            qkv = dynamic_image(2, h, w)
            torch.testing.assert_close(compiled(qkv), model(qkv), atol=1e-5, rtol=1e-4)


class Layout(torch.nn.Module):
    def forward(self, x):
        return tuple(window_layout(*x.shape, (4, 3), (2, 1), x.device))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_pytorchs_own_operators(strict):
    sizes = {i: torch.export.Dim.DYNAMIC for i in range(2)}
    program = torch.export.export(Layout(), (torch.empty(9, 13),), dynamic_shapes=(sizes,), strict=strict)
    assert "aten.arange" in str(program.graph) and "vitrel" not in str(program.graph)
    for h, w in SEVERAL:
        for found, expected in zip(program.module()(torch.empty(h, w)), windows(h, w, (4, 3), (2, 1)), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("global_attention", [False, True])
def test_exported_attention_takes_any_batch(global_attention, strict):
    """Its bias has a batch of 1, which the program must not compare with the images'."""

    class Whole(Attend):
        def forward(self, qkv):
            q, k, v = qkv.flatten(1, 2).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
            return attention(q, k, v, Terms(tables=(Table(bias=self.table),)), Grid(4, 3), backend="sdpa")

    model, sizes = (Whole if global_attention else Attend)().eval(), {0: torch.export.Dim.DYNAMIC}
    with fx_config.patch(backed_size_oblivious=True):
        image = (torch.randn(2, 4, 3, 48),)
        program = torch.export.export(model, image, dynamic_shapes=(sizes,), strict=strict)
    assert "sdpa_kernel" not in str(program.graph) and "scaled_dot_product_attention" in str(program.graph)
    for batch in (1, 2, 3):
        qkv = torch.randn(batch, 4, 3, 48)
        torch.testing.assert_close(program.module()(qkv), model(qkv), atol=1e-6, rtol=1e-5)


def test_exporting_is_not_compiling():
    class Says(torch.nn.Module):
        def forward(self, x):
            return x + (1 if exporting() else 0)

    x = torch.zeros(3)
    assert not Says()(x).any() and not torch.compile(Says(), backend="eager", fullgraph=True)(x).any()
    for strict in (False, True):
        assert torch.export.export(Says(), (x,), strict=strict).module()(x).all()
    assert not Says()(x).any()
