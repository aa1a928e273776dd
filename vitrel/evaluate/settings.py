"""Settings of an evaluation (data, sizes, protocols, policies, device, precision, batch size), and the processes that share it.

Several processes, started by torchrun or by `shared_with`, each evaluate a share of the images. They exchange only counts,
sums, predictions and error texts, so the gloo backend serves GPUs as well as CPUs. When one process fails, all end with its
message instead of waiting for it.
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
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitrel.common.exits import end_with_parent
from vitrel.common.peers import Peers
from vitrel.common.sizes import Budget, Size, format_size
from vitrel.common.user_modules import import_modules

PROTOCOLS = ("scale", "canvas", "native")
DEFAULT_PROTOCOLS = PROTOCOLS[:2]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Settings of an evaluation; invalid values and combinations raise ValueError.

    data: a data set as `create_dataset` takes it. sizes: (height, width) in pixels, or budgets of patch tokens, each evaluated
    at the largest square of whole patches within the budget. protocols: how images fill a size, of "scale", "canvas" and
    "native"; "native" takes a size as a budget: every image keeps its aspect ratio and has at most the patch tokens of that
    size. policies: evaluate only these policies of windows and encodings (None: all; a model with none of them keeps its
    default). n: number of images (None: all), drawn with the seed `data_seed`. batch_size: halved when memory runs out.
    workers: processes that decode images. device: "auto", "cpu", "cuda", "cuda:1". dtype: "float32" or, on a GPU, "bfloat16"
    (autocast). on_bad_image: "raise" ends the evaluation at an unreadable image, "count" leaves it out and counts it.
    follow_links: also search folders that are linked inside class folders. val_fraction: share of the images to evaluate where
    the data has no evaluation split, as in `vitrel.data.Reading`. crop_pct: shares of the resized image that the
    centre crop keeps, each evaluated (None: the model's default). translations: numbers of pixels by which the content is
    translated down and right at the training size, each evaluated. attention_n: number of images for the attention statistics,
    0 for none. border_leak: test whether tokens see the opposite border (models with windows; seconds per size). skip:
    combinations to leave out, such as "192x192 canvas". compile: run the models through torch.compile. optimize: run them
    through vitrel.optimize (CPU only); rows made without it stay valid, because it changes only speed and memory.
    """

    data: str
    sizes: tuple[Size | Budget, ...]
    protocols: tuple[str, ...] = DEFAULT_PROTOCOLS
    policies: tuple[str, ...] | None = None
    n: int | None = None
    data_seed: int = 0
    batch_size: int = 128
    workers: int = 0
    device: str = "auto"
    dtype: str = "float32"
    on_bad_image: str = "raise"
    follow_links: bool = False
    val_fraction: float | None = None
    crop_pct: tuple[float, ...] | None = None
    translations: tuple[int, ...] = ()
    attention_n: int = 16
    border_leak: bool = True
    skip: tuple[str, ...] = ()
    compile: bool = False
    optimize: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "protocols", tuple(dict.fromkeys(self.protocols)))  # a duplicate would count as a second seed
        if not self.protocols:
            raise ValueError(f"at least one protocol is needed: {', '.join(PROTOCOLS)}")
        if unknown := [name for name in self.protocols if name not in PROTOCOLS]:
            raise ValueError(f"unknown protocol {unknown[0]!r}: choose from {', '.join(PROTOCOLS)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is float32 or bfloat16, got {self.dtype!r}")
        checked_device(self.device)
        if self.dtype == "bfloat16" and self.torch_device.type != "cuda":
            raise ValueError("bfloat16 evaluation needs a GPU; use float32 on the CPU")
        if self.optimize and (self.compile or self.torch_device.type != "cpu"):
            raise ValueError(
                "optimize works on the CPU and without torch.compile: leave out optimize, or use cpu without compile"
            )
        if self.compile and "native" in self.protocols:
            raise ValueError(
                "the native protocol has many image shapes, and torch.compile would compile for each: leave out one of the two"
            )
        if self.crop_pct is not None and self.protocols == ("native",):
            raise ValueError("the native protocol does not crop: leave crop_pct out")
        if self.on_bad_image not in ("raise", "count"):
            raise ValueError(f"on_bad_image is raise or count, got {self.on_bad_image!r}")
        for name, least in (("batch_size", 1), ("attention_n", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        object.__setattr__(self, "skip", tuple(self.skip))
        combinations = {f"{format_size(size)} {protocol}" for size in self.sizes for protocol in self.protocols}
        if unknown := sorted({*self.skip} - combinations):
            raise ValueError(
                f"skip names {unknown[0]!r}, but takes a size and a protocol of this evaluation, such as '192x192 canvas'"
            )
        self._set_numbers("crop_pct", float, lambda share: 0 < share <= 1, "shares of the image, above 0 and at most 1")
        self._set_numbers("translations", int, lambda pixels: pixels >= 0, "whole numbers of pixels, 0 or more")

    def _set_numbers(self, name: str, kind: type, is_valid: Any, description: str) -> None:
        """Set the field `name` to a tuple of distinct numbers; ValueError, with the description, for an invalid one."""
        values = getattr(self, name)
        if values is None:
            return
        values = (values,) if isinstance(values, (int, float)) else tuple(values)
        types = (int, float) if kind is float else int
        wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, types) or not is_valid(value)]
        if wrong:
            raise ValueError(f"{name} takes {description}, got {wrong[0]!r}")
        object.__setattr__(self, name, tuple(dict.fromkeys(map(kind, values))))

    @property
    def torch_device(self) -> torch.device:
        """The device of this process; see `local_device`."""
        return local_device(self.device)


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
_peers = Peers({})  # the other processes of the group on this machine, where this one watches them


class OtherProcessError(RuntimeError):
    """Raised in this process because another one failed; the message is that process's error."""


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Context with the process group of torchrun's processes; does nothing in a single process (WORLD_SIZE 1)."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    if torch.cuda.is_available() and local_device("cuda").index < torch.cuda.device_count():  # else `Sweep` raises
        torch.cuda.set_device(local_device("cuda"))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        with _watching(Peers.of_group()):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def shared_with(others: int, work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Context that runs its block as process 0 beside `others` new processes, each of which runs `work(*arguments)` and ends.

    PyTorch's CPU threads are divided among the processes: small models run faster with fewer threads each. work: a module-level
    function whose arguments can be pickled. With others = 0 no process is started. OtherProcessError where a process dies
    before all are connected.
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
                peers = _init_group(init_method, 0, world)
            except RuntimeError as error:
                raise OtherProcessError(_ENDED_EARLY) from error
            with _watching(peers):
                yield
        finally:
            torch.set_num_threads(threads)
            if dist.is_initialized():
                dist.destroy_process_group()
            for process, _ in started:
                process.join(timeout=1)
                process.terminate()
                process.join()


@contextlib.contextmanager
def _watching(peers: Peers) -> Iterator[None]:
    """Context in which peers that stay stopped are killed, so that `on_all` fails instead of waiting for them."""
    global _peers
    _peers, over = peers, threading.Event()
    threading.Thread(target=peers.watch, args=(over,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


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
            stopped = [f"process {rank} of {world} {_peers.why_stopped(rank)}" for rank in _peers.stopped]
            raise OtherProcessError("; ".join(stopped) or _ENDED_EARLY) from error
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


def _init_group(init_method: str, rank: int, world: int) -> Peers:
    if "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo fails where the host's name does not resolve
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world, timeout=_TIMEOUT)
    return Peers.of_group()
