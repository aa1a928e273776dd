"""The files of an evaluation that grow with every row: results.csv, per_class.csv and translation.csv."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from vitrel.files import whole
from vitrel.transfer.columns import PER_CLASS, TRANSLATION
from vitrel.transfer.measure import Evaluated
from vitrel.transfer.report import read_csv, write_csv
from vitrel.transfer.rows import line_key
from vitrel.transfer.settings import Row

LINES = {"per_class": PER_CLASS, "translation": TRANSLATION}


def read_folder(folder: Path) -> list[Evaluated]:
    """The rows of a folder with their lines; a line belongs to the row of its model, size, protocol, crop and policy."""
    rows = read_csv(folder / "results.csv")
    lines = {name: defaultdict(list) for name in LINES}
    for name, found in lines.items():
        for line in read_lines(folder, name):
            found[line_key(line)].append(line)
    return [Evaluated(row, *(found[line_key(row)] for found in lines.values())) for row in rows]


def read_lines(folder: Path, name: str) -> list[Row]:
    """The lines of `<name>.csv`, "per_class" or "translation"; none where there is no such file.

    ValueError where columns are missing.
    """
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype={"class": str, "label": str, "data": str})
    if lacking := [column for column in LINES[name] if column not in frame]:
        raise ValueError(f"{path} has no column {lacking[0]!r}: move it away and run again")
    return frame.to_dict("records")


def write_folder(done: Sequence[Evaluated], folder: Path) -> None:
    """Writes all three; translation.csv only where content was shifted. Rows come last: a row there always has its lines."""
    for name, columns in LINES.items():
        lines = [line for one in done for line in getattr(one, name)]
        path = folder / f"{name}.csv"
        if lines or path.exists():
            with whole(path) as part:
                pd.DataFrame(lines, columns=list(columns)).to_csv(part, index=False)
    write_csv([one.row for one in done], folder / "results.csv")
