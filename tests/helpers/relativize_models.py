"""Tiny models of every family that from_timm and relativize support, with random weights, and helpers of their tests."""

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitrel.models.vit import ViT

TINY = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
MODELS = {
    "vit": lambda **o: VisionTransformer(**TINY | o),
    "reg": lambda **o: VisionTransformer(**TINY | dict(reg_tokens=3, qkv_bias=True, init_values=0.1, qk_norm=True) | o),
    "no_class": lambda **o: VisionTransformer(class_token=False, global_pool="avg", **TINY | o),
    "no_embed_class": lambda **o: VisionTransformer(no_embed_class=True, scale_attn_norm=True, **TINY | o),
    "map": lambda **o: VisionTransformer(class_token=False, global_pool="map", **TINY | o),
    "no_absolute": lambda **o: VisionTransformer(pos_embed="none", **TINY | o),
    "deit": lambda **o: VisionTransformerDistilled(**TINY | o),
    "eva": lambda **o: Eva(qkv_bias=True, **TINY | o),
    "eva02": lambda **o: Eva(
        use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True, qkv_fused=False, ref_feat_shape=4, **TINY | o
    ),
    "cat": lambda **o: Eva(use_rot_pos_emb=True, use_post_norm=True, scale_attn_inner=True, **TINY | o),
    "mixed": lambda **o: Eva(use_rot_pos_emb=True, rope_type="mixed", **TINY | o),
    "dinov3": lambda **o: Eva(
        use_rot_pos_emb=True,
        rope_type="dinov3",
        rope_rotate_half=True,
        use_abs_pos_emb=False,
        num_reg_tokens=2,
        qk_norm=True,
        init_values=0.2,
        **TINY | o,
    ),
    "attention_rope": lambda **o: Eva(use_rot_pos_emb=True, attn_type="rope", **TINY | o),
    "vitrel": lambda **o: ViT(position="absolute", **TINY | o),
}


def build(name, **options):
    torch.manual_seed(0)
    model = MODELS[name](**options)
    for key, parameter in model.named_parameters():
        if key != "rope.freqs":
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def image(h=32, w=32):
    return torch.randn(2, 3, h, w, generator=torch.Generator().manual_seed(h * w))


def randomize(model, std=0.5):
    torch.manual_seed(1)
    for parameter in position_parameters(model).values():
        nn.init.normal_(parameter, std=std)
    return model


def position_parameters(model):
    return {name: p for name, p in model.named_parameters() if ".position." in name and "freqs" not in name}
