"""The engine of all suites: run the contenders of a case in separate processes, check their results, time them in turns.

A contender is timed only if its first call agrees with the definition in float64, on the same numbers: of every tensor the norm
of the difference over the norm is at most LIMIT, in bfloat16 HALF_LIMIT. Every outcome is a row: times, a wrong result,
a failure. Rows in the samples are not measured again.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.benchmark.samples import ENDS, Samples
from tools.benchmark.worker import Repeats, Worker, WorkerFailed, take_turns

LIMIT, HALF_LIMIT = 3e-5, 1e-1  # of float32, and of bfloat16
DEFINITION = "the definition"
_OUTPUTS = ("output", "loss")  # all others are gradients
# Gradients that nearly cancel (biases of norms) have errors up to 0.7 in bfloat16; a missing gradient has an error of 1.
_HALF_GRADIENT = 0.99

Arguments = dict[str, Any]


class Visit(NamedTuple):
    """A measurement in a process; a case has one, or several in the same process.

    mode: its name. set: arguments to build the call with, or of the call's `set` from the second visit on. row: further
    columns. checks: kinds of contenders whose result is checked. plan: instead of the case's.
    """

    mode: str
    set: Arguments = {}  # noqa: RUF012
    row: Arguments = {}  # noqa: RUF012
    checks: tuple[str, ...] = ("ours", "peer")
    plan: Repeats | None = None


class Contender(NamedTuple):
    """One way to compute a case. args: build its call. truth: build the definition's (None: not checked).

    of: "ours" or "peer". env: environment variables. skips: modes of visits to leave out.
    """

    name: str
    of: str
    args: Arguments
    truth: Arguments | None
    row: Arguments = {}  # noqa: RUF012
    env: dict[str, str] = {}  # noqa: RUF012
    skips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Contenders to measure together, in rows of one kind. build: the function that builds calls in workers (see Worker).

    patience: seconds for an answer of a worker.
    """

    name: str
    build: str
    contenders: tuple[Contender, ...]
    visits: tuple[Visit, ...]
    plan: Repeats
    kind: str = "time"
    patience: float = 600.0

    def key(self, contender: Contender, visit: Visit) -> dict[str, str]:
        """Return the columns that identify the row of a contender."""
        return {"case": self.name, "mode": visit.mode, "contender": contender.name}

    def visits_of(self, contender: Contender) -> list[Visit]:
        """Return the visits that a contender takes part in."""
        return [visit for visit in self.visits if visit.mode not in contender.skips]


class Engine:
    """Measures cases and writes rows into `samples`. worker: the class that runs a contender; tests replace it."""

    def __init__(self, samples: Samples, worker: Callable[..., Worker] = Worker):
        self.samples, self.worker = samples, worker
        self.threads = torch.get_num_threads()

    def measure(self, case: Case) -> None:
        """Check and time the contenders of a case together, unless all their rows are there."""
        group = [c for c in case.contenders if not any(self._has(kind, case, c, any) for kind in ENDS)]
        if all(self._has(case.kind, case, c, all) for c in group):
            return
        print(f"{case.name}, {case.visits[0].mode}", flush=True)
        self.truths: dict[str, dict[str, Tensor] | WorkerFailed] = {}
        workers: dict[str, Worker] = {}
        with ExitStack() as stack:
            for visit in case.visits:
                group = self._visit(case, visit, group, workers, stack)

    def _has(self, kind: str, case: Case, contender: Contender, quantifier: Callable[[Iterable[bool]], bool]) -> bool:
        return quantifier(self.samples.has(kind, **case.key(contender, visit)) for visit in case.visits_of(contender))

    def _visit(
        self, case: Case, visit: Visit, group: list[Contender], workers: dict[str, Worker], stack: ExitStack
    ) -> list[Contender]:
        """Measure one visit of a group and return those that did not fail."""
        rows, left = {}, [contender for contender in group if visit.mode in contender.skips]
        for contender in group:
            if contender not in left:
                try:
                    rows[contender.name] = self._begin(case, visit, contender, workers, stack)
                except WorkerFailed as error:
                    self._failed(case.key(contender, visit), error)
        rows = {name: row for name, row in rows.items() if row is not None}
        times, failed = take_turns({name: workers[name].run for name in rows}, visit.plan or case.plan)
        for contender in group:
            if contender.name in times:
                try:
                    row = rows[contender.name] | {"rounds": times[contender.name]}
                    self._write(case, visit, contender, workers[contender.name], row)
                    left.append(contender)
                except WorkerFailed as error:
                    failed[contender.name] = error
            if contender.name in failed:
                self._failed(case.key(contender, visit), failed[contender.name])
            if contender not in left and contender.name in workers:
                workers[contender.name].close()
        return [contender for contender in group if contender in left]

    def _begin(
        self, case: Case, visit: Visit, contender: Contender, workers: dict[str, Worker], stack: ExitStack
    ) -> Arguments | None:
        """Make and check the first call; return columns of the row, or write a row "wrong" and return None."""
        checked = contender.truth is not None and contender.of in visit.checks
        truth = self._truth(case, visit, contender.truth) if checked else {}
        if contender.name not in workers:
            process = self._process(case, contender.args | visit.set, contender.env)
            workers[contender.name] = worker = stack.enter_context(process)
            row: Arguments = {**worker.start()}
        else:
            worker = workers[contender.name]
            row = {**worker.set(bool(case.plan.rounds), **visit.set)}
        errors = relative_errors(worker.outcome(), truth) if checked else {}
        if text := too_large(errors):
            self.samples.add("wrong", **case.key(contender, visit), text=text)
            return None
        worst = sorted(errors, key=lambda name: -errors[name])[:4]  # a model has one per parameter
        return row | {"errors": {name: errors[name] for name in errors if name in worst or name in _OUTPUTS}}

    def _write(self, case: Case, visit: Visit, contender: Contender, worker: Worker, row: Arguments) -> None:
        common = {"of": contender.of} | visit.row | contender.row
        self.samples.add(case.kind, **case.key(contender, visit), **common | row | worker.memory())

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
        return self.worker(case.build, args, self.threads, env, case.patience)

    def _failed(self, key: dict[str, str], error: WorkerFailed) -> None:
        self.samples.add("failed", **key, text=str(error).removeprefix("ValueError: ")[:800])


def relative_errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of the difference over the norm of every tensor; infinite for one that is absent or of another shape."""
    errors = {}
    for name, expected in truth.items():
        value = found.get(name)
        same = value is not None and value.shape == expected.shape
        errors[name] = ((value.double() - expected).norm() / expected.norm()).item() if same else float("inf")
    return errors


def too_large(errors: Mapping[str, float], half: bool = False) -> str:
    """Return which errors are over the limit, with `half` that of bfloat16, "" if none is."""
    limits = dict.fromkeys(errors, LIMIT)
    if half:
        limits = {name: HALF_LIMIT if name in _OUTPUTS else _HALF_GRADIENT for name in errors}
    wrong = [f"{name} {error:.1e} (limit {limits[name]:.1e})" for name, error in errors.items() if not error <= limits[name]]
    return f"error of {', '.join(wrong[:4])}" if wrong else ""
