"""Models whose position is a convolution of the tokens (timm.models.coat, twins, davit
and others), and models whose trunk evaluates or resamples its position for any grid by itself.

CPE and PEG (arXiv 2102.10882) are depthwise convolutions, which see the zeros beyond the border. Nothing is resampled; only
CoaT's fixed image size is lifted.
"""

from typing import Any

from timm.models import coat, davit, edgenext, efficientvit_msra, naflexvit, pvt_v2, twins
from timm.models.csatv2 import CSATv2
from torch import Tensor

from vitrel.any_size.exchange import Adapter, AnySize
from vitrel.position.fourier import fourier_waves


class CoaT(AnySize, coat.CoaT):
    """CoaT of any image of whole patches of the last stage, 32 pixels."""

    def adopted(self, model: Any) -> None:
        for i in (1, 2, 3, 4):
            embed = getattr(self, f"patch_embed{i}")
            embed.strict_img_size = False

    def forward_features(self, x0: Tensor) -> Any:
        x, outputs, sizes = x0, [], []
        for i in (1, 2, 3, 4):
            embed = getattr(self, f"patch_embed{i}")
            sizes.append(tuple(n // p for n, p in zip(x.shape[-2:], embed.patch_size, strict=True)))
            x = coat.insert_cls(embed(x), getattr(self, f"cls_token{i}"))
            for block in getattr(self, f"serial_blocks{i}"):
                x = block(x, size=sizes[-1])
            outputs.append(x)
            x = coat.remove_cls(x).mT.unflatten(2, sizes[-1]).contiguous()
        if self.parallel_blocks is None:
            return self.norm4(outputs[-1])
        x1, x2, x3, x4 = outputs
        for block in self.parallel_blocks:
            x2, x3, x4 = self.cpe2(x2, sizes[1]), self.cpe3(x3, sizes[2]), self.cpe4(x4, sizes[3])
            x1, x2, x3, x4 = block(x1, x2, x3, x4, sizes=sizes)
        return [self.norm2(x2), self.norm3(x3), self.norm4(x4)]


class FourierTokens(edgenext.PositionalEncodingFourier):
    """Fourier encoding of the relative place on the grid, (B, h, w) -> [B, C, h, w], projected to the width of the tokens."""

    def forward(self, shape: tuple[int, int, int]) -> Tensor:
        weight = self.token_projection.weight
        bands, base = self.hidden_dim, float(self.temperature)
        waves = fourier_waves(*shape[1:], bands, base, "float32", device=weight.device)  # [h*w, 2 * bands]
        waves = waves.mT.unflatten(1, shape[1:])[None]
        return self.token_projection(waves.to(weight.dtype)).expand(shape[0], -1, -1, -1)


_NOTHING = "nothing"
COAT = Adapter((coat.CoaT,), {coat.CoaT: CoaT}, "convolutions of the tokens (CPE) and of the values", _NOTHING, multiple=32)
TWINS = Adapter((twins.Twins,), {}, "convolutions of the tokens (PEG)", _NOTHING, multiple=32)
PVT_V2 = Adapter((pvt_v2.PyramidVisionTransformerV2,), {}, "none: its convolutions see the border", _NOTHING)
DAVIT = Adapter((davit.DaVit,), {}, "convolutions of the tokens (CPE)", _NOTHING)
CSATV2 = Adapter((CSATv2,), {}, "convolutions of the tokens", _NOTHING, multiple=32)
EDGENEXT = Adapter(
    (edgenext.EdgeNeXt,),
    {edgenext.PositionalEncodingFourier: FourierTokens},
    "Fourier encoding added to tokens",
    "evaluated, as in timm",
    multiple=32,
)
EFFICIENTVIT = Adapter(
    (efficientvit_msra.EfficientVitMsra,),
    {},
    "table over |row offset| and |column offset| in windows",
    "nothing resampled; padding attended to, as in timm",
)
NAFLEXVIT = Adapter(
    (naflexvit.NaFlexVit,),
    {},
    "absolute, or factorized: rows plus columns, added to tokens",
    "absolute bicubic, factorized linear, as in timm",
    multiple=16,
)
