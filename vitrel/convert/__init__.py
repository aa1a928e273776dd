"""Conversion of a trained model with an absolute embedding to one with relative position.

`relativize` rebuilds a timm model around our attention; `absolute_to_relative` fits a relative encoding to what the embedding
adds to the attention logits.
"""

from vitrel.convert.absolute_to_relative import ConversionReport, absolute_to_relative
from vitrel.convert.fade import absolute_scale, drop_absolute
from vitrel.convert.relativize import relativize

__all__ = ["ConversionReport", "absolute_scale", "absolute_to_relative", "drop_absolute", "relativize"]
