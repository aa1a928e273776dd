"""The public names of vitrel, in a module of their own: `import vitrel` imports it, the command only where a name is used."""

from vitrel import evaluate
from vitrel.conformance import assert_position_conforms, check
from vitrel.convert import from_timm, load, relativize, save
from vitrel.cpu.optimize import optimize
from vitrel.grid import Grid
from vitrel.inputs import tiled_features
from vitrel.inspect.diagnose import diagnose
from vitrel.inspect.explain import explain
from vitrel.inspect.resolution_report import resolution_report
from vitrel.layers import RelativeAttention
from vitrel.models.create import create_model
from vitrel.models.pyramid import pyramid
from vitrel.models.registry import register_position
from vitrel.ops.reference import position_bias
from vitrel.position import POSITIONS, PositionEncoding, Table, Terms, combine, create_position, pad_prefix
from vitrel.weights.load import load_pretrained
