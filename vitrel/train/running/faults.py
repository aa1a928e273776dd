"""Callbacks that stop a run on errors: a removed run folder, a non-finite loss or weight, unreadable images, a dead rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.common.files import atomic_write, write_cells
from vitrel.common.peers import HEARTBEAT, Peers
from vitrel.common.resources import out_of_memory
from vitrel.data import BadImage, ImageSet

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


class Ranks(Callback):
    """Watches the processes of the other ranks on this machine; if one dies, reports it once and ends all ranks with status 1.

    The effect of a rank's death in PyTorch depends on the moment and the backend: an error in the next collective operation, or
    an endless wait. Therefore a thread checks the processes by their ids; it also kills a rank that was stopped for
    `heartbeat` (see `Peers`). Without /proc no process is checked.

    Args:
        left: returns what is saved and how to resume, the end of the message.
        heartbeat: seconds for which a rank may be stopped; 0 for ever.
    """

    period = 1.0  # seconds between two checks
    patience = 10.0  # seconds in which this rank may end by itself, since all ranks may fail with the same error and report it

    def __init__(self, left: Callable[[], str], heartbeat: float = HEARTBEAT) -> None:
        self.left, self.heartbeat, self.over = left, heartbeat, threading.Event()
        self.rank = 0
        self.peers = Peers({})
        self.gone: dict[int, int] = {}  # {rank: process id} of those that have died
        self.children: dict[int, subprocess.Popen] = {}  # {process id: process} of the ranks that this one has started

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not torch.distributed.is_initialized():
            return
        self.peers = Peers.of_group(self.heartbeat)
        self.rank, self.over, self.gone = trainer.global_rank, threading.Event(), {}
        launched = getattr(trainer.strategy.launcher, "procs", [])
        self.children = {process.pid: process for process in launched if isinstance(process, subprocess.Popen)}
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # Lightning's, which would silently kill this process too
                thread._child_processes = []
        if self.peers.pids:
            threading.Thread(target=self._watch, args=(self.over,), daemon=True).start()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.peers.pids:
            trainer.strategy.barrier("trained")  # no rank ends normally before all pass this line; a missing rank has died
            self.over.set()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.over.set()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if not (self.peers.pids and _may_be_collective(exception)):
            self.over.set()
            return
        end = time.monotonic() + 3  # the connections of a process are closed shortly before the process has ended
        while not self._any_died() and time.monotonic() < end:
            time.sleep(0.05)
        if not self.gone:
            self.over.set()

    def explain(self, error: BaseException) -> None:
        """If a rank has died and caused `error`, raise ChildProcessError that names it; SystemExit on all but one rank.

        Otherwise return. Watching stops. The ranks that this process started are killed: at once in the first case, otherwise
        if `error` is an Exception and they still run after 5 s.
        """
        self.over.set()
        if self.gone and _may_be_collective(error):
            self._end_children(0)
            if self._reports():
                raise ChildProcessError(self._message()) from None
            time.sleep(2 * self.period)  # if this rank ended at once, the reporting rank would report its death too
            raise SystemExit(1) from None
        if isinstance(error, Exception):
            self._end_children(5)  # they would wait for this rank

    def _watch(self, over: threading.Event) -> None:
        while not self._any_died():
            if over.wait(self.period):
                return
            self.peers.look(self.period)
        if over.wait(self.patience):
            return
        # the main thread is blocked in a collective operation
        if self._reports():
            sys.stdout.flush()
            print(f"error: {self._message()}", file=sys.stderr, flush=True)
        else:
            time.sleep(2 * self.period)
        self._end_children(0)
        os._exit(1)

    def _any_died(self) -> bool:
        """Return whether a rank has died; the first time, record the dead ranks in `gone`."""
        self.gone = self.gone or self.peers.died()
        return bool(self.gone)

    def _reports(self) -> bool:
        """Whether this rank prints the message: the lowest rank on this machine that is not in `gone`."""
        return self.rank == min({self.rank, *self.peers.pids} - self.gone.keys())

    def _message(self) -> str:
        deaths = "; ".join(f"rank {rank} (process {pid}) {self._cause(rank, pid)}" for rank, pid in self.gone.items())
        return f"{deaths}. The run has ended: {self.left()}"

    def _cause(self, rank: int, pid: int) -> str:
        status = self.children[pid].poll() if pid in self.children else None
        if stopped := self.peers.why_stopped(rank):
            return stopped
        if status is None:
            return "has died: it was killed, perhaps because memory ran out, or failed with an error"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}{', perhaps because memory ran out' * (status == -9)}"
        return f"ended with status {status}; its error message gives the reason"

    def _end_children(self, patience: float) -> None:
        """Wait up to `patience` seconds for the ranks that this one has started, and kill those that still run."""
        end = time.monotonic() + patience
        for process in self.children.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def _may_be_collective(error: BaseException) -> bool:
    """Whether `error` may come from a collective operation, which fails when a rank has died."""
    return isinstance(error, RuntimeError) and not out_of_memory(error)
