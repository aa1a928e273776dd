"""What a run depends on: saved with every checkpoint, and compared by a run that goes on from it.

What only decides where, how fast and how long a run goes on is left free: the end of the schedule, devices, precision, loader
processes, memory, logs, the folders that data and weights lie in.
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
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from vitrel.data import SHAPES
from vitrel.models.create import WEIGHT_ARGUMENTS

_READERS = {"devices", "loader processes"}  # an epoch of shards is divided between them
_FILES = "training files"
_SHOWN = 3  # names of files in a message


class Listing(NamedTuple):
    """What training images there are, in order: SHA-256 of the lines, and the lines compressed, uint8 [bytes]."""

    digest: str
    lines: Tensor

    @classmethod
    def of(cls, lines: Sequence[str]) -> Self:
        """The lines of `ImageSet.contents`: 4 MB for the 1.3 million images of ImageNet, where the names alone are 44."""
        text = "\n".join(lines).encode("utf-8", "surrogateescape")  # a file's name may be no text
        return cls(hashlib.sha256(text).hexdigest(), torch.frombuffer(bytearray(zlib.compress(text)), dtype=torch.uint8))


def run_settings(trainer: Trainer) -> dict[str, Any]:
    """Everything that decides the batches, the loss and the updates, by name, as plain values."""
    data, module = trainer.datamodule, trainer.lightning_module
    model = module.settings()
    found = {
        "seed": data.seed,
        "training images": len(data.train_set),
        "images per class": module.class_counts,
        _FILES: data.listing.digest,
        "drawn data": data.data if data.data in SHAPES else None,
        "data.size": data.size,
        "data.augment": None if data.augment is None else asdict(data.augment),
        "data.region": data.region,
        "data.reading.cached_side": data.reading.cached_side,
        "preprocessing": module.preprocessing,
        "images per batch of all devices": data.batch_size * trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "updates per epoch": module.updates_per_epoch(),
        "train_sizes": data.train_sizes or [],
        "data.shape": data.shape,
        "data.tokens": data.tokens,
        "repeats": data.repeats,
        "model_args": {name: value for name, value in model["model_args"].items() if name not in WEIGHT_ARGUMENTS},
        "tuning.trainable": model["tuning"]["trainable"],
    }
    found |= {name: model[name] for name in ("mixing", "label_smoothing", "objective", "ema")}
    if module.teacher is not None:  # known by its weights, wherever their file lies
        where = dict.fromkeys(("checkpoint", "pretrained"), "")
        found["objective"]["distillation"] |= where | {"weights": module.teacher.digest}
    # the optimiser's state and its first rates come from the checkpoint: another setting would be ignored without a word
    found |= {f"optim.{name}": value for name, value in model["optim"].items()}
    if data.streamed:
        found |= {"devices": trainer.world_size, "loader processes": data.workers}
    return json.loads(json.dumps(found, default=str))


def check_same_run(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """ValueError naming what differs where this run is not the one that saved the checkpoint, by vitrel train."""
    if "run" not in checkpoint or not hasattr(trainer.datamodule, "listing") or trainer.state.fn != TrainerFn.FITTING:
        return
    saved, mine, path = checkpoint["run"]["order"], run_settings(trainer), trainer.ckpt_path
    free = set() if _inside_an_epoch(checkpoint) else _READERS
    if unknown := [name for name in mine if name not in saved and name not in _READERS]:
        _say(f"{path} is of an earlier version, which did not save {', '.join(unknown)}: they are taken to be the same")
    known = {name: value for name, value in mine.items() if name in saved and name not in free}
    differ = [
        _files_that_differ(checkpoint["run"]["files"], trainer.datamodule.listing.lines)
        if name == _FILES
        else f"{name}: {_short(old)}, now {_short(new)}"
        for name, old, new in values_that_differ({name: saved[name] for name in known}, known)
    ]
    if differ:
        raise ValueError(
            f"cannot resume, the run would see other batches or go by other settings than that of {path}: {'; '.join(differ)}. "
            f"Set them back, or begin a new run from its weights, in another folder, with --model.tuning.init_from={path}"
        )


def values_that_differ(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, old, new) of every value that differs in nested dictionaries, the names joined by dots."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from values_that_differ(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
    elif old != new:
        yield name, old, new


def _files_that_differ(old: Tensor, new: Tensor) -> str:
    listings = (zlib.decompress(blob.numpy().tobytes()).decode("utf-8", "surrogateescape").split("\n") for blob in (old, new))
    was, now = (dict(line.rpartition("\t")[::2] for line in lines) for lines in listings)
    parts = [
        f"{len(names)} {what} ({', '.join(map(ascii, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''})"
        for what, names in (
            ("gone", [name for name in was if name not in now]),
            ("new", [name for name in now if name not in was]),
            ("changed", [name for name in now if was.get(name, now[name]) != now[name]]),
        )
        if names
    ]
    return f"{_FILES}: {', '.join(parts) or 'the same in another order'}"


def _short(value: Any) -> str:
    return f"{value}"[:100]


def _inside_an_epoch(checkpoint: dict[str, Any]) -> bool:
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return epochs["ready"] > epochs["processed"]


@rank_zero_only
def _say(text: str) -> None:
    print(text)
