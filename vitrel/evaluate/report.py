"""From judged rows to what a reader sees: the first screen, table.md, plots and report.html, a page without scripts.

The page is the template report.html.j2; its figures are matplotlib's, as SVG.
"""

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, shown
from vitrel.common.sizes import parse_size
from vitrel.evaluate.pictures import Pictures
from vitrel.evaluate.sentences import PROTOCOLS, legend, notes, sentences, size_name, training_in_words, unit
from vitrel.evaluate.statistics import estimate, wilson
from vitrel.evaluate.verdicts import (
    MARGIN,
    Judged,
    Row,
    Scores,
    by_area,
    contrast,
    curves,
    groups_of,
    is_training,
    judge,
    known_number,
    main_metric,
    sample_of,
    train_sizes_of,
)

with optional_import():
    import matplotlib
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito's palette, safe for color-blind readers; markers distinguish models without color
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
MARKERS = "osD^vPX"
CLASSES = 12  # most classes of a model on the page
ByClass = Mapping[str, tuple[np.ndarray, np.ndarray]]


class Grid(NamedTuple):
    """A table of accuracies: models by sizes, or where there are more sizes than models, sizes by models.

    Args:
        corner: name of the first column.
        columns: names of the others.
        lines: (name, the row of each column or None).
        bold: ids of rows that are shown to be better than those of every other model.
    """

    corner: str
    columns: list[str]
    lines: list[tuple[str, list[Row | None]]]
    bold: set[int]

    def markdown(self) -> str:
        """The table as Markdown: accuracy ± half its interval, and the verdict."""
        return markdown([self.corner, *self.columns], [[name, *map(self._cell, rows)] for name, rows in self.lines])

    def is_bold(self, row: Row) -> bool:
        """Whether a row is shown to be better than those of every other model."""
        return id(row) in self.bold

    def _cell(self, row: Row | None) -> str:
        if row is None:
            return "-"
        value = f"**{main_metric(row):.1f}**" if self.is_bold(row) else f"{main_metric(row):.1f}"
        return f"{value} ±{(row['high'] - row['low']) / 2:.1f} {verdict_of(row)}".rstrip()


def first_screen(judged: Judged) -> str:
    """Return the answer as Markdown, for the terminal and table.md: one table, and what is shown of every model."""
    texts = [f"- {text}\n" for text in sentences(judged).values()] + [f"\n{text}\n" for text in notes(judged)]
    return f"{caption_of(judged)}:\n\n{main_grid(judged).markdown()}\n{''.join(texts)}"


def write(
    folder: Path,
    rows: Sequence[Row],
    scores: Scores,
    by_class: ByClass,
    settings: Mapping[str, Any],
    pictures: Pictures | None = None,
) -> Path:
    """Write table.md, plots/*.png and report.html of an evaluation into its folder; return the path of report.html.

    Args:
        rows: of the evaluation, one a trial.
        scores: see `judge`.
        by_class: {row["key"]: (of each class, those of them that are right)}: numbers of images [K]; or of pixels [n, K] for
            every image, their union and intersection.
        settings: of the evaluation; of these title, classes, commands, margin and unused (images) have a place of their own.
        pictures: of single images and layers.
    """
    judged = judge(rows, scores, settings.get("margin") or MARGIN, settings.get("unused") or 0)
    title = shown(settings.get("title") or Path(folder).resolve().name)
    figures = _figures(judged, [row for row in rows if row.get("translation")], rows, scores)
    for name, figure in figures.items():
        (folder / "plots").mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "plots" / f"{name}.png") as part:
            figure.savefig(part, format="png", dpi=150)
    words = "".join(f"- {word if word != 'bold' else '**bold**'}: {text}\n" for word, text in legend(judged).items())
    tables = [f"{name}:\n\n{grid.markdown()}" for name, grid in other_grids(judged).items()]
    parts = [f"# {title}", first_screen(judged), words, *tables, "Costs:", markdown(*costs(judged))]
    with atomic_write(folder / "table.md") as part:
        part.write_text("\n\n".join(text.rstrip() for text in parts if text) + "\n", "utf-8")
    environment = Environment(loader=PackageLoader("vitrel.evaluate", "."), autoescape=True, trim_blocks=True)
    environment.filters["breaking"] = lambda name: Markup(re.sub(r"([_./-])", r"\1<wbr>", str(escape(name))))
    page = environment.get_template("report.html.j2").render(
        title=title,
        lead=_lead(judged, settings),
        caption=caption_of(judged, "with its 95 % interval"),
        answer=sentences(judged),
        notes=notes(judged),
        grid=main_grid(judged),
        others=other_grids(judged),
        verdict_of=verdict_of,
        metric=main_metric,
        ends=ends_of,
        legend=legend(judged),
        svg={name: _svg(figure, name) for name, figure in figures.items()},
        costs=costs(judged),
        classes=class_tables(judged, by_class, settings.get("classes") or ()),
        many_classes=len(settings.get("classes") or ()) > CLASSES,
        pictures=pictures or Pictures(),
        protocols={name: PROTOCOLS[name] for name in dict.fromkeys(row["protocol"].split(",")[0] for row in judged.rows)},
        settings=_settings(settings),
        commands=settings.get("command") or settings.get("commands") or [],
    )
    with atomic_write(folder / "report.html") as part:
        part.write_text(page, "utf-8")
    return folder / "report.html"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with padded columns, readable as plain text too; columns of numbers are right-aligned."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [header, *lines]]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(header))]
    right = [all(re.fullmatch(r"[\d,.±%: ]*|-", line[column]) for line in cells[1:]) for column in range(len(header))]
    pads = [str.rjust if flag else str.ljust for flag in right]
    rule = ["-" * (width - 1) + ":" if flag else "-" * width for width, flag in zip(widths, right, strict=True)]
    texts = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [texts[0], rule, *texts[1:]]) + "\n"


def verdict_of(row: Row) -> str:
    """Return the verdict of a judged row, "trained" for a training size."""
    return row["verdict"] or ("trained" if is_training(row) else "")


def ends_of(low: float, high: float) -> str:
    """Return an interval in percent as "76.0–81.4", or "34–90" where it is wide."""
    digits = 1 if high - low < 10 else 0
    return f"{low:.{digits}f}–{high:.{digits}f}"


def caption_of(judged: Judged, ends: str = "± half its 95 % interval") -> str:
    """Return what the main table holds: "mIoU in percent, ± half its 95 % interval; canvas protocol, 100 images, one seed"."""
    used = [row for model in judged.models.values() for row in model.used.values()]
    protocols = " and ".join(dict.fromkeys(model.protocol for model in judged.models.values()))
    seeds = sorted({row["seeds"] for row in used})
    counted = "one seed" if seeds == [1] else f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds"
    images = f"{int(max(row['n'] for row in used)):,} images"
    return f"{_capital(judged.task.title)} in percent, {ends}; {protocols} protocol, {images}, {counted}"


def main_grid(judged: Judged) -> Grid:
    """Return the table of every model in its first protocol, under the policies that sizes are judged by."""
    models = judged.models
    bold = {id(model.used[size]) for model in models.values() for size in model.ahead}
    return _grid({label: model.used for label, model in models.items()}, bold)


def other_grids(judged: Judged) -> dict[str, Grid]:
    """Return {title: table} of the other protocols, and of every policy where a model has several at a size."""
    found = {}
    firsts = {label: model.protocol for label, model in judged.models.items()}
    for protocol in dict.fromkeys(row["protocol"] for row in judged.rows):
        rows = [row for row in judged.rows if row["protocol"] == protocol]
        series: dict[str, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            if row["used"] and firsts[row["label"]] != protocol:
                series[row["label"]][row["img_size"]] = row
        if series:
            found[f"{_capital(judged.task.title)} in the {protocol} protocol"] = _grid(series)
        if any(not row["used"] for row in rows):
            of_policy = {curve_name(label, policy): part for label, policy, part in curves(rows)}
            lines = {name: {row["img_size"]: row for row in part} for name, part in of_policy.items()}
            found[f"{_capital(judged.task.title)} of every policy, {protocol} protocol"] = _grid(lines)
    return found


def curve_name(label: str, policy: str) -> str:
    """Return the name of a curve: the label, and the policy unless it is "none"."""
    return label if policy == "none" else f"{label}, {policy}"


def _grid(series: Mapping[str, Mapping[str, Row]], bold: Iterable[int] = ()) -> Grid:
    """The table of {name: {size: row}}."""
    first = {size: row for rows in series.values() for size, row in rows.items()}
    sizes = {size: f"{size_name(first[size])} {unit(first[size])}" for size in sorted(first, key=by_area)}
    if len(sizes) > len(series):
        lines = [(name, [rows.get(size) for rows in series.values()]) for size, name in sizes.items()]
        return Grid("size", [*series], lines, {*bold})
    return Grid("model", [*sizes.values()], [(name, [*map(rows.get, sizes)]) for name, rows in series.items()], {*bold})


def costs(judged: Judged) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of the table of costs: every model at every size, each distinct cost once."""
    columns = {  # header: the column and its format
        "tokens": ("tokens", ",.0f"),
        "GFLOPs": ("gflops", ".3g"),
        "unseen offsets, %": ("unseen", ".0%"),
        "padding, %": ("pad_fraction", ""),
        "images/s": ("infer_samples_per_sec", ",.0f"),
        "peak memory, MiB": ("peak_memory_mb", ",.0f"),
    }
    labels = [*judged.models]
    rows = [row for row in judged.rows if row["used"]]
    rows.sort(key=lambda row: (labels.index(row["label"]), by_area(row["img_size"])))
    shown_columns = {head: how for head, how in columns.items() if any(_known(row.get(how[0])) for row in rows)}
    several = len({row["protocol"] for row in rows}) > 1
    lines: dict[tuple, list[str]] = {}
    protocols: dict[tuple, list[str]] = defaultdict(list)
    for row in rows:
        cells = [row["label"], f"{size_name(row)} {unit(row)}", *(_number(row, *how) for how in shown_columns.values())]
        cells.append(resampled_text(row))
        key = tuple(cell for head, cell in zip(["", "", *shown_columns, ""], cells, strict=True) if head not in _MEASURED)
        lines.setdefault(key, cells)
        protocols[key].append(row["protocol"])
    head = ["model", "size", *(["protocol"] if several else []), *shown_columns, "values resampled"]
    both = [[*cells[:2], *([", ".join(protocols[key])] if several else []), *cells[2:]] for key, cells in lines.items()]
    return head, both


_MEASURED = ("images/s", "peak memory, MiB")


def resampled_text(row: Row) -> str:
    """Return what is resampled at a row's size: "2,700 of 469,300 (table bicubic)", "none", "none (table clip)".

    Weights that changed although nothing is resampled are an error, and it says so.
    """
    if row.get("unchanged") is False and not row["resampled_values"]:
        return "none, but the weights changed: this is an error"
    count = f"{row['resampled_values']:,.0f} of {row['params']:,.0f}" if row["resampled_values"] else "none"
    return count if row["resampled"] == "nothing" else f"{count} ({row['resampled']})"


def class_tables(judged: Judged, by_class: ByClass, names: Sequence[str]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return {label: (header, lines)}: the score of every class at every size of the first protocol, with 95 % intervals.

    Of many classes those that lose most from the training size on, CLASSES at most.
    """
    found = {}
    for label, model in judged.models.items():
        scored = {
            size: _of_classes([by_class[key] for key in row["keys"] if key in by_class]) for size, row in model.used.items()
        }
        scored = {size: values for size, values in scored.items() if values is not None}
        if not scored or not names:
            continue
        homes = [size for size in scored if is_training(model.used[size])] or [*scored]
        losses = np.max([scored[homes[0]][0] - values[0] for values in scored.values()], 0)
        chosen = np.arange(len(names))
        if len(names) > CLASSES:
            chosen = np.argsort(-np.nan_to_num(losses, nan=-1.0), kind="stable")[:CLASSES]
        head = ["class", *(f"{size_name(model.used[size])} {unit(model.used[size])}" for size in scored)]
        lines = [
            [shown(str(names[at])), *(_class_cell(*(values[at] for values in scored[size])) for size in scored)]
            for at in chosen
        ]
        found[label] = head, lines
    return found


def _of_classes(counts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(score, low, high) of every class [K] in percent, NaN where it does not occur, of the counts of each seed; None without."""
    if not counts:
        return None
    whole, right = (np.stack([one[at] for one in counts]).astype(float) for at in (0, 1))
    table = np.full((3, whole.shape[-1]), math.nan)
    for at in range(whole.shape[-1]):
        if whole.ndim == 2 and whole[0, at]:  # images: Wilson's interval of their number, whatever the number of seeds
            share = float((right[:, at] / whole[:, at]).mean())
            table[:, at] = (100 * share, *wilson(share, whole[0, at]))
        elif whole.ndim == 3 and (below := whole[..., at].sum(1)).all():  # pixels: by linearization, as for mIoU
            ratio = (right[..., at].sum(1) / below)[:, None]
            n = whole.shape[1]
            linear = ratio + n * (right[..., at] - whole[..., at] * ratio) / below[:, None]
            table[:, at] = (100 * ratio.mean(), *estimate([linear]).of_share())
    return table[0], table[1], table[2]


def _class_cell(value: float, low: float, high: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f} ({low:.0f}–{high:.0f})"


def _lead(judged: Judged, settings: Mapping[str, Any]) -> str:
    """The sentence below the title: models, where they were trained, data, device."""
    used = [next(iter(model.used.values())) for model in judged.models.values()]
    labels = [shown(label) for label in judged.models]
    models = f"{len(labels)} models" if len(labels) > 4 else ", ".join(labels)
    trained = "; ".join(dict.fromkeys(map(training_in_words, used)))
    data = shown(str(settings.get("data") or used[0].get("data") or "the data"))
    device = settings.get("device") or used[0].get("device")
    return f"{models}, trained at {trained}, evaluated on {data}{f' ({device})' if device else ''}."


def _settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings as text, without empty and long ones and those with a place of their own."""
    texts = {}
    for name, value in settings.items():
        if name in ("title", "classes", "command", "commands") or value in (None, "", [], (), {}):
            continue
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if len(text) < 400:
            texts[name] = shown(text)
    return texts


# Figures


def _figures(judged: Judged, translated: Sequence[Row], rows: Sequence[Row], scores: Scores) -> dict[str, "Figure"]:
    """{name: figure}: accuracy by size for every protocol, accuracy by multiply-adds, accuracy of translated content."""
    figures = {}
    for protocol in dict.fromkeys(row["protocol"] for row in judged.rows):
        of_protocol = [row for row in judged.rows if row["protocol"] == protocol and row["used"]]
        if len({row["img_size"] for row in of_protocol}) > 1:
            name = re.sub(r"\W+", "_", protocol)
            figures[f"accuracy_{name}"] = against_size(of_protocol, [*judged.models], f"{protocol} protocol")
    used = [row for model in judged.models.values() for row in model.used.values()]
    if len({row.get("gflops") for row in used if known_number(row.get("gflops"))}) > 1:
        figures["cost"] = against_cost(used, [*judged.models])
    if translated:
        figures["translation"] = _against_translation(translated, rows, scores, [*judged.models])
    return figures


def against_size(rows: Sequence[Row], labels: Sequence[str], title: str) -> "Figure":
    """Draw the accuracy of aggregated rows by size, a line a model through sizes of its training shape, others hollow.

    Sizes stand at equal distances, in the order of their area, each with its name, whatever its shape.
    """
    sizes = {row["img_size"]: size_name(row) for row in sorted(rows, key=lambda row: by_area(row["img_size"]))}
    places = {size: at for at, size in enumerate(sizes)}
    figure, axes = _axes(title, rows[0])
    present = [label for label in labels if any(row["label"] == label for row in rows)]
    for number, label in enumerate(present):
        own = sorted((row for row in rows if row["label"] == label), key=lambda row: places[row["img_size"]])
        line = [row for row in own if _has_training_shape(row)]
        shift = 0.04 * (number - (len(present) - 1) / 2)  # intervals side by side
        _draw(axes, label, labels, [places[row["img_size"]] + shift for row in line], line)
        rest = [row for row in own if not _has_training_shape(row)]
        _draw(
            axes,
            label if not line else "",
            labels,
            [places[row["img_size"]] + shift for row in rest],
            rest,
            hollow=True,
            of=label,
        )
    for size in dict.fromkeys(row["img_size"] for row in rows if is_training(row)):
        axes.axvline(places[size], color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate("trained", (places[size], 1), xycoords=("data", "axes fraction"), xytext=(2, -9),
                      textcoords="offset points", fontsize=8, color="0.4")  # fmt: skip
    crowded = sum(len(name) + 1 for name in sizes.values()) > 36
    axes.set_xticks(
        range(len(sizes)), [*sizes.values()], **({"rotation": 50, "ha": "right", "rotation_mode": "anchor"} if crowded else {})
    )
    axes.set_xlabel("most tokens of an image" if unit(rows[0]) == "tokens" else "image size (px)")
    _name_models(figure, axes)
    return figure


def against_cost(rows: Sequence[Row], labels: Sequence[str]) -> "Figure":
    """Draw accuracy by multiply-adds, a line a model from its smallest size to its largest, which are named."""
    figure, axes = _axes("accuracy and cost", rows[0])
    for label in labels:
        own = sorted(
            (row for row in rows if row["label"] == label and known_number(row.get("gflops"))), key=lambda row: row["gflops"]
        )
        _draw(axes, label, labels, [row["gflops"] for row in own], own)
        for row in own[:: max(1, len(own) - 1)]:
            axes.annotate(size_name(row), (row["gflops"], main_metric(row)), xytext=(0, 5), textcoords="offset points",
                          ha="center", fontsize=7, color="0.25")  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, at: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("multiply-adds of an image ($10^9$)")
    _name_models(figure, axes)
    return figure


def _against_translation(moved: Sequence[Row], rows: Sequence[Row], scores: Scores, labels: Sequence[str]) -> "Figure":
    """Draw the accuracy of content that is translated down and right, at the training size."""
    figure, axes = _axes("translated content", moved[0])
    for label in labels:
        of_label = [row for row in moved if row["label"] == label]
        still = [row for row in rows if not row.get("translation") and any(_same_place(row, one) for one in of_label)]
        by_pixels: dict[int, list[Row]] = defaultdict(list)
        for row in [*still, *of_label]:
            by_pixels[int(row.get("translation") or 0)].append(row)
        points = []
        for pixels, group in sorted(by_pixels.items()):
            low, high = contrast([sample_of(group, scores)]).of_share()
            mean = sum(map(main_metric, group)) / len(group)
            points.append((pixels, group[0] | {group[0]["task"]: 0, "low": low, "high": high, _metric(group[0]): mean}))
        _draw(axes, label, labels, [pixels for pixels, _ in points], [row for _, row in points])
    axes.set_xlabel("translated down and right (px)")
    _name_models(figure, axes)
    return figure


def _same_place(row: Row, other: Row) -> bool:
    return all(row.get(name) == other.get(name) for name in ("label", "seed", "img_size", "protocol", "policy", "crop_pct"))


def _metric(row: Row) -> str:
    from vitrel.evaluate.verdicts import task_of

    return task_of(row).metric


def _has_training_shape(row: Row) -> bool:
    """Whether a size has the aspect ratio of a training size, or is a budget."""
    if unit(row) == "tokens":
        return True
    (h, w), trained = parse_size(row["img_size"]), [size for size in train_sizes_of(row) if isinstance(size, tuple)]
    return any(h * size[1] == w * size[0] for size in trained or [(1, 1)])


def _axes(title: str, row: Row) -> tuple["Figure", Any]:
    from vitrel.evaluate.verdicts import task_of

    figure = Figure(figsize=(4.6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel(f"{task_of(row).title} (%)")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def _draw(
    axes: Any, label: str, labels: Sequence[str], x: Sequence[float], rows: Sequence[Row], hollow: bool = False, of: str = ""
) -> None:
    """A line of points with intervals; hollow points have no line."""
    if not rows:
        return
    number = labels.index(of or label)
    y = [main_metric(row) for row in rows]
    # Wilson's interval may end a hair inside a share that rounding moved
    errors = np.array([[max(value - row["low"], 0), max(row["high"] - value, 0)] for value, row in zip(y, rows, strict=True)]).T
    color = COLORS[number % len(COLORS)]
    axes.errorbar(x, y, errors, color=color, marker=MARKERS[number % len(MARKERS)], markersize=5, label=label or None,
                  linewidth=0 if hollow else 1.5, elinewidth=0.9, markerfacecolor="white" if hollow else color)  # fmt: skip


def _name_models(figure: "Figure", axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        columns = max(1, min(len(names), int(figure.get_figwidth() * 72 / (36 + 4.6 * max(map(len, names))))))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _svg(figure: "Figure", name: str) -> str:
    """The figure as an SVG element whose text is text, as wide as its box up to its own width."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(
        r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"',
        rf'<svg role="img" aria-label="{name}" \1 style="max-width: \2pt"',
        text,
        count=1,
    )


def _known(value: Any) -> bool:
    return known_number(value) or (isinstance(value, str) and value != "")


def _number(row: Row, name: str, how: str) -> str:
    """A cell of the table of costs; padding is text, a share for every stage."""
    value = row.get(name)
    if isinstance(value, str):
        return ", ".join(f"{100 * float(share):.0f}" for share in value.split())
    if not known_number(value):
        return "-"
    return f"{100 * value:.0f}" if how in ("", ".0%") else format(value, how)


def _capital(text: str) -> str:
    """A text with a capital, as it begins a sentence; mIoU stays as it is."""
    return text if text[1:2].isupper() else f"{text[:1].upper()}{text[1:]}"
