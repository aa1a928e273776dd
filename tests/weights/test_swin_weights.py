"""Swin weights of other code: in torchvision's, transformers', Microsoft's and naver's own models the logits and gradients are
ours, at the size they were built for and at another that windows divide (elsewhere the peers look into padding). Refusals.
"""

import re

import pytest
import timm
import torch
from timm.layers import Mlp
from torch import nn
from torchvision.models import swin_transformer as tv

import vitrel
from helpers import each
from vitrel.models import Swin

WINDOW = (3, 5)
SMALL = dict(patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)
SIZES = ((24, 40), (36, 40))  # patches of 2, two stages: windows of 3x5 divide both


def raises(text):
    return pytest.raises(ValueError, match=text)


def swin(**options):
    return Swin(**(SMALL | dict(img_size=SIZES[0], window_size=WINDOW, drop_path_rate=0.0) | options)).eval()


def loaded_twice(options, path, theirs):
    """Our model with the same weights from a file and from the state dict."""
    ours, again = (vitrel.load_pretrained(swin(**options), source) for source in (path, theirs.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    return ours


def perturb(model):
    """Tables at standard deviation 0.5, vectors moved, nothing zero, matrices so large that every one of them counts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"bias_table|pos_embed|position_embeddings|mlp\.0\.", name) or not parameter.any():
                parameter.normal_(std=0.5)
            elif parameter.dim() == 1 or "logit_scale" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
    return model.eval()


def same(ours, theirs, sizes, back):
    """Logits within 2e-5, in double precision every gradient within 2e-5 of its norm. back: our gradients -> the peer's."""
    for size in sizes:
        for dtype in (torch.float32, torch.float64):
            image = torch.randn(2, 3, *size, dtype=dtype)
            a, b = ours.to(dtype)(image), theirs.to(dtype)(image)
            b = getattr(b, "logits", b)
            torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
        weight = torch.randn_like(a)
        for model, out in ((ours, a), (theirs, b)):
            model.zero_grad()
            (out * weight).sum().backward()
        found = back({n: p.grad for n, p in ours.named_parameters()})
        expected = {n: p.grad for n, p in theirs.named_parameters()}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.norm() > 1e-3 or "k_proj.bias" in name  # softmax does not see the same bias on all keys
            assert (found[name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-12, name


def renamed(gradients, rules):
    """rules: "old=new ..." in turn; / is the beginning of a name."""
    out = {}
    for name, value in gradients.items():
        name = f"/{name}"
        for rule in rules.split():
            name = name.replace(*rule.split("="))
        out[name.removeprefix("/")] = value
    return out


TORCHVISION = """patch_embed.proj=features.0.0 patch_embed.norm=features.0.2 layers.1.downsample=features.2 head.fc=head
    layers.0.blocks=features.1 layers.1.blocks=features.3 .position.=.attn. mlp.fc1=mlp.0 mlp.fc2=mlp.3"""


def torchvision_peer(version):
    parts = {1: (tv.SwinTransformerBlock, tv.PatchMerging), 2: (tv.SwinTransformerBlockV2, tv.PatchMergingV2)}[version]
    return perturb(tv.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [*WINDOW], 4, 0, 0, 0, 5, None, *parts))


def torchvision_back(gradients):
    out = renamed(gradients, TORCHVISION)
    for name in [n.removesuffix("q_bias") for n in out if n.endswith("q_bias")]:
        q, v = out.pop(f"{name}q_bias"), out.pop(f"{name}v_bias")
        out[f"{name}qkv.bias"] = torch.cat((q, torch.zeros_like(q), v))
    return out


@pytest.mark.parametrize("version", [1, 2])
def test_torchvision(version, tmp_path):
    theirs = torchvision_peer(version)
    torch.save(theirs.state_dict(), tmp_path / "swin.pth")
    ours = loaded_twice(dict(version=version, position=("table", "cpb")[version - 1]), tmp_path / "swin.pth", theirs)
    same(ours, theirs, SIZES, torchvision_back)


def transformers_peer(version, head="ImageClassification", **options):
    library = pytest.importorskip("transformers", reason="transformers is no dependency, its weights are read without it")
    name = "Swin" if version == 1 else "Swinv2"
    sizes = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], num_labels=5, window_size=4)
    config = getattr(library, f"{name}Config")(**(sizes | options))
    return perturb(getattr(library, f"{name}For{head}")(config))


TRANSFORMERS = """/patch_embed.proj=/embeddings.patch_embeddings.projection /patch_embed.norm=/embeddings.norm
    /pos_embed.pos_embed=/embeddings.position_embeddings /layers.1.downsample=/layers.0.downsample /layers=/encoder.layers
    /norm=/layernorm norm1=layernorm_before norm2=layernorm_after .position.=.attn. /head.fc=classifier """
TRANSFORMERS_V1 = """.attn.proj=.attn.o_proj .relative_=.relative_position_bias.relative_ .attn.=.attention. /=swin."""
TRANSFORMERS_V2 = """mlp.fc1=intermediate.dense mlp.fc2=output.dense .attn.proj=.attention.output.dense /=swinv2.
    .attn.=.attention.self. cpb_mlp=continuous_position_bias_mlp q_bias=query.bias v_bias=value.bias"""


def transformers_back(gradients, version):
    """The names that the installed version's modules have; V2 keeps those that all files on the hub have."""
    words = ("q_proj", "k_proj", "v_proj") if version == 1 else ("query", "key", "value")
    out = renamed(gradients, TRANSFORMERS + (TRANSFORMERS_V1, TRANSFORMERS_V2)[version - 1])
    for name in [n for n in out if ".qkv." in n]:
        out |= dict(zip((name.replace("qkv", word) for word in words), out.pop(name).chunk(3), strict=True))
    return out


@pytest.mark.parametrize(
    ("version", "options", "own"),
    [
        (1, {}, dict(position="table")),
        (1, dict(qkv_bias=False), dict(position="table", qkv_bias=False)),
        (1, dict(use_absolute_embeddings=True), dict(position="absolute+table")),
        (2, {}, dict(position="cpb")),
        (2, dict(pretrained_window_sizes=(6, 6)), dict(position="cpb", position_args=dict(pretrained_window=6))),
        # Where the last grid is smaller than the window, it is the window of the bias unless the file was trained in another.
        (2, dict(image_size=8), dict(position="cpb")),
        (2, dict(image_size=8, pretrained_window_sizes=(4, 4)), dict(position="cpb", position_args=dict(pretrained_window=4))),
    ],
    ids=str,
)
def test_transformers(version, options, own, tmp_path):
    """Under the names that its modules have, and under those of its files (version 5 renames as it saves)."""
    theirs, size = transformers_peer(version, **options), options.get("image_size", 32)
    theirs.save_pretrained(tmp_path)
    own = own | dict(img_size=size, window_size=4, version=version)
    ours = loaded_twice(own, tmp_path / "model.safetensors", theirs)
    sizes = ((size, size),) if size == 8 or "absolute" in own["position"] else ((32, 32), (48, 32))
    same(ours, theirs, sizes, lambda gradients: transformers_back(gradients, version))


def test_a_file_of_transformers_without_its_configuration(tmp_path):
    theirs, image = transformers_peer(1), torch.randn(1, 3, 32, 32)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    torch.testing.assert_close(vitrel.load(tmp_path / "model.safetensors")(image), theirs(image).logits, atol=2e-5, rtol=0)


class Attention(nn.Module):
    """Attention in a window as in Microsoft's Swin V1, or with naver's rotation: x before y, neighbors in pairs."""

    def __init__(self, dim, heads, table, rope):
        super().__init__()
        self.heads, (h, w), n = heads, WINDOW, dim // heads // 4
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        y, x = torch.arange(h * w) // w, torch.arange(h * w) % w
        if table:
            self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * h - 1) * (2 * w - 1), heads))
            self.relative_position_index = nn.Buffer((y[:, None] - y + h - 1) * (2 * w - 1) + (x[:, None] - x + w - 1))
        if rope:
            self.rope_t_x, self.rope_t_y = nn.Buffer(x.float()), nn.Buffer(y.float())
            axes = torch.tensor([[1, -4.4e-8], [0, 1]])  # as cosines and sines of 0 and pi/2 come out
            axial = torch.kron(axes, 100.0 ** (-torch.arange(n) / n))[:, None].repeat(1, heads, 1)
            self.rope_freqs = nn.Parameter(torch.rand_like(axial)) if rope == "mixed" else nn.Buffer(axial)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)  # [B, L, H, N, D] each
        if hasattr(self, "rope_freqs"):
            fx, fy = self.rope_freqs[:, :, None]  # [H, 1, D/2]
            angle = self.rope_t_x[:, None] * fx + self.rope_t_y[:, None] * fy
            turn = torch.polar(torch.ones_like(angle), angle)  # [H, N, D/2]
            q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + mask[:, None]
        if hasattr(self, "relative_position_bias_table"):
            logits = logits + self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        return self.proj((logits.softmax(-1) @ v).transpose(2, 3).flatten(3))


def partition(x):
    """[B, h, w, C] -> [B, L, N, C]."""
    return x.unflatten(2, (-1, WINDOW[1])).unflatten(1, (-1, WINDOW[0])).transpose(2, 3).flatten(3, 4).flatten(1, 2)


class Layer(nn.Module):
    def __init__(self, dim, heads, shift, eps, table, rope):
        super().__init__()
        self.norm1, self.norm2, self.shift = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps), shift
        self.attn, self.mlp = Attention(dim, heads, table, rope), Mlp(dim, 4 * dim)

    def forward(self, x):
        _, h, w, _ = x.shape
        axes = zip((torch.arange(h), torch.arange(w)), (h, w), WINDOW, self.shift, strict=True)
        rows, columns = ((at >= n - window).long() + (at >= n - shift) if shift else 0 * at for at, n, window, shift in axes)
        region = partition((rows[:, None] * 3 + columns).view(1, h, w, 1))[0]  # [L, N, 1]
        mask = torch.where(region == region.transpose(1, 2), 0.0, -100.0)
        out = self.attn(partition(self.norm1(x).roll((-self.shift[0], -self.shift[1]), (1, 2))), mask)
        out = out.unflatten(1, (h // WINDOW[0], -1)).unflatten(3, WINDOW).transpose(2, 3).reshape(x.shape)
        x = x + out.roll(self.shift, (1, 2))
        return x + self.mlp(self.norm2(x))


class Microsoft(nn.Module):
    """Swin V1 with Microsoft's names: stages end in the downsampling. naver gives its blocks another eps, and only them."""

    def __init__(self, table=True, rope="", ape=False, eps=1e-5):
        super().__init__()
        self.patch_embed = nn.ModuleDict(dict(proj=nn.Conv2d(3, 16, 2, 2), norm=nn.LayerNorm(16)))
        self.absolute_pos_embed = nn.Parameter(torch.zeros(1, 240, 16)) if ape else None
        self.layers = nn.ModuleList()
        for dim, heads in ((16, 2), (32, 4)):
            blocks = nn.ModuleList(Layer(dim, heads, shift, eps, table, rope) for shift in ((0, 0), (1, 2)))
            self.layers.append(nn.ModuleDict(dict(blocks=blocks)))
        merge = dict(norm=nn.LayerNorm(64, eps), reduction=nn.Linear(64, 32, bias=False))
        self.layers[0]["downsample"] = nn.ModuleDict(merge)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, image):
        x = self.patch_embed["norm"](self.patch_embed["proj"](image).permute(0, 2, 3, 1))
        if self.absolute_pos_embed is not None:
            x = x + self.absolute_pos_embed.view(1, 12, 20, 16)
        for stage in self.layers:
            x = nn.Sequential(*stage["blocks"])(x)
            if "downsample" in stage:
                x = torch.cat((x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]), -1)
                x = stage["downsample"]["reduction"](stage["downsample"]["norm"](x))
        return self.head(self.norm(x).mean((1, 2)))


MICROSOFT = """head.fc=head pos_embed.pos_embed=absolute_pos_embed layers.1.downsample=layers.0.downsample .position.=.attn.
    .parts.rope_mixed.=. .parts.table.=. .freqs=.rope_freqs"""


def microsoft_back(gradients, rope=""):
    """Pair p of a head: channels (p, p + D/2) in ours, (2p, 2p + 1) in the peer's; axial: pairs of x come first there."""
    out = renamed(gradients, MICROSOFT)
    for name in [n for n in out if "qkv" in n and rope]:
        ours, heads = out[name], 2 if name.startswith("layers.0") else 4
        out[name], width = ours.clone(), ours.shape[0] // 3 // heads
        for first in range(0, 2 * heads * width, width):  # the heads of q, then those of k
            for p in range(width // 2):
                own = first + (p if rope == "mixed" else (p + width // 4) % (width // 2))
                out[name][first + 2 * p], out[name][first + 2 * p + 1] = ours[own], ours[own + width // 2]
    return {n: g.flip(0) if n.endswith("rope_freqs") else g for n, g in out.items()}


@each("ape", [False, True])
def test_microsoft_with_windows_that_are_no_squares(ape):
    theirs = perturb(Microsoft(ape=ape))
    state = theirs.state_dict() | {"layers.0.blocks.1.attn_mask": torch.zeros(16, 15, 15)}
    ours = vitrel.load_pretrained(swin(position="absolute+table" if ape else "table"), {"model": state})
    same(ours, theirs, SIZES[:1] if ape else SIZES, microsoft_back)
    if not ape:  # a table of another window
        ours = swin(window_size=(6, 7))
        with raises(r"bias_table has 45 rows, which no square grid gives: pass source_grid=\(h, w\)"):
            vitrel.load_pretrained(ours, state)
        with raises("has 45 rows for positions, which is no 5x4 grid: pass the source_grid"):
            vitrel.load_pretrained(ours, state, source_grid=(5, 4))
        vitrel.load_pretrained(ours, state, source_grid=WINDOW)
        table = ours.layers[1].blocks[1].position.relative_position_bias_table
        assert torch.equal(table[5 * 13 + 6], state["layers.1.blocks.1.attn.relative_position_bias_table"][2 * 9 + 4])


@each("table", [False, True])
@each("rope", ["mixed", "axial"])
def test_naver(rope, table):
    theirs = perturb(Microsoft(table=table, rope=rope, eps=1e-6))
    ours = swin(position=f"rope_{rope}+table" if table else f"rope_{rope}", norm_eps=1e-6)
    vitrel.load_pretrained(ours, {"model": {f"module.{n}": t for n, t in theirs.state_dict().items()}, "epoch": 300})
    same(ours, theirs, SIZES, lambda gradients: microsoft_back(gradients, rope))


def test_naver_files_name_their_rotation():
    mixed, axial = (Microsoft(table=False, rope=rope).state_dict() for rope in ("mixed", "axial"))
    with raises(
        r"mixed\), which rotates q and k by rope_mixed \(learned\); .* none that rotates: build .*position='rope_mixed'"
    ):
        vitrel.load_pretrained(swin(), mixed)
    with raises(r"encoding is rope_axial: build it with position='rope_mixed', joined by '\+' to others$"):
        vitrel.load_pretrained(swin(position="rope_axial"), mixed)
    with raises(r"rope_mixed: build .* position='rope_axial', .* position_args=dict\(base=100.0, reference=None\)$"):
        vitrel.load_pretrained(swin(position="rope_mixed"), axial)
    with raises(r"by rope_axial \(base=100.0, reference=None\); .* rope_axial with base=10.0, reference=None"):
        vitrel.load_pretrained(swin(position="rope_axial", position_args=dict(base=10.0)), axial)


def refused(model, state, *texts, **options):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(RuntimeError) as error:
        vitrel.load_pretrained(model, state, **options)
    for text in ("nothing was loaded", *texts):
        assert text in str(error.value), str(error.value)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_refusals():
    state, ape, second = Microsoft().state_dict(), Microsoft(ape=True).state_dict(), torchvision_peer(2).state_dict()
    refused(swin(version=2), state, "not in the file: layers.0.blocks.0.attn.logit_scale", "build with version=1")
    refused(swin(), second, "not in the model: features.1.0.attn.logit_scale", "build with version=2", "'cpb' in position")
    refused(swin(position="rope_axial"), state, "bias tables (build with 'table' in position)", "trained without rope_axial")
    refused(swin(position="rope_mixed+table"), state, "not in the file: layers.0.blocks.0.position.parts.rope_mixed.freqs")
    refused(swin(), ape, "not in the model: absolute_pos_embed", "build with 'absolute' in position")
    refused(swin(position="absolute+table"), state, "not in the file: pos_embed.pos_embed", "build without 'absolute'")
    refused(swin(depths=(2, 3)), state, "fewer blocks in the file (layers.1.blocks.2...; build the model with the file's depth")
    refused(swin(depths=(1, 2)), state, "more blocks in the file (layers.0.blocks.1...; build the model with the file's depth")
    plain = timm.create_model("vit_tiny_patch16_224", depth=1, patch_size=2, img_size=16).state_dict()
    refused(swin(), plain, "What differs: the file is of a plain ViT, the model is a Swin")
    both = swin(position="rope_axial+table")
    refused(both, state, "layers.0.blocks.0.position.parts.rope_axial <rope_axial>", "allow_unset=['*position*']")
    vitrel.load_pretrained(both, state, allow_unset=["*position*"])


def test_the_window_of_a_continuous_bias_is_the_files():
    """Only where the file holds its coordinates, as torchvision's and Microsoft's do: no parameter tells."""
    state, options = torchvision_peer(2).state_dict(), dict(version=2, position="cpb", window_size=(6, 5))
    with raises(r"0: a bias trained in windows of 3x5, the model's in windows of 6x5; .*\(pretrained_window=\(3, 5\)\)$"):
        vitrel.load_pretrained(swin(**options), state)
    last = {"features.3.0.attn.relative_coords_table": tv.ShiftedWindowAttentionV2(32, [2, 3], [0, 0], 4).relative_coords_table}
    with raises("; its stages were trained in windows of several sizes: give pretrained_window one number per stage"):
        vitrel.load_pretrained(swin(**options), state | last)
    for args in (dict(policy="renormalize"), dict(pretrained_window=WINDOW)):
        ours = vitrel.load_pretrained(swin(**options, position_args=args), state)
        assert torch.equal(ours.layers[1].blocks[1].position.cpb_mlp[2].weight, state["features.3.1.attn.cpb_mlp.2.weight"])


def test_masked_pretraining():
    state = transformers_peer(1, head="MaskedImageModeling").state_dict()
    ours, options = swin(img_size=32, window_size=4), dict(reset_head=True, allow_unused=["decoder.*"])
    refused(ours, state, "not in the model: swin.embeddings.mask_token.", "pretraining only (name them in allow", **options)
    vitrel.load_pretrained(ours, state, reset_head=True, allow_unused=["*mask_token", "decoder.*"])
    assert torch.equal(ours.norm.weight, state["swin.layernorm.weight"])


@pytest.mark.parametrize("layout", ["torchvision", "transformers"])
def test_through_timm(layout, tmp_path):
    if layout == "torchvision":
        theirs, path, options = torchvision_peer(1), tmp_path / "swin.pth", dict(window_size=WINDOW, img_size=SIZES[0])
        torch.save(theirs.state_dict(), path)
    else:
        theirs, path, options = transformers_peer(1), tmp_path / "model.safetensors", dict(window_size=4, img_size=32)
        theirs.save_pretrained(tmp_path)
    options |= SMALL | dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(path), num_classes=5))
    ours = timm.create_model("vitrel_swin_t", **options).eval()
    image = torch.randn(1, 3, *ours.img_size)
    expected = theirs(image)
    torch.testing.assert_close(ours(image), getattr(expected, "logits", expected), atol=2e-5, rtol=0)
    other = timm.create_model("vitrel_swin_t", **(options | dict(num_classes=3))).eval()
    assert other(image).shape == (1, 3) and torch.equal(other.norm.weight, ours.norm.weight)
