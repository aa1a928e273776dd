"""Measures case after case: gates, checks at full size, warm-up, interleaved rounds. Every outcome is a row."""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.benchmark.cases import Case, Problem, family, hard_case, make_problem
from tools.benchmark.contenders import Contender, contenders, is_refusal
from tools.benchmark.gates import Gate, attached, free, outcome, step
from tools.benchmark.samples import Samples
from tools.benchmark.sdpa_kernels import KERNELS, MODES, Biased, probe, sdpa_shapes
from tools.benchmark.timing import Repeats, Stopwatch, one_round, peak_bytes, warm_up

_PASSES = ("forward", "training")
_ENDS = ("refused", "wrong", "failed")  # rows after which a contender of a case is out


class DeviceLost(RuntimeError):
    """After an illegal access nothing more can be computed in this process."""


class Measurement:
    """Writes rows into `samples`; what is there already is not done again. until: `time.time()` after which nothing starts."""

    def __init__(self, samples: Samples, device: torch.device, plan: Repeats, until: float, running: Path):
        self.samples, self.device, self.plan, self.until, self.running = samples, device, plan, until, running
        self.gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.gated = (torch.float32, torch.bfloat16 if self.gpu else torch.float16)

    def run(self, cases: Iterable[Case], after: Callable[[], None]) -> bool:
        """All of it, `after` each case; False where time ran out."""
        first, later = ([s for s in sdpa_shapes(self.gpu) if (s.dtype == self.dtype) is own] for own in (True, False))
        self.probe_sdpa(first)
        for case in cases:
            for mode in _PASSES:
                if time.time() > self.until:
                    return False
                self.measure(case, mode)
            after()
        self.probe_sdpa(later)
        after()
        return time.time() <= self.until

    def probe_sdpa(self, shapes: Iterable[Biased]) -> None:
        """Which kernel of SDPA serves a bias."""
        for shape in shapes:
            for mode in MODES:
                for kernel in KERNELS:
                    key = {"case": f"SDPA, {shape.name}, {_short(shape.dtype)}", "mode": mode, "contender": kernel}
                    if time.time() > self.until or self.samples.has("sdpa", **key) or self._ended(key):
                        continue
                    found = self._attempt(key, partial(probe, shape, kernel, mode, self.device, self.plan))
                    if found is not None:
                        self.samples.add("sdpa", **key, **found)

    def measure(self, case: Case, mode: str) -> None:
        """Every contender of a case that serves it and is right, timed together."""
        known = contenders(case, self.gpu)
        keys = {one.name: {"case": case.name, "mode": mode, "contender": one.name} for one in known}
        known = [one for one in known if not self._ended(keys[one.name])]
        if all(self.samples.has("time", **keys[one.name]) for one in known):
            return
        if self.gpu:
            torch._dynamo.reset()
        gates: dict[str, Any] = {}
        known = [one for one in known if self._passes_hard(case, mode, one, keys[one.name], gates)]
        gates.clear()
        free()
        key = {"case": case.name, "mode": mode, "contender": "the definition"}
        gate = self._attempt(key, lambda: Gate(make_problem(case, self.dtype, self.device), mode == "training"))
        if gate is None:
            return
        known = [one for one in known if one.kind == "floor" or self._passes(gate, one, keys[one.name])]
        problem = gate.problem
        del gate
        free()
        self._time(case, mode, problem, known, keys)

    def _passes_hard(self, case: Case, mode: str, one: Contender, key: dict[str, str], gates: dict[str, Any]) -> bool:
        """The gate: small, hard sizes, in float32 and in half precision.

        What takes long to compile is spared a part: compiled peers are checked at full size only, tuned kernels not in float32.
        """
        if one.kind == "floor" or one.compiled:
            return True
        gate_key = {"case": family(case), "mode": mode, "contender": one.name}
        if not self.samples.has("gate", **gate_key) and not self._ended(gate_key):
            self._gate(case, one, gate_key, gates)
        for kind in _ENDS:
            if self.samples.has(kind, **gate_key):
                self.samples.add(kind, **key, text=f"at the gate: {self.samples.find(kind, **gate_key)['text']}")
        return self.samples.has("gate", **gate_key)

    def _gate(self, case: Case, one: Contender, key: dict[str, str], gates: dict[str, Any]) -> None:
        verdicts = {}
        for dtype in self.gated[1:] if one.tuned else self.gated:
            name = _short(dtype)
            if name not in gates:
                problem, training = make_problem(hard_case(case), dtype, self.device, seed=1), key["mode"] == "training"
                gates[name] = self._attempt(key | {"contender": "the definition"}, partial(Gate, problem, training))
            if gates[name] is None:
                return
            verdicts[name] = self._attempt(key, partial(gates[name].check, one))
            if verdicts[name] is None:
                return
        text = "; ".join(f"{name}: {v.text}" for name, v in verdicts.items() if v.text)
        errors, limits = ({name: getattr(v, what) for name, v in verdicts.items()} for what in ("errors", "limits"))
        self.samples.add("wrong" if text else "gate", **key, text=text, errors=errors, limits=limits)

    def _passes(self, gate: Gate, one: Contender, key: dict[str, str]) -> bool:
        """The check: the very numbers that will be timed."""
        verdict = self._attempt(key, partial(gate.check, one))
        if verdict is None:
            return False
        if verdict.text:
            self.samples.add("wrong", **key, text=f"at full size, {verdict.text}", errors=verdict.errors)
        else:
            self.samples.add("check", **key, errors=verdict.errors, limits=verdict.limits)
        return not verdict.text

    def _time(self, case: Case, mode: str, problem: Problem, known: list[Contender], keys: dict[str, dict[str, str]]) -> None:
        training, watch, ready = mode == "training", Stopwatch(self.device), {}
        problem = attached(problem) if training else problem
        for one in known:
            call = partial(step, problem, one.function) if training else partial(outcome, problem, one.function, False)
            found = self._attempt(keys[one.name], partial(self._prepare, call, one, watch))
            if found is not None:
                ready[one.name] = (call, one, *found)
        rounds: dict[str, list] = {name: [] for name in ready}
        for _ in range(self.plan.rounds):
            for name, (call, one, calls, busy, _peak) in list(ready.items()):
                found = self._attempt(keys[name], partial(one_round, call, one.around, watch, calls, busy))
                if found is None:
                    del ready[name]
                else:
                    rounds[name].append(found)
        shape = case._asdict() | {"grid": list(case.grid), "tokens": case.tokens, "flops": case.flops(training)}
        del shape["name"], shape["compiled"]
        for name, (_call, one, _calls, _busy, peak) in ready.items():
            times = [[[round(x, 6) for x in column] for column in zip(*one_, strict=True)] for one_ in rounds[name]]
            self.samples.add(
                "time",
                **keys[name],
                of=one.kind,
                dtype=_short(self.dtype),
                **shape,
                rounds=[device for device, _ in times],
                host=[host for _, host in times],
                peak_bytes=peak,
            )

    def _prepare(self, call: Callable[[], object], one: Contender, watch: Stopwatch) -> tuple[int, float, int | None]:
        calls, busy = warm_up(call, one.around, watch, self.plan)
        return calls, busy, peak_bytes(call, one.around, self.device)

    def _ended(self, key: dict[str, str]) -> bool:
        return any(self.samples.has(kind, **key) for kind in _ENDS)

    def _attempt(self, key: dict[str, str], work: Callable[[], Any]) -> Any:
        """What `work` returns; None, and a row that says why, where it refuses or fails."""
        self.running.write_text(json.dumps(key))
        try:
            with torch.cuda.device(self.device) if self.gpu else nullcontext():
                found = work()
                if self.gpu:
                    torch.cuda.synchronize()
            return found
        except Exception as error:
            refused = is_refusal(error, key["contender"])
            text = str(error) if refused else f"{type(error).__name__}: {error}"
        self.samples.add("refused" if refused else "failed", **key, text=text[:800])
        free_or_lost(self.gpu)
        return None


def free_or_lost(gpu: bool) -> None:
    """Frees memory after a failure. DeviceLost where the device does not answer any more."""
    try:
        if gpu:
            torch.cuda.synchronize()
        free()
    except Exception as error:
        raise DeviceLost(str(error)) from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
