"""Callbacks that stop a run on errors: a non-finite loss or weight, unreadable images."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.common.files import atomic_write, write_cells
from vitrel.data import BadImage, ImageSet

SHOWN = 8  # names in a message; all are in the file


class FiniteLoss(Callback):
    """Stops the run at the first loss or weight that is not finite, before it is saved in a checkpoint.

    The loss is checked on its device. On a GPU the result is read only at logging steps, at the end of an epoch and before
    every checkpoint, to avoid a synchronization per step. The images of the batch are listed in `bad_batch.txt`
    (`bad_batch.RANK.txt` with several devices).

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.bad = torch.full((), torch.inf, device=module.device)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        finite = torch.isfinite(outputs["loss"])
        self.bad = torch.minimum(self.bad, torch.where(finite, torch.inf, float(batch_idx)))
        if module.device.type == "cpu" or (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            self.check(trainer)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.check(trainer)
        broken = [name for name, value in module.state_dict().items() if not torch.isfinite(value).all()]
        if broken:
            raise FloatingPointError(
                f"{broken[0]} and {len(broken) - 1} other tensors are not finite after update {trainer.global_step}, though "
                f"the loss was finite: stopped before saving them. {self._remedy()}"
            )

    def check(self, trainer: Trainer) -> None:
        """Raise FloatingPointError on all ranks if any loss so far was not finite; must be called on all ranks.

        The message names epoch and batch of the first such loss, the current update, and on its own rank the batch's images.
        """
        first = self.bad.clone()
        if trainer.world_size > 1:  # if one rank stopped alone, the other ranks would wait for it
            torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN)
        if torch.isfinite(first):
            batch, epoch = int(first), trainer.current_epoch
            if self.bad > first:
                raise FloatingPointError(
                    f"loss is not finite at epoch {epoch}, batch {batch} (update {trainer.global_step}) on another device: "
                    f"stopped. The images of the batch are in {self.folder}/bad_batch.RANK.txt. {self._remedy()}"
                )
            names = trainer.datamodule.names(epoch, batch)
            path = self.folder / f"bad_batch{f'.{trainer.global_rank}' if trainer.world_size > 1 else ''}.txt"
            with atomic_write(path) as part:
                part.write_text("".join(f"{name}\n" for name in names))
            raise FloatingPointError(
                f"loss is not finite at epoch {epoch}, batch {batch} (update {trainer.global_step}): stopped. The images of "
                f"the batch are {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' * (len(names) > SHOWN)}, all "
                f"listed in {path}. {self._remedy()}"
            )

    def _remedy(self) -> str:
        last = self.folder / "checkpoints" / "last.ckpt"
        checkpoint = f"The last good checkpoint is {last}" if last.exists() else "There is no checkpoint yet"
        return f"{checkpoint}. Lower model.optim.lr, lengthen model.optim.warmup_epochs or set trainer.gradient_clip_val"


class BadImages(Callback):
    """Lists unreadable images in `bad_images.csv`; stops the run when their share of training exceeds `data.reading.bad_share`.

    Before a run stops because of unreadable images, all other images are read, so that all that are unreadable are listed:
    training images where they are replaced, evaluation images always (except where one of several ranks stops alone).

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "bad_images.csv"
        self.known: list[int] = []
        self.stopped = ""

    def state_dict(self) -> dict[str, list[int]]:
        """Return the indices of the images found unreadable so far."""
        return {"known": self.known}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Restore the indices of the unreadable images from a checkpoint."""
        self.known = state["known"]

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.datamodule.train_set.bad[self.known] = 1

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            self._update(trainer)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, BadImage) or trainer.world_size > 1:
            return
        images = trainer.datamodule
        if trainer.validating:
            self.stopped = f"{self._listed(trainer, images.val_set, 'evaluation')}; repair or remove them"
        elif trainer.training and images.train_set.bad.any():  # they are replaced, but too many in a row
            self.stopped = (
                f"{self._listed(trainer, images.train_set, 'training')}, so many in a row that none could take the place "
                "of another; repair or remove them"
            )

    def explain(self, error: BaseException) -> None:
        """Raise ValueError naming all unreadable images if `error` names one of them and ended the run; otherwise return."""
        if self.stopped and isinstance(error, BadImage):
            raise ValueError(self.stopped) from error

    def _update(self, trainer: Trainer) -> None:
        data, share = trainer.datamodule.train_set, trainer.datamodule.reading.bad_share
        indices = self._found(trainer, data)
        if len(indices) > share * len(data):
            raise ValueError(
                f"{self._listed(trainer, data, 'training')}, a larger share than data.reading.bad_share ({share:g}); repair or "
                "remove them, or raise the share"
            )
        if indices != self.known and trainer.is_global_zero:
            self._write(data, indices)
            print(f"{len(indices)} of {len(data)} training images cannot be read and were replaced by others: {self.path}")
        self.known = indices

    def _found(self, trainer: Trainer, data: ImageSet) -> list[int]:
        """The indices of the images that any rank has found unreadable; every rank has to call it."""
        bad = data.bad
        if trainer.world_size > 1:
            bad = bad.to(trainer.strategy.root_device, copy=True)  # a copy: the loader processes write to the original
            torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
        return bad.nonzero().flatten().tolist()

    def _listed(self, trainer: Trainer, data: ImageSet, kind: str) -> str:
        """Read all images, list the unreadable ones, and return their number and first names; every rank has to call it."""
        if trainer.is_global_zero:
            print(f"reading all {len(data):,} {kind} images, to list those that cannot be read", flush=True)
        data.check(range(trainer.global_rank, len(data), trainer.world_size))
        indices = self._found(trainer, data)
        if trainer.is_global_zero:
            self._write(data, indices)
        first = ", ".join(data.name(index) for index in indices[:SHOWN])
        more = f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else ""
        return f"{len(indices)} of {len(data)} {kind} images cannot be read ({first}{more}; all listed in {self.path})"

    def _write(self, data: ImageSet, indices: list[int]) -> None:
        write_cells(self.path, [("image",), *((data.name(index),) for index in indices)])
