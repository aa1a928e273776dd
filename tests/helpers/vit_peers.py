"""Helpers to compare vitrel's ViT with other implementations: random weights, equality of logits."""

import re

import torch

from vitrel.models import ViT

C, HEADS = 64, 2
SMALL = dict(img_size=48, patch_size=8, embed_dim=C, depth=2, num_heads=HEADS, num_classes=5)
SCALED = dict(init_values=1.0)


POSITION = re.compile(r".*(bias_table|pos_embed|rel_pos_[hw])")


def perturb(model):
    """Draw weights so that errors show: position of std 0.5, layer scales near 1, matrices of 1/sqrt(fan-in), no zeros."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if POSITION.fullmatch(name) or p.shape[:1] == (1,):
                p.normal_(std=0.5)
            elif "freqs" in name or (p.dim() == 1 and p.any()):
                p.add_(torch.randn_like(p) * 0.1)
            else:
                p.normal_(std=p[0].numel() ** -0.5)
    return model.eval()


def ours(position, block_args=None, **own):
    return ViT(**(SMALL | dict(position=position, block_args=block_args) | own)).eval()


def same(model, peer, image):
    """Assert equal logits, to 2e-5."""
    a, b = model(image), peer(image)
    assert a.std() > 0.1
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def renamed(state, *pairs):
    """Return the state dict with names replaced by (pattern, new) pairs, as the authors' code would save it."""
    out = {}
    for name, value in state.items():
        for old, new in pairs:
            name = re.sub(old, new, name)
        out[name] = value
    assert len(out) == len(state) and (not pairs or out.keys() != state.keys())
    return out
