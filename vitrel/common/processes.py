"""Processes that share work, and the device of each.

Several processes, started by torchrun or by `shared_with`, each do a share of the work. They exchange only small objects, so
the gloo backend serves GPUs as well as CPUs. When one process fails, all end with its message instead of waiting for it.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitrel.common.exits import end_with_parent
from vitrel.common.user_modules import import_modules


def local_device(name: str) -> torch.device:
    """The torch.device `name`; "cuda" (and "auto", where there is a GPU) is the GPU numbered LOCAL_RANK."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else torch.device(name)


def checked_device(name: str) -> torch.device:
    """Return `local_device` of the name; ValueError for a name that is none, and for a device that this machine lacks."""
    try:
        device = local_device(name)
    except RuntimeError as error:
        raise ValueError(f"device is auto, cpu, cuda, cuda:1, ..., got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        shared = int(os.environ.get("WORLD_SIZE", 1)) > 1 and name in ("auto", "cuda")
        hint = f"start at most {count} processes, or use cpu" if shared else "use auto or cpu"
        raise ValueError(f"there is no device {device} on this machine: {count} GPUs are visible; {hint}")
    if device.type not in ("cpu", "cuda"):
        try:
            torch.ones(1, device=device).item()
        except (RuntimeError, AssertionError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"there is no device {device} on this machine ({reason:.200}); use auto or cpu") from error
    return device


_TIMEOUT = timedelta(days=1)  # of a collective call, which waits for slower processes; a dead process is noticed at once


_ENDED_EARLY = "another process ended before its work was done; its output says why"


class OtherProcessError(RuntimeError):
    """Raised in this process because another one failed; the message is that process's error."""


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Context with the process group of torchrun's processes; does nothing in a single process (WORLD_SIZE 1)."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    if torch.cuda.is_available() and local_device("cuda").index < torch.cuda.device_count():  # else `Settings` raises
        torch.cuda.set_device(local_device("cuda"))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def shared_with(others: int, work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Context that runs its block as process 0 beside `others` new processes, each of which runs `work(*arguments)` and ends.

    PyTorch's CPU threads are divided among the processes: small models run faster with fewer threads each. OtherProcessError
    where a process dies before all are connected.

    Args:
        work: a module-level function whose arguments can be pickled. With others = 0 no process is started.
    """
    if others == 0:
        yield
        return
    threads, world = torch.get_num_threads(), others + 1
    spawn = multiprocessing.get_context("spawn")
    threads_each = max(1, threads // world)
    with tempfile.TemporaryDirectory() as folder:
        init_method, started = Path(folder, "rendezvous").as_uri(), []
        try:
            for rank in range(1, world):
                ready, child_end = spawn.Pipe(duplex=False)
                process_args = (child_end, init_method, rank, world, threads_each, work, arguments)
                process = spawn.Process(target=_run_other, args=process_args, daemon=True)
                process.start()
                child_end.close()  # the pipe then ends when the process ends
                started.append((process, ready))
            for _, ready in started:
                if not _received(ready):
                    raise OtherProcessError("a process of the evaluation ended while it started; memory may have run out")
            torch.set_num_threads(threads_each)
            try:
                _init_group(init_method, 0, world)
            except RuntimeError as error:
                raise OtherProcessError(_ENDED_EARLY) from error
            yield
        finally:
            torch.set_num_threads(threads)
            if dist.is_initialized():
                dist.destroy_process_group()
            for process, _ in started:
                process.join(timeout=1)
                process.terminate()
                process.join()


def rank_and_world() -> tuple[int, int]:
    """(rank of this process, number of processes); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_all(work: Callable[[], Any]) -> list[Any]:
    """Run `work()` in every process and return all results in the order of ranks; results must be picklable.

    Where `work()` raises, that process raises the same error, and all others raise OtherProcessError with its text.
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


def _received(ready: Connection) -> bool:
    """True once the process at the other end reports ready, False where it ended first."""
    try:
        return ready.recv()
    except EOFError:
        return False


def _run_other(
    ready: Connection, init_method: str, rank: int, world: int, threads: int, work: Callable[..., None], arguments: tuple
) -> None:
    """Body of a process that `shared_with` starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 receives ctrl-c too, and ends this process
    warnings.simplefilter("ignore")  # process 0 prints the same warnings
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    import_modules()
    ready.send(True)
    with contextlib.suppress(Exception):  # `on_all` passes errors to process 0
        _init_group(init_method, rank, world)
        work(*arguments)


def _init_group(init_method: str, rank: int, world: int) -> None:
    if "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo fails where the host's name does not resolve
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world, timeout=_TIMEOUT)
