"""vitrel: two-dimensional position in vision transformers, with every encoding behind one interface, at any image size.

Importing it registers the models with timm: `import timm, vitrel; timm.create_model("vitrel_swin_t")`.
"""

from vitrel import evaluate
from vitrel.conformance import assert_position_conforms, check
from vitrel.export.hub import push_to_hub
from vitrel.grid import Grid
from vitrel.inputs import tiled_features
from vitrel.inspect.diagnose import diagnose
from vitrel.inspect.explain import explain
from vitrel.layers import RelativeAttention
from vitrel.models.create import create_model
from vitrel.models.pyramid import pyramid
from vitrel.models.registry import register_position
from vitrel.ops.reference import position_bias
from vitrel.position import POSITIONS, PositionEncoding, Table, Terms, combine, create_position, pad_prefix
from vitrel.version import __version__
from vitrel.weights import from_timm, load, load_pretrained, relativize, save

__all__ = [
    "POSITIONS",
    "Grid",
    "PositionEncoding",
    "RelativeAttention",
    "Table",
    "Terms",
    "__version__",
    "assert_position_conforms",
    "check",
    "combine",
    "create_model",
    "create_position",
    "diagnose",
    "evaluate",
    "explain",
    "from_timm",
    "load",
    "load_pretrained",
    "pad_prefix",
    "position_bias",
    "push_to_hub",
    "pyramid",
    "register_position",
    "relativize",
    "save",
    "tiled_features",
]
