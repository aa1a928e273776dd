"""One process a model, many resolutions: throughput, memory, and what every new size costs until its first result is there."""

import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tools.benchmark.model_cases import ModelCase, ModelContender
from tools.benchmark.model_gates import ModelGate, model_worker
from tools.benchmark.models import MODELS
from tools.benchmark.processes import Worker, WorkerFailed, take_turns
from tools.benchmark.resolution_table import write_resolutions
from tools.benchmark.samples import Samples
from tools.benchmark.timing import Repeats

Size = tuple[int, int]
SIZES = ((224, 224), (96, 96), (128, 128), (128, 192), (160, 224), (320, 256), (384, 320), (448, 448))  # native first
_FEW = ((224, 224), (128, 128), (320, 256), (448, 448))  # for peers that a processor compiles a minute for each
_QUICK = ((112, 112), (96, 144), (128, 128))
_PLANS = {"quick": Repeats(1, 2, 0.2, 2), "cpu": Repeats(2, 7, 1.0, 3), "cuda": Repeats(20, 7, 0.3, 20)}


def run_resolutions(samples: Samples, device: torch.device, until: float, quick: bool, only: str, folder: Path) -> bool:
    """Measures the models whose name matches `only`, and writes table and plots after each.

    until: `time.time()` after which no further model is started; False where it came to that.
    """
    sweep = ResolutionSweep(samples, device, quick)
    for model in ("Swin nano", "ViT nano table") if quick else ("Swin-T", "ViT-S table"):
        if not re.search(only, model):
            continue
        if time.time() > until:
            return False
        sweep.measure(model)
        write_resolutions(samples.rows, folder)
    return True


class ResolutionSweep:
    """Writes a row for each contender and size into `samples`; a model that is there already is not measured again."""

    def __init__(self, samples: Samples, device: torch.device, quick: bool = False):
        self.samples, self.device, self.quick = samples, device.type, quick
        self.plan = _PLANS["quick" if quick else device.type]
        self.sizes = _QUICK if quick else SIZES
        self.batch, self.dtype = (32, "bfloat16") if self.device == "cuda" else (1, "float32")
        self.threads = torch.get_num_threads()

    def contenders(self, model: str) -> list[ModelContender]:
        """timm's plain model first, whose error at the native size is the yardstick."""
        swin = "swin" in MODELS[model].timm
        found = [ModelContender("timm", "peer", model, "timm", "eager", swin)]
        found.append(ModelContender("ours", "ours", model, "ours", "eager"))
        if self.device == "cpu":
            found.append(ModelContender("ours, optimized", "ours", model, "ours", "optimized"))
        if not self.quick:  # minutes, even for small models
            found.append(ModelContender("ours, compiled", "ours", model, "ours", "compiled"))
            found.append(ModelContender("timm, compiled", "peer", model, "timm", "compiled", swin))
        return found

    def sizes_of(self, one: ModelContender) -> tuple[Size, ...]:
        """The resolutions that a contender is measured at: fewer for what a processor compiles anew at each."""
        few = one.of == "peer" and one.how == "compiled" and self.device == "cpu"
        return tuple(size for size in self.sizes if size in _FEW or not few)

    def measure(self, model: str) -> None:
        """All resolutions, one after the other; at each all contenders that are right so far, in turns."""
        known = [one for one in self.contenders(model) if not self._ended(one)]
        if all(self.samples.has("time", **self._key(one, size)) for one in known for size in self.sizes_of(one)):
            return
        with ExitStack() as stack:
            definition = ModelContender("the definition", "ours", model, "ours/timm", "reference")
            truth = stack.enter_context(self._worker(definition))
            workers = {one: stack.enter_context(self._worker(one)) for one in known}
            yardstick = None
            for size in self.sizes:
                print(f"{model}, {size[0]}x{size[1]}", flush=True)
                if (found := self._visit(definition, truth, size)) is None:
                    return
                gate = ModelGate(found[1], self.dtype)
                gate.yardstick = yardstick
                self._measure_at(size, gate, workers)
                yardstick = gate.yardstick

    def _measure_at(self, size: Size, gate: ModelGate, workers: dict[ModelContender, Worker]) -> None:
        """Takes those that fail or are wrong out of `workers`."""
        first: dict[ModelContender, tuple[float, int]] = {}
        for one, worker in list(workers.items()):
            if size in self.sizes_of(one):
                before = 0 if size == self.sizes[0] else worker.compiles()
                found = self._visit(one, worker, size)
                if found is None or not self._passes(one, size, gate, found[1]):
                    workers.pop(one).close()
                else:
                    first[one] = found[0], before
        rounds, failed = take_turns({one: workers[one] for one in first}, self.plan)
        for one, error in failed.items():
            self.samples.add("failed", **self._key(one, size), text=str(error))
            workers.pop(one).close()
        for one, times in rounds.items():
            seconds, before = first[one]
            compiles = workers[one].compiles()
            own = dict(
                of=one.of, model=one.model, how=one.how, size=list(size), batch=self.batch, dtype=self.dtype, rounds=times
            )
            own |= dict(first_call_s=seconds, compiles=compiles, new_compiles=compiles - before) | workers[one].memory()
            self.samples.add("time", **self._key(one, size), **own)

    def _visit(self, one: ModelContender, worker: Worker, size: Size) -> tuple[float, dict[str, torch.Tensor]] | None:
        """Seconds until the first result of a size, and that result; None, and a row, where it fails."""
        try:
            if size == self.sizes[0]:
                return worker.start()["first_call_s"], worker.outcome()
            start = time.perf_counter()
            worker.set(size=size)
            worker.run(1)
            return time.perf_counter() - start, worker.outcome()
        except WorkerFailed as error:
            self.samples.add("failed", **self._key(one, size), text=str(error))
            return None

    def _passes(self, one: ModelContender, size: Size, gate: ModelGate, found: dict[str, torch.Tensor]) -> bool:
        """Peers are held to it at the native size alone: elsewhere they resize tables or look into padding, their own way."""
        if one.of == "peer" and size != self.sizes[0]:
            return True
        text, errors = gate.check(found, one.of == "ours")
        self.samples.add("wrong" if text else "check", **self._key(one, size), text=text, errors=errors)
        return not text

    def _worker(self, one: ModelContender) -> Worker:
        dtype = "float64" if one.how == "reference" else self.dtype
        case = ModelCase("", (one.model,), self.sizes[0], self.batch, dtype, "inference")
        return model_worker(one, case, self.device, self.threads)

    def _key(self, one: ModelContender, size: Size) -> dict[str, Any]:
        case = f"{one.model} over resolutions, batch {self.batch}"
        return {"case": case, "mode": f"inference, {size[0]}x{size[1]}", "contender": one.name}

    def _ended(self, one: ModelContender) -> bool:
        return any(self.samples.has(kind, **self._key(one, size)) for kind in ("wrong", "failed") for size in self.sizes)
