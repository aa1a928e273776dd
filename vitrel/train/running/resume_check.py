"""The check that a resumed run has the same settings and data as the run that saved the checkpoint.

Every checkpoint stores the settings that decide the batches, the loss and the updates, and of every training image its name,
label, size in bytes and time of modification. Other settings may change on resuming: the length of the run, devices, precision,
loader processes, memory, logs, and the folders of data and weights.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Self

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from vitrel.data import SHAPES
from vitrel.models.config import stored_arguments

_FILES = "training files"
_SHOWN = 3  # names of files in a message


class Listing(NamedTuple):
    """The lines of `ImageSet.contents`, each with a tab and its `ImageSet.versions`, in order.

    Args:
        digest: their SHA-256.
        lines: compressed by zlib, uint8 [bytes].
    """

    digest: str
    lines: Tensor

    @classmethod
    def of(cls, contents: Sequence[str], versions: Sequence[str]) -> Self:
        """Return the listing of a data set; its size is about 15 bytes an image."""
        lines = "\0".join(map("\t".join, zip(contents, versions, strict=True)))  # file names may contain tabs and line ends
        text = lines.encode("utf-8", "surrogateescape")  # a file name need not be valid UTF-8
        return cls(hashlib.sha256(text).hexdigest(), torch.frombuffer(bytearray(zlib.compress(text)), dtype=torch.uint8))


def run_settings(trainer: Trainer) -> dict[str, Any]:
    """Return {name: plain value} of all settings that decide the batches, the loss and the updates."""
    data, module = trainer.datamodule, trainer.lightning_module
    model = module.settings()
    settings = {
        "seed": data.seed,
        "training images": len(data.train_set),
        "images per class": module.class_counts,
        _FILES: data.listing.digest,
        "drawn data": data.data if data.data in SHAPES else None,
        "data.size": data.size,
        "data.augment": None if data.augment is None else asdict(data.augment),
        "data.region": data.region,
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

    Does nothing for checkpoints that vitrel train did not write, or outside training.
    """
    if "run" not in checkpoint or not hasattr(trainer.datamodule, "listing") or trainer.state.fn != TrainerFn.FITTING:
        return
    saved, current, path = checkpoint["run"]["order"], run_settings(trainer), trainer.ckpt_path
    differences = [
        f"{name}: {old!s:.100}, now {new!s:.100}" for name, old, new in values_that_differ(saved, current) if name != _FILES
    ]
    listings = checkpoint["run"]["files"], trainer.datamodule.listing.lines
    if saved.get(_FILES) != current[_FILES] and (files := _files_that_differ(*listings, trainer.datamodule.check_times)):
        differences.append(f"{_FILES}: {files}")
    if differences:
        raise ValueError(
            f"cannot resume {path}, because its settings or data differ from this run's: {'; '.join(differences)}; set them "
            f"back, or start a new run from its weights in another folder: --model.tuning.init_from={path}"
        )


def values_that_differ(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old, new) of every value that differs in nested dictionaries; nested names are joined by dots.

    A missing key counts as None; lists are compared as a whole.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from values_that_differ(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
    elif old != new:
        yield name, old, new


def _files_that_differ(old: Tensor, new: Tensor, check_times: bool) -> str:
    """Number and first names of the files that are gone, new and changed between two `Listing.lines`; "" if there are none."""
    before, now = (
        {name: (label, size, time if check_times else "") for name, label, size, time in map(_parts, _lines(listing))}
        for listing in (old, new)
    )
    files = {
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
        "changed": [name for name in now if before.get(name, now[name]) != now[name]],
    }
    texts = [
        f"{len(names):,} {change} ({', '.join(f'{name!a:.200}' for name in names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)})"
        for change, names in files.items()
        if names
    ]
    if not texts:
        return "" if [*before] == [*now] else "the same files in another order"
    if before.keys() == now.keys() and all(before[name][:2] == now[name][:2] for name in files["changed"]):
        texts.append("by their times of modification (if they are copies without them: --data.check_times=false)")
    return ", ".join(texts)


def _lines(listing: Tensor) -> list[str]:
    return zlib.decompress(listing.numpy().tobytes()).decode("utf-8", "surrogateescape").split("\0")


def _parts(line: str) -> tuple[str, str, str, str]:
    """(name; label; size, or checksum of an array's image; time) of a line of a `Listing`."""
    name, label, version = line.rsplit("\t", 2) if line else ("", "", "")
    size, _, time = version.partition(" ")
    return name, label, size, time
