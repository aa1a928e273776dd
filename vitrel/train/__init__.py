"""Training: a Lightning module over any timm model, its data, its optimiser and the command line.

Nothing else in the package imports Lightning. Other code reads a run through its checkpoint alone
(`torch.load(path, weights_only=True)`; layout in `vitrel.train.module`).
"""

from vitrel.train.cli import run
from vitrel.train.datamodule import ImageData
from vitrel.train.module import Classifier
from vitrel.train.optim import Mixing, Optimisation

__all__ = ["Classifier", "ImageData", "Mixing", "Optimisation", "run"]
