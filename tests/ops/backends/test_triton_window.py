"""The Triton window kernels against the reference in float64: in Triton's interpreter on a CPU, natively where there is a GPU.

The interpreter must be chosen before triton is imported, so one test runs this module once more in a process of its own.
"""

import itertools
import os

import pytest
import torch

from helpers import ROOT, each, run_in_the_interpreter
from vitrel import Grid, Table, Terms
from vitrel.ops import reference
from vitrel.ops.window import windows

triton = pytest.importorskip("triton")

from triton import language as tl  # noqa: E402

from tools.benchmark.kernels import compiling  # noqa: E402
from vitrel.ops.backends import triton_tiles, triton_window  # noqa: E402
from vitrel.ops.backends.triton_tiles import Tile  # noqa: E402
from vitrel.ops.backends.triton_window import _corner, _place  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU; test_in_the_interpreter runs it in a process of its own"
)
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value

GRIDS = [(1, 1), (5, 5), (8, 9), (4, 10), (3, 16)]
WINDOWS = [(4, 4), (3, 5), (7, 7)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Whatever a kernel does not write is NaN; and a program serves several windows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    monkeypatch.setattr(triton_window, "PROGRAMS", 3)
    monkeypatch.setattr(triton_window, "BACKWARD_PROGRAMS", 3)


def make(grid, window, heads=2, width=16, batch=1, bias=True, rotary=0, dtype=torch.float32):
    """(qkv, bias, cos, sin), grad_out; `rotary`: number of heads of the angles. The table has a standard deviation of 0.5."""
    n, classes = window[0] * window[1], (2 * window[0] - 1) * (2 * window[1] - 1)
    qkv = torch.randn(batch, *grid, 3 * heads * width, device=DEVICE).to(dtype)
    table = torch.randn(heads, classes, device=DEVICE) * 0.5 if bias else None
    angle = torch.randn(rotary, n, width // 2, device=DEVICE) * 2 if rotary else None
    cos, sin = (angle.cos(), angle.sin()) if rotary else (None, None)
    return (qkv, table, cos, sin), torch.randn(batch, *grid, heads * width, device=DEVICE).to(dtype)


def expected(inputs, grad_out, grid, window, shift, heads):
    """Output and gradients of the reference in float64, the content logits scaled by 0.7 besides D ** -0.5."""
    qkv, table, cos, sin = inputs = [None if t is None else t.double().requires_grad_() for t in inputs]
    terms = Terms(scale=0.7, rotary=None if cos is None else (cos, sin), tables=() if table is None else (Table(bias=table),))
    out = reference.window_attention(qkv, terms, Grid(*grid), window, shift, heads)
    out.backward(grad_out.double())
    return out, *(None if t is None else t.grad for t in inputs)


def ours(inputs, grad_out, window, shift, heads):
    scale = 0.7 * (grad_out.shape[-1] // heads) ** -0.5
    how = window, shift, heads, scale
    out, lse = triton_window.window_forward(*inputs, *how, grad=True)
    return out, *triton_window.window_backward(grad_out, *inputs, out, lse, *how, rotary_grad=True)


def check(grid, window, shift, heads=2, dtype=torch.float32, **options):
    inputs, grad_out = make(grid, window, heads, dtype=dtype, **options)
    results = ours(inputs, grad_out, window, shift, heads)
    truth = expected(inputs, grad_out, grid, window, shift, heads)
    for name, ours_, true in zip(("out", "qkv", "bias", "cos", "sin"), results, truth, strict=True):
        assert (ours_ is None) == (true is None), name
        if true is not None:
            assert ours_.shape == true.shape and ours_.dtype == (dtype if name in ("out", "qkv") else torch.float32), name
            error = (ours_.double() - true).abs().max()
            assert error <= TOLERANCE[dtype] * max(1.0, true.abs().max()), f"{name}: {error / true.abs().max():.1e}"
    return (inputs, grad_out), results


# In the interpreter, which is slow: one token, partial windows along both axes and along one, with every shift, width and
# number of angles.
PAIRS = [((1, 1), (4, 4)), ((5, 5), (3, 5)), ((8, 9), (7, 7)), ((4, 10), (7, 7)), ((3, 16), (4, 4))]


@runs
@each(("grid", "window"), PAIRS if INTERPRETED else itertools.product(GRIDS, WINDOWS))
def test_equals_the_reference(grid, window):
    """Grids that the window does not divide or that it exceeds, with and without shift, bias and rotary term; three widths."""
    n = GRIDS.index(grid) + WINDOWS.index(window)
    shift = [(0, 0), (window[0] // 2, window[1] // 2), (1, window[1] - 1)][n % 3]
    width, heads, rotary = [16, 32, 64][(n + 1) % 3], [1, 1, 2][n % 3], [0, 1, 1][n % 3]
    check(grid, window, shift, heads, width=width, rotary=rotary, bias=n % 4 != 1, batch=1 + n % 2)


@runs
@each(("bias", "rotary"), [(False, 0), (True, 2), (False, 2)] + [(True, 0), (True, 1), (False, 1)] * (not INTERPRETED))
def test_every_combination_of_terms(bias, rotary):
    check((5, 5), (4, 6), (2, 3), width=48, bias=bias, rotary=rotary)


@runs
@each(("grid", "window", "shift"), [((5, 13), (12, 12), (6, 6))] + [((8, 12), (7, 11), (3, 5))] * (not INTERPRETED))
def test_windows_of_more_than_one_tile(grid, window, shift):
    """Shifted along one axis, in an image that leaves most of a window empty, three tiles of keys; on a GPU also an odd
    size shifted along both.
    """
    check(grid, window, shift, width=16, heads=1, rotary=1)


@runs
@each(
    ("shift", "grids"),
    [
        ((3, 3), [(6, 1), (7, 14), (14, 6)]),
        ((0, 6), [(11, 8)]),
    ]
    + [((3, 3), [(8, 8)]), ((0, 0), [(7, 8), (8, 1)]), ((0, 6), [(7, 1)])] * (not INTERPRETED),
)
def test_every_border(shift, grids):
    """Grids smaller than a window, of one and of several, with and without padding; shifted or not."""
    for grid in grids:
        check(grid, (7, 7), shift, heads=1)


@runs
@each(("window", "shift"), [((4, 4), (2, 2)), ((3, 5), (1, 4)), ((7, 2), (3, 1))], ids=str)
@each("grid", [(1, 1), (5, 5), (3, 16), (12, 9)], ids=str)
def test_the_geometry_is_that_of_vitrel_ops_window(grid, window, shift):
    """Token and region of every slot: the rule that an axis which one window holds is not shifted stands in both."""
    layout, n = windows(*grid, window, shift), window[0] * window[1]
    count, slots = len(layout.slot) // n, triton.next_power_of_2(n)
    token, region = torch.zeros(2, 2 * count, slots, dtype=torch.int64, device=DEVICE).unbind()
    shape = (1, *window, n, *shift, 16, 16, slots, slots, True)
    _geometry[(1,)](token, region, *grid, 2 * count, shape, slots)
    token, region = token.view(2, count, slots)[..., :n].cpu(), region.view(2, count, slots)[..., :n].cpu()
    there = torch.zeros(count * n, dtype=torch.bool)
    there[layout.inverse] = True
    there = there.view(count, n)
    for image in range(2):
        assert torch.equal(region[image] >= 0, there)
        assert torch.equal(token[image][there], layout.source.view(count, n)[there] + image * grid[0] * grid[1])
        same = region[image][:, :, None] == region[image][:, None]  # [L, N, N]
        pairs = there[:, :, None] & there[:, None]
        assert torch.equal(same[pairs], layout.visible.view(count, n, n)[pairs])


@triton.jit
def _geometry(TOKEN, REGION, h, w, windows, sizes: tl.constexpr, SLOTS: tl.constexpr):
    slot = tl.arange(0, SLOTS)
    for window in range(windows):
        token, region = _place(slot, _corner(window, h, w, sizes), sizes)
        tl.store(TOKEN + window * SLOTS + slot, token)
        tl.store(REGION + window * SLOTS + slot, region.to(tl.int64))


@runs
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_precision(monkeypatch, dtype):
    check((8, 8), (7, 7), (3, 3), width=32, heads=1, rotary=1, dtype=dtype)
    if not INTERPRETED:
        check((9, 8), (9, 8), (0, 0), width=16, heads=1, dtype=dtype)
    monkeypatch.setattr(triton_tiles, "architecture", lambda device: 80)
    check((9, 8), (9, 8), (0, 0), width=16, heads=1, dtype=dtype)


@runs
@each(("kernel", "tile", "window"), [("whole", (64, 64, 4, 2, False), (7, 7)), ("tiles", (32, 64, 8, 2), (9, 8))])
def test_variants_of_the_sweep(kernel, tile, window, monkeypatch):
    """The bias is read again for every window; a tile has fewer queries than keys."""
    monkeypatch.setitem(triton_tiles.HALF, kernel, {80: Tile(*tile)})
    triton_window.backward_plan.cache_clear()
    try:
        check((8, 9), window, (3, 3), width=16, heads=1, dtype=torch.float16)
    finally:
        triton_window.backward_plan.cache_clear()


@runs
def test_any_strides(monkeypatch):
    (qkv, *rest), grad_out = make((5, 6), (4, 4))
    results = ours((qkv, *rest), grad_out, (4, 4), (2, 2), 2)
    slanted = qkv.transpose(1, 2).contiguous().transpose(1, 2), grad_out.flip(-1).contiguous().flip(-1)
    monkeypatch.undo()  # one window a program
    for a, b in zip(results, ours((slanted[0], *rest), slanted[1], (4, 4), (2, 2), 2), strict=True):
        assert a is None if b is None else torch.allclose(a, b, atol=1e-6)


@runs
@each(("window", "level"), [((4, 4), 300), ((9, 8), -300)])
def test_large_logits_stay_finite(window, level):
    """Where exp would overflow, and a shift of the logits by the maximum does not; also in the rows of padding."""
    (qkv, table, *rest), grad_out = make((6, 5), window, heads=1)
    out, *grads = ours((qkv * 40, table + level, *rest), grad_out, window, (2, 2), 1)
    assert out.isfinite().all() and all(g is None or g.isfinite().all() for g in grads)


@runs
def test_an_empty_batch():
    inputs, grad_out = make((5, 5), (4, 4), batch=0, rotary=1)
    out, qkv, bias, cos, sin = ours(inputs, grad_out, (4, 4), (2, 2), 2)
    assert out.numel() == qkv.numel() == 0 and not bias.any() and not cos.any() and not sin.any()


@runs
def test_sums_by_offset_class():
    """Of lines that end with slots of no window."""
    pairs = torch.randn(3, 15, 16, device=DEVICE)
    index = Grid(3, 5).index().flatten()
    truth = torch.zeros(3, 45, dtype=torch.double).index_add_(1, index, pairs[..., :15].flatten(1).double().cpu())
    torch.testing.assert_close(triton_window.by_offset(pairs, (3, 5)).double().cpu(), truth, atol=1e-5, rtol=0)


@compiles
def test_refusals():
    refuses = triton_window.window_limits
    assert refuses(torch.float16, 32, (7, 7)) == refuses(torch.bfloat16, 64, (16, 16)) == ""
    assert "not torch.float64" in refuses(torch.float64, 32, (7, 7))
    assert "not 24" in refuses(torch.float32, 24, (7, 7))
    assert "not 17x16" in refuses(torch.float32, 32, (17, 16))
    with pytest.raises(ValueError, match="head widths 16, 32, 48, 64, not 8"):
        triton_window.window_forward(torch.zeros(1, 4, 4, 24), None, None, None, (4, 4), (0, 0), 1, 1.0)
    with pytest.raises(ValueError, match="shift along width"):
        triton_window.window_forward(torch.zeros(1, 4, 4, 48), None, None, None, (4, 4), (0, 4), 1, 1.0)


@compiles
def test_shapes_beyond_which_memory_would_be_read():
    qkv, angle = torch.zeros(1, 4, 4, 48), torch.zeros(1, 15, 8)
    with pytest.raises(ValueError, match=r"bias of shape \[1, 48\]; windows of 4x4 need \[1, 49\]"):
        triton_window.window_forward(qkv, torch.zeros(1, 48), None, None, (4, 4), (0, 0), 1, 1.0)
    with pytest.raises(ValueError, match=r"of shape \[1, 15, 8\]; windows of 4x4 need \[1, 16, 8\]"):
        triton_window.window_forward(qkv, None, angle, angle, (4, 4), (0, 0), 1, 1.0)


@pytest.mark.slow(seconds=34)
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests above run here themselves")
def test_in_the_interpreter():
    """Of all modules with kernels, as most of a short run is the start of a process."""
    kernels = [f"ops/backends/test_triton_{name}.py" for name in ("global", "ops")]
    others = *kernels, "ops/test_every_backend.py"
    run_in_the_interpreter(__file__, *(str(ROOT / "tests" / other) for other in others))


@compiles
@pytest.mark.slow
def test_five_products_per_pair_of_tiles():
    """q k^T, grad v^T and those of dv, dk and dq, in the one loop over pairs; 64 rows of queries on four warps together."""
    qkv, bias, out, lse = torch.zeros(1, 9, 9, 96), torch.zeros(1, 289), torch.zeros(1, 9, 9, 32), torch.zeros(1, 9, 9, 1)
    with compiling(90) as found:
        triton_window.window_backward(out.half(), qkv.half(), bias, None, None, out.half(), lse, (9, 9), (0, 0), 1, 1.0)
    (kernel,) = (kernel for kernel in found if kernel.name == "_tiles")
    assert kernel.assembly["ttir"].count("tt.dot ") == 5
    assert "wgmma.mma_async" in kernel.assembly["ptx"]


@runs
def test_statistics_are_computed_only_for_a_backward_pass():
    (qkv, *tables), grad_out = make((9, 9), (9, 8), heads=1)
    how = (9, 8), (0, 0), 1, 1.0
    out, lse = triton_window.window_forward(qkv, *tables, *how)
    assert lse.numel() == 0
    with pytest.raises(ValueError, match="grad=True"):
        triton_window.window_backward(grad_out, qkv, *tables, out, lse, *how)
    assert triton_window.window_forward(qkv, *tables, *how, grad=True)[1].shape == (1, 9, 9, 1)
    (qkv, *tables), _ = make((4, 4), (4, 4), heads=1)
    assert triton_window.window_forward(qkv, *tables, (4, 4), (0, 0), 1, 1.0, grad=True)[1].numel() == 0


@pytest.mark.slow
@compiles
def test_the_grid_compiles_nothing_anew():
    kernels = triton_window._forward, triton_window._whole
    counts = []
    for images, h, w in [(1, 16, 16), (3, 15, 17), (1, 1, 30)]:
        how = (2, 2), (1, 1), 1, 1.0
        inputs = torch.zeros(images, h, w, 48), torch.zeros(1, 9), None, None
        with compiling(90):
            out, lse = triton_window.window_forward(*inputs, *how)
            triton_window.window_backward(out, *inputs, out, lse, *how)
        counts.append([len(kernel.device_caches[1090][0]) for kernel in kernels])
    assert counts[0] == counts[1], counts


@runs
def test_two_runs_agree_to_the_bit():
    inputs, grad_out = make((5, 5), (4, 4), heads=1, rotary=1)
    first, second = (ours(inputs, grad_out, (4, 4), (2, 2), heads=1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
