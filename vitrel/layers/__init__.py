"""Layers: attention with position terms, the drop-in RelativeAttention, and the blocks of both trunks."""

from vitrel.layers.attention import Attention, RelativeAttention
from vitrel.layers.block import Block, PatchMerging

__all__ = ["Attention", "Block", "PatchMerging", "RelativeAttention"]
