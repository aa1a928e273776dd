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
import contextlib
import io
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vitrel.cli.options import add_margin, count, packaged
from vitrel.common.exits import terminable
from vitrel.common.extras import TRAINING, require

if TYPE_CHECKING:
    from torch import nn

    from vitrel.compare.config import Comparison, Entry

GO_ON = "the same command resumes from here"
CLASSES = 10  # of models that are only built to check them; any number will do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel compare`."""
    names = ", ".join(packaged())
    add = parser.add_argument
    add("config", type=Path, help=f"a YAML file, or the name of a packaged configuration: {names}")
    into = "folder in which the comparison's folder is made; default %(default)s"
    add("--out", "-o", type=Path, default=Path("runs"), help=into)
    add("--jobs", type=count, help="models trained at a time, and processes of the evaluation; default 1, on a CPU its cores")
    add("--data", help="use only the data set of this name; a path also gives its folder")
    add_margin(parser)
    add("--no-report", dest="report", action="store_false", help="tables and plots, but no pictures and no report.html")
    add("--no-images", dest="photographs", action="store_false", help="no photographs of the data in report.html")


def run(args: argparse.Namespace) -> None:
    """Train and evaluate the models of the configuration, one data set after another."""
    require(*TRAINING, "pandas", "vl_convert")
    config = args.config if args.config.exists() else packaged().get(str(args.config), args.config)
    if not config.exists():
        raise FileNotFoundError(f"no {config}: give a YAML file, or one of {', '.join(packaged())}")
    from vitrel.compare.config import load_comparison
    from vitrel.evaluate.prepare import check_data

    comparisons = load_comparison(config, args.data)
    for comparison in comparisons:  # before the first is trained
        check_training_data(comparison)
        for size in comparison.train_sizes:
            check_data(comparison.sweep, size, task=comparison.task)
        check_models(comparison, args.out / comparison.name)
    for comparison in comparisons:
        sweep = replace(comparison.sweep, margin=args.margin, report=args.report, photographs=args.photographs)
        jobs = args.jobs or default_jobs(comparison)
        compare(replace(comparison, sweep=sweep), args.out / comparison.name, jobs)


def default_jobs(comparison: "Comparison") -> int:
    """Return the default of --jobs: the number of runs evaluated, at most PyTorch's threads.

    It is 1 where training or evaluation would not run on the CPU, or trainer.devices is neither "auto" nor 1.

    Small models gain little from several threads, so a thread per model is faster.
    """
    import torch

    trainer = comparison.train["trainer"]
    other = torch.accelerator.is_available() and trainer.get("accelerator", "auto") != "cpu"
    if other or comparison.sweep.torch_device.type != "cpu" or trainer.get("devices", "auto") not in ("auto", 1):
        return 1
    return min(torch.get_num_threads(), len(comparison.runs))


def check_training_data(comparison: "Comparison") -> None:
    """Raise ValueError or OSError, before any training, where the training images cannot be found."""
    from vitrel.data import create_dataset

    try:
        options = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "n": 1, "task": comparison.task}
        create_dataset(comparison.data, "train", comparison.train_size, **options)
    except ValueError as error:
        raise ValueError(f"training on {comparison.data}: {error}") from error


def check_models(comparison: "Comparison", folder: Path) -> None:
    """Raise ValueError or OSError, before any training, for models that cannot be built, trained or evaluated as configured.

    They are built as in training, from the weights that model.tuning names; entries with `weights_of` get the weights of their
    source. OSError where such weights are missing; an entry whose runs all have a checkpoint in `folder` no longer needs them
    and is read from there. Sizes and policies of the evaluation are those of `trials_of`.
    """
    from vitrel.compare.config import variant
    from vitrel.evaluate.checkpoint import load_checkpoint, trained_model
    from vitrel.evaluate.policies import at_size_with
    from vitrel.evaluate.trials import trials_of
    from vitrel.models.segmenter import Segmenter

    models = []
    for entry in comparison.entries:
        if entry.weights_of is not None:
            continue
        first = comparison.entry(entry.tuned_from or entry.label)
        config = comparison.training(first, 0, Path())
        tuning, size = config["model"].get("tuning") or {}, comparison.size_of(entry)
        paths = [comparison.checkpoint_of(first.label, seed, folder) for seed in first.seeds or ()]
        done = (tuning.get("init_from") or tuning.get("pretrained")) and all(path.exists() for path in paths)
        if done and not entry.tuned_from:
            trained = load_checkpoint(paths[0])
            built, name = trained.model, trained.name
        else:
            built, name, _ = _built(comparison, entry, paths[0] if done else None)
            built = Segmenter(built, CLASSES, comparison.head) if comparison.task == "segmentation" else built
        others = [(other, variant(built, name, other)) for other in comparison.entries if other.weights_of == entry.label]
        for each, model in ((entry, built), *others):
            models.append(trained_model(model.eval(), name, label=each.label, img_size=size, task=comparison.task))
    for trial in trials_of(models, comparison.sweep):
        at_size_with(trial.trained.model, trial.size, trial.policy)


def _built(comparison: "Comparison", entry: "Entry", source: Path | None = None) -> "tuple[nn.Module, str, dict[str, Any]]":
    """Build the model of a trained entry as at the start of its training; return it with the name and arguments that its
    checkpoints will have. An entry with `tuned_from` starts from the checkpoint `source`, or from its source before training.
    Errors as in `check_models`.
    """
    from vitrel.train.tuning import Tuning, within

    config = comparison.training(entry, 0, Path())
    model, size = config["model"], comparison.size_of(entry)
    settings = {**(model.get("tuning") or {}), "reset_head": None}  # the number of classes does not matter here
    with TemporaryDirectory() as place:
        if entry.tuned_from:
            settings["init_from"] = str(source or _untrained(comparison, comparison.entry(entry.tuned_from), Path(place)))
        elif (path := settings.get("init_from")) and not Path(path).exists():
            raise FileNotFoundError(f"{entry.label} starts from model.tuning.init_from {path}, which is not in {Path.cwd()}")
        try:
            tuning = Tuning(**settings)
            with contextlib.redirect_stdout(io.StringIO()):
                built, _ = tuning.build(entry.name, CLASSES, size, model["model_args"])
            tuning.freeze(built)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            start = f", starting from {entry.tuned_from}" if entry.tuned_from else ""
            raise ValueError(f"{entry.label} cannot be built{start}: {error}") from error
    scale, trainable = (model.get("optim") or {}).get("position_lr_scale") or 1, tuning.trainable
    position = built.position_parameters() if hasattr(built, "position_parameters") else set()
    if scale != 1 and not [name for name in position if trainable is None or within(name, trainable)]:
        raise ValueError(
            f"{entry.label} has no position parameters to train {scale:g} times as fast: give it "
            "train: {model: {optim: {position_lr_scale: 1}}}"
        )
    return built, *tuning.stored(built, entry.name, model["model_args"])


def _untrained(comparison: "Comparison", entry: "Entry", folder: Path) -> Path:
    """Write a checkpoint of an entry's model before training into `folder`, and return its path."""
    import torch

    from vitrel.models.config import preprocessing_of
    from vitrel.weights.record import position_record

    model, name, arguments = _built(comparison, entry)
    about: dict[str, Any] = {
        "model": name,
        "model_args": arguments,
        "classes": [*map(str, range(CLASSES))],
        "position": position_record(model),
    }
    about |= preprocessing_of(model)
    about["img_size"] = [*comparison.size_of(entry)]
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    torch.save({"state_dict": state, "vitrel": about}, folder / "untrained.ckpt")
    return folder / "untrained.ckpt"


def compare(comparison: "Comparison", folder: Path, jobs: int = 1) -> None:
    """Train missing models, evaluate all, and write the results into `folder`; `run_sweep` prints the advice and tables.

    Where `folder` has rows that are not of this comparison, its files are first moved into a folder replaced-N in it. jobs:
    models trained at a time, and processes of the evaluation on a CPU.
    """
    from vitrel.common.lock import only_writer

    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        _compare(comparison, folder, jobs)


def _compare(comparison: "Comparison", folder: Path, jobs: int) -> None:
    from vitrel.common.processes import shared_with
    from vitrel.compare.config import evaluate_share, trained_models
    from vitrel.compare.jobs import train_all
    from vitrel.evaluate.results.table import left_out_note
    from vitrel.evaluate.run import run_sweep

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    start = time.perf_counter()
    trainings = [(entry, seed) for entry, seed in comparison.runs if entry.weights_of is None]
    # all models with the first seed, then all with the second; what is fine-tuned comes after what it starts from
    trainings.sort(key=lambda run: (comparison.seeds.index(run[1]), bool(run[0].tuned_from)))
    print(_heading(comparison, trainings, jobs))
    print(f"checkpoints and results are written to {folder}", flush=True)
    # with several jobs, all fine-tuning waits until the weights that it starts from are trained
    tuned = [[run for run in trainings if bool(run[0].tuned_from) == is_tuned] for is_tuned in (False, True)]
    for part in filter(None, [trainings] if jobs == 1 else tuned):
        places = {folder / f"{entry.label}-seed{seed}": (entry, seed) for entry, seed in part}
        train_all({place: comparison.training(*run, place) for place, run in places.items()}, jobs)
    trained = time.perf_counter()
    models, sweep = trained_models(comparison, folder), comparison.sweep
    others = jobs - 1 if sweep.torch_device.type == "cpu" else 0
    with terminable(), shared_with(others, evaluate_share, comparison, folder):
        # replace: the table has exactly the rows of the configuration
        rows = run_sweep(models, sweep, folder, comparison.name, replace=True)
    seconds = f"training {trained - start:.0f} s, evaluation {time.perf_counter() - trained:.0f} s"
    files = "results.csv, table.md, plots/" + (", report.html" if sweep.report else "")
    print(f"{left_out_note(rows, folder)}{seconds}; written to {folder}: {files}")
    if sweep.report:
        print(f"open {folder / 'report.html'} in a browser")


def _heading(comparison: "Comparison", trainings: "Sequence[tuple[Entry, int]]", jobs: int) -> str:
    """The line printed at the start: models, seeds, data."""
    labels = dict.fromkeys(entry.label for entry, _ in trainings)
    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    if len(trainings) < len(labels) * len(comparison.seeds):
        seeds += f" ({len(trainings)} runs)"
    data, evaluated = comparison.data, comparison.sweep.data
    on = f"trained on {data}" + (f", evaluated on {evaluated}" if evaluated != data else "")
    return f"{comparison.name}: {len(labels)} models ({', '.join(labels)}), {seeds}, {on}, {jobs} at a time"
