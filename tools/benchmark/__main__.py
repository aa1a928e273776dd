"""Benchmark models and attention against other libraries; writes results/benchmark/<device>/<suite>.

    python -m tools.benchmark                     # the suites cpu and scale, and the tables of docs/performance.md
    python -m tools.benchmark --suite cpu         # models on the CPU; run again: only missing rows
    python -m tools.benchmark --suite scale       # every encoding: time and memory from 196 to 16,384 tokens
    python -m tools.benchmark --suite gpu         # models on the GPU
    python -m tools.benchmark --suite ops         # attention: backends and peers
    python -m tools.benchmark --suite cpu --quick # small models and few repeats: a smoke test
    python -m tools.benchmark --table             # tables, plots and the page again, from the samples

Only what passes its gate is timed: outputs and gradients are compared with the definition in float64. A failure is a row.
On a CPU everything runs in one thread and is measured in CPU time. Without a GPU the Triton kernels are measured
only where TRITON_INTERPRET=1 is set, and those times mean nothing.
"""

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tools.benchmark.attention import attention_cases
from tools.benchmark.engine import Case, Engine
from tools.benchmark.models import model_cases
from tools.benchmark.page import PAGE, tables
from tools.benchmark.samples import ROOT, Samples, machine, read_rows
from tools.benchmark.scale import scale_cases
from tools.benchmark.tables import Page, attention_page, model_page, scale_page, write
from tools.study.pages import fill_pages

_MODELS = (
    "vitrel/grid.py",
    "vitrel/position/*.py",
    "vitrel/ops/*.py",
    "vitrel/ops/backends/*.py",
    "vitrel/layers/*.py",
    "vitrel/models/*.py",
    *(f"tools/benchmark/{name}.py" for name in ("models", "engine", "worker")),
)
_OPS = (
    "vitrel/ops/*.py",
    "vitrel/ops/backends/*.py",
    *(f"tools/benchmark/{name}.py" for name in ("shapes", "methods", "attention", "engine", "worker")),
)
_SCALE = (
    "vitrel/position/*.py",
    "vitrel/ops/*.py",
    "vitrel/ops/backends/*.py",
    *(f"tools/benchmark/{name}.py" for name in ("scale", "worker")),
)
_ONE_CALL = "a process for an encoding, a call for a number; "
_PROCESSES = "every contender in a fresh process with empty caches of compilers, A B A B; "
_WEIGHTS = (
    _PROCESSES + "the same weights for all, drawn, tables of standard deviation 0.5; drop path 0; training is forward, cross "
    "entropy, backward and fused AdamW; "
)
_NUMBERS = _PROCESSES + "random numbers, tables of standard deviation 0.5; on a GPU a cold second-level cache; "
_TIMES = {"cpu": "processor time of the process", "cuda": "CUDA events around a call"}


class Suite(NamedTuple):
    """A suite: title, `cases(gpu, quick)`, the function that renders its page, the code whose change makes rows obsolete."""

    title: str
    cases: Callable[[bool, bool], list[Case]]
    page: Page
    code: tuple[str, ...]
    how: str = ""


SUITES = {
    "cpu": Suite("Models", model_cases, model_page, _MODELS, _WEIGHTS),
    "gpu": Suite("Models", model_cases, model_page, _MODELS, _WEIGHTS),
    "ops": Suite("Kernels", attention_cases, attention_page, _OPS, _NUMBERS),
    "scale": Suite("Cost against size", scale_cases, scale_page, _SCALE, _ONE_CALL),
}


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit with status 2 on bad usage, or if the suite needs a GPU and there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--suite", choices=list(SUITES), help="default: cpu, then scale, and the page")
    parser.add_argument("--quick", action="store_true", help="small models and few repeats")
    parser.add_argument("--table", action="store_true", help="measure nothing, rewrite the table and the plots")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--seconds", type=float, default=7200, help="time after which no further case is started")
    parser.add_argument("--commit", default="", help="commit to record if there is no git")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "benchmark", help="output folder; results go to DEVICE/SUITE in it"
    )
    args = parser.parse_args(argv)
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only!r} is no regular expression: {error}")
    if args.suite == "gpu" and not torch.cuda.is_available():
        parser.error(
            "--suite gpu needs a GPU, and PyTorch sees none here; --suite cpu measures the same models on the processor"
        )
    torch.set_num_threads(1)
    folders = [_run(parser, args, name) for name in ([args.suite] if args.suite else ["cpu", "scale"])]
    if not args.suite and not args.quick:
        fill_pages(ROOT, {PAGE: tables(*(read_rows(folder / "samples.jsonl") for folder in folders))})


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> Path:
    """Measure what a suite lacks, write its tables, and return its folder."""
    on_gpu = torch.cuda.is_available() and name != "cpu" and args.suite is not None
    device = torch.device("cuda" if on_gpu else "cpu")
    suite = SUITES[name]
    ran_on = machine(device, args.commit, suite.code)
    folder = args.out / re.sub(r"[^a-z0-9]+", "-", ran_on["device"].lower()).strip("-")
    folder /= f"{name}-quick" if args.quick else name
    path = folder / "samples.jsonl"
    if args.table and not path.exists():
        parser.error(f"{path} is not there: measure first, without --table")
    if not args.table:
        samples = Samples(path, ran_on)
        samples.add("machine", **ran_on, how=suite.how + _TIMES[device.type])
        cases = suite.cases(device.type == "cuda", args.quick)
        until = time.time() + args.seconds
        finished = Engine(samples, device).run(
            cases, args.only, until, lambda: write(suite.page, suite.title, samples.rows, folder)
        )
        print("all measured" if finished else "time is up: run it again for the rest", flush=True)
    write(suite.page, suite.title, read_rows(path), folder)
    print((folder / "table.md").read_text(), end="")
    return folder


if __name__ == "__main__":
    main()
