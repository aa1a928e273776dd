"""Layers of ViT and Swin: they take tokens and their grid, and work with any position encoding.

RelativeAttention is for models of your own: self-attention that holds its encoding.
"""

from vitrel.layers.attention import Attention, RelativeAttention
from vitrel.layers.block import ACTIVATIONS, Block, PatchMerging
from vitrel.layers.fade import Fade
from vitrel.layers.patches import PatchEmbed

__all__ = ["ACTIVATIONS", "Attention", "Block", "Fade", "PatchEmbed", "PatchMerging", "RelativeAttention"]
