"""The files of an evaluation that grow with every row: results.csv, per_class.csv and translation.csv; and bad_images.csv."""

import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pandas as pd

from vitrel.evaluate.columns import PER_CLASS, TRANSLATION
from vitrel.evaluate.measure import Evaluated
from vitrel.evaluate.report import read_csv, read_frame, write_csv, write_frame
from vitrel.evaluate.rows import line_key
from vitrel.evaluate.settings import Row
from vitrel.files import shown, write_cells

LINES = {"per_class": PER_CLASS, "translation": TRANSLATION}
NAMES = "bad_images.csv"
PAGES = ("table.md", "claims.md", "plots", "pictures.json.gz", "report.html")
FILES = ("results.csv", *(f"{name}.csv" for name in LINES), NAMES, *PAGES)  # all that an evaluation writes
REST = 10.0  # times as long as writing took, for which nothing is written again
PATIENCE = 10.0  # seconds for another evaluation to let go: loader processes outlive one that was killed by a few


class Tables:
    """The rows of a folder, by `line_key`, and its files, which are written as rows are added.

    rows: those that it holds already. names: of the images that they leave out.
    """

    def __init__(self, folder: Path, rows: Iterable[Evaluated] = (), names: Iterable[str] = ()) -> None:
        self.folder = folder
        self.rows = {line_key(one.row): one for one in rows}
        self.bad_images = dict.fromkeys(names if any(one.row["left_out"] for one in self.rows.values()) else ())
        self.written = len(self.rows)
        self._unwritten, self._again = False, 0.0

    def add(self, one: Evaluated) -> None:
        """Adds a row, or puts it in the place of one, and writes all.

        Writing takes a tenth of the time at most, and some rows wait for the next: of thousands it takes as long as a row.
        """
        known = self.rows.get(line_key(one.row))
        self.rows[line_key(one.row)] = one
        if known is not None and known.per_class is one.per_class:  # it was there
            return
        self.bad_images |= dict.fromkeys(one.bad_images)
        self._unwritten = True
        if time.perf_counter() > self._again:
            start = time.perf_counter()
            self.write()
            self._again = time.perf_counter() + REST * (time.perf_counter() - start)

    def write(self, rows: Sequence[Row] | None = None) -> None:
        """Writes all files; `rows` take the place of those there are, in their order."""
        if rows is not None:
            pairs = zip(self.rows.items(), rows, strict=True)
            self.rows = {key: one._replace(row=row) for (key, one), row in pairs}
        self._unwritten = False
        write_folder([*self.rows.values()], self.folder)
        if self.bad_images:
            write_cells(self.folder / NAMES, [("image",), *((name,) for name in self.bad_images)])
        else:
            (self.folder / NAMES).unlink(missing_ok=True)
        self.written = len(self.rows)

    def write_rest(self) -> str:
        """Writes what was not written since the last row was; what is saved then and how to go on, "" where nothing is."""
        if self._unwritten:
            self.write()
        rows = f"{self.written} row{'s' if self.written > 1 else ''} saved in {self.folder / 'results.csv'}"
        return f"{rows}, the same command goes on from there" if self.written else ""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps a second evaluation, whose rows would replace ours, out of the folder. BlockingIOError where one is in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    text = f"another evaluation is writing into {folder}: wait for its end, or give another folder"
                    raise BlockingIOError(text) from None
                time.sleep(0.2)
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield
    finally:
        os.close(handle)


def set_aside(folder: Path) -> Path:
    """Moves all files of the evaluation in `folder` into a new folder there, replaced-1, replaced-2, ..., and returns it."""
    place = next(place for place in (folder / f"replaced-{n}" for n in count(1)) if not place.exists())
    place.mkdir()
    for name in FILES:
        if (folder / name).exists():
            (folder / name).rename(place / name)
    return place


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
    frame = read_frame(path, ("class", "label", "data"))
    if lacking := [column for column in LINES[name] if column not in frame]:
        raise ValueError(f"{path} has no column {lacking[0]!r}: move it away and run again")
    return frame.to_dict("records")


def read_names(folder: Path) -> list[str]:
    """The images of bad_images.csv, which could not be read; none where there is no such file."""
    return read_frame(folder / NAMES, ("image",))["image"].tolist() if (folder / NAMES).exists() else []


def write_folder(done: Sequence[Evaluated], folder: Path) -> None:
    """Writes all three; translation.csv only where content was shifted. Rows come last: a row there always has its lines."""
    for name, columns in LINES.items():
        lines = [line for one in done for line in getattr(one, name)]
        path = folder / f"{name}.csv"
        if lines or path.exists():
            write_frame(pd.DataFrame(lines, columns=list(columns)), path)
    write_csv([one.row for one in done], folder / "results.csv")


def left_out_note(rows: Sequence[Row], folder: Path, most: int = 8) -> str:
    """A line on the images that could not be read, with the names of the first; "" where there are none."""
    left_out = max(int(row["left_out"]) for row in rows)
    if not left_out:
        return ""
    names = read_names(folder)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    which = f": {', '.join(map(shown, names[:most]))}{more}; {folder / NAMES} lists them" if names else ""
    return f"left out, since they cannot be read (column left_out): {left_out} of the images{which}\n"
