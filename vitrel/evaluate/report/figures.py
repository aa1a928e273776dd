"""report.json: the numbers of the figures in report.html, one object per figure with its axes, units and series."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrel.sizes import parse_size

Item = dict[str, Any]
SIDE = {"name": "image side, sqrt(height * width)", "unit": "px", "scale": "log"}
# of the figures whose numbers are bytes in pictures.json.gz
RECORDED = {
    "lattices": ("What position adds to the logits, by offset", "head, offset down, offset right, in tokens", "logit"),
    "similar": ("Similarity of the embeddings added to tokens", "query patch, patch, row by row", "cosine"),
    "maps": ("Where a patch attends", "query, head, key, in tokens", "attention weight"),
}


def figures(data: Mapping[str, Any]) -> list[Item]:
    """The figures of `vitrel.evaluate.report.html.contents`.

    Each has id, title, x and y ({name, unit, scale}) and series ({name, x, y, and what else belongs to a point}); missing
    numbers are None. Those drawn from pictures.json.gz have `source`, `entries` (a part of that file) and `axes` instead.
    """
    found = []
    for protocol in data["protocols"]:
        for metric in data["metrics"]:
            found.append(_against_resolution(data, protocol, metric))
        found.append(_against_throughput(data, protocol))
    return [*found, *_translated(data), *_classes(data), *_confusions(data), *_recorded()]


def _recorded() -> Iterator[Item]:
    for entries, (title, axes, unit) in RECORDED.items():
        source = {"source": "pictures.json.gz", "entries": f"models[].{entries}[]", "axes": axes}
        yield {"id": entries, "title": title, "unit": unit} | source


def _figure(name: str, title: str, x: Item, y: Item, series: Sequence[Item], data: Mapping[str, Any]) -> Item:
    return {"id": name, "title": f"{title}, {data['data']}", "x": x, "y": y, "series": list(series)}


def _axis(name: str, unit: str, log: bool = False) -> Item:
    return {"name": name, "unit": unit, "scale": "log" if log else "linear"}


def _curves(data: Mapping[str, Any], protocol: str) -> Iterator[tuple[Item, list[Item]]]:
    """(curve, its rows of a protocol)."""
    for curve in data["curves"]:
        rows = [data["rows"][at] for at in curve["rows"]]
        if own := [row for row in rows if row["protocol"] == protocol]:
            yield {"name": curve["name"], "label": curve["label"], "policy": curve["policy"]}, own


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
        own = [line for line in data["translation"] if (line["img_size"], line["protocol"]) == (size, protocol)]
        series = []
        for label, policy in dict.fromkeys((line["label"], line["policy"]) for line in own):
            lines = sorted((one for one in own if (one["label"], one["policy"]) == (label, policy)), key=_translation)
            points = {"x": [_translation(one) for one in lines], "y": [one["top1"] for one in lines]}
            points |= {"low": [one["low"] for one in lines], "high": [one["high"] for one in lines]}
            series.append({"name": f"{label}, {policy}", "label": label, "policy": policy} | points)
        x, y = _axis("translated down and right", "px"), _axis("top-1", "%")
        title = f"top-1 with the content translated, {size}, {protocol} protocol"
        yield _figure(f"translation {size} {protocol}", title, x, y, series, data)


def _translation(line: Mapping[str, Any]) -> int:
    return line["translation"]


def _classes(data: Mapping[str, Any]) -> Iterator[Item]:
    """Top-1 of every class."""
    if data["classes"] is None:
        return
    series, names = [], data["classes"]["names"]
    n: list[int] = []
    for row in data["classes"]["rows"]:
        n = row["n"] or n
        top1 = [round(100 * hits / of, 4) if of else None for hits, of in zip(row["hits"], n, strict=True)]
        about = {key: row[key] for key in ("label", "policy", "protocol", "img_size")}
        series.append({"name": " ".join(about.values())} | about | {"x": names, "y": top1, "n": n})
    yield _figure("classes", "top-1 of every class", _axis("class", ""), _axis("top-1", "%"), series, data)


def _confusions(data: Mapping[str, Any]) -> Iterator[Item]:
    for one in data["confusions"]:
        points = {"x": [[data["predicted"][place] for place in pair] for pair in one["pairs"]], "of": one["of"]}
        series = [points | {"name": f"{row['img_size']} {row['policy']}", "y": row["counts"]} for row in one["rows"]]
        title = f"Classes taken for another: {one['label']}, {one['protocol']} protocol"
        x, y = _axis("class, predicted class", ""), _axis("images", "")
        yield _figure(f"confusions {one['label']} {one['protocol']}", title, x, y, series, data)


def _side(size: str) -> float:
    return round(math.sqrt(math.prod(parse_size(size))), 3)
