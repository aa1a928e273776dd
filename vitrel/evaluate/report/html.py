"""The files of a report: report.html, one page that works offline, report.json with its figures' numbers, and plots as PNG.

The verdicts on the page are those of `vitrel.evaluate.advice`. Maps of position and attention come from pictures.json.gz
(`vitrel.evaluate.report.pictures`), confusions from predictions.npz.
"""

import base64
import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from timm.data import ImageNetInfo

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, one_page, shown
from vitrel.common.sizes import parse_size
from vitrel.evaluate.advice import COLUMNS as JUDGED
from vitrel.evaluate.advice import LOSES, MARGIN, judge
from vitrel.evaluate.metrics import Predictions, read_predictions
from vitrel.evaluate.report import DETAILS, difference_text, resampled_text, verdict_text
from vitrel.evaluate.report.pictures import PLACE, Place, changed_images, confusions, place_of, read_pictures, without_images
from vitrel.evaluate.results import (
    COLUMNS,
    NO_SCORES,
    Scores,
    by_area,
    curves,
    is_missing,
    known_number,
    line_key,
    protocol_names,
    read_csv,
    read_translation,
    top1_interval,
)
from vitrel.evaluate.settings import Row
from vitrel.evaluate.statistics import over_seeds
from vitrel.position import POSITIONS

with optional_import():
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, ScalarFormatter


SCRIPTS = ("base", "rows", "protocols", "curves", "mistakes", "lattices", "similarity", "attention", "lines", "print", "start")


class Metric(NamedTuple):
    """A column that may be drawn against resolution: name and unit of its axis, and whether that is logarithmic."""

    name: str
    unit: str
    log: bool = False


METRICS = {
    "top1": Metric("top-1", "%"),
    "top1_among": Metric("top-1 among the data's classes", "%"),
    "retention": Metric("retention of top-1", "%"),
    "top5": Metric("top-5", "%"),
    "nll": Metric("NLL", "nats"),
    "ece": Metric("expected calibration error", "%"),
    "infer_samples_per_sec": Metric("throughput", "images/s", True),
    "peak_memory_mb": Metric("peak memory", "MiB", True),
    "gflops": Metric("multiply-adds", "GFLOPs", True),
    "attention_entropy": Metric("attention entropy", "nats"),
    "attention_span": Metric("attention span", "tokens", True),
    "attention_distance": Metric("attention distance", "patches", True),
    "attention_distance_share": Metric("attention distance", "% of diagonal"),
    "unseen": Metric("unseen offsets", "%"),
    "resized_params": Metric("values resampled", "values"),
}
# columns of shares, which the page shows as percentages (pad_fraction too, which is text with a share per stage)
SHARES = ("retention", "attention_distance_share", "unseen", "saturated", "border_leak", "crop_pct")
# columns that the page does not show: they are of one seed, or repeat others
_LEFT_OUT = {"seed", "top1_err", "top5_err", "top1_low", "top1_high", "state_hash_before", "state_hash_after", "used"}
_ABOUT = JUDGED | {
    "low": "lower end of the 95 % interval of top1",
    "high": "upper end of the 95 % interval of top1",
    "seeds": "number of seeds averaged over",
    "interval": "what the 95 % interval is over",
}


def write_html(folder: Path, title: str = "", images: bool = True, margin: float = MARGIN) -> Path:
    """Write report.html and report.json into an evaluation folder, and return the path of report.html.

    They are made from results.csv, and from claims.md, predictions.npz, translation.csv and pictures.json.gz where these exist.
    title: default the folder's name. images: whether the page may contain photographs of the data. margin: of `judge`, points.
    FileNotFoundError without results.csv, ValueError where it has no rows or lacks columns.
    """
    with optional_import():
        from plotly.offline import get_plotlyjs  # plots and report.json do without it

    folder = Path(folder)
    if not (folder / "results.csv").is_file():
        raise FileNotFoundError(f"no results.csv in {folder}: give the folder of an evaluation, such as runs/quickstart")
    rows = read_csv(folder / "results.csv")
    if not rows:
        raise ValueError(f"{folder / 'results.csv'} has no rows: evaluate first")
    title = shown(title or folder.resolve().name)
    pictures = read_pictures(folder / "pictures.json.gz")
    if pictures is not None and not images:
        pictures = without_images(pictures)
    data = contents(rows, folder, title, {} if pictures is None else pictures["words"], margin)
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


def contents(
    rows: Sequence[Row], folder: Path, title: str, described: Mapping[str, str] | None = None, margin: float = MARGIN
) -> dict[str, Any]:
    """Return the data of the page, except pictures, as JSON values; missing numbers are None, shares are percentages.

    rows, folder: of the evaluation. described: {class of the data: its name in words}, where a model knows it. margin: of
    `judge`.
    """
    predictions, protocol_of = read_predictions(folder), protocol_names(rows)
    judged = judge(rows, NO_SCORES if predictions is None else Scores(predictions.rows), margin, folder)
    table = [_in_percent(row) for row in judged.rows]
    columns = dict.fromkeys(name for row in table for name in row)
    present = [name for name in columns if name not in _LEFT_OUT and any(not is_missing(row.get(name)) for row in table)]
    varying = [name for name in present if name in DETAILS or len({str(row.get(name)) for row in table}) > 1]
    varying.sort(key=lambda name: list(DETAILS).index(name) if name in DETAILS else len(DETAILS))
    records = [{name: _json(row.get(name)) for name in columns} for row in table]
    details = zip(_intervals(rows, table, protocol_of), judged.rows, strict=True)
    for record, (intervals, row) in zip(records, details, strict=True):
        texts = {"resampled": resampled_text(row), "change": difference_text(row), "judged": verdict_text(row)}
        record |= {"intervals": intervals, "warning": _warning(row)} | texts
    metrics = {
        key: metric
        for key, metric in METRICS.items()
        if key in present and any(row[key] for row in table if known_number(row.get(key)))
    }
    sizes = sorted({row["img_size"] for row in table}, key=by_area)
    classes = _classes(rows, predictions, protocol_of)
    changed = [] if predictions is None else changed_images(rows, predictions)
    index, place = ({id(row): at for at, row in enumerate(given)} for given in (table, judged.rows))
    predicted = [] if predictions is None else list(predictions.classes)
    data = {
        "title": title,
        "data": ", ".join(dict.fromkeys(Path(str(row["data"])).name or str(row["data"]) for row in table)),
        "sizes": [{"name": size, "h": parse_size(size)[0], "w": parse_size(size)[1]} for size in sizes],
        "protocols": [*dict.fromkeys(row["protocol"] for row in table)],
        "columns": [{"key": key, "name": _column_name(key), "about": _about(key), "main": key in DETAILS} for key in varying],
        "common": [[key, _about(key), str(table[0][key])] for key in present if key not in varying],
        "about": [[key, text] for key, text in COLUMNS.items()],
        "metrics": [metric._asdict() | {"key": key} for key, metric in metrics.items()],
        "rows": records,
        "curves": [
            {"label": label, "policy": policy, "name": curve_name(label, policy), "rows": [index[id(row)] for row in part]}
            for label, policy, part in curves(table)
        ],
        "advice": [{"label": one.label, "sentences": one.sentences} for one in judged.advice],
        "basis": judged.basis,
        "by_size": [place[id(row)] for row in judged.by_size],
        "claims": _claims(folder),
        "classes": classes,
        "confusions": [] if predictions is None else confusions(rows, predictions),
        "changed": changed,
        "images": {} if predictions is None else _image_labels(changed, predictions.names, predictions.labels.tolist()),
        "predicted": predicted,
        "translation": _translation(read_translation(folder), protocol_of),
    }
    raw = dict.fromkeys([*(classes or {"names": []})["names"], *predicted, *(described or {})])
    return data | {"words": class_words(raw, described or {})}


def curve_name(label: str, policy: str) -> str:
    """Return the name of a curve: the label, and the policy unless it is "none"."""
    return label if policy == "none" else f"{label}, {policy}"


def class_words(names: Iterable[str], described: Mapping[str, str]) -> dict[str, str]:
    """Return {class name: readable name}, such as 011_snapdragon: snapdragon, or the WordNet ID n01440764: tench.

    described: readable names that are known. Classes whose readable name is the same as their own, or another class's, are left
    out.
    """
    readable = {}
    info = None
    for name in names:
        words = described.get(name, "")
        if not words and re.fullmatch(r"n\d{8}", name):
            info = info or ImageNetInfo("imagenet-22k")
            with suppress(KeyError):
                words = info.label_name_to_description(name)
        words = words.split(",")[0] or re.sub(r"^\d+[\s._-]+(?=.)", "", name)
        readable[name] = words.replace("_", " ").strip() or name
    times = Counter(readable.values())
    return {name: words for name, words in readable.items() if words != name and times[words] == 1}


def _in_percent(row: Row) -> Row:
    """A copy of a row with SHARES and pad_fraction as percentages."""
    shares = {name: 100 * row[name] if known_number(row[name]) else math.nan for name in SHARES if name in row}
    padding = row.get("pad_fraction", math.nan)
    if not is_missing(padding):
        padding = " ".join(f"{100 * float(share):.3g}" for share in str(padding).split())
    return row | shares | {"pad_fraction": padding}


def _json(value: Any) -> Any:
    """A cell as a JSON value: None for missing ones, numbers with 8 decimals."""
    if is_missing(value):
        return None
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return round(float(value), 8) if isinstance(value, (float, np.floating)) else value


def _column_name(key: str) -> str:
    return DETAILS.get(key, key) + (" %" if key in SHARES or key == "pad_fraction" else "")


def _about(key: str) -> str:
    """The description of a column for the page."""
    text = _ABOUT.get(key) or COLUMNS.get(key, "")
    return f"{text}; in percent here, as a share in results.csv" if key in SHARES or key == "pad_fraction" else text


def _warning(row: Row) -> str:
    """The warning of a judged row, "" for none.

    It is given for a state dict that changed although nothing is resampled; and for a row that loses, together with unseen
    offsets or a changed state dict. Interpolation alone is no warning.
    """
    if not (row["unchanged"] or row["resized_params"]):
        return "the state dict changed although nothing is resampled"
    if row["verdict"] != LOSES:
        return ""
    cause = f"{100 * row['unseen']:.0f} % of the offsets did not occur in training" if _uses_untrained(row) else ""
    cause = cause if row["unchanged"] else "the state dict changed"
    return f"{-row['difference']:.1f} points lower, {cause}" if cause else ""


def _uses_untrained(row: Row) -> bool:
    """Whether a row has unseen offsets whose values are not interpolated from trained ones."""
    return row["unseen"] > 0 and (row["saturated"] > 0 or not _stretches(row["resized"]))


def _stretches(resized: str) -> bool:
    """Whether any rule in a value of the column `resized` is of a bias with resampled parameters, such as "table bicubic".

    Unseen offsets then get values from trained ones. False for "absolute bicubic", which is not a bias.
    """
    encodings = [POSITIONS[key] for key in (rule.split(" ")[0] for rule in resized.split(" + ")) if key in POSITIONS]
    return any((encoding.site, encoding.behaviour) == ("attention", "resized") for encoding in encodings)


def _image_labels(changed: Sequence[Mapping[str, Any]], names: Sequence[str], labels: Sequence[int]) -> dict[str, list[Any]]:
    """{index: [name, label]} of the images in items of `changed_images`."""
    indices = dict.fromkeys(image["image"] for item in changed for image in item["images"])
    return {str(index): [names[index], labels[index]] for index in indices}


def _claims(folder: Path) -> list[dict[str, str]]:
    """The claims in claims.md as {claim, verdict}; [] without the file."""
    path = folder / "claims.md"
    text = path.read_text("utf-8") if path.exists() else ""
    matches = re.findall(r"^- \*\*(.+?)\*\* (This .+?)(?=\n- \*\*|\Z)", text, re.M | re.S)
    return [{"claim": claim, "verdict": " ".join(verdict.split())} for claim, verdict in matches]


def _intervals(rows: Sequence[Row], table: Sequence[Row], protocol_of: Callable[[Row], str]) -> list[dict[str, list[float]]]:
    """{metric: [low, high], its 95 % interval} of every aggregated row of the table, in order; SHARES in percent.

    top1 is as in the table; other metrics have an interval over seeds alone, and are left out with fewer than two.
    """
    groups: dict[Place, list[Row]] = defaultdict(list)
    for row in rows:
        groups[place_of(row, protocol_of)].append(row)
    by_row = []
    for row in table:
        seeds = groups[row["label"], row["protocol"], row["policy"], row["img_size"]]
        intervals = {"top1": [row["low"], row["high"]]}
        for key in METRICS:
            factor = 100 if key in SHARES else 1
            values = [factor * seed[key] for seed in seeds if known_number(seed.get(key))]
            if key != "top1" and len(values) > 1:
                intervals[key] = [round(end, 6) for end in over_seeds(values)]
        by_row.append(intervals)
    return by_row


def _classes(rows: Sequence[Row], predictions: Predictions | None, protocol_of: Callable[[Row], str]) -> dict[str, Any] | None:
    """Class names, and for every aggregated row the lists n (images of each class) and hits, sums over seeds.

    n is None where it equals that of the row before, to save space.
    """
    if predictions is None:
        return None
    by_place: dict[Place, np.ndarray] = {}
    for row in rows:
        if line_key(row) in predictions.rows:
            place, counts = place_of(row, protocol_of), np.stack(predictions.rows[line_key(row)].class_counts())
            by_place[place] = by_place.get(place, 0) + counts
    counted: list[dict[str, Any]] = [
        _named(place) | {"n": n.tolist(), "hits": hits.tolist()} for place, (n, hits) in by_place.items()
    ]
    same = [before["n"] == row["n"] for before, row in pairwise(counted)]
    for row, is_same in zip(counted[1:], same, strict=True):
        row["n"] = None if is_same else row["n"]
    return {"names": predictions.classes, "rows": counted} if counted else None


def _translation(lines: Sequence[Row], protocol_of: Callable[[Row], str]) -> list[Row]:
    """Lines of translation.csv, which have no predictions, aggregated over seeds: mean top-1 with its interval."""
    groups: dict[tuple[Place, int], list[Row]] = defaultdict(list)
    for line in lines:
        groups[place_of(line, protocol_of), int(line["translation"])].append(line)
    merged = []
    for (place, by), seeds in groups.items():
        top1, n = sum(line["top1"] for line in seeds) / len(seeds), int(seeds[0]["n"])
        low, high, _ = top1_interval(seeds)
        merged.append(
            _named(place) | {"translation": by, "n": n, "seeds": len(seeds), "top1": round(top1, 4), "low": low, "high": high}
        )
    return merged


def _named(place: Place) -> Row:
    """A place as {column: value}."""
    return dict(zip(PLACE, place, strict=True))


Item = dict[str, Any]
SIDE = {"name": "image side, sqrt(height * width)", "unit": "px", "scale": "log"}
# figures whose numbers are stored in pictures.json.gz: title, axes, unit
RECORDED = {
    "lattices": ("Position bias of the logits, by offset", "head, offset down, offset right, in tokens", "logit"),
    "similar": ("Cosine similarity of the position embeddings added to tokens", "query patch, patch, row by row", "cosine"),
    "maps": ("Attention of a patch", "query, head, key, in tokens", "attention weight"),
}


def figures(data: Mapping[str, Any]) -> list[Item]:
    """Return the figures of a report as JSON values; data: of `contents`.

    A figure has id, title, x and y ({name, unit, scale}) and series ({name, x, y, and further values of each point, such as
    img_size, low and high}); missing numbers are None. Figures drawn from pictures.json.gz have `source`, `entries` (their part
    of that file) and `axes` instead.
    """
    by_protocol = []
    for protocol in data["protocols"]:
        for metric in data["metrics"]:
            by_protocol.append(_against_resolution(data, protocol, metric))
        by_protocol.append(_against_throughput(data, protocol))
    return [*by_protocol, *_translated(data), *_class_figure(data), *_confusions(data), *_recorded()]


def _recorded() -> Iterator[Item]:
    for entries, (title, axes, unit) in RECORDED.items():
        source = {"source": "pictures.json.gz", "entries": f"models[].{entries}[]", "axes": axes}
        yield {"id": entries, "title": title, "unit": unit} | source


def _item(name: str, title: str, x: Item, y: Item, series: Sequence[Item], data: Mapping[str, Any]) -> Item:
    return {"id": name, "title": f"{title}, {data['data']}", "x": x, "y": y, "series": list(series)}


def _axis(name: str, unit: str, log: bool = False) -> Item:
    return {"name": name, "unit": unit, "scale": "log" if log else "linear"}


def _curves_in(data: Mapping[str, Any], protocol: str) -> Iterator[tuple[Item, list[Item]]]:
    """Yield ({name, label, policy}, its rows in `protocol`) of every curve with such rows; data: see `figures`."""
    for curve in data["curves"]:
        rows = [data["rows"][index] for index in curve["rows"]]
        if in_protocol := [row for row in rows if row["protocol"] == protocol]:
            yield {"name": curve["name"], "label": curve["label"], "policy": curve["policy"]}, in_protocol


def _against_resolution(data: Mapping[str, Any], protocol: str, metric: Mapping[str, Any]) -> Item:
    key, series = metric["key"], []
    for curve, rows in _curves_in(data, protocol):
        intervals = [row["intervals"].get(key, [None, None]) for row in rows]
        points = {"img_size": [row["img_size"] for row in rows], "x": [round(_side(row["img_size"]), 3) for row in rows]}
        points |= {"y": [row[key] for row in rows]}
        series.append(curve | points | {"low": [low for low, _ in intervals], "high": [high for _, high in intervals]})
    title = f"{metric['name']} against resolution, {protocol} protocol"
    return _item(f"{key} {protocol}", title, SIDE, _axis(metric["name"], metric["unit"], metric["log"]), series, data)


def _against_throughput(data: Mapping[str, Any], protocol: str) -> Item:
    series = []
    for curve, rows in _curves_in(data, protocol):
        points = {"img_size": [row["img_size"] for row in rows], "x": [row["infer_samples_per_sec"] for row in rows]}
        series.append(curve | points | {"y": [row["top1"] for row in rows]})
    x, y = _axis("throughput", "images/s", True), _axis("top-1", "%")
    return _item(f"throughput and accuracy {protocol}", f"top-1 against throughput, {protocol} protocol", x, y, series, data)


def _translated(data: Mapping[str, Any]) -> Iterator[Item]:
    for size, protocol in dict.fromkeys((line["img_size"], line["protocol"]) for line in data["translation"]):
        here = [line for line in data["translation"] if (line["img_size"], line["protocol"]) == (size, protocol)]
        series = []
        for label, policy in dict.fromkeys((line["label"], line["policy"]) for line in here):
            lines = sorted(
                (line for line in here if (line["label"], line["policy"]) == (label, policy)), key=itemgetter("translation")
            )
            points = {"x": [line["translation"] for line in lines], "y": [line["top1"] for line in lines]}
            points |= {"low": [line["low"] for line in lines], "high": [line["high"] for line in lines]}
            series.append({"name": f"{label}, {policy}", "label": label, "policy": policy} | points)
        x, y = _axis("translated down and right", "px"), _axis("top-1", "%")
        title = f"top-1 with the content translated, {size}, {protocol} protocol"
        yield _item(f"translation {size} {protocol}", title, x, y, series, data)


def _class_figure(data: Mapping[str, Any]) -> Iterator[Item]:
    """Yield one figure, top-1 in percent of every class, with a series per row; nothing without predictions."""
    if data["classes"] is None:
        return
    series, names = [], data["classes"]["names"]
    n: list[int] = []
    for row in data["classes"]["rows"]:
        n = row["n"] or n
        top1 = [round(100 * hits / count, 4) if count else None for hits, count in zip(row["hits"], n, strict=True)]
        keys = {key: row[key] for key in ("label", "policy", "protocol", "img_size")}
        series.append({"name": " ".join(keys.values())} | keys | {"x": names, "y": top1, "n": n})
    yield _item("classes", "top-1 of every class", _axis("class", ""), _axis("top-1", "%"), series, data)


def _confusions(data: Mapping[str, Any]) -> Iterator[Item]:
    """Yield a figure for every model and protocol: numbers of images of its most frequent confusions, by size and policy."""
    for item in data["confusions"]:
        points = {"x": [[data["predicted"][index] for index in pair] for pair in item["pairs"]], "of": item["of"]}
        series = [points | {"name": f"{row['img_size']} {row['policy']}", "y": row["counts"]} for row in item["rows"]]
        title = f"Most frequent confusions of classes: {item['label']}, {item['protocol']} protocol"
        x, y = _axis("class, predicted class", ""), _axis("images", "")
        yield _item(f"confusions {item['label']} {item['protocol']}", title, x, y, series, data)


# Okabe and Ito's palette, safe for colour-blind readers; markers and dashes distinguish the curves without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":", "-.")
FILLS = {"wide": {"markerfacecolor": "white"}, "tall": {"fillstyle": "left", "markerfacecoloralt": "white"}}


def plot_all(table: Sequence[Row], folder: Path, title: str = "") -> list[Path]:
    """Write accuracy.png, throughput.png and tradeoff.png into `folder`, which is created, and return their paths.

    table: of `aggregate`. accuracy.png has a panel per protocol; the other two show only the first protocol.
    """
    folder.mkdir(parents=True, exist_ok=True)
    accuracy = _panels(table, "top1", "top-1 accuracy (%)", title)
    first = _of_protocol(table, table[0]["protocol"])
    throughput = _panels(first, "infer_samples_per_sec", f"throughput (images/s, {first[0]['device']})", title)
    paths = [folder / f"{name}.png" for name in ("accuracy", "throughput", "tradeoff")]
    for figure, path in zip((accuracy, throughput, _tradeoff(first, title)), paths, strict=True):
        with atomic_write(path) as part:
            figure.savefig(part, dpi=150, bbox_inches="tight", format="png")
    return paths


def _panels(table: Sequence[Row], column: str, ylabel: str, title: str) -> Figure:
    """A panel per protocol of a column against image side, with a common legend."""
    protocols = [*dict.fromkeys(row["protocol"] for row in table)]
    # not through pyplot, which would open windows or choose a backend for the whole program
    legend_rows = -(-sum(1 for _ in curves(_of_protocol(table, protocols[0]))) // 4)
    height = 4.4 + 0.2 * max(0, legend_rows - 3)  # a long legend would otherwise shrink the panels
    figure = Figure(figsize=(1.5 + 5.2 * len(protocols), height), layout="constrained")
    panels = figure.subplots(1, len(protocols), sharey=True, squeeze=False)
    for axes, protocol in zip(panels[0], protocols, strict=True):
        panel(axes, _of_protocol(table, protocol), column)
        if column == "top1":
            axes.set_title(f"{protocol} protocol", fontsize=11)
        else:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    panels[0][0].set_ylabel(ylabel)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, max(2, len(labels) // 2)), frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=12)
    return figure


def _tradeoff(table: Sequence[Row], title: str) -> Figure:
    """Top-1 against throughput: a point per row of one protocol, annotated with its size."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    drawn = list(curves(table))
    for index, (label, policy, rows) in enumerate(drawn):
        rows = sorted(rows, key=_side_of)
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        name = label if policy == "none" else f"{label}, {policy}"
        speed, top1 = ([row[column] for row in rows] for column in ("infer_samples_per_sec", "top1"))
        axes.plot(speed, top1, color=colour, marker=marker, markersize=5, linewidth=0.8, label=name)
        for row in rows:
            size = row["img_size"]
            text = size.split("x")[0] if _shape(size) == "square" else size
            at, offset = (row["infer_samples_per_sec"], row["top1"]), (0, 5) if index % 2 == 0 else (0, -12)
            axes.annotate(text, at, offset, textcoords="offset points", ha="center", fontsize=7, color=colour)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.set_xlabel(f"throughput (images/s, {table[0]['device']})")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(3, len(drawn)), frameon=False, fontsize=8)
    figure.suptitle(f"{title}: accuracy against throughput, {table[0]['protocol']} protocol".removeprefix(": "), fontsize=11)
    return figure


def panel(axes: Axes, table: Sequence[Row], column: str) -> None:
    """Draw a column of aggregated rows of one protocol against image side: a curve per model and policy."""
    drawn = list(curves(table))
    labels = list(dict.fromkeys(label for label, _, _ in drawn))
    for index, (label, policy, rows) in enumerate(drawn):
        label_index = labels.index(label)
        dash = DASHES[[other for name, other, _ in drawn if name == label].index(policy) % len(DASHES)]
        style = {"color": COLOURS[label_index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
        line = {"linestyle": dash, "linewidth": 1.5, "capsize": 2}
        name = label if policy == "none" else f"{label}, {policy}"
        # error bars of different curves are drawn side by side, close enough to tell sizes apart
        step = min(0.012, 0.15 / len(drawn))
        dodge = 2 ** (step * (index - (len(drawn) - 1) / 2)) if column == "top1" else 1.0
        _errorbar(axes, _of_shape(rows, "square"), column, dodge, {**style, **line, "label": name})
        for shape, fill in FILLS.items():
            _errorbar(axes, _of_shape(rows, shape), column, dodge, {**style, "linestyle": "none", **fill})
    for size in dict.fromkeys(row["train_size"] for row in table):
        axes.axvline(_side(size), color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            "trained", (_side(size), 1.0), (3, -2), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", fontsize=8, color="0.4",
        )  # fmt: skip
    _sizes_axis(axes, [*dict.fromkeys(row["img_size"] for row in table)])


def _errorbar(axes: Axes, rows: Sequence[Row], column: str, dodge: float, style: dict) -> None:
    rows = sorted(rows, key=_side_of)
    at, values = [_side_of(row) * dodge for row in rows], [row[column] for row in rows]
    spread = [[row["top1"] - row["low"] for row in rows], [row["high"] - row["top1"] for row in rows]]
    axes.errorbar(at, values, yerr=spread if column == "top1" else None, elinewidth=0.8, **style)


def _of_protocol(table: Sequence[Row], protocol: str) -> list[Row]:
    return [row for row in table if row["protocol"] == protocol]


def _of_shape(rows: Sequence[Row], shape: str) -> list[Row]:
    return [row for row in rows if _shape(row["img_size"]) == shape]


def _side_of(row: Row) -> float:
    return _side(row["img_size"])


def _sizes_axis(axes: Axes, sizes: list[str]) -> None:
    shapes = {shape: [size for size in sizes if _shape(size) == shape] for shape in ("square", "wide", "tall")}
    axes.set_xscale("log", base=2)
    axes.set_xticks([_side(size) for size in shapes["square"]], [str(parse_size(size)[0]) for size in shapes["square"]])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    notes = [
        f"{words}: {', '.join(shapes[shape])}"
        for shape, words in (("wide", "hollow"), ("tall", "half filled"))
        if shapes[shape]
    ]
    axes.set_xlabel("image side (px)" + (f", √(h·w) of non-square ({'; '.join(notes)})" if notes else ""))


def _side(size: str) -> float:
    """Side in pixels of the square with the area of a size."""
    return math.sqrt(math.prod(parse_size(size)))


def _shape(size: str) -> str:
    height, width = parse_size(size)
    return "square" if height == width else "wide" if width > height else "tall"
