"""Which calls the backend `bias_by_row` serves, refuses and is taken for by "auto", and that graphs hold another."""

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers import each
from helpers.variants import call, perturbed
from vitrel import Grid, Table, Terms, create_position
from vitrel.ops import attention, sdpa, why
from vitrel.ops.capability import preferred, refusal


def learned_table(grid):
    return torch.randn(2, grid.classes(), requires_grad=True)


BIAS = Terms(tables=(Table(bias=torch.zeros(2, 15)),))
ROTARY = (torch.zeros(1, 6, 4),) * 2
REFUSALS = [
    (BIAS, {}, ""),
    (BIAS, {"entry": "window_attention", "window": (2, 3)}, "biases of windows are small"),
    (Terms(), {}, "there is no bias table"),
    (Terms(tables=(Table(),)), {}, "there is no bias table"),
    (BIAS._replace(key_rotary=ROTARY), {"dtype": torch.bfloat16}, "overflow half precision"),
    (BIAS, {"device": torch.device("cuda")}, "it is slow on cuda"),
    (BIAS, {"mask": torch.ones(6, 6, dtype=torch.bool)}, "it has no mask and no dropout"),
    (BIAS, {"dropout_p": 0.1}, "it has no mask and no dropout"),
    (BIAS, {"queries": 3}, "it needs the queries of the whole grid, not of its last rows"),
]
for part in ("query", "key", "value"):
    content = BIAS._replace(tables=(*BIAS.tables, Table("h", **{part: torch.zeros(1, 3, 8)})))
    REFUSALS.append((content, {}, "it serves bias tables only"))
GATED = Table("h", gated=(torch.zeros(1, 2, 8), torch.zeros(1, 3, 2)))
REFUSALS.append((Terms(tables=(GATED,)), {}, "it serves bias tables only"))


@each(("terms", "changes", "text"), REFUSALS)
def test_refusals(terms, changes, text):
    reason = refusal("bias_by_row", call(terms, Grid(2, 3), **changes))
    assert text in reason and bool(text) == bool(reason)


def test_refusals_of_graphs(monkeypatch):
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert "a graph would contain every block of image rows" in refusal("bias_by_row", call(BIAS, Grid(2, 3)))
    assert not preferred("bias_by_row", call(BIAS, Grid(99, 99)))


def test_auto_takes_them_where_they_were_measured_to_be_faster():
    """From a size on; with biases that nothing learns only where masks are large, for there SDPA's backward pass is faster."""
    learned = Terms(tables=(Table(bias=torch.zeros(2, 15, requires_grad=True)),))
    several = Terms(tables=learned.tables * 2)
    for side, grad, terms, taken in (
        (27, False, BIAS, False), (28, False, BIAS, True), (32, True, learned, True), (31, True, learned, False),
        (27, True, several, False), (28, True, several, True),
        (32, True, BIAS, False), (63, True, BIAS, False), (64, True, BIAS, True),
    ):  # fmt: skip
        assert preferred("bias_by_row", call(terms, Grid(side, side), grad=grad)) is taken
    for grid, taken in ((Grid(32, 32), "bias_by_row"), (Grid(4, 300, 1), "bias_by_row"), (Grid(7, 5), "sdpa")):
        tensors, bias = torch.randn(3, 1, 2, grid.tokens, 8, requires_grad=True), learned_table(grid)
        text = why(attention, *tensors, Terms(tables=(Table(bias=bias),)), grid)
        assert f": {taken} (first of auto that serves it)" in text
    assert "    bias_by_row: serves it if given by name" in text
    tensors = torch.randn(3, 1, 2, 1024, 8)
    terms = Terms(tables=(Table(bias=learned_table(Grid(32, 32))),))
    torch.testing.assert_close(attention(*tensors, terms, Grid(32, 32)), sdpa.attention(*tensors, terms, Grid(32, 32)))


@pytest.mark.slow
def test_graphs_take_another_backend():
    """A sweep on both sides of the size from which "auto" comes here compiles twice, a traced graph holds no row either."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    attend = torch.compile(attention, backend=counter, fullgraph=True)
    encoding = perturbed(create_position("table", Grid(4, 5), 2, 8))
    for grid in (Grid(4, 5), Grid(7, 3), Grid(31, 40), Grid(9, 6), Grid(44, 30)):
        q, k, v = torch.randn(3, 1, 2, grid.tokens, 8)
        out, expected = (function(q, k, v, encoding(grid), grid) for function in (attend, sdpa.attention))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 2
    encoding.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda *x: attention(*x, encoding(grid), grid), (q, k, v), check_trace=False)
    assert str(traced.graph).count("aten::scaled_dot_product_attention") == 1


@pytest.mark.slow
def test_an_exported_program_serves_every_size():
    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.position = perturbed(create_position("table", Grid(4, 5), 2, 8))

        def forward(self, x):
            grid = Grid(x.shape[2], x.shape[3])
            x = x.flatten(2, 3)
            return attention(x, x, x, self.position(grid), grid)

    module, sizes = Attend().eval(), {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(module, (torch.randn(1, 2, 6, 7, 8),), dynamic_shapes=(sizes,)).module()
    for shape in ((5, 4), (30, 40)):
        x = torch.randn(1, 2, *shape, 8)
        torch.testing.assert_close(program(x), module(x), atol=1e-5, rtol=1e-4)
