"""Images that are too large for one forward pass: overlapping tiles, and strips of tiles with a memory of the tiles above."""

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
