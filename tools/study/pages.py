"""What the pages of the studies share: tables between their marks in a page, the rows of a curve, sides as text."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.study.curves import Curve, curves
from vitrel.tasks import Row

ROOT = Path(__file__).parents[2]


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


def fill_pages(root: Path, pages: Mapping[str, Iterable[tuple[str, str]]]) -> None:
    """Write (name, table) of every page, a path in `root`, between their marks, and print the pages."""
    for name, tables in pages.items():
        path = root / name
        path.write_text(fill(path.read_text("utf-8"), tables), "utf-8")
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


def side_of(size: str) -> str:
    """Return a size as tables show it: 96 for 96x96, 320×224 for 320x224."""
    height, width = size.split("x")
    return height if height == width else f"{height}×{width}"
