"""The results of an evaluation: the columns of its rows, the files of its folder, and its rows as one table.

results.csv, per_class.csv and translation.csv grow with every row; bad_images.csv names images that cannot be read. A row that
is there stands for one asked for now where weights, data and settings agree (`row_key`), and rows that disagree in what all
rows share may not stand in one table (`not_comparable`). `aggregate` makes one row of several seeds, with an interval.
"""

import fcntl
import math
import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from vitrel.data import SHAPES, Reading, class_names
from vitrel.evaluate.measure import Evaluated, Task, line_columns
from vitrel.evaluate.metrics import t_interval, wilson
from vitrel.evaluate.policies import WINDOW_POLICIES, policy_parts
from vitrel.evaluate.processes import rank_and_world
from vitrel.evaluate.settings import Row, Sweep
from vitrel.extras import optional_import
from vitrel.files import atomic_write, commit, guarded, shown, unguarded, write_cells
from vitrel.sizes import format_size, parse_size

with optional_import():
    import pandas as pd

# Names and units as in timm's result CSVs where timm has them.
COLUMNS = {
    "model": "timm name",
    "model_args": "arguments it was built with where its weights do not tell them, as JSON",
    "label": "name in tables and plots",
    "encoding": "position encoding",
    "seed": "seed of training",
    "img_size": "evaluated at, height x width in pixels",
    "train_size": "trained at, height x width in pixels",
    "protocol": "scale: same field of view, objects grow; canvas: object size in pixels kept, more content or padding",
    "policy": "policies in force, of windows, then of encodings, joined by +; none where each reads the model as trained",
    "top1": "accuracy, percent",
    "top1_err": "100 - top1",
    "top1_low": "lower end of the 95 % Wilson interval over images",
    "top1_high": "upper end of the 95 % Wilson interval over images",
    "top5": "label among the 5 highest logits, percent (100 with 5 classes or fewer)",
    "top5_err": "100 - top5",
    "nll": "mean negative log-likelihood, nats",
    "ece": "expected calibration error, percent, 15 equal bins of the confidence",
    "n": "images",
    "majority": "share of the most frequent class among them, percent: top1 of always answering that class",
    "left_out": "images left out, since they cannot be read; bad_images.csv names them",
    "retention": "top1 / top1 at the training size under the same protocol and crop",
    "best_size": "size of the highest top1 on this model's, seed's, protocol's, crop's and policy's curve",
    "top1_area": "mean top1 of that curve over log2 of the side, sqrt(height x width): the area under it / its width, percent",
    "tokens": "patch tokens, class tokens not counted",
    "window": "window of every stage in tokens, height x width",
    "pad_fraction": "share of padding in the grid that the windows of a stage cover, every stage",
    "gflops": "10^9 multiply-adds of one image's forward pass, matrix products and convolutions (timm's GMACs)",
    "resized": "what forward resamples or reads other than as trained at this size, and how",
    "resized_params": "number of parameter values resampled",
    "unseen": "share of (query, key) offset cells that no training pair had",
    "saturated": "the part of unseen that reads an edge value or far bucket which training did address",
    "attention_entropy": "of a query's attention over all keys, nats, mean over queries, heads and layers",
    "attention_span": "exp of it: tokens that equal attention to would have this entropy",
    "attention_distance": "mean distance from a query to what it attends to, in patches of the layer's own grid",
    "attention_distance_share": "the same as a share of the image's diagonal",
    "attention_n": "images, the first ones, that attention was taken of",
    "border_leak": "largest share, over the stages, of tokens that see across a border of the image; empty without windows",
    "state_hash_before": "sha256 of the state dict before",
    "state_hash_after": "sha256 of the state dict after",
    "unchanged": "hashes equal and every parameter still the same object",
    "infer_samples_per_sec": "images per second, forward passes alone",
    "peak_memory_mb": "peak memory, MiB",
    "memory_kind": "what the peak counts",
    "batch_size": "batch size in use at the end",
    "oom": "number of times memory ran out and the batch was halved",
    "param_count": "parameters, millions",
    "params": "parameters",
    "crop_pct": "share of the resized image that the centre crop keeps",
    "interpolation": "resize of images",
    "mean": "of the pixels, subtracted",
    "std": "of the pixels, divided by",
    "class_map": "how classes find outputs: order, wordnet (their numbers) or file (its digest); restricted: only they compete",
    "decoder": "of images",
    "resize_backend": "of images",
    "dtype": "of the computation",
    "device": "of the computation",
    "backend": "of attention",
    "compile": "whether by torch.compile",
    "optimize": "whether by vitrel.optimize",
    "data": "data evaluated on",
    "links": "followed where images are looked for in linked folders too, else empty",
    "data_seed": "seed of generated or sampled images",
    "n_asked": "limit on the number of images, empty for all",
    "batch_asked": "batch size asked for",
    "python": "version",
    "torch": "version",
    "torchvision": "version",
    "timm": "version",
    "vitrel": "version",
    "commit": "of the checkout, empty where the package is installed",
}
# which a file of an earlier version may lack
ADDED = (
    "saturated", "left_out", "majority", "ece", "best_size", "top1_area", "window", "pad_fraction", "gflops",
    "attention_entropy", "attention_span", "attention_distance", "attention_distance_share", "attention_n", "mean", "std",
    "class_map", "decoder", "resize_backend", "backend", "model_args", "border_leak", "compile", "optimize", "links", "python",
    "torchvision", "commit",
)  # fmt: skip
TEXT = (
    "model",
    "model_args",
    "label",
    "data",
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
# by which lines of per_class.csv and translation.csv belong to a row
LINE_KEY = ("label", "seed", "img_size", "protocol", "policy", "crop_pct", "data")
PER_CLASS = (*LINE_KEY, "class", "n", "hits")
TRANSLATION = (*LINE_KEY, "translation", "n", "top1", "top1_low", "top1_high")
# what must agree for a row to stand for another
KEY = (
    "model", "model_args", "label", "seed", "img_size", "train_size", "protocol", "policy", "crop_pct", "interpolation", "mean",
    "std", "class_map", "data", "links", "data_seed", "n_asked", "batch_asked", "attention_n", "compile", "dtype", "device",
    "torch", "torchvision", "timm", "vitrel", "state_hash_before",
)  # fmt: skip
# what belongs to a model
OF_MODEL = (
    "model", "model_args", "seed", "train_size", "interpolation", "mean", "std", "class_map", "state_hash_before",
)  # fmt: skip
# rows of one table agree in them, whatever the model and the place
OF_ALL = ("data", *(name for name in KEY if name not in LINE_KEY + OF_MODEL))
LINES = {"per_class": PER_CLASS, "translation": TRANSLATION}
BAD_IMAGES = "bad_images.csv"
PAGES = ("table.md", "claims.md", "plots", "pictures.json.gz", "report.html")
FILES = ("results.csv", *(f"{name}.csv" for name in LINES), BAD_IMAGES, *PAGES)  # all that an evaluation writes
WRITE_PAUSE = 10.0  # times as long as writing took, for which nothing is written again
LOCK_PATIENCE = 10.0  # seconds for another evaluation to let go: loader processes outlive one that was killed by a few
CURVE = ["label", "protocol", "policy", "img_size", "crop_pct"]
MEANS = [
    "top1", "top5", "nll", "ece", "retention", "infer_samples_per_sec", "attention_entropy", "attention_span",
    "attention_distance", "attention_distance_share",
]  # fmt: skip


def settings_columns(task: Task, sweep: Sweep) -> Row:
    """The columns that say what was asked for, of which model and on which device."""
    trained = task.trained
    return line_columns(task, sweep) | {
        "model": trained.name,
        "model_args": trained.model_args,
        "encoding": trained.encoding,
        "train_size": format_size(trained.img_size),
        "links": "followed" if sweep.follow_links else "",
        "data_seed": sweep.data_seed,
        "n_asked": sweep.n,
        "batch_asked": sweep.batch_size,
        "attention_n": sweep.attention_n,
        "interpolation": trained.interpolation,
        "mean": " ".join(f"{value:g}" for value in trained.mean),
        "std": " ".join(f"{value:g}" for value in trained.std),
        "compile": sweep.compile,
        "optimize": sweep.optimize,
        "dtype": sweep.dtype,
        "device": device_name(sweep.torch_device),
    }


def environment(data: str, own: bool = False) -> Row:
    """Columns that are the same for all rows. own: images come from the user's own data set, prepared there."""
    drawn, custom = data in SHAPES, "the data set's own" if own else ""
    return {
        "decoder": custom or ("drawn" if drawn else Reading().decoder),
        "resize_backend": custom or ("drawn" if drawn else "torchvision antialiased"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "vitrel": version("vitrel"),
        "commit": commit(Path(__file__).parents[2]),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's architecture with the number of threads in use; "2 x ..." over two processes."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{device.type} {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
    world = rank_and_world()[1]
    return name if world == 1 else f"{world} x {name}"


def row_key(row: Row) -> tuple[str, ...]:
    """What must agree for a row to stand for another: read back from CSV, a missing number is NaN, an absent one None."""
    return tuple(_key_text(row, name) for name in KEY)


def line_key(row: Row) -> tuple[str, ...]:
    """By which lines of per_class.csv and translation.csv belong to a row of results.csv."""
    return tuple(_text(row[name]) for name in LINE_KEY)


def not_comparable(rows: Iterable[Row], keys: Sequence[Row], most: int = 4) -> str:
    """What differs in any rows as one text, at most so many of them; "" where the rows may stand with those asked for."""
    found = [*dict.fromkeys(text for row in rows for text in _differences(row, keys))]
    return "; ".join(found[:most]) + (f"; and {len(found) - most} more" if len(found) > most else "")


def complete(found: Evaluated | None, task: Task, sweep: Sweep) -> bool:
    """Whether there is a row and it holds all that is asked for now: images left out may be an error now, translations and
    columns may be new.
    """
    if found is None or (found.row["left_out"] and sweep.on_bad_image == "raise"):
        return False
    there = {int(line["translation"]) for line in found.translation}
    return bool(found.per_class) and found.row["ece"] == found.row["ece"] and set(task.translations) <= there


class Tables:
    """The rows of a folder, by `line_key`, and its files, which are written as rows are added.

    rows: those that it holds already. names: of the images that they leave out.
    """

    def __init__(self, folder: Path, rows: Iterable[Evaluated] = (), names: Iterable[str] = ()) -> None:
        self.folder = folder
        self.rows = {line_key(one.row): one for one in rows}
        self.bad_images = dict.fromkeys(names if any(one.row["left_out"] for one in self.rows.values()) else ())
        self.written = len(self.rows)
        self._unwritten, self._again = False, 0.0

    def add(self, one: Evaluated) -> None:
        """Adds a row, or puts it in the place of one, and writes all.

        Writing takes a tenth of the time at most, and some rows wait for the next: of thousands it takes as long as a row.
        """
        known = self.rows.get(line_key(one.row))
        self.rows[line_key(one.row)] = one
        if known is not None and known.per_class is one.per_class:  # it was there
            return
        self.bad_images |= dict.fromkeys(one.bad_images)
        self._unwritten = True
        if time.perf_counter() > self._again:
            start = time.perf_counter()
            self.write()
            self._again = time.perf_counter() + WRITE_PAUSE * (time.perf_counter() - start)

    def write(self, rows: Sequence[Row] | None = None) -> None:
        """Writes all files; `rows` take the place of those there are, in their order."""
        if rows is not None:
            pairs = zip(self.rows.items(), rows, strict=True)
            self.rows = {key: one._replace(row=row) for (key, one), row in pairs}
        self._unwritten = False
        write_folder([*self.rows.values()], self.folder)
        if self.bad_images:
            write_cells(self.folder / BAD_IMAGES, [("image",), *((name,) for name in self.bad_images)])
        else:
            (self.folder / BAD_IMAGES).unlink(missing_ok=True)
        self.written = len(self.rows)

    def write_rest(self) -> str:
        """Writes what was not written since the last row was; what is saved then and how to go on, "" where nothing is."""
        if self._unwritten:
            self.write()
        rows = f"{self.written} row{'s' if self.written > 1 else ''} saved in {self.folder / 'results.csv'}"
        return f"{rows}, the same command goes on from there" if self.written else ""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps a second evaluation, whose rows would replace ours, out of the folder. BlockingIOError where one is in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    text = f"another evaluation is writing into {folder}: wait for its end, or give another folder"
                    raise BlockingIOError(text) from None
                time.sleep(0.2)
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield
    finally:
        os.close(handle)


def set_aside(folder: Path) -> Path:
    """Moves all files of the evaluation in `folder` into a new folder there, replaced-1, replaced-2, ..., and returns it."""
    place = next(place for place in (folder / f"replaced-{n}" for n in count(1)) if not place.exists())
    place.mkdir()
    for name in FILES:
        if (folder / name).exists():
            (folder / name).rename(place / name)
    return place


def read_folder(folder: Path) -> list[Evaluated]:
    """The rows of a folder with their lines; a line belongs to the row of its model, size, protocol, crop and policy."""
    rows = read_csv(folder / "results.csv")
    lines: dict[str, dict[tuple, list[Row]]] = {name: defaultdict(list) for name in LINES}
    for name, found in lines.items():
        for line in read_lines(folder, name):
            found[line_key(line)].append(line)
    return [Evaluated(row, *(found[line_key(row)] for found in lines.values())) for row in rows]


def read_lines(folder: Path, name: str) -> list[Row]:
    """The lines of `<name>.csv`, "per_class" or "translation"; none where there is no such file.

    ValueError where columns are missing.
    """
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    frame = read_frame(path, ("class", "label", "data"))
    if lacking := [column for column in LINES[name] if column not in frame]:
        raise ValueError(f"{path} has no column {lacking[0]!r}: move it away and run again")
    return frame.to_dict("records")


def read_names(folder: Path) -> list[str]:
    """The images of bad_images.csv, which could not be read; none where there is no such file."""
    return read_frame(folder / BAD_IMAGES, ("image",))["image"].tolist() if (folder / BAD_IMAGES).exists() else []


def write_folder(done: Sequence[Evaluated], folder: Path) -> None:
    """Writes all three; translation.csv only where content was translated. Rows come last: a row there always has its lines."""
    for name, columns in LINES.items():
        lines = [line for one in done for line in getattr(one, name)]
        path = folder / f"{name}.csv"
        if lines or path.exists():
            write_frame(pd.DataFrame(lines, columns=list(columns)), path)
    write_csv([one.row for one in done], folder / "results.csv")


def left_out_note(rows: Sequence[Row], folder: Path, most: int = 8) -> str:
    """A line on the images that could not be read, with the names of the first; "" where there are none."""
    left_out = max(int(row["left_out"]) for row in rows)
    if not left_out:
        return ""
    names = read_names(folder)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    which = f": {', '.join(map(shown, names[:most]))}{more}; {folder / BAD_IMAGES} lists them" if names else ""
    return f"left out, since they cannot be read (column left_out): {left_out} of the images{which}\n"


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Writes a table as CSV, its text as `guarded` gives it; the file is replaced whole, an interruption leaves the old one."""
    text = [name for name in frame if not pd.api.types.is_numeric_dtype(frame[name])]
    safe = frame.assign(**{name: frame[name].map(guarded) for name in text})
    with atomic_write(path) as part:
        safe.to_csv(part, index=False, encoding="utf-8")


def read_frame(path: Path, text: Iterable[str]) -> pd.DataFrame:
    """A table that `write_frame` wrote, whose columns `text` are read as text though they may hold numbers alone."""
    frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(text, str), encoding="utf-8")
    found = [name for name in frame if not pd.api.types.is_numeric_dtype(frame[name])]
    return frame.assign(**{name: frame[name].map(unguarded) for name in found})


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes all rows with the columns of COLUMNS by `write_frame`."""
    write_frame(pd.DataFrame(rows, columns=list(COLUMNS)), path)


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV written by `write_csv`, of this version or before the columns ADDED, which are then empty; none
    if there is no such file. ValueError when other columns are missing.
    """
    if not path.exists():
        return []
    try:
        frame = read_frame(path, TEXT)
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame()
    if "saturated" not in frame and {"unseen", "resized"} <= set(frame):
        # in files without the column only clipped tables read a trained edge, and at every unseen offset
        frame["saturated"] = frame["unseen"].where(frame["resized"].str.contains("clip"), 0.0)
    if "data" in frame and "majority" not in frame:  # at least the even share, which is known of what the package draws
        frame["majority"] = frame["data"].map({name: 100 / len(class_names(name)) for name in SHAPES})
    if "n" in frame and "left_out" not in frame:
        frame["left_out"] = 0  # such an image ended the evaluation
    if lacking := [name for name in COLUMNS if name not in frame and name not in ADDED]:
        raise ValueError(f"{path} is not a results file of this version (no column {lacking[0]!r}): move it away and run again")
    return frame.reindex(columns=list(COLUMNS)).to_dict("records")


def aggregate(rows: Sequence[Row]) -> pd.DataFrame:
    """One row per (label, protocol, policy, img_size): means over seeds, `seeds`, and the 95 % interval `low`, `high` of top1.

    `interval` says how it is made, see `top1_interval`. Where models were evaluated with several crops, each is a protocol of
    its own, "scale, crop 0.875". Ordered as the models came, then by image area.
    """
    frame = pd.DataFrame(rows)
    for name in (name for name in ADDED if name not in frame):
        frame[name] = math.nan
    frame[MEANS] = frame[MEANS].apply(pd.to_numeric)
    if frame.groupby("label")["crop_pct"].nunique().max() > 1:
        frame["protocol"] = [f"{name}, crop {crop:g}" for name, crop in zip(frame["protocol"], frame["crop_pct"], strict=True)]
    order = {label: place for place, label in enumerate(dict.fromkeys(frame["label"]))}
    merged = []
    for _, group in frame.groupby(CURVE, sort=False, dropna=False):
        first = group.iloc[0].to_dict() | group[MEANS].mean().to_dict()
        low, high, kind = top1_interval(group["top1"].tolist(), first["n"])
        first |= {"seeds": len(group), "low": low, "high": high, "interval": kind}
        first |= {"unchanged": bool(group["unchanged"].all()), "oom": int(group["oom"].max())}
        first |= {"peak_memory_mb": group["peak_memory_mb"].max(), "batch_size": int(group["batch_size"].min())}
        merged.append(first)
    merged.sort(
        key=lambda row: (
            order[row["label"]],
            not row["protocol"].startswith("scale"),
            row["protocol"],
            row["policy"],
            by_area(row["img_size"]),
        )
    )
    return pd.DataFrame(merged)


def by_area(size: str) -> tuple[int, int]:
    """The key by which sizes such as "64x96" are sorted: by area, of one area by height."""
    height, width = parse_size(size)
    return height * width, height


def top1_interval(top1: Sequence[float], n: int) -> tuple[float, float, str]:
    """95 % interval of the mean of one model's top-1 in percent, one for each seed, on the same n images; and how it is made.

    Student's over seeds where there are two or more, never narrower than Wilson's over images: the same images judge every
    seed, so more seeds do not lessen their chance. Else it is Wilson's.
    """
    low, high = wilson(round(n * sum(top1) / len(top1) / 100), n)
    kind = f"Wilson over {n:,} images"
    if len(top1) > 1:
        around = t_interval(top1)
        low, high, kind = min(low, around[0]), max(high, around[1]), f"t over {len(top1)} seeds, at least {kind}"
    return max(0.0, low), min(100.0, high), kind


def curves(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(label, policy, rows) of an aggregated table: one curve per policy a model was evaluated with.

    Sizes at which a policy makes no difference belong to every curve of their model: "none" to all, "keep" to
    "geometric+keep" and "clip+keep"; and to "divisor" the sizes at which the trained window divides the grid.
    """
    for label, group in table.groupby("label", sort=False):
        parts = {policy: policy_parts(policy) for policy in group["policy"].unique()}
        for policy, own in parts.items():
            if any(own < other for other in parts.values()):
                continue
            fixed = {"fixed" if name in WINDOW_POLICIES else name for name in own}
            at = list(zip(group["protocol"], group["img_size"], strict=True))
            direct = [parts[name] <= own for name in group["policy"]]
            there = {place for place, is_there in zip(at, direct, strict=True) if is_there}
            chosen = [d or (a not in there and parts[n] <= fixed) for d, a, n in zip(direct, at, group["policy"], strict=True)]
            yield label, policy, group[chosen]


def with_curves(rows: Sequence[Row]) -> list[Row]:
    """The rows with best_size and top1_area of their curve, empty in rows that several policies' curves share."""
    frame = pd.DataFrame(rows)
    found: dict[int, Row] = {}
    shared: dict[int, list[Row]] = defaultdict(list)
    for _, group in frame.groupby(["label", "seed", "protocol", "crop_pct"], sort=False, dropna=False):
        for _, policy, curve in curves(group):
            summary = curve_summary(curve)
            for place, own in zip(curve.index, curve["policy"] == policy, strict=True):
                shared[place].append(summary)
                if own:
                    found[place] = summary
    empty = {"best_size": "", "top1_area": math.nan}
    alone = {place: several[0] for place, several in shared.items() if len(several) == 1}
    return [row | found.get(place, alone.get(place, empty)) for place, row in enumerate(rows)]


def curve_summary(curve: pd.DataFrame) -> Row:
    """best_size, that of the highest top1, and top1_area: the mean of top1 over log2 of the side sqrt(h w), by trapezoids.

    Sizes of one area count once, with their mean; NaN where all sizes are of one area.
    """
    area = curve["img_size"].map(lambda size: math.prod(parse_size(size)))
    top1 = curve.groupby(area)["top1"].mean().sort_index()
    octaves = [math.log2(pixels) / 2 for pixels in top1.index]
    pairs = zip(octaves, octaves[1:], top1, top1.iloc[1:], strict=False)
    under = sum((right - left) * (a + b) / 2 for left, right, a, b in pairs)
    mean = under / (octaves[-1] - octaves[0]) if len(octaves) > 1 else math.nan
    return {"best_size": curve.loc[curve["top1"].idxmax(), "img_size"], "top1_area": round(mean, 4)}


def _differences(row: Row, keys: Sequence[Row]) -> list[str]:
    """Why a row may not stand in one table with those asked for, whose `keys` these are: "dtype: float32 there, bfloat16 now".

    Data, settings, devices and versions have to agree, and of a model that is asked for too all that is its own: other weights
    under the same label would count as another seed of it.
    """
    own = [key for key in keys if key["label"] == row["label"]]
    names = OF_ALL + OF_MODEL if own else OF_ALL
    found = [[name for name in names if _key_text(row, name) != _key_text(key, name)] for key in own or keys]
    least = min(found, key=len, default=[])
    if not least:
        return []
    near = (own or keys)[found.index(least)]
    return [_difference(name, row, near) for name in least]


def _difference(name: str, row: Row, key: Row) -> str:
    then, now = (_text(value) or "none" for value in (row[name], key[name]))
    if name == "state_hash_before":
        return f"other weights of {row['label']} (SHA-256 {then:.8} there, {now:.8} now)"
    whose = f" of {row['label']}" if name in OF_MODEL else ""
    return f"{name}{whose}: {then} there, {now} now"


def _key_text(row: Row, name: str) -> str:
    """What `row_key` compares of a column: of the device all but the numbers of processes and threads, which change no figure
    but speed and memory.
    """
    text = _text(row[name])
    return re.sub(r"^\d+ x |, \d+ threads?$", "", text) if name == "device" else text


def _text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):  # of a column with empty cells pandas makes whole numbers floats
        return str(int(value)) if value.is_integer() else f"{value:g}"
    return str(value)
