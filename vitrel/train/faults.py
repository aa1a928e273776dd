"""What stops a run before it spoils anything: no finite loss, images that cannot be read, a folder that is gone."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.files import atomic_write, write_cells

SHOWN = 8  # names in a message; all are in the file


class RunFolder(Callback):
    """Makes the run's folder, once: what is written later fails where somebody removes it, and the run ends with its name.

    Made anew it would hold a part of a run that looks whole.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.hook: Callable[[threading.ExceptHookArgs], object] | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:  # which alone writes
            self.folder.mkdir(parents=True, exist_ok=True)
            self.hook, threading.excepthook = threading.excepthook, self._in_a_thread

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if self.hook is not None:
            threading.excepthook, self.hook = self.hook, None

    def explain(self, error: BaseException) -> None:
        """FileNotFoundError that names the folder in place of `error`, where it is gone."""
        made = self.hook is not None
        self.teardown(None, None, "fit")
        if made and isinstance(error, OSError) and not self.folder.is_dir():
            raise FileNotFoundError(
                f"{self.folder}, the folder of this run, was removed or renamed while the run wrote to it: stopped. Move it "
                "back and go on with --ckpt_path auto; where it is lost, the same command begins anew"
            ) from None

    def _in_a_thread(self, failed: threading.ExceptHookArgs) -> None:
        # TensorBoard writes in one, which would print a traceback; the next write of the main thread ends the run
        if self.folder.is_dir() or not issubclass(failed.exc_type, OSError):
            (self.hook or threading.__excepthook__)(failed)


class FiniteLoss(Callback):
    """Stops the run at the first loss or weight that is not finite, before a checkpoint can be written.

    The loss is looked at on its device; on a GPU the answer is fetched only now and then (and before every checkpoint), so
    that no step waits for it. The batch's images are listed in `bad_batch.txt`.

    Args:
        folder: of the run.
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
                f"the loss was: stopped before saving them. {self._way_out()}"
            )

    def check(self, trainer: Trainer) -> None:
        """FloatingPointError on all ranks when any loss so far was not finite, naming epoch, batch, update and images."""
        first = self.bad.clone()
        if trainer.world_size > 1:  # a rank that stopped alone would leave the others waiting for it
            torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN)
        if torch.isfinite(first):
            batch, epoch = int(first), trainer.current_epoch
            if self.bad > first:
                raise FloatingPointError(
                    f"loss is not finite at epoch {epoch}, batch {batch} (update {trainer.global_step}) on another device: "
                    f"stopped. Its images are in {self.folder}/bad_batch.RANK.txt. {self._way_out()}"
                )
            names = trainer.datamodule.names(epoch, batch)
            path = self.folder / f"bad_batch{f'.{trainer.global_rank}' if trainer.world_size > 1 else ''}.txt"
            with atomic_write(path) as part:
                part.write_text("".join(f"{name}\n" for name in names))
            raise FloatingPointError(
                f"loss is not finite at epoch {epoch}, batch {batch} (update {trainer.global_step}): stopped. Its images are "
                f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' * (len(names) > SHOWN)}, all in {path}. "
                f"{self._way_out()}"
            )

    def _way_out(self) -> str:
        last = self.folder / "checkpoints" / "last.ckpt"
        kept = f"The last good checkpoint is {last}" if last.exists() else "There is no checkpoint yet"
        return f"{kept}. Lower model.optim.lr, lengthen model.optim.warmup_epochs or set trainer.gradient_clip_val"


class BadImages(Callback):
    """Lists the training images that could not be read in `bad_images.csv`, and stops where they are too many.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "bad_images.csv"
        self.known: list[int] = []

    def state_dict(self) -> dict[str, list[int]]:
        """Indices of the images known to be unreadable."""
        return {"known": self.known}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Those that the resumed run had met."""
        self.known = state["known"]

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.datamodule.train_set.bad[self.known] = 1

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        data = trainer.datamodule.train_set
        bad = data.bad
        if trainer.world_size > 1:
            bad = bad.to(trainer.strategy.root_device, copy=True)  # the loader processes share this rank's
            torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
        indices = bad.nonzero().flatten().tolist()
        if indices != self.known and trainer.is_global_zero:
            write_cells(self.path, [("image",), *((data.name(index),) for index in indices)])
            print(f"{len(indices)} of {len(data)} training images cannot be read, others were taken instead: {self.path}")
        self.known = indices
        share = trainer.datamodule.reading.bad_share
        if len(indices) > share * len(data):
            raise ValueError(
                f"{len(indices)} of {len(data)} training images cannot be read, more than data.reading.bad_share "
                f"({share:g}) of them: stopped. They are listed in {self.path}; repair or remove them, or raise the share"
            )
