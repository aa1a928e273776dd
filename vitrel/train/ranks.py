"""Several processes of one run: when one dies, the others say which, and end instead of waiting for it."""

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
    """Watches the other processes of this run on this machine; says which one died, once, and ends the rest with status 1.

    What PyTorch makes of a rank's death depends on the moment and the backend: an error in the next exchange, or a wait that
    does not end. So the processes themselves are looked at, by their ids. Without /proc nothing is watched.

    Args:
        left: what is saved and how to go on, the end of the message.
    """

    period = 1.0  # seconds between two looks
    patience = 10.0  # seconds that a rank has to end by itself: the others may all end of the same error, which they say

    def __init__(self, left: Callable[[], str]) -> None:
        self.left, self.over = left, threading.Event()
        self.rank = 0
        self.peers: dict[int, int] = {}  # {rank: process id}, as of those that are gone
        self.gone: dict[int, int] = {}
        self.children: dict[int, subprocess.Popen] = {}  # by process id, where this rank has started the others

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or not torch.distributed.is_initialized():
            return
        everyone: list[tuple[str | None, int]] = [(None, 0)] * trainer.world_size
        torch.distributed.all_gather_object(everyone, (_machine(), os.getpid()))
        self.rank, self.over, self.gone = trainer.global_rank, threading.Event(), {}
        here = everyone[self.rank][0]
        self.peers = {
            rank: pid
            for rank, (machine, pid) in enumerate(everyone)
            if rank != self.rank and machine == here is not None and _alive(pid)
        }
        started = getattr(trainer.strategy.launcher, "procs", [])
        self.children = {process.pid: process for process in started if isinstance(process, subprocess.Popen)}
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # Lightning's, which kills this process too without a word
                thread._child_processes = []
        if self.peers:
            threading.Thread(target=self._watch, args=(self.over,), daemon=True).start()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.peers:
            trainer.strategy.barrier("trained")  # before it no rank is done, so that one that is missing has died
            self.over.set()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.over.set()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if not (self.peers and _of_an_exchange(exception)):
            self.over.set()
            return
        end = time.monotonic() + 3  # connections are closed a little before a process is gone
        while not self._look() and time.monotonic() < end:
            time.sleep(0.05)
        if not self.gone:
            self.over.set()

    def explain(self, error: BaseException) -> None:
        """Where a rank has died, ChildProcessError that names it (SystemExit on all ranks but one) in place of `error`."""
        self.over.set()
        if self.gone and _of_an_exchange(error):
            self._end_children(0)
            if self._speaks():
                raise ChildProcessError(self._message()) from None
            time.sleep(2 * self.period)  # lest the rank that speaks takes this one for another that died
            raise SystemExit(1) from None
        if isinstance(error, Exception):
            self._end_children(5)  # they would wait for this rank

    def _watch(self, over: threading.Event) -> None:
        while not self._look():
            if over.wait(self.period):
                return
        if over.wait(self.patience):
            return
        # the main thread waits in an exchange that will not end
        if self._speaks():
            sys.stdout.flush()
            print(self._message(), file=sys.stderr, flush=True)
        else:
            time.sleep(2 * self.period)
        self._end_children(0)
        os._exit(1)

    def _look(self) -> bool:
        """Whether a rank has died; those that are missing at the first such look."""
        self.gone = self.gone or {rank: pid for rank, pid in self.peers.items() if not _alive(pid)}
        return bool(self.gone)

    def _speaks(self) -> bool:
        return self.rank == min({self.rank, *self.peers} - self.gone.keys())

    def _message(self) -> str:
        ends = "; ".join(f"rank {rank} (process {pid}) {self._how(pid)}" for rank, pid in self.gone.items())
        return f"{ends}. The run has stopped: {self.left()}"

    def _how(self, pid: int) -> str:
        status = self.children[pid].poll() if pid in self.children else None
        if status is None:
            return "has died: it was killed, perhaps for want of memory, or ended by an error of its own"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}{', perhaps for want of memory' * (status == -9)}"
        return f"ended with status {status}; what it says itself is the reason"

    def _end_children(self, patience: float) -> None:
        """Wait up to `patience` seconds for the ranks that this one has started, and kill those that are left."""
        end = time.monotonic() + patience
        for process in self.children.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def _of_an_exchange(error: BaseException) -> bool:
    """Whether it may come of an exchange between ranks, which fails when one is gone."""
    return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)


def _machine() -> str | None:
    """What processes share that see each other's ids; None where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"  # a zombie has ended; its parent has not asked yet
