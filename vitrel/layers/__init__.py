"""Layers: attention with position terms, the drop-in RelativeAttention, and the blocks of both trunks.

A layer takes tokens and a grid; which encoding it holds is an argument, and no layer knows any of them by name.
"""

from vitrel.layers.attention import Attention, RelativeAttention
from vitrel.layers.block import Block, PatchMerging

__all__ = ["Attention", "Block", "PatchMerging", "RelativeAttention"]
