"""Patches of an image of any size: timm's PatchEmbed with another way to pad, by which graphs for any size compile quickly."""

import timm.layers
import torch.nn.functional as F
from timm.layers.format import nchw_to
from torch import Tensor

from vitrel.geometry import is_known


class PatchEmbed(timm.layers.PatchEmbed):
    """timm's PatchEmbed that pads every image to whole patches, as timm's own does with dynamic_img_pad=True.

    The image may have any size, whatever `strict_img_size` says. Arguments, parameters and results are timm's.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedded patches of an image [B, C, H, W], in timm's `output_fmt`; [B, N, D] with `flatten`."""
        x = self.proj(pad_to_whole(x, self.patch_size))
        return self.norm(x.flatten(2).mT if self.flatten else nchw_to(x, self.output_fmt))


def pad_to_whole(x: Tensor, patch: tuple[int, int]) -> Tensor:
    """Pad an image with zeros on the right and below, so that whole patches cover all of its pixels.

    A graph for any size pads each axis by one pixel less than a patch. That may be more than is needed, but the convolution
    reads whole patches only. With exact padding the sizes contain remainders, and torch takes minutes to compile some models.

    Args:
        x: image [B, C, H, W].
        patch: (h, w) of a patch in pixels; patches do not overlap.
    """
    h, w = x.shape[-2:]
    if not (isinstance(h, int) and is_known(h, w)):  # torch.fx gives sizes that are no numbers
        return F.pad(x, (0, patch[1] - 1, 0, patch[0] - 1))
    return F.pad(x, (0, -w % patch[1], 0, -h % patch[0])) if h % patch[0] or w % patch[1] else x
