"""From batches to the results of every image: forward passes on a device, their speed and memory, and attention statistics.

Passes that run out of memory are repeated with smaller batches. No other stage runs a model.
"""

import contextlib
import ctypes
import math
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms.functional import center_crop

from vitrel.common.resources import out_of_memory
from vitrel.common.sizes import Size
from vitrel.data import BadImage
from vitrel.evaluate.images import Batch
from vitrel.evaluate.policies import with_policy
from vitrel.inspect.attention import attention_statistics_of, position_shares
from vitrel.tasks import Kept, Row

STATISTICS = ("attention_entropy", "attention_span", "attention_distance", "attention_distance_share")
MIB = 2**20
ATTENDED = 1 << 18  # pixels of the images whose attention is in memory at a time
ROUNDS = 3  # timed passes of each model, in turn


class AtSizes:
    """Context manager `at` that prepares a model for one image size after another, under one policy: at(size) returns it.

    On entry the model is moved to `device`, on exit to the CPU.

    Args:
        policy: see `with_policy`.
        window: (h, w) in pixels: the model is made for this size, and slides over images of any size; None: it does not.
    """

    def __init__(self, model: nn.Module, policy: str, device: torch.device, window: Size | None = None) -> None:
        self.model, self.policy, self.device, self.window = model, policy, device, window
        self._size: Size | None = None

    def __enter__(self) -> "AtSizes":
        self.model.to(self.device)
        return self

    def __exit__(self, *raised: object) -> None:
        self.model.cpu()

    def __call__(self, size: Size) -> nn.Module:
        """Return the model prepared for `size` (h, w) pixels, or a `SlidingWindow`; valid until a call with another size."""
        if size != self._size:
            self._current, self._size = with_policy(self.model, self.window or size, self.policy).to(self.device), size
        return self._current if self.window is None else SlidingWindow(self._current, self.window)


class SlidingWindow(nn.Module):
    """Segment images of any size with a model that sees windows of its training size.

    Windows overlap by half, and where they overlap the mean of their logits is taken. An image smaller than a window is in the
    middle of it, padded with 0, the mean color of normalized images.

    Args:
        model: maps normalized images [B, 3, h, w] to logits [B, K, h, w].
        window: (h, w) in pixels.
    """

    def __init__(self, model: nn.Module, window: Size) -> None:
        super().__init__()
        self.model, self.window = model, window

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits [B, K, H, W] of images [B, 3, H, W]."""
        (h, w), (height, width) = self.window, pixels.shape[-2:]
        size = max(h, height), max(w, width)
        pixels = center_crop(pixels, list(size))  # pads with 0, the mean color after normalization
        total, times = None, torch.zeros(size, device=pixels.device)
        for top, left in window_places(size, self.window):
            logits = self.model(pixels[..., top : top + h, left : left + w])
            total = logits.new_zeros(*logits.shape[:2], *size) if total is None else total
            total[..., top : top + h, left : left + w] += logits
            times[top : top + h, left : left + w] += 1
        top, left = (size[0] - height) // 2, (size[1] - width) // 2
        return (total / times)[..., top : top + height, left : left + width]


def window_places(size: Size, window: Size) -> list[tuple[int, int]]:
    """Return the upper left corners of windows of `window` (h, w) over an image of `size`, half overlapping, row by row.

    Corners and sizes are in pixels. The last window along an axis ends with the image, so it may overlap more. Along an axis on
    which the image is not larger than the window there is one, at 0.
    """
    starts = [
        [*range(0, side - own, max(1, own // 2)), max(0, side - own)] for side, own in zip(size, window, strict=True)
    ]  # the last one ends with the image
    return [(top, left) for top in starts[0] for left in starts[1]]


class Runner:
    """Forward passes on batches of any length, in chunks of at most `batch_size`, which is halved when memory runs out.

    Args:
        model: a model for one size, or `AtSizes`, which prepares it for the size of each batch.
        dtype: "float32", or "bfloat16" for autocast.
    """

    def __init__(self, model: nn.Module | AtSizes, device: torch.device, batch_size: int, dtype: str = "float32") -> None:
        self.model, self.device, self.batch_size, self.dtype = model, device, batch_size, dtype

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits [B, K, ...] of pixels [B, 3, H, W], float32 on the CPU; MemoryError if one image does not fit."""
        outputs: list[Tensor] = []
        start = 0
        while start < len(pixels):
            chunk = pixels[start : start + self.batch_size]
            try:
                logits = self._forward(chunk)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                logits = None
            if logits is None:
                # outside the handler: the traceback would keep the failed pass's tensors alive
                self._halve(len(chunk))
                continue
            outputs.append(logits)
            start += len(chunk)
        return torch.cat(outputs)

    @torch.inference_mode()
    def _forward(self, chunk: Tensor) -> Tensor:
        model = self.model((chunk.shape[-2], chunk.shape[-1])) if isinstance(self.model, AtSizes) else self.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return model(chunk.to(self.device, non_blocking=True)).float().cpu()  # synchronizes with the GPU

    def _halve(self, failed: int) -> None:
        """Set `batch_size` to half of the `failed` images that did not fit, and free cached GPU memory; MemoryError for one."""
        if failed == 1:
            raise MemoryError("one image does not fit in memory: use a smaller size, or another device")
        self.batch_size = failed // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def predict(
    runner: Runner,
    batches: Iterable[Batch],
    order: Sequence[int],
    keep: Callable[[Tensor, list[Any]], Mapping[str, Any]],
    advance: Callable[[float], None] = lambda share: None,
) -> Kept:
    """Run a model over batches, and return the results of all images, in the order of their indices.

    Images whose target is None, which could not be read, are left out: zeros in the results, and False in `seen`.

    Args:
        order: index of each image in the data, in the order of the batches.
        keep: function of logits and targets of a batch that returns the results of its images, {name: [B, ...]}.
        advance: called after every batch with the part of all images that it is, 0 to 1.
    """
    read: list[bool] = []
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for pixels, targets in batches:
        flags = [target is not None for target in targets]
        read += flags
        if any(flags):
            pixels = pixels if all(flags) else pixels[torch.tensor(flags)]  # indexing would copy
            for name, values in keep(runner(pixels), [target for target in targets if target is not None]).items():
                found[name].append(np.asarray(values))
        advance(len(flags) / len(order))
    at, seen = np.asarray(order).argsort(), np.asarray(read, bool)
    return Kept({name: _spread(np.concatenate(values), seen)[at] for name, values in found.items()}, seen[at])


def _spread(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return values of all images: `values` for those that were read (`seen`), and zeros for the others."""
    whole = np.zeros((len(seen), *values.shape[1:]), values.dtype)
    whole[seen] = values
    return whole


def joined(parts: Sequence[Kept]) -> Kept:
    """Join the results of several processes, by rank: rank r of w has the images r, r + w, r + 2 w, ..."""
    world, seen = len(parts), np.zeros(sum(len(part.seen) for part in parts), bool)
    known = next((part.arrays for part in parts if part.arrays), {})  # a process may have read none of its images
    whole = {name: np.zeros((len(seen), *values.shape[1:]), values.dtype) for name, values in known.items()}
    for rank, part in enumerate(parts):
        seen[rank::world] = part.seen
        for name, values in part.arrays.items():
            whole[name][rank::world] = values
    return Kept(whole, seen)


@torch.inference_mode()
def speeds(
    models: Mapping[tuple, Callable[[Tensor], Tensor]], size: Size, batch_size: int, device: torch.device, dtype: str
) -> dict[tuple, float]:
    """Return {key: images per second} of models at one size: the median of ROUNDS passes of one batch, after one to warm up.

    The models take turns, so that other load of the machine slows all of them alike. The batch is halved where memory does not
    suffice; NaN for all models where it does not suffice for one image.

    Args:
        models: {key: a model on the device that is prepared for the size}.
        size: (h, w) in pixels.
    """
    seconds: dict[tuple, list[float]] = {name: [] for name in models}
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    try:
        for name, model in [*models.items()] * (ROUNDS + 1):
            pixels = image.to(device).repeat(batch_size, 1, 1, 1)
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                model(pixels)[:1].float().cpu()  # waits for the GPU
            seconds[name].append(time.perf_counter() - start)
        return {name: round(batch_size / median(found[1:]), 2) for name, found in seconds.items()}
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    # outside the handler: the traceback would keep the failed pass's tensors alive
    return speeds(models, size, batch_size // 2, device, dtype) if batch_size > 1 else dict.fromkeys(models, math.nan)


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory that `peak_mb` reads, on a GPU and under Linux; other systems cannot reset that of a process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # glibc keeps freed memory (of a training before, for example); new allocations there would not raise the peak
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: torch.device) -> float:
    """Return the peak memory since `reset_peak` in MiB: of tensors on the GPU, else the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    with contextlib.suppress(OSError):  # ru_maxrss of a process that another started begins at the other's peak
        status = Path("/proc/self/status").read_text()
        if found := re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE):
            return int(found[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def attention_columns(at: AtSizes, images: Iterable[Tensor], device: torch.device) -> Row:
    """Return {column: value} of STATISTICS, means over images [3, h, w], and of position_share, of the first image alone.

    They are columns of results.csv. attention_span is the exp of the mean entropy, position_share that of the layer where it
    is largest. NaN where unavailable.
    """
    row, by_image = dict.fromkeys((*STATISTICS, "position_share"), math.nan), list[dict[str, float]]()
    with _unless_unavailable():
        for (height, width), group in groupby(images, key=lambda image: tuple(image.shape[-2:])):
            several, model = [*group], at((height, width))
            most = max(1, ATTENDED // (height * width))
            for start in range(0, len(several), most):
                pixels = torch.stack(several[start : start + most]).to(device)
                if not by_image:
                    with _unless_unavailable():
                        shares = position_shares(model, pixels[:1]).values()
                        row["position_share"] = round(max(shares, default=math.nan), 5)
                by_image += [attention_statistics_of(model, pixels)] * len(pixels)
        if by_image:
            mean = {name: sum(values[name] for values in by_image) / len(by_image) for name in STATISTICS}
            mean["attention_span"] = torch.tensor(mean["attention_entropy"]).exp().item()
            row |= {name: round(value, 4) for name, value in mean.items()}
    return row


@contextlib.contextmanager
def _unless_unavailable() -> Iterator[None]:
    """Context manager that ends silently at a ValueError (not BadImage), of attention that cannot be read, or out of memory."""
    try:
        yield
    except BadImage:
        raise
    except (ValueError, RuntimeError, MemoryError) as error:
        if not (isinstance(error, ValueError) or out_of_memory(error)):
            raise
