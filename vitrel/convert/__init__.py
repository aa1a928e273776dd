"""Conversion of models to vitrel, of absolute to relative position, and saving and loading of models.

`from_timm` converts timm's models, `relativize` adds an encoding in attention, `absolute_to_relative` fits an encoding to the
part of the attention logits that comes from the absolute embedding, `save` and `load` write and read every vitrel model.
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
