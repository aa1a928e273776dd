"""Weights: a timm model or its weights becomes ours, models are saved and loaded, absolute position becomes relative.

`read` opens files, `names` renames timm's tensors, `positions` resamples tables and embeddings to a model's grid, and `plan`
raises an error for tensors that do not fit. `from_timm` converts timm's models, `relativize` adds an encoding in attention,
`absolute_to_relative` fits one to the part of the attention logits that comes from the absolute embedding, `saving` writes and
reads every vitrel model.
"""

from vitrel.weights.absolute_to_relative import ConversionReport, absolute_to_relative
from vitrel.weights.from_timm import from_timm
from vitrel.weights.plan import load_pretrained
from vitrel.weights.relativize import absolute_scale, drop_absolute, relativize
from vitrel.weights.saving import load, save

__all__ = [
    "ConversionReport",
    "absolute_scale",
    "absolute_to_relative",
    "drop_absolute",
    "from_timm",
    "load",
    "load_pretrained",
    "relativize",
    "save",
]
