"""Image files by path, as of a CSV of paths and labels."""

import csv
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vitrel.common.files import shown
from vitrel.data.readers.base import READERS, Reader
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import Reading
from vitrel.data.readers.splits import NAMES, Split, of_split, one_of

PATHS, LABELS = ("path", "image", "file", "filename", "file_name"), ("label", "class", "target")  # columns of a CSV
AT_ONCE = 1000  # files for one thread: a local file takes less time than a task for a thread


class Files(Reader):
    """Image files: a source is a path."""

    def encoded(self, source: str) -> str:
        """Return the path."""
        return source

    def name(self, source: str) -> str:
        """Return the path below `root`."""
        return below(source, self.root)

    def title(self, source: str) -> str:
        """Return the path as printable text, with bytes that are not UTF-8 escaped."""
        return shown(source)

    def states(self, sources: Sequence[str]) -> list[str]:
        """Return "SIZE TIME" of each file; "" for a file that cannot be reached."""
        return file_states(sources)


def below(path: str | Path, folder: str | Path) -> str:
    """Return `path` relative to `folder`, or unchanged if it is not inside."""
    return str(path).removeprefix(f"{folder}{os.sep}")  # os.path.relpath would take seconds for a million paths


def file_states(paths: Sequence[str]) -> list[str]:
    """Return "SIZE TIME" of each file: bytes, and time of modification in ns since 1970; "" for an unreachable file."""

    def state(path: str) -> str:
        try:
            found = os.stat(path)
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"

    def of_some(start: int) -> list[str]:
        return [state(path) for path in paths[start : start + AT_ONCE]]

    with ThreadPoolExecutor(READERS) as pool:
        return [one for part in pool.map(of_some, range(0, len(paths), AT_ONCE)) for one in part]


def csv_reader(path: str, split: Split, reading: Reading) -> Files:
    """Return the images of a split of a CSV with a header, with the classes in `class_order`.

    The columns are the path (`path`, `image`, `file`, `filename` or `file_name`; relative to the CSV's folder), the class
    (`label`, `class` or `target`) and, optionally, `split`, with the names in `vitrel.data.readers.splits`. If none is an
    evaluation split, `reading.val_fraction` of each class is taken from the training images, or from all images if no split is
    named.

    Raises:
        ValueError: a file that is no CSV in UTF-8, rows without a path, class or known split, an image with several rows, or
            names of classes that differ in case alone, with the line; columns or the split are missing, or there is neither an
            evaluation split nor `val_fraction`.
    """
    header, *rows = _cells(path) or [(1, [])]
    columns = header[1]
    image, label = (one_of(names, columns) for names in (PATHS, LABELS))
    used = [column for column in (image, label, "split") if column in columns]
    if image is None or label is None or len(set(used)) < sum(map(columns.count, used)):
        raise ValueError(
            f"{path} has the columns {', '.join(columns) or 'none'}: it needs a header with {PATHS[0]} and {LABELS[0]}, each "
            "once and separated by commas, and one row for each image"
        )
    found: dict[str, tuple[int, str, str]] = {}  # {path of an image: line, class, split}
    spelled: dict[str, tuple[int, str]] = {}  # {name of a class in lower case: line, name}
    paths = []
    for line, cells in rows:
        row = dict(zip(columns, cells, strict=True))
        where, word = f"{path}, line {line}", row.get("split", "")
        if empty := [column for column in used if not row[column]]:
            raise ValueError(f"{where} has no {empty[0]}: fill in or remove the row")
        if word and word not in NAMES:
            raise ValueError(f"{where} has the split {word!r}: use one of {', '.join(sorted(NAMES))}, or remove the row")
        paths.append(os.path.join(Path(path).parent, row[image]))
        first = found.setdefault(os.path.normpath(paths[-1]), (line, row[label], word))
        if first[0] != line:
            differs = [f" as {this}" for this, that in zip((row[label], word), first[1:], strict=True) if this != that]
            raise ValueError(f"{where} has the image {row[image]} of line {first[0]} again{' and'.join(differs)}: keep one row")
        first_name = spelled.setdefault(row[label].casefold(), (line, row[label]))
        if first_name[1] != row[label]:
            raise ValueError(f"{where} has the class {row[label]}, and line {first_name[0]} {first_name[1]}: use one spelling")
    classes = class_order({name for _, name, _ in found.values()})
    numbers = {name: number for number, name in enumerate(classes)}
    samples = [(place, numbers[name]) for place, (_, name, _) in zip(paths, found.values(), strict=True)]
    own = of_split(samples, [word for _, _, word in found.values()], split, reading.val_fraction, path)
    return Files(classes, own, path, str(Path(path).parent))


def _cells(path: str | Path) -> list[tuple[int, list[str]]]:
    """(line number, cells) of every row of a CSV with a cell that is not empty, without blanks around cells."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line} is not UTF-8: save the file in that encoding (Excel's CSV UTF-8)") from error
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    rows: list[tuple[int, list[str]]] = []
    while True:
        line = reader.line_num + 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return rows
        except csv.Error as error:
            raise ValueError(f"{path}, line {line} has a quote that is not closed, or text beside one ({error})") from error
        if any("\n" in cell or "\r" in cell for cell in cells):
            raise ValueError(f"{path}, line {line} has a quote that is not closed on that line")
        if rows and any(cells) and len(cells) != len(rows[0][1]):
            raise ValueError(f"{path}, line {line} has {len(cells)} cells, and the header has {len(rows[0][1])}")
        if any(cells):
            rows.append((line, cells))
