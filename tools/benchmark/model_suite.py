"""Measures models: every contender in a process of its own, gates, warm-up, interleaved rounds. Every outcome is a row."""

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tools.benchmark.model_cases import (
    CPU_MODEL_CASES,
    GPU_MODEL_CASES,
    QUICK_MODEL_CASES,
    ModelCase,
    ModelContender,
    model_contenders,
)
from tools.benchmark.model_gates import HARD, ModelGate, in_our_names, model_truth, model_worker
from tools.benchmark.model_table import write_models
from tools.benchmark.models import MODELS
from tools.benchmark.processes import Worker, WorkerFailed, take_turns
from tools.benchmark.samples import Samples
from tools.benchmark.timing import Repeats

_ENDS = ("wrong", "failed")
_PLANS = {"quick": Repeats(1, 2, 0.2, 2), "cpu": Repeats(3, 7, 3.0, 3), "cuda": Repeats(20, 7, 0.5, 20)}


def run_models(samples: Samples, device: torch.device, until: float, quick: bool, only: str, folder: Path) -> bool:
    """Measures the cases whose name matches `only`, the most important first, and writes the table after each.

    until: `time.time()` after which no further case is started; False where it came to that.
    """
    cases = QUICK_MODEL_CASES if quick else GPU_MODEL_CASES if device.type == "cuda" else CPU_MODEL_CASES
    suite = ModelSuite(samples, device, quick)
    for case in cases:
        if not re.search(only, case.name):
            continue
        if time.time() > until:
            return False
        suite.measure(case)
        write_models(samples.rows, folder)
    return True


class ModelSuite:
    """Writes rows into `samples`; what is there already is not measured again."""

    def __init__(self, samples: Samples, device: torch.device, quick: bool = False):
        self.samples, self.device, self.quick = samples, device.type, quick
        self.plan = _PLANS["quick" if quick else device.type]
        self.threads = torch.get_num_threads()
        self._hard: dict[tuple[str, str], ModelGate | None] = {}

    def measure(self, case: ModelCase) -> None:
        """Every contender of a case that is right, timed together."""
        known = [
            one for one in model_contenders(case, self.device == "cuda", self.quick) if not self._ended(self._key(case, one))
        ]
        if all(self.samples.has("time", **self._key(case, one)) for one in known):
            return
        print(f"{case.name}, {case.mode}", flush=True)
        gates: dict[tuple[str, str], ModelGate | None] = {}
        with ExitStack() as stack:
            ready: dict[ModelContender, tuple[Worker, dict[str, float]]] = {}
            for one in known:
                if (gate := self._gate(case, one, gates)) is None or not self._passes_hard(case, one):
                    continue
                worker = stack.enter_context(model_worker(one, case, self.device, self.threads))
                started = self._attempt(self._key(case, one), lambda w=worker, c=one, g=gate: self._start(case, c, w, g))
                if started is None:
                    worker.close()
                else:
                    ready[one] = worker, started
            self._time(case, ready)

    def _start(self, case: ModelCase, one: ModelContender, worker: Worker, gate: ModelGate) -> dict[str, float] | None:
        """The first call, and whether it is right; None, and a row, where it is not."""
        started = worker.start()
        text, errors = gate.check(in_our_names(one, case, worker.outcome()), one.of != "peer")
        self.samples.add("wrong" if text else "check", **self._key(case, one), text=text, errors=errors)
        return None if text else started

    def _time(self, case: ModelCase, ready: dict[ModelContender, tuple[Worker, dict[str, float]]]) -> None:
        rounds, failed = take_turns({one: worker for one, (worker, _) in ready.items()}, self.plan)
        for one, error in failed.items():
            self._failed(self._key(case, one), error)
        shape = dict(size=list(case.size), batch=case.batch, dtype=case.dtype)
        for one, times in rounds.items():
            worker, started = ready[one]
            if (memory := self._attempt(self._key(case, one), worker.memory)) is not None:
                own = dict(of=one.of, model=one.model, how=one.how, rounds=times)
                found = started | memory | {"compiles": worker.compiles()}
                self.samples.add("time", **self._key(case, one), **shape, **own, **found)

    def _gate(self, case: ModelCase, one: ModelContender, gates: dict[tuple[str, str], ModelGate | None]) -> ModelGate | None:
        """The truth with the weights of the contender's library; ours have timm's."""
        weights = "timm" if one.library == "ours" else one.library
        key = self._key(case, one) | {"contender": f"the definition of {one.model}, weights of {weights}"}
        if (one.model, weights) not in gates:
            truth = self._attempt(key, lambda: model_truth(one.model, weights, case, self.device, self.threads))
            gates[one.model, weights] = None if truth is None else ModelGate(truth, case.dtype)
        if gates[one.model, weights] is None:
            self.samples.add("failed", **self._key(case, one), text=f"{key['contender']} failed: {self._why(key)}")
        return gates[one.model, weights]

    def _passes_hard(self, case: ModelCase, one: ModelContender) -> bool:
        """Ours at HARD, once for a model and mode; what is compiled, in the small model of its kind."""
        if one.library != "ours":
            return True
        model = MODELS[one.model].small or one.model if one.how.startswith("compiled") else one.model
        hard = ModelCase(f"{model}, {HARD[0]}x{HARD[1]}", (model,), (224, 224), 2, "float32", case.mode)
        own = one._replace(name=f"ours, {one.how}", model=model)
        key = self._key(hard, own)
        if not self.samples.has("gate", **key) and not self._ended(key):
            self._check_hard(hard, own, key)
        if not self.samples.has("gate", **key):
            self.samples.add("wrong", **self._key(case, one), text=f"at the gate: {self._why(key)}")
        return self.samples.has("gate", **key)

    def _check_hard(self, hard: ModelCase, one: ModelContender, key: dict[str, str]) -> None:
        """The plain model is the first to come and the yardstick of the others."""

        def outcome(contender: ModelContender) -> dict[str, torch.Tensor]:
            with model_worker(contender, hard, self.device, self.threads, HARD) as worker:
                worker.start()
                return worker.outcome()

        def check() -> tuple[str, dict[str, float]]:
            if (hard.name, hard.mode) not in self._hard:
                gate = ModelGate(model_truth(one.model, "timm", hard, self.device, self.threads, HARD), hard.dtype)
                plain = outcome(one._replace(how="eager"))
                self._hard[hard.name, hard.mode] = gate
                text, errors = gate.check(plain, True)
                gate.check(plain, False)
                if one.how == "eager":
                    return text, errors
            return self._hard[hard.name, hard.mode].check(outcome(one), True)

        if (found := self._attempt(key, check)) is not None:
            self.samples.add("wrong" if found[0] else "gate", **key, text=found[0], errors=found[1])

    def _key(self, case: ModelCase, one: ModelContender) -> dict[str, str]:
        return {"case": case.name, "mode": case.mode, "contender": one.name}

    def _ended(self, key: dict[str, str]) -> bool:
        return any(self.samples.has(kind, **key) for kind in _ENDS)

    def _why(self, key: dict[str, str]) -> str:
        return next(
            (self.samples.find(kind, **key)["text"] for kind in _ENDS if self.samples.has(kind, **key)), "no reason given"
        )

    def _attempt(self, key: dict[str, str], work: Callable[[], Any]) -> Any:
        """What `work` returns; None, and a row that says why, where the process of it fails."""
        try:
            return work()
        except WorkerFailed as error:
            self._failed(key, error)
            return None

    def _failed(self, key: dict[str, str], error: WorkerFailed) -> None:
        absent = str(error).startswith(("ModuleNotFoundError", "ImportError"))
        self.samples.add("failed", **key, text=f"not installed: {error}" if absent else str(error))
