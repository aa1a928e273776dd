"""What the pages of the studies share: tables between their marks in a page, the rows of a curve, sides as text."""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.study.curves import Curve, curves
from vitrel.common.tables import markdown
from vitrel.evaluate.verdicts import by_area, main_metric, task_of
from vitrel.tasks import Row

ROOT = Path(__file__).parents[2]


def add_page_arguments(parser: argparse.ArgumentParser, results: Path) -> None:
    """Add --check, --results with a default, and --root."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    parser.add_argument("--results", type=Path, default=results, help="folder of the results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")


def fill(text: str, tables: Iterable[tuple[str, str]]) -> str:
    """Return `text` with every part between <!-- name --> and <!-- /name --> replaced by the table of that name.

    ValueError if the text lacks the marks of a name.
    """
    for name, table in tables:
        marked = re.compile(rf"(<!-- {name} -->\n).*?(\n?<!-- /{name} -->)", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"the page lacks the marks of table {name!r}: it needs <!-- {name} --> and <!-- /{name} -->")
        text = marked.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2].lstrip()}", text)
    return text


def fill_pages(root: Path, pages: Mapping[str, Iterable[tuple[str, str]]], command: str = "", check: bool = False) -> None:
    """Write (name, table) of every page, a path in `root`, between their marks.

    With `check`, write nothing, and exit with a message that names `command` if a page is out of date.
    """
    for name, tables in pages.items():
        path = root / name
        before = path.read_text("utf-8")
        after = fill(before, tables)
        if check and after != before:
            sys.exit(f"{path} is out of date: run {command}")
        if not check:
            path.write_text(after, "utf-8")
            print(path)


class Curves:
    """The rows of an evaluation by curve, size and protocol (`tools.study.curves.curves`)."""

    def __init__(self, table: Sequence[Row], name: str) -> None:
        """Arrange rows of single seeds, or aggregated rows; `name` says in errors whose they are."""
        self.table, self.name = table, name
        self._rows: dict[tuple[Curve, str, str], list[Row]] = defaultdict(list)
        for protocol in dict.fromkeys(row["protocol"] for row in table):
            for label, policy, curve in curves([row for row in table if row["protocol"] == protocol]):
                for row in curve:
                    self._rows[(label, policy), row["img_size"], protocol].append(row)

    def at(self, curve: Curve, size: str, protocol: str) -> list[Row]:
        """Return the rows of a curve at a size: one per seed, or one of aggregated rows; ValueError if there are none."""
        if (curve, size, protocol) not in self._rows:
            raise ValueError(f"{self.name} has no row of {'/'.join(curve)} at {size} in the {protocol} protocol")
        return self._rows[curve, size, protocol]


def accuracy_tables(table: Sequence[Row]) -> str:
    """Return a Markdown table per protocol: the accuracy of every model and policy by size, ± half its 95 % interval.

    Args:
        table: aggregated rows.
    """
    sizes, parts = sorted({row["img_size"] for row in table}, key=by_area), []
    for protocol in dict.fromkeys(row["protocol"] for row in table):
        lines = []
        for label, policy, rows in curves([row for row in table if row["protocol"] == protocol]):
            cells = {row["img_size"]: f"{main_metric(row):.1f} ±{(row['high'] - row['low']) / 2:.1f}" for row in rows}
            lines.append([label, policy, *(cells.get(size, "-") for size in sizes)])
        head = ["model", "policy", *map(side_of, sizes)]
        parts.append(f"{task_of(table[0]).title} in percent, {protocol} protocol:\n\n{markdown(head, lines)}")
    return "\n".join(parts)


def side_of(size: str) -> str:
    """Return a size as tables show it: 96 for 96x96, 320×224 for 320x224."""
    height, width = size.split("x")
    return height if height == width else f"{height}×{width}"
