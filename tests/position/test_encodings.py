"""Every registered encoding against its oracle, its golden numbers and the properties it must have; no key is left out."""

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn

import oracles
from helpers import golden
from vitrel import POSITIONS, Grid, PositionEncoding, create_position
from vitrel.ops import attention
from vitrel.position.resize import POLICIES
from vitrel.position.terms import Composition

KEYS = list(POSITIONS)
IN_ATTENTION = [key for key, encoding in POSITIONS.items() if encoding.site == "attention"]
BACKENDS = ["reference", "sdpa"]
GRIDS = [Grid(1, 1), Grid(4, 3), Grid(2, 7, 1), Grid(3, 5, 3)]


def perturbed(module: nn.Module, std: float = 0.5) -> nn.Module:
    """Parameters far from their initialisation: a zero table hides every sign and index error."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return module


def attend(encoding, q, k, v, grid, backend="reference"):
    """q, k, v [B, H, N, D] with what the encoding adds to tokens (as with identity projections) and to attention."""
    terms = encoding(grid)
    if terms.tokens is not None:
        tokens = terms.tokens.unflatten(-1, (q.shape[1], -1)).transpose(0, 1).to(q.dtype)  # [H, N, D]
        q, k, v = q + tokens, k + tokens, v + tokens
    return attention(q, k, v, terms, grid, backend=backend)


def qkv(grid, heads=2, dim=8, dtype=torch.float64):
    return torch.randn(3, 2, heads, grid.tokens, dim, dtype=dtype)


def logits_of(encoding, grid, q, k):
    """Logits, from the log of the attention weights: v is the identity. Rows are known up to a constant."""
    eye = torch.eye(grid.tokens, dtype=q.dtype).expand(*q.shape[:2], -1, -1)
    return attention(q, k, eye, encoding(grid), grid, backend="reference").log()


@pytest.mark.parametrize("key", KEYS)
def test_has_an_oracle(key):
    assert key in oracles.ORACLES, f"encoding {key!r} has no oracle in tests/oracles.py"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", KEYS)
def test_golden_numbers(key, backend):
    data = golden(key)
    for case in data["cases"]:
        grid = Grid(**case["grid"])
        encoding = create_position(key, grid, data["heads"], data["width"], dtype=torch.float64)
        own = dict(encoding.named_parameters())
        assert set(own) == set(case["parameters"])
        with torch.no_grad():
            for name, value in case["parameters"].items():
                own[name].copy_(torch.tensor(value, dtype=torch.float64))
        q, k, v = (torch.tensor(case[name], dtype=torch.float64)[None] for name in "qkv")
        out = attend(encoding, q, k, v, grid, backend)
        # Fixed encodings are computed in float32, whatever the model's type.
        torch.testing.assert_close(out[0], torch.tensor(case["output"], dtype=torch.float64), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_equals_its_oracle(key, grid):
    encoding = perturbed(create_position(key, grid, 2, 8, dtype=torch.float64))
    q, k, v = qkv(grid)
    parameters = {name: p.detach().numpy() for name, p in encoding.named_parameters()}
    for backend in BACKENDS:
        out = attend(encoding, q, k, v, grid, backend).detach()
        for b in range(2):
            expected = oracles.ORACLES[key](*(t[b].numpy() for t in (q, k, v)), *grid, **parameters)[1]
            np.testing.assert_allclose(out[b].numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("grid", [Grid(4, 3), Grid(2, 5, 2)], ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_sdpa_has_the_reference_gradients(key, grid):
    encoding = perturbed(create_position(key, grid, 2, 8, dtype=torch.float64))
    q, k, v = (t.requires_grad_() for t in qkv(grid))
    leaves = [q, k, v, *encoding.parameters()]
    weight = torch.randn(2, 2, grid.tokens, 8, dtype=torch.float64)
    reference, sdpa = (
        torch.autograd.grad((attend(encoding, q, k, v, grid, backend) * weight).sum(), leaves) for backend in BACKENDS
    )
    for a, b in zip(reference, sdpa, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("grid", [Grid(3, 4), Grid(2, 3, 2)], ids=str)
@pytest.mark.parametrize("key", [key for key in KEYS if key != "none"])
def test_every_parameter_moves_the_output(key, grid):
    encoding = perturbed(create_position(key, grid, 2, 8))
    q, k, v = (t.requires_grad_() for t in qkv(grid, dtype=torch.float32))
    (attend(encoding, q, k, v, grid) * torch.randn(2, 2, grid.tokens, 8)).sum().backward()
    for name, parameter in encoding.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        rows = parameter.grad.reshape(len(parameter), -1) if key != "absolute" else parameter.grad[0]
        assert (rows.abs().sum(-1) > 0).all(), f"{name}: a row without effect"


@pytest.mark.parametrize("key", IN_ATTENTION)
def test_translation_invariance(key):
    """With one q and one k everywhere, a token-token logit is a function of the offset alone."""
    grid = Grid(5, 6, 2)
    encoding = perturbed(create_position(key, grid, 2, 8, dtype=torch.float64))
    q = torch.randn(1, 2, 1, 8, dtype=torch.float64).expand(-1, -1, grid.tokens, -1)
    k = torch.randn(1, 2, 1, 8, dtype=torch.float64).expand(-1, -1, grid.tokens, -1)
    logits = logits_of(encoding, grid, q, k)[0, :, 2:, 2:]
    logits = logits.view(2, 5, 6, 5, 6)
    a = logits[:, 1:, 2:, 1:, 2:] - logits[:, 1:, 2:, 1:2, 2:3]
    b = logits[:, :-1, :-2, :-1, :-2] - logits[:, :-1, :-2, 0:1, 0:1]
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def transpose(key: str, encoding: nn.Module, grid: Grid) -> nn.Module:
    """The same encoding with the axes swapped, on the grid (w, h)."""
    swapped = create_position(key, Grid(grid.w, grid.h, grid.prefix), 2, 8, dtype=torch.float64)
    with torch.no_grad():
        if key == "absolute":
            rows = encoding.pos_embed[:, grid.prefix :].unflatten(1, (grid.h, grid.w)).transpose(1, 2).flatten(1, 2)
            swapped.pos_embed.copy_(torch.cat((encoding.pos_embed[:, : grid.prefix], rows), 1))
        elif key == "table":
            table = encoding.relative_position_bias_table
            rows = table[: grid.offset_classes()].unflatten(0, (2 * grid.h - 1, 2 * grid.w - 1)).transpose(0, 1).flatten(0, 1)
            swapped.relative_position_bias_table.copy_(torch.cat((rows, table[grid.offset_classes() :])))
        elif key == "factorised":
            n = 2 * grid.h - 1
            swapped.table_h.copy_(torch.cat((encoding.table_w, encoding.table_h[n:])))
            swapped.table_w.copy_(encoding.table_h[:n])
        elif key == "rope_mixed":
            swapped.freqs.copy_(encoding.freqs.flip(0))
        else:
            assert not list(encoding.parameters()), f"say in this test how {key!r} transposes"
    return swapped


CHANNELS = {  # fixed encodings that give each axis its own channels: those of the other axis
    "rope_axial": [2, 3, 0, 1, 6, 7, 4, 5],
    "sincos": [4, 5, 6, 7, 0, 1, 2, 3],
}


@pytest.mark.parametrize("key", KEYS)
def test_transpose_equivariance(key):
    grid = Grid(3, 4, 1)
    heads = 1 if key == "sincos" else 2  # its two halves are those of the whole width
    encoding = perturbed(create_position(key, grid, 2, 8, dtype=torch.float64))
    other = transpose(key, encoding, grid)
    if heads == 1:
        encoding = other = create_position(key, grid, 1, 8)
    q, k, v = qkv(grid, heads)
    order = torch.cat((torch.tensor([0]), 1 + torch.arange(12).view(3, 4).T.flatten()))
    channels = CHANNELS.get(key, list(range(8)))
    out = attend(encoding, q, k, v, grid)
    swapped = attend(other, *(t[:, :, order][..., channels] for t in (q, k, v)), Grid(4, 3, 1))
    torch.testing.assert_close(out[:, :, order][..., channels], swapped, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("key", KEYS)
def test_permutation_control(key):
    """Only `none` may be permutation-equivariant: this catches an encoding that is silently ignored."""
    grid = Grid(3, 4)
    encoding = perturbed(create_position(key, grid, 2, 8))
    q, k, v = qkv(grid, dtype=torch.float32)
    order = torch.randperm(12)
    error = (
        (attend(encoding, q, k, v, grid)[:, :, order] - attend(encoding, *(t[:, :, order] for t in (q, k, v)), grid))
        .abs()
        .max()
    )
    assert error < 1e-5 if key == "none" else error > 1e-2


@pytest.mark.parametrize("key", KEYS)
def test_other_grids_change_nothing_in_the_module(key):
    trained = Grid(4, 5, 1)
    encoding = perturbed(create_position(key, trained, 2, 8))
    before = {name: value.clone() for name, value in encoding.state_dict().items()}
    first = encoding(trained)
    for grid in (Grid(7, 9, 1), Grid(2, 3, 1), Grid(9, 2, 1), Grid(1, 1, 1)):
        encoding(grid)
        assert encoding.resized(trained) == {} and encoding.unseen(trained) == 0
    again = encoding(trained)
    assert all(torch.equal(value, before[name]) for name, value in encoding.state_dict().items())
    for a, b in zip(tensors(first), tensors(again), strict=True):
        assert torch.equal(a, b)


def tensors(terms) -> list[torch.Tensor]:
    """Every tensor inside the terms."""
    found = []
    for item in terms:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, tuple):
            found += tensors(item)
    return found


RESIZED = [(key, {}) for key in KEYS] + [(key, {"resize": r}) for key in ("table", "factorised") for r in POLICIES]


@pytest.mark.parametrize(("key", "options"), RESIZED, ids=str)
def test_half_precision_does_not_round_positions(key, options):
    """A model cast to bfloat16 computes coordinates, angles and resampled rows as the float32 one does from the same
    parameters: rotations and fixed embeddings stay float32, learned rows are rounded once, at the end."""
    half = create_position(key, Grid(40, 50), 2, 8, **options).bfloat16()
    full = copy.deepcopy(half).float()
    for grid in (Grid(40, 50), Grid(47, 61), Grid(40, 70), Grid(60, 9)):
        exact = not list(full.parameters()) or half(grid).rotary is not None
        for a, b in zip(tensors(full(grid)), tensors(half(grid)), strict=True):
            assert b.dtype == (torch.float32 if exact else torch.bfloat16)
            assert torch.equal(a.to(b.dtype), b) and b.isfinite().all()


@pytest.mark.parametrize("base", [None, 10.0, 50.0])
def test_frequencies_of_rope_mixed(base):
    """Magnitudes base^(-4t/D), base 10 unless given, once along a random direction per head and once at right angles to it."""
    heads, n = 64, 4
    encoding = create_position("rope_mixed", Grid(3, 3), heads, 4 * n, **({} if base is None else {"base": base}))
    freqs = encoding.freqs.detach()  # [2, H, D/2], rows (y) first
    magnitude = torch.tensor([(base or 10.0) ** (-t / n) for t in range(n)])
    torch.testing.assert_close(freqs.norm(dim=0), magnitude.repeat(2).expand(heads, -1))
    direction = freqs / freqs.norm(dim=0)
    first, second = direction[..., :1], direction[..., n : n + 1]  # [2, H, 1]
    torch.testing.assert_close(direction, torch.cat((first.expand(2, -1, n), second.expand(2, -1, n)), -1))
    torch.testing.assert_close((first * second).sum(0), torch.zeros(heads, 1), atol=1e-6, rtol=0)
    turn = torch.atan2(first[0, :, 0], first[1, :, 0]).sort().values
    assert turn[0] < -2.5 and turn[-1] > 2.5 and turn.diff().max() < 1  # all around, not one direction for all heads


@pytest.mark.parametrize("base", [None, 100.0, 10.0])
def test_frequencies_of_rope_axial(base):
    encoding = create_position("rope_axial", Grid(3, 3), 2, 16, **({} if base is None else {"base": base}))
    cos, sin = encoding(Grid(2, 2, 1)).rotary  # [1, N, D/2]
    theta = torch.tensor([(base or 100.0) ** (-t / 4) for t in range(4)])
    for row, (y, x) in enumerate([(0, 0), (0, 0), (0, 1), (1, 0), (1, 1)]):  # the first is the prefix token
        angle = torch.cat((y * theta, x * theta))
        torch.testing.assert_close((cos[0, row], sin[0, row]), (angle.cos(), angle.sin()))


@pytest.mark.parametrize("base", [None, 10000.0, 100.0])
def test_frequencies_of_sincos(base):
    encoding = create_position("sincos", Grid(3, 3), 2, 8, **({} if base is None else {"base": base}))
    frequency = torch.tensor([(base or 10000.0) ** (-t / 4) for t in range(4)])
    y, x = 2 * frequency, 1 * frequency
    torch.testing.assert_close(encoding(Grid(3, 2)).tokens[5], torch.cat((y.sin(), y.cos(), x.sin(), x.cos())))


@pytest.mark.parametrize("key", ["absolute", "table", "factorised"])
def test_standard_deviation_at_initialisation(key):
    for options in [{}] if key == "absolute" else [{}, {"init_std": 0.3}]:
        for parameter in create_position(key, Grid(40, 50), 8, 8, **options).parameters():
            assert parameter.std().item() == pytest.approx(options.get("init_std", 0.02), rel=0.15)


@pytest.mark.parametrize("key", KEYS)
def test_autocast_does_not_round_terms(key):
    encoding = create_position(key, Grid(4, 4), 2, 8)
    expected = tensors(encoding(Grid(6, 9)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in zip(tensors(encoding(Grid(6, 9))), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("key", KEYS)
def test_is_final(key):
    """An encoding derives from the interface alone, and nothing derives from it."""
    assert POSITIONS[key].__bases__ == (PositionEncoding,) and POSITIONS[key].__subclasses__() == []


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        PositionEncoding()
    assert {c for c in PositionEncoding.__subclasses__() if c.__module__[:7] == "vitrel."} == {*POSITIONS.values(), Composition}


@pytest.mark.parametrize("key", KEYS)
def test_interface(key):
    """One signature, a docstring that opens with the key and names its source, and options by keyword only."""
    encoding = POSITIONS[key]
    names = list(inspect.signature(encoding).parameters)
    assert names[:3] == ["grid", "num_heads", "head_dim"] and {"device", "dtype"} <= set(names)
    module = inspect.getmodule(encoding)
    assert key in module.__doc__.splitlines()[0]
    assert key == "none" or "arXiv" in module.__doc__
    on_meta = create_position(key, Grid(3, 3), 2, 8, device="meta")
    assert all(t.is_meta for t in on_meta.state_dict().values())
