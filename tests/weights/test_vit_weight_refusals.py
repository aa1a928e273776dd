"""What of a ViT's file is refused and in which words, what may be named, and the plan that tells it beforehand."""

import pytest
import timm
import torch
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

import vitrel
from helpers import each
from helpers.vit_peers import SCALED, SMALL, C, ours, perturb
from vitrel.weights.load import plan_weights

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


def test_distilled_deit():
    """The number of rows shows no grid with one token in front."""
    peer = VisionTransformerDistilled(**SMALL)
    words = "has 38 rows, which no square grid gives", "class_token, dist_token and reg_tokens"
    refused(ours("absolute"), peer, ValueError, *words)


def test_a_gate_and_a_norm_inside_attention_of_eva():
    own = ours(
        "absolute+rope_axial",
        dict(mlp="swiglu", mlp_norm=True),
        position_args=dict(base=10000.0, reference=(16, 16)),
        **OF_EVA02,
    )
    peer = eva(**EVA02, scale_mlp=True, scale_attn_inner=True)
    refused(own, peer, RuntimeError, "not in the model: blocks.0.attn.norm.weight", "The likely cause is another block_args.")
    state = eva(**EVA02, scale_mlp=True).state_dict() | {"blocks.0.attn.gate.weight": torch.zeros(C, C)}
    refused(own, state, RuntimeError, "not in the model: blocks.0.attn.gate.weight.")


def test_bias_mlp_of_timm():
    peer = VisionTransformerRelPos(**SMALL, rel_pos_type="mlp", fc_norm=True, init_values=1.0)
    words = "not in the model: blocks.0.attn.rel_pos.mlp.fc1", "The likely cause is another position."
    refused(ours("table", SCALED, **NO_CLASS), peer, RuntimeError, *words)


def test_other_families():
    swin = timm.create_model("vitrel_swin_n", num_classes=5)
    refused(ours("table", patch_size=2), swin, RuntimeError, "not in the model: patch_embed.norm.weight")


OF_ROPE_VIT = "build it with position='rope_axial', joined by '+' to others, and position_args=dict(base=100.0, reference=None)"
MIXED = ROPE_VIT | dict(rope_type="mixed")
FOUR = dict(reg_tokens=4, qkv_bias=False)


@each(
    ("peer", "own", "words"),
    [
        (EVA02, ("absolute+rope_axial", SWIGLU, OF_EVA02), "rope_axial with base=100.0, reference=None: build it with"),
        (EVA02, ("absolute+rope_axial", SWIGLU, OF_EVA02), "and position_args=dict(base=10000.0, reference=(16, 16))"),
        (EVA02, ("absolute+table", SWIGLU, OF_EVA02), "the weights are of EVA-02, which rotates q and k by rope_axial"),
        (EVA02, ("absolute+table", SWIGLU, OF_EVA02), "the model's encoding is none that rotates"),
        (ROPE_VIT, ("rope_axial", SCALED, dict(position_args=dict(base=10.0))), OF_ROPE_VIT),
        (ROPE_VIT, ("table", SCALED, {}), f"the model's encoding is none that rotates: {OF_ROPE_VIT}"),
        (ROPE_VIT, ("rope_mixed", SCALED, {}), f"the model's encoding is rope_mixed: {OF_ROPE_VIT}"),
        (MIXED, ("rope_axial", SCALED, {}), "RoPE-ViT (mixed), which rotates q and k by rope_mixed (learned); the model's"),
        (MIXED, ("rope_axial", SCALED, {}), "encoding is rope_axial: build it with position='rope_mixed', joined by"),
        (DINOV3, ("rope_axial", SCALED, FOUR), "DINOv3, which rotates q and k by rope_normalized (base=100.0); the model's"),
        (DINOV3, ("rope_axial", SCALED, FOUR), "encoding is rope_axial: build it with position='rope_normalized'"),
        (DINOV3, ("rope_normalized", SCALED, FOUR | dict(position_args=dict(base=50.0))), "position_args=dict(base=100.0)"),
    ],
)
def test_other_rotations(peer, own, words):
    position, block_args, options = own
    refused(ours(position, block_args, **options), eva(**peer), ValueError, words)


def test_reference_of_a_config_file_is_a_list():
    own = ours("absolute+rope_axial", SWIGLU, position_args=dict(base=10000, reference=[16, 16]), **OF_EVA02)
    vitrel.load_pretrained(own, eva(**EVA02).state_dict())


@each(
    ("options", "position", "own", "words", "cause"),
    [
        ({}, "rope_axial", {}, "not in the model: pos_embed.", "position"),
        ({}, "absolute+table", {}, "not in the file: blocks.0.position.relative_position_bias_table, blocks.1.", "position"),
        ({}, "absolute", AVG, "not in the file: fc_norm.weight, fc_norm.bias. not in the model: norm.weight", "global_pool"),
        ({}, "absolute", dict(reg_tokens=2), "not in the file: reg_token.", "class_token, dist_token or reg_tokens"),
        ({}, "absolute", dict(qkv_bias=False), "not in the model: blocks.0.attn.qkv.bias, blocks.1.attn.qkv.bias.", "qkv_bias"),
        (dict(qkv_bias=False), "absolute", {}, "not in the file: blocks.0.attn.qkv.bias, blocks.1.attn.qkv.bias.", "qkv_bias"),
        ({}, "absolute", dict(block_args=SCALED), "not in the file: blocks.0.ls1.gamma", "block_args"),
        (SCALED, "absolute", {}, "not in the model: blocks.0.ls1.gamma", "block_args"),
        (dict(qk_norm=True), "absolute", {}, "not in the model: blocks.0.attn.q_norm.weight", "block_args"),
        ({}, "absolute", dict(block_args=SWIGLU), "not in the file: blocks.0.mlp.fc1_g.weight", "block_args"),
        ({}, "absolute", dict(depth=3), "not in the file: blocks.2.norm1.weight", "depth or embed_dim"),
        (SCALED, "absolute", dict(depth=1, block_args=SCALED), "not in the model: blocks.1.norm1.weight", "depth or embed_dim"),
        (
            {},
            "absolute",
            dict(num_classes=7),
            "of another shape: head.weight: (5, 64) in the file, (7, 64)",
            "num_classes (for",
        ),
        ({}, "absolute", dict(num_classes=0), "not in the model: head.weight, head.bias.", "num_classes (for"),
        (
            {},
            "absolute",
            dict(embed_dim=96),
            "cls_token: (1, 1, 64) in the file, (1, 1, 96)",
            "depth or embed_dim",
        ),
        ({}, "absolute", dict(in_chans=1), "patch_embed.proj.weight: (64, 3, 8, 8) in the file", "patch_size or in_chans"),
    ],
)
def test_other_options(options, position, own, words, cause):
    cause = f"The likely cause is another {cause}"
    refused(ours(position, **own), VisionTransformer(**SMALL | options), RuntimeError, words, cause)


def test_other_prefix_tokens():
    """Rows of an embedding for tokens that the model lacks are not read as patches."""
    peer = VisionTransformer(**SMALL, reg_tokens=4)
    for count in (0, 2):
        words = "which no square grid gives", "build the model with the file's class_token, dist_token and reg_tokens"
        refused(ours("absolute", reg_tokens=count), peer, ValueError, *words)
    vitrel.load_pretrained(ours("absolute", reg_tokens=2), VisionTransformer(**SMALL).state_dict(), allow_unset=["reg_token"])


@each("key", ["rope_axial", "rope_mixed"])
@each("depth", [1, 3])
def test_rotary_files_of_another_depth(key, depth):
    peer = eva(**ROPE_VIT | (dict(rope_type="mixed") if key == "rope_mixed" else dict(rope_temperature=100.0)))
    refused(ours(key, SCALED, depth=depth), peer, RuntimeError, "The likely cause is another depth or embed_dim.")


def test_tables_of_beit():
    peer = Beit(**SMALL, use_rel_pos_bias=True, use_abs_pos_emb=False)
    words = "not in the model: blocks.0.attn.relative_position_bias_table", "The likely cause is another position."
    refused(ours("rope_axial", **AVG), peer, RuntimeError, *words)
    refused(ours("table", share_position=True, **AVG), peer, RuntimeError, *words)
    refused(ours("table", **NO_CLASS), peer, ValueError, "has three rows for prefix tokens, the model has none")
    state = peer.state_dict() | {"blocks.0.attn.q_proj.weight": torch.zeros(C, C)}
    refused(ours("table", **AVG), state, ValueError, "but no blocks.0.attn.k_proj.weight: it is incomplete")


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


def test_not_a_number():
    state = VisionTransformer(**SMALL).state_dict()
    state["blocks.1.mlp.fc1.bias"][3] = torch.nan
    refused(
        ours("absolute"), state, RuntimeError, "the weights hold NaN or infinity in blocks.1.mlp.fc1.bias; nothing was loaded"
    )


def test_plan():
    """Every tensor of the file is in a row: where it goes, by which rules, whether it was resampled."""
    state = eva(**EVA02, qkv_fused=False).state_dict() | dict(mask_token=torch.zeros(1, C), **{"rope.freqs_cos": torch.ones(1)})
    options = dict(base=10000.0, reference=(16, 16))
    plan = plan_weights(ours("absolute+rope_axial", SWIGLU, position_args=options, img_size=(64, 40), **OF_EVA02), state)
    rows = {row.source: row for row in plan.rows if row.target != "blocks.0.mlp.fc1_x.weight"}
    parts = tuple(f"blocks.0.attn.{part}_proj.weight" for part in "qkv")
    assert rows[parts][1:] == ("blocks.0.attn.qkv.weight", "q, k and v joined; q and k rows permuted: pairs split", "")
    parts = ("blocks.1.attn.q_proj.bias", "blocks.1.attn.v_proj.bias")
    assert rows[parts].rule == "bias of q, zeros for k, bias of v; q and k rows permuted: pairs split"
    assert rows["pos_embed",][1:] == ("pos_embed.pos_embed", "resampled", "6x6 -> 8x5, bicubic")
    assert rows["blocks.0.mlp.fc1.weight",][1:] == ("blocks.0.mlp.fc1_g.weight", "SwiGLU's halves separated", "")
    assert rows["cls_token",][1:] == ("cls_token", "unchanged", "")
    assert rows["mask_token",][1:3] == ("", "unused")
    assert rows["rope.freqs_cos",][1:3] == ("", "a buffer, recomputed")
    assert {name for row in plan.rows for name in row.source} == set(state)
    assert plan.unused == ("mask_token",) and plan.unset == () and plan.differ == ()
    assert "blocks.1.attn.q_proj.bias + blocks.1.attn.v_proj.bias " in str(plan)


def test_plan_of_a_table():
    state = Beit(**SMALL, use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=1.0).state_dict()
    plan = plan_weights(ours("table", SCALED, img_size=(64, 40), **AVG), state)
    rows = {row.source: row for row in plan.rows}
    name = "relative_position_bias_table"
    expected = (f"blocks.1.position.{name}", "resampled", "6x6 -> 8x5, geometric")
    assert rows[f"blocks.1.attn.{name}",][1:] == expected
    assert rows["blocks.0.gamma_1",][1:] == ("blocks.0.ls1.gamma", "renamed", "")
    assert plan.unused == plan.unset == plan.differ == ()
    line = next(line for line in str(plan).splitlines() if f"blocks.1.attn.{name}" in line)
    assert line.split("  ")[-1].strip() == "6x6 -> 8x5, geometric"
