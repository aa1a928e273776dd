"""What of a ViT's file is refused and in which words, what may be named, and the plan that tells it beforehand."""

import re

import pytest
import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

import vitrel
from helpers import each
from helpers.vit_peers import SCALED, SMALL, C, ours, perturb
from vitrel.weights.plan import plan_weights

AVG = dict(global_pool="avg")
NO_CLASS = dict(class_token=False, global_pool="avg")
EVA02 = dict(mlp_ratio=8 / 3, swiglu_mlp=True, ref_feat_shape=(16, 16))
OF_EVA02 = dict(global_pool="avg", mlp_ratio=8 / 3)
SWIGLU = dict(mlp="swiglu")
ROPE_VIT = dict(attn_type="rope", init_values=1.0, global_pool="token", rope_grid_indexing="xy", use_abs_pos_emb=False)
DINOV3 = dict(
    init_values=1.0, rope_type="dinov3", rope_rotate_half=True, use_abs_pos_emb=False, num_reg_tokens=4, qkv_bias=False
)


def eva(**own):
    return Eva(**SMALL | dict(use_rot_pos_emb=True, dynamic_img_size=True) | own)


def refused(model, peer, error, *words, **options):
    """Every one of `words` is in the error, and the model is as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error) as error_info:
        vitrel.load_pretrained(model, peer if isinstance(peer, dict) else peer.state_dict(), **options)
    for text in words:
        assert text in str(error_info.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error_info.value)


MIXED = ROPE_VIT | dict(rope_type="mixed")
FOUR = dict(reg_tokens=4, qkv_bias=False)


@each(
    ("peer", "own", "words"),
    [
        (
            EVA02,
            ("absolute+rope_axial", SWIGLU, OF_EVA02),
            "base=10000.0, the model has 100.0: position_args=dict(base=",
        ),
        (ROPE_VIT, ("rope_mixed", SCALED, {}), "trained as 'rope_axial', the model has 'rope_mixed'"),
        (MIXED, ("rope_axial", SCALED, {}), "trained as 'rope_mixed', the model has 'rope_axial'"),
        (DINOV3, ("rope_axial", SCALED, FOUR), "trained as 'rope_normalized', the model has 'rope_axial'"),
    ],
)
def test_other_rotations(peer, own, words):
    position, block_args, options = own
    of_timm = perturb(eva(**dict(rope_temperature=100.0) | peer) if peer is not EVA02 else eva(**peer))
    model = ours(position, block_args, **options)
    with pytest.raises(ValueError, match="(?s).*" + re.escape(words)):
        vitrel.load_pretrained(model, vitrel.from_timm(of_timm))


@each(
    ("options", "position", "own", "words"),
    [
        ({}, "rope_axial", {}, "not in the model: pos_embed."),
        ({}, "absolute+table", {}, "not in the file: blocks.0.position.relative_position_bias_table, blocks.1."),
        ({}, "absolute", AVG, "not in the file: fc_norm.weight, fc_norm.bias. not in the model: norm.weight"),
        ({}, "absolute", dict(qkv_bias=False), "not in the model: blocks.0.attn.qkv.bias, blocks.1.attn.qkv.bias."),
        (SCALED, "absolute", {}, "not in the model: blocks.0.ls1.gamma"),
        ({}, "absolute", dict(num_classes=7), "of another shape: head.weight: (5, 64) in the file, (7, 64)"),
    ],
)
def test_other_options(options, position, own, words):
    refused(ours(position, **own), VisionTransformer(**SMALL | options), RuntimeError, words)


def test_at_most_ten_names_of_a_kind_are_given():
    said = refused(
        ours("absolute", depth=1), VisionTransformer(**SMALL), RuntimeError, "not in the model: blocks.1.", "and 2 more."
    )
    assert said.count("blocks.1.") == 10


@each("state", [ROPE_VIT, MIXED, DINOV3, EVA02 | dict(use_abs_pos_emb=False)])
@each("position", ["table", "rope_axial", "rope_mixed"])
def test_names_do_not_show_a_rotation(position, state):
    """Fixed frequencies are not in a file, and layouts of one shape differ: the model has to be named, whatever it is for."""
    refused(ours(position), eva(**state), ValueError, "of timm's EVA and BEiT models, ", "load vitrel.from_timm(it)")


def test_other_prefix_tokens():
    """Rows of an embedding for tokens that the model lacks are not read as patches."""
    peer = VisionTransformer(**SMALL, reg_tokens=4)
    for count in (0, 2):
        words = "which no square grid gives", "class_token, dist_token and reg_tokens"
        refused(ours("absolute", reg_tokens=count), peer, ValueError, *words)
    vitrel.load_pretrained(ours("absolute", reg_tokens=2), VisionTransformer(**SMALL).state_dict(), allow_unset=["reg_token"])


def test_tables_of_beit():
    peer = Beit(**SMALL, use_rel_pos_bias=True, use_abs_pos_emb=False)
    refused(ours("rope_axial", **AVG), peer, ValueError, "does not show whether and how channels are rotated")
    words = "not in the model: blocks.0.attn.relative_position_bias_table"
    refused(ours("table", share_position=True, **AVG), peer, RuntimeError, words)
    refused(ours("table", **NO_CLASS), peer, ValueError, "has three rows for prefix tokens, the model has none")
    state = peer.state_dict() | {"blocks.0.attn.q_proj.weight": torch.zeros(C, C)}
    refused(ours("table", **AVG), state, ValueError, "blocks.0.attn.q_proj.weight, but not the same of k and v")


def test_parts_beside_the_trunk_are_named():
    state = VisionTransformer(**SMALL).state_dict()
    extra = dict(mask_token=torch.zeros(1, C), **{f"lm_head.{n}": torch.zeros(C) for n in ("weight", "bias")})
    refused(ours("absolute"), state | extra, RuntimeError, "not in the model: mask_token, lm_head.weight, lm_head.bias.")
    refused(ours("absolute"), state | extra, RuntimeError, "not in the model: mask_token.", allow_unused=["lm_head.*"])
    model = vitrel.load_pretrained(ours("absolute"), state | extra, allow_unused=["lm_head.*", "mask_token"])
    assert torch.equal(model.head.weight, state["head.weight"])


def test_what_is_allowed_stays_as_it_was():
    """New position over the trunk of an absolute model: the usual start of fine-tuning."""
    peer, model = perturb(VisionTransformer(**SMALL)), perturb(ours("absolute+rope_mixed+table", num_classes=7))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = ("not in the file: blocks.0.position.parts.rope_mixed.freqs", "of another shape: head.weight")
    refused(model, peer, RuntimeError, *words)
    refused(model, peer, RuntimeError, "head.weight: (5, 64) in the file, (7, 64) in the model", allow_unset=["*position*"])
    vitrel.load_pretrained(model, peer.state_dict(), allow_unset=["*position*", "head.weight", "head.bias"])
    for name, value in model.state_dict().items():
        kept = "position" in name or name.startswith("head.")
        assert torch.equal(value, before[name]) == kept, name


def test_plan():
    """Where every tensor goes, and what is resampled."""
    state = Beit(**SMALL, use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=1.0).state_dict()
    model = ours("table", SCALED, img_size=(64, 40), **AVG)
    plan = plan_weights(model, state | dict(mask_token=torch.zeros(1, C)))
    assert plan.unused == ("mask_token",) and plan.unset == plan.differ == ()
    assert plan.state.keys() - {"mask_token"} == model.state_dict().keys()
    name = "relative_position_bias_table"
    assert plan.rows == tuple((f"blocks.{i}.position.{name}", "6x6 -> 8x5, geometric") for i in range(2))
    assert torch.equal(plan.state["blocks.0.ls1.gamma"], state["blocks.0.gamma_1"])
    plan = plan_weights(ours("absolute", img_size=(64, 40)), VisionTransformer(**SMALL).state_dict())
    assert plan.rows == (("pos_embed.pos_embed", "6x6 -> 8x5, bicubic"),)
