"""The output folder of an evaluation: columns of results.csv, reading and writing of its files.

results.csv, predictions.npz and translation.csv grow with every row; bad_images.csv names images that could not be read. A row
in the folder is reused where weights, images and settings are the same (`row_key`). Rows that differ in data, settings or
versions may not share a table (`not_comparable`). Rows are plain dicts: pandas reads and writes files, and nothing else,
because its columns of text change their type with the packages that are installed.
"""

import json
import platform
import re
import time
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, commit, shown, write_cells
from vitrel.common.processes import rank_and_world
from vitrel.common.sizes import format_size
from vitrel.data import SHAPES
from vitrel.evaluate.measure import Evaluated
from vitrel.evaluate.sweep import Row, Sweep
from vitrel.evaluate.tasks.base import TASKS, ImageList, Predicted, task_named
from vitrel.evaluate.trials import Trial, line_columns

with optional_import():
    import pandas as pd


PREDICTIONS = "predictions.npz"
Key = tuple[str, ...]


def _of_tasks(chosen: Callable[[str], bool]) -> dict[str, str]:
    """Columns of all tasks that are chosen by name."""
    return {key: text for name in TASKS for key, text in task_named(name).columns.items() if chosen(key)}


# Names and units as in timm's result CSVs where timm has them. A table has the columns of its task only.
COLUMNS = {
    "task": "what is predicted",
    "model": "timm name",
    "model_args": "arguments of the model as JSON, where the checkpoint does not contain them",
    "label": "name in tables and plots",
    "encoding": "position encoding",
    "seed": "seed of training",
    "img_size": "size of evaluation, height x width in pixels",
    "train_size": "sizes of training, height x width in pixels; for a model trained at native shape, maximum numbers of tokens "
    "as 196t",
    "protocol": "scale: same field of view, objects grow with the image; canvas: objects keep their size in pixels, a larger "
    "image shows more content or padding; native: the whole image at its own aspect ratio",
    "budget": "native: maximum number of patch tokens of an image, by default those of img_size; else empty",
    "policy": "policies of windows, then of encodings, joined by +; none where all policies give the same model",
    **_of_tasks(lambda name: not name.endswith("_area")),
    "n": "number of images",
    "majority": "accuracy (top-1, or mIoU) of always predicting the most frequent class, percent",
    "left_out": "number of images that could not be read; bad_images.csv names them",
    "retention": "top-1, or mIoU, divided by that at the nearest training size, same protocol and crop",
    "best_size": "smallest size with the highest top-1, or mIoU, for the same model, seed, protocol, crop and policy",
    **_of_tasks(lambda name: name.endswith("_area")),
    "tokens": "patch tokens, without class tokens; native: mean over images",
    "window": "window of every stage in tokens, height x width; native: at img_size",
    "pad_fraction": "share of padding in the grid that a stage's windows cover, for every stage; native: mean as for gflops",
    "gflops": "10^9 multiply-adds of one image's forward pass, matrix products and convolutions (timm's GMACs); native: mean "
    "over the images of the most frequent shapes, the tallest and the widest",
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
    "attention_n": "number of images, the first ones, for the attention statistics",
    "border_leak": "largest share, over the stages, of tokens that see the opposite border of the image; empty without "
    "windows; native: at img_size",
    "state_hash_before": "SHA-256 of the state dict before the evaluation",
    "state_hash_after": "SHA-256 of the state dict after it, or of the copy made for this size where that differs",
    "unchanged": "whether the hashes are equal and every parameter is the same object as before",
    "infer_samples_per_sec": "images per second in forward passes, without loading",
    "infer_samples_per_sec_half": "half of the 95 % interval of infer_samples_per_sec, over batches; empty with one batch",
    "peak_memory_mb": "peak memory, MiB",
    "memory_kind": "what peak_memory_mb counts: GPU tensors, or the resident memory of the process",
    "batch_size": "batch size in use at the end",
    "oom": "number of times memory ran out and the batch size was halved",
    "param_count": "number of parameters, millions",
    "params": "number of parameters",
    "crop_pct": "share of the resized image that the center crop keeps; native: 1, without cropping",
    "crop_mode": "how an image is resized before the crop: center, to cover the size; squash, to the size, whatever its aspect "
    "ratio; border, to fit into the size, with a border; native: empty",
    "interpolation": "interpolation by which images are resized",
    "mean": "mean of the pixels, subtracted from them",
    "std": "standard deviation of the pixels, by which they are divided",
    "class_map": "how classes map to outputs: order, names, wordnet (by WordNet ID) or file (with its digest); restricted: "
    "only the outputs of these classes are compared",
    "decoder": "decoder of image files",
    "resize_backend": "library that resizes images",
    "dtype": "precision of the computation",
    "device": "device of the computation",
    "backend": "attention backend",
    "compile": "whether torch.compile was used",
    "data": "data evaluated on",
    "images": "digest of the images: names, labels and contents of files; for generated images and data sets passed in Python, "
    "of the settings",
    "links": "followed where linked folders were searched for images too, else empty",
    "data_seed": "seed of generated or sampled images",
    "n_asked": "limit on the number of images, empty for all",
    "batch_asked": "batch size of the settings",
    "python": "version of Python",
    "torch": "version of PyTorch",
    "torchvision": "version of torchvision",
    "timm": "version of timm",
    "vitrel": "version of vitrel",
    "commit": "commit of the checkout, empty for an installed package",
}
TEXT = (
    "model",
    "model_args",
    "label",
    "data",
    "images",
    "links",
    "img_size",
    "train_size",
    "policy",
    "window",
    "pad_fraction",
    "best_size",
    "mean",
    "std",
    "torch",
    "commit",
)
# columns that identify the predictions and lines of translation.csv of a row
LINE_KEY = ("label", "seed", "img_size", "protocol", "budget", "policy", "crop_pct")
# columns that must be equal for a row to be reused: all that its figures depend on, except speed and memory. The column images
# identifies the images, wherever they are stored and however they were chosen; batch size and threads change only the last bits
# of logits
KEY = (
    "task", "model", "model_args", "label", "seed", "img_size", "train_size", "protocol", "budget", "policy", "crop_pct",
    "crop_mode", "interpolation", "mean", "std", "class_map", "images", "decoder", "resize_backend", "compile", "dtype",
    "device", "torch", "torchvision", "timm", "vitrel", "state_hash_before",
)  # fmt: skip
# the columns of KEY that belong to a model
OF_MODEL = (
    "model", "model_args", "seed", "train_size", "crop_mode", "interpolation", "mean", "std", "class_map", "state_hash_before",
)  # fmt: skip
# the columns of KEY that must be equal in all rows of one table
OF_ALL = tuple(name for name in KEY if name not in LINE_KEY + OF_MODEL)
CHOICE = ("data", "links", "data_seed", "n_asked")  # columns that determine which images are used
TRANSLATIONS = "translation.csv"
BAD_IMAGES = "bad_images.csv"
PAGES = ("table.md", "plots", "pictures.json.gz", "report.html", "report.json")
FILES = ("results.csv", PREDICTIONS, TRANSLATIONS, BAD_IMAGES, *PAGES)  # all files of an evaluation
WRITE_PAUSE = 10.0  # pause between two writes, in multiples of the time that the first of them took


def settings_columns(trial: Trial, sweep: Sweep) -> Row:
    """Return the columns of a trial's settings: model, data, preprocessing, options of the evaluation, device."""
    trained = trial.trained
    return line_columns(trial) | {
        "data": shown(sweep.data),
        "model": trained.name,
        "model_args": trained.model_args,
        "encoding": trained.encoding,
        "train_size": " ".join(format_size(size) for size in trained.train_sizes),
        "links": "followed" if sweep.follow_links else "",
        "data_seed": sweep.data_seed,
        "n_asked": sweep.n,
        "batch_asked": sweep.batch_size,
        "attention_n": sweep.attention_n,
        "crop_mode": trial.crop_mode,
        "interpolation": trained.interpolation,
        "mean": " ".join(f"{value:g}" for value in trained.mean),
        "std": " ".join(f"{value:g}" for value in trained.std),
        "compile": sweep.compile,
        "dtype": sweep.dtype,
        "device": device_name(sweep.torch_device),
    }


def environment(data: str, custom: bool = False) -> Row:
    """Return the columns that describe the software: decoder, resizing, versions, and vitrel's commit.

    Args:
        data: path or built-in name of the data.
        custom: the data set is an object from Python, which reads its images itself.
    """
    generated, by_user = data in SHAPES, "the data set's own" if custom else ""
    return {
        "decoder": by_user or ("drawn" if generated else "Pillow"),
        "resize_backend": by_user or ("drawn" if generated else f"Pillow {version('Pillow')}"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "vitrel": version("vitrel"),
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "cpu", its architecture and the number of threads; "2 x ..." with two processes."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{device.type} {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
    world = rank_and_world()[1]
    return name if world == 1 else f"{world} x {name}"


def row_key(row: Row) -> tuple[str, ...]:
    """Return the columns KEY as text: rows with equal keys have equal figures, so the one in a folder is reused."""
    return tuple(_key_text(row, name) for name in KEY)


def line_key(row: Row) -> tuple[str, ...]:
    """Return the columns LINE_KEY as text, the key that joins a row, its predictions and its lines of translation.csv."""
    return tuple(as_text(row[name]) for name in LINE_KEY)


def not_comparable(rows: Iterable[Row], keys: Sequence[Row], most: int = 4) -> str:
    """Return why `rows` may not share a table with the rows of `keys`, "" where they may.

    Args:
        rows: rows of a folder.
        keys: the columns known before an evaluation (`settings_columns`, `environment`, state_hash_before, class_map, images).
            The text lists at most `most` differences.
    """
    differences = [*dict.fromkeys(text for row in rows for text in _differences(row, keys))]
    return "; ".join(differences[:most]) + (f"; and {len(differences) - most} more" if len(differences) > most else "")


def complete(evaluated: Evaluated | None, trial: Trial, sweep: Sweep) -> bool:
    """Whether an existing result has all that a trial needs: predictions, translations, attention of the same number of images,
    and no unreadable images where these are errors. False for None.
    """
    if evaluated is None or (evaluated.row["left_out"] and sweep.on_bad_image == "raise"):
        return False
    if evaluated.predicted is None:
        return False
    translations = {int(line["translation"]) for line in evaluated.translation}
    return sweep.attention_n in (0, evaluated.row["attention_n"]) and set(trial.translations) <= translations


class Tables:
    """The results of an evaluation by `line_key`, and the files of its folder, which are written as results are added.

    Args:
        rows: results that the folder has already.
        names: names of images that they could not read.
    """

    def __init__(self, folder: Path, rows: Iterable[Evaluated] = (), names: Iterable[str] = ()) -> None:
        self.folder = folder
        self.rows = {line_key(evaluated.row): evaluated for evaluated in rows}
        self.bad_images = dict.fromkeys(names if any(evaluated.row["left_out"] for evaluated in self.rows.values()) else ())
        self.written = len(self.rows)
        self._unwritten, self._next_write = False, 0.0

    def add(self, evaluated: Evaluated) -> None:
        """Add a result or replace the one with its key, and write the files.

        Writing is limited to a tenth of the time, since it takes as long as a row when there are thousands; some results are
        written together with the next one.
        """
        previous = self.rows.get(line_key(evaluated.row))
        self.rows[line_key(evaluated.row)] = evaluated
        if previous is not None and previous.predicted is evaluated.predicted:  # the reused result itself
            return
        self.bad_images |= dict.fromkeys(evaluated.bad_images)
        self._unwritten = True
        if time.perf_counter() > self._next_write:
            start = time.perf_counter()
            self.write()
            self._next_write = time.perf_counter() + WRITE_PAUSE * (time.perf_counter() - start)

    def write(self, rows: Sequence[Row] | None = None) -> None:
        """Write the files of the folder.

        They are results.csv; predictions.npz, removed if there are no predictions; translation.csv, if there are translations
        or the file exists; and bad_images.csv, removed if no image is bad.

        Args:
            rows: new rows for all results, in the same order, which also replace those in memory; None keeps the rows.
        """
        if rows is not None:
            pairs = zip(self.rows.items(), rows, strict=True)
            self.rows = {key: evaluated._replace(row=row) for (key, evaluated), row in pairs}
        self._unwritten = False
        write_folder([*self.rows.values()], self.folder)
        if self.bad_images:
            write_cells(self.folder / BAD_IMAGES, [("image",), *((name,) for name in self.bad_images)])
        else:
            (self.folder / BAD_IMAGES).unlink(missing_ok=True)
        self.written = len(self.rows)

    def write_rest(self) -> str:
        """Write results that are still unwritten; return a note on how many rows are saved and how to resume, "" for none."""
        if self._unwritten:
            self.write()
        rows = f"{self.written} row{'s' if self.written > 1 else ''} saved in {self.folder / 'results.csv'}"
        return f"{rows}, the same command resumes from there" if self.written else ""


def set_aside(folder: Path) -> Path:
    """Move all files of the evaluation in `folder` into a new folder in it, replaced-1, replaced-2, ..., and return that."""
    target = next(target for target in (folder / f"replaced-{n}" for n in count(1)) if not target.exists())
    target.mkdir()
    for name in FILES:
        if (folder / name).exists():
            (folder / name).rename(target / name)
    return target


def read_folder(folder: Path) -> list[Evaluated]:
    """Read all results of a folder: rows of results.csv with their predictions and lines of translation.csv."""
    predictions, lines = read_predictions(folder), defaultdict(list)
    for line in read_translation(folder):
        lines[line_key(line)].append(line)
    by_key = predictions.rows if predictions else {}
    return [Evaluated(row, lines[line_key(row)], by_key.get(line_key(row))) for row in read_csv(folder / "results.csv")]


def read_translation(folder: Path) -> list[Row]:
    """Read the lines of translation.csv of a folder; [] without the file. ValueError where columns are missing."""
    path = folder / TRANSLATIONS
    if not path.exists():
        return []
    frame = read_frame(path, ("label",))
    frame = frame.assign(task=frame["task"] if "task" in frame else TASKS[0]).astype(object)
    columns = translation_columns(frame["task"].iloc[0] if len(frame) else TASKS[0])
    if missing := [column for column in columns if column not in frame]:
        raise ValueError(f"{path} has no column {missing[0]!r}: move it away and run again")
    frame = frame.reindex(columns=columns)
    return frame.where(frame.notna(), None).to_dict("records")


def read_names(folder: Path) -> list[str]:
    """Read the names of unreadable images from bad_images.csv; [] without the file."""
    return read_frame(folder / BAD_IMAGES, ("image",))["image"].tolist() if (folder / BAD_IMAGES).exists() else []


def write_folder(results: Sequence[Evaluated], folder: Path) -> None:
    """Write predictions.npz, translation.csv (only where there are translations) and results.csv.

    results.csv comes last: a row in it then always has its lines and predictions.
    """
    predictions = {line_key(evaluated.row): evaluated.predicted for evaluated in results if evaluated.predicted is not None}
    task = results[0].row["task"] if results else TASKS[0]
    write_predictions(predictions, folder, task)
    lines = [line for evaluated in results for line in evaluated.translation]
    if lines or (folder / TRANSLATIONS).exists():
        write_frame(pd.DataFrame(lines, columns=translation_columns(task)), folder / TRANSLATIONS)
    write_csv([evaluated.row for evaluated in results], folder / "results.csv")


def left_out_note(rows: Sequence[Row], folder: Path, most: int = 8) -> str:
    """Return a line on the number of unreadable images, the largest of any row, with the first `most` names; "" for none."""
    left_out = max(int(row["left_out"]) for row in rows)
    if not left_out:
        return ""
    names = read_names(folder)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    listed = f": {', '.join(map(shown, names[:most]))}{more}; {folder / BAD_IMAGES} lists them" if names else ""
    return f"left out, because they could not be read (column left_out): {left_out} images{listed}\n"


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV atomically."""
    with atomic_write(path) as part:
        frame.to_csv(part, index=False, encoding="utf-8")


def read_frame(path: Path, text: Iterable[str]) -> pd.DataFrame:
    """Read a table of `write_frame`; the columns `text` are read as text even if all their values are numbers."""
    return pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(text, str), encoding="utf-8")


def columns_of(task: str) -> list[str]:
    """Return the columns of results.csv for a task: COLUMNS without those of other tasks."""
    others = {name for other in TASKS if other != task for name in task_named(other).columns}
    return [name for name in COLUMNS if name not in others or name in task_named(task).columns]


def translation_columns(task: str) -> list[str]:
    """Return the columns of translation.csv for a task."""
    metric = task_named(task).metric
    return ["task", *LINE_KEY, "translation", "n", metric, f"{metric}_low", f"{metric}_high"]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write rows of one task as results.csv."""
    write_frame(pd.DataFrame(rows, columns=columns_of(rows[0]["task"] if rows else TASKS[0])), path)


def read_csv(path: Path) -> list[Row]:
    """Read the rows of results.csv; [] without the file. ValueError where columns are missing."""
    if not path.exists():
        return []
    try:
        frame = read_frame(path, TEXT)
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame()
    if "task" not in frame:  # files of versions that knew classification alone
        frame["task"] = TASKS[0]
    columns = columns_of(frame["task"].iloc[0] if len(frame) else TASKS[0])
    if missing := [name for name in columns if name not in frame]:
        raise ValueError(f"{path} is not a results file of this version (no column {missing[0]!r}): move it away and run again")
    return frame.reindex(columns=columns).to_dict("records")


def _differences(row: Row, keys: Sequence[Row]) -> list[str]:
    """Why a row may not share a table with the rows of `keys`, as texts such as "dtype: float32 there, bfloat16 now".

    Data, settings, devices and versions have to be equal, and the model's columns too where `keys` has its label: other weights
    under the same label would be taken for another seed.
    """
    same_label = [key for key in keys if key["label"] == row["label"]]
    names = OF_ALL + OF_MODEL if same_label else OF_ALL
    by_key = [[name for name in names if _key_text(row, name) != _key_text(key, name)] for key in same_label or keys]
    fewest = min(by_key, key=len, default=[])
    if not fewest:
        return []
    nearest = (same_label or keys)[by_key.index(fewest)]
    return [_difference(name, row, nearest) for name in fewest]


def _difference(name: str, row: Row, key: Row) -> str:
    """The difference of one column between a row of the folder and the key of a new row, in words."""
    if name == "images":
        choices = [_difference(column, row, key) for column in CHOICE if as_text(row[column]) != as_text(key[column])]
        if choices:
            return f"other images ({', '.join(choices)})"
        return f"the data changed: images, labels or file contents of {key['data']} differ now"
    then, now = (as_text(value) or "none" for value in (row[name], key[name]))
    if name == "state_hash_before":
        return f"other weights of {row['label']} (SHA-256 {then:.8} there, {now:.8} now)"
    model = f" of {row['label']}" if name in OF_MODEL else ""
    return f"{name}{model}: {then} there, {now} now"


def _key_text(row: Row, name: str) -> str:
    """A column as text for `row_key`; of the device without the numbers of processes and threads, which affect only speed and
    memory.
    """
    text = as_text(row[name])
    return re.sub(r"^\d+ x |, \d+ threads?$", "", text) if name == "device" else text


def as_text(value: Any) -> str:
    """Return a value as text, equal for a value in memory and read back from CSV (None and NaN, 3 and 3.0)."""
    if value is None or value != value:
        return ""
    if isinstance(value, float):  # pandas reads whole numbers as floats where a column has empty cells
        return str(int(value)) if value.is_integer() else f"{value:g}"
    return str(value)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The content of predictions.npz: the predictions of all rows of an evaluation, by `line_key`, of the same images."""

    images: ImageList
    rows: Mapping[Key, Predicted]


def read_predictions(folder: str | Path) -> Predictions | None:
    """Read predictions.npz in the folder of an evaluation; None where it is missing. ValueError where it is damaged."""
    path = Path(folder) / PREDICTIONS
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
        names, classes, keys = (_unpacked(stored[name]) for name in ("names", "classes", "keys"))
        task = task_named(_unpacked(stored["task"])[0] if "task" in stored else TASKS[0])
        images = ImageList(names, classes)
        rows = dict(zip(map(tuple, keys), task.unpack(stored, len(keys), images), strict=True))
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: delete it and repeat the evaluation, which computes its rows again") from error
    return Predictions(images, rows)


def write_predictions(predictions: Mapping[Key, Predicted], folder: str | Path, task: str = TASKS[0]) -> None:
    """Write predictions.npz atomically, from predictions by `line_key`, all of the same images; without any, remove it."""
    path, rows = Path(folder) / PREDICTIONS, [*predictions.values()]
    if not rows:
        path.unlink(missing_ok=True)
        return
    texts = {"names": rows[0].images.names, "classes": rows[0].images.classes, "keys": [*predictions], "task": [task]}
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, **{name: _packed(text) for name, text in texts.items()}, **task_named(task).pack(rows))


def _packed(value: Sequence[Any]) -> np.ndarray:
    """Compress a JSON-serializable sequence: uint8 [bytes]."""
    return np.frombuffer(zlib.compress(json.dumps(value).encode(), 1), np.uint8)


def _unpacked(stored: np.ndarray) -> Any:
    """Inverse of `_packed`."""
    return json.loads(zlib.decompress(stored.tobytes()))
