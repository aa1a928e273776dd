"""What the pages of the studies share: the rows of a curve, sides as text, and tables between their marks in a page."""

import re
from collections.abc import Iterable

import pandas as pd

from tools.study.curves import Curve
from vitrel.evaluate.results import curves


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


def rows_of(table: pd.DataFrame, curve: Curve, size: str, protocol: str, name: str) -> pd.DataFrame:
    """Return the rows of a curve at a size: one per seed, or one of an aggregated table.

    ValueError if there are none; `name` says in it whose table this is.
    """
    for label, policy, rows in curves(table[table["protocol"] == protocol]):
        found = rows[rows["img_size"] == size]
        if (label, policy) == curve and len(found):
            return found
    raise ValueError(f"{name} has no row of {'/'.join(curve)} at {size} in the {protocol} protocol")


def side_of(size: str) -> str:
    """Return a size as tables show it: 96 for 96x96, 320×224 for 320x224."""
    height, width = size.split("x")
    return height if height == width else f"{height}×{width}"
