"""Layers: patches, attention with position terms, the drop-in RelativeAttention, transformer blocks, patch merging, Fade.

Layers receive tokens and a grid, and an encoding as an argument; none depends on a particular encoding.
"""

from vitrel.layers.attention import Attention, RelativeAttention
from vitrel.layers.block import ACTIVATIONS, Block, PatchMerging
from vitrel.layers.fade import Fade
from vitrel.layers.patches import PatchEmbed

__all__ = ["ACTIVATIONS", "Attention", "Block", "Fade", "PatchEmbed", "PatchMerging", "RelativeAttention"]
