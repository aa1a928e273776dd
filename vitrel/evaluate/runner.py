"""Forward passes that survive a lack of memory, timed, and the peak of memory they took."""

import contextlib
import ctypes
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

MIB = 2**20
SIGNS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    # of loader processes: what they share is full, or the system has ended one
    "out of shared memory",
    "insufficient shared memory",
    "unable to allocate shared memory",
    "unable to resize file",
    "killed by signal: killed",
)


def out_of_memory(error: BaseException) -> bool:
    """True for torch's and Python's out-of-memory errors; PyTorch reports a failed CPU allocation as a plain RuntimeError."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def halved(batch_size: int, way_out: str) -> int:
    """The batch size to go on with where one ran out of memory. MemoryError with the way out where it was one image."""
    if batch_size == 1:
        raise MemoryError(f"one image does not fit in memory: {way_out}")
    return batch_size // 2


def reset_peak(device: torch.device) -> None:
    """Starts a new peak measurement. On Linux the kernel forgets the process's resident peak; elsewhere it cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # glibc keeps what was freed, training before evaluation above all, and new work would fit in unseen
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: torch.device) -> tuple[float, str]:
    """Peak since `reset_peak` in MiB, and what it counts: tensors on the GPU, or the whole process in RAM (images included)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB, "cuda allocated"
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024, "process resident"
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, "process resident since start"


class Runner:
    """Runs a model on batches of any length, in pieces of `batch_size`; one that does not fit in memory halves it, for good.

    `oom` counts the halvings; `seen` and `seconds` the images and the time of the forward passes that succeeded, after a
    first one that is not counted. compile: by torch.compile; short batches are then filled up, which would compile anew.
    prepare: what is done to the pixels of a piece first.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        batch_size: int,
        dtype: str = "float32",
        compile: bool = False,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if compile:
            torch.compiler.reset()  # after 8 sizes of one model it would silently run uncompiled
        self.model = torch.compile(model) if compile else model
        self.device, self.batch_size, self.dtype, self.compile = device, batch_size, dtype, compile
        self.prepare = prepare
        self._width = 0
        self.oom = self.seen = 0
        self.seconds = 0.0
        self._warm = False

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [B, 3, H, W] -> logits [B, K] in float32 on the CPU. MemoryError when even one image does not fit."""
        if not self._warm:
            self._warm = True
            self(pixels[: self.batch_size if self.device.type == "cuda" or self.compile else 1])
            self.seen, self.seconds = 0, 0.0
        pieces: list[Tensor] = []
        start = 0
        while start < len(pixels):
            piece = pixels[start : start + self.batch_size]
            try:
                logits = self._forward(piece)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                logits = None
            if logits is None:
                # outside the handler: the traceback would keep the failed pass's tensors alive
                self._halve(len(piece))
                continue
            pieces.append(logits)
            start += len(piece)
        return torch.cat(pieces)

    @torch.inference_mode()
    def _forward(self, piece: Tensor) -> Tensor:
        n = len(piece)
        if self.prepare is not None:
            piece = self.prepare(piece)
        if self.compile:
            self._width = min(max(self._width, n), self.batch_size)
            piece = torch.cat((piece, piece[:1].expand(self._width - n, -1, -1, -1)))
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            logits = self.model(piece.to(self.device, non_blocking=True))
        logits = logits[:n].float().cpu()  # waits for the GPU
        self.seconds += time.perf_counter() - start
        self.seen += n
        return logits

    def _halve(self, failed: int) -> None:
        self.batch_size = halved(min(failed, self.batch_size), "use a smaller size, or another device")
        self.oom += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
