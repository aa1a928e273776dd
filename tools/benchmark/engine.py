"""The engine of all suites: contenders of a case in processes of their own, a gate for each, rounds in turns, rows.

Nothing is timed that is not right: what a call returns is compared with the definition in float64, on the same numbers. The
error of a tensor is norm over norm. A contender that is exact may be wrong by FLOORS, which is what rounding gives, or by twice
what the first contender makes of it, the yardstick; the others, which may be less exact but not something else, by CAPS.
Every outcome is a row: the times, a refusal, a wrong result, a failure. What is in the samples is not measured again.
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

FLOORS = {"float32": 2e-6, "float16": 3e-4, "bfloat16": 2.4e-3}  # what rounding once or twice gives
CAPS = {"float32": 3e-5, "float16": 2e-2, "bfloat16": 1e-1}
DEFINITION = "the definition"
_OUTPUTS = ("output", "loss")  # all others are gradients
_SHOWN = 4  # errors in a row: of a model there is one for every parameter

Arguments = dict[str, Any]


class Visit(NamedTuple):
    """What a process is asked for: a case has one visit, or several, one after the other in the same process.

    set: what is changed for it, from the second on; row: what its rows say besides. exact_only: the others are not checked.
    """

    mode: str
    set: Arguments = {}  # noqa: RUF012
    row: Arguments = {}  # noqa: RUF012
    exact_only: bool = False


class Contender(NamedTuple):
    """One way to compute a case. args: what builds its call, `truth` what builds the definition's (None: nothing is checked).

    of: "ours", "peer", "both" (a peer's model, optimized by us) or "floor". skips: modes of visits that it does not take part
    in. before: a case that it has to pass first, as the contender of that name there.
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
    """What is measured together, in rows of one kind. build: the function that builds calls in workers (see Worker).

    plan: None where nothing is timed. dtype: whose FLOORS and CAPS count. largest: whether the largest error over the largest
    element is checked too, which sees a single wrong token. together: rounds in turns; otherwise one contender after the other.
    after: smaller cases; who failed there is not tried here.
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
    gradient_cap: float | None = None  # in the place of CAPS
    together: bool = True
    after: tuple[str, ...] = ()
    patience: float = 600.0

    def key(self, one: Contender, visit: Visit) -> dict[str, str]:
        """What names the rows of a contender."""
        return {"case": self.name, "mode": visit.mode, "contender": one.name}

    def keys(self, one: Contender) -> list[dict[str, str]]:
        """Those of all visits that it takes part in."""
        return [self.key(one, visit) for visit in self.visits if visit.mode not in one.skips]


class Engine:
    """Writes rows into `samples`. worker: what holds a contender, a process unless tests have another."""

    def __init__(self, samples: Samples, device: torch.device, worker: Callable[..., Worker] = Worker):
        self.samples, self.device, self.worker = samples, device.type, worker
        self.threads = torch.get_num_threads()

    def run(self, cases: Iterable[Case], only: str, until: float, after: Callable[[], None]) -> bool:
        """Measures the cases whose name matches `only`, in their order, with `after` each.

        until: `time.time()` after which nothing starts; False where it came to that.
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
        """Every contender that is right, timed together; or alone, as long as there is time: False where it was too short."""
        known = [one for one in case.contenders if not any(map(self._ended, case.keys(one)))]
        missing = [one for one in known if not all(self.samples.has(case.kind, **key) for key in case.keys(one))]
        if not missing:
            return True
        print(f"{case.name}, {case.visits[0].mode}", flush=True)
        known = [one for one in (known if case.together else missing) if self._admitted(case, one)]
        self.truths: dict[str, dict[str, Tensor] | WorkerFailed] = {}
        for group in [known] if case.together else [[one] for one in known]:
            if time.time() > until and not case.together:
                return False
            self.yardsticks: dict[str, dict[str, float]] = {}
            with ExitStack() as stack:
                workers: dict[str, Worker] = {}
                left = list(group)
                for visit in case.visits:
                    left = self._visit(case, visit, left, workers, stack)
        return True

    def _admitted(self, case: Case, one: Contender) -> bool:
        """Whether it has not failed at a smaller case, and passed the one before."""
        key = case.keys(one)[0]
        for smaller in case.after:
            if self.samples.has("failed", **key | {"case": smaller}):
                text = self.samples.find("failed", **key | {"case": smaller})["text"]
                why = text if text.startswith("not tried: ") else f"not tried: at {smaller}, {text}"
                self.samples.add("failed", **key, text=why)
                return False
        if one.before is None:
            return True
        gate, name = one.before
        self.measure(gate)
        passed = {"case": gate.name, "mode": gate.visits[0].mode, "contender": name}
        if not self.samples.has(gate.kind, **passed):
            why = next((self.samples.find(kind, **passed)["text"] for kind in ENDS if self.samples.has(kind, **passed)), "")
            self.samples.add("wrong", **key, text=f"at the gate: {why or 'no reason given'}")
            return False
        return True

    def _visit(
        self, case: Case, visit: Visit, left: list[Contender], workers: dict[str, Worker], stack: ExitStack
    ) -> list[Contender]:
        """One visit of all contenders that are left; returns those that can go on."""
        begun: dict[str, Arguments] = {}
        gone: set[str] = set()
        for one in left:
            if visit.mode not in one.skips:
                try:
                    found = self._begin(case, visit, one, workers, stack)
                except WorkerFailed as error:
                    found = self._failed(case.key(one, visit), error)
                if found is None:
                    gone.add(one.name)
                    _close(workers, {one.name})
                else:
                    begun[one.name] = found
        times: dict[str, Any] = {name: {} for name in begun}
        if case.plan is not None:
            times, failed = take_turns({name: workers[name] for name in begun}, case.plan)
            for one in left:
                if one.name in failed:
                    self._failed(case.key(one, visit), failed[one.name])
        gone |= begun.keys() - times.keys()
        for one in left:
            if one.name in times:
                try:
                    self._write(case, visit, one, workers[one.name], begun[one.name] | times[one.name])
                except WorkerFailed as error:
                    self._failed(case.key(one, visit), error)
                    gone.add(one.name)
        _close(workers, gone)
        return [one for one in left if one.name not in gone]

    def _begin(
        self, case: Case, visit: Visit, one: Contender, workers: dict[str, Worker], stack: ExitStack
    ) -> Arguments | None:
        """The first call, and whether it is right; None, and a row, where it is not."""
        checked = one.truth is not None and (one.exact or not visit.exact_only)
        truth = self._truth(case, visit, one.truth) if checked else {}
        if one.name not in workers:
            workers[one.name] = worker = stack.enter_context(self._process(case, one.args, one.env))
            found = worker.start() | {"new_compiles": 0}
        else:
            worker = workers[one.name]
            before, start = worker.compiles(), time.perf_counter()
            worker.set(**visit.set)
            worker.run(1)
            found = {"first_call_s": time.perf_counter() - start, "new_compiles": -before}
        if not checked:
            return found | {"errors": {}}
        verdict = check(worker.outcome(), truth, case, one.exact, self.yardsticks.get(repr(one.truth)))
        if verdict.text:
            self.samples.add("wrong", **case.key(one, visit), text=verdict.text, errors=verdict.worst)
            return None
        self.yardsticks.setdefault(repr(one.truth), verdict.errors)
        return found | {"errors": verdict.worst}

    def _write(self, case: Case, visit: Visit, one: Contender, worker: Worker, found: Arguments) -> None:
        memory = {} if case.plan is None else worker.memory()
        compiles = worker.compiles()
        found |= {"compiles": compiles, "new_compiles": found["new_compiles"] + compiles}
        own = {"of": one.of, "dtype": case.dtype} | case.row | visit.row | one.row
        self.samples.add(case.kind, **case.key(one, visit), **own | found | memory | worker.about())

    def _truth(self, case: Case, visit: Visit, args: Arguments) -> dict[str, Tensor]:
        """What the definition gives; computed once for a case and arguments."""
        args = args | visit.set
        if repr(args) not in self.truths:
            try:
                with self._process(case, args, {}) as worker:
                    worker.start()
                    self.truths[repr(args)] = worker.outcome()
            except WorkerFailed as error:
                self.truths[repr(args)] = WorkerFailed(f"{DEFINITION} failed: {error}")
        found = self.truths[repr(args)]
        if isinstance(found, WorkerFailed):
            raise found
        return found

    def _process(self, case: Case, args: Arguments, env: dict[str, str]) -> Worker:
        return self.worker(case.build, args | {"device": self.device}, self.threads, env, self.device, case.patience)

    def _ended(self, key: dict[str, str]) -> bool:
        return any(self.samples.has(kind, **key) for kind in ENDS)

    def _failed(self, key: dict[str, str], error: WorkerFailed) -> None:
        text = str(error)
        refused = text.startswith("ValueError: ") and "refuses: " in text and key["contender"].split(",")[0] in BACKENDS
        absent = "not installed: " if text.startswith(("ModuleNotFoundError", "ImportError")) else ""
        self.samples.add("refused" if refused else "failed", **key, text=f"{absent}{text.removeprefix('ValueError: ')}"[:800])


class Verdict(NamedTuple):
    """What a gate found. text: "" where the contender may be timed; worst: the errors that come closest to their limits."""

    text: str
    errors: dict[str, float]
    worst: dict[str, float]


def check(
    found: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    case: Case,
    exact: bool = True,
    yardstick: Mapping[str, float] | None = None,
) -> Verdict:
    """Compares what a contender of a case returned with the truth, name by name. yardstick: errors of who came first.

    Names that begin with "hard <dtype>: " are of a small, hard problem in that type; a contender may leave out all of a type.
    """
    asked = {_problem(name) for name in found} | {""}
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    for name, true in truth.items():
        if _problem(name) not in asked:
            continue
        dtype = (_problem(name) or case.dtype).replace("amp", "bfloat16")
        output = name.rpartition(": ")[2] in _OUTPUTS
        cap = CAPS[dtype] if output or case.gradient_cap is None else case.gradient_cap
        errors[name], most = relative_errors(found.get(name), true)
        limits[name] = cap
        if exact and yardstick is not None:
            limits[name] = min(cap, max(FLOORS[dtype], 2 * yardstick.get(name, float("inf"))))
        elif exact and output:
            limits[name] = FLOORS[dtype]
        if case.largest:
            errors[f"largest of {name}"], limits[f"largest of {name}"] = most, cap
    wrong = [f"{name} {error:.1e} (limit {limits[name]:.1e})" for name, error in errors.items() if not error <= limits[name]]
    worst = sorted(errors, key=lambda name: errors[name] / limits[name], reverse=True)[:_SHOWN]
    shown = {name: errors[name] for name in errors if name in worst or name in _OUTPUTS}
    return Verdict("error of " + ", ".join(wrong[:_SHOWN]) if wrong else "", errors, shown)


def relative_errors(found: Tensor | None, true: Tensor) -> tuple[float, float]:
    """Norm of the difference over that of `true`, and largest element over largest; infinite for nothing or another shape."""
    if found is None or found.shape != true.shape:
        return float("inf"), float("inf")
    off = found.double() - true
    return (off.norm() / true.norm()).item(), (off.abs().max() / true.abs().max()).item()


def _problem(name: str) -> str:
    """The type of the hard problem that a tensor is of; "" for the case itself."""
    return name.partition(": ")[0].removeprefix("hard ") if name.startswith("hard ") else ""


def _close(workers: dict[str, Worker], names: set[str]) -> None:
    for name in names & workers.keys():
        workers[name].close()
