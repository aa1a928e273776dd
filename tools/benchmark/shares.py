"""Where the time of a model's step goes, by kind of work: rows of `attribution.profile_step`, and a table of shares."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn

from tools.benchmark.attribution import KINDS, profile_step
from tools.benchmark.samples import Samples, last_run, machine_lines
from tools.benchmark.timing import Stopwatch
from vitrel.files import atomic_write

Row = dict[str, Any]
_MODES = ("inference", "training")
_EAGER, _OPTIMIZED, _TIMM = "ours, eager", "ours, optimized", "timm, eager"
_WARM_UP, _STEPS, _QUICK_STEPS = 1, 5, 2
_HOW = (
    "Own time of the operators in torch.profiler, by the module they run in (ranges put around the submodules by forward "
    "hooks) and, inside attention and in the blocks of optimized models, by their name and shapes; a gradient counts where "
    "its forward operator does. Training is forward, cross entropy and backward, drop path at the model's own rate. The "
    "share of a kind is the median of its time over the profiled steps, of the sum of these medians. The profiler's clock "
    "is wall time: other work on the machine shows. Not profiled: the same steps without profiler and hooks, processor time "
    "(on a GPU, its own)."
)


class Profiled(NamedTuple):
    """A step on `batch` square images of `size` pixels: names and arguments of our model and, where there is one, timm's."""

    name: str
    size: int
    batch: int
    ours: tuple[str, dict[str, Any]]
    peer: tuple[str, dict[str, Any]] | None = None

    @property
    def contenders(self) -> tuple[str, ...]:
        """Whose steps are profiled."""
        return (_EAGER, _OPTIMIZED) if self.peer is None else (_EAGER, _OPTIMIZED, _TIMM)


_CASES = (
    Profiled("Swin-T 224, batch 8", 224, 8, ("vitrel_swin_t", {}), ("swin_tiny_patch4_window7_224", {})),
    Profiled("ViT-S table 224, batch 8", 224, 8, ("vitrel_vit_s16_table", {})),
    Profiled("ViT-S table 448, batch 1", 448, 1, ("vitrel_vit_s16_table", {"img_size": 448})),
)
_SMALL = {"img_size": 64, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2)}
_QUICK = (
    Profiled("Swin-N 64, batch 2", 64, 2, ("vitrel_swin_n", {}), ("swin_tiny_patch4_window7_224", _SMALL)),
    Profiled("ViT-N table 64, batch 2", 64, 2, ("vitrel_vit_n8_table", {})),
)


def run_shares(samples: Samples, device: torch.device, until: float, quick: bool, only: str, folder: Path) -> bool:
    """Profiles every contender of the cases whose name matches `only`; what is measured already is left out.

    until: `time.time()` after which nothing starts. Writes the table into `folder` after each case. False: time ran out.
    """
    for case in _QUICK if quick else _CASES:
        if not re.search(only, case.name):
            continue
        for mode in _MODES:
            for contender in case.contenders:
                key = {"case": case.name, "mode": mode, "contender": contender}
                if any(samples.has(kind, **key) for kind in ("shares", "failed")):
                    continue
                if time.time() > until:
                    return False
                try:
                    found = _measure(case, mode, contender, device, _QUICK_STEPS if quick else _STEPS)
                except Exception as error:
                    samples.add("failed", **key, text=f"{type(error).__name__}: {error}"[:800])
                else:
                    samples.add("shares", **key, **found)
        write_shares(samples.rows, folder)
    return True


def shares(ms: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds of every kind in each of some steps -> percent of the whole; they sum to 100."""
    middle = {kind: median(times) for kind, times in ms.items()}
    total = sum(middle.values())
    return {kind: 100 * value / total for kind, value in middle.items()}


def write_shares(rows: list[Row], folder: Path) -> None:
    """folder/table.md from the rows of the last machine and code: one table a mode, with a column for each model."""
    with atomic_write(folder / "table.md") as part:
        part.write_text(_page(rows), "utf-8")


def _measure(case: Profiled, mode: str, contender: str, device: torch.device, steps: int) -> Row:
    torch.manual_seed(0)
    training = mode == "training"
    name, args = case.peer if contender == _TIMM else case.ours
    model = timm.create_model(name, **args).to(device).train(training)
    if contender == _OPTIMIZED:
        from vitrel.cpu.optimize import optimize

        optimize(model, training=training)
    image = torch.randn(case.batch, 3, case.size, case.size, device=device)
    step = _training(model, image) if training else _inference(model, image)
    watch = Stopwatch(device, isolated=False)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    plain = []
    for number in range(-_WARM_UP, steps):
        model.zero_grad()
        times = profile_step(step, model, device, hooked=training or contender != _OPTIMIZED)
        model.zero_grad()
        took, _ = watch(step)
        if number >= 0:
            plain.append(round(took, 4))
            for kind, ms in times.items():
                found[kind].append(round(ms, 4))
    return {"ms": found, "not_profiled_ms": plain}


def _inference(model: nn.Module, image: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.inference_mode():
            model(image)

    return step


def _training(model: nn.Module, image: torch.Tensor) -> Callable[[], None]:
    target = torch.zeros(len(image), dtype=torch.long, device=image.device)

    def step() -> None:
        F.cross_entropy(model(image), target).backward()

    return step


def _page(rows: list[Row]) -> str:
    machine, rows = last_run(rows)
    lines = ["# Where the time goes", "", *machine_lines(machine), "", _HOW, ""]
    for mode in _MODES:
        lines += [f"## {mode.capitalize()}", "", *_table([row for row in rows if row.get("mode") == mode]), ""]
    lines += ["## The kinds", "", *(f"- {kind}: {what}" for kind, what in KINDS.items()), ""]
    failed = [f"- {row['case']}, {row['mode']}, {row['contender']}: {row['text']}" for row in rows if row["kind"] == "failed"]
    return "\n".join([*lines, "## Failed", "", *(failed or ["Nothing."]), ""])


def _table(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row["kind"] == "shares"]
    if not rows:
        return ["Not measured."]
    columns = [shares(row["ms"]) for row in rows]
    body = [[kind, *(f"{column[kind]:.1f}" for column in columns)] for kind in KINDS]
    profiled = [sum(median(times) for times in row["ms"].values()) for row in rows]
    body.append(["ms, profiled", *(f"{ms:.1f}" for ms in profiled)])
    body.append(["ms, not profiled", *(f"{median(row['not_profiled_ms']):.1f}" for row in rows)])
    head = ["% of a step", *(f"{row['case']}: {row['contender']}" for row in rows)]
    lines = [head, ["---", *("---:" for _ in rows)], *body]
    return [f"| {' | '.join(line)} |" for line in lines]
