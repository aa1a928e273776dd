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
from collections.abc import Collection, Iterator, Sequence
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
    """Return the images of a split of the folder `root`: of `root/<split>/<class>/`, or a part of those of `root/<class>/`.

    If there is no evaluation split (val, validation, valid or test), `reading.val_fraction` divides the images of `root/train/`
    or `root/`; None is possible only for the split "train" with a folder `root/train/`, of which all images are then taken.

    Raises:
        ValueError: folders are missing, empty or unreadable, or the two splits have different classes.
    """
    classes = folder_classes(root, split)
    own, whole = split_folder(root, split, reading.val_fraction)
    samples = Scan(own, classes, reading.follow_links).samples
    if whole:
        samples = divided(samples, split, reading.val_fraction, shown(own))
    return Files(classes, samples, str(own), str(own))


def split_folder(root: str | Path, split: Split, val_fraction: float | None = None) -> tuple[Path, bool]:
    """Return (folder that holds the class folders of a split, whether it holds both splits, for `divided` to divide).

    `val_fraction` as in `chosen`. The folder may not exist.
    """
    root = Path(root)
    present = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    own, whole = chosen(split, present, val_fraction)
    return root / (own or ("" if whole else split)), whole


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
            f"no class folders in {folders[split]}: data must be 'shapes', a folder with the layout {root}/train/<class>/*.jpg "
            f"and {root}/val/<class>/*.jpg (or validation, valid, test), {root}/<class>/*.jpg with --val-fraction, a CSV, tar, "
            "Parquet or Arrow files, hfds/<name>, or torch/<set>:<folder>"
        )
    if len(names) == 2 and names["train"] != names["val"]:
        missing, extra = set(names["train"]) - set(names["val"]), set(names["val"]) - set(names["train"])
        raise ValueError(
            f"{folders['val']} has other classes than {folders['train']}, which would shift the labels: "
            f"missing {sorted(missing) or 'none'}, extra {sorted(extra) or 'none'}; remove folders that are empty"
        )
    return names[split]


class ImageFile(NamedTuple):
    """An image file: path, label, number of symbolic links in its path inside the split, and its real path ("" without any)."""

    path: str
    label: int
    links: int
    real: str


class Scan:
    """The image files in `folder/<name>/` and its subfolders, in the order of torchvision's `ImageFolder`.

    Args:
        folder: folder of a split.
        names: names of its class folders, by label.
        follow_links: also scan folders that links inside class folders point to.

    Attributes:
        samples: (path, label) of each image.

    A file with several paths counts once, by that with the fewest links. A warning, once per process, names files, folders and
    links that are left out.

    Raises:
        ValueError: folders that cannot be read, or without images; the text names them.
    """

    def __init__(self, folder: Path | str, names: Sequence[str], follow_links: bool = False) -> None:
        self.folder, self.follow_links = str(folder), follow_links
        self._unreadable: list[str] = []
        self._hidden: set[str] = set()
        self._links: list[str] = []  # links to folders that are not followed
        self._others: dict[str, list[str]] = defaultdict(list)  # files that are no images, by suffix
        self._entries(self.folder)  # for what is hidden beside the class folders
        files = [file for label, name in enumerate(names) for file in self._files(os.path.join(self.folder, name), label)]
        if self._unreadable:
            raise ValueError(
                f"folders of {shown(folder)} cannot be read, so their images would be missing: "
                f"{', '.join(self._unreadable)}; allow reading them, or remove them"
            )
        files, twice = self._once(files)
        self.samples = [(file.path, file.label) for file in files]
        left_out = self._left_out(twice)
        if empty := sorted(set(range(len(names))) - {file.label for file in files}):
            raise ValueError(
                f"folders without images: {', '.join(shown(Path(folder, names[i])) for i in empty)}; add "
                f"{', '.join(SUFFIXES)} files or remove them" + (f" ({left_out})" if left_out else "")
            )
        if left_out:
            warn_once(left_out)

    def _files(self, top: str, label: int) -> Iterator[ImageFile]:
        """Yield the image files below class folder `top`, sorted by folder; note unfollowed links, other files, errors."""
        images: dict[str, list[ImageFile]] = {}
        scanned = set()
        plain = [(top, int(os.path.islink(top)))]  # (path of a folder, links in it)
        linked: list[tuple[str, int]] = []
        while plain or linked:  # plain folders first, so that a folder is scanned under its path without links
            path, links = plain.pop() if plain else linked.pop(0)
            real = os.path.realpath(path)
            if real in scanned:
                continue
            scanned.add(real)
            images[path] = []
            for entry in self._entries(path):
                is_link = entry.is_symlink()
                if _leads_to_folder(entry):
                    if not is_link:
                        plain.append((entry.path, links))
                    elif self.follow_links:
                        linked.append((entry.path, links + 1))
                    else:
                        self._links.append(entry.path)
                elif entry.name.lower().endswith(SUFFIXES) and (is_link or entry.is_file()):  # no pipe, which would block
                    file = os.path.realpath(entry.path) if is_link else os.path.join(real, entry.name) if links else ""
                    images[path].append(ImageFile(entry.path, label, links + is_link, file))
                elif self.follow_links and _broken(entry):
                    self._unreadable.append(f"{shown(entry.path)} (a broken link)")
                else:
                    kind = "broken link" if _broken(entry) else os.path.splitext(shown(entry.name))[1].lower() or "no suffix"
                    self._others[kind].append(entry.path)
        for path in sorted(images):
            yield from images[path]

    def _entries(self, path: str) -> list[os.DirEntry]:
        """Return the entries of a folder by name, without hidden ones; those, and an error, are noted for messages."""
        try:
            with os.scandir(path) as iterator:
                entries = sorted(iterator, key=lambda entry: entry.name)
        except OSError as error:
            self._unreadable.append(f"{shown(path)} ({error.strerror})")
            return []
        self._hidden.update(entry.path for entry in entries if hidden(entry.name))
        return [entry for entry in entries if not hidden(entry.name)]

    def _once(self, files: list[ImageFile]) -> tuple[list[ImageFile], list[tuple[ImageFile, ImageFile]]]:
        """Return each real file once, by its first path with the fewest links, and (file left out, file used) of the others."""
        if not any(file.links for file in files):
            return files, []
        root = os.path.realpath(self.folder)
        used: dict[str, ImageFile] = {}
        twice = []
        for file in sorted(files, key=lambda file: file.links):  # stable
            first = used.setdefault(file.real or root + file.path[len(self.folder) :], file)
            if first is not file:
                twice.append((file, first))
        left_out = {file.path for file, _ in twice}
        return [file for file in files if file.path not in left_out], twice

    def _left_out(self, twice: list[tuple[ImageFile, ImageFile]]) -> str:
        """Return a sentence on files, folders and links that are left out; "" if there are none.

        `twice` has the pairs (link left out, file used in its place) of `_once`.
        """
        parts = []
        if self._hidden:
            parts.append(f"hidden files and folders: {_counted(self._hidden)}")
        if self._links:
            parts.append(
                f"links to folders: {_counted(self._links)}, which Reading(follow_links=True) follows (in training "
                "data.reading.follow_links, in vitrel evaluate --follow-links)"
            )
        if twice:
            text = f"links to images already used: {_counted([file.path for file, _ in twice])}"
            elsewhere = [f"{shown(link.path)} is {shown(file.path)}" for link, file in twice if link.label != file.label]
            parts.append(text + (f", {len(elsewhere)} of them in another class, such as {elsewhere[0]}" if elsewhere else ""))
        parts += [f"{kind} (not decoded): {_counted(paths)}" for kind, paths in sorted(self._others.items())]
        return f"left out of {shown(self.folder)}: {'; '.join(parts)}" if parts else ""


def image_files(places: Sequence[str], follow_links: bool = False) -> Files:
    """Return the images of `places`, in this order: folders, as `Scan` finds them with subfolders, or files of any suffix.

    Each path occurs once, labeled 0; `classes` is []. FileNotFoundError for a place that is neither; ValueError as of `Scan`.
    """
    found: dict[str, None] = {}
    for place in places:
        if not os.path.exists(place):
            raise FileNotFoundError(f"no folder and no file {shown(place)}")
        paths = [path for path, _ in Scan(place, [""], follow_links).samples] if os.path.isdir(place) else [place]
        found |= dict.fromkeys(map(os.path.normpath, paths))
    return Files([], [(path, 0) for path in found], "images", "")


def hidden(name: str) -> bool:
    """Return whether a file or folder of this name is left out of a data set: a leading dot, or a system's, as "thumbs.db"."""
    return name.startswith(".") or name.lower() in SYSTEM


def _counted(paths: Collection[str]) -> str:
    """Return the number of paths and the first SHOWN of them, sorted, as text: "2 (a.txt, b.txt)"."""
    return f"{len(paths):,} ({', '.join(map(shown, sorted(paths)[:SHOWN]))}{', ...' * (len(paths) > SHOWN)})"


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
    if invalid := [shown(name) for name in names if shown(name) != name]:
        raise ValueError(f"names of class folders in {shown(folder)} are not valid UTF-8, rename them: {', '.join(invalid)}")
    return names


def _leads_to_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links, or a link through a folder without permission to read
        return False


def _broken(entry: os.DirEntry) -> bool:
    """Return whether an entry is a symbolic link whose target does not exist."""
    return entry.is_symlink() and not os.path.exists(entry.path)
