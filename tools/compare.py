"""Train several models, evaluate each at many resolutions, and say what had to be resized.

    python tools/compare.py configs/quickstart.yaml

Writes into runs/<name>/: results.csv, table.md, plots/*.png, and a folder per model and seed. What is done already is not
done again, what was interrupted goes on from its last checkpoint.
"""

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from vitrel.train.cli import run
from vitrel.transfer.checkpoint import Trained, load_checkpoint
from vitrel.transfer.comparison import Comparison, load_comparison
from vitrel.transfer.evaluate import check_data
from vitrel.transfer.sweep import run_sweep, summary


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", type=Path, help="e.g. configs/quickstart.yaml")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the results; default runs")
    args = parser.parse_args(argv)
    try:
        comparison = load_comparison(args.config)
        compare(comparison, args.runs / comparison.name)
    except (ValueError, OSError, MemoryError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from here")


def compare(comparison: Comparison, folder: Path) -> None:
    """Trains what is missing, evaluates all, and prints the tables and one verdict per model."""
    check_data(comparison.sweep, comparison.train_size)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    start = time.perf_counter()
    runs = [(entry, seed) for entry in comparison.entries for seed in comparison.seeds]
    models: list[Trained] = []
    for number, (entry, seed) in enumerate(runs, 1):
        place = folder / f"{entry.label}-seed{seed}"
        print(f"[{number}/{len(runs)}] {entry.label}, seed {seed}: ", end="", flush=True)
        train(comparison.training(entry, seed, place), place)
        models.append(load_checkpoint(place / "checkpoints" / f"{comparison.checkpoint}.ckpt", entry.label, seed))
    trained = time.perf_counter()
    rows = run_sweep(models, comparison.sweep, folder, comparison.name)
    seconds = f"training {trained - start:.0f} s, evaluation {time.perf_counter() - trained:.0f} s"
    print(f"\n{summary(rows)}\n{seconds}; written to {folder}: results.csv, table.md, plots/")


def train(config: dict[str, Any], folder: Path) -> None:
    """Trains one model into `folder`, unless its last epoch is there; goes on from last.ckpt if that is of an earlier epoch.

    Raises ValueError when the folder holds a run of another configuration, or when training stopped early.
    """
    last, settings, epochs = folder / "checkpoints" / "last.ckpt", folder / "train.yaml", config["trainer"]["max_epochs"]
    arguments = ["fit", "--config", str(settings)]
    # as it will be read back: YAML knows no tuples
    config = yaml.safe_load(yaml.safe_dump(config))
    if last.exists():
        known = (yaml.safe_load(settings.read_text("utf-8")) if settings.exists() else None) or {}
        # the folder may have been moved with all that is in it
        if changes := [text for text in _differences(known, config) if not text.startswith("trainer.default_root_dir:")]:
            raise ValueError(
                f"{folder} holds a run of another configuration ({'; '.join(changes)}): "
                "remove that folder to train anew, or give the comparison another name"
            )
        done = epochs_done(last)
        if done >= epochs:
            print("trained already", flush=True)
            return
        print(f"going on after epoch {done} of {epochs}", flush=True)
        arguments += ["--ckpt_path", str(last)]
    else:
        print(f"training for {epochs} epochs", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
    settings.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    run(arguments)
    if not last.exists() or epochs_done(last) < epochs:
        raise ValueError(f"{folder}: training stopped before epoch {epochs}; give the same command again to go on")


def epochs_done(checkpoint: Path) -> int:
    """Epochs that a checkpoint's model has been trained for; ValueError when the file is broken."""
    try:
        return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["vitrel"]["epoch"])
    except Exception as error:
        size, run_folder = checkpoint.stat().st_size, checkpoint.parent.parent
        reason = f"{checkpoint} ({size:,} bytes) cannot be read ({type(error).__name__})"
        raise ValueError(f"{reason}: remove {run_folder} to train anew") from error


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [text for key in keys for text in _differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    return [] if old == new else [f"{name}: {old!r} then, {new!r} now"]


if __name__ == "__main__":
    main()
