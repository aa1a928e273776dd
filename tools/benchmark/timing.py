"""Times of functions, A B A B: every round runs each of them in turn, so that a machine that drifts drifts for all.

On a GPU a call is measured by events around it. Before each the second-level cache is flushed by writing a buffer several times
its size, and the device is kept busy until the host has queued the call: what is measured is the device's work, not the host's
launches, which are given beside it. On a CPU it is the processor time of the process.
"""

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_FLUSHED = 256 * 2**20  # bytes; caches hold up to 126 MB
_BUSY_CYCLES = 2e6  # of the device's clock, a millisecond
_MOST_BUSY = 20.0  # milliseconds

Around = Callable[[], contextlib.AbstractContextManager]


class Repeats(NamedTuple):
    """warmup calls of each, then `rounds`; in each as many calls as fit into `seconds`, at least 1, at most `most`."""

    warmup: int = 20
    rounds: int = 7
    seconds: float = 0.03
    most: int = 5


class Stopwatch:
    """Measures one call on a device. isolated False, for whole models: a GPU's cache is not flushed, the host's time counts."""

    def __init__(self, device: torch.device, isolated: bool = True):
        self.gpu, self.isolated = device.type == "cuda", isolated
        self.buffer = torch.empty(_FLUSHED, dtype=torch.int8, device=device) if self.gpu and isolated else None

    def __call__(self, run: Callable[[], object], busy: float = 0.0) -> tuple[float, float]:
        """Milliseconds of the device and of the host. busy: for how many the device is kept busy first."""
        if not self.gpu:
            start, wall = time.process_time(), time.perf_counter()
            run()
            return (time.process_time() - start) * 1e3, (time.perf_counter() - wall) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if self.isolated:
            self.buffer.zero_()
            torch.cuda._sleep(int(min(busy, _MOST_BUSY) * _BUSY_CYCLES) + 1)
        wall = time.perf_counter()
        start.record()
        run()
        end.record()
        host = (time.perf_counter() - wall) * 1e3
        torch.cuda.synchronize()
        return start.elapsed_time(end), host


def warm_up(run: Callable[[], object], around: Around, watch: Stopwatch, plan: Repeats) -> tuple[int, float]:
    """Calls of a round, and for how many milliseconds the device has to be kept busy while the host queues one."""
    with around():
        found = [watch(run, 1.0) for _ in range(max(1, plan.warmup))]
    ms, host = (min(one[-3:]) for one in zip(*found, strict=True))
    return max(1, min(plan.most, int(plan.seconds * 1e3 / max(ms, 1e-6)))), 1.5 * host + 0.2


def one_round(
    run: Callable[[], object], around: Around, watch: Stopwatch, calls: int, busy: float
) -> list[tuple[float, float]]:
    """(device, host) milliseconds of the calls of one contender in one round."""
    with around():
        return [watch(run, busy) for _ in range(calls)]


def peak_bytes(run: Callable[[], object], around: Around, device: torch.device) -> int | None:
    """What one call allocates at its peak beyond what was there before; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with around():
        kept = run()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
