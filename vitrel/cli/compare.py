"""Train several models, and evaluate each at many image sizes: advice, tables, plots, a report.

    vitrel compare quickstart
    vitrel compare my_comparison.yaml --data /data/flowers

Writes results.csv, table.md, plots/*.png, report.html and a folder per model and seed into runs/<name>/, or into
runs/<name>/<data set>/ where the configuration has several data sets; --data NAME uses only one of these, and --data
path/to/NAME gives its folder. All models are trained with the first seed before any with the second. The same command resumes:
finished trainings and rows are reused, an interrupted training continues from its last checkpoint. If the folder has rows that
are not in the configuration, or of other weights, its files are first moved into a folder replaced-N in it. On a CPU, one model
per core is trained at a time, and as many processes share the images of the evaluation; --jobs sets the number.
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

GO_ON = "the same command resumes from here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel compare`."""
    names = ", ".join(sorted(packaged()))
    add = parser.add_argument
    add("config", type=Path, help=f"a YAML file, or the name of a packaged configuration: {names}")
    add(
        "--out",
        "-o",
        type=Path,
        default=Path("runs"),
        help="folder in which the comparison's folder is made; default runs",
    )
    add("--jobs", type=count, help="models trained at a time, and processes of the evaluation; default 1, on a CPU its cores")
    add("--data", help="use only the data set of this name; a path also gives its folder")
    add("--no-report", dest="report", action="store_false", help="tables and plots, but no pictures and no report.html")
    add("--no-images", dest="images", action="store_false", help="no photographs of the data in report.html")


def packaged() -> dict[str, Path]:
    """Return the paths of the configurations that come with the package, by name."""
    return {file.stem: file for file in Path(str(files("vitrel") / "configs")).glob("*.yaml")}


def run(args: argparse.Namespace) -> None:
    """Train and evaluate the models of the configuration, one data set after another."""
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
        compare(comparison, args.out / comparison.name, args.jobs or default_jobs(comparison), args.report, args.images)


def default_jobs(comparison: "Comparison") -> int:
    """Return the default of --jobs: the number of models times seeds, at most PyTorch's threads.

    It is 1 where training or evaluation would not run on the CPU, or trainer.devices is neither "auto" nor 1.

    Small models gain little from several threads, so a thread per model is faster.
    """
    import torch

    trainer = comparison.train["trainer"]
    other = torch.accelerator.is_available() and trainer.get("accelerator", "auto") != "cpu"
    if other or comparison.sweep.torch_device.type != "cpu" or trainer.get("devices", "auto") not in ("auto", 1):
        return 1
    return min(torch.get_num_threads(), len(comparison.entries) * len(comparison.seeds))


def check_models(comparison: "Comparison") -> None:
    """Raise ValueError, before any training, for a model that cannot be built, or has no parameters for position_lr_scale."""
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


def compare(comparison: "Comparison", folder: Path, jobs: int = 1, report: bool = True, images: bool = True) -> None:
    """Train missing models, evaluate all, and write the results into `folder`; `run_sweep` prints answers and tables.

    Where `folder` has rows that are not of this comparison, its files are first moved into a folder replaced-N in it. jobs:
    models trained at a time, and processes of the evaluation on a CPU. report: write report.html. images: whether it may
    contain photographs of the data.
    """
    from vitrel.evaluate.compare import evaluate_share, trained_models
    from vitrel.evaluate.processes import shared_with
    from vitrel.evaluate.results import left_out_note
    from vitrel.evaluate.run import run_sweep
    from vitrel.train.several import train_all

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    start = time.perf_counter()
    entries = {entry.label: entry for entry in comparison.entries if entry.weights_of is None}
    tuned = {label: bool(entry.tuned_from) for label, entry in entries.items()}
    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    listed = f"{len(entries)} models ({', '.join(entries)})"
    print(f"{comparison.name}: {listed}, {seeds}, trained on {comparison.data}, {jobs} at a time")
    print(f"checkpoints and results are written to {folder}", flush=True)
    folders = {(label, seed): folder / f"{label}-seed{seed}" for seed in comparison.seeds for label in entries}
    order = [(label, seed) for seed in comparison.seeds for label in sorted(entries, key=lambda label: tuned[label])]
    # with several jobs, all fine-tuning waits until the weights that it starts from are trained
    parts = [order] if jobs == 1 else [[run for run in order if tuned[run[0]] == is_tuned] for is_tuned in (False, True)]
    for part in filter(None, parts):
        train_all({folders[run]: comparison.training(entries[run[0]], run[1], folders[run]) for run in part}, jobs)
    trained = time.perf_counter()
    models, sweep = trained_models(comparison, folder), comparison.sweep
    others = jobs - 1 if sweep.torch_device.type == "cpu" else 0
    # replace: the table has exactly the rows of the configuration
    options = {"report": report, "claims": comparison.claims, "replace": True, "photographs": images}
    with terminable(), shared_with(others, evaluate_share, comparison, folder):
        rows = run_sweep(models, sweep, folder, comparison.name, **options)
    if comparison.claims:
        print(f"\nclaims of the configuration:\n{(folder / 'claims.md').read_text('utf-8')}")
    seconds = f"training {trained - start:.0f} s, evaluation {time.perf_counter() - trained:.0f} s"
    files = "results.csv, table.md, plots/" + (", report.html" if report else "")
    print(f"{left_out_note(rows, folder)}{seconds}; written to {folder}: {files}")
    if report:
        print(f"open {folder / 'report.html'} in a browser")
