"""ViT weights of timm in models of other grids: their tables and embeddings are read as timm reads them, or better."""

import timm
import torch
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer

import vitrel
from helpers import each
from helpers.vit_peers import HEADS, SCALED, SMALL, C, ours, perturb, renamed, same


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
    """Into a shared encoding, or copied to every block."""
    peer = perturb(Beit(**SMALL, use_shared_rel_pos_bias=True, use_abs_pos_emb=False))
    model = ours("table", global_pool="avg", share_position=share)
    vitrel.load_pretrained(model, peer.state_dict())
    same(model, peer, torch.randn(2, 3, 48, 48))
    if share:
        peer.set_input_size((64, 56))  # both sides grow: timm does not read one that stays exactly
        image = torch.randn(2, 3, 64, 56)
        torch.testing.assert_close(model(image), peer(image), atol=2e-5, rtol=0)
