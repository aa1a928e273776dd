"""Callbacks that stop a run on errors: a non-finite loss or weight, too many unreadable images."""

import csv
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.common.files import shown, write_cells

SHOWN = 8  # names in a message; all are in the file


class FiniteLoss(Callback):
    """Stops the run at the first loss or weight that is not finite, before it is saved in a checkpoint.

    The loss is checked on its device. On a GPU the result is read only at logging steps, at the end of an epoch and before
    every checkpoint, to avoid a synchronization per step; weights are checked before every checkpoint. FloatingPointError is
    raised; for a loss, the images of its batch are listed in `bad_batch.RANK.txt`.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.bad = torch.full((), torch.inf, device=module.device)  # the first batch whose loss was not finite

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        finite = torch.isfinite(outputs["loss"])
        self.bad = torch.minimum(self.bad, torch.where(finite, torch.inf, float(batch_idx)))
        if module.device.type == "cpu" or (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            self.check(trainer)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.check(trainer)
        broken = [name for name, value in module.state_dict().items() if not torch.isfinite(value).all()]
        if broken:
            raise FloatingPointError(f"{', '.join(broken[:SHOWN])} not finite after update {trainer.global_step}. {REMEDY}")

    def check(self, trainer: Trainer) -> None:
        """Raise FloatingPointError on all ranks if any loss so far was not finite on any; must be called on all ranks.

        A rank with such a loss first writes the image names of its first such batch into `bad_batch.RANK.txt`.
        """
        here = bool(torch.isfinite(self.bad))
        if not trainer.strategy.reduce_boolean_decision(here, all=False):
            return
        if not here:  # if one rank stopped alone, the other ranks would wait for it
            raise FloatingPointError("loss is not finite on another device, which names it")
        epoch, batch = trainer.current_epoch, int(self.bad)
        names, path = trainer.datamodule.names(epoch, batch), self.folder / f"bad_batch.{trainer.global_rank}.txt"
        path.write_text("".join(f"{shown(name)}\n" for name in names), "utf-8")
        raise FloatingPointError(
            f"loss is not finite at epoch {epoch}, batch {batch} (update {trainer.global_step}): stopped. The images of the "
            f"batch are {_first(names)}, all listed in {path}. {REMEDY}"
        )


REMEDY = (
    "If a checkpoint was saved, it is of before. Lower model.optim.lr, lengthen model.optim.warmup_epochs or set "
    "trainer.gradient_clip_val"
)


class BadImages(Callback):
    """Counts unreadable images, which are left out, after every epoch; if more than before, lists all in `bad_images.csv`.

    Rank 0 does so and prints a line. Raises ValueError, without the line, if their share of the training or of the evaluation
    images exceeds `data.reading.bad_share`.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path, self.known = Path(folder) / "bad_images.csv", 0
        self.earlier: list[str] = []  # names listed before the run was resumed, some of which it may not read again

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the names that the run listed in `bad_images.csv` before it was resumed, so that later lists keep them."""
        if self.path.is_file():
            with self.path.open(encoding="utf-8", newline="") as file:
                self.earlier = [row[0] for row in csv.reader(file) if row][1:]

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        images, counts, found, many = trainer.datamodule, [], [], False
        for kind, data in (("training", images.train_set), ("evaluation", images.val_set)):
            bad = getattr(data, "bad", torch.zeros(len(data))).to(module.device, copy=True)  # drawn images have none
            names = [data.name(i) for i in trainer.strategy.reduce(bad, reduce_op="max").nonzero().flatten().tolist()]
            many = many or len(names) > images.reading.bad_share * len(data)
            counts += [f"{len(names)} of {len(data)} {kind} images"] if names else []
            found += names
        said = f"{' and '.join(counts)} cannot be read ({_first(found)}; all listed in {self.path})"
        if len(found) > self.known and trainer.is_global_zero:
            write_cells(self.path, [("image",), *((name,) for name in dict.fromkeys([*self.earlier, *map(shown, found)]))])
            if not many:
                print(f"{said} and are left out", flush=True)
        if many:
            raise ValueError(
                f"{said}, a larger share than data.reading.bad_share ({images.reading.bad_share:g}): repair or remove them, "
                "or raise the share"
            )
        self.known = len(found)


def _first(names: list[str]) -> str:
    """Return the first SHOWN (8) names, joined by commas, and "and N more" if there are others."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
