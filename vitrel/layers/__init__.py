"""Layers: attention with position terms, the drop-in RelativeAttention, the blocks of both trunks, and Fade.

A layer takes tokens and a grid; which encoding it holds is an argument, and no layer knows any of them by name.
"""

from vitrel.layers.attention import Attention, RelativeAttention
from vitrel.layers.block import ACTIVATIONS, Block, PatchMerging
from vitrel.layers.fade import Fade

__all__ = ["ACTIVATIONS", "Attention", "Block", "Fade", "PatchMerging", "RelativeAttention"]
