"""from_timm: the function of timm's models, whatever their family and options; what has no counterpart is refused."""

import random

import pytest
import timm
import torch
from timm.layers import DropPath, LayerNorm, Mlp
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitrel
from helpers import each
from helpers.timm_peers import NAMES, SMALL, apart, peer, scattered
from vitrel.models.swin import Swin
from vitrel.models.vit import ViT
from vitrel.weights.recognize import as_vitrel


def outcome(model, image, weight):
    """Output, gradients by name, and that of the image."""
    image = image.clone().requires_grad_()
    out = model(image)
    (out * weight).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"image": image.grad}


def gradients_apart(own, theirs):
    """Return {timm's name: relative difference} of gradients that both models have, with the rows of qkv in any order."""
    found = {}
    for name, g in theirs.items():
        here = own.get("pos_embed.pos_embed" if name == "pos_embed" else name, own.get(name.replace(".attn.", ".position.")))
        if here is not None and here.shape == g.shape and not name.endswith("k_norm.bias"):  # which softmax does not see
            rows = ".qkv." in name or "_norm." in name  # rotary pairs may have another order in memory
            found[name] = apart(*(x.view(len(x), -1).norm(dim=1).sort()[0] if rows else x for x in (here, g)))
    return found


def assert_same(ours, theirs, logits=2e-6, gradients=2e-5):
    image = torch.randn(1, theirs.patch_embed.proj.in_channels, *theirs.patch_embed.img_size)
    weight = torch.randn_like(theirs(image))
    (a, own), (b, others) = (outcome(model, image, weight) for model in (ours, theirs))
    assert b.std() > 0.05 and apart(a, b) <= logits
    found = gradients_apart(own, others)
    assert len(found) >= 0.6 * len(others) and "image" in found, set(others) - set(found)
    assert all(error <= gradients for error in found.values()), max(found.items(), key=lambda pair: pair[1])
    epsilons = [sorted(part.eps for part in m.modules() if isinstance(part, nn.LayerNorm)) for m in (ours, theirs)]
    assert epsilons[0] == epsilons[1]  # too small to be seen in the logits


def sizes(model, count, first=0):
    """From one patch to three times the native size along a side, odd and non-square: six kinds, from the one numbered
    `first` on, then random.
    """
    (ph, pw), (h, w), chance = model.patch_embed.patch_size, model.patch_embed.img_size, random.Random(0)
    kinds = [(ph, pw), (h, w), (ph + 1, w), (h // 2 + 1, w - 3), (3 * h, pw), (h + ph, w // 2)]
    return [kinds[(first + i) % 6] if i < 6 else (chance.randint(ph, 3 * h), chance.randint(pw, 3 * w)) for i in range(count)]


@torch.no_grad()
def runs_anywhere(model, sizes):
    images = [torch.randn(1, 3, *size) for size in sizes]
    first = [model(image) for image in images]
    assert all(out.shape == (1, 7) and out.isfinite().all() for out in first)
    assert torch.equal(first[0], model(images[0]))  # after others


@pytest.mark.parametrize("name", NAMES)
def test_same_function(name):
    theirs = peer(name)
    before = {key: value.clone() for key, value in theirs.state_dict().items()}
    ours = vitrel.from_timm(theirs)
    assert isinstance(ours, Swin if "swin" in name else ViT) and not ours.training
    after = theirs.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], value) for key, value in before.items())
    storage = {p.untyped_storage().data_ptr() for p in (*theirs.parameters(), *theirs.buffers())}
    assert not storage & {p.untyped_storage().data_ptr() for p in (*ours.parameters(), *ours.buffers())}
    assert_same(ours, theirs)
    runs_anywhere(ours, sizes(ours, 2, first=[*NAMES].index(name)))


def test_a_name_is_built_with_its_arguments(tmp_path):
    theirs = peer("deit_tiny_patch16_224", num_classes=5)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    given = dict(SMALL, num_classes=5, checkpoint_path=str(tmp_path / "weights.pth"))
    ours, image = vitrel.from_timm("deit_tiny_patch16_224", **given).eval(), torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(image), theirs(image), atol=1e-5, rtol=0)
    assert vitrel.from_timm(ours) is ours
    assert ours.pretrained_cfg["mean"] == theirs.pretrained_cfg["mean"]
    assert ours.pretrained_cfg["crop_pct"] == theirs.pretrained_cfg["crop_pct"]


VIT, EVA, BEIT, REL = (
    "vit_base_patch16_224",
    "eva02_base_patch14_224",
    "beit_base_patch16_224",
    "vit_relpos_medium_patch16_cls_224",
)
ROPE, SAM = "vit_small_patch16_rope_ape_224", "samvit_base_patch16_224"
SWIN, SWIN2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"
THREE = dict(depths=(2, 2, 2), num_heads=(1, 2, 4))  # stages, of which the last has one window
OPTIONS = [
    *((VIT, options) for options in (
        dict(mlp_ratio=3.3), dict(qk_norm=True, qkv_bias=False), dict(no_embed_class=True, reg_tokens=2),
        dict(global_pool="avg", fc_norm=False), dict(global_pool="token", fc_norm=True), dict(final_norm=False),
        dict(global_pool="avgmax"), dict(pos_embed="none"), dict(act_layer="gelu_tanh"),
        dict(norm_layer=lambda *a, **k: LayerNorm(*a, **k | dict(eps=1e-3))), dict(scale_attn_norm=True, scale_mlp_norm=True),
        dict(patch_size=(16, 8)), dict(dynamic_img_size=True, dynamic_img_pad=True),
    )),
    *((EVA, options) for options in (
        dict(qk_norm=True), dict(use_post_norm=True), dict(qkv_fused=True), dict(scale_attn_inner=True),
        dict(ref_feat_shape=(7, 9)), dict(ref_feat_shape=None), dict(rope_temperature=50.0), dict(rope_grid_indexing="xy"),
        dict(rope_rotate_half=True), dict(attn_type="rope", num_reg_tokens=2), dict(use_abs_pos_emb=False),
        dict(no_embed_class=True),
    )),
    *((BEIT, options) for options in (dict(use_abs_pos_emb=True), dict(use_rel_pos_bias=False, use_abs_pos_emb=True),
        dict(use_rel_pos_bias=False, use_shared_rel_pos_bias=True), dict(init_values=None), dict(swiglu_mlp=True,
            scale_mlp=True))),
    *((REL, options) for options in (dict(rel_pos_type="bias"), dict(rel_pos_type="mlp-swin"), dict(shared_rel_pos=True))),
    *((SAM, options) for options in (dict(use_abs_pos=True), dict(use_rel_pos=False), dict(window_size=14),
        dict(window_size=0))),
    *((SWIN, options) for options in (dict(window_size=5, img_size=160), dict(window_size=(7, 14), img_size=(224, 448)),
        dict(qkv_bias=False), dict(mlp_ratio=2.0), dict(depths=(2, 1, 2, 1)),
        dict(depths=(2, 2), num_heads=(2, 4)))),
    (SWIN2, dict(pretrained_window_sizes=(5, 6, 7, 8))),
    *((name, dict(img_size=(224, 112))) for name in (VIT, EVA, BEIT, REL, ROPE, SAM)),
    *((name, options) for name in (VIT, SWIN) for options in (dict(in_chans=1, num_classes=5), dict(num_classes=0))),
    (SWIN, dict(img_size=(224, 112), **THREE)), (SWIN2, dict(img_size=(128, 64), **THREE)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{name}-{[*options]}"[:60] for name, options in OPTIONS])
def test_options(name, options):
    theirs = peer(name, **options)
    assert_same(vitrel.from_timm(theirs), theirs)


CHANGES = {
    "no head": lambda m: m.reset_classifier(0, ""),
    "other head": lambda m: m.reset_classifier(3),
    "averaged": lambda m: m.reset_classifier(3, "avg"),
    "other input size": lambda m: m.set_input_size((448, 224)),
    "pruned": lambda m: m.prune_intermediate_layers([0], prune_norm=True, prune_head=True),
    "checkpointing": lambda m: m.set_grad_checkpointing(),
}


@pytest.mark.slow
@each("change", CHANGES)
@each("name", [VIT, SWIN])
def test_changed_after_construction(name, change):
    theirs = peer(name)
    CHANGES[change](theirs)
    scattered(theirs)
    ours = vitrel.from_timm(theirs)
    image = torch.randn(1, 3, *theirs.patch_embed.img_size)
    a, b = ours(image), theirs(image)
    assert a.numel() == b.numel() and apart(a.reshape(b.shape), b) <= 2e-6


@each("name", [VIT, EVA, BEIT])
def test_a_size_of_no_whole_patches(name):
    """timm leaves the last pixels out, and says so nowhere."""
    theirs, image = peer(name, img_size=(119, 100)), torch.randn(1, 3, 119, 100)
    patch = theirs.patch_embed.patch_size[0]
    whole = image[..., : 119 // patch * patch, : 100 // patch * patch]
    assert apart(vitrel.from_timm(theirs)(whole), theirs(image)) <= 2e-6


@pytest.mark.slow
@each("name", [EVA, SWIN2])
def test_type_and_mode(name):
    theirs = peer(name)
    image = torch.randn(2, 3, *theirs.patch_embed.img_size)
    exact = theirs(image)
    half = theirs.to(torch.bfloat16).train()
    ours = vitrel.from_timm(half)
    assert half.training and ours.training and {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert apart(ours.eval()(image.bfloat16()).float(), exact) < 0.05


@each("name", [VIT, EVA, BEIT, "deit_tiny_distilled_patch16_224", REL, SAM, SWIN, SWIN2])
def test_drop_rates(name):
    """The same kinds at the same rates, where they act."""
    rates = dict(drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3, drop_path_rate=0.4)
    theirs = peer(name, **rates | {VIT: dict(pos_drop_rate=0.5), REL: dict(rel_pos_type="bias")}.get(name, {}))

    def acting(model):
        found = [("path", m.drop_prob) for m in model.modules() if isinstance(m, DropPath)]
        found += [("drop", m.p) for m in model.modules() if isinstance(m, nn.Dropout)]
        found += [("drop", m.attn_drop) for m in model.modules() if isinstance(getattr(m, "attn_drop", None), float)]
        return sorted({(kind, round(p, 6)) for kind, p in found if p})

    assert acting(vitrel.from_timm(theirs)) == acting(theirs)


class Other(VisionTransformer):
    def forward_features(self, x, attn_mask=None):
        return super().forward_features(x.flip(-1))


def changed(name, change, **options):
    model = peer(name, **options)
    change(model)
    return model


def meta(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


REFUSED = {  # {name: (builder, words of the reason)}
    "resnet18": (lambda: "resnet18", "ResNet"),
    "swin_s3_tiny_224": (None, "windows are"),
    "swinv2_cr_tiny_224": (None, "SwinTransformerV2Cr"),
    "vit_small_r26_s32_224": (None, "HybridEmbed"),
    "vit_dwee_patch16_reg1_gap_256": (None, "DiffAttention"),
    "aimv2_large_patch14_224": (None, "RmsNorm"),
    "vit_pe_core_tiny_patch16_384": (None, "counts positions from 1"),
    "samvit_base_patch16": (None, "neck"),
    "patch drop": (lambda: peer(VIT, patch_drop_rate=0.25), "patch_drop_rate"),
    "grouped queries": (lambda: peer(EVA, attn_type="rope", num_kv_heads=1), "grouped-query"),
    "coordinates": (lambda: changed("vit_small_patch16_dinov3", lambda m: setattr(m.rope, "normalize_coords", "max")),
        "normalizes coordinates by 'max'"),
    "other forward": (lambda: Other(img_size=32, depth=1, embed_dim=32, num_heads=1), "Other"),
    "parallel wrapper": (lambda: nn.DataParallel(peer(VIT)), "DataParallel"),
    "features": (lambda: timm.create_model(VIT, features_only=True, out_indices=(1,), **SMALL), "FeatureGetterNet"),
    "head": (lambda: changed(VIT, lambda m: setattr(m, "head", nn.Sequential(nn.Linear(128, 9), nn.ReLU(), nn.Linear(9,
        7)))), "head"),
    "hook": (lambda: changed(VIT, lambda m: m.blocks[0].register_forward_hook(lambda *a: None)), "blocks.0 has a hook"),
    "distillation token": (lambda: changed("deit_tiny_distilled_patch16_224", lambda m: setattr(m, "no_embed_class", True)),
        "its distillation token has no embedding"),
    "overlapping patches": (lambda: changed(VIT, lambda m: setattr(m.patch_embed.proj, "stride", (8, 8))), "overlap"),
    "norm": (lambda: changed(VIT, lambda m: setattr(m, "norm", nn.ReLU())), "its norm is ReLU"),
    "one MLP": (lambda: changed(VIT, lambda m: setattr(m.blocks[1], "mlp", Mlp(128, 512, act_layer=nn.ReLU))), "act is ReLU"),
    "one activation": (lambda: changed(VIT, lambda m: setattr(m.blocks[1].mlp, "act", nn.GELU("tanh"))),
        "block 1 differs from block 0"),
    "quantized": (lambda: torch.ao.quantization.quantize_dynamic(peer(VIT), {nn.Linear}), "qkv is Linear"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@each("name", REFUSED)
def test_refusals(name):
    build, words = REFUSED[name]
    model = meta(name) if build is None else build()
    with pytest.raises(ValueError, match=words) as caught:
        as_vitrel(timm.create_model(model) if isinstance(model, str) else model)
    text = str(caught.value)
    assert "\n" not in text and (name in text or type(model).__name__ in text), text


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"unknown model 'vit_base_patch16_22'.*vit_base_patch16_224"):
        vitrel.from_timm("vit_base_patch16_22")
    with pytest.raises(ValueError, match="num_classes is for building a model"):
        vitrel.from_timm(peer(VIT), num_classes=5)
    with pytest.raises(TypeError, match="expected a timm or vitrel model, not dict"):
        vitrel.from_timm({})


def test_with_an_encoding_in_one_call():
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
    ours, image = vitrel.from_timm(theirs, position="table", absolute="fade", fade_steps=4), torch.randn(1, 3, 32, 32)
    assert ours.arguments["position"] == "absolute+table" and ours.absolute_fade.fade_steps == 4
    torch.testing.assert_close(ours(image), theirs(image), atol=1e-5, rtol=1e-5)
    dropped = vitrel.from_timm("vit_tiny_patch16_224", position="cpb", absolute="drop", depth=1, position_args=dict(hidden=8))
    assert dropped.pos_embed is None and dropped.arguments["position"] == "cpb"
    with pytest.raises(ValueError, match="absolute needs an encoding to add in attention"):
        vitrel.from_timm(theirs, absolute="drop")
