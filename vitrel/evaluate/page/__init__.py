"""report.html, one page that works offline, from the files of an evaluation's folder; and report.json with its numbers.

The template (page.html) shows what `contents` returns: tables are made by the template, charts (`charts`) by Vega-Lite, and
maps of position and attention by page.js from the numbers in pictures.json.gz (`pictures`).
"""

import base64
import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from timm.data import ImageNetInfo

from vitrel.common.files import atomic_write, shown
from vitrel.common.sizes import sizes_in_words
from vitrel.evaluate.page.changed import PLACE, Place, changed_images, place_of
from vitrel.evaluate.page.charts import (
    METRICS,
    against_size,
    against_speed,
    against_translation,
    draw_plots,
    library,
    of_classes,
    points_of,
)
from vitrel.evaluate.page.pictures import read_pictures, without_images
from vitrel.evaluate.results.advice import COLUMNS as JUDGED
from vitrel.evaluate.results.advice import Judged, judge
from vitrel.evaluate.results.aggregate import (
    NO_SCORES,
    Scores,
    by_area,
    curves,
    is_missing,
    is_training,
    known_number,
    main_metric,
    mean_interval,
    protocol_names,
    train_sizes_of,
)
from vitrel.evaluate.results.statistics import over_seeds
from vitrel.evaluate.results.table import COLUMNS, Predictions, line_key, read_csv, read_predictions, read_translation
from vitrel.evaluate.results.text import difference_text, resampled_text, verdict_text
from vitrel.evaluate.sweep import MARGIN, Row
from vitrel.evaluate.tasks.base import TASKS, capital, task_named, task_of
from vitrel.inspect.attention import NEGLIGIBLE

Item = dict[str, Any]
PROTOCOLS = {
    "scale": "every size has the same field of view: the image is resized, and objects grow with it.",
    "canvas": "objects keep their size in pixels: a larger image shows more of the scene, or padding around it.",
    "sliding": "the images of canvas, in half overlapping windows of the training size, whose outputs are averaged.",
    "native": "every image keeps its own aspect ratio and is resized to a maximum number of tokens, without cropping.",
}
NAMES = {  # of the columns that the table of all rows shows at first
    "label": "model",
    "protocol": "protocol",
    "policy": "policy",
    "img_size": "size",
    "tokens": "tokens",
    **{metric: f"{name} {unit}" for task in TASKS for metric, (name, unit) in task_named(task).axes.items()},
    "ece": "ECE %",
    "low": "95 % from",
    "high": "to",
    "difference": "to training size",
    "difference_low": "from",
    "difference_high": "to",
    "verdict": "verdict",
    "more": "needed to decide",
    "n": "images",
    "seeds": "seeds",
    "gflops": "10^9 multiply-adds",
    "position_share": "position share",
    "resampled": "policy in force",
    "resampled_values": "values resampled",
    "unseen": "unseen offsets",
    "infer_samples_per_sec": "images/s",
    "peak_memory_mb": "peak MiB",
}
SEEN_SIDE = 150  # longest side of the drawn input images, in CSS pixels
# columns of shares, which the page shows as percentages (pad_fraction too, which is text with a share per stage)
SHARES = ("retention", "attention_distance_share", "unseen", "saturated", "border_leak", "crop_pct")
# columns that the page does not show: they are of one seed, or repeat others
_LEFT_OUT = {
    "seed", "infer_samples_per_sec_half", "top1_err", "top5_err", "state_hash_before", "state_hash_after", "used", "task",
    *(f"{task_named(task).metric}_{end}" for task in TASKS for end in ("low", "high")),
}  # fmt: skip
_ABOUT = JUDGED | {
    "low": "lower end of the 95 % interval of the accuracy",
    "high": "upper end of the 95 % interval of the accuracy",
    "seeds": "number of seeds averaged over",
    "interval": "what the 95 % interval is over",
}


def write_html(folder: Path, title: str = "", images: bool = True, margin: float = MARGIN) -> Path:
    """Write report.html and report.json into an evaluation folder, and return the path of report.html.

    They are made from results.csv, and from predictions.npz, translation.csv and pictures.json.gz where these exist.
    FileNotFoundError without results.csv, ValueError where it has no rows or lacks columns.

    Args:
        title: default the folder's name.
        images: whether the page may contain photographs of the data.
        margin: of `judge`, points.
    """
    folder = Path(folder)
    if not (folder / "results.csv").is_file():
        raise FileNotFoundError(f"no results.csv in {folder}: give the folder of an evaluation, such as runs/quickstart")
    rows = read_csv(folder / "results.csv")
    if not rows:
        raise ValueError(f"{folder / 'results.csv'} has no rows: evaluate first")
    pictures = read_pictures(folder / "pictures.json.gz")
    if pictures is not None and not images:
        pictures = without_images(pictures)
    data = contents(rows, folder, shown(title or folder.resolve().name), pictures, margin)
    packed = b"" if pictures is None else gzip.compress(json.dumps(pictures, separators=(",", ":")).encode(), mtime=0)
    environment = Environment(loader=PackageLoader("vitrel.evaluate.page", "."), autoescape=True, trim_blocks=True)
    environment.filters["number"] = number
    page = environment.get_template("page.html").render(
        data, library=library(), pictures=base64.b64encode(packed).decode(), negligible=NEGLIGIBLE
    )
    with atomic_write(folder / "report.json") as part:
        part.write_text(json.dumps(data["figures"], allow_nan=False, indent=1) + "\n", "utf-8")
    with atomic_write(folder / "report.html") as part:
        part.write_text(page, "utf-8")
    return folder / "report.html"


def contents(
    rows: Sequence[Row], folder: Path, title: str, pictures: Item | None = None, margin: float = MARGIN
) -> dict[str, Any]:
    """Return what the template shows, without missing numbers (None) and with shares as percentages.

    "figures" are the numbers of charts and tables that the page's script draws, which report.json has too.

    Args:
        rows: of the evaluation.
        folder: of the evaluation.
        pictures: of `read_pictures`.
        margin: of `judge`.
    """
    predictions, protocol_of = read_predictions(folder), protocol_names(rows)
    judged = judge(rows, NO_SCORES if predictions is None else Scores(predictions.rows), margin)
    table = [_in_percent(row) for row in judged.rows]
    columns = dict.fromkeys(name for row in table for name in row)
    present = [name for name in columns if name not in _LEFT_OUT and any(not is_missing(row.get(name)) for row in table)]
    varying = [name for name in present if name in NAMES or len({str(row.get(name)) for row in table}) > 1]
    varying.sort(key=lambda name: list(NAMES).index(name) if name in NAMES else len(NAMES))
    records = [{name: _json(row.get(name)) for name in columns} for row in table]
    details = zip(_intervals(rows, table, protocol_of), judged.rows, strict=True)
    for record, (intervals, row) in zip(records, details, strict=True):
        texts = {"resampled": resampled_text(row), "change": difference_text(row), "judged": verdict_text(row)}
        record |= {"intervals": intervals, "name": _row_name(row), "metric": main_metric(row)} | texts
        record["is_training"] = is_training(row)
    metrics = [key for key in METRICS if key in present and any(row[key] for row in table if known_number(row.get(key)))]
    sizes = sorted({row["img_size"] for row in table}, key=by_area)
    place = {id(row): at for at, row in enumerate(judged.rows)}
    drawn = _drawn(table)
    changed = [] if predictions is None else changed_images(rows, predictions)
    classes = _classes(rows, predictions, protocol_of)
    described: Mapping[str, str] = {} if pictures is None else pictures["words"]
    predicted = [] if predictions is None else list(predictions.images.classes)
    raw = dict.fromkeys([*(classes or {"names": []})["names"], *predicted, *described])
    points, trained = points_of(drawn, records), _trained(table)
    homes = {row["label"]: row["img_size"] for row in reversed(table) if is_training(row)}
    protocols = [*dict.fromkeys(row["protocol"] for row in table)]
    data_name = ", ".join(dict.fromkeys(Path(str(row["data"])).name or str(row["data"]) for row in table))
    words = class_words(raw, described)
    curves_at = _curves_at(drawn, records)
    translated = _translation(read_translation(folder), protocol_of, curves_at)
    if classes is not None:
        classes["rows"] = _on_curves(classes["rows"], curves_at)
    names = {(curve["label"], curve["policy"]): curve["name"] for curve in drawn}
    figures = {
        "points": points,
        "translation": translated,
        "classes": classes,
        "changed": [item | {"curve": names[item["label"], item["policy"]]} for item in changed],
        "images": {} if predictions is None else _image_labels(changed, predictions),
        "predicted": predicted,
        "curves": [{key: curve[key] for key in ("name", "label", "policy")} for curve in drawn],
        "sizes": sizes,
        "protocols": protocols,
        "trained": {label: homes.get(label, sizes[0]) for label in dict.fromkeys(row["label"] for row in table)},
        "words": words,
        "metric": judged.metric,
        "title": judged.title,
        "heading": capital(judged.title),
    }
    return {
        "title": title,
        "data": data_name,
        "sizes": sizes,
        "trained": trained,
        "protocols": protocols,
        "explained": {name: PROTOCOLS.get(name, "") for name in dict.fromkeys(name.split(",")[0] for name in protocols)},
        "columns": [{"key": key, "name": _column_name(key), "about": _about(key), "main": key in NAMES} for key in varying],
        "common": [[key, str(table[0][key]), _about(key)] for key in present if key not in varying],
        "about": COLUMNS,
        "rows": records,
        "judged": judged,
        "by_size": [records[place[id(row)]] for row in judged.by_size],
        "accuracy": [_by_size(protocol, drawn, records, sizes) for protocol in protocols],
        "lead": _lead(records, data_name, protocols, sizes),
        "seen": _seen(pictures, words),
        "scenes": _scenes(pictures),
        "legend": [] if pictures is None else pictures["legend"],
        "left_out": _left_out(pictures, predictions, translated),
        "with_pictures": pictures is not None,
        "with_photographs": pictures is not None and all(pictures["blobs"].get(item["image"]) for item in pictures["scenes"]),
        "figures": figures,
        "metrics": {key: METRICS[key].title for key in metrics},
        "charts": _charts(judged, metrics, points, protocols, trained, translated, data_name),
    }


def plot_all(judged: Judged, folder: Path, title: str = "") -> list[Path]:
    """Write accuracy.png, throughput.png and tradeoff.png of judged rows into `folder`; return their paths."""
    table = judged.rows
    records = [
        {name: _json(value) for name, value in row.items()}
        | {"intervals": {judged.metric: [row["low"], row["high"]]}, "resampled": resampled_text(row)}
        for row in table
    ]
    return draw_plots(judged.metric, points_of(_drawn(table), records), _trained(table), folder, title)


def _trained(table: Sequence[Row]) -> list[str]:
    """The sizes of the rows at a training size of their model."""
    return [*dict.fromkeys(row["img_size"] for row in table if is_training(row))]


def _drawn(table: Sequence[Row]) -> list[Item]:
    """The curves of a table as {label, policy, name, rows: indices in the table}; a policy is named where there are several."""
    index = {id(row): at for at, row in enumerate(table)}
    drawn = [(label, policy, [index[id(row)] for row in part]) for label, policy, part in curves(table)]
    times = Counter(label for label, *_ in drawn)
    return [
        {"label": label, "policy": policy, "name": curve_name(label, policy if times[label] > 1 else "none"), "rows": rows}
        for label, policy, rows in drawn
    ]


def curve_name(label: str, policy: str) -> str:
    """Return the name of a curve: the label, and the policy unless it is "none"."""
    return label if policy == "none" else f"{label}, {policy}"


def _row_name(row: Row) -> str:
    """The name of a row's model, with the policy where it changes anything."""
    return curve_name(row["label"], "none" if row["resampled"] == "nothing" else row["policy"])


def number(value: Any) -> str:
    """Format a value for a table: four digits, thousands separated."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, (int, float)):
        return str(value)
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def class_words(names: Iterable[str], described: Mapping[str, str]) -> dict[str, str]:
    """Return {class name: readable name}, such as 011_snapdragon: snapdragon, or the WordNet ID n01440764: tench.

    Classes whose readable name is the same as their own, or another class's, are left out.

    Args:
        described: readable names that are known.
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


def _charts(
    judged: Judged, metrics: Sequence[str], points: Sequence[Item], protocols: Sequence[str], trained: Sequence[str],
    translated: Sequence[Item], data: str,
) -> Item:  # fmt: skip
    """The specifications of the page's charts, without data: by metric, of speed, of translation and of classes."""

    def titled(text: str) -> str:
        return f"{text}, {data}"

    places = [*dict.fromkeys((line["img_size"], line["protocol"]) for line in translated)]
    return {
        "metric": {key: against_size(key, points, trained, titled(METRICS[key].title)) for key in metrics},
        "speed": against_speed(judged.metric, points, titled(f"{judged.title} against throughput"))
        if "infer_samples_per_sec" in metrics
        else None,
        "translation": against_translation(judged.metric, translated, titled(f"{judged.title} with the content translated"))
        if places
        else None,
        "classes": of_classes(judged.title),
    }


def _by_size(protocol: str, drawn: Sequence[Item], records: Sequence[Item], sizes: Sequence[str]) -> Item:
    """The table of accuracy by size in a protocol: sizes, and lines {name, rows by size}; `best` of every size."""
    lines = []
    for curve in drawn:
        rows = {records[at]["img_size"]: records[at] for at in curve["rows"] if records[at]["protocol"] == protocol}
        if rows:
            lines.append({"name": curve["name"], "rows": rows})
    shown_sizes = [size for size in sizes if any(size in line["rows"] for line in lines)]
    best = {size: max(line["rows"][size]["metric"] for line in lines if size in line["rows"]) for size in shown_sizes}
    trained = [size for size in shown_sizes if any(line["rows"].get(size, {}).get("is_training") for line in lines)]
    return {
        "protocol": protocol,
        "trained": trained,
        "sizes": shown_sizes,
        "lines": lines,
        "best": best if len(lines) > 1 else {},
    }


def _lead(records: Sequence[Item], data: str, protocols: Sequence[str], sizes: Sequence[str]) -> str:
    """The sentence below the title: models, data, seeds, sizes, device."""

    def many(n: int, what: str) -> str:
        return f"{n:,} {what}{'' if n == 1 else 's'}"

    labels, seeds = [*dict.fromkeys(row["label"] for row in records)], [row["seeds"] for row in records]
    models = many(len(labels), "model") if len(labels) > 4 else ", ".join(labels)
    counted = many(max(seeds), "seed") if min(seeds) == max(seeds) else f"{min(seeds)} to {many(max(seeds), 'seed')}"
    devices = ", ".join(dict.fromkeys(f"{row['device']}, {row['dtype']}" for row in records))
    images = many(int(max(row["n"] for row in records)), "image")
    trained = "; ".join(dict.fromkeys(sizes_in_words(train_sizes_of(row)) for row in records))
    return (
        f"{models} on {data} ({images}): {counted}, trained at {trained}, evaluated at {many(len(sizes), 'size')}; {devices}."
    )


def _seen(pictures: Item | None, words: Mapping[str, str]) -> Item | None:
    """One image as the input of a model: protocols, sizes, and {(protocol, size): {key of the picture, width, height, alt}}."""
    items = [] if pictures is None else pictures["seen"]
    if not items:
        return None
    most, cells = max(side for item in items for side in item["shape"]), {}
    for item in items:
        height, width = (max(16, round(side / most * SEEN_SIDE)) for side in item["shape"])
        name = words.get(item["class"], item["class"])
        alt = f"{name} at {item['size']}, {item['protocol']} protocol, as the input of {item['label']}"
        cells[item["protocol"], item["size"]] = {"key": item["picture"], "width": width, "height": height, "alt": alt}
    sizes = sorted({item["size"] for item in items}, key=by_area)
    name = words.get(items[0]["class"], items[0]["class"])
    protocols = [*dict.fromkeys(item["protocol"] for item in items)]
    return {"class": name, "label": items[0]["label"], "sizes": sizes, "protocols": protocols, "cells": cells}


def _scenes(pictures: Item | None) -> list[Item]:
    """For each protocol, {protocol, sizes, first (an item with the image and its mask), lines {label, cells by size}}."""
    by_protocol: dict[str, list[Item]] = defaultdict(list)
    for item in [] if pictures is None else pictures["scenes"]:
        by_protocol[item["protocol"]].append(item)
    found = []
    for protocol, items in by_protocol.items():
        cells: dict[str, dict[str, Item]] = defaultdict(dict)
        for item in items:
            cells[item["label"]][item["size"]] = item
        sizes = sorted({item["size"] for item in items}, key=by_area)
        lines = [{"label": label, "cells": of_model} for label, of_model in cells.items()]
        firsts = {size: next(item for item in items if item["size"] == size) for size in sizes}
        found.append({"protocol": protocol, "sizes": sizes, "firsts": firsts, "lines": lines})
    return found


def _left_out(pictures: Item | None, predictions: Predictions | None, translated: Sequence[Item]) -> list[str]:
    """What the page does not show, and why."""
    missing = []
    if pictures is None:
        missing.append("maps of position and attention: this folder has no pictures.json.gz")
    missing += [] if pictures is None else pictures["left_out"]
    for model in () if pictures is None else pictures["models"]:
        missing += [f"maps of {model['label']}: {model['error']}"] if model["error"] else []
        missing += model["left_out"]
    if predictions is None:
        missing.append("predictions that change with size, accuracy by class: this folder has no predictions.npz")
    if not translated:
        missing.append("translated content: this folder has no translation.csv")
    return missing


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
    return NAMES.get(key, key) + (" %" if key in SHARES or key == "pad_fraction" else "")


def _about(key: str) -> str:
    """The description of a column for the page."""
    text = _ABOUT.get(key) or COLUMNS.get(key, "")
    return f"{text}; in percent here, as a share in results.csv" if key in SHARES or key == "pad_fraction" else text


def _image_labels(changed: Sequence[Mapping[str, Any]], predictions: Predictions) -> dict[str, list[Any]]:
    """{index: [name, label]} of the images in items of `changed_images`."""
    labels = next(iter(predictions.rows.values())).arrays.get("labels", ())
    indices = dict.fromkeys(image["image"] for item in changed for image in item["images"])
    return {str(index): [predictions.images.names[index], int(labels[index])] for index in indices}


def _intervals(rows: Sequence[Row], table: Sequence[Row], protocol_of: Callable[[Row], str]) -> list[dict[str, list[float]]]:
    """{metric: [low, high], its 95 % interval} of every aggregated row of the table, in order; SHARES in percent.

    That of the task's metric is as in the table; speed has an interval over batches with one seed; others have one over seeds,
    if two or more.
    """
    groups: dict[Place, list[Row]] = defaultdict(list)
    for row in rows:
        groups[place_of(row, protocol_of)].append(row)
    by_row = []
    for row in table:
        seeds = groups[_place_in(row)]
        main = task_of(row).metric
        intervals = {main: [row["low"], row["high"]]}
        for key in METRICS:
            factor = 100 if key in SHARES else 1
            values = [factor * seed[key] for seed in seeds if known_number(seed.get(key))]
            half = row.get(f"{key}_half", math.nan)
            if key != main and len(values) > 1:
                intervals[key] = [round(end, 6) for end in over_seeds(values)]
            elif values and known_number(half):
                intervals[key] = [max(values[0] - half, 0.0), values[0] + half]
        by_row.append(intervals)
    return by_row


def _classes(rows: Sequence[Row], predictions: Predictions | None, protocol_of: Callable[[Row], str]) -> dict[str, Any] | None:
    """Class names, and for every aggregated row the lists n and hits, whose ratio is the class's score, sums over seeds."""
    if predictions is None:
        return None
    by_place: dict[Place, np.ndarray] = {}
    for row in rows:
        if line_key(row) in predictions.rows:
            place, counts = place_of(row, protocol_of), np.stack(task_of(row).by_class(predictions.rows[line_key(row)]))
            by_place[place] = by_place.get(place, 0) + counts
    counted = [_named(place) | {"n": n.tolist(), "hits": hits.tolist()} for place, (n, hits) in by_place.items()]
    return {"names": predictions.images.classes, "rows": counted} if counted else None


def _translation(
    lines: Sequence[Row], protocol_of: Callable[[Row], str], curves_at: Mapping[Place, Sequence[str]]
) -> list[Row]:
    """Lines of translation.csv, which have no predictions, averaged over seeds, with intervals, once for every curve."""
    groups: dict[tuple[Place, int], list[Row]] = defaultdict(list)
    for line in lines:
        groups[place_of(line, protocol_of), int(line["translation"])].append(line)
    points = []
    for (place, by), seeds in groups.items():
        low, high, _ = mean_interval(seeds)
        point = _named(place) | {"translation": by, "n": int(seeds[0]["n"]), "seeds": len(seeds), "low": low, "high": high}
        metric = task_of(seeds[0]).metric
        point[metric] = round(sum(line[metric] for line in seeds) / len(seeds), 4)
        points += [point | {"curve": name} for name in curves_at.get(place, ())]
    return points


def _place_in(row: Row) -> Place:
    """The place of an aggregated row."""
    return row["label"], row["protocol"], row["policy"], row["img_size"]


def _curves_at(drawn: Sequence[Item], records: Sequence[Item]) -> dict[Place, list[str]]:
    """{place: names of the curves that have its row}."""
    found: dict[Place, list[str]] = defaultdict(list)
    for curve in drawn:
        for at in curve["rows"]:
            found[_place_in(records[at])].append(curve["name"])
    return found


def _on_curves(lines: Sequence[Item], curves_at: Mapping[Place, Sequence[str]]) -> list[Item]:
    """The lines {label, protocol, policy, img_size, ...} with the names of the `curves` that have them, others left out."""
    places = [(line["label"], line["protocol"], line["policy"], line["img_size"]) for line in lines]
    return [line | {"curves": curves_at[place]} for line, place in zip(lines, places, strict=True) if place in curves_at]


def _named(place: Place) -> Row:
    """A place as {column: value}."""
    return dict(zip(PLACE, place, strict=True))
