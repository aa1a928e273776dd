"""Right models and faults: each a small patch that reproduces a position error once reported, with the report.

`Tiny` is a vision transformer of one layer that shares no code with vitrel; its parts of position are methods, and a fault
overrides one of them.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import SwinTransformer

WIDTH, HEADS, PATCH = 32, 2, 8
HEAD = WIDTH // HEADS


class Tiny(nn.Module):
    """A vision transformer with a class token; images of any size, in patches of 8 pixels."""

    kind = "absolute"  # "absolute" | "sincos" | "rope" | "table"
    native = (6, 6)  # patches of the embedding and the table
    image_size = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        h, w = self.native
        self.img_size = (h * PATCH, w * PATCH)
        if self.kind == "absolute":
            self.embed = nn.Parameter(torch.randn(1, 1 + h * w, WIDTH))
        if self.kind == "table":
            self.table = nn.Parameter(torch.randn(31 * 31, HEADS))  # offsets up to 15
        if self.kind == "rope":
            self.register_buffer("inv_freq", 100.0 ** -(torch.arange(HEAD // 4) / (HEAD // 4)), persistent=False)
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image)
        h, w = x.shape[-2:]
        x = torch.cat((self.cls.expand(len(x), -1, -1), x.flatten(2).mT), 1)
        if self.kind in ("absolute", "sincos"):
            x = x + self.embedding(h, w)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        if self.kind == "rope":
            q, k = self.rotated(q, k, h, w)
        bias = self.bias(h, w) if self.kind == "table" else None
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return self.head(x.mean(1))

    # absolute

    def embedding(self, h: int, w: int) -> Tensor:
        if self.kind == "sincos":
            return torch.cat((torch.zeros(1, 1, WIDTH, device=self.cls.device), self.waves(h, w)[None]), 1).to(self.cls.dtype)
        return torch.cat((self.embed[:, :1], self.resized(self.master(), h, w)), 1)

    def master(self) -> Tensor:
        return self.embed[:, 1:].mT.unflatten(2, self.native)  # [1, C, h, w]

    def resized(self, master: Tensor, h: int, w: int) -> Tensor:
        if (h, w) == self.native:
            return master.flatten(2).mT
        return F.interpolate(master, (h, w), mode="bicubic", antialias=True).flatten(2).mT

    def waves(self, h: int, w: int) -> Tensor:
        y, x = torch.meshgrid(torch.arange(h, device=self.cls.device), torch.arange(w, device=self.cls.device), indexing="ij")
        frequency = 100.0 ** -(torch.arange(WIDTH // 4, device=self.cls.device) / (WIDTH // 4))
        angles = [axis.flatten()[:, None] * frequency for axis in (y, x)]
        return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], -1)

    # rotary

    def coordinates(self, h: int, w: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(h * w, device=self.cls.device)
        return index // w, index % w

    def angles(self, h: int, w: int) -> Tensor:
        return torch.cat([axis[:, None] * self.inv_freq.float() for axis in self.coordinates(h, w)], -1)  # [h*w, D/2]

    def rotated(self, q: Tensor, k: Tensor, h: int, w: int) -> tuple[Tensor, Tensor]:
        angles = self.angles(h, w)
        return tuple(torch.cat((x[:, :, :1], self.rotate(x[:, :, 1:], angles)), 2) for x in (q, k))

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    # relative

    def bias(self, h: int, w: int) -> Tensor:
        y, x = self.coordinates(h, w)
        dy, dx = (axis[:, None] - axis for axis in (y, x))  # query minus key
        return F.pad(self.table[self.index(dy, dx, h, w)].permute(2, 0, 1), (1, 0, 1, 0))

    def index(self, dy: Tensor, dx: Tensor, h: int, w: int) -> Tensor:
        return (dy + 15) * 31 + dx + 15


class Rope(Tiny):
    kind = "rope"


class Table(Tiny):
    kind = "table"


class Sincos(Tiny):
    kind = "sincos"


class Oblong(Tiny):
    native = (4, 9)


class Exchanged(Tiny):
    def resized(self, master, h, w):
        return super().resized(master, w, h)


class Corners(Tiny):
    def resized(self, master, h, w):
        return F.interpolate(master, (h, w), mode="bilinear", align_corners=True).flatten(2).mT


class ScaleFactor(Tiny):
    def resized(self, master, h, w):
        if (h, w) == self.native:
            return super().resized(master, h, w)
        factors = [(n + 0.1) / m for n, m in zip((h, w), self.native, strict=True)]
        return F.interpolate(master, scale_factor=factors, mode="bicubic").flatten(2).mT


class SquareAssumed(Oblong):
    def resized(self, master, h, w):
        if (h, w) == self.native:
            return super().resized(master, h, w)
        return super().resized(master.flatten(2).unflatten(2, (6, 6)), h, w)


class GridSample(Tiny):
    def resized(self, master, h, w):
        y, x = ((2 * torch.arange(n, device=master.device) + 1) / n - 1 for n in (h, w))
        grid = torch.stack(torch.meshgrid(y, x, indexing="xy"), -1)  # (y, x) where grid_sample wants (x, y), [w, h, 2]
        return F.grid_sample(master, grid[None].to(master.dtype), "bilinear", "border", align_corners=False).flatten(2).mT


class OfTransposedGrid(timm.models.VisionTransformer):
    """timm's, whose tokens are counted column by column."""

    size = 48

    def __init__(self):
        torch.manual_seed(0)
        how = dict(patch_size=PATCH, embed_dim=WIDTH, depth=1, num_heads=HEADS, num_classes=3, dynamic_img_size=True)
        super().__init__(img_size=self.size, **how)

    def _pos_embed(self, x):
        return super()._pos_embed(x.transpose(1, 2).contiguous())


class EmbeddingTransposed(OfTransposedGrid):
    """The same, with tokens put back in their order, and an embedding that is not square."""

    size = (40, 72)

    def _pos_embed(self, x):
        tokens = super()._pos_embed(x)
        patches = tokens[:, 1:].unflatten(1, (x.shape[2], x.shape[1])).transpose(1, 2).flatten(1, 2)
        return torch.cat((tokens[:, :1], patches), 1)


class Cut(Tiny):
    native = (8, 8)

    def embedding(self, h, w):
        return self.embed[:, : 1 + h * w]


class Padded(Tiny):
    def resized(self, master, h, w):
        inside = master[..., :h, :w]
        return F.pad(inside, (0, w - inside.shape[3], 0, h - inside.shape[2])).flatten(2).mT


class PaddedBeyond(Padded):
    native = (10, 10)


class UpsideDown(Tiny):
    def resized(self, master, h, w):
        return super().resized(master.flip(2), h, w)


class Noise(Tiny):
    """A right embedding at its own size, and noise at other sizes."""

    def resized(self, master, h, w):
        if (h, w) == self.native:
            return super().resized(master, h, w)
        generator = torch.Generator().manual_seed(h)
        return torch.randn(1, h * w, master.shape[1], generator=generator).to(master)


class NoAntialias(Tiny):
    def resized(self, master, h, w):
        return F.interpolate(master, (h, w), mode="bicubic").flatten(2).mT


class Bilinear(Tiny):
    def resized(self, master, h, w):
        return F.interpolate(master, (h, w), mode="bilinear", antialias=True).flatten(2).mT


class MeshgridOfXY(Sincos):
    def waves(self, h, w):
        x, y = torch.meshgrid(torch.arange(w, device=self.cls.device), torch.arange(h, device=self.cls.device), indexing="ij")
        frequency = 100.0 ** -(torch.arange(WIDTH // 4, device=self.cls.device) / (WIDTH // 4))
        angles = [axis.flatten()[:, None] * frequency for axis in (y, x)]
        return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], -1)


class NotInterpolatedInExport(Tiny):
    def resized(self, master, h, w):
        if torch.compiler.is_exporting():
            return master.flatten(2).mT.repeat(1, 2, 1)[:, : h * w]
        return super().resized(master, h, w)


class InterpolatedOtherwiseCompiled(Tiny):
    def resized(self, master, h, w):
        if torch.compiler.is_dynamo_compiling():
            return F.interpolate(master, (h, w), mode="bilinear").flatten(2).mT
        return super().resized(master, h, w)


class RopeExchanged(Rope):
    def angles(self, h, w):
        return super().angles(w, h)


class RopeCachedByCount(Rope):
    def angles(self, h, w):
        if getattr(self, "cached", None) is None or len(self.cached) != h * w:
            self.cached = super().angles(h, w)
        return self.cached.to(self.cls.device)


class RopeOnClass(Rope):
    def rotated(self, q, k, h, w):
        angles = self.angles(h, w)
        angles = torch.cat((angles.mean(0, keepdim=True), angles))
        return tuple(self.rotate(x, angles) for x in (q, k))


class RopeClassRowLast(Rope):
    def rotated(self, q, k, h, w):
        angles = F.pad(self.angles(h, w), (0, 0, 0, 1))  # the row of zeros for the class token belongs first
        return tuple(self.rotate(x, angles) for x in (q, k))


class RopeLayouts(Rope):
    def rotate(self, x, angles):
        cos, sin = (wave.repeat_interleave(2, -1).to(x.dtype) for wave in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin


class RopeInterleaved(Rope):
    def rotate(self, x, angles):
        cos, sin = (wave.repeat_interleave(2, -1).to(x.dtype) for wave in (angles.cos(), angles.sin()))
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


class RopeOneAxis(Rope):
    def angles(self, h, w):
        first = super().angles(h, w)[:, : HEAD // 4]
        return torch.cat((first, first), -1)


class RopeZeroFrequencies(Rope):
    def __init__(self):
        super().__init__()
        self.inv_freq.zero_()


class RopeUnderAutocast(Rope):
    def angles(self, h, w):
        y, x = (axis[:, None].float() + 65536 for axis in self.coordinates(h, w))
        return torch.cat([axis @ self.inv_freq.float()[None] for axis in (y, x)], -1)


class RopeOnOneDevice(Rope):
    def __init__(self):
        super().__init__()
        frequency = self.inv_freq
        del self.inv_freq
        self.frequency = [frequency]  # in a list, so .to() does not move it

    def angles(self, h, w):
        return torch.cat([axis[:, None] * self.frequency[0] for axis in self.coordinates(h, w)], -1)


class RopeOfBatch(Rope):
    def rotated(self, q, k, h, w):
        angles = self.angles(h, w) * len(q)
        return tuple(torch.cat((x[:, :, :1], self.rotate(x[:, :, 1:], angles)), 2) for x in (q, k))


class RopeOfHeight(Rope):
    def coordinates(self, h, w):
        return tuple(8 * axis / h for axis in super().coordinates(h, w))  # columns by the height too


class KeysBackwards(Rope):
    def rotated(self, q, k, h, w):
        angles = self.angles(h, w)
        return tuple(torch.cat((x[:, :, :1], self.rotate(x[:, :, 1:], s * angles)), 2) for x, s in ((q, 1), (k, -1)))


class BaseOfText(Rope):
    def __init__(self):
        super().__init__()
        self.inv_freq.copy_(10000.0 ** -(torch.arange(HEAD // 4) / (HEAD // 4)))


class TableOtherSide(Table):
    def index(self, dy, dx, h, w):
        return (dy + h - 1) * (2 * h - 1) + dx + w - 1  # 2w - 1 are the offsets of one row


class TableKeyMinusQuery(Table):
    def index(self, dy, dx, h, w):
        return super().index(-dy, -dx, h, w)


class TableOnClass(Table):
    def bias(self, h, w):
        bias = super().bias(h, w)
        bias[:, 0, 1:], bias[:, 1:, 0] = bias[:, 1, 1:], bias[:, 1:, 1]  # the class token as the first patch
        return bias


def swin(size: tuple[int, int] = (56, 112), **options) -> nn.Module:
    torch.manual_seed(0)
    how = dict(img_size=size, window_size=7, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=3, always_partition=True)
    return timm.create_model("swin_tiny_patch4_window7_224", **(how | options)).eval()


class Fixed(nn.Module):
    """A model for one image size, without `set_input_size`."""

    def __init__(self, model: nn.Module, size: tuple[int, int]):
        super().__init__()
        self.model, self.img_size = model, size

    def forward(self, image: Tensor) -> Tensor:
        if tuple(image.shape[-2:]) != self.img_size:
            raise ValueError(f"images of {self.img_size} only")
        return self.model(image)


def blocks(model: nn.Module) -> list[nn.Module]:
    return [*model.layers[0].blocks]


def swin_without_mask() -> nn.Module:
    model = swin()
    blocks(model)[1].attn_mask = None
    return Fixed(model, (56, 112))


def swin_of_the_transposed_grid() -> nn.Module:
    model = swin((56, 56))
    blocks(model)[0].register_forward_pre_hook(lambda _, args: args[0].transpose(1, 2))
    blocks(model)[-1].register_forward_hook(lambda _, args, out: out.transpose(1, 2))
    return Fixed(model, (56, 56))


def swin_with_mask_in_every_block() -> nn.Module:
    model = swin()
    first, second = blocks(model)
    first.attn_mask = copy.deepcopy(second.attn_mask)
    return Fixed(model, (56, 112))


def swin_that_shifts_one_window() -> nn.Module:
    model = swin((28, 112))  # 7 rows of tokens, which one window of 7 holds
    second = blocks(model)[1]
    second.shift_size, second.attn_mask = (3, 3), None
    with torch.no_grad():
        x = torch.zeros(1, 7, 28, 16)
        second.dynamic_mask = False
        second.attn_mask = second.get_attn_mask(x)
    return Fixed(model, (28, 112))


def swin_that_pads_after_the_roll() -> nn.Module:
    return swin((56, 112), dynamic_img_size=True, strict_img_size=False)


def swin_that_attends_to_padding() -> nn.Module:
    torch.manual_seed(0)
    return SwinTransformer([4, 4], embed_dim=16, depths=[2], num_heads=[2], window_size=[7, 7], num_classes=3)


class WindowStaysSmall(Fixed):
    """The window shrinks to half of a small image, and does not grow again."""

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        window = min(self.model.layers[0].blocks[0].window_size[0], *(side // PATCH for side in img_size))
        self.model.set_input_size(img_size, window_size=window)
        self.img_size = img_size


class Fault(NamedTuple):
    name: str
    reference: str
    build: Callable[[], nn.Module]
    check: str  # the check that must name it
    right: Callable[[], nn.Module] | None = None  # the right model, for faults that need a reference
    also: tuple[str, ...] = ()  # checks that may find consequences of it
    expect: str | None = None


FAULTS = [
    Fault("embedding resampled to w x h", "facebookresearch/dino issue 8", Exchanged, "resampling"),
    Fault("embedding sampled at (y, x) for (x, y)", "pytorch/torchtitan pull request 4244", GridSample, "resampling"),
    Fault("non-square native embedding read as square", "huggingface/pytorch-image-models pull request 2317", SquareAssumed,
          "resampling"),
    Fault("align_corners", "ggml-org/llama.cpp pull request 25781", Corners, "half_pixel"),
    Fault("scale factor with 0.1 added", "facebookresearch/dinov2 pull request 378", ScaleFactor, "half_pixel"),
    Fault("embedding of the transposed grid", "", OfTransposedGrid, "order", None, ("resampling",)),
    Fault("embedding transposed", "", EmbeddingTransposed, "resampling"),
    Fault("embedding cut to the number of tokens", "", Cut, "resampling"),
    Fault("embedding cropped and padded with zeros", "", Padded, "resampling"),
    Fault("embedding padded with zeros beyond its grid", "", PaddedBeyond, "resampling"),
    Fault("embedding upside down", "", UpsideDown, "resampling"),
    Fault("embedding of another seed at another size", "", Noise, "resampling"),
    Fault("no antialias", "openvinotoolkit/openvino.genai pull request 4444", NoAntialias, "like", Tiny),
    Fault("another interpolation than the weights'", "huggingface/pytorch-image-models issue 2542", Bilinear, "like", Tiny),
    Fault("meshgrid of (x, y) flattened", "huggingface/transformers pull request 41380", MeshgridOfXY, "order"),
    Fault("interpolation left out in tracing", "huggingface/transformers pull request 33226", NotInterpolatedInExport,
          "export"),
    Fault("another interpolation when compiled", "pytorch/pytorch issue 93262", InterpolatedOtherwiseCompiled, "compile"),
    Fault("rotary: height and width exchanged", "huggingface/pytorch-image-models pull request 2541", RopeExchanged, "order"),
    Fault("rotary: cached by the number of tokens", "naver-ai/rope-vit, deit/models_v2_rope.py", RopeCachedByCount, "cache"),
    Fault("rotary: class token rotated", "MicPie/clasp pull request 7", RopeOnClass, "prefix"),
    Fault("rotary: row of the class token at the end", "huggingface/pytorch-image-models pull request 2478",
          RopeClassRowLast, "order"),
    Fault("rotary: half-split rotation with interleaved angles", "huggingface/transformers issue 47328", RopeLayouts,
          "rotation"),
    Fault("rotary: interleaving ignored", "huggingface/pytorch-image-models 2692", Rope, "like", RopeInterleaved),
    Fault("rotary: keys rotated backwards", "", KeysBackwards, "sign"),
    Fault("rotary: another base than the weights'", "", BaseOfText, "like", Rope),
    Fault("rotary: rows only", "Tencent/ncnn issue 6833", RopeOneAxis, "axes", None, ("exchange",)),
    Fault("rotary: columns in units of the height", "", RopeOfHeight, "exchange"),
    Fault("rotary: frequencies are zero", "pytorch/executorch pull request 19627", RopeZeroFrequencies, "expect", None, (),
          "rope_axial"),
    Fault("rotary: angles under autocast", "huggingface/diffusers pull request 13922", RopeUnderAutocast, "dtype", None,
          ("order", "prefix")),
    Fault("rotary: frequencies left on one device", "huggingface/transformers issue 25555", RopeOnOneDevice, "device"),
    Fault("rotary: depends on the batch", "huggingface/transformers issue 23218", RopeOfBatch, "batch"),
    Fault("table: rows counted by the other side", "leondgarse/keras_cv_attention_models issue 26", TableOtherSide, "order"),
    Fault("table: key minus query", "nntrainer/nntrainer pull request 3982", TableKeyMinusQuery, "like", Table),
    Fault("table: class token as the first patch", "", TableOnClass, "prefix"),
    Fault("windows: padding attended to", "tier4/autoware-ml pull request 93", swin_that_attends_to_padding, "padding"),
    Fault("windows: padded after the roll", "huggingface/pytorch-image-models issue 2438", swin_that_pads_after_the_roll,
          "window", None, ("padding", "mask", "order", "exchange")),
    Fault("windows: shifted without a mask", "zzd1992/FlashWindowAttention issue 1", swin_without_mask, "window", None,
          ("mask",)),
    Fault("windows: of the transposed grid", "", swin_of_the_transposed_grid, "order"),
    Fault("windows: mask in blocks without shift", "JingyunLiang/SwinIR issue 153", swin_with_mask_in_every_block, "mask"),
    Fault("windows: one window shifted", "pytorch/vision pull request 6222", swin_that_shifts_one_window, "shift"),
    Fault("windows: that of a small image stays", "",
          lambda: WindowStaysSmall(swin((64, 128), window_size=8), (64, 128)), "state"),
]  # fmt: skip


class Cropped(Tiny):
    """An embedding with a row for each place up to 8 x 8, and none beyond."""

    native = (8, 8)

    def resized(self, master, h, w):
        return master[..., :h, :w].flatten(2).mT


RIGHT = [Tiny, Cropped, Rope, RopeInterleaved, Table, Sincos, Oblong, lambda: Fixed(swin(), (56, 112))]
