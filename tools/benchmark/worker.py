"""Workers: each runs one contender in a new process with a separate environment, compilations and memory.

Workers take turns (A B A B) while the rest wait idle, so a machine that changes speed affects all alike. A call is timed in CPU
time of the process. Run as a module, this file is the worker process.
"""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tools.benchmark.samples import ROOT

K = TypeVar("K")


class Repeats(NamedTuple):
    """Numbers of calls: `warmup`, then `rounds`, each with as many calls as fit into `seconds`, from 1 to `most`."""

    warmup: int = 20
    rounds: int = 7
    seconds: float = 0.03
    most: int = 5


def timed(run: Callable[[], object]) -> float:
    """Return milliseconds of a call, CPU time of the process."""
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e3


class WorkerFailed(RuntimeError):
    """An error that a worker raised, or its end; the text says which."""


class Worker:
    """A new Python process that runs one contender; a context manager.

    build: "module:function". function(**args) returns the call: called without arguments, it does the timed work once and
    returns {name: Tensor}. Optional attributes: set(**args) changes the next calls, checked(returned) gives the tensors for a
    gate. env is set before Python starts. patience: seconds for one answer, after which the process counts as hung. Every
    method raises WorkerFailed if the contender raises, dies or hangs.
    """

    def __init__(
        self,
        build: str,
        args: dict[str, Any],
        threads: int = 1,
        env: dict[str, str] | None = None,
        patience: float = 600.0,
    ):
        self.build, self.patience = build, patience
        self._order = (build, args, threads)
        self._folder = tempfile.TemporaryDirectory(prefix="vitrel-worker-")
        self._said = Path(self._folder.name) / "stderr"
        self._link, child = Pipe()
        count, cache = str(threads), self._folder.name  # empty caches, so the first call includes compilation
        environment = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of processes
        # glibc keeps freed memory. By itself it decides by the order of earlier allocations whether it gives large blocks
        # back, and the page faults of asking for them again took 0 or 0.1 of the 0.8 s of a ViT-S at batch 8, by chance.
        environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
        with self._said.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.benchmark.worker", str(child.fileno())],
                env=os.environ | environment | {"TRITON_CACHE_DIR": f"{cache}/triton"} | (env or {}),
                cwd=ROOT,
                pass_fds=[child.fileno()],
                stdout=log,
                stderr=log,
                start_new_session=True,  # compilers that it starts end with it
            )
        child.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> dict[str, float]:
        """Build the call and run it once; return first_call_s."""
        return self._ask("start", *self._order)

    def outcome(self) -> dict[str, Tensor]:
        """Return the last call's tensors for the gate."""
        path = self._ask("outcome", f"{self._folder.name}/outcome.pt")
        return torch.load(path, weights_only=True)

    def run(self, calls: int) -> list[float]:
        """Return milliseconds of each of `calls` calls."""
        return self._ask("run", calls)

    def set(self, first: bool = True, **args: Any) -> dict[str, float]:
        """Run call.set(**args), for example to change the size, and if `first` a call; return its first_call_s."""
        return self._ask("set", first, args)

    def memory(self) -> dict[str, Any]:
        """Return call_ms, the time of a further call, and call_bytes, the most that its tensors hold at once in addition.

        Also launches: the operators of a call, if the call counts them.
        """
        return self._ask("memory")

    def close(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()
        self._folder.cleanup()

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            self._link.send((name, args))
            if not self._link.poll(self.patience):
                raise WorkerFailed(f"{name!r} did not end within {self.patience:.0f} s")
            fine, answer = self._link.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            raise WorkerFailed(f"the process ended with status {status}: {self._said.read_text()[-500:]}") from None
        if not fine:
            raise WorkerFailed(answer)
        return answer


def take_turns(
    runs: Mapping[K, Callable[[int], list[float]]], plan: Repeats
) -> tuple[dict[K, list[list[float]]], dict[K, WorkerFailed]]:
    """Warm up and time contenders in turns; return {contender: ms by round and call}, and {contender: failure}.

    runs: {contender: run}; run(calls) makes so many calls and returns milliseconds of each, or their mean.
    """
    times: dict[K, list[list[float]]] = {name: [] for name in runs}
    failed: dict[K, WorkerFailed] = {}
    calls: dict[K, int] = {}
    for turn in range(plan.rounds + 1 if plan.rounds else 0):
        for name, run in runs.items():
            if name in failed:
                continue
            try:
                timings = run(calls[name] if turn else max(1, plan.warmup))
            except WorkerFailed as error:
                failed[name] = error
                del times[name]
                continue
            if turn:
                times[name].append([round(ms, 6) for ms in timings])
            else:
                fastest = max(min(timings), 1e-6)
                calls[name] = max(1, min(plan.most, int(plan.seconds * 1e3 / fastest)))
    return times, failed


class _Served:
    """The requests that a worker process answers: one method each."""

    def start(self, build: str, args: dict[str, Any], threads: int) -> dict[str, float]:
        torch.set_num_threads(threads)
        self.kept = None
        module, _, function = build.partition(":")
        self.call: Callable[[], dict[str, Tensor]] = getattr(importlib.import_module(module), function)(**args)
        gc.collect()
        return {"first_call_s": self._first()}

    def outcome(self, path: str) -> str:
        tensors = getattr(self.call, "checked", dict)(self.kept)
        torch.save({name: x.detach().cpu() for name, x in tensors.items()}, path)
        return path

    def set(self, first: bool, args: dict[str, Any]) -> dict[str, float]:
        self.kept = None
        self.call.set(**args)
        gc.collect()
        return {"first_call_s": self._first()} if first else {}

    def _first(self) -> float:
        """Return the seconds of processors of one call, with those of compilers it starts."""
        start = sum(os.times()[:4])
        self._once()
        return sum(os.times()[:4]) - start

    def run(self, calls: int) -> list[float]:
        return [timed(self._once) for _ in range(calls)]

    def memory(self) -> dict[str, Any]:
        self.kept = None  # if it were freed within the call, the call would seem to take less
        call_ms = timed(self._once)
        self.kept = None
        call_bytes = most_bytes(self._once, torch.device("cpu"))
        count = getattr(self.call, "launches", lambda: None)()
        return {"call_bytes": call_bytes, "call_ms": call_ms, "launches": count}

    def _once(self) -> None:
        self.kept = None  # gradients of the last call are not held through the next
        self.kept = self.call()


def most_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that tensors hold at once during `run()`, in addition to those held before it.

    On a CPU the profiler does not notice when an earlier tensor is freed, so `run` should free none.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate((event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())), initial=0))


def _serve(link: Connection) -> None:
    served = _Served()
    while True:
        try:
            name, args = link.recv()
        except EOFError:  # the parent is gone
            return
        try:
            answer = True, getattr(served, name)(*args)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"[:800]
        link.send(answer)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
