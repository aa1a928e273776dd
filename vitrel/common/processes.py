"""Processes that share work, and the device of each.

Several processes, started by torchrun or by `in_processes`, each do a share of the work. They exchange only small objects, so
the gloo backend serves GPUs as well as CPUs. When one process fails, all end with its message instead of waiting for it.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import ProcessExitedException, start_processes

from vitrel.common.exits import one_line, reported, terminable
from vitrel.common.user_modules import import_modules


def local_device(name: str) -> torch.device:
    """Return the torch.device `name`: "auto" is "cuda" if there is a GPU, else "cpu"; "cuda" is the GPU numbered LOCAL_RANK.

    LOCAL_RANK is torchrun's environment variable, 0 if not set. RuntimeError for a name that torch does not know.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else torch.device(name)


def checked_device(name: str) -> torch.device:
    """Return the `local_device` of a name; ValueError if torch does not know the name, or the machine has no such device."""
    try:
        device = local_device(name)
    except RuntimeError as error:
        raise ValueError(f"device is auto, cpu, cuda, cuda:1, ..., got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        shared = int(os.environ.get("WORLD_SIZE", 1)) > 1 and name in ("auto", "cuda")
        hint = "start at most one process for each, or use cpu" if shared else "use auto or cpu"
        raise ValueError(f"there is no device {device} on this machine (GPUs that are visible: {count}): {hint}")
    if device.type not in ("cpu", "cuda"):
        try:
            torch.ones(1, device=device).item()
        except (RuntimeError, AssertionError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"there is no device {device} on this machine ({reason:.200}); use auto or cpu") from error
    return device


_TIMEOUT = timedelta(days=1)  # of a collective call, which waits for slower processes; a dead process is noticed at once
PATIENCE = 10.0  # seconds in which the other processes may end by themselves after one has failed
_ENDED_EARLY = "another process ended before its work was done; its output says why"


class OtherProcessError(RuntimeError):
    """Raised because another process of the group failed; the message is its error."""


@contextmanager
def joined() -> Iterator[None]:
    """Context manager that joins the process group (gloo) of torchrun's processes; does nothing with WORLD_SIZE 1 or unset.

    With GPUs it makes that of LOCAL_RANK the current one. If another process fails, this one ends by SystemExit with status 1,
    and the first process prints that one's error. The group is destroyed at the end.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    if torch.cuda.is_available() and local_device("cuda").index < torch.cuda.device_count():  # else `Settings` raises
        torch.cuda.set_device(local_device("cuda"))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield
    except OtherProcessError as error:  # the failed process prints it too, but maybe only the log of process 0 is kept
        sys.exit(f"error: {one_line(error)}" if dist.get_rank() == 0 else 1)
    finally:
        dist.destroy_process_group()


def in_processes(number: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(*arguments)` in `number` new processes of this machine, which are `joined`, and wait for all of them.

    PyTorch's CPU threads are divided among the processes: small models run faster with fewer threads each. Results of `work`
    are dropped.

    Args:
        work: a module-level function whose arguments can be pickled.

    Raises:
        SystemExit: a process failed, and has printed why, or was killed; the others are ended.
    """
    threads, port = max(1, torch.get_num_threads() // number), get_free_port()
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # theirs until `_run`: while they import, ctrl-c is this process's
    try:
        started = start_processes(_run, (number, port, threads, work, arguments), number, join=False)
    finally:
        signal.signal(signal.SIGINT, previous)
    try:
        while not started.join(grace_period=PATIENCE):
            pass
    except ProcessExitedException as error:
        sys.exit(f"error: {error}; memory may have run out" if error.signal_name else 1)
    finally:
        for process in started.processes:
            process.terminate()


def _run(rank: int, number: int, port: int, threads: int, work: Callable[..., None], arguments: tuple) -> None:
    """Run `work` in the process numbered `rank` of `number`, which `in_processes` starts, `joined` with the others.

    Sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the number of CPU threads, and imports the user's modules
    (`import_modules`). Processes other than 0 give no warnings.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(number), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(threads)
    if rank > 0:  # the first prints the same warnings
        warnings.simplefilter("ignore")
    with reported("the same command goes on"), terminable():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with joined():
            import_modules()
            work(*arguments)


def rank_and_world() -> tuple[int, int]:
    """Return (rank of this process, number of processes); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_all(work: Callable[[], Any]) -> list[Any]:
    """Run `work()` in every process, each of which calls this, and return the results of all in the order of ranks.

    Results must be picklable. If `work()` raises in a process, that process raises the same error, and all others raise
    OtherProcessError with its text, of several that of the lowest rank; so they do if a process ends early.
    """
    world = rank_and_world()[1]
    if world == 1:
        return [work()]
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        failure = error
    gathered: list[Any] = [None] * world
    try:
        dist.all_gather_object(gathered, (value, failure and f"{type(failure).__name__}: {failure}"))
    except RuntimeError as error:
        if failure is None:
            raise OtherProcessError(_ENDED_EARLY) from error
    if failure is not None:
        raise failure
    for rank, (_, error_text) in enumerate(gathered):
        if error_text:
            raise OtherProcessError(f"process {rank} of {world}: {error_text}")
    return [value for value, _ in gathered]
