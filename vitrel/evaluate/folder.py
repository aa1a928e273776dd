"""The folder of one evaluation.

    settings.json   what all rows have in common, and of every model its weights and preprocessing
    rows.jsonl      a row in a line, written when its trial ends
    images.npz      results of every image, for paired intervals; images/ while the evaluation runs, a file for each row
    results.csv     the table, written at the end

A trial ends with its file in images/, then its line: a process that is killed leaves at most half a line, or a file without a
line, and neither counts. A line has the CRC-32 of its row, so that a row that was edited is not taken for a measured one.
"""

import hashlib
import json
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write
from vitrel.tasks import TASKS, Kept, Row, task_named

with optional_import():
    import pandas as pd

SETTINGS, ROWS, IMAGES, TABLE = "settings.json", "rows.jsonl", "images.npz", "results.csv"
PAGES = ("table.md", "plots", "report.html")  # what `vitrel.evaluate.report` writes
ELSE = "give another --out, or --overwrite"

# Names and units as in timm's result CSVs where timm has them. A table has the columns of its task only.
COLUMNS = {
    "task": "what is predicted",
    "model": "timm name",
    "label": "name in tables and plots",
    "encoding": "position encoding",
    "seed": "seed of training",
    "img_size": "size of evaluation, height x width in pixels",
    "train_size": "sizes of training, height x width in pixels; for a model trained at native shape, maximum numbers of tokens "
    "as 196t",
    "protocol": "scale: same field of view, objects grow with the image; canvas: objects keep their size in pixels, a larger "
    "image shows more content or padding; native: the whole image at its own aspect ratio; sliding: canvas in windows of the "
    "training size",
    "budget": "native: maximum number of patch tokens of an image, by default those of img_size; else empty",
    "translation": "pixels by which the content is moved down and right",
    "policy": "policies of windows, then of encodings, joined by +; none where all policies give the same model",
    **{key: text for task in TASKS for key, text in task_named(task).columns.items()},
    **{
        f"{task_named(task).metric}{end}": f"{which} end of the 95 % interval over images"
        for task in TASKS
        for end, which in (("_low", "lower"), ("_high", "upper"))
    },
    "n": "number of images",
    "majority": "top-1 or mIoU of always predicting the most frequent class, mAP of equal probabilities, percent",
    "left_out": "number of images that could not be read; bad_images in settings.json names them",
    "retention": "top-1, mIoU or mAP, divided by that at the nearest training size, same protocol",
    "tokens": "patch tokens, without class tokens; native: mean over images; sliding: of all windows",
    "window": "window of every stage in tokens, height x width; native: at img_size",
    "pad_fraction": "share of padding in the grid that a stage's windows cover, for every stage; native: mean as for gflops",
    "gflops": "10^9 multiply-adds of one image's forward pass, matrix products and convolutions (timm's GMACs); native: mean "
    "over the images of the most frequent shapes, the tallest and the widest; sliding: of all windows",
    "resampled": "policies by which values are resampled, or read at unseen offsets; native: in any shape of gflops",
    "resampled_values": "number of parameter values resampled; native: largest over the shapes of gflops",
    "unseen": "share of the offsets between queries and keys that did not occur in training; native: as resampled_values",
    "saturated": "the part of unseen that uses a trained edge value or far bucket; native: as resampled_values",
    "attention_entropy": "entropy of a query's attention over all keys, nats, mean over queries, heads and layers",
    "attention_span": "exp(attention_entropy): number of tokens over which uniform attention has this entropy",
    "attention_distance": "mean distance between a query and its keys, weighted by attention, in patches of the layer's grid",
    "attention_distance_share": "attention_distance as a share of the image's diagonal",
    "position_share": "by how much position changes attention: root mean square of what it adds to the logits, divided by "
    "that of the logits without it, each query's mean subtracted, in the layer where this is largest; of the first image; "
    "below 0.01 position does nothing; empty where unknown and without position",
    "border_leak": "largest share, over the stages, of tokens that see the opposite border of the image; empty without "
    "windows; native: at img_size",
    "infer_samples_per_sec": "images per second in forward passes, measured apart from the accuracy: all models of a size in "
    "turn, on one batch; empty where memory does not suffice",
    "peak_memory_mb": "peak memory, MiB: of tensors on a GPU, else the resident memory of the process",
    "batch_size": "batch size in use at the end, halved whenever memory ran out",
    "param_count": "number of parameters, millions",
    "crop_pct": "share of the resized image that the center crop keeps; native: 1, without cropping",
    "crop_mode": "how an image is resized before the crop: center, to cover the size; squash, to the size, whatever its aspect "
    "ratio; border, to fit into the size, with a border; native: empty",
    "interpolation": "interpolation by which images are resized",
}


class Folder:
    """The rows of an evaluation (`rows`), and the results of all images, {key of the row: Kept} (`kept`), also as files.

    It reads what is in the folder, cuts off a last line that is not whole, and writes settings.json.

    Args:
        path: the folder, which is created; None keeps everything in memory alone.
        settings: settings of the evaluation that begins or goes on: {"data", "classes", ...}. "same" has what must be equal in
            all rows, {name: value}, and "models" the same of every model, by "LABEL|SEED".
        overwrite: remove an evaluation that is there.

    Raises:
        ValueError: another evaluation is there, or its files are damaged or were edited.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.rows: list[Row] = []
        self.kept: dict[str, Kept] = {}
        if path is None:
            return
        if overwrite:
            remove(path)
        path.mkdir(parents=True, exist_ok=True)
        self.rows, end = read_rows(path)
        if not self.rows and (path / TABLE).exists():
            raise ValueError(f"another evaluation is in {path} ({TABLE} without {ROWS}): {ELSE}")
        if self.rows:
            self.kept = read_kept(path, [row["key"] for row in self.rows])
            self._continue(read_settings(path))
        if (path / ROWS).exists():
            os.truncate(path / ROWS, end)  # what a killed process left of a line
        self.write_settings()

    def _continue(self, there: Mapping[str, Any]) -> None:
        """Add models, commands and bad images of `there`, the settings in the folder, to `self.settings`.

        ValueError where the two differ in "same", or in the settings of a model that both have.
        """
        differ = [_differs(name, there["same"].get(name), now) for name, now in self.settings["same"].items()]
        for name, now in self.settings["models"].items():
            then = there["models"].get(name, now)
            differ += [_differs(f"{part} of {name.partition('|')[0]}", then.get(part), now[part]) for part in now]
        if differ := [*filter(None, differ)]:
            more = f"; and {len(differ) - 4} more" if len(differ) > 4 else ""
            raise ValueError(f"another evaluation is in {self.path} ({'; '.join(differ[:4])}{more}): {ELSE}")
        self.settings["models"] = there["models"] | self.settings["models"]
        self.settings["command"] = [*dict.fromkeys([*there["command"], *self.settings["command"]])]
        self.settings["bad_images"] = there["bad_images"]

    def add(self, row: Row, kept: Kept, bad: Iterable[str] = ()) -> None:
        """Add a row and the results of its images, and write both to disk if there is a folder.

        NaN and infinity in the row become None, and of the results only the arrays of `Task.stored` are kept.

        Args:
            row: with its "key" and "task".
            kept: results of its images.
            bad: names of images that could not be read, which are added to the settings.
        """
        row = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        row, task = json.loads(json.dumps(row)), task_named(row["task"])
        kept = Kept({name: kept.arrays[name] for name in task.stored}, kept.seen)
        if more := [name for name in bad if name not in self.settings["bad_images"]]:
            self.settings["bad_images"] += more
            self.write_settings()
        self.rows.append(row)
        self.kept[row["key"]] = kept
        if self.path is None:
            return
        (self.path / "images").mkdir(exist_ok=True)
        with atomic_write(_place(self.path, row["key"])) as part, part.open("wb") as file:
            np.savez_compressed(file, **_members({row["key"]: kept}))
            file.flush()
            os.fsync(file.fileno())
        with (self.path / ROWS).open("ab") as file:
            file.write(f"{json.dumps(row | {'crc32': _crc(row)})}\n".encode())
            file.flush()
            os.fsync(file.fileno())

    def write_settings(self) -> None:
        """Write settings.json; without a folder nothing."""
        if self.path is not None:
            with atomic_write(self.path / SETTINGS) as part:
                part.write_text(json.dumps(self.settings, indent=1), "utf-8")

    def write_table(self, rows: Sequence[Row]) -> None:
        """Write results.csv from `rows` and, if images/ exists, images.npz of all results in its place; in memory: nothing."""
        if self.path is None:
            return
        with atomic_write(self.path / TABLE) as part:
            self.frame(rows).to_csv(part, index=False, encoding="utf-8")
        if (self.path / "images").exists():
            with atomic_write(self.path / IMAGES) as part, part.open("wb") as file:
                np.savez_compressed(file, **_members(self.kept))
            shutil.rmtree(self.path / "images")

    def frame(self, rows: Sequence[Row]) -> "pd.DataFrame":
        """Return rows as a table with the columns `columns_of` the first row's task, without rows (and lines) of TASKS[0]."""
        return pd.DataFrame(rows, columns=columns_of(rows[0]["task"] if rows else TASKS[0]))

    @property
    def scores(self) -> dict[str, np.ndarray]:
        """{key of the row: `Task.scores` of its images for the task's metric, [n]}; NaN where an image could not be read."""
        tasks = {row["key"]: task_named(row["task"]) for row in self.rows}
        return {key: task.scores(self.kept[key], task.metric) for key, task in tasks.items()}

    @property
    def by_class(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{key of the row: (whole, right)}: [n, classes] each, or summed over images; right / whole is the score of a class."""
        count = len(self.settings["classes"])
        return {row["key"]: task_named(row["task"]).by_class(self.kept[row["key"]], count) for row in self.rows}


def read_folder(path: str | Path) -> Folder:
    """Read the evaluation in a folder into memory: what is done with the result changes no file.

    ValueError where there is no evaluation, or its files are damaged or were edited.
    """
    found = Folder(None, read_settings(Path(path)))
    found.rows, _ = read_rows(Path(path))
    found.kept = read_kept(Path(path), [row["key"] for row in found.rows])
    return found


def columns_of(task: str) -> list[str]:
    """Return the names of the columns of results.csv for the task of this name: COLUMNS without those of other tasks alone."""

    def own(name: str) -> set[str]:
        return {*task_named(name).columns, *(f"{task_named(name).metric}{end}" for end in ("_low", "_high"))}

    others = set().union(*(own(other) for other in TASKS if other != task)) - own(task)
    return [name for name in COLUMNS if name not in others]


def remove(path: Path) -> None:
    """Delete all files of an evaluation in a folder, also its report and plots/; what else is there stays."""
    for name in (ROWS, IMAGES, TABLE, *PAGES, "images", SETTINGS):  # rows first: without them the others count for nothing
        place = path / name
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Return the rows in the rows.jsonl of a folder, and the length of their lines in bytes; ([], 0) without the file.

    A last line without an end does not count. ValueError for a line that was edited or damaged, or a row that is there twice.
    """
    rows, end, file = list[Row](), 0, path / ROWS
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else (), 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            row = json.loads(line)
            whole = row.pop("crc32") == _crc(row)
        except (ValueError, LookupError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise ValueError(
                f"{file}, line {number}, is not as it was written: the file is damaged or was edited. Put back what it was, or "
                f"remove the line, and that row is measured anew; else {ELSE}"
            )
        rows.append(row)
    if len({row["key"] for row in rows}) < len(rows):
        raise ValueError(f"{file} has a row twice, which no evaluation writes: remove one of the two lines; else {ELSE}")
    return rows, end


def read_settings(path: Path) -> dict[str, Any]:
    """Return the content of the settings.json of a folder; ValueError where the file is missing or damaged."""
    try:
        found = json.loads((path / SETTINGS).read_text("utf-8"))
        if {"same", "models", "command", "bad_images"} <= found.keys():
            return found
    except (OSError, ValueError, AttributeError):
        pass
    raise ValueError(f"{path / SETTINGS} is missing or damaged, and without it the rows beside it are of nothing known: {ELSE}")


def read_kept(path: Path, keys: Sequence[str]) -> dict[str, Kept]:
    """Read the results of all images from the images.npz and images/ of a folder.

    Return {key: Kept} of the rows `keys`; ValueError where a file is damaged, or has no results of a row.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for place in (path / IMAGES, *sorted((path / "images").glob("*.npz"))):
        if not place.exists():
            continue
        try:
            with np.load(place) as file:
                for name in file.files:
                    key, _, array = name.rpartition("/")
                    values = file[name]  # counts were stored as the smallest integers that hold them
                    found.setdefault(key, {})[array] = values.astype(np.int64) if values.dtype.kind == "u" else values
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{place} is damaged ({error}): put back what it was; else {ELSE}") from error
    if missing := [key for key in keys if "seen" not in found.get(key, {})]:
        raise ValueError(f"{path} has no images of the row {missing[0]}, which its {ROWS} lists: {ELSE}")
    return {key: Kept(seen=found[key].pop("seen"), arrays=found[key]) for key in keys}


def _members(kept: Mapping[str, Kept]) -> dict[str, np.ndarray]:
    """Return {"KEY/NAME": array} for images.npz, of {key of the row: results}; int arrays in the smallest unsigned type."""
    return {
        f"{key}/{name}": np.asarray(values, np.min_scalar_type(values.max(initial=0))) if values.dtype.kind == "i" else values
        for key, (arrays, seen) in kept.items()
        for name, values in (*arrays.items(), ("seen", seen))
    }


def _place(path: Path, key: str) -> Path:
    """Return the path images/HASH.npz in the folder `path` for the row `key`, of which HASH is a hash."""
    return path / "images" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"


def _crc(row: Row) -> str:
    return f"{zlib.crc32(json.dumps(row).encode()):08x}"


def _differs(name: str, then: Any, now: Any) -> str:
    """Return in words how the setting `name` differs from before (`then`) to `now`; "" if it does not."""
    if then == now:
        return ""
    if name == "images":
        return "other images: names or contents differ"
    if name.startswith("weights of"):
        return f"other {name}: {then!s:.8} there, {now!s:.8} now"
    return f"{name}: {'none' if then in (None, '') else then} there, {'none' if now in (None, '') else now} now"
