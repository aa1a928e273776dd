"""flex_attention as a backend: exact against the reference without gradients on a CPU, with them on a GPU; refusals."""

import math

import pytest
import torch

from helpers import each
from helpers.variants import IN_ATTENTION, VARIANTS, call, make, perturbed
from vitrel import Grid, Table, Terms, create_position
from vitrel.ops import reference
from vitrel.ops.backends import flex
from vitrel.ops.capability import refusal

double = torch.float64
KEYS = [
    "table",
    "factorized",
    "t5",
    "decomposed",
    "deberta",
    "transformer_xl",
    "pape",
    "rope_mixed",
    "decomposed+table+rope_axial",
]


def agree(terms, grid, queries=None, mask=None, dtype=double, atol=1e-12):
    """The last `queries` of all, against the reference."""
    q, k, v = torch.randn(3, 2, 2, grid.tokens, 8, dtype=dtype)
    q = q[:, :, -(queries or grid.tokens) :]
    with torch.no_grad():
        out, expected = (backend.attention(q, k, v, terms, grid, mask) for backend in (flex, reference))
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=atol, rtol=0)
    return out


SIZES = [(Grid(2, 5), 10), (Grid(3, 2, 1), 7), (Grid(2, 4, 3), 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "size"), [*zip(KEYS, SIZES * 3, strict=True), ("table", SIZES[1]), ("table", SIZES[2])], ids=str
)
def test_equals_the_reference(key, size):
    grid, queries = size
    terms = perturbed(make(key, Grid(3, 4, grid.prefix), dtype=double))(grid)
    assert not refusal("flex", call(terms, Grid(2, 3), dtype=double))
    agree(terms, grid, queries)


@each(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 0.05)])
def test_lower_precision(dtype, atol):
    grid = Grid(3, 4, 1)
    agree(perturbed(make("table", grid))(grid), grid, dtype=dtype, atol=atol)


@each("kind", ["bool", "additive"])
def test_masks(kind):
    """With fewer queries than keys, and a query that sees nothing: 0."""
    grid, queries = Grid(3, 3, 1), 6
    visible = torch.rand(2, 1, queries, grid.tokens) > 0.4
    visible[0, 0, 2] = False
    mask = visible if kind == "bool" else torch.randn(visible.shape, dtype=double).masked_fill(~visible, -math.inf)
    out = agree(perturbed(make("factorized", grid, dtype=double))(grid), grid, queries, mask)
    assert (out[0, :, 2] == 0).all() and (out[1] != 0).all()


def test_a_field_of_view_and_a_mask_over_keys():
    grid = Grid(3, 3)
    visible = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    visible[..., :4] = False
    out = agree(create_position("lookhere", grid, 2, 8)(grid), grid, mask=visible, atol=1e-7)
    assert (out == 0).all(-1).any()


@pytest.mark.slow
def test_temperature():
    grid = Grid(2, 4, 1)
    terms = perturbed(make("pape+deberta", grid, dtype=double))(grid)
    agree(terms._replace(temperature=torch.tensor(0.7, dtype=double)), grid)


def test_inputs_that_require_gradients_without_grad_mode():
    """flex_attention refuses them on a CPU, whatever the mode."""
    grid = Grid(2, 3)
    q, k, v = torch.randn(3, 1, 2, 6, 8, requires_grad=True).unbind(0)
    terms = perturbed(make("table", grid))(grid)
    with torch.no_grad():
        torch.testing.assert_close(flex.attention(q, k, v, terms, grid), reference.attention(q, k, v, terms, grid))


@pytest.mark.filterwarnings("error")
def test_no_warning(monkeypatch):
    """That it runs uncompiled on a CPU, which flex_attention says once per process."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._WARNINGS_SHOWN", set(), raising=False)
    grid = Grid(2, 3)
    agree(make("table", grid, dtype=double)(grid), grid)


def test_refusals(monkeypatch):
    bias, grid, cuda = Terms(tables=(Table(bias=torch.zeros(2, 15)),)), Grid(2, 3), torch.device("cuda")
    turn = (torch.zeros(1, 6, 4),) * 2
    for terms, changes, text in (
        (bias, {"dtype": double}, ""),
        (bias, {"device": cuda, "grad": True}, ""),
        (bias, {"mask": torch.ones(6, 6, dtype=torch.bool)}, ""),
        (bias, {"grad": True}, "flex_attention has no backward on a CPU"),
        (bias, {"dropout_p": 0.1}, "no dropout of attention weights"),
        (bias, {"device": cuda, "dtype": double}, "compiled flex_attention has no float64"),
        (bias, {"entry": "window_attention", "window": (2, 3)}, "blocks of 128 tokens"),
        (Terms(tables=(Table("h", value=torch.zeros(1, 3, 8)),)), {}, r"position-dependent values \(Table.value\)"),
        (Terms(key_rotary=turn, rotary=turn), {}, "overflow half precision"),
    ):
        reason = refusal("flex", call(terms, grid, **changes))
        assert text.replace("\\", "") in reason and bool(text) == bool(reason)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "in no fixed order" in refusal("flex", call(bias, grid, device=cuda, grad=True))
    assert not refusal("flex", call(bias, grid, device=cuda))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "compiled for a CPU" in refusal("flex", call(bias, grid))


def test_every_encoding_is_served_or_refused():
    grid = Grid(3, 4)
    refused = {key for key, o in VARIANTS if key in IN_ATTENTION and refusal("flex", call(make(key, grid, **o)(grid), grid))}
    assert refused == {"shaw", "xpos"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has a backward on a GPU only")
@each("key", KEYS)
def test_gradients_on_a_gpu(key):
    """Compiled, outputs and all gradients, against the reference in float64."""
    grid = Grid(9, 14, 1)
    encoding = perturbed(make(key, grid, dim=32)).cuda()
    q, k, v = (torch.randn(2, 2, grid.tokens, 32, device="cuda", requires_grad=True) for _ in range(3))
    weight, found = torch.randn_like(q), []
    for backend, dtype in ((flex, torch.float32), (reference, double)):
        out = backend.attention(*(x.to(dtype) for x in (q, k, v)), encoding(grid), grid)
        found.append([out, *torch.autograd.grad((out * weight).sum(), [q, k, v, *encoding.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=1e-3, rtol=1e-2)  # its products are TF32
