"""Cost against size: time and memory of global attention from 196 to 16384 tokens, every contender in processes of its own.

Memory is what one call takes at its peak beyond what is held before it, outputs and gradients included; to it comes the index
[N, N] that some peers keep. No process may take more than `memory_limit`: what needs more is a row, not a machine that stalls.
"""

import re
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.benchmark.cases import Case, Problem, make_problem
from tools.benchmark.contenders import FLOOR, GATHERED, Contender, contenders, global_flex
from tools.benchmark.gates import CAPS, FLOORS, Outcome, outcome, relative_errors
from tools.benchmark.processes import Worker, WorkerFailed
from tools.benchmark.samples import Samples
from vitrel.grid import Grid
from vitrel.ops import BACKENDS
from vitrel.ops.reference import rotated
from vitrel.position.terms import Terms

SIZES = ((14, 14), (28, 28), (24, 72), (56, 56), (64, 64), (96, 96), (128, 128))
QUICK_SIZES = ((4, 6), (8, 8))
MODES_OF_SIZES = ("forward", "training")
TURN = "sizes in turn"
_WHOLE = 2000  # tokens up to which outputs and gradients are checked, beyond them the outputs of the last _ROWS
_ROWS = 64
_QUICK_MS = 3000  # of a call that is made more than once
_BUILD = "tools.benchmark.sizes:sized_call"
_STATM = Path("/proc/self/statm")  # its first number are the pages of the address space
_ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of processes


class Sized(NamedTuple):
    """One line of the plot: the contender of that name with an encoding."""

    name: str
    encoding: str = "table"

    @property
    def label(self) -> str:
        """How rows and tables call it."""
        return self.name if self.encoding == "table" else f"{self.name}, {self.encoding}"

    def kept_bytes(self, tokens: int) -> int:
        """Of the index [N, N] of int64."""
        return 8 * tokens**2 if self._keeps else 0

    @property
    def _keeps(self) -> bool:
        return self.name.startswith(("softmax", GATHERED))


def lineup(gpu: bool, quick: bool) -> list[Sized]:
    """Who is measured, ours first."""
    if quick:
        return [Sized("auto"), Sized(GATHERED)]
    ours = [name for name in ("triton" if gpu else "bias_by_row",) if name in BACKENDS]
    peers = ["sdpa", GATHERED, f"{GATHERED} compiled", "flex" if gpu else "flex compiled", "softmax", FLOOR]
    return [Sized("auto"), *map(Sized, ours), Sized("auto", "factorised"), Sized("auto", "rope"), *map(Sized, peers)]


def sized_case(encoding: str, size: tuple[int, int]) -> Case:
    """One image of ViT-S, h x w tokens without prefix."""
    h, w = size
    return Case(f"size {h}x{w}", encoding, Grid(h, w), 1, 6, 64)


def sized_call(
    name: str, encoding: str, size: tuple[int, int], training: bool, device: str, limit: int
) -> Callable[[], Outcome]:
    """What a worker runs: a call of a contender, once its process can take no more than `limit` bytes beyond what it has."""
    if device == "cpu":
        limit += int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    one, case = Sized(name, encoding), sized_case(encoding, size)
    problem = make_problem(case, _dtype(device), torch.device(device), keep=one.kept_bytes(1) > 0)
    return partial(outcome, problem, _contender(case, name, device == "cuda").function, training)


class Turn:
    """A compiled call whose size changes, by `set(size=...)`; what a worker of the sweep runs."""

    def __init__(self, name: str, encoding: str, size: tuple[int, int], device: str):
        function = global_flex if name == "flex" else _contender(sized_case(encoding, size), name, device == "cuda").function
        self.one, self.device, self.function = Sized(name, encoding), device, torch.compile(function)
        self.set(size)

    def set(self, size: tuple[int, int]) -> None:
        """The next calls are of h x w tokens."""
        keep = self.one.kept_bytes(1) > 0
        case = sized_case(self.one.encoding, size)._replace(name=TURN)  # one name: dynamo would compile anew for another
        self.problem = make_problem(case, _dtype(self.device), torch.device(self.device), keep=keep)

    def __call__(self) -> Outcome:
        return outcome(self.problem, self.function, False)


class Known:
    """A call that holds so many bytes, by which the measurement of memory is measured itself."""

    def __init__(self, size: int):
        self.size = size

    def set(self, size: int) -> None:
        """The next calls hold so many."""
        self.size = size

    def __call__(self) -> Outcome:
        return {"output": torch.ones(self.size, dtype=torch.uint8)[:1].clone()}


class SizeRun:
    """Writes rows into `samples`; what is there already is not done again."""

    def __init__(self, samples: Samples, device: torch.device):
        self.samples, self.device = samples, device.type
        self.limit, self.threads = memory_limit(), torch.get_num_threads()
        self.truths: dict[tuple, Outcome] = {}

    def worker(self, build: str, **args: Any) -> Worker:
        """A process that holds what `build` makes of the arguments."""
        return Worker(build, args, threads=self.threads, env=_ENV, device=self.device)

    def measure(self, one: Sized, size: tuple[int, int], mode: str) -> None:
        """One contender at one size: a row of kind "size", or of the reason why there is none."""
        case = sized_case(one.encoding, size)
        key = {"case": case.name, "mode": mode, "contender": one.label}
        if any(self.samples.has(kind, **key) for kind in ("size", "refused", "wrong", "failed")):
            return
        if smaller := self._failed_before(one, size, mode):
            self.samples.add("failed", **key, text=f"not tried: {smaller}")
            return
        args = {"name": one.name, "encoding": one.encoding, "size": size, "training": mode == "training"}
        try:
            with self.worker(_BUILD, **args, device=self.device, limit=self.limit) as worker:
                started = worker.start()
                errors = {} if one.name == FLOOR else self._errors(case, mode, worker.outcome())
                if wrong := self._wrong(one, errors):
                    self.samples.add("wrong", **key, text=f"error of {wrong}", errors=errors)
                    return
                (once,) = worker.run(1)
                quick = once < _QUICK_MS
                found = {"ms": worker.run(max(3, min(15, int(1500 / once))) if quick else 1)}
                found["call_bytes"] = int(median(worker.memory()["call_bytes"] for _ in range(3 if quick else 1)))
        except WorkerFailed as error:
            self.samples.add("refused" if "refuses: " in str(error) else "failed", **key, text=str(error)[:800])
            return
        found |= started | {"kept_bytes": one.kept_bytes(case.tokens), "errors": errors}
        self.samples.add("size", **key, of=_contender(case, one.name, self.device == "cuda").kind, tokens=case.tokens, **found)

    def turn(self, one: Sized, sizes: tuple[tuple[int, int], ...]) -> None:
        """One process that meets one size after the other: seconds of the first call of each, and graphs compiled for it."""
        key = {"case": TURN, "mode": "forward", "contender": f"{one.label} compiled"}
        if any(self.samples.has(kind, **key) for kind in ("turn", "failed")):
            return
        seconds, graphs = [], []
        try:
            with self.worker("tools.benchmark.sizes:Turn", **one._asdict(), size=sizes[0], device=self.device) as worker:
                started = worker.start()
                seconds.append(started["first_call_s"])
                graphs.append(int(started["compiles"]))
                for size in sizes[1:]:
                    worker.set(size=size)
                    start = time.perf_counter()
                    worker.run(1)
                    seconds.append(time.perf_counter() - start)
                    graphs.append(worker.compiles() - sum(graphs))
        except WorkerFailed as error:
            self.samples.add("failed", **key, text=f"at {sizes[len(seconds)]}: {error}"[:800])
            return
        self.samples.add("turn", **key, sizes=[list(size) for size in sizes], seconds=seconds, compiles=graphs)

    def precision(self) -> None:
        """What is measured of calls that take 1, 16 and 256 MB: a row of kind "precision"."""
        key = {"case": "a call of known memory", "mode": "forward", "contender": "bytes"}
        if self.samples.has("precision", **key):
            return
        asked, found = [10**6, 16 * 10**6, 256 * 10**6], []
        with self.worker("tools.benchmark.sizes:Known", size=asked[0]) as worker:
            worker.start()
            for size in asked:
                worker.set(size=size)
                found.append(worker.memory()["call_bytes"])
        self.samples.add("precision", **key, asked=asked, found=found)

    def _failed_before(self, one: Sized, size: tuple[int, int], mode: str) -> str:
        for h, w in SIZES:
            key = {"case": f"size {h}x{w}", "mode": mode, "contender": one.label}
            if h * w < size[0] * size[1] and self.samples.has("failed", **key):
                text = self.samples.find("failed", **key)["text"]
                return text.removeprefix("not tried: ") if text.startswith("not tried: ") else f"at {h}x{w}, {text}"
        return ""

    def _errors(self, case: Case, mode: str, found: Outcome) -> dict[str, float]:
        """Of everything that the truth holds, norm over norm."""
        if (case, mode) not in self.truths:
            problem = make_problem(case, _dtype(self.device), torch.device(self.device), keep=False)
            self.truths[case, mode] = _truth(problem, mode == "training")
        truth = self.truths[case, mode]
        return {name: relative_errors(found[name][..., -x.shape[-2] :, :], x.cpu())[0] for name, x in truth.items()}

    def _wrong(self, one: Sized, errors: dict[str, float]) -> str:
        dtype = _dtype(self.device)
        exact = dtype == torch.float32 and (one.name == "auto" or one.name in BACKENDS)
        limits = {name: FLOORS[dtype] if exact and name == "output" else CAPS[dtype] for name in errors}
        return ", ".join(f"{name} {e:.1e} (limit {limits[name]:.1e})" for name, e in errors.items() if not e <= limits[name])


def run_sizes(samples: Samples, device: torch.device, until: float, quick: bool, only: str, after: Callable[[], None]) -> bool:
    """Measures what is still missing, `after` each size; False where time ran out. only: a pattern, of "size 14x14" say."""
    run, gpu = SizeRun(samples, device), device.type == "cuda"
    if not gpu and not _STATM.exists():
        key = {"case": "sizes", "mode": "forward", "contender": "all"}
        samples.add("failed", **key, text="the memory of a process is read from /proc: on Linux, or on a GPU")
        return True
    sizes = [size for size in (QUICK_SIZES if quick else SIZES) if re.search(only, sized_case("table", size).name)]
    if sizes and not gpu:
        run.precision()
    for mode in MODES_OF_SIZES:
        for size in sizes:
            for one in lineup(gpu, quick):
                if time.time() > until:
                    return False
                run.measure(one, size, mode)
            after()
    if quick or not re.search(only, TURN):
        return True
    for one in (Sized("auto"), Sized(GATHERED), Sized("flex")):
        if time.time() > until:
            return False
        run.turn(one, SIZES[:5])
    after()
    return True


def memory_limit() -> int:
    """Bytes that one process may take beyond what it begins with: 16 GiB, or 0.7 of what is free."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return min([16 * 2**30, *(7 * one // 10 for one in free)])


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _contender(case: Case, name: str, gpu: bool) -> Contender:
    return next(one for one in contenders(case, gpu) if one.name == name)


def _truth(problem: Problem, training: bool) -> Outcome:
    """The definition in float64, of the last queries alone where there are many: nothing of [N, N] has to be made then."""
    whole = problem.case.tokens <= _WHOLE
    rows = problem.case.tokens if whole else _ROWS
    problem = problem.to(torch.float64)
    inputs = problem.inputs | {"q": problem.inputs["q"][:, :, -rows:]}
    return outcome(problem._replace(inputs=inputs, grad=problem.grad[:, :, -rows:]), _definition, training and whole)


def _definition(case: Case, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    q, k, v = inputs
    turned_q, turned_k = rotated(q, k, terms)
    logits = turned_q @ turned_k.mT * q.shape[-1] ** -0.5
    (h, w, _), (y, x) = case.grid, case.grid.coordinates(q.device).unbind(-1)
    row, column = (at[-q.shape[2] :, None] - at + n - 1 for at, n in ((y, h), (x, w)))
    for table in terms.tables:
        logits = logits + table.bias[:, {"h": row, "w": column, "hw": row * (2 * w - 1) + column}[table.axis]]
    return logits.softmax(-1) @ v
