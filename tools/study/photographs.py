"""Write the tables and pictures of the study on photographs into docs/studies, from its results.

python -m tools.study.photographs
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.study.curves import Curve, draw_protocols
from tools.study.pages import ROOT, Curves, fill_pages, side_of
from tools.study.results import read_rows
from vitrel.common.tables import markdown
from vitrel.evaluate.verdicts import aggregate, contrast, sample_of
from vitrel.tasks import Row

RESULTS, DATA = ROOT / "results" / "study", ("imagenette224", "flowers256")
TITLE = "Nano models trained at 64 px on photographs, used at other sizes"
CURVES = {  # of the headline; the tables have all
    ("absolute", "bicubic"): "absolute, interpolated",
    ("table", "bicubic"): "table, bicubic",
    ("table", "clip"): "table, clipped",
    ("log_decay", "keep"): "log_decay",
    ("rope_mixed", "none"): "rope_mixed",
    ("rope_mixed+yarn", "none"): "rope_mixed, yarn",
    ("swin", "fixed"): "Swin, window fixed",
    ("swin", "rescale+geometric"): "Swin, window rescaled",
}
DRAWN = {curve: name for curve, name in CURVES.items() if curve != ("table", "clip")}  # that curve hardly differs from bicubic
PLACES = (("64x64", "scale"), ("128x128", "scale"), ("192x192", "scale"), ("128x128", "canvas"))
AWAY = (("48x48", "scale"), ("128x128", "scale"), ("192x192", "scale"), ("128x128", "canvas"))


def headline(folder: Path, names: Sequence[str], shown: Mapping[Curve, str], places: Sequence[tuple[str, str]]) -> str:
    """Return a Markdown table: top-1 in percent ± half its 95 % interval.

    Rows: the curves of `shown`, {curve: name}. Columns: each (img_size, protocol) of `places` for each data set, and
    "resampled", the values resampled at some of them. ValueError for a curve or a place that is not in the results.
    """
    tables = {name: Curves(_table(folder / name), name) for name in names}
    labels = {label for label, _ in shown}
    own = {name: {row["train_size"] for row in found.table if row["label"] in labels} for name, found in tables.items()}
    head = ["", "resampled", *(f"{name}: {_where(own[name], *place)}" for name in names for place in places)]
    lines = []
    for curve, called in shown.items():
        cells, resampled = [], ""
        for found in tables.values():
            for size, protocol in places:
                (row,) = found.at(curve, size, protocol)
                cells.append(f"{row['top1']:.1f} ±{(row['high'] - row['low']) / 2:.1f}")
                resampled = max(resampled, row["resampled"].replace("nothing", ""), key=len)
        lines.append([called, resampled or "nothing", *cells])
    return markdown(head, lines).rstrip()


def kept_beside(folder: Path, names: Sequence[str], shown: Mapping[Curve, str], places: Sequence[tuple[str, str]]) -> str:
    """Return a Markdown table: how many points of top-1 each curve loses less than the first curve from the training size on.

    That is (top1 at the place - top1 at the training size) of the curve minus the same of the first curve, paired by seed,
    ± half its 95 % interval over seeds and images (`contrast`). It compares models whose accuracy at the training size differs.
    """
    first, *others = shown
    head = ["", *(f"{name}: {side_of(size)}, {protocol}" for name in names for size, protocol in places)]
    lines = [[shown[curve]] for curve in others]
    for name in names:
        found = Curves(read_rows(folder / name / "results.csv"), name)
        for size, protocol in places:
            here, at_training = _ends(found, first, size, protocol)
            for line, curve in zip(lines, others, strict=True):
                own_here, own_at_training = _ends(found, curve, size, protocol)
                samples = [sample_of(rows) for rows in (own_here, at_training, own_at_training, here)]
                gap = contrast(samples[:2], samples[2:])
                line.append(f"{gap.mean:+.1f} ±{gap.half():.1f}")
    return markdown(head, lines).rstrip()


def _table(folder: Path) -> list[Row]:
    return aggregate(read_rows(folder / "results.csv"))


def _ends(found: Curves, curve: Curve, size: str, protocol: str) -> tuple[list[Row], list[Row]]:
    """Return the rows of a curve at the place and at its training size; ValueError if they are missing."""
    there = found.at(curve, size, protocol)
    return there, found.at(curve, there[0]["train_size"], protocol)


def _where(trained: set[str], size: str, protocol: str) -> str:
    """Return a column's title, e.g. "128, canvas", or "64 (trained)" if all models were trained at the size."""
    return f"{side_of(size)} (trained)" if trained == {size} else f"{side_of(size)}, {protocol}"


def pages() -> dict[str, list[tuple[str, str]]]:
    """Return {page: [(name, table)]}; FileNotFoundError if an evaluation has not been run."""
    tables = [("headline", headline(RESULTS, DATA, CURVES, PLACES)), ("kept", kept_beside(RESULTS, DATA, CURVES, AWAY))]
    return {"docs/studies/photographs.md": tables}


if __name__ == "__main__":
    fill_pages(ROOT, pages())
    draw_protocols({name: _table(RESULTS / name) for name in DATA}, DRAWN, TITLE, "photographs")
