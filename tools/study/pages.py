"""Tables put into their places in a page of Markdown."""

import re
from collections.abc import Iterable


def fill(text: str, tables: Iterable[tuple[str, str]]) -> str:
    """`text` with every part between <!-- name --> and <!-- /name --> replaced by the table of that name.

    ValueError for a name that has no such place in the text.
    """
    for name, table in tables:
        place = re.compile(rf"(<!-- {name} -->\n).*?(\n?<!-- /{name} -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"no place for the table {name!r}: the text needs <!-- {name} --> and <!-- /{name} -->")
        text = place.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2].lstrip()}", text)
    return text
