"""Callbacks that stop a run on errors: a non-finite loss or weight, too many unreadable images, a removed run folder."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.files import atomic_write, write_cells

SHOWN = 8  # names in a message; all are in the file


class RunFolder(Callback):
    """Creates the run's folder once, and ends the run with a clear error if the folder is removed while training.

    The folder is not created again, because it would then hold part of a run and look complete.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.hook: Callable[[threading.ExceptHookArgs], object] | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:  # the only rank that writes
            self.folder.mkdir(parents=True, exist_ok=True)
            self.hook, threading.excepthook = threading.excepthook, self._in_a_thread

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if self.hook is not None:
            threading.excepthook, self.hook = self.hook, None

    def explain(self, error: BaseException) -> None:
        """On rank 0, raise FileNotFoundError if `error` is an OSError and the folder was removed; otherwise return.

        Also restores the exception hook of threads.
        """
        created = self.hook is not None
        self.teardown(None, None, "fit")
        if created and isinstance(error, OSError) and not self.folder.is_dir():
            raise FileNotFoundError(
                f"{self.folder}, the folder of this run, was removed or renamed during the run, which has stopped. Move it "
                "back and resume with --ckpt_path auto; if it is lost, the same command starts from the beginning"
            ) from None

    def _in_a_thread(self, failed: threading.ExceptHookArgs) -> None:
        # TensorBoard's writer thread would print a traceback; the next write of the main thread ends the run with `explain`
        if self.folder.is_dir() or not issubclass(failed.exc_type, OSError):
            (self.hook or threading.__excepthook__)(failed)


class FiniteLoss(Callback):
    """Stops the run at the first loss or weight that is not finite, before it is saved in a checkpoint.

    The loss is checked on its device. On a GPU the result is read only at logging steps, at the end of an epoch and before
    every checkpoint, to avoid a synchronisation per step. The images of the batch are listed in `bad_batch.txt`
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
    """Lists unreadable training images in `bad_images.csv`; stops the run when their share exceeds `data.reading.bad_share`.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "bad_images.csv"
        self.known: list[int] = []

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

    def _update(self, trainer: Trainer) -> None:
        data = trainer.datamodule.train_set
        bad = data.bad
        if trainer.world_size > 1:
            bad = bad.to(trainer.strategy.root_device, copy=True)  # a copy: the loader processes write to the original
            torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
        indices = bad.nonzero().flatten().tolist()
        if indices != self.known and trainer.is_global_zero:
            write_cells(self.path, [("image",), *((data.name(index),) for index in indices)])
            print(f"{len(indices)} of {len(data)} training images cannot be read and were replaced by others: {self.path}")
        self.known = indices
        share = trainer.datamodule.reading.bad_share
        if len(indices) > share * len(data):
            raise ValueError(
                f"{len(indices)} of {len(data)} training images cannot be read, a larger share than data.reading.bad_share "
                f"({share:g}): stopped. They are listed in {self.path}; repair or remove them, or raise the share"
            )
