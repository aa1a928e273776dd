"""Inputs other than whole images: tiles of a large image, strips of tiles with memory.

All functions use the model's forward pass or its blocks as they are.
"""

from vitrel.inputs.crop import Crop, crop_terms
from vitrel.inputs.memory import Memory, forward_memory
from vitrel.inputs.tiles import tile_margins, tiled_features

__all__ = [
    "Crop",
    "Memory",
    "crop_terms",
    "forward_memory",
    "tile_margins",
    "tiled_features",
]
