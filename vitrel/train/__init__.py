"""Training: a Lightning module over any timm model, its data, its optimizer and the command line.

Nothing else in the package imports Lightning. Other code reads a run through its checkpoint alone
(`torch.load(path, weights_only=True)`; layout in `vitrel.train.module`).
"""

from vitrel.common.extras import optional_import

with optional_import():
    from vitrel.train.datamodule import ImageData
    from vitrel.train.distill import Distillation, Features
    from vitrel.train.ema import Ema
    from vitrel.train.module import Classifier
    from vitrel.train.objective import Mixing, Objective
    from vitrel.train.optim import Optimization
    from vitrel.train.running.command import run
    from vitrel.train.running.execution import Execution
    from vitrel.train.tuning import Tuning

__all__ = [
    "Classifier",
    "Distillation",
    "Ema",
    "Execution",
    "Features",
    "ImageData",
    "Mixing",
    "Objective",
    "Optimization",
    "Tuning",
    "run",
]
