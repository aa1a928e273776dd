"""One evaluation over several processes, of torchrun or of `shared_with`: each takes its share of the images, and what they
count is added up.

Only counts, sums and error texts cross between processes, so gloo serves GPUs as well as CPUs. Where one process fails, all
end with its message instead of waiting for it.
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

from vitrel.evaluate.settings import own_device
from vitrel.exits import end_with_parent

_PATIENCE = timedelta(days=1)  # of a process for a slower one; a dead one is noticed at once


class OtherProcessError(RuntimeError):
    """Another process of the evaluation failed, and this one ends with it; the text is the other's."""


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the processes that torchrun started; nothing where this one runs alone."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    if torch.cuda.is_available() and own_device("cuda").index < torch.cuda.device_count():  # else `Sweep` refuses to use it
        torch.cuda.set_device(own_device("cuda"))
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def shared_with(others: int, work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Runs the block as process 0 and starts `others` more on this machine, each of which runs `work(*arguments)` and ends.

    The CPU's threads are divided among them: small models run faster so, and on a busy machine no thread waits for another.
    work: a function of a module, with arguments that can be pickled. Nothing is started for 0.
    """
    if others == 0:
        yield
        return
    threads, world = torch.get_num_threads(), others + 1
    spawn = multiprocessing.get_context("spawn")
    own = max(1, threads // world)
    with tempfile.TemporaryDirectory() as folder:
        meeting, started = Path(folder, "meeting").as_uri(), []
        try:
            for rank in range(1, world):
                ready, theirs = spawn.Pipe(duplex=False)
                how = (theirs, meeting, rank, world, own, work, arguments)
                process = spawn.Process(target=_run_other, args=how, daemon=True)
                process.start()
                theirs.close()  # so that the end of the process is the end of the pipe
                started.append((process, ready))
            for _, ready in started:
                if not _received(ready):
                    raise OtherProcessError("a process of the evaluation ended before it began, for want of memory perhaps")
            torch.set_num_threads(own)
            _meet(meeting, 0, world)
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
    """(number of this process, number of processes), (0, 1) outside `joined`."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_all(work: Callable[[], Any]) -> list[Any]:
    """What `work()` returned in each process, in their order; plain values only.

    Where it raises, this process raises the same, and every other one OtherProcessError with the text.
    """
    world = rank_and_world()[1]
    if world == 1:
        return [work()]
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        failure = error
    found: list[Any] = [None] * world
    try:
        dist.all_gather_object(found, (value, failure and f"{type(failure).__name__}: {failure}"))
    except RuntimeError as error:
        if failure is None:
            raise OtherProcessError("another process ended before its work was done; its own message says why") from error
    if failure is not None:
        raise failure
    for other, (_, text) in enumerate(found):
        if text:
            raise OtherProcessError(f"process {other} of {world}: {text}")
    return [value for value, _ in found]


def _received(ready: Connection) -> bool:
    try:
        return ready.recv()
    except EOFError:
        return False


def _run_other(
    ready: Connection, meeting: str, rank: int, world: int, threads: int, work: Callable[..., None], arguments: tuple
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 is told too, and ends this one
    warnings.simplefilter("ignore")  # process 0 gives the same
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    ready.send(True)
    with contextlib.suppress(Exception):  # `on_all` tells process 0 of it
        _meet(meeting, rank, world)
        work(*arguments)


def _meet(meeting: str, rank: int, world: int) -> None:
    if "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else a host whose name leads nowhere could not meet itself
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=_PATIENCE)
