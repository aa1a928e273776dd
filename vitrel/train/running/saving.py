"""Saving checkpoints: atomic writes, `best.ckpt`, and a `last.ckpt` from which a run resumes exactly, also after signals."""

import math
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from vitrel.common.files import atomic_write
from vitrel.common.resources import lacking
from vitrel.train.metrics import CSVLog
from vitrel.train.running.resume_check import run_settings
from vitrel.weights.read import read_file

STOP_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "ctrl-c"}  # the exit status is 128 + the signal's number


def read_to_resume(path: str | Path) -> dict[str, Any]:
    """Return the contents of a checkpoint to resume from; ValueError if the file is damaged or holds no run."""
    stored = read_file(path)
    if not isinstance(stored, dict) or not {"loops", "optimizer_states", "state_dict"} <= stored.keys():
        raise ValueError(f"{path} holds no run; to start a new one from its weights: --model.tuning.init_from={path}")
    return stored


class AtomicIO(TorchCheckpointIO):
    """Writes checkpoints atomically (temporary file, then rename): `path` holds the old or the new checkpoint, never a part.

    Lightning's own writes to the system's folder of temporary files, from which it copies where that is another disk.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint and its folder; OSError if that fails (disk full), the old file unchanged, nothing beside it."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as part, part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as a RuntimeError
            if lacking(error):  # not of space
                raise
            raise OSError(
                f"cannot write the checkpoint {path}: {error}; a former one is unchanged. Free some space and resume"
            ) from error

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        """Return the contents, tensors on the CPU and plain values only; ValueError if the file is damaged or holds code.

        `map_location` and `weights_only` are ignored.
        """
        return read_file(path)


class Best(ModelCheckpoint):
    """Lightning's ModelCheckpoint of the highest metric of the evaluation set, which a run in a moved folder can resume.

    Args:
        folder: folder of `best.ckpt`.
        metric: "top1", "miou" or "map", logged as val/METRIC.
    """

    def __init__(self, folder: str | Path, metric: str) -> None:
        # after evaluations, because not every epoch has one
        options = {"save_on_train_epoch_end": False, "enable_version_counter": False}
        super().__init__(folder, "best", monitor=f"val/{metric}", mode="max", **options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state with the paths of this run's folder.

        In a moved folder Lightning would forget the best score, and a worse checkpoint would replace the file.
        """
        path = str(Path(self.dirpath) / f"{self.filename}{self.FILE_EXTENSION}")
        paths = {"dirpath": self.dirpath, "best_model_path": path, "kth_best_model_path": path}
        models = {path: state["best_model_score"]} if state["best_k_models"] else {}
        super().load_state_dict({**state, **paths, "best_k_models": models})


class Saving(Checkpoint):
    """Saves `last.ckpt` every `every` updates, before each evaluation, at the end of each epoch, on SIGTERM and on ctrl-c.

    A run resumed from it gives the same result as an uninterrupted run. It is not saved between the batches of a gradient
    accumulation, because gradients are not stored. On SIGTERM or ctrl-c the run saves after its current update and exits with
    status 143 or 130; during an evaluation it exits at once, unless the evaluation lies within an accumulation. All ranks stop
    together, whichever received the signal. A second ctrl-c ends the run without saving.

    Args:
        folder: folder of `last.ckpt`.
        csv: the log, written before every checkpoint; a resumed run drops the rows after the checkpoint.
        every: updates between two saves inside an epoch; 0 for none.
        go_on: how to resume a stopped run, the end of a sentence.
    """

    def __init__(self, folder: str | Path, csv: CSVLog, every: int = 0, go_on: str = "resume with --ckpt_path auto") -> None:
        self.path, self.csv, self.every, self.go_on = Path(folder) / "last.ckpt", csv, every, go_on
        self.update: int | None = None  # number of updates in `last.ckpt`
        self.before_evaluation = False  # while `last.ckpt` is written before an evaluation
        self.received, self.since = 0, 0.0  # the signal that was received (0: none), and when
        self.old_handlers: dict[int, Any] = {}

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = {"order": run_settings(trainer), "times": trainer.datamodule.fingerprints[1]}
        if self.before_evaluation:  # as if the run was interrupted in the first batch, which a resumed run repeats
            batches = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            for counts in (batches["total"], batches["current"]):  # a resumed run may have these values already
                counts["ready"] = counts["started"] = counts["completed"] + 1
                counts["processed"] = counts["completed"]

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Drop the log's rows after the checkpoint, and keep Lightning from skipping an epoch when max_steps is set."""
        self.csv.resume(checkpoint["global_step"])
        # With max_steps, Lightning counts an epoch that has ended once more and skips the next one; no public name prevents it
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]  # noqa: SLF001

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        # replaces Lightning's handler, which exits with status 0, saves nothing and communicates with other ranks inside itself
        self.received = int(trainer.received_sigterm and signal.SIGTERM)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # a background process ignores ctrl-c, and still shall
                self.old_handlers[number] = signal.signal(number, lambda number, frame: self._handle(trainer, number, frame))

    def _handle(self, trainer: Trainer, number: int, frame: FrameType | None) -> None:
        """Note signal `number` for the end of the update, and pass SIGTERM on to the ranks that this process started.

        Rank 0 prints a line at the first ctrl-c; a second ctrl-c, more than a second later, raises KeyboardInterrupt.
        """
        if number == signal.SIGINT and self.received == number and time.monotonic() - self.since > 1:
            # A second ctrl-c. Within one second it would be the first again, since the terminal and the launcher both send it.
            signal.default_int_handler(number, frame)
        if number == signal.SIGTERM and self.received != number and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)  # the ranks that this process started
        if not self.received:
            self.since = time.monotonic()
            if number == signal.SIGINT and trainer.is_global_zero:  # os.write, since Python's buffer may be in use
                os.write(2, b"\nctrl-c: saving after this update; ctrl-c again ends the run at once\n")
        self.received = max(self.received, number)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        # before an evaluation and at the end of an epoch, the hooks below save
        if _accumulating(trainer) or trainer.is_last_batch or _evaluation_follows(trainer, batch_idx):
            return
        stop = self._stop(trainer)
        if stop or (self.every and trainer.global_step % self.every == 0):
            if trainer.global_step % trainer.log_every_n_steps == 0:  # Lightning logs the step after this hook
                self._log(trainer, of_step=True)
            self._save(trainer)
        self._exit_if(stop)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking and not _accumulating(trainer):
            self.before_evaluation = True
            self._save(trainer)
            self.before_evaluation = False
            self._exit_if(self._stop(trainer))

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._exit_if(not trainer.sanity_checking and not _accumulating(trainer) and self._stop(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._log(trainer, of_step=False)  # Lightning logs the epoch's metrics after this hook
        self._save(trainer)
        self._exit_if(self._stop(trainer))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._restore()
        if isinstance(exception, ConnectionResetError):
            exception.add_note("a DataLoader worker was killed")
        if lacking(exception):
            exception.add_note(f"the run has ended: {self._left()}")
        elif isinstance(exception, KeyboardInterrupt):  # a second ctrl-c, or one before training
            rank_zero_only(print)(f"{STOP_SIGNALS[signal.SIGINT]}: {self._left()}", flush=True)

    def _restore(self) -> None:
        """Restore the signal handlers that were set before training."""
        # before Lightning restores the handlers that it found; afterwards, Lightning's own handler would stay installed
        while self.old_handlers:
            signal.signal(*self.old_handlers.popitem())

    def _stop(self, trainer: Trainer) -> int:
        """Return the highest number of a signal that any rank has received, 0 for none; every rank has to call it."""
        if trainer.world_size == 1:
            return self.received
        received = torch.tensor(self.received, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX)
        return int(received)

    def _log(self, trainer: Trainer, of_step: bool) -> None:
        """Add the last training metrics ("_step" if `of_step`, else the rest) to the CSV; Lightning does it after the save."""
        values = {name: float(value) for name, value in trainer.logged_metrics.items() if not name.startswith("val/")}
        values = {name: value for name, value in values.items() if name.endswith("_step") == of_step}
        self.csv.log_metrics(values | {"epoch": trainer.current_epoch}, trainer.global_step - 1)

    def _save(self, trainer: Trainer) -> None:
        self.csv.save()
        trainer.save_checkpoint(self.path)
        self.update = trainer.global_step

    def _exit_if(self, stop: int) -> None:
        """Raise SystemExit with status 128 + `stop`, the number of a signal, after printing what is saved; 0: do nothing."""
        if stop:
            rank_zero_only(print)(f"{STOP_SIGNALS[stop]}: {self._left()}", flush=True)
            raise SystemExit(128 + stop)

    def _left(self) -> str:
        """Return what is saved and how to resume, for the last message of a run."""
        if not self.path.exists():
            return "nothing is saved yet; the same command starts again"
        at = "" if self.update is None else f" (update {self.update})"
        return f"saved {self.path}{at}; {self.go_on}"


def _accumulating(trainer: Trainer) -> bool:
    """Return whether gradients are accumulated for a later update; after the last batch of an epoch they never are."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches > 0 and done < trainer.num_training_batches


def _evaluation_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether an evaluation inside the epoch follows this batch; a checkpoint saved between them would skip it."""
    done = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return (done + 1) % (trainer.val_check_batch or math.inf) == 0
