"""From a trained model with an absolute embedding to one with relative position: `relativize` and what goes with it."""

from vitrel.convert.fade import absolute_scale, drop_absolute
from vitrel.convert.relativize import relativize

__all__ = ["absolute_scale", "drop_absolute", "relativize"]
