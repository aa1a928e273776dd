"""Watching the ranks of a distributed run: when one dies, the remaining ranks report which and exit instead of hanging."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Ranks(Callback):
    """Watches the processes of the other ranks on this machine; if one dies, reports it once and ends all ranks with status 1.

    The effect of a rank's death in PyTorch depends on the moment and the backend: an error in the next collective operation, or
    an endless wait. Therefore a thread checks the processes by their ids. Without /proc no process is checked.

    Args:
        left: returns what is saved and how to resume, the end of the message.
    """

    period = 1.0  # seconds between two checks
    patience = 10.0  # seconds in which this rank may end by itself, since all ranks may fail with the same error and report it

    def __init__(self, left: Callable[[], str]) -> None:
        self.left, self.over = left, threading.Event()
        self.rank = 0
        self.peers: dict[int, int] = {}  # {rank: process id} of the other ranks on this machine
        self.gone: dict[int, int] = {}  # {rank: process id} of those that have died
        self.children: dict[int, subprocess.Popen] = {}  # {process id: process} of the ranks that this one has started

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not torch.distributed.is_initialized():
            return
        processes: list[tuple[str | None, int]] = [(None, 0)] * trainer.world_size
        torch.distributed.all_gather_object(processes, (_machine(), os.getpid()))
        self.rank, self.over, self.gone = trainer.global_rank, threading.Event(), {}
        this_machine = processes[self.rank][0]
        self.peers = {
            rank: pid
            for rank, (machine, pid) in enumerate(processes)
            if rank != self.rank and machine == this_machine is not None and _alive(pid)
        }
        launched = getattr(trainer.strategy.launcher, "procs", [])
        self.children = {process.pid: process for process in launched if isinstance(process, subprocess.Popen)}
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # Lightning's, which would silently kill this process too
                thread._child_processes = []
        if self.peers:
            threading.Thread(target=self._watch, args=(self.over,), daemon=True).start()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.peers:
            trainer.strategy.barrier("trained")  # no rank ends normally before all pass this line; a missing rank has died
            self.over.set()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.over.set()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if not (self.peers and _may_be_collective(exception)):
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
        if over.wait(self.patience):
            return
        # the main thread is blocked in a collective operation
        if self._reports():
            sys.stdout.flush()
            print(self._message(), file=sys.stderr, flush=True)
        else:
            time.sleep(2 * self.period)
        self._end_children(0)
        os._exit(1)

    def _any_died(self) -> bool:
        """Return whether a rank has died; the first time, record the dead ranks in `gone`."""
        self.gone = self.gone or {rank: pid for rank, pid in self.peers.items() if not _alive(pid)}
        return bool(self.gone)

    def _reports(self) -> bool:
        """Whether this rank prints the message: the lowest rank on this machine that is not in `gone`."""
        return self.rank == min({self.rank, *self.peers} - self.gone.keys())

    def _message(self) -> str:
        deaths = "; ".join(f"rank {rank} (process {pid}) {self._cause(pid)}" for rank, pid in self.gone.items())
        return f"{deaths}. The run has stopped: {self.left()}"

    def _cause(self, pid: int) -> str:
        status = self.children[pid].poll() if pid in self.children else None
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
    return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)


def _machine() -> str | None:
    """Identifier of the machine and its process-id namespace; None if unknown. Equal ids: process ids can be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"  # a zombie has ended, but its parent has not read its status yet
