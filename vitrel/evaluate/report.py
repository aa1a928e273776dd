"""From judged rows to what a reader sees: the first screen, table.md, plots and report.html, a page without scripts.

The page is the template report.html.j2; its charts are those of plots.py, as SVG.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, shown
from vitrel.common.sizes import sizes_in_words
from vitrel.common.tables import markdown
from vitrel.evaluate.pictures import Section
from vitrel.evaluate.plots import against_cost, against_size, svg_of
from vitrel.evaluate.sentences import PROTOCOLS, capital, legend, notes, sentences, size_name, unit
from vitrel.evaluate.statistics import estimate, wilson
from vitrel.evaluate.verdicts import Judged, Row, by_area, is_training, known_number, main_metric, train_sizes_of

with optional_import():
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

CLASSES = 12  # most classes of a model on the page
COSTS = {  # header in the table of costs: the column, its factor and format
    "tokens": ("tokens", 1, ",.0f"),
    "GFLOPs": ("gflops", 1, ".3g"),
    "unseen offsets, %": ("unseen", 100, ".0f"),
    "images/s": ("infer_samples_per_sec", 1, ",.0f"),
    "peak memory, MiB": ("peak_memory_mb", 1, ",.0f"),
}
Table = tuple[list[str], list[list[str]]]  # header and lines
ByClass = Mapping[str, tuple[np.ndarray, np.ndarray]]


class Grid(NamedTuple):
    """A table of the task's metric: models as lines and sizes as columns, or where there are more sizes, the other way.

    Args:
        corner: name of the first column.
        columns: names of the others.
        lines: (name, the row of each column or None).
    """

    corner: str
    columns: list[str]
    lines: list[tuple[str, list[Row | None]]]

    def markdown(self) -> str:
        """Return the table as Markdown: metric ± half its 95 % interval and the verdict; bold if best, "-" without a row."""
        return markdown([self.corner, *self.columns], [[name, *map(self._cell, rows)] for name, rows in self.lines])

    def _cell(self, row: Row | None) -> str:
        if row is None:
            return "-"
        value = f"**{main_metric(row):.1f}**" if row.get("best") else f"{main_metric(row):.1f}"
        return f"{value} ±{(row['high'] - row['low']) / 2:.1f} {verdict_of(row)}".rstrip()


def first_screen(judged: Judged) -> str:
    """Return the main results as Markdown, for the terminal and table.md: one table, sentences on every model, and notes."""
    texts = [f"- {text}\n" for text in sentences(judged).values()] + [f"\n{text}\n" for text in notes(judged)]
    return f"{caption_of(judged, '± half its 95 % interval')}:\n\n{main_grid(judged).markdown()}\n{''.join(texts)}"


def table(judged: Judged, title: str) -> str:
    """Return the text of table.md: the first screen, what its words mean, the other tables, and costs."""
    words = "".join(f"- {f'**{word}**' if word == 'bold' else word}: {text}\n" for word, text in legend(judged).items())
    tables = [f"{name}:\n\n{grid.markdown()}" for name, grid in other_grids(judged).items()]
    parts = [f"# {title}", first_screen(judged), words, *tables, f"Costs:\n\n{markdown(*costs(judged))}"]
    return "\n\n".join(text.rstrip() for text in parts) + "\n"


def write(
    folder: Path,
    judged: Judged,
    by_class: ByClass,
    settings: Mapping[str, Any],
    pictures: Sequence[Section] = (),
) -> Path:
    """Write table.md, plots/*.png and report.html of an evaluation into its folder; return the path of report.html.

    Args:
        judged: the rows of the evaluation with their verdicts.
        by_class: `Task.by_class` of every row, by its key.
        settings: settings of the evaluation, as in settings.json.
        pictures: sections with pictures of single images and layers.
    """
    title, classes = shown(settings.get("title") or folder.resolve().name), settings.get("classes") or ()
    protocols = [*dict.fromkeys(row["protocol"] for row in judged.rows)]
    figures = {f"accuracy_{re.sub(r'[^a-z0-9]+', '_', protocol)}": against_size(judged, protocol) for protocol in protocols}
    figures["cost"] = against_cost(judged)
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        (folder / "plots").mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "plots" / f"{name}.png") as part:
            figure.savefig(part, format="png", dpi=150)
    with atomic_write(folder / "table.md") as part:
        part.write_text(table(judged, title), "utf-8")
    environment = Environment(loader=PackageLoader("vitrel.evaluate", "."), autoescape=True, trim_blocks=True)
    environment.filters["breaking"] = lambda name: Markup(re.sub(r"([_./-])", r"\1<wbr>", str(escape(name))))
    models = {label: next(iter(model.used.values())) for label, model in judged.models.items()}
    told = {name: settings[name] for name in ("data", "n", "data_seed") if name in settings} | settings.get("same", {})
    page = environment.get_template("report.html.j2").render(
        title=title,
        models=", ".join(models) if len(models) <= 4 else f"{len(models)} models",
        trained="; ".join(dict.fromkeys(sizes_in_words(train_sizes_of(row)) for row in models.values())),
        data=shown(str(settings.get("data") or "the data")),
        sentences=sentences(judged),
        notes=notes(judged),
        caption=caption_of(judged, "with its 95 % interval"),
        grid=main_grid(judged),
        legend=legend(judged),
        others=other_grids(judged),
        verdict_of=verdict_of,
        metric=main_metric,
        charts={name: svg_of(figure, name) for name, figure in drawn.items()},
        protocols={name: text for name, text in PROTOCOLS.items() if any(one.split(",")[0] == name for one in protocols)},
        costs=costs(judged),
        classes=class_tables(judged, by_class, classes),
        only_some=len(classes) > CLASSES,
        pictures=pictures,
        settings=yaml.safe_dump(told, allow_unicode=True, sort_keys=False),
        commands=settings.get("command") or (),
    )
    with atomic_write(folder / "report.html") as part:
        part.write_text(page, "utf-8")
    return folder / "report.html"


def verdict_of(row: Row) -> str:
    """Return the verdict of a row of `Judged`; without one "trained" at a training size, else ""."""
    return row.get("verdict") or ("trained" if is_training(row) and not row.get("translation") else "")


def caption_of(judged: Judged, ends: str) -> str:
    """Return the caption of the main table: "mIoU in percent, ENDS; canvas protocol, 100 images, one seed"; ENDS is `ends`."""
    used = [row for model in judged.models.values() for row in model.used.values()]
    protocols = " and ".join(dict.fromkeys(model.protocol for model in judged.models.values()))
    seeds = sorted({row["seeds"] for row in used})
    counted = "one seed" if seeds == [1] else f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds"
    images = f"{int(max(row['n'] for row in used)):,} images"
    return f"{capital(judged.task.title)} in percent, {ends}; {protocols} protocol, {images}, {counted}"


def main_grid(judged: Judged) -> Grid:
    """Return the table of every model in the protocol of its verdicts (`Model`), under its first policy at each size."""
    return _grid({label: model.used for label, model in judged.models.items()})


def other_grids(judged: Judged) -> dict[str, Grid]:
    """Return {title: table} of the other protocols, of every policy where there are several at a size, and of moved content."""
    found, title = dict[str, Grid](), capital(judged.task.title)
    for protocol in dict.fromkeys(row["protocol"] for row in judged.rows):
        series: dict[str, dict[str, Row]] = defaultdict(dict)
        policies: dict[str, dict[str, Row]] = defaultdict(dict)
        rows = [row for row in judged.rows if row["protocol"] == protocol]
        several = {(row["label"], row["img_size"]) for row in rows if not row["used"]}
        for row in rows:
            if row["used"] and judged.models[row["label"]].protocol != protocol:
                series[row["label"]][row["img_size"]] = row
            if (row["label"], row["img_size"]) in several:
                policies[f"{row['label']}, {row['policy']}"][row["img_size"]] = row
        found |= {f"{title}, {protocol} protocol": _grid(series)} if series else {}
        found |= {f"{title} under every policy, {protocol} protocol": _grid(policies)} if policies else {}
    pixels = sorted({row["translation"] for row in judged.moved})
    by_name: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in judged.moved:
        by_name[f"{row['label']} at {size_name(row)} px"][row["translation"]] = row
    if pixels:
        lines_of = [(name, [*map(rows_at.get, pixels)]) for name, rows_at in by_name.items()]
        found[f"{title} with the content moved down and right"] = Grid("model", [f"{by:g} px" for by in pixels], lines_of)
    return found


def _grid(series: Mapping[str, Mapping[str, Row]]) -> Grid:
    """Return the table of {name: {size: row}}: names as lines and sizes as columns, or with more sizes the other way."""
    first = {size: row for rows in series.values() for size, row in rows.items()}
    sizes = {size: f"{size_name(first[size])} {unit(first[size])}" for size in sorted(first, key=by_area)}
    if len(sizes) > len(series):
        return Grid("size", [*series], [(name, [rows.get(size) for rows in series.values()]) for size, name in sizes.items()])
    return Grid("model", [*sizes.values()], [(name, [*map(rows.get, sizes)]) for name, rows in series.items()])


def costs(judged: Judged) -> Table:
    """Return (header, lines) of the table of costs: every model at every size, one line for protocols that cost the same."""
    labels, rows = [*judged.models], [row for row in judged.rows if row["used"]]
    rows.sort(key=lambda row: (labels.index(row["label"]), by_area(row["img_size"])))
    several = len({row["protocol"] for row in rows}) > 1
    known = {head: how for head, how in COSTS.items() if any(known_number(row.get(how[0])) for row in rows)}
    together: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        together[row["label"], size_name(row), unit(row), row.get("gflops"), resampled_text(row)].append(row)
    lines = []
    for (label, size, of, _, resampled), same in together.items():
        numbers = [
            format(factor * same[0][name], form) if known_number(same[0].get(name)) else "-"
            for name, factor, form in known.values()
        ]
        protocols = [", ".join(row["protocol"] for row in same)] if several else []
        lines.append([label, f"{size} {of}", *protocols, *numbers, resampled])
    return ["model", "size", *(["protocol"] if several else []), *known, "values resampled"], lines


def resampled_text(row: Row) -> str:
    """Return what is resampled at a row's size: "2,700 of 0.47 million (table bicubic)", "none", "none (table clip)"."""
    count = f"{row['resampled_values']:,.0f} of {row['param_count']:g} million" if row["resampled_values"] else "none"
    return count if row["resampled"] == "nothing" else f"{count} ({row['resampled']})"


def class_tables(judged: Judged, by_class: ByClass, names: Sequence[str]) -> dict[str, Table]:
    """Return {label: (header, lines)}: the score of every class at every size of the model's protocol, with 95 % intervals.

    Of more classes only the CLASSES that lose most, at any size, against the training size. A model without `by_class` has no
    table.
    """
    found = {}
    for label, model in judged.models.items():
        counts = {size: [by_class[key] for key in row["keys"] if key in by_class] for size, row in model.used.items()}
        scored = {size: _of_classes(of_seeds) for size, of_seeds in counts.items() if of_seeds}
        if not scored or not names:
            continue
        home = next((size for size in scored if is_training(model.used[size])), next(iter(scored)))
        chosen = [*range(len(names))]
        if len(names) > CLASSES:
            losses = np.nan_to_num([scored[home][0] - values[0] for values in scored.values()], nan=-1.0).max(0)
            chosen = np.argsort(-losses, kind="stable")[:CLASSES].tolist()
        lines = [[shown(names[at]), *(_class_cell(*values[:, at]) for values in scored.values())] for at in chosen]
        found[label] = ["class", *(f"{size_name(model.used[size])} {unit(model.used[size])}" for size in scored)], lines
    return found


def _of_classes(counts: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return score, low and high of every class, percent, [3, K], from `Task.by_class` of each seed; NaN if it is absent."""
    whole, right = (np.stack([one[at] for one in counts]).astype(float) for at in (0, 1))
    table = np.full((3, whole.shape[-1]), math.nan)
    for at in range(whole.shape[-1]):
        if whole.ndim == 2 and whole[0, at]:  # images: Wilson's interval of their number, whatever the number of seeds
            share = float((right[:, at] / whole[:, at]).mean())
            table[:, at] = 100 * share, *wilson(share, whole[0, at])
        elif whole.ndim == 3 and (below := whole[..., at].sum(1, keepdims=True)).all():  # pixels: by linearization, as mIoU
            ratio = right[..., at].sum(1, keepdims=True) / below
            linear = ratio + whole.shape[1] * (right[..., at] - whole[..., at] * ratio) / below
            table[:, at] = 100 * ratio.mean(), *estimate([linear]).of_share()
    return table


def _class_cell(value: float, low: float, high: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f} ({low:.0f}–{high:.0f})"
