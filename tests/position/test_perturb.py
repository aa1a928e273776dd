"""Coordinates perturbed in training: the draws, what each encoding makes of them, and that evaluation never sees them."""

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from helpers import each
from helpers.variants import make
from vitrel import Grid, create_position
from vitrel.position import terms
from vitrel.position.perturb import perturb
from vitrel.position.resample import sample_embedding
from vitrel.weights.record import position_record

KEYS = ["absolute", "rope_axial", "rope_mixed", "rope_normalized"]
ALL = dict(shift_coords=0.7, jitter_coords=1.3, rescale_coords=1.5)
NOTHING = dict(shift_coords=0.0, jitter_coords=1.0, rescale_coords=1.0)  # draws, all of them zero


def read(encoding, grid):
    """What the encoding gives on `grid`: its tokens, or cosine and sine."""
    out = encoding(grid)
    return (out.tokens,) if out.rotary is None else out.rotary


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def largest(monkeypatch):
    """Every draw at the upper end of its range."""
    monkeypatch.setattr(torch, "rand", lambda *size, **how: torch.ones(size, **how))


def test_order_and_strength_of_the_draws(monkeypatch):
    draws = iter([[0.75, 0.25], [1.0, 0.0], [0.75]])  # of [0, 1): y and x shifted, y and x stretched, both rescaled
    monkeypatch.setattr(torch, "rand", lambda *size, **how: torch.tensor(next(draws), **how).reshape(size))
    out = perturb(torch.tensor([[1.0, 2.0]]), shift_coords=2.0, jitter_coords=4.0, rescale_coords=9.0)
    torch.testing.assert_close(out, torch.tensor([[(1 + 1) * 4 * 3, (2 - 1) / 4 * 3]]))


def test_one_draw_serves_all_coordinates_in_float32():
    at = torch.randn(5, 2, dtype=torch.float64)
    torch.manual_seed(3)
    out = perturb(at, **ALL)
    torch.manual_seed(3)
    each = torch.cat([perturb(at[:1].float(), **ALL).double(), out[1:]])
    torch.testing.assert_close(each, out, atol=1e-6, rtol=1e-6)
    (a, b), c = out[:2], at[:2]
    torch.testing.assert_close(out[4], a + (b - a) * (at[4] - c[0]) / (c[1] - c[0]))  # one affine map per axis
    assert perturb(at) is at


@each("key", KEYS)
def test_off_by_default_and_in_evaluation(key):
    """No draw, the same parameters and the very same values; on, two steps differ."""
    plain, moved = make(key, Grid(4, 6, 1), dim=16), make(key, Grid(4, 6, 1), dim=16, **ALL)
    moved.load_state_dict(plain.state_dict())
    for grid in (Grid(4, 6, 1), Grid(5, 3, 1)):
        before = torch.get_rng_state()
        assert same(read(plain.train(), grid), read(plain.eval(), grid)) and same(read(moved.eval(), grid), read(plain, grid))
        assert torch.equal(torch.get_rng_state(), before)
        assert moved.resampled(grid) == plain.resampled(grid) and moved.unseen(grid) == plain.unseen(grid)
        moved.train()
        torch.manual_seed(1)
        first = read(moved, grid)
        assert not same(first, read(moved, grid)) and not same(first, read(plain, grid))
        torch.manual_seed(1)
        assert same(first, read(moved, grid))
        for a, b in zip(first, read(plain, grid), strict=True):
            assert torch.equal(a[..., :1, :], b[..., :1, :]) and a.shape == b.shape and a.dtype == b.dtype  # the prefix row


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each("key", KEYS)
def test_draws_of_zero_are_the_identity(key, dtype):
    plain, moved = (make(key, Grid(5, 6, 2), dim=16, dtype=dtype, **options) for options in ({}, NOTHING))
    moved.load_state_dict(plain.state_dict())
    for grid in (Grid(5, 6, 2), Grid(7, 3, 2), Grid(1, 1, 2)):
        assert moved.perturbs and same(read(moved, grid), read(plain, grid))


@each("size", [(4, 6), (1, 5), (7, 1)])
def test_rows_are_sampled_as_torch_samples_images(size):
    h, w = size
    embedding = torch.randn(h, w, 3)
    at = torch.rand(50, 2) * torch.tensor([h + 3, w + 3]) - 2  # over the border too
    unit = 2 * at / torch.tensor([max(h - 1, 1), max(w - 1, 1)]) - 1
    image = embedding.permute(2, 0, 1)[None]
    expected = F.grid_sample(image, unit.flip(-1)[None, None], padding_mode="border", align_corners=True)[0, :, 0].T
    torch.testing.assert_close(sample_embedding(embedding, at), expected, atol=2e-6, rtol=1e-5)


def test_gradient_of_the_sampled_rows():
    embedding = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    at = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sample_embedding, (embedding, (at * 1.9).detach()))
    encoding = make("absolute", Grid(4, 4, 1), **ALL)
    encoding(Grid(6, 5, 1)).tokens.square().sum().backward()
    assert encoding.pos_embed.grad.isfinite().all() and encoding.pos_embed.grad[0, 0].abs().min() > 0


def test_absolute_rows_move_by_whole_patches(largest):
    encoding = make("absolute", Grid(3, 4, 1), shift_coords=1.0)
    prefix, rows = encoding.pos_embed[0, :1], encoding.pos_embed[0, 1:].view(3, 4, -1)
    expected = rows[[1, 2, 2]][:, [1, 2, 3, 3]].flatten(0, 1)  # each reads its neighbor, the last ones the edge
    assert torch.equal(encoding(Grid(3, 4, 1)).tokens, torch.cat((prefix, expected)))


@pytest.mark.parametrize("option", ["jitter_coords", "rescale_coords"])
def test_absolute_rows_stretch_from_the_middle(largest, option):
    encoding = make("absolute", Grid(5, 3), **{option: 2.0})
    rows = encoding.pos_embed[0].view(5, 3, -1)
    expected = rows[[0, 0, 2, 4, 4]][:, [0, 1, 2]]
    torch.testing.assert_close(encoding(Grid(5, 3)).tokens.view(5, 3, -1), expected)


def test_rotations_move_in_patches(largest):
    """Angles of rope_axial and rope_mixed, at positions shifted by 0.5 and then stretched twofold."""
    grid = Grid(3, 4, 1)
    y, x = (2 * (grid.coordinates().float() + 0.5)).unbind(-1)
    axial, mixed = (make(key, grid, dim=16, shift_coords=0.5, jitter_coords=2.0) for key in ("rope_axial", "rope_mixed"))
    theta = 100.0 ** (-torch.arange(4) / 4)
    angle = torch.cat((y[:, None] * theta, x[:, None] * theta), -1)
    torch.testing.assert_close(axial(grid).rotary[1][0, 1:], angle.sin(), atol=1e-5, rtol=1e-5)
    angle = y[:, None] * mixed.freqs[0, :, None] + x[:, None] * mixed.freqs[1, :, None]
    torch.testing.assert_close(mixed(grid).rotary[0][:, 1:], angle.cos(), atol=1e-5, rtol=1e-5)


@each("key", KEYS)
def test_half_precision_perturbs_in_float32(key):
    exact = make(key, Grid(14, 14), dim=16, **ALL)
    half = copy.deepcopy(exact).bfloat16()
    restored = copy.deepcopy(half).float()
    for grid in (Grid(14, 14), Grid(40, 31)):
        torch.manual_seed(2)
        out = read(half, grid)
        torch.manual_seed(2)
        for a, b in zip(out, read(restored, grid), strict=True):
            assert (a.float() - b).abs().max() <= 2**-7 * b.abs().max()
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            under = read(restored, grid)
        torch.manual_seed(2)
        assert same(under, read(restored, grid))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["absolute", "rope_mixed"])  # sampled rows, and coordinates, which all rotations share
def test_compiled_without_a_graph_per_step(key):
    torch._dynamo.reset()  # all encodings share `forward`, whose sizes another test may have made dynamic already
    encoding, counter = make(key, Grid(4, 6, 1), dim=16, **ALL), CompileCounter()
    compiled = torch.compile(encoding, backend=counter, fullgraph=True)
    for step in range(4):
        torch.manual_seed(step)
        out = read(compiled, Grid(4, 6, 1))
        torch.manual_seed(step)
        for a, b in zip(out, read(encoding, Grid(4, 6, 1)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1
    for grid in (Grid(5, 7, 1), Grid(8, 3, 1), Grid(9, 12, 1)):
        read(compiled, grid)
    assert counter.frame_count == 2  # one more, for all other sizes


def test_exported_for_evaluation_without_a_draw():
    model = timm.create_model(
        "vitrel_vit_n8_absolute_rope_mixed", depth=1, num_classes=3, img_size=32, position_args=ALL
    ).eval()
    image = torch.randn(1, 3, 32, 32)
    program = torch.export.export(model, (image,))
    assert not [node for node in program.graph.nodes if "rand" in str(node.target)]
    assert torch.equal(program.module()(image), model(image))


def test_every_part_of_a_composition_takes_the_options():
    both = create_position("absolute+rope_mixed+table", (4, 4), 2, 8, shift_coords=0.5, policy="clip")
    parts = both.parts
    assert {name: part.shift_coords for name, part in parts.items()} == {"absolute": 0.5, "rope_mixed": 0.5, "table": None}
    assert (parts["table"].policy, parts["absolute"].policy) == ("clip", "bicubic")


@pytest.mark.parametrize(("share", "draws"), [(False, 4), (True, 1)])
def test_a_draw_per_layer_or_one_for_all(monkeypatch, share, draws):
    model = timm.create_model("vitrel_vit_n8_rope_mixed", num_classes=3, share_position=share, position_args=ALL)
    drawn = []
    monkeypatch.setattr(terms, "perturb", lambda *given: drawn.append(perturb(*given)) or drawn[-1])
    out = model(torch.randn(2, 3, 64, 64))
    out.sum().backward()
    assert len(drawn) == draws and len({tuple(at[-1].tolist()) for at in drawn}) == draws
    model.eval()(torch.randn(1, 3, 64, 64))
    assert len(drawn) == draws


def test_a_trained_model_does_not_depend_on_what_perturbed_it():
    """Neither the file nor its record names the strengths, so they may change between training and fine-tuning."""
    plain, moved = (
        timm.create_model("vitrel_swin_n_rope_mixed", num_classes=3, position_args=options) for options in ({}, ALL)
    )
    assert position_record(plain) == position_record(moved)
    moved.load_state_dict(plain.state_dict())
    image = torch.randn(1, 3, 64, 96)
    assert torch.equal(moved.eval()(image), plain.eval()(image))
    moved.train()
    assert not torch.equal(moved(image), moved(image))


@each(
    ("key", "options", "text"),
    [
        ("absolute", dict(shift_coords=-0.1), "absolute needs shift_coords of at least 0, or None for none, not -0.1"),
        ("rope_mixed", dict(jitter_coords=0.9), "rope_mixed needs jitter_coords of at least 1, or None for none, not 0.9"),
        (
            "rope_axial",
            dict(rescale_coords=math.inf),
            "rope_axial needs rescale_coords of at least 1, or None for none, not inf",
        ),
        ("absolute", dict(rescale_coords=math.nan), "absolute needs rescale_coords of at least 1, or None for none, not nan"),
    ],
)
def test_impossible_strengths(key, options, text):
    with pytest.raises(ValueError, match=text):
        create_position(key, (4, 4), 2, 8, **options)
    assert not create_position(key, (4, 4), 2, 8, shift_coords=None, jitter_coords=None, rescale_coords=None).perturbs
