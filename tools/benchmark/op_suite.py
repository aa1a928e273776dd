"""The suite of operators: every backend of vitrel.ops beside its peers, then cost against size; on the device at hand."""

import re
import time
from pathlib import Path
from typing import Any

import torch

from tools.benchmark.cases import CASES, CPU_CASES, QUICK, Case
from tools.benchmark.kernel_table import write_table
from tools.benchmark.runner import Measurement
from tools.benchmark.samples import Samples
from tools.benchmark.size_table import plot_sizes, size_section
from tools.benchmark.sizes import run_sizes
from tools.benchmark.timing import Repeats
from vitrel.files import atomic_write

_RATE = 5e10  # operations a second of one core, for the number of repeats alone


def run_ops(samples: Samples, device: torch.device, until: float, quick: bool, only: str, folder: Path) -> bool:
    """Measures what is still missing, the tables anew after every case; False where time ran out.

    until: `time.time()` after which nothing starts. only: a pattern that the names of cases match, those of sizes begin with
    "sizes". Inference ("forward") and training of each; a failure is a row.
    """
    gpu, running = device.type == "cuda", folder / ".running.json"
    for case in QUICK if quick else CASES if gpu else CPU_CASES:
        if not re.search(only, case.name):
            continue
        for mode in ("forward", "training"):
            if time.time() > until:
                return False
            torch._dynamo.reset()  # it compiles a function for a few shapes only
            plan = Repeats(2, 3, 0.0, 1) if quick else Repeats() if gpu else cpu_repeats(case, mode == "training")
            Measurement(samples, device, plan, until, running).measure(case, mode)
            running.unlink(missing_ok=True)
        write_ops(samples.rows, folder)
    return run_sizes(samples, device, until, quick, only, lambda: write_ops(samples.rows, folder))


def cpu_repeats(case: Case, training: bool) -> Repeats:
    """20 calls to warm up for what takes milliseconds; for what takes seconds 2, and one call a round."""
    seconds = case.flops(training) / _RATE
    return Repeats(warmup=max(2, min(20, int(2 / seconds))), seconds=0.1)


def write_ops(rows: list[dict[str, Any]], folder: Path) -> None:
    """table.md and the plots of cost against size, from the rows of the machine and code that were measured last."""
    with atomic_write(folder / "table.md") as part:
        part.write_text(write_table(rows) + "\n" + size_section(rows), "utf-8")
    plot_sizes(rows, folder)
