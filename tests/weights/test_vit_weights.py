"""ViT weights of timm: random ones give timm's logits and, in its layout, its gradients."""

from functools import partial

import timm
import torch
from timm.layers import SwiGLUPacked
from timm.models.beit import Beit
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

import vitrel
from helpers import each
from helpers.vit_peers import HEADS, SCALED, SIZES, SMALL, C, ours, perturb, renamed, same


@each("size", SIZES)
def test_deit_iii(size):
    """Layer scale, and an embedding without a row for the class token."""
    peer = perturb(VisionTransformer(**SMALL, init_values=1.0, no_embed_class=True, dynamic_img_size=True))
    model = vitrel.load_pretrained(ours("absolute", SCALED), peer.state_dict())
    assert not model.pos_embed.pos_embed[:, 0].any()
    same(model, peer, torch.randn(2, 3, *size))


@each("size", SIZES)
@each("options", [dict(), dict(class_token=False, global_pool="avg"), dict(no_embed_class=True), dict(global_pool="avg")])
def test_registers(size, options):
    peer = perturb(VisionTransformer(**SMALL, reg_tokens=4, dynamic_img_size=True, **options))
    own = {name: value for name, value in options.items() if name != "no_embed_class"}
    model = vitrel.load_pretrained(ours("absolute", reg_tokens=4, **own), peer.state_dict())
    same(model, peer, torch.randn(2, 3, *size))


def test_a_file_of_authors_is_read_by_timms_filter(tmp_path):
    """DINOv2's: the embedding has a row for the class token and none for the registers, w12 and w3 are a packed SwiGLU."""
    options = dict(depth=2, embed_dim=C, num_heads=HEADS, img_size=56, mlp_ratio=4.0)
    theirs = perturb(timm.create_model("vit_giant_patch14_reg4_dinov2", **options))
    state = renamed(theirs.state_dict(), (r"^reg_token$", "register_tokens"), (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))
    row = torch.randn(1, 1, C)
    state |= dict(mask_token=torch.ones(1, C), cls_token=theirs.cls_token - row)
    state["pos_embed"] = torch.cat((row, theirs.pos_embed), 1)
    torch.save(state, path := tmp_path / "dinov2.pth")
    image = torch.randn(2, 3, 56, 56)
    for model in (
        vitrel.from_timm("vit_giant_patch14_reg4_dinov2", checkpoint_path=path, **options),
        vitrel.load(path, like="vit_giant_patch14_reg4_dinov2", **options),
    ):
        torch.testing.assert_close(model.eval()(image), theirs(image), atol=2e-5, rtol=1e-4)


def test_packed_swiglu():
    """DINOv2's largest."""
    peer = perturb(VisionTransformer(**SMALL, init_values=1.0, mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, mlp_ratio=5.5))
    model = ours("absolute", SCALED | dict(mlp="swiglu"), mlp_ratio=2.75)
    same(vitrel.load_pretrained(model, peer.state_dict()), peer, torch.randn(2, 3, 48, 48))


def test_non_square_source():
    """A 4x8 grid has as many rows as an 8x4 one: the model's is assumed, which is right here."""
    peer = perturb(VisionTransformer(**SMALL | dict(img_size=(32, 64)), dynamic_img_size=True))
    model = vitrel.load_pretrained(ours("absolute", img_size=(32, 64)), peer.state_dict())
    for size in ((32, 64), (64, 32), (48, 48)):
        same(model, peer, torch.randn(1, 3, *size))
    transposed = vitrel.load_pretrained(ours("absolute", img_size=(64, 32)), model)
    image = torch.randn(1, 3, 64, 32)
    torch.testing.assert_close(transposed(image), model(image), atol=2e-5, rtol=0)


@each("size", [(48, 48), (56, 80)])
@each("absolute", [False, True])
def test_beit_tables_per_layer(absolute, size):
    """Prefix rows, biases of q and v alone, layer scale, a norm after pooling; timm's larger tables are our "geometric"."""
    peer = perturb(Beit(**SMALL, init_values=1.0, use_rel_pos_bias=True, use_abs_pos_emb=absolute))
    key = "absolute+table" if absolute else "table"
    native = vitrel.load_pretrained(ours(key, SCALED, global_pool="avg"), peer.state_dict())
    resampled = vitrel.load_pretrained(ours(key, SCALED, global_pool="avg", img_size=size), peer.state_dict())
    for model in (native, resampled):  # the class token's rows are never resampled; they move the other tokens little
        prefix = model.blocks[1].position.relative_position_bias_table[-3:]
        assert torch.equal(prefix, peer.blocks[1].attn.relative_position_bias_table[-3:])
    peer.set_input_size(size)
    larger = ours(key, SCALED, global_pool="avg", img_size=size)
    vitrel.load_pretrained(larger, peer.state_dict())
    image = torch.randn(2, 3, *size)
    same(larger, peer, image)
    for model in (native, resampled):
        torch.testing.assert_close(model(image), peer(image), atol=2e-5, rtol=0)


def test_beit_at_a_smaller_size():
    """Right is the exact center of the table; timm reads it at offsets 1, 2.01, 3.03, ..., its least geometric growth."""
    peer = perturb(Beit(**SMALL, use_rel_pos_bias=True, use_abs_pos_emb=False))
    model = vitrel.load_pretrained(ours("table", global_pool="avg"), peer.state_dict())
    center = {
        name: torch.cat((value[:-3].view(11, 11, HEADS)[2:-2, 1:-1].flatten(0, 1), value[-3:])) if "table" in name else value
        for name, value in peer.state_dict().items()
    }
    small = Beit(**SMALL | dict(img_size=(32, 40)), use_rel_pos_bias=True, use_abs_pos_emb=False).eval()
    small.load_state_dict(center)
    image = torch.randn(2, 3, 32, 40)
    torch.testing.assert_close(model(image), small(image), atol=2e-5, rtol=0)
    peer.set_input_size((32, 40))
    assert (peer(image) - small(image)).abs().max() > 1e-4


@each("share", [False, True])
def test_beit_shared_table(share):
    """Into a shared encoding, or copied to every block: then the blocks' gradients sum to the peer's."""
    peer = perturb(Beit(**SMALL, use_shared_rel_pos_bias=True, use_abs_pos_emb=False))
    model = ours("table", global_pool="avg", share_position=share)
    vitrel.load_pretrained(model, peer.state_dict())
    same(model, peer, torch.randn(2, 3, 48, 48))
    if share:
        peer.set_input_size((64, 56))  # both sides grow: timm does not read one that stays exactly
        image = torch.randn(2, 3, 64, 56)
        torch.testing.assert_close(model(image), peer(image), atol=2e-5, rtol=0)


@each("shared", [False, True])
@each("class_token", [False, True])
def test_timm_relative_position_bias(shared, class_token):
    peer = VisionTransformerRelPos(
        **SMALL, rel_pos_type="bias", shared_rel_pos=shared, class_token=class_token, fc_norm=True, init_values=1.0
    )
    perturb(peer)
    model = ours("table", SCALED, class_token=class_token, global_pool="avg", share_position=shared)
    same(vitrel.load_pretrained(model, peer.state_dict()), peer, torch.randn(2, 3, 48, 48))


def sam(**own):
    """SAM's encoder: windows but in the last block. Its authors' norms have eps 1e-6, timm's 1e-5."""
    size = SMALL | dict(img_size=64, depth=3, num_classes=0)
    norm = partial(nn.LayerNorm, eps=1e-6)
    kind = dict(use_rel_pos=True, window_size=4, global_attn_indexes=(2,), norm_layer=norm, neck_chans=16)
    return perturb(VisionTransformerSAM(**size, **kind, **own))


def before_the_neck(model, peer, image):
    model, peer = (net.forward_intermediates(image, indices=1, intermediates_only=True)[0] for net in (model, peer))
    return model, peer


def test_sam():
    """Grids that the window divides; at others SAM attends to its padding."""
    peer = sam()
    window = dict(window=4, global_blocks=(2,))
    own = dict(img_size=64, depth=3, num_classes=0, class_token=False, global_pool="")
    model = ours("absolute+decomposed", window, **own)
    vitrel.load_pretrained(model, peer.state_dict(), allow_unused=["*neck.*"], allow_unset=["norm.*"])
    same(model, peer, torch.randn(2, 3, 64, 64), features=before_the_neck)
    image = torch.randn(2, 3, 96, 128)  # grows: linear in both, the embedding antialiased in both
    a, b = before_the_neck(model, peer, image)
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    a, b = before_the_neck(model, peer, torch.randn(2, 3, 72, 72))
    assert (a - b).norm() > 0.01 * b.norm()  # 9x9 tokens in windows of 4


def test_mvit_tables_without_pooling():
    """MViTv2's attention where nothing is pooled is ours with decomposed tables, the class token without a term."""
    peer = perturb(MultiScaleAttention(C, C, (6, 6), HEADS, residual_pooling=False))
    layer = vitrel.RelativeAttention(C, HEADS, position="decomposed", grid=(6, 6, 1))
    state = peer.state_dict()
    layer.load_state_dict({("position." if "rel" in n else "attn.") + n: t for n, t in state.items()})
    x = torch.randn(2, 37, C)
    a, (b, _) = layer(x, (6, 6, 1)), peer(x, (6, 6))
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    for out in (a, b):
        out.square().sum().backward()
    for n, p in peer.named_parameters():
        own = layer.get_parameter(("position." if "rel" in n else "attn.") + n).grad
        assert (own - p.grad).norm() <= 2e-5 * p.grad.norm() + 1e-7, n
    peer.rel_pos_h, peer.rel_pos_w = nn.Parameter(peer.rel_pos_h[2:-2]), nn.Parameter(peer.rel_pos_w[1:-1])
    torch.testing.assert_close(layer(x[:, :21], (4, 5, 1)), peer(x[:, :21], (4, 5))[0], atol=2e-5, rtol=0)
