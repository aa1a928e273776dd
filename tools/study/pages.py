"""Insert generated tables between their marks in a Markdown page."""

import re
from collections.abc import Iterable


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
