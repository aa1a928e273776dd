"""The engine of all suites: run the contenders of a case in separate processes, check their results, time them in turns.

A contender is timed only if its first call agrees with the definition in float64, on the same numbers. The error of a tensor is
the norm of the difference over the norm. The limit of an exact contender is FLOORS (rounding), or twice the error of the first
contender (the yardstick) if that is more; the limit of all others is CAPS. Every outcome is a row: times, a refusal, a wrong
result, a failure. Rows in the samples are not measured again.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.benchmark.samples import ENDS, Samples
from tools.benchmark.worker import Repeats, Worker, WorkerFailed, take_turns
from vitrel.ops import BACKENDS

FLOORS = {"float32": 2e-6, "float16": 3e-4, "bfloat16": 2.4e-3}  # of rounding once or twice
CAPS = {"float32": 3e-5, "float16": 2e-2, "bfloat16": 1e-1}
DEFINITION = "the definition"
_OUTPUTS = ("output", "loss")  # all others are gradients
_SHOWN = 4  # errors in a row: a model has one per parameter

Arguments = dict[str, Any]


class Visit(NamedTuple):
    """A measurement in a process; a case has one, or several in the same process.

    mode: its name. set: arguments of the call's `set`, from the second visit on. row: further columns. exact_only: only exact
    contenders are checked.
    """

    mode: str
    set: Arguments = {}  # noqa: RUF012
    row: Arguments = {}  # noqa: RUF012
    exact_only: bool = False


class Contender(NamedTuple):
    """One way to compute a case. args: build its call. truth: build the definition's (None: not checked).

    of: "ours", "peer", "both" (a peer's model optimized by vitrel) or "floor" (no position, not comparable). exact: held
    to FLOORS, not CAPS. env: environment variables. skips: modes of visits to leave out. before: a case to pass first, and the
    contender's name there.
    """

    name: str
    of: str
    args: Arguments
    truth: Arguments | None
    exact: bool = False
    row: Arguments = {}  # noqa: RUF012
    env: dict[str, str] = {}  # noqa: RUF012
    skips: tuple[str, ...] = ()
    before: "tuple[Case, str] | None" = None


@dataclass(frozen=True)
class Case:
    """Contenders to measure together, in rows of one kind. build: the function that builds calls in workers (see Worker).

    plan: repeats, None to time nothing. dtype: selects FLOORS and CAPS. largest: whether the largest error over the largest
    element is checked too, which finds a single wrong token. together: time contenders in turns, not one after another.
    after: smaller cases; a contender that failed there is skipped. patience: seconds for an answer of a worker.
    """

    name: str
    build: str
    contenders: tuple[Contender, ...]
    visits: tuple[Visit, ...]
    dtype: str = "float32"
    plan: Repeats | None = None
    kind: str = "time"
    row: Arguments = field(default_factory=dict)
    largest: bool = False
    gradient_cap: float | None = None  # replaces CAPS for gradients
    together: bool = True
    after: tuple[str, ...] = ()
    patience: float = 600.0

    def key(self, contender: Contender, visit: Visit) -> dict[str, str]:
        """Return the columns that identify the row of a contender."""
        return {"case": self.name, "mode": visit.mode, "contender": contender.name}

    def keys(self, contender: Contender) -> list[dict[str, str]]:
        """Return the keys of all visits of a contender."""
        return [self.key(contender, visit) for visit in self.visits if visit.mode not in contender.skips]


class Engine:
    """Measures cases and writes rows into `samples`. worker: the class that runs a contender; tests replace it."""

    def __init__(self, samples: Samples, device: torch.device, worker: Callable[..., Worker] = Worker):
        self.samples, self.device, self.worker = samples, device.type, worker
        self.threads = torch.get_num_threads()

    def run(self, cases: Iterable[Case], only: str, until: float, after: Callable[[], None]) -> bool:
        """Measure the cases whose name matches `only`, in order, and call `after` after each.

        until: `time.time()` after which nothing starts. Returns False if that time came first.
        """
        for case in cases:
            if re.search(only, case.name):
                if time.time() > until:
                    return False
                finished = self.measure(case, until)
                after()
                if not finished:
                    return False
        return True

    def measure(self, case: Case, until: float = float("inf")) -> bool:
        """Check and time the contenders of a case, together or one by one. Returns False if `until` came first."""
        contenders = [
            contender
            for contender in case.contenders
            if not any(self.samples.has(kind, **key) for key in case.keys(contender) for kind in ENDS)
        ]
        missing = [
            contender for contender in contenders if not all(self.samples.has(case.kind, **key) for key in case.keys(contender))
        ]
        if not missing:
            return True
        print(f"{case.name}, {case.visits[0].mode}", flush=True)
        contenders = [contender for contender in (contenders if case.together else missing) if self._admitted(case, contender)]
        self.truths: dict[str, dict[str, Tensor] | WorkerFailed] = {}
        for group in [contenders] if case.together else [[contender] for contender in contenders]:
            if time.time() > until and not case.together:
                return False
            self.yardsticks: dict[str, dict[str, float]] = {}
            with ExitStack() as stack:
                workers: dict[str, Worker] = {}
                remaining = list(group)
                for visit in case.visits:
                    remaining = self._visit(case, visit, remaining, workers, stack)
        return True

    def _admitted(self, case: Case, contender: Contender) -> bool:
        """Return whether a contender may be measured: it failed at no smaller case and passed `before`; else write a row."""
        key = case.keys(contender)[0]
        for smaller in case.after:
            if text := self.samples.reason("failed", **key | {"case": smaller}):
                reason = text if text.startswith("not tried: ") else f"not tried: at {smaller}, {text}"
                self.samples.add("failed", **key, text=reason)
                return False
        if contender.before is None:
            return True
        gate, name = contender.before
        self.measure(gate)
        gate_key = {"case": gate.name, "mode": gate.visits[0].mode, "contender": name}
        if not self.samples.has(gate.kind, **gate_key):
            reason = self.samples.reason(*ENDS, **gate_key) or "no reason given"
            self.samples.add("wrong", **key, text=f"at the gate: {reason}")
            return False
        return True

    def _visit(
        self, case: Case, visit: Visit, remaining: list[Contender], workers: dict[str, Worker], stack: ExitStack
    ) -> list[Contender]:
        """Measure one visit of the remaining contenders and return those that did not fail."""
        started: dict[str, Arguments] = {}
        ended: set[str] = set()
        for contender in remaining:
            if visit.mode not in contender.skips:
                try:
                    row = self._begin(case, visit, contender, workers, stack)
                except WorkerFailed as error:
                    row = self._failed(case.key(contender, visit), error)
                if row is None:
                    ended.add(contender.name)
                    _close(workers, {contender.name})
                else:
                    started[contender.name] = row
        times: dict[str, Any] = {name: {} for name in started}
        if case.plan is not None:
            times, failed = take_turns({name: workers[name] for name in started}, case.plan)
            for contender in remaining:
                if contender.name in failed:
                    self._failed(case.key(contender, visit), failed[contender.name])
        ended |= started.keys() - times.keys()
        for contender in remaining:
            if contender.name in times:
                try:
                    self._write(
                        case, visit, contender, workers[contender.name], started[contender.name] | times[contender.name]
                    )
                except WorkerFailed as error:
                    self._failed(case.key(contender, visit), error)
                    ended.add(contender.name)
        _close(workers, ended)
        return [contender for contender in remaining if contender.name not in ended]

    def _begin(
        self, case: Case, visit: Visit, contender: Contender, workers: dict[str, Worker], stack: ExitStack
    ) -> Arguments | None:
        """Make and check the first call; return columns of the row, or write a row "wrong" and return None."""
        checked = contender.truth is not None and (contender.exact or not visit.exact_only)
        truth = self._truth(case, visit, contender.truth) if checked else {}
        if contender.name not in workers:
            workers[contender.name] = worker = stack.enter_context(self._process(case, contender.args, contender.env))
            row = worker.start() | {"new_compiles": 0}
        else:
            worker = workers[contender.name]
            before, start = worker.compiles(), time.perf_counter()
            worker.set(**visit.set)
            worker.run(1)
            row = {"first_call_s": time.perf_counter() - start, "new_compiles": -before}
        if not checked:
            return row | {"errors": {}}
        verdict = check(worker.outcome(), truth, case, contender.exact, self.yardsticks.get(repr(contender.truth)))
        if verdict.text:
            self.samples.add("wrong", **case.key(contender, visit), text=verdict.text, errors=verdict.worst)
            return None
        self.yardsticks.setdefault(repr(contender.truth), verdict.errors)
        return row | {"errors": verdict.worst}

    def _write(self, case: Case, visit: Visit, contender: Contender, worker: Worker, row: Arguments) -> None:
        memory = {} if case.plan is None else worker.memory()
        compiles = worker.compiles()
        row |= {"compiles": compiles, "new_compiles": row["new_compiles"] + compiles}
        common = {"of": contender.of, "dtype": case.dtype} | case.row | visit.row | contender.row
        self.samples.add(case.kind, **case.key(contender, visit), **common | row | memory | worker.about())

    def _truth(self, case: Case, visit: Visit, args: Arguments) -> dict[str, Tensor]:
        """Return the definition's result, computed once per case and arguments."""
        args = args | visit.set
        if repr(args) not in self.truths:
            try:
                with self._process(case, args, {}) as worker:
                    worker.start()
                    self.truths[repr(args)] = worker.outcome()
            except WorkerFailed as error:
                self.truths[repr(args)] = WorkerFailed(f"{DEFINITION} failed: {error}")
        truth = self.truths[repr(args)]
        if isinstance(truth, WorkerFailed):
            raise truth
        return truth

    def _process(self, case: Case, args: Arguments, env: dict[str, str]) -> Worker:
        return self.worker(case.build, args | {"device": self.device}, self.threads, env, self.device, case.patience)

    def _failed(self, key: dict[str, str], error: WorkerFailed) -> None:
        text = str(error)
        refused = text.startswith("ValueError: ") and "refuses: " in text and key["contender"].split(",")[0] in BACKENDS
        absent = "not installed: " if text.startswith(("ModuleNotFoundError", "ImportError")) else ""
        self.samples.add("refused" if refused else "failed", **key, text=f"{absent}{text.removeprefix('ValueError: ')}"[:800])


class Verdict(NamedTuple):
    """Result of a gate. text: "" if the contender may be timed. errors: by tensor. worst: those closest to their limits."""

    text: str
    errors: dict[str, float]
    worst: dict[str, float]


def check(
    returned: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    case: Case,
    exact: bool = True,
    yardstick: Mapping[str, float] | None = None,
) -> Verdict:
    """Compare the tensors that a contender returned with the truth, by name. yardstick: errors of the first contender.

    Names "hard <dtype>: ..." are of a small, hard problem in that dtype; a contender may leave out all of a dtype.
    """
    dtypes = {_problem(name) for name in returned} | {""}
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    for name, expected in truth.items():
        if _problem(name) not in dtypes:
            continue
        dtype = (_problem(name) or case.dtype).replace("amp", "bfloat16")
        output = name.rpartition(": ")[2] in _OUTPUTS
        cap = CAPS[dtype] if output or case.gradient_cap is None else case.gradient_cap
        errors[name], largest = relative_errors(returned.get(name), expected)
        limits[name] = cap
        if exact and yardstick is not None:
            limits[name] = min(cap, max(FLOORS[dtype], 2 * yardstick.get(name, float("inf"))))
        elif exact and output:
            limits[name] = FLOORS[dtype]
        if case.largest:
            errors[f"largest of {name}"], limits[f"largest of {name}"] = largest, cap
    wrong = [f"{name} {error:.1e} (limit {limits[name]:.1e})" for name, error in errors.items() if not error <= limits[name]]
    worst = sorted(errors, key=lambda name: errors[name] / limits[name], reverse=True)[:_SHOWN]
    shown = {name: errors[name] for name in errors if name in worst or name in _OUTPUTS}
    return Verdict("error of " + ", ".join(wrong[:_SHOWN]) if wrong else "", errors, shown)


def relative_errors(value: Tensor | None, expected: Tensor) -> tuple[float, float]:
    """Return (norm of the difference / norm, largest difference / largest element); infinite for None or another shape."""
    if value is None or value.shape != expected.shape:
        return float("inf"), float("inf")
    difference = value.double() - expected
    return (difference.norm() / expected.norm()).item(), (difference.abs().max() / expected.abs().max()).item()


def _problem(name: str) -> str:
    """Return the dtype of the hard problem that a tensor belongs to, "" for the case itself."""
    return name.partition(": ")[0].removeprefix("hard ") if name.startswith("hard ") else ""


def _close(workers: dict[str, Worker], names: set[str]) -> None:
    for name in names & workers.keys():
        workers[name].close()
