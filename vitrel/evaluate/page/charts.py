"""Charts of a report as Vega-Lite specifications, for report.html and for plots/*.png: one definition for both.

A specification has no data: it draws the data set "values", points as `points_of` returns them.
"""

import base64
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vitrel.common.extras import require
from vitrel.common.files import atomic_write
from vitrel.common.sizes import parse_size
from vitrel.evaluate.tasks.base import TASKS, task_named

Item = dict[str, Any]
# Okabe and Ito's palette, safe for color-blind readers; shapes and dashes distinguish curves without color
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
DASHES = ((1, 0), (6, 4), (2, 3), (8, 3, 2, 3))
LOG = {"type": "log", "nice": False, "padding": 12}
LEGEND = {"orient": "bottom", "direction": "vertical", "columns": 2, "labelLimit": 420, "symbolLimit": 0, "title": None}


class Metric(NamedTuple):
    """A column that may be drawn against size: name and unit of its axis, and whether that is logarithmic."""

    name: str
    unit: str
    log: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})"


METRICS = {
    **{key: Metric(*axis) for task in TASKS for key, axis in task_named(task).axes.items()},
    "retention": Metric("retention", "%"),
    "infer_samples_per_sec": Metric("throughput", "images/s", True),
    "peak_memory_mb": Metric("peak memory", "MiB", True),
    "gflops": Metric("multiply-adds", "GFLOPs", True),
    "attention_entropy": Metric("attention entropy", "nats"),
    "attention_span": Metric("attention span", "tokens", True),
    "attention_distance": Metric("attention distance", "patches", True),
    "attention_distance_share": Metric("attention distance", "% of diagonal"),
    "unseen": Metric("unseen offsets", "%"),
    "resampled_values": Metric("values resampled", "values"),
}


def side_of(size: str) -> float:
    """Return the side in pixels of the square with the area of a size such as "64x96"."""
    return round(math.sqrt(math.prod(parse_size(size))), 2)


def shape_of(size: str) -> str:
    """Return "square", "wide" or "tall"."""
    height, width = parse_size(size)
    return "square" if height == width else "wide" if width > height else "tall"


def points_of(curves: Sequence[Item], rows: Sequence[Item]) -> list[Item]:
    """Return one point of a chart for each row of each curve.

    A point holds curve, protocol, size, side, label, shape, n, seeds, resampled and the row's value of each of METRICS; with an
    interval of 95 % also <metric>_low and <metric>_high. A metric that the row lacks is left out.

    Args:
        curves: each has `name` and `rows`, indices into the next argument.
        rows: aggregated rows, shares in percent; `intervals` maps a metric to (low, high).
    """
    points = []
    for curve in curves:
        for row in (rows[at] for at in curve["rows"]):
            size = row["img_size"]
            point = {"curve": curve["name"], "protocol": row["protocol"], "size": size, "side": side_of(size)}
            point |= {"label": size.split("x")[0] if shape_of(size) == "square" else size, "shape": shape_of(size)}
            point |= {"n": row["n"], "seeds": row["seeds"], "resampled": row["resampled"]}
            for key in METRICS:
                if row.get(key) is not None:
                    point[key] = row[key]
                    if key in row["intervals"]:
                        point[f"{key}_low"], point[f"{key}_high"] = row["intervals"][key]
            points.append(point)
    return points


def against_size(key: str, points: Sequence[Item], trained: Sequence[str], title: str) -> Item:
    """Return the chart of a metric against image side: a line through square sizes, a hollow point for other shapes."""
    metric = METRICS[key]
    square = sorted({point["side"] for point in points if point["shape"] == "square"})
    kept = [side for at, side in enumerate(square) if at == 0 or math.log2(side / square[at - 1]) > 0.15]
    x = {
        "field": "side", "type": "quantitative", "title": "image side (px)", "scale": LOG,
        "axis": {"values": kept, "format": "d", "grid": False, "labelOverlap": True},
    }  # fmt: skip
    y = {"field": key, "type": "quantitative", "title": metric.title, "scale": _scale(metric)}
    ends = {"y": {"field": f"{key}_low", "type": "quantitative"}, "y2": {"field": f"{key}_high"}}
    curve = _curve(points)
    hollow = {"condition": {"test": "datum.shape == 'square'", **curve["color"]}, "value": "transparent"}
    dash = {"field": "curve", "type": "nominal", "legend": LEGEND, "scale": _styles(points, DASHES, len(COLORS))}
    sides = [{"side": side_of(size)} for size in trained]
    rule = {"data": {"values": sides}, "mark": {"type": "rule", "strokeDash": [4, 3], "color": "#888888"}}
    return _spec(title, [
        rule | {"encoding": {"x": x}},
        rule | {"mark": {"type": "text", "align": "left", "dx": 3, "dy": 8, "text": "trained", "color": "#888888"}}
        | {"encoding": {"x": x, "y": {"value": 0}}},
        {"transform": [{"filter": "datum.shape == 'square'"}], "params": _picked(), "mark": {"type": "line", "strokeWidth": 2},
         "encoding": {"x": x, "y": y, "strokeDash": dash, **curve}},
        *([{"mark": "rule", "encoding": {"x": x, **ends, **curve}}] if any(f"{key}_low" in point for point in points) else []),
        {"mark": {"type": "point", "size": 55, "filled": False, "strokeWidth": 1.8},
         "encoding": {"x": x, "y": y, "fill": hollow, "shape": _shape(points), "tooltip": _tooltip(key, metric), **curve}},
    ], f"isValid(datum.{key})")  # fmt: skip


def against_speed(key: str, points: Sequence[Item], title: str) -> Item:
    """Return the chart of a metric against images per second, with the intervals of both; a line joins the sizes of a curve."""
    speed, curve = METRICS["infer_samples_per_sec"], _curve(points)
    x = {"field": "infer_samples_per_sec", "type": "quantitative", "title": speed.title, "scale": _scale(speed)}
    y = {"field": key, "type": "quantitative", "title": METRICS[key].title, "scale": {"zero": False}}
    name = "infer_samples_per_sec"
    across = {"x": x | {"field": f"{name}_low"}, "x2": {"field": f"{name}_high"}}
    down = {"y": {"field": f"{key}_low", "type": "quantitative"}, "y2": {"field": f"{key}_high"}}
    known = any(f"{name}_low" in point for point in points)
    tooltip = [*_tooltip(key, METRICS[key]), *_tooltip(name, speed)[2:5]]
    return _spec(title, [
        {"mark": {"type": "line", "strokeWidth": 1}, "params": _picked(),
         "encoding": {"x": x, "y": y, "order": {"field": "side"}, **curve}},
        {"mark": "rule", "encoding": {"x": x, **down, **curve}},
        *([{"mark": "rule", "encoding": {**across, "y": y, **curve}}] if known else []),
        {"mark": {"type": "point", "filled": True, "size": 50},
         "encoding": {"x": x, "y": y, "shape": _shape(points), "tooltip": tooltip, **curve}},
        {"mark": {"type": "text", "dy": -9, "fontSize": 10}, "encoding": {"x": x, "y": y, "text": {"field": "label"}, **curve}},
    ], f"isValid(datum.{name})")  # fmt: skip


def against_translation(key: str, points: Sequence[Item], title: str) -> Item:
    """Return the chart of a metric against the number of pixels by which the content is translated."""
    x = {"field": "translation", "type": "quantitative", "title": "translated down and right (px)"}
    y = {"field": key, "type": "quantitative", "title": METRICS[key].title, "scale": {"zero": False}}
    curve, names = (
        _curve(points),
        {"translation": "pixels", key: METRICS[key].title, "low": "95 % from", "high": "to", "n": "images"},
    )
    return _spec(title, [
        {"mark": "line", "params": _picked(), "encoding": {"x": x, "y": y, **curve}},
        {"mark": "rule", "encoding": {"x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, **curve}},
        {"mark": {"type": "point", "filled": True, "size": 50},
         "encoding": {"x": x, "y": y, "shape": _shape(points), **curve,
                      "tooltip": [{"field": "curve"}, *({"field": name, "title": text} for name, text in names.items())]}},
    ])  # fmt: skip


def of_classes(title: str) -> Item:
    """Return the chart of classes whose accuracy changes: bars of points {class, before, after, n, change}."""
    color = {"condition": {"test": "datum.change < 0", "value": COLORS[1]}, "value": COLORS[0]}
    names = {"class": "class", "before": "% at the training size", "after": "% at this size", "n": "number"}
    bar = {
        "mark": "bar",
        "encoding": {
            "y": {"field": "class", "type": "nominal", "sort": {"field": "change"}, "title": None, "axis": {"labelLimit": 150}},
            "x": {"field": "change", "type": "quantitative", "title": f"change of {title} (points)"},
            "color": color,
            "tooltip": [{"field": key, "title": text} for key, text in names.items()],
        },
    }
    return _spec(f"Change of each class's {title}", [bar])


def draw_plots(metric: str, points: Sequence[Item], trained: Sequence[str], folder: Path, title: str = "") -> list[Path]:
    """Write accuracy.png, throughput.png and tradeoff.png into `folder`, which is created, and return their paths.

    The first has a panel per protocol; the others show the first protocol.
    """
    folder.mkdir(parents=True, exist_ok=True)
    protocols = [*dict.fromkeys(point["protocol"] for point in points)]
    first = [point for point in points if point["protocol"] == protocols[0]]
    size = {"width": 520, "height": 340}

    def panel(key: str, protocol: str) -> Item:
        spec = against_size(key, [point for point in points if point["protocol"] == protocol], trained, title)
        shown = [{"filter": {"field": "protocol", "equal": protocol}}, *spec.pop("transform")]
        return spec | size | {"title": f"{protocol} protocol", "transform": shown}

    charts = {
        "accuracy": ({"hconcat": [panel(metric, protocol) for protocol in protocols], "title": title}, points),
        "throughput": (panel("infer_samples_per_sec", protocols[0]) | {"title": title}, first),
        "tradeoff": (against_speed(metric, first, title) | size | {"title": title}, first),
    }
    specs = [spec | {"datasets": {"values": [*values]}} for spec, values in charts.values()]
    paths = [folder / f"{name}.png" for name in charts]
    for path, content in zip(
        paths, _convert("vegalite_to_png", [{"vl_spec": spec, "scale": 1.5} for spec in specs]), strict=True
    ):
        with atomic_write(path) as part:
            part.write_bytes(content)
    return paths


@cache
def library() -> str:
    """Return the JavaScript of Vega, Vega-Lite and vega-embed, which sets window.vegaEmbed."""
    return _convert("javascript_bundle", [{}])[0].decode()


def _convert(function: str, calls: Sequence[Item]) -> list[bytes]:
    """Call a function of vl_convert with each of the keyword arguments, in a process of its own.

    It starts a JavaScript engine, which would stop any process that is forked from this one and draws.
    """
    require("vl_convert")
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT], input=json.dumps([function, calls]), capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        raise RuntimeError(f"vl-convert-python could not run {function}: {done.stderr.strip()}")
    return [base64.b64decode(text) for text in json.loads(done.stdout)]


_CONVERT = """
import base64, json, sys
import vl_convert
function, calls = json.load(sys.stdin)
made = [getattr(vl_convert, function)(**call) for call in calls]
print(json.dumps([base64.b64encode(one.encode() if isinstance(one, str) else one).decode() for one in made]))
"""


def _spec(title: str, layers: Sequence[Item], *filters: str) -> Item:
    spec: Item = {"description": title, "width": "container", "height": 330, "data": {"name": "values"}}
    return spec | {"transform": [{"filter": text} for text in filters], "layer": [*layers]}


def _scale(metric: Metric) -> Item:
    return LOG if metric.log else {"zero": False}


def _names(points: Sequence[Item]) -> list[str]:
    return [*dict.fromkeys(point["curve"] for point in points)]


def _styles(points: Sequence[Item], styles: Sequence[Any], every: int = 1) -> Item:
    """A scale of curves to styles, of which the next is taken after `every` curves."""
    names = _names(points)
    return {"domain": names, "range": [styles[at // every % len(styles)] for at in range(len(names))]}


def _curve(points: Sequence[Item]) -> Item:
    """Color by curve, and opacity by the curves chosen in the legend."""
    color = {"field": "curve", "type": "nominal", "scale": _styles(points, COLORS), "legend": LEGEND}
    return {"color": color, "opacity": {"condition": {"param": "picked", "value": 1}, "value": 0.12}}


def _shape(points: Sequence[Item]) -> Item:
    return {"field": "curve", "type": "nominal", "legend": LEGEND, "scale": _styles(points, SHAPES)}


def _picked() -> list[Item]:
    """The choice of curves in the legend; it has to be in the first layer that the legend is of."""
    return [{"name": "picked", "select": {"type": "point", "fields": ["curve"]}, "bind": "legend"}]


def _tooltip(key: str, metric: Metric) -> list[Item]:
    names: Mapping[str, str] = {
        "curve": "model", "size": "size (px)", key: metric.title, f"{key}_low": "95 % from", f"{key}_high": "to", "n": "images",
        "seeds": "seeds", "resampled": "resampled",
    }  # fmt: skip
    return [{"field": name, "title": text, "type": "nominal"} for name, text in names.items()]
