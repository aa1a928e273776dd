"""Image folders as a data set, with rules for symbolic links, and a summary of the files left out.

Layout: `root/train/<class>/*` and `root/val/<class>/*`; the classes are the folder names in `class_order`. The evaluation
split may also be called `validation`, `valid` or `test`. Without it, or with `root/<class>/*` alone, `Reading.val_fraction`
divides the images.

Class folders and image files may be symbolic links. A link to a folder inside a class folder is followed only with
`follow_links`. A file that several paths lead to is used once, under the path with the fewest links, and among these the first
by name. (A hard link counts as a separate file, like a copy.) A folder that cannot be read is an error.

Hidden files and folders (`hidden`) are neither classes nor images: they are left out and counted.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vitrel.common.files import shown
from vitrel.common.warn import warn_once
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import SUFFIXES, Reading
from vitrel.data.readers.files import Files
from vitrel.data.readers.splits import Split, chosen, divided

SHOWN = 3  # paths in a message
SYSTEM = ("__macosx", "@eadir", "thumbs.db", "desktop.ini")  # of macOS, Synology and Windows, in lower case


def folder_reader(root: str, split: Split, reading: Reading) -> Files:
    """Return the images of a split of an image folder, of one of the layouts above.

    A warning, once per process, names files, folders and links that are left out.

    Raises:
        ValueError: folders are missing, empty or unreadable, or the two splits have different classes.
    """
    classes = folder_classes(root, split)
    own, whole = split_folder(root, split, reading.val_fraction)
    scan = Scan(own, classes, reading.follow_links)
    if scan.left_out:
        warn_once(scan.left_out)
    samples = divided(scan.samples, split, reading.val_fraction, shown(own)) if whole else scan.samples
    return Files(classes, samples, str(own), str(own))


def split_folder(root: str | Path, split: Split, val_fraction: float | None = None) -> tuple[Path, bool]:
    """Return (folder of a split's classes, whether it holds the images of both splits and has to be divided)."""
    root = Path(root)
    present = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    own, whole = chosen(split, present, val_fraction)
    if own is None and whole and any(not hidden(name) for name in present):
        return root, True
    return root / (own or split), whole and own is not None


def folder_classes(root: str | Path, split: Split = "train") -> list[str]:
    """Return the class names of a split of the image folder `root`, in `class_order`.

    Raises:
        ValueError: no class folders, different classes in `train/` and `val/`, or unreadable folders (`class_folders`).
    """
    root = Path(root)
    folders = {part: split_folder(root, part, 0.5)[0] for part in ("train", "val")}  # divided or not, the classes are the same
    names = {part: class_folders(folder) for part, folder in folders.items() if folder.is_dir()}
    if not names.get(split):
        raise ValueError(
            f"no class folders in {folders[split]}{_what_is_there(root)}: data must be 'shapes', a folder with the layout "
            f"{root}/train/<class>/*.jpg and {root}/val/<class>/*.jpg (or validation, valid, test), {root}/<class>/*.jpg "
            "with --val-fraction, a CSV, tar, Parquet or Arrow files, hfds/<name>, or torch/<set>:<folder>"
        )
    if len(names) == 2 and names["train"] != names["val"]:
        missing, extra = set(names["train"]) - set(names["val"]), set(names["val"]) - set(names["train"])
        unpaired = [*(folders["train"] / name for name in missing), *(folders["val"] / name for name in extra)]
        empty = sorted(str(path) for path in unpaired if not any(path.iterdir()))
        raise ValueError(
            f"{folders['val']} has other classes than {folders['train']}, which would shift the labels: "
            f"missing {sorted(missing) or 'none'}, extra {sorted(extra) or 'none'}"
            + (f"; these folders are empty, remove them: {', '.join(empty)}" if empty else "")
        )
    return names[split]


def _what_is_there(root: Path) -> str:
    """The kinds of files in a folder without class folders, as " (found .npy files)"; "" where there are none."""
    if not root.is_dir():
        return ""
    kinds = sorted({path.suffix.lower() for path in root.iterdir() if path.suffix and not hidden(path.name)})
    return f" (found {', '.join(kinds[:SHOWN])} files)" if kinds else ""


class ImageFile(NamedTuple):
    """An image file: path, label, number of links in the path below the split, and its real path ("" without links)."""

    path: str
    label: int
    links: int
    real: str


class Subfolder(NamedTuple):
    """A folder to scan: path, number of links in the path below the split, and its real path."""

    path: str
    links: int
    real: str


class Scan:
    """The image files in `folder/<class>/` and its subfolders, in the order of torchvision's `ImageFolder`.

    Args:
        folder: folder of a split.
        classes: names of its class folders, by label.
        follow_links: also scan folders that links inside class folders point to.

    Attributes:
        samples: (path, label) of each image.
        left_out: a sentence on files, folders and links that are left out; "" if there are none.

    Raises:
        ValueError: folders that cannot be read, or classes without images; the text names them.
    """

    def __init__(self, folder: Path, classes: Sequence[str], follow_links: bool = False) -> None:
        self.folder, self.follow_links = str(folder), follow_links
        self._real = os.path.realpath(folder)
        self._unreadable: list[str] = []
        self._hidden: list[str] = []
        self._links: list[str] = []  # links to folders that are not followed
        self._others: dict[str, list[str]] = defaultdict(list)  # files that are no images, by suffix
        self._resolved = cache(os.path.realpath)  # for the folders of link targets, which are few
        self._entries(self.folder)  # for what is hidden beside the class folders
        files = [file for label, name in enumerate(classes) for file in self._class(name, label)]
        if self._unreadable:
            raise ValueError(
                f"folders of {shown(folder)} cannot be read, so their images would be missing: "
                f"{', '.join(self._unreadable)}; allow reading them, or remove them"
            )
        files, duplicates = self._once(files)
        self.samples = [(file.path, file.label) for file in files]
        self.left_out = self._summary(duplicates)
        if empty := sorted(set(range(len(classes))) - {file.label for file in files}):
            names = ", ".join(classes[i] for i in empty)
            raise ValueError(
                f"class folders without images in {shown(folder)}: {names}; add {', '.join(SUFFIXES)} files or remove them"
                + (f" ({self.left_out})" if self.left_out else "")
            )

    def _class(self, name: str, label: int) -> Iterator[ImageFile]:
        """Yield the image files of one class folder; collect links, other files and errors on the way."""
        path, real = os.path.join(self.folder, name), os.path.join(self._real, name)
        top = Subfolder(path, 1, os.path.realpath(path)) if os.path.islink(path) else Subfolder(path, 0, real)
        images: dict[str, list[ImageFile]] = {}
        plain, scanned = [top], set()
        linked: list[Subfolder] = []
        while plain or linked:  # plain folders first, so that a folder is scanned under its path without links
            folder = plain.pop() if plain else linked.pop(0)
            if folder.real in scanned:
                continue
            scanned.add(folder.real)
            images[folder.path] = []
            for entry in self._entries(folder.path):
                if _leads_to_folder(entry):
                    if not entry.is_symlink():
                        plain.append(Subfolder(entry.path, folder.links, os.path.join(folder.real, entry.name)))
                    elif self.follow_links:
                        linked.append(Subfolder(entry.path, folder.links + 1, os.path.realpath(entry.path)))
                    else:
                        self._links.append(entry.path)
                elif entry.name.lower().endswith(SUFFIXES):
                    links = folder.links + entry.is_symlink()
                    real = self._real_path(entry, folder) if links else ""
                    images[folder.path].append(ImageFile(entry.path, label, links, real))
                elif self.follow_links and _broken(entry):
                    self._unreadable.append(f"{shown(entry.path)} (a broken link)")
                else:
                    kind = "broken link" if _broken(entry) else os.path.splitext(shown(entry.name))[1].lower() or "no suffix"
                    self._others[kind].append(entry.path)
        for path in sorted(images):
            yield from images[path]

    def _entries(self, path: str) -> list[os.DirEntry]:
        """The entries of a folder by name, without hidden ones, which are collected, as errors are."""
        try:
            with os.scandir(path) as iterator:
                entries = sorted(iterator, key=lambda entry: entry.name)
        except OSError as error:
            self._unreadable.append(f"{shown(path)} ({error.strerror})")
            return []
        self._hidden += [entry.path for entry in entries if hidden(entry.name)]
        return [entry for entry in entries if not hidden(entry.name)]

    def _real_path(self, entry: os.DirEntry, parent: Subfolder) -> str:
        """The path of a file without links; faster than `os.path.realpath`, which checks every folder of every path."""
        folder, name = parent.real, entry.name
        for _ in range(40 if entry.is_symlink() else 0):  # Linux also follows at most 40 links: more are a loop
            try:
                target, last = os.path.split(os.readlink(os.path.join(folder, name)))
            except OSError:  # not a link: the end of the chain
                return os.path.join(folder, name)
            folder, name = self._resolved(os.path.join(folder, target)), last
        return os.path.join(parent.real, entry.name)

    def _once(self, files: list[ImageFile]) -> tuple[list[ImageFile], list[tuple[ImageFile, ImageFile]]]:
        """Each file once, in the same order; and the duplicates as (file left out, file used), which are the same real file."""
        if not any(file.links for file in files):
            return files, []
        start = len(self.folder)
        used: dict[str, ImageFile] = {}
        duplicates = []
        for file in sorted(files, key=lambda file: file.links):  # stable
            first = used.setdefault(file.real or self._real + file.path[start:], file)
            if first is not file:
                duplicates.append((file, first))
        left_out = {file.path for file, _ in duplicates}
        return [file for file in files if file.path not in left_out], duplicates

    def _summary(self, duplicates: list[tuple[ImageFile, ImageFile]]) -> str:
        parts = []
        if self._hidden:
            parts.append(f"hidden files and folders: {len(self._hidden):,} ({_first(self._hidden)})")
        if self._links:
            parts.append(
                f"{_number(len(self._links), 'folder link')} ({_first(self._links)}), which Reading(follow_links=True) follows "
                "(in training data.reading.follow_links, in vitrel evaluate --follow-links)"
            )
        if duplicates:
            elsewhere = [pair for pair in duplicates if pair[0].label != pair[1].label]
            link, file = (elsewhere or duplicates)[0]
            parts.append(
                f"{_number(len(duplicates), 'link')} to images already used, {len(elsewhere)} of them in another class "
                f"({shown(link.path)} is {shown(file.path)})"
            )
        if self._others:
            each = ", ".join(f"{len(paths)} {kind} ({shown(paths[0])})" for kind, paths in sorted(self._others.items()))
            parts.append(f"{_number(sum(map(len, self._others.values())), 'file')} of kinds that are not decoded: {each}")
        return f"left out of {shown(self.folder)}: {'; '.join(parts)}" if parts else ""


def hidden(name: str) -> bool:
    """Return whether a file or folder is not part of a data set by its name: with a leading dot, or of `SYSTEM`."""
    return name.startswith(".") or name.lower() in SYSTEM


def _first(paths: list[str]) -> str:
    return ", ".join(map(shown, sorted(paths)[:SHOWN])) + ", ..." * (len(paths) > SHOWN)


def _number(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def class_folders(folder: Path) -> list[str]:
    """Return the names of the class folders of a split in `class_order`, without hidden ones.

    Raises:
        ValueError: the folder cannot be read, contains a broken link (a class would be missing), or a name is not valid UTF-8.
    """
    try:
        with os.scandir(folder) as iterator:
            entries = [entry for entry in iterator if not hidden(entry.name)]
    except OSError as error:
        raise ValueError(
            f"{shown(folder)} cannot be read ({error.strerror}): allow reading it, or name another folder"
        ) from error
    if broken := sorted(shown(entry.path) for entry in entries if _broken(entry)):
        raise ValueError(
            f"broken links among the class folders: {', '.join(broken)}; repair or remove them, since classes would be missing"
        )
    names = class_order(entry.name for entry in entries if _leads_to_folder(entry))
    if invalid := [shown(folder / name) for name in names if shown(name) != name]:
        raise ValueError(
            f"names of class folders that are not valid UTF-8 (other bytes are shown as \\x..): {', '.join(invalid)}; results "
            "contain the class names, so rename these folders"
        )
    return names


def _leads_to_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links, or a link through a folder without permission to read
        return False


def _broken(entry: os.DirEntry) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)
