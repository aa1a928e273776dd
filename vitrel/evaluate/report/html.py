"""report.html: the results of an evaluation folder as one file that needs no network, no server and no other file.

Its maps come from pictures.json.gz (vitrel.evaluate.report.pictures), its confusions from predictions.npz. Beside it lies
report.json, the numbers of its figures.
"""

import base64
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from timm.data import ImageNetInfo

from vitrel.evaluate.metrics import t_interval
from vitrel.evaluate.predictions import Predictions, read_predictions
from vitrel.evaluate.report import DETAILS
from vitrel.evaluate.report.answers import answers_of, stretches
from vitrel.evaluate.report.figures import figures
from vitrel.evaluate.report.mistakes import PLACE, Place, changed_images, confusions, has_crops, place_of
from vitrel.evaluate.report.pictures import read_pictures, without_images
from vitrel.evaluate.results import COLUMNS, aggregate, by_area, curves, line_key, read_csv, read_lines, top1_interval
from vitrel.evaluate.settings import Row
from vitrel.extras import optional_import
from vitrel.files import atomic_write, one_page, shown
from vitrel.sizes import parse_size

with optional_import():
    import pandas as pd
    from plotly.offline import get_plotlyjs

SCRIPTS = ("base", "rows", "protocols", "curves", "mistakes", "lattices", "similarity", "attention", "lines", "print", "start")


class Metric(NamedTuple):
    """What may be drawn against resolution."""

    name: str
    unit: str
    log: bool = False


METRICS = {
    "top1": Metric("top-1", "%"),
    "retention": Metric("retention of top-1", "%"),
    "top5": Metric("top-5", "%"),
    "nll": Metric("NLL", "nats"),
    "ece": Metric("expected calibration error", "%"),
    "infer_samples_per_sec": Metric("throughput", "images/s", True),
    "peak_memory_mb": Metric("peak memory", "MiB", True),
    "gflops": Metric("multiply-adds", "GFLOPs", True),
    "attention_entropy": Metric("attention entropy", "nats"),
    "attention_span": Metric("attention span", "tokens", True),
    "attention_distance": Metric("attended distance", "patches", True),
    "attention_distance_share": Metric("attended distance", "% of diagonal"),
    "unseen": Metric("offsets never trained", "%"),
    "resized_params": Metric("values resampled", "values"),
}
# shares, which the page shows as percentages; of pad_fraction one for every stage, as text
SHARES = ("retention", "attention_distance_share", "unseen", "saturated", "border_leak", "crop_pct")
# of one seed, or said otherwise in the table
_LEFT_OUT = {"seed", "top1_err", "top5_err", "top1_low", "top1_high", "state_hash_before", "state_hash_after"}
_ABOUT = {
    "low": "lower end of the 95 % interval of top1",
    "high": "upper end of the 95 % interval of top1",
    "seeds": "trainings averaged over",
    "interval": "how the 95 % interval is made",
}


def write_html(folder: Path, title: str = "", images: bool = True) -> Path:
    """Writes `folder`/report.html, and report.json with the numbers of its figures, from results.csv, and from claims.md,
    predictions.npz, translation.csv and pictures.json.gz if there.

    images: without, no photograph of the data is in the page. Returns its path. FileNotFoundError where there is no
    results.csv, ValueError where it holds no row or lacks columns.
    """
    folder = Path(folder)
    if not (folder / "results.csv").is_file():
        raise FileNotFoundError(f"no results.csv in {folder}: give the folder of an evaluation, such as runs/quickstart")
    rows = read_csv(folder / "results.csv")
    if not rows:
        raise ValueError(f"{folder / 'results.csv'} holds no rows: evaluate first")
    title = shown(title or folder.resolve().name)
    pictures = read_pictures(folder / "pictures.json.gz")
    if pictures is not None and not images:
        pictures = without_images(pictures)
    data = contents(rows, folder, title, {} if pictures is None else pictures["words"])
    packed = b"" if pictures is None else gzip.compress(json.dumps(pictures, separators=(",", ":")).encode(), mtime=0)
    text = one_page(
        "vitrel.evaluate.report",
        SCRIPTS,
        title=escape(title),
        plotly=get_plotlyjs(),
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        pictures=base64.b64encode(packed).decode(),
    )
    with atomic_write(folder / "report.json") as part:
        part.write_text(json.dumps(figures(data), allow_nan=False, indent=1) + "\n", "utf-8")
    with atomic_write(folder / "report.html") as part:
        part.write_text(text, "utf-8")
    return folder / "report.html"


def contents(rows: Sequence[Row], folder: Path, title: str, described: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything the page shows but the pictures, as plain JSON values: numbers that are missing are None, shares percentages.

    described: {class of the data: its name in words}, where a model knows it.
    """
    table, crops = aggregate(rows).reset_index(drop=True), has_crops(rows)
    warnings = [_warning(row, table) for row in table.to_dict("records")]
    table = _in_percent(table)
    seen = [column for column in table if column not in _LEFT_OUT and table[column].notna().any()]
    varying = [column for column in seen if column in DETAILS or table[column].astype(str).nunique() > 1]
    varying.sort(key=lambda column: list(DETAILS).index(column) if column in DETAILS else len(DETAILS))
    records = json.loads(table.to_json(orient="records", double_precision=8))
    for record, intervals, warning in zip(records, _intervals(rows, table), warnings, strict=True):
        record |= {"intervals": intervals, "warning": warning}
    known = {key: value for key, value in METRICS.items() if key in seen and pd.to_numeric(table[key], "coerce").any()}
    sizes = sorted(table["img_size"].unique(), key=by_area)
    predictions = read_predictions(folder)
    classes = _classes(rows, predictions, crops)
    changed = [] if predictions is None else changed_images(rows, predictions)
    found = {
        "title": title,
        "data": ", ".join(dict.fromkeys(Path(str(name)).name or str(name) for name in table["data"])),
        "sizes": [{"name": size, "h": parse_size(size)[0], "w": parse_size(size)[1]} for size in sizes],
        "protocols": list(table["protocol"].unique()),
        "columns": [{"key": key, "name": _column_name(key), "about": _about(key), "main": key in DETAILS} for key in varying],
        "common": [[key, _about(key), str(table[key].iloc[0])] for key in seen if key not in varying],
        "about": [[key, text] for key, text in COLUMNS.items()],
        "metrics": [metric._asdict() | {"key": key} for key, metric in known.items()],
        "rows": records,
        "curves": [
            {"label": label, "policy": policy, "name": curve_name(label, policy), "rows": part.index.tolist()}
            for label, policy, part in curves(table)
        ],
        "answers": [{"label": one.label, "line": one.line, "details": one.details} for one in answers_of(rows, folder)],
        "claims": _claims(folder),
        "classes": classes,
        "confusions": [] if predictions is None else confusions(rows, predictions),
        "changed": changed,
        "images": {} if predictions is None else _image_labels(changed, predictions.names, predictions.labels.tolist()),
        "predicted": [] if predictions is None else list(predictions.classes),
        "translation": _translation(read_lines(folder, "translation"), crops),
    }
    raw = dict.fromkeys([*(classes or {"names": []})["names"], *found["predicted"], *(described or {})])
    return found | {"words": class_words(raw, described or {})}


def curve_name(label: str, policy: str) -> str:
    """The name of a curve: the model's, with its policy where there is one."""
    return label if policy == "none" else f"{label}, {policy}"


def class_words(names: Iterable[str], described: Mapping[str, str]) -> dict[str, str]:
    """{name of a class: the same in words}, of those where that is another text: "011_snapdragon" is snapdragon, and WordNet's
    n01440764 tench. Where two classes would get the same words, both keep their names.
    """
    found = {}
    info = None
    for name in names:
        words = described.get(name, "")
        if not words and re.fullmatch(r"n\d{8}", name):
            info = info or ImageNetInfo("imagenet-22k")
            with suppress(KeyError):
                words = info.label_name_to_description(name)
        words = words.split(",")[0] or re.sub(r"^\d+[\s._-]+(?=.)", "", name)
        found[name] = words.replace("_", " ").strip() or name
    times = Counter(found.values())
    return {name: words for name, words in found.items() if words != name and times[words] == 1}


def _in_percent(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its shares as percentages."""
    table = table.copy()
    for name in (name for name in SHARES if name in table):
        table[name] = pd.to_numeric(table[name], "coerce") * 100
    if "pad_fraction" in table:
        table["pad_fraction"] = table["pad_fraction"].map(
            lambda text: text if text != text else " ".join(f"{100 * float(share):.3g}" for share in str(text).split())
        )
    return table


def _column_name(key: str) -> str:
    return DETAILS.get(key, key) + (" %" if key in SHARES or key == "pad_fraction" else "")


def _about(key: str) -> str:
    text = _ABOUT.get(key) or COLUMNS.get(key, "")
    return f"{text}; in percent here, as a share in results.csv" if key in SHARES or key == "pad_fraction" else text


def _warning(row: Row, table: pd.DataFrame) -> str:
    """What is known to cost at this row: offsets never trained, or a changed state dict, with a drop of top-1 beyond the
    intervals; or a state dict that changed without cause. "" for all else: interpolation is how resolution is changed.
    """
    if not (row["unchanged"] or row["resized_params"]):
        return "the state dict changed, and nothing that is resampled explains it"
    home = table[(table["label"] == row["label"]) & (table["protocol"] == row["protocol"])]
    home = home[home["img_size"] == row["train_size"]]
    if not len(home) or row["high"] >= home["low"].min():
        return ""
    why = f"{100 * row['unseen']:.0f} % of the offsets never trained" if _reads_untrained(row) else ""
    why = why if row["unchanged"] else "the state dict changed"
    return f"{home['top1'].iloc[0] - row['top1']:.1f} points lower, {why}" if why else ""


def _reads_untrained(row: Row) -> bool:
    """Whether offsets that were never trained are read as they are: interpolation gives each a value from trained ones."""
    return row["unseen"] > 0 and (row["saturated"] > 0 or not stretches(row["resized"]))


def _image_labels(changed: Sequence[Mapping[str, Any]], names: Sequence[str], labels: Sequence[int]) -> dict[str, list[Any]]:
    """{index: [name, label]} of the images that `changed_images` names."""
    places = dict.fromkeys(item["image"] for one in changed for item in one["images"])
    return {str(place): [names[place], labels[place]] for place in places}


def _claims(folder: Path) -> list[dict[str, str]]:
    """The claims of claims.md: what is claimed, and what the rows say."""
    path = folder / "claims.md"
    text = path.read_text("utf-8") if path.exists() else ""
    found = re.findall(r"^- \*\*(.+?)\*\* (This .+?)(?=\n- \*\*|\Z)", text, re.M | re.S)
    return [{"claim": claim, "verdict": " ".join(verdict.split())} for claim, verdict in found]


def _intervals(rows: Sequence[Row], table: pd.DataFrame) -> list[dict[str, list[float]]]:
    """Per aggregated row the 95 % interval of every metric: that of top1, of others Student's where there are two seeds."""
    groups: dict[Place, list[Row]] = defaultdict(list)
    crops = has_crops(rows)
    for row in rows:
        groups[place_of(row, crops)].append(row)
    found = []
    for row in table.to_dict("records"):
        own = groups[row["label"], row["protocol"], row["policy"], row["img_size"]]
        intervals = {"top1": [row["low"], row["high"]]}
        for key in METRICS:
            factor = 100 if key in SHARES else 1
            values = [factor * one[key] for one in own if pd.notna(one.get(key))]
            if key != "top1" and len(values) > 1:
                intervals[key] = [round(end, 6) for end in t_interval(values)]
        found.append(intervals)
    return found


def _classes(rows: Sequence[Row], predictions: Predictions | None, crops: bool) -> dict[str, Any] | None:
    """Images and hits of every class, seeds added up: class names, and lists in their order for every evaluation.

    Counts of images that are those of the row before are None there: as a rule all rows see the same.
    """
    if predictions is None:
        return None
    found: dict[Place, np.ndarray] = {}
    for row in rows:
        if line_key(row) in predictions.rows:
            place, counts = place_of(row, crops), np.stack(predictions.rows[line_key(row)].class_counts())
            found[place] = found.get(place, 0) + counts
    counted: list[dict[str, Any]] = [_named(key) | {"n": n.tolist(), "hits": hits.tolist()} for key, (n, hits) in found.items()]
    same = [before["n"] == row["n"] for before, row in pairwise(counted)]
    for row, is_same in zip(counted[1:], same, strict=True):
        row["n"] = None if is_same else row["n"]
    return {"names": predictions.classes, "rows": counted} if counted else None


def _translation(lines: Sequence[Row], crops: bool) -> list[Row]:
    """Top-1 by translation, averaged over seeds, with its interval as `aggregate` makes it."""
    groups: dict[tuple[Place, int], list[Row]] = defaultdict(list)
    for line in lines:
        groups[place_of(line, crops), int(line["translation"])].append(line)
    found = []
    for (place, by), own in groups.items():
        top1, n = sum(line["top1"] for line in own) / len(own), int(own[0]["n"])
        low, high, _ = top1_interval([line["top1"] for line in own], n)
        found.append(
            _named(place) | {"translation": by, "n": n, "seeds": len(own), "top1": round(top1, 4), "low": low, "high": high}
        )
    return found


def _named(place: Place) -> Row:
    return dict(zip(PLACE, place, strict=True))
