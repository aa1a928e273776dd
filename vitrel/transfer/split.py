"""One evaluation over the processes that torchrun started: each takes its share of the images, and what they count is added up.

Only counts, sums and error texts cross between processes, so gloo serves GPUs as well as CPUs. Where one process fails, all
end with its message instead of waiting for it.
"""

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset

PATIENCE = timedelta(days=1)  # of a process for a slower one; a dead one is noticed at once


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
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_and_world() -> tuple[int, int]:
    """(number of this process, number of processes), (0, 1) outside `joined`."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def own_share(dataset: Dataset) -> Dataset:
    """Images rank, rank + world, rank + 2 world, ... of a data set: over all processes each once, whatever their number."""
    rank, world = rank_and_world()
    return dataset if world == 1 else Subset(dataset, range(rank, len(dataset), world))


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


def own_device(name: str) -> torch.device:
    """The device `name`; of "auto" and "cuda" the GPU of this process, by its number on the machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's architecture with the number of threads in use; "2 x ..." over two processes."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{device.type} {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
    world = rank_and_world()[1]
    return name if world == 1 else f"{world} x {name}"
