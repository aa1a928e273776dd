"""report.json, the numbers of the figures in report.html: one object per figure with its axes, units and series."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrel.sizes import parse_size

Item = dict[str, Any]
SIDE = {"name": "image side, sqrt(height * width)", "unit": "px", "scale": "log"}
# figures whose numbers are stored in pictures.json.gz: title, axes, unit
RECORDED = {
    "lattices": ("Position bias of the logits, by offset", "head, offset down, offset right, in tokens", "logit"),
    "similar": ("Cosine similarity of the position embeddings added to tokens", "query patch, patch, row by row", "cosine"),
    "maps": ("Attention of a patch", "query, head, key, in tokens", "attention weight"),
}


def figures(data: Mapping[str, Any]) -> list[Item]:
    """Return the figures of a report as JSON values; data: of `vitrel.evaluate.report.html.contents`.

    A figure has id, title, x and y ({name, unit, scale}) and series ({name, x, y, and further values of each point, such as
    img_size, low and high}); missing numbers are None. Figures drawn from pictures.json.gz have `source`, `entries` (their part
    of that file) and `axes` instead.
    """
    by_protocol = []
    for protocol in data["protocols"]:
        for metric in data["metrics"]:
            by_protocol.append(_against_resolution(data, protocol, metric))
        by_protocol.append(_against_throughput(data, protocol))
    return [*by_protocol, *_translated(data), *_classes(data), *_confusions(data), *_recorded()]


def _recorded() -> Iterator[Item]:
    for entries, (title, axes, unit) in RECORDED.items():
        source = {"source": "pictures.json.gz", "entries": f"models[].{entries}[]", "axes": axes}
        yield {"id": entries, "title": title, "unit": unit} | source


def _figure(name: str, title: str, x: Item, y: Item, series: Sequence[Item], data: Mapping[str, Any]) -> Item:
    return {"id": name, "title": f"{title}, {data['data']}", "x": x, "y": y, "series": list(series)}


def _axis(name: str, unit: str, log: bool = False) -> Item:
    return {"name": name, "unit": unit, "scale": "log" if log else "linear"}


def _curves(data: Mapping[str, Any], protocol: str) -> Iterator[tuple[Item, list[Item]]]:
    """Yield ({name, label, policy}, its rows in `protocol`) of every curve with such rows; data: see `figures`."""
    for curve in data["curves"]:
        rows = [data["rows"][index] for index in curve["rows"]]
        if in_protocol := [row for row in rows if row["protocol"] == protocol]:
            yield {"name": curve["name"], "label": curve["label"], "policy": curve["policy"]}, in_protocol


def _against_resolution(data: Mapping[str, Any], protocol: str, metric: Mapping[str, Any]) -> Item:
    key, series = metric["key"], []
    for curve, rows in _curves(data, protocol):
        intervals = [row["intervals"].get(key, [None, None]) for row in rows]
        points = {"img_size": [row["img_size"] for row in rows], "x": [_side(row["img_size"]) for row in rows]}
        points |= {"y": [row[key] for row in rows]}
        series.append(curve | points | {"low": [low for low, _ in intervals], "high": [high for _, high in intervals]})
    title = f"{metric['name']} against resolution, {protocol} protocol"
    return _figure(f"{key} {protocol}", title, SIDE, _axis(metric["name"], metric["unit"], metric["log"]), series, data)


def _against_throughput(data: Mapping[str, Any], protocol: str) -> Item:
    series = []
    for curve, rows in _curves(data, protocol):
        points = {"img_size": [row["img_size"] for row in rows], "x": [row["infer_samples_per_sec"] for row in rows]}
        series.append(curve | points | {"y": [row["top1"] for row in rows]})
    x, y = _axis("throughput", "images/s", True), _axis("top-1", "%")
    return _figure(f"throughput and accuracy {protocol}", f"top-1 against throughput, {protocol} protocol", x, y, series, data)


def _translated(data: Mapping[str, Any]) -> Iterator[Item]:
    for size, protocol in dict.fromkeys((line["img_size"], line["protocol"]) for line in data["translation"]):
        here = [line for line in data["translation"] if (line["img_size"], line["protocol"]) == (size, protocol)]
        series = []
        for label, policy in dict.fromkeys((line["label"], line["policy"]) for line in here):
            lines = sorted((line for line in here if (line["label"], line["policy"]) == (label, policy)), key=_translation)
            points = {"x": [_translation(line) for line in lines], "y": [line["top1"] for line in lines]}
            points |= {"low": [line["low"] for line in lines], "high": [line["high"] for line in lines]}
            series.append({"name": f"{label}, {policy}", "label": label, "policy": policy} | points)
        x, y = _axis("translated down and right", "px"), _axis("top-1", "%")
        title = f"top-1 with the content translated, {size}, {protocol} protocol"
        yield _figure(f"translation {size} {protocol}", title, x, y, series, data)


def _translation(line: Mapping[str, Any]) -> int:
    return line["translation"]


def _classes(data: Mapping[str, Any]) -> Iterator[Item]:
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
    yield _figure("classes", "top-1 of every class", _axis("class", ""), _axis("top-1", "%"), series, data)


def _confusions(data: Mapping[str, Any]) -> Iterator[Item]:
    """Yield a figure for every model and protocol: numbers of images of its most frequent confusions, by size and policy."""
    for item in data["confusions"]:
        points = {"x": [[data["predicted"][index] for index in pair] for pair in item["pairs"]], "of": item["of"]}
        series = [points | {"name": f"{row['img_size']} {row['policy']}", "y": row["counts"]} for row in item["rows"]]
        title = f"Most frequent confusions of classes: {item['label']}, {item['protocol']} protocol"
        x, y = _axis("class, predicted class", ""), _axis("images", "")
        yield _figure(f"confusions {item['label']} {item['protocol']}", title, x, y, series, data)


def _side(size: str) -> float:
    return round(math.sqrt(math.prod(parse_size(size))), 3)
