"""Tables over one axis as extra columns: exact against the reference, flash attention alone, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import each
from helpers.sizes import Sizes
from helpers.variants import IN_ATTENTION, VARIANTS, call, make, perturbed
from vitrel import Grid, Table, Terms, create_position
from vitrel.ops import attention, reference
from vitrel.ops.backends import augmented_qk
from vitrel.position.alibi import alibi_slopes

double = torch.float64
GRIDS = [Grid(2, 5), Grid(3, 2, 1), Grid(1, 4, 3)]
SUMS_OF_AXES = ("factorized", "decomposed", "shaw", "deberta", "transformer_xl", "t5", "pape")
CASES = [(key, o) for key, o in VARIANTS if key in SUMS_OF_AXES]
CASES = [(key, o) for key, o in CASES if key != "t5" or o.get("mode") == "sum"]
CASES += [("alibi", o) for key, o in VARIANTS if key == "alibi" and o.get("distance") in ("l1", "squared")]
CASES += [("factorized+rope_mixed", {}), ("decomposed+factorized", {}), ("rope_axial+shaw", {})]


def both(encoding, grid, queries, dtype=double):
    """Outputs of the last queries and all gradients, by columns and by the reference."""
    q, k, v = (torch.randn(2, 2, grid.tokens, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    weight, found = torch.randn(2, 2, queries, 8, dtype=dtype), []
    for backend in (augmented_qk, reference):
        out = backend.attention(q[:, :, -queries:], k, v, encoding(grid), grid)
        gradients = torch.autograd.grad((out * weight).sum(), [q, k, v, *encoding.parameters()], allow_unused=True)
        found.append([out, *(g for g in gradients if g is not None)])
    return found


def bias_terms(grid, heads=2, std=0.5, dtype=torch.float32):
    tables = tuple(Table(axis, bias=torch.randn(heads, grid.classes(axis), dtype=dtype) * std) for axis in "hw")
    return Terms(tables=tables)


@each("grid", GRIDS, ids=str)
@each(("key", "options"), CASES, ids=str)
def test_equals_the_reference(key, options, grid):
    """Outputs and all gradients, all queries and the last row of them."""
    encoding = perturbed(make(key, Grid(3, 4, grid.prefix), dtype=double, **options))
    assert not augmented_qk.refuses(call(encoding(grid), grid))
    for queries in (grid.tokens, grid.w):
        for a, b in zip(*both(encoding, grid, queries), strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_temperature():
    """As of log_n: it multiplies all that content does, and no bias."""
    grid = Grid(3, 4, 1)
    encoding = create_position("factorized+deberta+pape", grid, 2, 8, dtype=double)
    terms = perturbed(encoding)(grid)._replace(temperature=torch.tensor(0.7, dtype=double))
    q, k, v = torch.randn(3, 2, 2, grid.tokens, 8, dtype=double)
    out, expected = (backend.attention(q, k, v, terms, grid) for backend in (augmented_qk, reference))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    assert not out.allclose(augmented_qk.attention(q, k, v, terms._replace(temperature=None), grid))


@each("key", ["factorized", "decomposed", "shaw", "deberta"])
@each(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_lower_precision(key, dtype, tolerance):
    grid = Grid(5, 3, 1)
    encoding = perturbed(make(key, grid, dtype=dtype))
    for a, b in zip(*both(encoding, grid, grid.tokens, dtype), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@each("cast", [None, torch.float16, torch.bfloat16])
@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("prefix", [0, 1])
def test_hidden_keys(prefix, dtype, cast):
    """-inf in one table, in two of one axis and beside a query table, also where autocast rounds q: no NaN."""
    if dtype != torch.float32 and cast not in (None, dtype):
        pytest.skip("autocast does not mix the two")
    grid = Grid(4, 5, prefix)
    bias = torch.randn(2, grid.classes("h"))
    bias[:, :2] = -math.inf
    q, k, v = torch.randn(3, 1, 2, grid.tokens, 16, dtype=dtype)
    for tables in (
        (Table("h", bias=bias),),
        (Table("h", bias=bias),) * 2,
        (Table("h", bias=bias, query=3 * torch.randn(1, grid.classes("h"), 16)),),
        (Table("h", bias=bias), Table("w", bias=300 * torch.randn(2, grid.classes("w")))),
    ):
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            out = augmented_qk.attention(q, k, v, Terms(tables=tables), grid)
        expected = reference.attention(q.double(), k.double(), v.double(), Terms(tables=tables), grid)
        limit = 1e-4 if (cast or dtype) == torch.float32 else 0.05
        torch.testing.assert_close(out.double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("prefix", [0, 1])
def test_no_mask_and_nothing_of_all_pairs(prefix, monkeypatch):
    """SDPA gets q, k and v of one width, in steps of 8, which flash serves: no mask, no [N, N] anywhere before it."""
    grid, seen = Grid(12, 10, prefix), []
    plain = F.scaled_dot_product_attention

    def recorded(q, k, v, **options):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), options))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return plain(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    n, width = grid.tokens, 32  # 8 and 12 + 10 columns, with prefix tokens 13 + 11, in steps of 8
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
    encoding = perturbed(create_position("shaw", grid, 1, 8))
    terms = encoding(grid)
    terms = terms._replace(tables=tuple(t._replace(bias=torch.randn(1, grid.classes(t.axis))) for t in terms.tables))
    with Sizes() as sizes:
        augmented_qk.attention(q, k, v, terms, grid).square().sum().backward()
    shape = (1, 1, n, width)
    assert seen == [(shape, shape, shape, {"attn_mask": None, "dropout_p": 0.0, "scale": 8**-0.5})]
    assert encoding.key_h.grad is not None and max(sizes.seen) <= n * width < n * n


@each("backend", ["augmented_qk", "sdpa"])
def test_pape_has_no_scores_of_all_offsets(backend):
    """Forward and backward: at most [N, N], by columns at most the 50 parabolas or 8 + 12 + 10 + 21 columns of every token."""
    grid = Grid(12, 10)
    n = grid.tokens
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
    encoding = create_position("pape", grid, 1, 8)
    with Sizes() as sizes:
        attention(q, k, v, encoding(grid), grid, backend=backend).square().sum().backward()
    assert encoding.position.grad.any()
    assert max(sizes.seen) == (n * n if backend == "sdpa" else n * 56) < n * grid.offset_classes()


@each("side", [32, 48])
def test_squared_distances_keep_their_precision(side):
    """Near neighbors in bfloat16, far from the corner: as columns of coordinates the logit would be off by 0.25 and more."""
    grid = Grid(side, side)
    slopes = alibi_slopes(2, device="cpu")
    terms = Terms(tables=tuple(Table(a, bias=-slopes[:, None] * grid.offsets(a).float().square()) for a in "hw"))
    v = torch.zeros(1, 2, grid.tokens, 8)
    v[..., 0], at = 1.0, grid.tokens - side // 2 - 3 * side  # a query near the lower border
    q, k = torch.zeros(2, 1, 2, grid.tokens, 8, dtype=torch.bfloat16)
    for step in (1, side, side + 1):
        v[:, :, at - step] += torch.eye(8)[1 + (step > 1) + (step > side)]
    last = slice(at, None)  # queries are the last tokens
    out = augmented_qk.attention(q[:, :, last], k, v.bfloat16(), terms, grid)[0, :, 0].float()
    exact = reference.attention(q[:, :, last].float(), k.float(), v, terms, grid)[0, :, 0]
    torch.testing.assert_close(out, exact, atol=1e-3, rtol=2**-7)


GATED = Terms(tables=(Table("h", gated=(torch.zeros(1, 2, 8), torch.zeros(1, 3, 2))),))
REFUSALS = [
    (Terms(), {}, "no table to write as columns"),
    (Terms(tables=(Table(bias=torch.zeros(2, 15)),)), {}, "a table over 'hw' cannot be written as columns"),
    (Terms(key_rotary=(torch.zeros(1, 6, 4),) * 2, tables=bias_terms(Grid(2, 3)).tables), {}, "overflow half precision"),
    (None, {"window": (2, 3)}, "shifted and padded windows need a mask"),
    (None, {"mask": torch.ones(6, 6, dtype=torch.bool)}, "flash attention takes no mask"),
    (None, {"dropout_p": 0.1}, "flash attention has no dropout on a CPU"),
    (None, {"dropout_p": 0.1, "device": torch.device("cuda")}, ""),
    (None, {"dtype": double}, ""),
    (None, {"dtype": double, "device": torch.device("cuda")}, "flash attention has no float64 on cuda"),
    (GATED, {}, ""),
    (GATED, {"dtype": torch.bfloat16}, "too coarse"),
    (None, {"grid": Grid(96, 97), "width": 64}, ""),
    (None, {"grid": Grid(96, 96), "width": 64, "device": torch.device("cuda")}, ""),
    (
        None,
        {"grid": Grid(96, 97, 1), "width": 64, "device": torch.device("cuda")},
        "the 96x97 grid with prefix=1 needs 195 columns besides the head width of 64, and flash attention takes 256",
    ),
]  # fmt: skip


@each(("terms", "changes", "text"), REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(terms, changes, text):
    grid = Grid(2, 3)
    reason = augmented_qk.refuses(call(bias_terms(grid) if terms is None else terms, **({"grid": grid} | changes)))
    assert text in reason and bool(text) == bool(reason)


@each("axis", ["h", "h+w"])
def test_every_kind_of_row(axis):
    """Bias, query, key and value rows together, those of prefix tokens too."""
    grid = Grid(3, 4, 2)
    rows = torch.randn(3, 2, grid.classes(axis), 8, dtype=double)
    terms = Terms(tables=(Table(axis, rows[0, ..., 0], *rows),))
    q, k, v = torch.randn(3, 2, 2, grid.tokens, 8, dtype=double)
    out, expected = (backend.attention(q, k, v, terms, grid) for backend in (augmented_qk, reference))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


@each(("key", "options"), [(k, o) for k, o in VARIANTS if k in IN_ATTENTION], ids=str)
def test_every_encoding_is_served_or_refused(key, options):
    """Those with tables over rows, columns and diagonals are served, lattices are not."""
    grid = Grid(3, 4)
    reason = augmented_qk.refuses(call(make(key, grid, **options)(grid), grid))
    assert bool(reason) == ((key, options) not in CASES)


@pytest.mark.slow(seconds=6)
def test_a_sweep_of_sizes_compiles_twice():
    """With all kinds of tables at once: biases, queries, values and gates."""
    counter = CompileCounter()
    attend = torch.compile(augmented_qk.attention, backend=counter, fullgraph=True)
    encoding = perturbed(create_position("t5+shaw+pape", Grid(4, 5, 1), 2, 8, mode="sum", parabolas=3))
    for grid in (Grid(4, 5, 1), Grid(7, 3, 1), Grid(5, 8, 1)):
        q, k, v = torch.randn(3, 2, 2, grid.tokens, 8)
        out, expected = (function(q, k, v, encoding(grid), grid) for function in (attend, reference.attention))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 2
