"""Benchmark models against other libraries and the cost of encodings on a CPU; rows go to results/benchmark.

    python -m tools.benchmark                     # the suites cpu and scale, and the tables of docs/performance.md
    python -m tools.benchmark --suite cpu         # models on the CPU; run again: only missing rows
    python -m tools.benchmark --suite scale       # every encoding: time and memory from 196 to 16,384 tokens
    python -m tools.benchmark --suite cpu --quick # small models and few repeats: a smoke test
    python -m tools.benchmark --table             # tables, plot and the page again, from the samples

Only what passes its gate is timed: outputs and gradients are compared with the definition in float64. A failure is a row.
Everything runs in one thread and is measured in CPU time. On a GPU `python -m tools.gpu bench` measures.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tools.benchmark.engine import Case, Engine
from tools.benchmark.models import model_cases
from tools.benchmark.page import PAGE, scale_table, tables
from tools.benchmark.plots import plot_scale
from tools.benchmark.samples import ROOT, Samples, footer, last_run, machine, read_rows
from tools.benchmark.scale import scale_cases
from tools.benchmark.tables import Row, not_timed, times
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
_SCALE = (
    "vitrel/position/*.py",
    "vitrel/ops/*.py",
    "vitrel/ops/backends/*.py",
    *(f"tools/benchmark/{name}.py" for name in ("scale", "worker")),
)


class Suite(NamedTuple):
    """A suite: `cases(quick)`, the table of its rows, the code whose change makes rows obsolete."""

    cases: Callable[[bool], list[Case]]
    table: Callable[[list[Row]], list[str]]
    code: tuple[str, ...]


SUITES = {"cpu": Suite(model_cases, times, _MODELS), "scale": Suite(scale_cases, scale_table, _SCALE)}


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit with status 2 on bad usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--suite", choices=list(SUITES), help="default: cpu, then scale, and the page")
    parser.add_argument("--quick", action="store_true", help="small models and few repeats")
    parser.add_argument("--table", action="store_true", help="measure nothing, the table, the plot and the page again")
    parser.add_argument("--only", type=re.compile, default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "benchmark", help="output folder; results go to DEVICE/SUITE in it"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    folders = [_run(parser, args, name) for name in ([args.suite] if args.suite else ["cpu", "scale"])]
    if not args.suite and not args.quick:
        fill_pages(ROOT, {PAGE: tables(*(read_rows(folder / "samples.jsonl") for folder in folders))})


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> Path:
    """Measure what a suite lacks, print its table, and return its folder."""
    suite = SUITES[name]
    ran_on = machine(torch.device("cpu"), code=suite.code)
    folder = args.out / re.sub(r"[^a-z0-9]+", "-", ran_on["device"].lower()).strip("-")
    folder /= f"{name}-quick" if args.quick else name
    path = folder / "samples.jsonl"
    if args.table and not path.exists():
        parser.error(f"{path} is not there: measure first, without --table")
    if not args.table:
        samples = Samples(path, ran_on)
        samples.add("machine", **ran_on)
        engine = Engine(samples)
        for case in suite.cases(args.quick):
            if re.search(args.only, case.name):
                engine.measure(case)
    about, rows = last_run(read_rows(path))
    print("\n".join([f"{footer(about)}.", "", *suite.table(rows), "", *not_timed(rows)]))
    if name == "scale" and any(row["kind"] == "size" for row in rows):
        plot_scale(rows, footer(about), folder / "scale_inference.png")
    return folder


if __name__ == "__main__":
    main()
