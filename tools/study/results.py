"""The results of studies: rows of results.csv, and scores of images where images.npz is beside it.

python -m tools.study.results results/study/imagenet    # writes table.md again, from the rows
"""

import argparse
import csv
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import timm
import torch

from vitrel.evaluate.folder import read_kept
from vitrel.evaluate.report import table
from vitrel.evaluate.verdicts import judge
from vitrel.tasks import Row, task_named

TEXT = ("label", "img_size", "train_size", "policy", "window", "pad_fraction", "resampled", "protocol")


def add_row(path: Path, row: Mapping[str, Any], start: float) -> None:
    """Add a row to a results.csv, and print it: what was measured, the processor time since `start`, and the versions.

    Args:
        path: the file, which is begun with a header if there is none.
        row: {column: value}.
        start: of `time.process_time`, s.
    """
    used = {"processor_s": round(time.process_time() - start), "torch": torch.__version__, "timm": timm.__version__}
    row = {**row, **used, "machine": f"{platform.machine()}, 1 thread"}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(row, flush=True)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a results.csv, with the key that each has in an evaluation's folder; FileNotFoundError without any."""
    if not path.exists():
        raise FileNotFoundError(f"no {path}: run the evaluation first")
    frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(TEXT, str), encoding="utf-8")
    if "task" not in frame:  # written when there was one
        frame["task"] = "classification"
    return [row | {"key": _key(row)} for row in frame.to_dict("records")]


def read_scores(folder: Path, rows: list[Row], metric: str) -> Mapping[str, np.ndarray]:
    """Return the scores of every image of an evaluation's folder, by the rows' key; metric: as "top1_among"."""
    kept, task = read_kept(folder, [row["key"] for row in rows]), task_named(rows[0]["task"])
    return {key: task.scores(one, metric) for key, one in kept.items()}


def _key(row: Row) -> str:
    """Return the key of a row, as `vitrel.evaluate.sweep.Trial.key` has it."""
    seed, budget, policy = row["seed"], row.get("budget"), row["policy"]
    protocol = row["protocol"] + (f",{int(budget)}t" if budget == budget and budget is not None else "")
    return f"{row['label']}|{int(seed) if seed == seed else None}|{row['img_size']}|{protocol}|{policy}|{row['crop_pct']:g}"


def main() -> None:
    """Write table.md of every folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        rows = read_rows(folder / "results.csv")
        task, scores = task_named(rows[0]["task"]), {}
        if (folder / "images.npz").exists():
            scores = read_scores(folder, rows, task.metric)
        elif task.dense:
            parser.error(f"{folder} has no images.npz: without the scores of images, intervals of mIoU would be too wide")
        (folder / "table.md").write_text(table(judge(rows, scores), folder.name), "utf-8")
        print(folder / "table.md")


if __name__ == "__main__":
    main()
