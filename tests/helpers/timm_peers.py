"""Small timm models of every family with random weights far from initialization, for tests of loading."""

import timm
import torch
from safetensors.torch import save_file
from timm.layers import RelPosMlp

SMALL = dict(depth=2, embed_dim=128, num_heads=2)  # heads of width 64
WINDOWS = dict(depths=(1, 2, 2, 1), embed_dim=32, num_heads=(1, 2, 4, 8))
VITS = (
    "vit_base_patch16_224 vit_base_patch32_384 vit_base_patch16_224_miil deit_tiny_patch16_224 "
    "deit_tiny_distilled_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 beitv2_base_patch16_224 "
    "beit3_base_patch16_224 eva_giant_patch14_224 eva_large_patch14_196 eva02_tiny_patch14_224 "
    "eva02_base_patch14_224 eva02_large_patch14_448 "
    "eva02_base_patch16_clip_224 eva02_large_patch14_clip_336 vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 "
    "vit_giant_patch14_dinov2 vit_small_patch16_dinov3 vit_tiny_patch16_dinov3_qkvb vit_small_plus_patch16_dinov3 "
    "vit_small_patch16_lingbot vit_small_patch16_rope_224 vit_small_patch16_rope_ape_224 "
    "vit_small_patch16_rope_mixed_224 vit_small_patch16_rope_mixed_ape_224 vit_medium_patch16_rope_reg1_gap_256 "
    "vit_betwixt_patch16_rope_reg4_gap_256 vit_base_patch16_clip_224 vit_base_patch16_clip_quickgelu_224 "
    "vit_base_patch16_siglip_224 vit_base_patch16_siglip_gap_224 vit_so400m_patch14_siglip_224 "
    "vit_so400m_patch14_siglip_gap_224 vit_giantopt_patch16_siglip_256 vit_so150m_patch16_reg4_map_256 "
    "samvit_base_patch16_224 vit_relpos_base_patch16_224 vit_relpos_medium_patch16_cls_224 "
    "vit_relpos_base_patch16_clsgap_224 vit_relpos_medium_patch16_rpn_224 vit_srelpos_medium_patch16_224 "
    "vit_wee_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256 vit_base_patch16_rpn_224 "
)
SWINS = "swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_base_window12to16_192to256 "
OWN = {
    "eva_giant_patch14_224": dict(embed_dim=176),
    "eva02_large_patch14_448": dict(img_size=224),
    "vit_small_patch14_dinov2": dict(img_size=224),
    "vit_small_patch14_reg4_dinov2": dict(img_size=224),
    "vit_giant_patch14_dinov2": dict(img_size=224),
    "vit_so400m_patch14_siglip_224": dict(embed_dim=144),
    "vit_so400m_patch14_siglip_gap_224": dict(embed_dim=144),
    "vit_giantopt_patch16_siglip_256": dict(embed_dim=192),
    "samvit_base_patch16_224": dict(global_attn_indexes=(1,), window_size=7),
}
NAMES = {name: SMALL | OWN.get(name, {}) for name in VITS.split()} | {name: WINDOWS for name in SWINS.split()}


def write_to_cache(folder, name, state):
    """Write a state dict as timm's weights of `name` in a cache of huggingface_hub."""
    stored = folder / f"models--timm--{name}.{timm.get_pretrained_cfg(name).tag}"
    (stored / "snapshots" / "abc").mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    save_file(state, stored / "snapshots" / "abc" / "model.safetensors")


def scattered(model):
    """Draw weights so that errors show: tables and embeddings of std 0.5, norms and scales near 1, no zero biases."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            last = name.rpartition(".")[2]
            if "relative_position_bias_table" in name or "rel_pos_" in last or p.shape[:1] == (1,):
                p.normal_(std=0.5)
            elif "freqs" in name or last == "logit_scale":
                p.mul_(1 + 0.2 * torch.randn_like(p))
            elif p.dim() == 1:
                p.normal_(float("weight" in last or "gamma" in last), 0.3)
            else:
                p.normal_(std=p[0].numel() ** -0.5)
        for part in model.modules():
            if isinstance(part, RelPosMlp):
                part.mlp.fc2.weight.mul_(0.5 / part.mlp.eval()(part.rel_coords_log).std())
            if hasattr(part, "cpb_mlp"):
                part.cpb_mlp[-1].weight.mul_(0.5 / part.cpb_mlp(part.relative_coords_table).std())
    return model.eval()


def peer(name, **own):
    return scattered(timm.create_model(name, **(NAMES.get(name, SMALL) | dict(num_classes=7) | own)))


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()
