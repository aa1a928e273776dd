"""From anyone's model to a vitrel model, from an absolute embedding to relative position, and to a file and back.

`from_timm` takes timm's models, `relativize` adds an encoding in attention, `absolute_to_relative` fits one to what the
embedding adds to the attention logits, `save` and `load` keep every model that comes out.
"""

from vitrel.convert.absolute_to_relative import ConversionReport, absolute_to_relative
from vitrel.convert.from_timm import from_timm
from vitrel.convert.relativize import absolute_scale, drop_absolute, relativize
from vitrel.convert.saving import load, save

__all__ = [
    "ConversionReport",
    "absolute_scale",
    "absolute_to_relative",
    "drop_absolute",
    "from_timm",
    "load",
    "relativize",
    "save",
]
