"""The Triton kernels of global attention against the reference in float64.

Run natively where there is a GPU, otherwise in Triton's interpreter, which must be chosen before triton is imported, so in a
process of its own: test_triton_window.py's `test_in_the_interpreter` runs this file there. The interpreter cannot do bfloat16.
"""

import os

import pytest
import torch

from helpers import each
from helpers.sizes import Sizes
from vitrel.grid import Grid
from vitrel.ops import reference
from vitrel.position.terms import Table, Terms

triton = pytest.importorskip("triton", reason="triton is not installed")
from vitrel.ops.backends import triton_global  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: run in the interpreter by test_triton_window.py"
)
LIMITS = {torch.float32: (2e-6, 4e-6), torch.float16: (2e-3, 4e-3), torch.bfloat16: (1.5e-2, 3e-2)}  # outputs, gradients
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Whatever a kernel does not write is NaN."""
    for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        empty = getattr(holder, name)

        def poisoned(*args, empty=empty, **options):
            made = empty(*args, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(holder, name, poisoned)


class Biased(torch.autograd.Function):
    """The two functions under test as one differentiable call."""

    @staticmethod
    def forward(ctx, q, k, v, bias, grid, scale):
        out, lse = triton_global.biased_forward(q, k, v, bias, grid, scale)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.rest = grid, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        *saved, out, lse = ctx.saved_tensors
        found = triton_global.biased_backward(grad, *saved, out, lse, *ctx.rest)
        assert found[3].dtype == torch.float32
        return *(x.to(y.dtype) for x, y in zip(found, saved, strict=True)), None, None


def inputs(grid, dtype, batch=1, heads=1, width=16, queries=None):
    """q, k, v as views of one projection and a bias, all with gradients, and a gradient of the output."""
    qkv = torch.randn(batch, grid.tokens, 3, heads, width, device=DEVICE).to(dtype)
    q, k, v = (t.detach() for t in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    q = q[..., grid.tokens - (queries or grid.tokens) :, :]
    bias = 0.5 * torch.randn(heads, grid.classes(), device=DEVICE)
    leaves = [t.requires_grad_() for t in (q, k, v, bias.to(dtype))]
    return leaves, torch.randn(q.shape, device=DEVICE).to(dtype)


def results(leaves, grad, grid, scale=0.3):
    """Outputs and gradients of the kernels, and those of the reference in float64."""
    out = Biased.apply(*leaves, grid, scale)
    got = (out, *torch.autograd.grad(out, leaves, grad))
    leaves = [t.detach().double().requires_grad_() for t in leaves]
    q, k, v, bias = leaves
    terms = Terms(scale=scale * q.shape[-1] ** 0.5, tables=(Table("hw", bias=bias),))
    out = reference.attention(q, k, v, terms, grid)
    return got, (out, *torch.autograd.grad(out, leaves, grad.double()))


def check(leaves, grad, grid):
    got, want = results(leaves, grad, grid)
    for name, a, b in zip(("out", "q", "k", "v", "bias"), got, want, strict=True):
        limit = LIMITS[leaves[0].dtype][name != "out"]
        error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1)
        assert error <= limit, f"{name}: {error:.1e} > {limit:.0e}"


QUICK = [
    (Grid(3, 5, 1), dict(batch=2, heads=3)),
    (Grid(5, 3), dict(heads=2)),
    (Grid(1, 1), {}),
    (Grid(2, 33, 3), {}),
    (Grid(4, 16, 1), {}),  # tiles of whole rows without empty lanes
    (Grid(2, 64), dict(queries=64)),
]
CASES = [
    (Grid(3, 5, 3), dict(width=32)),
    (Grid(5, 3, 3), dict(queries=6, batch=2)),
    (Grid(5, 3), dict(queries=9)),
    (Grid(1, 17), dict(width=64)),
    (Grid(17, 1, 1), {}),
    (Grid(2, 33), {}),
    (Grid(2, 70), dict(queries=70)),
    (Grid(6, 14), dict(queries=28)),
    (Grid(4, 16, 2), dict(queries=48)),  # tiles of whole rows without empty lanes
    (Grid(4, 16), {}),
    (Grid(3, 64, 3), dict(width=64)),
    (Grid(2, 128), dict(batch=3)),
    (Grid(64, 1), {}),
]


@on_kernels
@each(("grid", "options"), QUICK, ids=str)
def test_outputs_and_gradients(grid, options):
    check(*inputs(grid, torch.float32, **options), grid)


@on_kernels
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("grid", "options"), CASES, ids=str)
def test_outputs_and_gradients_of_more(grid, options, dtype):
    if INTERPRETED and CASES.index((grid, options)) not in ((1, 3, 7, 8) if dtype == torch.float32 else (1,)):
        pytest.skip("in the interpreter few, one of them in half precision, which takes the same path")
    check(*inputs(grid, dtype, **options), grid)


@on_kernels
def test_half_precision():
    check(*inputs(Grid(3, 5), torch.float16, width=64), Grid(3, 5))


@on_kernels
def test_a_bias_that_hides():
    """Most keys, and all of them from one head: a query that sees no key returns 0."""
    grid = Grid(3, 4)
    (q, k, v, bias), grad = inputs(grid, torch.float32, heads=2)
    far = (grid.offsets(device=DEVICE).abs() > 1).any(-1)
    bias = bias.detach().masked_fill(far, float("-inf"))
    bias[1] = float("-inf")
    check([q, k, v, bias.requires_grad_()], grad, grid)


@on_kernels
@pytest.mark.slow
def test_memory_grows_as_the_tokens():
    largest = {}
    for side in (7, 14):
        grid = Grid(side, side)
        (q, k, v, bias), grad = inputs(grid, torch.float32)
        arguments = (q.detach(), k.detach(), v.detach(), bias.detach())
        with Sizes() as sizes:
            out, lse = triton_global.biased_forward(*arguments, grid, 0.3)
            triton_global.biased_backward(grad, *arguments, out, lse, grid, 0.3)
        largest[grid.tokens] = max(sizes.seen)
    assert largest[196] <= 4 * largest[49] and largest[196] < 196 * 196


@on_kernels
@pytest.mark.slow
def test_the_same_bits_again():
    grid = Grid(3, 7, 1)
    leaves, grad = inputs(grid, torch.float32, batch=2)
    first, second = (results(leaves, grad, grid)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each(
    ("change", "reason"),
    [
        (dict(dtype=torch.float64), "float32, float16 and bfloat16, not torch.float64"),
        (dict(width=48), "head widths 16, 32, 64, 128, not 48"),
        (dict(grid=Grid(4, 5, 17), queries=37), "up to 16 prefix tokens, not 17"),
        (dict(grid=Grid(1024, 1025), queries=1025), "up to 1048576 tokens, not 1024 x 1025"),
        (dict(queries=7), "7 queries are neither all 20 tokens of the grid nor its last whole rows of 5"),
        (dict(grid=Grid(4, 5, 3), queries=22), "22 queries are neither all 23"),
    ],
)
def test_refusals(change, reason):
    call = dict(dtype=torch.float16, width=64, grid=Grid(4, 5), queries=20)
    assert triton_global.global_limits(**call) == ""
    assert reason in triton_global.global_limits(**call | change)


def test_a_refused_call_raises():
    q = torch.zeros(1, 1, 20, 48)
    with pytest.raises(ValueError, match="not 48"):
        triton_global.biased_forward(q, q, q, torch.zeros(1, 63), Grid(4, 5), 1.0)


@each(
    ("change", "text"),
    [
        (dict(k=torch.zeros(1, 2, 20, 16)), r"float32 \[2, 2, 20, 16\], float32 \[1, 2, 20, 16\].* twice \[B, H, 20, D\]"),
        (dict(v=torch.zeros(2, 2, 20, 32)), "of one dtype"),
        (dict(v=torch.zeros(2, 2, 20, 16, dtype=torch.float16)), "float16 .* of one dtype"),
        (dict(bias=torch.zeros(2, 62)), r"bias of shape \[2, 62\]; expected \[2, 63\]"),
    ],
)
def test_shapes_beyond_which_memory_would_be_read(change, text):
    q = torch.zeros(2, 2, 20, 16)
    call = dict(q=q, k=q, v=q, bias=torch.zeros(2, 63), grid=Grid(4, 5), scale=1.0)
    with pytest.raises(ValueError, match=text):
        triton_global.biased_forward(**call | change)
