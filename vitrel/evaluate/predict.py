"""From batches to predictions: forward passes on a device, with their time and memory, and attention statistics.

Passes that run out of memory are repeated with smaller batches. No other stage runs a model.
"""

import contextlib
import ctypes
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms.functional import center_crop

from vitrel.common.extras import optional_import
from vitrel.common.resources import out_of_memory
from vitrel.common.sizes import Size
from vitrel.data import BadImage
from vitrel.evaluate.checkpoint import backbone_of
from vitrel.evaluate.policies import with_policy
from vitrel.evaluate.prepare import halved, window_places
from vitrel.evaluate.results.statistics import TAIL
from vitrel.evaluate.sweep import Row
from vitrel.inspect.attention import attention_statistics_of, position_shares
from vitrel.weights.record import state_hash

with optional_import():
    from scipy.special import stdtrit


STATISTICS = ("attention_entropy", "attention_span", "attention_distance", "attention_distance_share")


MIB = 2**20


class AtSizes:
    """Context in which a model is prepared for one image size after another, under one policy. at(size) returns the model.

    On exit the model is on the CPU. `states` has the state-dict hash of every copy that was made for a size of a model of
    another library.

    Args:
        window: (h, w) in pixels: the model is made for this size, and slides over images of any other.
    """

    def __init__(self, model: nn.Module, policy: str, device: torch.device, window: Size | None = None) -> None:
        self.model, self.policy, self.device, self.window = model, policy, device, window
        self.states: list[str] = []
        self._size: Size | None = None

    def __enter__(self) -> "AtSizes":
        self.model.to(self.device)
        return self

    def __exit__(self, *raised: object) -> None:
        self._leave()
        self.model.cpu()

    def __call__(self, size: Size) -> nn.Module:
        """Return the model prepared for `size` (h, w) pixels; valid until the next call with another size."""
        if size != self._size:
            self._leave()
            self._current, self._size = with_policy(self.model, self.window or size, self.policy).to(self.device), size
        return self._current if self.window is None else SlidingWindow(self._current, self.window)

    def _leave(self) -> None:
        if self._size is not None and self._current is not self.model and backbone_of(self.model) is None:
            self.states.append(state_hash(self._current))  # a Backbone's copy shares all tensors
        self._size = None


class SlidingWindow(nn.Module):
    """A segmentation model that sees windows of its training size (h, w); where they overlap, their logits are averaged.

    An image smaller than a window is in the middle of it, with the mean color around.
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


class Runner:
    """Forward passes on batches of any length, in chunks of at most `batch_size`, which is halved when memory runs out.

    Attributes: `oom` counts the halvings; `passes` has (images, seconds) of every successful forward pass, without a first
    warm-up pass.

    Args:
        model: a model for one size, or `AtSizes`, which prepares it for the size of each batch.
        compile: run through torch.compile; short batches are then padded, because another batch size would be compiled again.
        prepare: a function applied to the pixels of each chunk.
    """

    def __init__(
        self,
        model: nn.Module | AtSizes,
        device: torch.device,
        batch_size: int,
        dtype: str = "float32",
        compile: bool = False,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if compile:
            torch.compiler.reset()  # otherwise a model runs uncompiled, without notice, after 8 sizes
        self.model: Any = torch.compile(model) if compile else model
        self.device, self.batch_size, self.dtype, self.compile = device, batch_size, dtype, compile
        self.prepare = prepare
        self._compiled_batch = 0
        self.oom = 0
        self.passes: list[tuple[int, float]] = []
        self._warm = False

    @property
    def seen(self) -> int:
        """Number of images in `passes`."""
        return sum(n for n, _ in self.passes)

    @property
    def seconds(self) -> float:
        """Time of `passes`."""
        return sum(seconds for _, seconds in self.passes)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] -> logits [B, K], float32 on the CPU. MemoryError when a single image does not fit in memory."""
        if not self._warm:
            self._warm = True
            self(pixels[: self.batch_size if self.device.type == "cuda" or self.compile else 1])
            self.passes.clear()
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
        n = len(chunk)
        if self.prepare is not None:
            chunk = self.prepare(chunk)
        if self.compile:
            self._compiled_batch = min(max(self._compiled_batch, n), self.batch_size)
            chunk = torch.cat((chunk, chunk[:1].expand(self._compiled_batch - n, -1, -1, -1)))
        model = self.model((chunk.shape[-2], chunk.shape[-1])) if isinstance(self.model, AtSizes) else self.model
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            logits = model(chunk.to(self.device, non_blocking=True))
        logits = logits[:n].float().cpu()  # synchronizes with the GPU
        self.passes.append((n, time.perf_counter() - start))
        return logits

    def _halve(self, failed: int) -> None:
        self.batch_size = halved(min(failed, self.batch_size), "use a smaller size, or another device")
        self.oom += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def predictions(runner: Runner, batches: Iterable[tuple[Tensor, list[Any]]]) -> Iterator[tuple[list[Any], list[bool], Tensor]]:
    """Yield, for every batch of (pixels, targets), the targets of the images that could be read, whether each of the batch
    could, and the logits of those that could. Targets of images that could not be read are None.
    """
    for pixels, targets in batches:
        read = [target is not None for target in targets]
        pixels = pixels if all(read) else pixels[torch.tensor(read)]  # indexing would copy
        yield [target for target in targets if target is not None], read, runner(pixels) if len(pixels) else pixels


def half_of_rate(passes: Sequence[tuple[int, float]]) -> float:
    """Return half of the 95 % interval of images per second, over passes of (images, seconds); NaN with fewer than two.

    The rate is a ratio of sums, so its variance is that of the ratio estimator (Cochran 1977, section 6.4).
    """
    if len(passes) < 2:
        return float("nan")
    images, seconds = np.array(passes).T
    rate, k = images.sum() / seconds.sum(), len(passes)
    error = (k / (k - 1) * ((images - rate * seconds) ** 2).sum()) ** 0.5 / seconds.sum()
    return float(stdtrit(k - 1, 1 - TAIL) * error)


def reset_peak(device: torch.device) -> None:
    """Reset the peak that `peak_mb` reads. On Linux it is the resident peak; other systems cannot reset it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # glibc keeps freed memory (of a training before, for example); new allocations there would not raise the peak
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: torch.device) -> tuple[float, str]:
    """Return the peak memory since `reset_peak` in MiB, and its kind: tensors on the GPU, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB, "cuda allocated"
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024, "process resident"
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, "process resident since start"


def translate(pixels: Tensor, by: int) -> Tensor:
    """Translate images [B, C, H, W] by `by` pixels down and right; the upper and left edge pixels are repeated."""
    height, width = pixels.shape[-2:]
    down, right = (torch.arange(side, device=pixels.device).sub(by).clamp(min=0) for side in (height, width))
    return pixels[..., down[:, None], right]


def attention_columns(at: AtSizes, images: Iterable[Tensor], device: torch.device) -> Row:
    """Return attention statistics, means over images [3, h, w], and the share of position, of the first image alone.

    They are NaN where unavailable.
    """
    row, by_image = dict.fromkeys((*STATISTICS, "position_share"), float("nan")), list[dict[str, float]]()
    try:
        for image in images:  # one at a time: attention matrices take memory
            model, pixels = at((image.shape[-2], image.shape[-1])), image[None].to(device)
            if not by_image:
                row["position_share"] = _position_share(model, pixels)
            by_image.append(attention_statistics_of(model, pixels))
    except BadImage:
        raise
    except ValueError:
        return row
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return row
    if by_image:
        mean = {name: sum(values[name] for values in by_image) / len(by_image) for name in STATISTICS}
        mean["attention_span"] = torch.tensor(mean["attention_entropy"]).exp().item()
        row |= {name: round(value, 4) for name, value in mean.items()}
    return row


def _position_share(model: nn.Module, pixels: torch.Tensor) -> float:
    """The column position_share of an image [1, 3, h, w]; NaN where it is not known or memory does not suffice."""
    try:
        return round(max(position_shares(model, pixels).values(), default=float("nan")), 5)
    except ValueError:
        return float("nan")
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return float("nan")
