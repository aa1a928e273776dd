"""The recorder against attention written out: what each call is made of, for every way in which a model computes it."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from helpers import each
from vitrel import Grid
from vitrel.inspect.any_model import trace
from vitrel.inspect.attention import record

N = 12  # tokens, 3 x 4


class Model(nn.Module):
    """One attention over 3 x 4 patches of 4 pixels, with a bias, a rotation and a mask; `attend` computes it."""

    def __init__(self, attend, rotates=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.attend = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48), attend
        self.rows = nn.Parameter(torch.randn(2, 5, 7))  # by offset
        angle = torch.arange(N)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
        angle = angle if rotates else torch.zeros_like(angle)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))
        self.rotates = rotates
        hidden = torch.zeros(N, N, dtype=torch.bool)
        hidden[2, 5:] = True
        self.register_buffer("hidden", hidden)

    @property
    def table(self):
        return self.rows.flatten(1)[:, Grid(3, 4).index()]  # [2, N, N]

    def parts(self, image):
        x = self.embed(image).flatten(2).mT
        q, k, v = self.qkv(x).view(len(x), N, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return (self.rotated(q), self.rotated(k), v) if self.rotates else (q, k, v)

    def rotated(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def forward(self, image):
        return self.attend(self, *self.parts(image)).mean(2)


def mask_of(model):
    return torch.zeros(N, N).masked_fill(model.hidden, -math.inf)


def fused(model, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, model.table + mask_of(model))


def written(model, q, k, v):
    logits = (q * 8**-0.5) @ k.mT
    logits = logits + model.table
    return logits.masked_fill(model.hidden, -math.inf).softmax(-1) @ v


def in_place(model, q, k, v):
    logits = torch.matmul(q, k.transpose(-2, -1)) * 8**-0.5
    logits += model.table
    logits += mask_of(model)
    return torch.softmax(logits, -1) @ v


def one_call(model, q, k, v):
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    logits = torch.baddbmm(model.table.repeat(len(v), 1, 1), q, k.mT, alpha=8**-0.5).view(len(v), 2, N, N)
    return logits.masked_fill(model.hidden, -math.inf).softmax(-1) @ v


def flex(model, q, k, v):
    table, hidden = model.table, model.hidden
    block = create_block_mask(lambda b, h, i, j: ~hidden[i, j], len(q), 2, N, N, device="cpu")
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i, j], block_mask=block)


def test_a_trace_keeps_no_bias_of_all_pairs():
    """Twelve layers of 28 x 28 patches would take 350 MB."""
    (call,) = trace(timm.create_model("beit_base_patch16_224", depth=1, embed_dim=24, num_heads=2), (224, 224)).calls
    assert call.bias.shape == (27, 27, 2) and call.bias.untyped_storage().nbytes() == 27 * 27 * 2 * 4


@each("rotates", [False, True])
@each("attend", [fused, written, in_place, one_call, flex])
def test_every_way_to_attend(attend, rotates):
    model, images = Model(attend, rotates).eval(), torch.randn(2, 3, 12, 16)
    (layer,) = record(model, images)
    with torch.no_grad():
        q, k, _ = model.parts(images)
        logits = q @ k.mT * 8**-0.5 + model.table + mask_of(model)
        model.rotates = False
        q, k, _ = model.parts(images)
        content = q @ k.mT * 8**-0.5 + mask_of(model)
        model.rotates = rotates
    assert layer.grid == Grid(3, 4) and layer.window is None and layer.tokens.tolist() == [list(range(N))]
    torch.testing.assert_close(layer.logits[:, 0], logits)
    torch.testing.assert_close(layer.weights[:, 0], logits.softmax(-1))
    torch.testing.assert_close(layer.content[:, 0], content.softmax(-1))
    seen = ~model.hidden.expand(2, 2, N, N)
    assert torch.equal(layer.visible[:, 0], seen)
    torch.testing.assert_close(layer.position[:, 0][seen], (logits - content)[seen], atol=1e-5, rtol=1e-5)
    assert bool(layer.rotation) == rotates and {"rows"} <= set(layer.parameters)
    assert not {"qkv.weight", "qkv.bias", "embed.weight"} & set(layer.parameters)
    assert layer.query.shape == layer.key.shape == (2, 1, 2, N, 8)


@each("attend", [fused, written, in_place, flex])
def test_a_pass_without_values_knows_biases_and_masks(attend):
    model = Model(attend).eval()
    (call,) = trace(model, (12, 16)).calls
    known = ~call.bias.isnan()
    torch.testing.assert_close(call.bias[known], model.rows.detach().movedim(0, -1)[known])
    assert known.float().mean() > 0.9
    assert call.grid == Grid(3, 4) and call.heads == 2 and torch.equal(call.visible[0, 0], ~model.hidden)


def test_operators_that_return_no_tensor_or_a_list_of_one():
    """A second block repeats the operators of the first, whose layouts are known by then."""

    def attend(model, q, k, v):
        for _ in range(2):
            assert torch.ops.aten.is_same_size(q, k) is True
            torch._assert_async((q == q).all())
            torch.ops.aten._assert_tensor_metadata(q, [*q.shape])
            (q,) = q.unbind(0)
            (q,) = q[None].split(1)
        return fused(model, q, k, v)

    (call,) = trace(Model(attend), (12, 16)).calls
    assert call.grid == Grid(3, 4) and call.bias is not None


def test_what_depends_on_content_is_position():
    """SAM's decomposed rows are products of queries with tables."""
    model = timm.create_model(
        "samvit_base_patch16", img_size=112, depth=2, embed_dim=24, num_heads=2, global_attn_indexes=(1,), window_size=4
    ).eval()
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter, std=0.3)
    images = torch.randn(1, 3, 112, 112)
    first, last = record(model, images)
    assert (first.window, last.window, last.grid) == ((4, 4), None, Grid(7, 7))
    assert (first.tokens < 0).sum() == 15 and {"blocks.0.attn.rel_pos_h", "blocks.0.attn.rel_pos_w"} <= set(first.parameters)
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            nn.init.zeros_(parameter)
    torch.testing.assert_close(record(model, images)[0].weights, first.content)
    assert (first.content - first.weights).abs().max() > 1e-3


@pytest.mark.slow
@each(
    ("name", "windows"),
    [
        ("test_maxvit", {(None, False), ((4, 4), False), ((4, 4), True)}),
        ("pvt_v2_b0", {(None, False)}),
    ],
)
def test_families_without_a_list_of_classes(name, windows):
    options = dict(img_size=128) if name == "test_maxvit" else {}
    calls = trace(timm.create_model(name, **options), (128, 128)).calls
    assert calls and all(call.grid is not None for call in calls)
    assert {(call.window, call.strided) for call in calls} <= windows
