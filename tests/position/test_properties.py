"""What must hold for every registered encoding: invariances, what a new grid changes, precision, the interface."""

import copy
import inspect

import pytest
import torch
from torch import nn

import oracles
from helpers import each
from helpers.variants import IN_ATTENTION, KEYS, VARIANT_IDS, VARIANTS, make, perturbed, tensors
from vitrel import POSITIONS, Grid, create_position
from vitrel.ops import attention

double = torch.float64


def logits_of(encoding, grid, q, k):
    """Token-token logits minus that of the token itself, [H, h*w, h*w], from the log of the weights (v is the identity).
    The prefix has no offset, so no encoding that gives each position its own turn or scale is relative there."""
    eye = torch.eye(grid.tokens, dtype=q.dtype).expand(*q.shape[:2], -1, -1)
    terms = encoding(grid)
    terms = terms._replace(tables=tuple(t._replace(value=None) for t in terms.tables))
    logits = attention(q, k, eye, terms, grid, backend="reference").log()[0, :, grid.prefix :, grid.prefix :]
    return logits - logits.diagonal(dim1=1, dim2=2)[..., None]


@each(("key", "options"), [v for v in VARIANTS if v[0] in IN_ATTENTION], ids=str)
def test_translation_invariance(key, options):
    """With one q and one k everywhere, a token-token logit is a function of the offset alone."""
    grid, trained = Grid(5, 6, 2), Grid(4, 4, 2)
    encoding = perturbed(make(key, trained, 5, dtype=double, **options))
    q, k = (torch.randn(1, 5, 1, 8, dtype=double).expand(-1, -1, grid.tokens, -1) for _ in range(2))
    logits = logits_of(encoding, grid, q, k).view(5, 5, 6, 5, 6)
    torch.testing.assert_close(logits[:, 1:, 2:, 1:, 2:], logits[:, :-1, :-2, :-1, :-2], atol=1e-5, rtol=1e-5)
    assert (logits[:, 0, 0, 0, 0] == 0).all()


@each(("key", "options"), VARIANTS, ids=VARIANT_IDS)
def test_other_grids_change_nothing_in_the_module(key, options):
    """Trained size, others, trained size again: bit-identical terms and state."""
    trained = Grid(4, 5, 1)
    encoding = perturbed(make(key, trained, **options))
    before = {name: value.clone() for name, value in encoding.state_dict().items()}
    first = encoding(trained)
    for grid in (Grid(7, 9, 1), Grid(2, 3, 1), Grid(9, 2, 1), Grid(1, 1, 1)):
        encoding(grid)
        assert encoding.resampled(trained) == {} and encoding.unseen(trained) == encoding.saturated(trained) == 0
    again = encoding(trained)
    assert all(torch.equal(value, before[name]) for name, value in encoding.state_dict().items())
    for a, b in zip(tensors(first), tensors(again), strict=True):
        assert torch.equal(a, b)


def acting(encoding: nn.Module, grid: Grid) -> dict[str, torch.Tensor]:
    """Which elements of every parameter some pair of `grid` reads: those with a gradient."""
    encoding.zero_grad()
    total = sum((t * torch.randn_like(t)).sum() for t in tensors(encoding(grid)) if t.requires_grad)
    total.backward()
    return {name: p.grad != 0 for name, p in encoding.named_parameters()}


NOTHING_CHANGES = [
    (k, o)
    for k, o in VARIANTS
    if POSITIONS[k].at_larger_grid == "nothing changes" and list(make(k, Grid(3, 3), **o).parameters())
]


@each("trained", [Grid(7, 7), Grid(3, 8, 1), Grid(1, 5), Grid(2, 1), Grid(14, 14, 1)], ids=str)
@each(("key", "options"), NOTHING_CHANGES, ids=str)
def test_nothing_changes_means_nothing_untrained_is_read(key, options, trained):
    """Rows addressed at four times the grid are rows addressed at the training grid. Options may give that up."""
    if options.get("radius") == (0, 2) or ({"radius", "num_buckets"} & set(options) and min(trained[:2]) < 5):
        pytest.skip("a radius or number of buckets given by hand may reach beyond the training grid")
    encoding = perturbed(make(key, trained, dtype=double, **options))
    small, large = acting(encoding, trained), acting(encoding, Grid(4 * trained.h, 4 * trained.w, trained.prefix))
    for name, read in large.items():
        if name == "direction" and min(trained[:2]) == 1:
            continue  # one row or column: nothing lies in two of the four directions
        assert not (read & ~small[name]).any(), f"{name}: rows that no training pair addresses are read at a larger grid"


@each(
    ("key", "options"),
    [
        ("t5", {"num_buckets": 32, "max_distance": 128}),
        ("clipped", {"radius": 30}),
        ("shaw", {"radius": 20}),
        ("deberta", {"radius": 20}),
    ],
)
def test_options_beyond_the_training_grid_are_told(key, options):
    """The property above can fail, and then `saturated` says how much of the grid still reads trained rows."""
    trained, grid = Grid(14, 14), Grid(56, 56)
    encoding = perturbed(make(key, trained, dtype=double, **options))
    small, large = acting(encoding, trained), acting(encoding, grid)
    assert any((large[name] & ~small[name]).any() for name in small)
    assert encoding.saturated(grid) < encoding.unseen(grid)


@each("key", KEYS)
def test_behavior_is_what_it_says(key):
    """Only "resampled" resamples parameters at a larger grid; every policy is named in what was resampled."""
    encoding, larger = make(key, Grid(4, 3)), Grid(9, 3)
    assert POSITIONS[key].at_larger_grid in ("nothing changes", "evaluated", "resampled", "nothing")
    assert bool(encoding.resampled(larger)) == (POSITIONS[key].at_larger_grid == "resampled")
    if encoding.policies:
        assert encoding.policy == encoding.policies[0] and encoding.grid == Grid(4, 3)
        for policy in encoding.policies[1:]:
            assert f"{key} {policy}" in make(key, Grid(4, 3), policy=policy).resampled(larger)


@each(("trained", "grid"), [(Grid(4, 3), Grid(7, 5)), (Grid(4, 3), Grid(2, 9)), (Grid(4, 3), Grid(2, 2))])
@each("key", KEYS)
def test_unseen_and_saturated_by_counting(key, trained, grid):
    """Offset cells counted one by one. Rescaled and absolute encodings have none outside; clipped ones read trained rows."""
    cells = [(y, x) for y in range(1 - grid.h, grid.h) for x in range(1 - grid.w, grid.w)]
    outside = sum(abs(y) >= trained.h or abs(x) >= trained.w for y, x in cells) / len(cells)
    encoding = make(key, trained)
    rescaled = ("absolute", "absolute_factorized", "absolute_windowed", "fourier", "rope_normalized")
    geometric = key != "none" and key not in rescaled
    assert encoding.unseen(grid) == pytest.approx(outside if geometric else 0)
    assert encoding.saturated(grid) == pytest.approx(outside if key in ("clipped", "t5", "shaw", "deberta") else 0)


@each(
    ("key", "options"),
    [
        ("clipped", {"radius": (3, 1)}),
        ("clipped", {"radius": (5, 6)}),
        ("shaw", {"radius": 4}),
        ("t5", {"num_buckets": 8, "max_distance": 6}),
        ("t5", {"num_buckets": 16, "max_distance": 8}),
    ],
)
def test_saturated_with_other_options_by_counting(key, options):
    """A cell saturates if it lies outside the training grid and reads a row that the training grid addressed."""
    trained, grid = Grid(4, 5), Grid(9, 7)

    def row(offset, n, r):
        if key == "t5":
            return oracles.t5_bucket(offset, options["num_buckets"], options["max_distance"])
        return oracles.clip(offset, r)

    radius = options.get("radius")
    reach = (radius, radius) if isinstance(radius, int) else radius or (None, None)
    seen = [{row(d, n, r) for d in range(1 - n, n)} for n, r in zip(trained[:2], reach, strict=True)]
    count = 0
    for y in range(1 - grid.h, grid.h):
        for x in range(1 - grid.w, grid.w):
            outside = abs(y) >= trained.h or abs(x) >= trained.w
            count += outside and row(y, trained.h, reach[0]) in seen[0] and row(x, trained.w, reach[1]) in seen[1]
    assert make(key, trained, **options).saturated(grid) == pytest.approx(count / grid.offset_classes())


@each(("key", "options"), VARIANTS, ids=VARIANT_IDS)
def test_half_precision_does_not_round_positions(key, options):
    """A model cast to bfloat16 computes coordinates, angles and rows as the float32 one does from the same parameters:
    rotations, fixed encodings and gated rows (which can cancel) stay float32, other learned rows are rounded once, at the end.
    """
    half = make(key, Grid(40, 50), **options).bfloat16()
    full = copy.deepcopy(half).float()
    for grid in (Grid(40, 50), Grid(47, 61), Grid(40, 70), Grid(60, 9)):
        terms = half(grid)
        exact = not list(full.parameters()) or terms.rotary is not None
        gated = [table.gated[1].data_ptr() for table in terms.tables if table.gated is not None]
        for a, b in zip(tensors(full(grid)), tensors(terms), strict=True):
            assert b.dtype == (torch.float32 if exact or b.data_ptr() in gated else torch.bfloat16)
            assert torch.equal(a.to(b.dtype), b) and not b.isnan().any()


@each(("key", "options"), VARIANTS, ids=VARIANT_IDS)
def test_autocast_does_not_round_terms(key, options):
    encoding = make(key, Grid(4, 4), **options)
    expected = tensors(encoding(Grid(6, 9)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in zip(tensors(encoding(Grid(6, 9))), expected, strict=True):
            assert torch.equal(a, b)


@each("key", KEYS)
def test_interface(key):
    """One signature, a docstring that opens with the key and names its source, and options by keyword only."""
    encoding = POSITIONS[key]
    names = list(inspect.signature(encoding).parameters)
    assert names[:3] == ["grid", "num_heads", "head_dim"] and names[-1] == "factory"
    module = inspect.getmodule(encoding)
    assert key in module.__doc__.splitlines()[0]
    assert key == "none" or "arXiv" in module.__doc__
    on_meta = create_position(key, Grid(3, 3), 2, 8, device="meta")
    assert all(t.is_meta for t in (*on_meta.state_dict().values(), *on_meta.buffers()))
    assert all(t.is_meta for t in tensors(on_meta(Grid(4, 5))))
