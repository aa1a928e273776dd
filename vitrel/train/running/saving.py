"""Saving checkpoints: atomic writes, `best.ckpt`, and a `last.ckpt` from which a run resumes exactly, also after signals."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from vitrel.common.files import atomic_write
from vitrel.common.resources import lack_of
from vitrel.train.metrics import CSVLog, check_folder, merit
from vitrel.train.running.resume_check import run_settings
from vitrel.weights.read import read_file

STOP_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "ctrl-c"}  # the exit status is 128 + the signal's number


def read_to_resume(path: str | Path) -> dict[str, Any]:
    """Return the contents of a checkpoint to resume from; ValueError if the file is damaged or holds no run."""
    try:
        stored = read_file(path)
        if not isinstance(stored, dict) or not {"loops", "optimizer_states", "state_dict"} <= stored.keys():
            raise ValueError(f"{path} holds no run; to start a new one from its weights: --model.tuning.init_from={path}")
    except ValueError as error:
        others = [other for other in Path(path).parent.glob("*.ckpt") if other.name != Path(path).name]
        others = sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)
        remedy = f"Resume from another checkpoint: --ckpt_path={others[0]}" if others else "The run has no other checkpoint"
        raise ValueError(f"cannot resume, and nothing was changed: {error}. {remedy}") from error
    return stored


class AtomicIO(TorchCheckpointIO):
    """Writes checkpoints atomically (temporary file, then rename): `path` holds the old or the new checkpoint, never a part.

    Args:
        folder: the run's folder, which is not created: what was removed during a run would look complete.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint; OSError if that fails (e.g. disk full), with the old file unchanged and nothing beside it."""
        check_folder(self.folder)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as part, part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as a RuntimeError
            if lack_of(error):  # not of space
                raise
            old = "the old file is unchanged" if Path(path).exists() else "there is no old file"
            raise OSError(
                f"cannot write the checkpoint {path}: {error}; {old}, and no part of the new one is left. Free some space and "
                "resume with --ckpt_path"
            ) from error

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        """Return the contents, tensors on the CPU and plain values only; ValueError if the file is damaged or holds code."""
        return read_file(path)


class Best(ModelCheckpoint):
    """Keeps `best.ckpt`, the checkpoint of the evaluation with the highest `merit`, also across resumed runs.

    If several evaluations have the same value and loss, the first is kept.

    Args:
        folder: folder of `best.ckpt`.
        metric: of the evaluation set: "top1", or "miou" of segmentation.
    """

    def __init__(self, folder: str | Path, metric: str = "top1") -> None:
        # after evaluations, because not every epoch has one
        options = {"save_on_train_epoch_end": False, "enable_version_counter": False}
        super().__init__(folder, "best", monitor=f"val/{metric}", mode="max", **options)
        self.loss = math.inf

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether the evaluation that just ended is the best so far, and if so, record its loss; False without a score.

        Lightning calls it once per evaluation, on all ranks, which have to agree.
        """
        if current is None:
            return False
        loss = float(trainer.callback_metrics["val/loss"])
        better = not self.best_k_models or merit(float(current), loss) > merit(float(self.best_model_score), self.loss)
        better = trainer.strategy.reduce_boolean_decision(better)
        if better:
            self.loss = loss
        return better

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state and the loss of the best evaluation."""
        return {**super().state_dict(), "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, with all paths changed to the present folder.

        In a folder that was moved, Lightning would forget the best score, and a worse checkpoint would replace the file.
        """

        def moved(path: str) -> str:
            return str(Path(self.dirpath) / Path(path).name) if path else path

        paths = {name: moved(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
        best = {moved(path): score for path, score in state["best_k_models"].items()}
        super().load_state_dict({**state, **paths, "best_k_models": best, "dirpath": self.dirpath})
        self.loss = state["loss"]


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
        self.path, self.csv, self.every = Path(folder) / "last.ckpt", csv, every
        self.go_on = go_on
        self.update: int | None = None  # number of updates in `last.ckpt`
        self.evaluated = -1  # number of the batch, from 0 over all epochs, after which the last evaluation was
        self.rewind: Callable[[Trainer, dict[str, Any]], None] | None = None
        self.received, self.since = 0, 0.0  # the signal that was received (0: none), and when
        self.old_handlers: dict[int, Any] = {}

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        data = trainer.datamodule
        if self.rewind is not None:
            self.rewind(trainer, checkpoint["loops"]["fit_loop"])
        checkpoint["run"] = {"rows": len(self.csv.rows), "order": run_settings(trainer), "times": data.fingerprints[1]}

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the rows that were logged before the checkpoint was saved."""
        self.csv.resume(checkpoint["run"]["rows"])
        # With max_steps, Lightning counts an epoch that has ended once more and skips the next one; no public name prevents it
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]  # noqa: SLF001

    def state_dict(self) -> dict[str, Any]:
        """Return after which batch the last evaluation was."""
        return {"evaluated": self.evaluated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore after which batch the last evaluation was."""
        self.evaluated = state["evaluated"]

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            for folder in (self.path.parent, self.csv.path.parent):
                for part in folder.glob(".*.part"):  # temporary files of a run that was killed while saving
                    part.unlink(missing_ok=True)
        # replaces Lightning's handler, which exits with status 0, saves nothing and communicates with other ranks inside itself
        self.received = int(trainer.received_sigterm and signal.SIGTERM)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # a background process ignores ctrl-c, and still shall
                self.old_handlers[number] = signal.signal(number, lambda number, frame: self._handle(trainer, number, frame))

    def _handle(self, trainer: Trainer, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == number and time.monotonic() - self.since > 1:
            # A second ctrl-c. Within one second it would be the first again, since the terminal and the launcher both send it.
            handler = self.old_handlers[number]
            (handler if callable(handler) else signal.default_int_handler)(number, frame)
        if number == signal.SIGTERM and self.received != number and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)  # the ranks that this process started
        if not self.received:
            self.since = time.monotonic()
            if number == signal.SIGINT and trainer.is_global_zero:  # os.write, since Python's buffer may be in use
                os.write(2, b"\nctrl-c: saving after this update; ctrl-c again ends the run at once\n")
        self.received = max(self.received, number)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Saved here rather than at the end of the previous batch, whose metrics were not logged yet at that time
        if batch_idx % trainer.accumulate_grad_batches:
            return
        stop = self._stop(trainer)
        # before the first batch of an epoch, the save at the end of the previous epoch is up to date
        if batch_idx > 0 and (stop or (self.every and trainer.global_step % self.every == 0)):
            self._save(trainer, self._before_batch)
        self._exit_if(stop)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking and not _accumulating(trainer):
            self._save(trainer, _before_evaluation)
            self._exit_if(self._stop(trainer))
        self.evaluated = trainer.fit_loop.total_batch_idx

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._exit_if(not trainer.sanity_checking and not _accumulating(trainer) and self._stop(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        # Lightning logs the epoch's metrics after this hook; a run resumed from this save would never log them
        metrics = {name: float(value) for name, value in trainer.logged_metrics.items() if _is_of_epoch(name)}
        self.csv.log_metrics(metrics | {"epoch": trainer.current_epoch}, trainer.global_step - 1)
        self._save(trainer)
        self._exit_if(self._stop(trainer))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        # before Lightning restores the handlers that it found; afterwards, Lightning's own handler would stay installed
        while self.old_handlers:
            signal.signal(*self.old_handlers.popitem())

    def _stop(self, trainer: Trainer) -> int:
        """Return the number of the signal that any rank has received, 0 for none; every rank has to call it."""
        if trainer.world_size == 1:
            return self.received
        received = torch.tensor(self.received, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX)
        return int(received)

    def _save(self, trainer: Trainer, rewind: Callable[[Trainer, dict[str, Any]], None] | None = None) -> None:
        """Write `last.ckpt`; `rewind` sets the counters of Lightning's loops in it to the moment from which a run resumes."""
        self.csv.save()
        self.rewind = rewind
        trainer.save_checkpoint(self.path)
        self.rewind, self.update = None, trainer.global_step

    def _before_batch(self, trainer: Trainer, loops: dict[str, Any]) -> None:
        batches = loops["epoch_loop.batch_progress"]
        for counts in (batches["total"], batches["current"]):
            counts["ready"] -= 1
        batches["is_last_batch"] = False
        # directly after an evaluation, a resumed run counts its step once more
        after_evaluation = self.evaluated == batches["total"]["ready"] - 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = trainer.global_step - after_evaluation

    def _exit_if(self, stop: int) -> None:
        """Raise SystemExit with status 128 + `stop`, the number of a signal, after printing what is saved; 0: do nothing.

        It does not save.
        """
        if stop:
            nothing = "stopped before anything was trained or saved; the same command starts again"
            saved = f"saved {self._last()}" if self.path.exists() else nothing
            rank_zero_only(print)(f"{STOP_SIGNALS[stop]}: {saved}", flush=True)
            raise SystemExit(128 + stop)

    def left(self) -> str:
        """Return what is saved and how to resume, for the last message of a run."""
        if not self.path.exists():
            return "nothing is saved yet; the same command starts again"
        return f"the last checkpoint is {self._last()}"

    def _last(self) -> str:
        at = "" if self.update is None else f" (update {self.update})"
        return f"{self.path}{at}; {self.go_on}"

    def explain(self, error: BaseException) -> None:
        """Add what is saved to an error of a machine that lacks something (`lack_of`).

        If `error` comes from a second ctrl-c, print that and raise SystemExit (130) instead.
        """
        if lack_of(error):
            error.add_note(f"the run has ended: {self.left()}")
        # Lightning turns the KeyboardInterrupt into a SystemExit with status 1
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            rank_zero_only(print)(f"{STOP_SIGNALS[signal.SIGINT]}: {self.left()}", flush=True)
            raise SystemExit(128 + signal.SIGINT) from None


def _accumulating(trainer: Trainer) -> bool:
    """Whether gradients of batches are waiting for an update; the last batch of an epoch always brings one."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches > 0 and done < trainer.num_training_batches


def _before_evaluation(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Set the counters as if the run was interrupted in the first evaluation batch: a resumed run repeats the evaluation."""
    batches = loops["epoch_loop.val_loop.batch_progress"]
    for counts in (batches["total"], batches["current"]):  # set, not incremented: a resumed run may have these values already
        counts["ready"] = counts["started"] = counts["completed"] + 1
        counts["processed"] = counts["completed"]


def _is_of_epoch(name: str) -> bool:
    return not name.endswith("_step") and not name.startswith("val/")
