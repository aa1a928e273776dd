"""Train several models, and evaluate each at many image sizes: which one to take at which size, tables, plots, a report.

    vitrel compare quickstart
    vitrel compare my_comparison.yaml --data /data/flowers

Writes an evaluation and a folder per model and seed into runs/<name>/, or into runs/<name>/<data set>/ where the configuration
has several data sets; --data path/to/NAME uses only the one of this name. Models are trained seed by seed, of a seed those with
more images first; those that are tuned from another after all seeds of the others. The same command goes on where it was
stopped; one with other sizes, models or protocols adds rows. On a CPU, one model per core is trained at a time, and as many
processes share the images of the evaluation; --jobs sets the number.
"""

import argparse
import logging
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.cli.options import add_report, count, packaged
from vitrel.common.extras import TRAINING, require

if TYPE_CHECKING:
    from vitrel.compare.config import Comparison

GO_ON = "the same command resumes from here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel compare` to its parser."""
    names = ", ".join(packaged())
    add = parser.add_argument
    add("config", type=Path, help=f"a YAML file, or the name of a packaged configuration: {names}")
    into = "folder in which the comparison's folder is made; default %(default)s"
    add("--out", "-o", type=Path, default=Path("runs"), help=into)
    add("--jobs", type=count, help="models trained at a time, and processes of the evaluation; default 1, on a CPU its cores")
    add("--data", help="folder or name of the data; of several data sets in the file, only that of the same name is used")
    add("--overwrite", action="store_true", help="evaluate anew where the folder holds another evaluation; runs are kept")
    add_report(parser)
    parser.set_defaults(margin=None, report=None, photographs=None)  # else those in the file are replaced by defaults


def run(args: argparse.Namespace) -> None:
    """Train and evaluate the models of the configuration, one data set after another; prints progress and writes into --out."""
    require(*TRAINING, "pandas", "matplotlib")
    config = args.config if args.config.exists() else packaged().get(str(args.config), args.config)
    if not config.exists():
        raise FileNotFoundError(f"no {config}: give a YAML file, or one of {', '.join(packaged())}")
    import torch

    from vitrel.compare.config import load_comparison

    comparisons = load_comparison(config, args.out, args.data)
    for comparison in comparisons:  # before the first is trained
        check(comparison)
    given = {"margin": args.margin, "report": args.report, "photographs": args.photographs}
    how = {name: value for name, value in given.items() if value is not None}
    how |= {"overwrite": args.overwrite, "command": shlex.join(["vitrel", *sys.argv[1:]])}
    for comparison in comparisons:
        own = 1 if torch.accelerator.is_available() else min(torch.get_num_threads(), len(comparison.runs))
        compare(comparison, args.jobs or own, how)


def check(comparison: "Comparison") -> None:
    """Raise ValueError or OSError for data that cannot be found and models that cannot be built or evaluated as configured.

    It runs before any training. A comparison of which every run has its last checkpoint is not checked.
    """
    from vitrel.compare.models import untrained_models
    from vitrel.evaluate.policies import at_size_with
    from vitrel.evaluate.run import opened
    from vitrel.evaluate.sweep import Settings

    if all(run.checkpoint.exists() for run in comparison.runs):
        return
    _, plan = opened(untrained_models(comparison), comparison.evaluated, Settings(**comparison.settings))
    for trial in plan:
        at_size_with(trial.trained.model, trial.view.window or trial.size, trial.policy)


def compare(comparison: "Comparison", jobs: int, how: dict[str, Any]) -> None:
    """Train missing models, evaluate all, and write the results into the comparison's folder; print the plan, then the seconds.

    Args:
        jobs: models trained at a time, and processes of the evaluation on a CPU.
        how: arguments of `vitrel.evaluate.run.at_sizes`, such as margin and overwrite.
    """
    from vitrel.common.lock import only_writer
    from vitrel.common.processes import in_processes, local_device
    from vitrel.compare.jobs import train_all
    from vitrel.compare.models import evaluate

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    start, seeds = time.perf_counter(), [*dict.fromkeys(run.seed for run in comparison.runs)]
    labels, trainings = dict.fromkeys(run.label for run in comparison.runs), {run.folder: run for run in comparison.runs}
    on = comparison.data + (f", evaluated on {comparison.evaluated}" if comparison.evaluated != comparison.data else "")
    print(f"{comparison.name}: {', '.join(labels)}; runs: {len(trainings)}, seeds: {len(seeds)}, on {on}, {jobs} at a time, "
          f"in {comparison.folder}", flush=True)  # fmt: skip
    with only_writer(comparison.folder):
        for tuned in (False, True):  # what is tuned comes after what it starts from
            runs = [run for run in trainings.values() if run.tuned == tuned]
            runs.sort(key=lambda run: (seeds.index(run.seed), -run.images))  # the longest first: it would be alone at the end
            train_all({run.folder: run.training for run in runs}, jobs)
    trained = time.perf_counter()
    if jobs > 1 and local_device(comparison.settings.get("device", "auto")).type == "cpu":
        in_processes(jobs, evaluate, comparison, how)
    else:
        evaluate(comparison, how)
    print(f"training {trained - start:.0f} s, evaluation {time.perf_counter() - trained:.0f} s")
