"""vitrel: two-dimensional position in vision transformers, every encoding behind one interface, at any resolution.

Importing it registers the models with timm: `import timm, vitrel; timm.create_model("vitrel_swin_t")`.
"""

from vitrel.convert import relativize
from vitrel.grid import Grid
from vitrel.layers import RelativeAttention
from vitrel.models import load_pretrained, save_pretrained
from vitrel.position import POSITIONS, PositionEncoding, Table, Terms, combine, create_position

__version__ = "0.1.0"
__all__ = [
    "POSITIONS",
    "Grid",
    "PositionEncoding",
    "RelativeAttention",
    "Table",
    "Terms",
    "combine",
    "create_position",
    "load_pretrained",
    "relativize",
    "save_pretrained",
]
