"""Train several models, evaluate each at many resolutions, and say what had to be resized.

    vitrel compare quickstart
    vitrel compare my_comparison.yaml --data /data/flowers

Writes into runs/<name>/: results.csv, table.md, plots/*.png, and a folder per model and seed; with several data sets, into a
folder for each; --data NAME takes one of them alone, and --data path/to/NAME says where it lies. One at a time, all models are
trained with the first seed before any with the second. What is done already is not done again, what was interrupted goes on
from its last checkpoint. Rows that the configuration lists no more, or of other weights, are moved into a folder replaced-1,
-2, ... there. On a CPU as many models are trained at a time as it has cores, each on one of them, and as many processes share
the images of the evaluation, which takes less time than one after the other; --jobs says how many.
"""

import argparse
import logging
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from vitrel.cli.options import count
from vitrel.exits import terminable

if TYPE_CHECKING:
    from vitrel.evaluate.compare import Comparison

GO_ON = "the same command goes on from here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel compare`."""
    inside = ", ".join(sorted(packaged()))
    add = parser.add_argument
    add("config", type=Path, help=f"a YAML file, or the name of one that comes with vitrel: {inside}")
    add(
        "--out",
        "-o",
        type=Path,
        default=Path("runs"),
        help="folder for the results, which get one of the comparison's name; default runs",
    )
    add("--jobs", type=count, help="models trained at a time, and processes that evaluate; default 1, on a CPU its cores")
    add("--data", help="of several data sets, the one of this name alone; a path also says where it lies")
    add("--no-report", dest="report", action="store_false", help="tables and plots, but no pictures and no report.html")


def packaged() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    return {file.stem: file for file in Path(str(files("vitrel") / "configs")).glob("*.yaml")}


def run(args: argparse.Namespace) -> None:
    """Trains and evaluates what the configuration lists, data set after data set."""
    config = args.config if args.config.exists() else packaged().get(str(args.config), args.config)
    if not config.exists():
        raise FileNotFoundError(f"no {config}: give a YAML file, or one of {', '.join(sorted(packaged()))}")
    from vitrel.evaluate.compare import load_comparison
    from vitrel.evaluate.images import check_data

    comparisons = load_comparison(config, args.data)
    for comparison in comparisons:  # before the first is trained
        for size in comparison.train_sizes:
            check_data(comparison.sweep, size)
        check_models(comparison)
    for comparison in comparisons:
        compare(comparison, args.out / comparison.name, args.jobs or default_jobs(comparison), args.report)


def default_jobs(comparison: "Comparison") -> int:
    """As many as there are models with a seed, at most PyTorch's threads; 1 where training or evaluation is not on the CPU.

    Small operators gain nothing from several threads, which wait for each other, and on a busy machine for long.
    """
    import torch

    trainer = comparison.train["trainer"]
    other = torch.accelerator.is_available() and trainer.get("accelerator", "auto") != "cpu"
    if other or comparison.sweep.torch_device.type != "cpu" or trainer.get("devices", "auto") not in ("auto", 1):
        return 1
    return min(torch.get_num_threads(), len(comparison.entries) * len(comparison.seeds))


def check_models(comparison: "Comparison") -> None:
    """ValueError now, not after hours of training, for a model that cannot be built, or a rate for what it does not have."""
    import timm

    from vitrel.train.tuning import Tuning, within

    for entry in comparison.entries:
        config = comparison.training(entry, 0, Path())
        model, size = config["model"], config["data"]["size"]
        trained = (model.get("tuning") or {}).get("trainable")
        try:
            built = timm.create_model(entry.name, img_size=size, **model["model_args"])
            Tuning(trainable=trained).freeze(built)
        except (RuntimeError, TypeError, ValueError) as error:
            what = f"have the weights of {entry.weights_of}" if entry.weights_of else "be built"
            raise ValueError(f"{entry.label} cannot {what}: {error}") from error
        scale = (model.get("optim") or {}).get("position_lr_scale", 1)
        position = built.position_parameters() if hasattr(built, "position_parameters") else set()
        if scale != 1 and entry.weights_of is None and not [n for n in position if trained is None or within(n, trained)]:
            raise ValueError(
                f"{entry.label} has no position parameters to train {scale:g} times as fast: give it "
                "train: {model: {optim: {position_lr_scale: 1}}}"
            )


def compare(comparison: "Comparison", folder: Path, jobs: int = 1, report: bool = True) -> None:
    """Trains what is missing, evaluates all, and prints the answer for every model and the tables."""
    from vitrel.evaluate.compare import evaluate_share, trained_models
    from vitrel.evaluate.processes import shared_with
    from vitrel.evaluate.report import summary
    from vitrel.evaluate.results import left_out_note
    from vitrel.evaluate.run import run_sweep
    from vitrel.train.several import train_all

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    start = time.perf_counter()
    own = {entry.label: entry for entry in comparison.entries if entry.weights_of is None}
    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    print(f"{comparison.name}: {len(own)} models ({', '.join(own)}), {seeds}, trained on {comparison.data}, {jobs} at a time")
    print(f"checkpoints and results are written to {folder}", flush=True)
    places = {(label, seed): folder / f"{label}-seed{seed}" for seed in comparison.seeds for label in own}
    order = [(label, seed) for seed in comparison.seeds for label in sorted(own, key=lambda label: bool(own[label].tuned_from))]
    # one after the other in this order; several at a time only once what they start from is there
    parts = (
        [order] if jobs == 1 else [[run for run in order if bool(own[run[0]].tuned_from) == tuned] for tuned in (False, True)]
    )
    for part in filter(None, parts):
        train_all({places[run]: comparison.training(own[run[0]], run[1], places[run]) for run in part}, jobs)
    trained = time.perf_counter()
    models, sweep = trained_models(comparison, folder), comparison.sweep
    others = jobs - 1 if sweep.torch_device.type == "cpu" else 0
    # the configuration says which rows there are: of other weights or settings, or of what it lists no more, none may stay
    with terminable(), shared_with(others, evaluate_share, comparison, folder):
        rows = run_sweep(models, sweep, folder, comparison.name, report, comparison.claims, replace=True)
    if comparison.claims:
        print(f"\nclaims of the configuration:\n{(folder / 'claims.md').read_text('utf-8')}")
    seconds = f"training {trained - start:.0f} s, evaluation {time.perf_counter() - trained:.0f} s"
    files = "results.csv, table.md, plots/" + (", report.html" if report else "")
    print(f"\n{summary(rows, folder)}\n{left_out_note(rows, folder)}{seconds}; written to {folder}: {files}")
    if report:
        print(f"open {folder / 'report.html'} in a browser")
