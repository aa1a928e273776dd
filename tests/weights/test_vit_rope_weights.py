"""ViT weights of timm with rotary position: random ones give timm's logits and, in its layout, its gradients."""

from functools import partial

import pytest
import torch
from timm.models.eva import Eva
from torch import nn

import vitrel
from helpers import each
from helpers.vit_peers import SCALED, SIZES, SMALL, ours, perturb, same

EVA = dict(base=10000.0, reference=(16, 16))


def eva(**own):
    return Eva(**SMALL | dict(use_rot_pos_emb=True, dynamic_img_size=True) | own)


EVA02 = dict(mlp_ratio=4 * 2 / 3, swiglu_mlp=True, ref_feat_shape=(16, 16))


@each("size", [(48, 48), (128, 128), (64, 40)])
@each("tiny", [True, False])
def test_eva02(tiny, size):
    """Interleaved pairs counted on a 16x16 grid; tiny packs SwiGLU and q, k, v, base has them apart and a norm inside."""
    peer = perturb(eva(**EVA02, **({} if tiny else dict(qkv_fused=False, scale_mlp=True))))
    own = dict(position_args=EVA, mlp_ratio=4 * 2 / 3, global_pool="avg")
    model = ours("absolute+rope_axial", dict(mlp="swiglu", mlp_norm=not tiny), **own)
    same(vitrel.load_pretrained(model, vitrel.from_timm(peer)), peer, torch.randn(2, 3, *size), (True, False))


@each("bias", [False, True])
def test_registers_with_rope(bias):
    """timm's vit_medium_patch16_rope_reg1_gap: no class token, no embedding, positions on a 16x16 grid."""
    kind = dict(qkv_bias=bias, init_values=1.0, class_token=False, num_reg_tokens=1)
    peer = perturb(eva(**kind, use_abs_pos_emb=False, ref_feat_shape=(16, 16)))
    own = dict(class_token=False, reg_tokens=1, global_pool="avg", qkv_bias=bias, position_args=EVA)
    model = vitrel.load_pretrained(ours("rope_axial", SCALED, **own), vitrel.from_timm(peer))
    for size in SIZES:
        same(model, peer, torch.randn(2, 3, *size), (True, False))


ROPE_VIT = dict(attn_type="rope", init_values=1.0, global_pool="token", rope_grid_indexing="xy")


@each("absolute", [False, True])
@each("mixed", [False, True])
def test_rope_vit_of_timm(mixed, absolute):
    """Columns before rows: mixed has both in its frequencies, axial in the order of the pairs."""
    kind = dict(rope_type="mixed", rope_temperature=10.0) if mixed else dict(rope_temperature=100.0)
    peer = perturb(eva(**ROPE_VIT, **kind, use_abs_pos_emb=absolute, no_embed_class=absolute))
    key = ("absolute+" if absolute else "") + ("rope_mixed" if mixed else "rope_axial")
    model = vitrel.load_pretrained(ours(key, SCALED), vitrel.from_timm(peer))
    for size in SIZES:
        same(model, peer, torch.randn(2, 3, *size), (True, not mixed))


DINOV3 = dict(
    init_values=1.0, rope_type="dinov3", rope_temperature=100.0, rope_rotate_half=True, use_abs_pos_emb=False, num_reg_tokens=4
)


@each("kind", ["plain", "qkvb", "plus"])
def test_dinov3(kind):
    """The "plus" models have SwiGLU of 8 n channels."""
    plus, bias = kind == "plus", kind != "plain"
    swiglu = dict(swiglu_mlp=True, swiglu_align_to=8, mlp_ratio=2.7) if plus else {}
    norm = partial(nn.LayerNorm, eps=1e-5)
    peer = perturb(eva(**DINOV3, **swiglu, qkv_bias=bias, norm_layer=norm, global_pool="token", use_fc_norm=False))
    block_args = SCALED | dict(norm_eps=1e-5, mlp="swiglu" if plus else "gelu")
    own = dict(reg_tokens=4, qkv_bias=bias, mlp_ratio=2.75 if plus else 4.0)
    model = vitrel.load_pretrained(ours("rope_normalized", block_args, **own), vitrel.from_timm(peer))
    for size in SIZES:
        same(model, peer, torch.randn(2, 3, *size))


def test_augmentation_of_dinov3_is_off_in_evaluation():
    peer = perturb(
        eva(**DINOV3, qkv_bias=False, norm_layer=partial(nn.LayerNorm, eps=1e-5), global_pool="token", use_fc_norm=False)
    )
    position_args = dict(shift_coords=0.5, jitter_coords=1.2, rescale_coords=2.0)
    model = ours("rope_normalized", SCALED | dict(norm_eps=1e-5), reg_tokens=4, qkv_bias=False, position_args=position_args)
    vitrel.load_pretrained(model, vitrel.from_timm(peer))
    image = torch.randn(2, 3, 64, 40)
    same(model, peer, image)
    model.train()
    assert (model(image) - model(image)).abs().max() > 1e-4


@pytest.mark.parametrize("state", [ROPE_VIT, ROPE_VIT | dict(rope_type="mixed"), DINOV3, EVA02])
@each("position", ["table", "rope_axial", "rope_mixed"])
def test_names_do_not_show_a_rotation(position, state):
    """Fixed frequencies are not in a file, and layouts of one shape differ: the model has to be named, whatever it is for."""
    peer = eva(**dict(use_abs_pos_emb=False) | state)
    with pytest.raises(ValueError, match=r"of timm's EVA and BEiT models, .* load vitrel\.from_timm\(it\)"):
        vitrel.load_pretrained(ours(position), peer.state_dict())
