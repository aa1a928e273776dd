"""What relativize refuses and how it says so, before anything has changed."""

import warnings

import pytest
import timm
import torch
from timm.layers import PatchEmbed
from timm.models.naflexvit import NaFlexVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from torch import nn

from helpers.relativize_models import TINY, build, image
from vitrel.convert.fade import absolute_scale
from vitrel.convert.relativize import relativize
from vitrel.models.vit import ViT


def without_size():
    model = build("no_absolute")
    model.patch_embed = PatchEmbed(None, 8, 3, 32)
    return model


class OwnEmbedding(VisionTransformer):
    def _pos_embed(self, x):
        return super()._pos_embed(x)


REFUSED = [
    (lambda: "vit_tiny", {}, "takes a model object, not str; build it first"),
    (lambda: relativize(build("vit")), {}, "is relativized already: build the model anew"),
    (lambda: ViT(position="absolute+table", **TINY), {}, "has position in attention already: build it with"),
    (lambda: relativize(build("vitrel")), {}, "has position in attention already"),
    (lambda: build("vit"), dict(position="absolute+table"), "'absolute' adds to the tokens, .* attention keys only"),
    (lambda: build("vit"), dict(position="tabel"), "did you mean 'table'"),
    (lambda: build("vit"), dict(position_args=dict(radius=3)), "has no option 'radius'"),
    (lambda: build("vit"), dict(position_args=dict(init_std=1.0)), "init_std=1.0 has no effect, .* pass zero_init=False"),
    (lambda: build("vit"), dict(absolute="remove"), "absolute='remove' is unknown; choose one of keep, drop, fade"),
    (lambda: build("vit"), dict(rope="replace"), "rope='replace' is unknown; choose one of keep, drop"),
    (lambda: build("vit"), dict(absolute="fade"), "needs fade_steps, .* not None"),
    (lambda: build("vit"), dict(absolute="fade", fade_steps=0), "a whole number from 1, not 0"),
    (lambda: build("vit"), dict(fade_steps=9), "fade_steps=9 needs absolute='fade', not 'keep'"),
    (lambda: build("dinov3"), dict(absolute="fade", fade_steps=9), "needs an absolute embedding, and the model has none"),
    (lambda: build("vit", num_heads=16), dict(position="rope_mixed"), "head width divisible by 4"),
    (lambda: build("vit", patch_drop_rate=0.5), {}, r"drops patches \(patch_drop_rate=0.5\)"),
    (lambda: build("eva", patch_drop_rate=0.5), {}, r"drops patches \(patch_drop_rate=0.5\)"),
    (lambda: build("vit", block_fn=ParallelScalingBlock), {}, "ParallelScalingBlock has no attention of its own"),
    (lambda: build("vit", block_fn=ParallelThingsBlock), {}, "ParallelThingsBlock has no attention of its own"),
    (lambda: build("vit", attn_layer="diff"), {}, "DiffAttention computes attention in a way of its own"),
    (
        lambda: build("attention_rope", num_kv_heads=1, qkv_fused=False),
        {},
        r"grouped-query attention \(2 heads share 1 of keys and values\) .* num_kv_heads=None",
    ),
    (lambda: SwinTransformer(img_size=32, embed_dim=8, depths=(1,), num_heads=(1,), window_size=4), {}, "already windowed"),
    (lambda: timm.create_model("vitrel_swin_n"), {}, "already windowed"),
    (lambda: NaFlexVit(embed_dim=32, depth=1, num_heads=2), {}, "not NaFlexVit: load the weights into one of them"),
    (lambda: timm.create_model("beit_base_patch16_224", depth=1), {}, "already has a relative bias of its own"),
    (lambda: timm.create_model("vit_relpos_small_patch16_224", depth=1), {}, "already has a relative bias of its own"),
    (lambda: nn.DataParallel(build("vit")), {}, "not DataParallel: .* unwrap a model that is compiled, parallel"),
    (lambda: OwnEmbedding(**TINY), {}, "OwnEmbedding has a _pos_embed of its own"),
]


def test_grid():
    model = relativize(build("vit"), grid=(2, 3))
    assert model.blocks[0].attn.position.grid == (2, 3, 1)
    assert model.blocks[0].attn.position.relative_position_bias_table.shape == (3 * 5 + 3, 2)
    with pytest.raises(ValueError, match=r"grid \(2, 0\) must be \(h, w\) in patches"):
        relativize(build("vit"), grid=(2, 0))
    with pytest.raises(ValueError, match="names no image size: pass grid="):
        relativize(without_size())
    with pytest.warns(UserWarning, match=r"\(30, 45\) pixels are not whole patches: .* now padded to \(4, 6\)"):
        model = relativize(build("vit", img_size=(30, 45)))
    assert model.blocks[0].attn.position.grid == (4, 6, 1) and model(image(30, 45)).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relativize(build("vit", img_size=(30, 45), dynamic_img_size=True, dynamic_img_pad=True))


@pytest.mark.parametrize(("make", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_thing_and_change_nothing(make, options, message):
    model = make()
    state = model.state_dict() if isinstance(model, nn.Module) else {}
    kind, keys = type(model), set(state)
    with pytest.raises((ValueError, TypeError), match=message):
        relativize(model, **options)
    assert type(model) is kind and (not keys or set(model.state_dict()) == keys)


def test_errors_of_use():
    model = relativize(build("vit"))
    with pytest.raises(ValueError, match="attention got 17 tokens, but the model's last grid is None: call the whole model"):
        model.blocks[0](torch.randn(1, 17, 32))
    model(image())
    with pytest.raises(ValueError, match=r"attention got 9 tokens, but the model's last grid is Grid\(h=4, w=4, prefix=1\)"):
        model.blocks[0](torch.randn(1, 9, 32))
    model.patch_embed.output_fmt, model.patch_embed.flatten = None, True
    with pytest.raises(ValueError, match=r"patch_embed must give \[B, h, w, C\], not \(2, 16, 32\)"):
        model(image())
    with pytest.raises(ValueError, match="Linear has no pos_embed: pass the model that relativize returned"):
        absolute_scale(nn.Linear(1, 1))


def test_a_vitrel_vit_with_a_shared_encoding_has_position_already():
    with pytest.raises(ValueError, match="this vitrel ViT has position in attention already"):
        relativize(timm.create_model("vitrel_vit_n8_table", share_position=True), "rope_mixed")


def test_windows_of_a_vitrel_vit_are_the_grids_of_their_encodings():
    options = dict(class_token=False, global_pool="avg", block_args=dict(window=(4, 3), global_blocks=(1,)))
    model = relativize(timm.create_model("vitrel_vit_n8_absolute", depth=2, **options), "table")
    assert [tuple(block.position.grid) for block in model.blocks] == [(4, 3, 0), (8, 8, 0)]
    assert model.resized((64, 64)) == {}
