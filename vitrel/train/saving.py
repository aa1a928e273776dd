"""Checkpoints that survive: whole or not at all, at moments a run can go on from exactly, and when asked to stop."""

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
from torch import Tensor

from vitrel.files import atomic_write
from vitrel.train.log import CSVLog
from vitrel.train.same_run import run_settings
from vitrel.weights.read import checksums, read_file

TOLD = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "ctrl-c"}  # to stop; the exit status is 128 and the signal's number


def read_to_resume(path: str | Path) -> dict[str, Any]:
    """The checkpoint of a run that is to be gone on with; ValueError with the way out where it is damaged or none of a run."""
    try:
        stored = read_file(path)
        if not isinstance(stored, dict) or not {"loops", "optimizer_states", "state_dict"} <= stored.keys():
            raise ValueError(f"{path} holds no run, weights at most; to begin one from these: --model.tuning.init_from={path}")
    except ValueError as error:
        others = [other for other in Path(path).parent.glob("*.ckpt") if other.name != Path(path).name]
        others = sorted(others, key=lambda other: other.stat().st_mtime, reverse=True)
        way = f"Go on from another one of this run: --ckpt_path={others[0]}" if others else "There is no other one beside it"
        raise ValueError(f"cannot resume, and nothing was changed: {error}. {way}") from error
    return stored


class AtomicIO(TorchCheckpointIO):
    """Writes beside the file and renames: what stands at `path` is the former checkpoint or the new one, whole.

    Args:
        folder: of the run, which is never made anew here, see `vitrel.train.faults.RunFolder`.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write; OSError when there is no room, with the former file kept and nothing left beside it."""
        if "vitrel" in checkpoint:  # `read_file` compares them; what callbacks keep are single numbers, under names with paths
            parts = {name: part for name, part in checkpoint.items() if name != "callbacks"}
            checkpoint["vitrel"]["checksums"] = checksums(parts)
        try:
            os.stat(self.folder)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as part, part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as a RuntimeError
            kept = "the former file is kept" if Path(path).exists() else "there is no former one"
            raise OSError(
                f"cannot write the checkpoint {path}: {error}; {kept}, and nothing is left of the new one. Make room and go on "
                "with --ckpt_path"
            ) from error

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        """Tensors and plain values on the CPU, never code; ValueError naming what is wrong with the file."""
        return read_file(path)


def merit(top1: float, loss: float) -> tuple[float, float]:
    """What orders evaluations, the best highest: top-1, and of equals the lower loss; one that is no number comes last."""
    return top1, -math.inf if math.isnan(loss) else -loss


class Best(ModelCheckpoint):
    """Keeps `best.ckpt`: the evaluation of the highest `merit`, of this run and of those that it goes on with.

    Of evaluations with the same top-1 and the same loss it is the first.

    Args:
        folder: where it goes.
    """

    def __init__(self, folder: str | Path) -> None:
        # when an evaluation ends, since not every epoch has one
        when = {"save_on_train_epoch_end": False, "enable_version_counter": False}
        super().__init__(folder, "best", monitor="val/top1", mode="max", **when)
        self.loss = math.inf

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether the evaluation that ended is to be kept; asked once after each."""
        if current is None:
            return False
        loss = float(trainer.callback_metrics["val/loss"])
        better = not self.best_k_models or merit(float(current), loss) > merit(float(self.best_model_score), self.loss)
        better = trainer.strategy.reduce_boolean_decision(better)
        if better:
            self.loss = loss
        return better

    def state_dict(self) -> dict[str, Any]:
        """As Lightning's, with the loss of the evaluation that is kept."""
        return {**super().state_dict(), "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As Lightning's, for a run whose folder was moved too: it would forget the score, and a worse one would replace it."""

        def here(path: str) -> str:
            return str(Path(self.dirpath) / Path(path).name) if path else path

        paths = {name: here(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
        known = {here(path): score for path, score in state["best_k_models"].items()}
        super().load_state_dict({**state, **paths, "best_k_models": known, "dirpath": self.dirpath})
        # an earlier version did not save it, and kept the first of equals
        self.loss = state.get("loss", -math.inf if known else math.inf)


class Saving(Checkpoint):
    """Keeps `last.ckpt`: every so many updates, before each evaluation, at the end of each epoch, on SIGTERM and ctrl-c.

    A run resumed from it, whenever it was written, ends as if it had never been interrupted. It is not written between the
    batches of an accumulation, since gradients are not saved. On SIGTERM and ctrl-c the run saves after its current update (in
    an evaluation, which changes nothing, at once, unless it lies within an accumulation) and exits with status 143 or 130; all
    ranks stop together, whichever was told. Ctrl-c once more ends it at once.

    Args:
        folder: where `last.ckpt` goes.
        csv: written before every checkpoint, and cut back to it by a resumed run.
        every: updates between two saves inside an epoch; 0 for none.
        go_on: how to go on with a run that was stopped, the end of a sentence.
    """

    def __init__(self, folder: str | Path, csv: CSVLog, every: int = 0, go_on: str = "go on with --ckpt_path auto") -> None:
        self.path, self.csv, self.every = Path(folder) / "last.ckpt", csv, every
        self.go_on = go_on
        self.update: int | None = None
        self.asked, self.since = 0, 0.0  # the signal that was sent and when
        self.former: dict[int, Any] = {}  # the handlers before

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        data = trainer.datamodule
        checkpoint["run"] = {"rows": len(self.csv.rows), "order": run_settings(trainer), "files": data.listing.lines}

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Forget the rows logged after the checkpoint was saved."""
        del self.csv.rows[checkpoint["run"]["rows"] :]
        # with max_steps Lightning would take the epoch that ended for one yet to end, count it again and pass over the next
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            for folder in (self.path.parent, self.csv.path.parent):
                for part in folder.glob(".*.part"):  # of a run that was killed while it saved
                    part.unlink(missing_ok=True)
        # Lightning's own handler ends the run with status 0, saves nothing, and talks to other ranks from inside the handler
        self.asked = int(trainer.received_sigterm and signal.SIGTERM)
        for number in TOLD:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nobody's ctrl-c reaches a process in the background
                self.former[number] = signal.signal(number, lambda number, frame: self._ask(trainer, number, frame))

    def _ask(self, trainer: Trainer, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == number and time.monotonic() - self.since > 1:
            # a second one; what comes earlier is the same once more, from the terminal and from the process that started this
            former = self.former[number]
            (former if callable(former) else signal.default_int_handler)(number, frame)
        if number == signal.SIGTERM and self.asked != number and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)  # the ranks that this process started
        if not self.asked:
            self.since = time.monotonic()
            if number == signal.SIGINT and trainer.is_global_zero:  # written past Python's buffers, one of which may be in use
                os.write(2, b"\nctrl-c: saving after this update; ctrl-c again ends the run at once\n")
        self.asked = max(self.asked, number)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the end of the batch before, whose metrics were not logged yet. Its progress without the batch that begins:
        loop = trainer.fit_loop.epoch_loop
        progress, steps = loop.batch_progress, loop._batches_that_stepped
        now = progress.state_dict()
        progress.current.ready -= 1
        progress.total.ready -= 1
        progress.is_last_batch = False
        if not loop._should_accumulate():
            stop = self._stop(trainer)
            # an epoch's first batch follows the save at the end of the last
            if batch_idx > 0 and (stop or (self.every and trainer.global_step % self.every == 0)):
                # after an evaluation, a resumed run passes its place once more and counts that as a step of the logs
                loop._batches_that_stepped -= loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
                self._save(trainer)
            self._leave(stop)
        progress.load_state_dict(now)
        loop._batches_that_stepped = steps

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.fit_loop._should_accumulate():
            return
        # as if interrupted inside its first batch: the resumed run then makes up for the whole evaluation
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        now = progress.state_dict()
        for counts in (progress.total, progress.current):  # set, not raised: a resumed run's may stand so already
            counts.ready = counts.started = counts.completed + 1
            counts.processed = counts.completed
        self._save(trainer)
        progress.load_state_dict(now)
        self._leave(self._stop(trainer))

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._leave(not trainer.sanity_checking and not trainer.fit_loop._should_accumulate() and self._stop(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        # Lightning logs the epoch's metrics after this hook, to which a run resumed from this save does not come back
        metrics = {name: value.item() for name, value in trainer._logger_connector.metrics["log"].items()}
        step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
        self.csv.log_metrics(metrics | {"epoch": trainer.current_epoch}, step)
        self._save(trainer)
        self._leave(self._stop(trainer))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        # Before Lightning puts back what was there before itself: after it, its handler would stay, which ends nothing
        while self.former:
            signal.signal(*self.former.popitem())

    def _stop(self, trainer: Trainer) -> int:
        """The signal that a rank was sent, 0 for none."""
        if trainer.world_size == 1:
            return self.asked
        asked = torch.tensor(self.asked, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        return int(asked)

    def _save(self, trainer: Trainer) -> None:
        self.csv.save()
        trainer.save_checkpoint(self.path)
        self.update = trainer.global_step

    def _leave(self, stop: int) -> None:
        if stop:
            nothing = "before anything was trained, so nothing is saved; the same command begins anew"
            saved = f"saved {self._last()}" if self.path.exists() else nothing
            rank_zero_only(print)(f"{TOLD[stop]}: {saved}", flush=True)
            raise SystemExit(128 + stop)

    def left(self) -> str:
        """What is saved and how to go on, for the last words of a run."""
        if not self.path.exists():
            return "nothing is saved yet, the same command begins anew"
        return f"the last checkpoint is {self._last()}"

    def _last(self) -> str:
        at = "" if self.update is None else f" (update {self.update})"
        return f"{self.path}{at}; {self.go_on}"

    def explain(self, error: BaseException) -> None:
        """Where ctrl-c has ended the run at once, say what is saved, and exit with status 130 in place of `error`."""
        # Lightning makes it a SystemExit of status 1
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            rank_zero_only(print)(f"{TOLD[signal.SIGINT]}: {self.left()}", flush=True)
            raise SystemExit(128 + signal.SIGINT) from None
