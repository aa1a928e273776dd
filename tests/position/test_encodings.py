"""Every registered encoding, with its options, against its oracle and golden numbers; gradients too; no key is left out."""

import numpy as np
import pytest
import timm
import torch
from timm.layers.helpers import to_2tuple
from timm.models.levit import Attention
from timm.models.xcit import PositionalEncodingFourier
from torch import nn

import oracles
from helpers import each, golden
from helpers.variants import GENERAL, KEYS, VARIANT_IDS, VARIANTS, attend, make, oracle_output, perturbed, qkv, serving, spread
from vitrel import Grid, create_position

GRIDS = [Grid(1, 1), Grid(4, 3), Grid(2, 7, 1), Grid(3, 5, 3)]
# Their oracles hold at the training grid; the rest is in test_resample.py.
STRETCHED = ("absolute", "table", "levit", "factorized")
double = torch.float64


@pytest.mark.parametrize("backend", GENERAL)
@pytest.mark.parametrize("key", KEYS)
def test_golden_numbers(key, backend):
    data = golden(key)
    for case in data["cases"]:
        grid = Grid(**case["grid"])
        trained = Grid(*case["trained"], grid.prefix)
        encoding = create_position(key, trained, data["heads"], data["width"], dtype=double, **case["options"])
        own = dict(encoding.named_parameters())
        assert set(own) == set(case["parameters"])
        with torch.no_grad():
            for name, value in case["parameters"].items():
                own[name].copy_(torch.tensor(value, dtype=double))
        q, k, v = (torch.tensor(case[name], dtype=double)[None] for name in "qkv")
        out = attend(encoding, q, k, v, grid, backend)
        # Fixed encodings are computed in float32, whatever the model's type.
        torch.testing.assert_close(out[0], torch.tensor(case["output"], dtype=double), atol=2e-6, rtol=2e-6)


@each(("key", "options", "grid"), spread(VARIANTS, GRIDS))
def test_equals_its_oracle(key, options, grid):
    check(key, options, grid, grid)


OTHER_GRIDS = [  # (trained, grid): larger, one axis larger, smaller, from a row of two
    (Grid(4, 3), Grid(7, 5)),
    (Grid(3, 4, 1), Grid(2, 7, 1)),
    (Grid(4, 5, 2), Grid(3, 2, 2)),
    (Grid(1, 2, 1), Grid(3, 4, 1)),
]


@pytest.mark.slow
@each(("key", "options", "grids"), spread([v for v in VARIANTS if v[0] not in STRETCHED], OTHER_GRIDS))
def test_equals_its_oracle_at_another_grid(key, options, grids):
    check(key, options, *grids)


def check(key, options, trained, grid):
    heads = 4 if key in ("xpos", "lookhere") else 2
    encoding = perturbed(make(key, trained, heads, dtype=double, **options))
    q, k, v = qkv(grid, heads)
    expected = oracle_output(key, encoding, q[1], k[1], v[1], grid, trained, options)  # of the second image
    for backend in serving(encoding(grid), grid, q.shape[0], q.shape[-1]):
        out = attend(encoding, q, k, v, grid, backend).detach()
        np.testing.assert_allclose(out[1].numpy(), expected, atol=3e-6, err_msg=backend)


@each(("trained", "grid"), [(Grid(4, 3), Grid(4, 3)), (Grid(3, 3, 2), Grid(2, 5, 2))], ids=str)
@each(("key", "options"), VARIANTS, ids=VARIANT_IDS)
def test_sdpa_has_the_reference_gradients(key, options, trained, grid):
    encoding = perturbed(make(key, trained, dtype=double, **options))
    q, k, v = (t.requires_grad_() for t in qkv(grid))
    leaves = [q, k, v, *encoding.parameters()]
    weight = torch.randn(2, 2, grid.tokens, 8, dtype=double)
    reference, sdpa = (
        torch.autograd.grad((attend(encoding, q, k, v, grid, backend) * weight).sum(), leaves, allow_unused=True)
        for backend in GENERAL
    )
    tight = options.get("policy") != "yarn"  # its temperature is a float32 tensor, which SDPA takes on another way
    for a, b in zip(reference, sdpa, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-10 if tight else 1e-6, rtol=1e-8 if tight else 1e-5)


@each("grid", [Grid(3, 4), Grid(2, 3, 2)], ids=str)
@each(("key", "options"), VARIANTS, ids=VARIANT_IDS)
def test_every_parameter_moves_the_output(key, options, grid):
    encoding = perturbed(make(key, grid, **options))
    if key == "fire":
        torch.nn.init.constant_(encoding.L, 6.0)  # below the side of the grid it rests, as it should
    q, k, v = (t.requires_grad_() for t in qkv(grid, dtype=torch.float32))
    (attend(encoding, q, k, v, grid) * torch.randn(2, 2, grid.tokens, 8)).sum().backward()
    for name, parameter in encoding.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if "mlp" in name:  # a unit may rest below its threshold at every offset of this grid
            assert parameter.grad.abs().sum() > 0, name
            continue
        rows = parameter.grad.reshape(len(parameter), -1) if not name.startswith("pos_embed") else parameter.grad[0]
        alive = (rows.abs().sum(-1) > 0).tolist()
        assert alive == live_rows(key, options, grid, name, len(rows)), f"{name}: a row without effect"


def live_rows(key, options, grid, name, count):
    """Which rows of a parameter some pair of the grid addresses: all, but for T5's bucket of negative offsets of length 0, and
    where options reach beyond the grid."""
    alive = [True] * count
    extra = 3 if grid.prefix else 0
    if key == "t5":
        used = []
        sign = options.get("bidirectional", True)
        axes = oracles.t5_axes(grid[:2], options.get("num_buckets"), options.get("max_distance"), sign)
        for n, (buckets, farthest) in zip(grid[:2], axes, strict=True):
            hit = {0 if buckets == 1 else oracles.t5_bucket(d, buckets, farthest, sign) for d in range(1 - n, n)}
            used.append([b in hit for b in range(buckets)])
        rows = {"table_h": used[0], "table_w": used[1]}.get(name, [a and b for a in used[0] for b in used[1]])
        alive = rows + [True] * (count - len(rows))
    if name == "pos_embed_win":
        rows, columns = to_2tuple(options.get("period", 8))
        alive = [y < grid.h and x < grid.w for y in range(rows) for x in range(columns)]
    radius = options.get("radius")
    if radius is not None:
        reach = (radius, radius) if isinstance(radius, int) else radius
        used = [[abs(d) < n for d in range(-r, r + 1)] for n, r in zip(grid[:2], reach, strict=True)]
        if key == "clipped":
            alive = [a and b for a in used[0] for b in used[1]] + [True] * extra
        elif key == "shaw" or key == "deberta":
            rows = used["hw".index(name[-1])]
            alive = rows if len(rows) == count else alive
    return alive


def test_tokens_are_those_of_the_modules_of_released_weights():
    """XCiT's Fourier encoding, Hiera's windowed embedding at its own size, NaFlexViT's factorized one at its own size."""
    own, timms = make("fourier", Grid(4, 5), 2, 8), PositionalEncodingFourier(4, 16)
    with torch.no_grad():
        own.token_projection.weight.copy_(timms.token_projection.weight.flatten(1))
        own.token_projection.bias.copy_(timms.token_projection.bias)
    for h, w in ((4, 5), (7, 3)):
        torch.testing.assert_close(own(Grid(h, w)).tokens, timms(1, h, w)[0].flatten(1).mT)
    hiera = timm.create_model("hiera_small_abswin_256", stages=(1, 1, 1, 1), embed_dim=16, num_heads=1)
    perturbed(hiera)
    windowed = make("absolute_windowed", Grid(*hiera.tokens_spatial_shape), 2, 8, period=tuple(hiera.mask_unit_size))
    with torch.no_grad():
        windowed.coarse = tuple(hiera.pos_embed.shape[-2:])  # of a model that was trained at a smaller size
        windowed.pos_embed = nn.Parameter(hiera.pos_embed.flatten(2).mT)
        windowed.pos_embed_win.copy_(hiera.pos_embed_win.flatten(2).mT)
    grid = Grid(*hiera.tokens_spatial_shape)
    expected = hiera._pos_embed(torch.zeros(1, grid.tokens, 16))
    torch.testing.assert_close(windowed(grid).tokens, expected[0])
    naflex = timm.create_model("naflexvit_base_patch16_parfac_gap", depth=1, embed_dim=16, num_heads=1)
    embed = naflex.embeds
    side = embed.pos_embed_y.shape[1]
    factorized = make("absolute_factorized", Grid(side, side), 2, 8)
    with torch.no_grad():
        factorized.pos_embed_h.copy_(embed.pos_embed_y.normal_())
        factorized.pos_embed_w.copy_(embed.pos_embed_x.normal_())
    x = torch.zeros(1, side * side, 16)
    embed._apply_factorized_pos_embed(x, grid_size=(side, side))
    torch.testing.assert_close(factorized(Grid(side, side)).tokens, x[0])


def test_biases_are_those_of_levit():
    theirs = Attention(32, 8, num_heads=3, resolution=(4, 4))
    own = make("levit", Grid(4, 4), 3)
    with torch.no_grad():
        own.attention_biases.copy_(theirs.attention_biases.normal_())
        expected = theirs.get_attention_biases(torch.device("cpu"))
    grid = Grid(4, 4)
    torch.testing.assert_close(own(grid).tables[0].bias[:, grid.index()], expected)
