"""Helpers to compare vitrel's ViT with other implementations: random weights, equality of logits and gradients."""

import re

import torch

from vitrel.models import ViT

C, HEADS, D = 64, 2, 32
SMALL = dict(img_size=48, patch_size=8, embed_dim=C, depth=2, num_heads=HEADS, num_classes=5)
SCALED = dict(init_values=1.0)
SIZES = [(48, 48), (64, 40)]  # the native one, and one that is not square
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


class Read(dict):
    """A dictionary that records in `seen` which names were read."""

    def __getitem__(self, name):
        self.seen = getattr(self, "seen", set()) | {name}
        return super().__getitem__(name)


def qkv_rows(interleaved, x_first):
    """Return rows, where rows[i] is vitrel's row of qkv for the peer's row i: vitrel's pairs are (p, p + D/2), rows first."""
    rows = list(range(3 * C))
    for part, head, half, pair in torch.cartesian_prod(*map(torch.arange, (2, HEADS, 2, D // 2))).tolist():
        at = part * C + head * D
        peer_pair = (pair + D // 4) % (D // 2) if x_first else pair
        peer = 2 * peer_pair + half if interleaved else half * (D // 2) + peer_pair
        rows[at + peer] = at + half * (D // 2) + pair
    return torch.tensor(rows)


def in_peer_layout(name, shape, g, rows):
    """Return the gradient of the peer's parameter `name`, assembled by slicing from vitrel's gradients g."""
    name = (
        name.removeprefix("trunk.")
        .replace(".gamma_", ".ls")
        .replace("shared_rel_pos", "rel_pos_bias")
        .replace(".rel_pos.", ".")
    )
    name = re.sub(r"(\.ls\d)$", r"\1.gamma", name)
    stem, _, last = name.rpartition(".")
    if name.endswith(("qkv.weight", "qkv.bias")):
        return g[name][rows]
    if part := re.fullmatch(r"(.*\.attn\.)([qkv])_(proj\.)?(weight|bias)", name):
        at = "qkv".index(part[2]) * C
        return g[f"{part[1]}qkv.{part[4]}"][rows][at : at + C]
    if ".mlp.fc1." in name and name not in g:
        return torch.cat((g[f"{stem}_g.{last}"], g[f"{stem}_x.{last}"]))
    if name == "pos_embed":
        own = g["pos_embed.pos_embed"]
        return own[:, own.shape[1] - shape[1] :] if len(shape) == 3 else own.unflatten(1, shape[1:3])
    if name.startswith("rel_pos_bias.") or last == "freqs":
        own = [g[n] for n in [*g] if re.fullmatch(rf".*position\.{last}", n)]
        return torch.stack([x.flip(0) for x in own], 1).view(shape) if last == "freqs" else sum(own)
    return g[name.replace(".attn.", ".position.")] if POSITION.fullmatch(name) else g[name]


def same(model, peer, image, rows=(False, False), features=None):
    """Assert equal logits (to 2e-5) and gradients of the peer's parameters (2e-5 of the norm); all of vitrel's count."""
    a, b = (model(image), peer(image)) if features is None else features(model, peer, image)
    assert a.std() > 0.1
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    weight, g = torch.randn_like(a), Read()
    for net, out in ((model, a), (peer, b)):
        net.zero_grad()
        (out * weight).sum().backward()
    g |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, p in peer.named_parameters():
        if p.grad is not None:
            own = in_peer_layout(name, p.shape, g, qkv_rows(*rows))
            assert p.grad.any() and (own - p.grad).norm() <= 2e-5 * p.grad.norm() + 1e-7, name
    assert g.seen == set(g)


def renamed(state, *pairs):
    """Return the state dict with names replaced by (pattern, new) pairs, as the authors' code would save it."""
    out = {}
    for name, value in state.items():
        for old, new in pairs:
            name = re.sub(old, new, name)
        out[name] = value
    assert len(out) == len(state) and (not pairs or out.keys() != state.keys())
    return out
