"""The check that a resumed run has the same settings and data as the run that saved the checkpoint.

Every checkpoint stores the settings that decide the batches, the loss and the updates, and a hash of the names, labels and
sizes of the training images. Other settings may change on resuming: the length of the run, precision, loader processes,
memory, logs, the folders of data and weights, and devices where the images per batch of all devices and the number of
accumulated batches stay the same. Other times of modification, as of copied images, are warned of.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from vitrel.common.warn import warn_once
from vitrel.data import SHAPES
from vitrel.models.config import stored_arguments

_FILES = "training files"


def run_settings(trainer: Trainer) -> dict[str, Any]:
    """Return {name: value as in JSON, tuples as lists} of all settings that decide the batches, the loss and the updates."""
    data, module = trainer.datamodule, trainer.lightning_module
    model = module.settings()
    settings = {
        "seed": data.seed,
        "training images": len(data.train_set),
        _FILES: data.fingerprints[0],
        "drawn data": data.data if data.data in SHAPES else None,
        "data.size": data.size,
        "data.augment": None if data.augment is None else asdict(data.augment),
        "data.reading.val_fraction": data.reading.val_fraction,
        "preprocessing": module.preprocessing,
        "images per batch of all devices": data.batch_size * trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "updates per epoch": module.updates_per_epoch(),
        "train_sizes": data.train_sizes or [],
        "data.protocol": data.protocol,
        "data.tokens": data.tokens,
        "repeats": data.repeats,
        "model_args": stored_arguments(model["model_args"]),
        "tuning.trainable": model["tuning"]["trainable"],
    }
    settings |= {name: model[name] for name in ("mixing", "label_smoothing", "objective", "ema")}
    if module.teacher is not None:  # compared by its weights, since its file may have been moved
        no_source = dict.fromkeys(("checkpoint", "pretrained"), "")
        settings["objective"]["distillation"] |= no_source | {"weights": module.teacher.digest}
    # a resumed run takes the optimizer's state and rates from the checkpoint, so other settings would be ignored silently
    settings |= {f"optim.{name}": value for name, value in model["optim"].items()}
    return json.loads(json.dumps(settings, default=str))


def check_same_run(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Raise ValueError naming the settings or files that differ from those of the run that saved the checkpoint.

    Only warns if the training files have other times of modification. Does nothing for checkpoints that vitrel train did not
    write, or outside training.
    """
    if "run" not in checkpoint or not hasattr(trainer.datamodule, "fingerprints") or trainer.state.fn != TrainerFn.FITTING:
        return
    saved, current, path = checkpoint["run"]["order"], run_settings(trainer), trainer.ckpt_path
    differences = [
        f"{name}: other names, labels or sizes in bytes" if name == _FILES else f"{name}: {old!s:.100}, now {new!s:.100}"
        for name, old, new in values_that_differ(saved, current)
    ]
    if differences:
        raise ValueError(
            f"cannot resume {path}, because its settings or data differ from this run's: {'; '.join(differences)}; set them "
            f"back, or start a new run from its weights in another folder: --model.tuning.init_from={path}"
        )
    if checkpoint["run"]["times"] != trainer.datamodule.fingerprints[1]:
        warn_once(
            f"training images have other times of modification than when {path} was saved, as copied files have, but the same "
            "names and sizes: if they were changed, the run goes on with other images"
        )


def values_that_differ(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old, new) of every value that differs in nested dictionaries; nested keys are joined by dots, after `name`.

    A missing key counts as None; lists are compared as a whole.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from values_that_differ(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
    elif old != new:
        yield name, old, new
