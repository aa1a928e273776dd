"""The processes that work on one run on this machine: which have ended, and which are stopped and keep the others waiting."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

HEARTBEAT = 60.0  # seconds for which a process may be stopped


class Peers:
    """The other processes of a process group that run on this machine, which are looked at in /proc; without it, none.

    A stopped process (SIGSTOP) neither answers nor ends, so the others wait for it without a word until PyTorch's timeout, half
    an hour or more. `look` therefore kills it, after which they get the error of a process that has died.

    Args:
        pids: {rank: process id}.
        heartbeat: seconds for which a process may be stopped; 0 for ever.

    Attributes:
        stopped: {rank: process id} of those that were killed for that reason.
    """

    def __init__(self, pids: dict[int, int], heartbeat: float = HEARTBEAT) -> None:
        self.pids, self.heartbeat = pids, heartbeat
        self.stopped: dict[int, int] = {}
        self._seconds = dict.fromkeys(pids, 0.0)

    @classmethod
    def of_group(cls, heartbeat: float = HEARTBEAT) -> Self:
        """Return those of the default process group; every rank has to call it."""
        from torch import distributed

        rank = distributed.get_rank()
        processes: list[tuple[str | None, int]] = [(None, 0)] * distributed.get_world_size()
        distributed.all_gather_object(processes, (_machine(), os.getpid()))
        here = processes[rank][0]
        pids = {other: pid for other, (machine, pid) in enumerate(processes) if other != rank and machine == here is not None}
        return cls({other: pid for other, pid in pids.items() if _state(pid)}, heartbeat)

    def died(self) -> dict[int, int]:
        """Return {rank: process id} of those that have ended, killed ones too."""
        return {rank: pid for rank, pid in self.pids.items() if not _state(pid)}

    def look(self, seconds: float) -> None:
        """Kill the processes that have been stopped for `heartbeat`. To be called every `seconds`.

        Time in which this process itself is stopped, as all are by ctrl-z in a terminal, does not count.
        """
        for rank, pid in self.pids.items():
            self._seconds[rank] = self._seconds[rank] + seconds if _state(pid) in ("T", "t") else 0.0
            if 0 < self.heartbeat <= self._seconds[rank]:
                self.stopped[rank] = pid
                with suppress(ProcessLookupError):  # another one was faster
                    os.kill(pid, signal.SIGKILL)

    def watch(self, over: threading.Event, period: float = 1.0) -> None:
        """Call `look` every `period` seconds until `over` is set."""
        while not over.wait(period):
            self.look(period)

    def why_stopped(self, rank: int) -> str:
        """Return the reason for which `look` has killed a rank, the end of a sentence about it; "" for other ranks."""
        return f"was stopped by a signal and did not go on for {self.heartbeat:g} s" if rank in self.stopped else ""


def _machine() -> str | None:
    """Identifier of the machine and its process-id namespace; None if unknown. Equal ids: process ids can be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _state(pid: int) -> str:
    """The state of a process as in /proc/<pid>/stat, such as "S" or "T" (stopped); "" if it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if state in "ZX" else state  # a zombie has ended, but its parent has not read its status yet
