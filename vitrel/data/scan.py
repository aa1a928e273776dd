"""The image files of class folders: which ones count, and what is left out, which the user is told once.

A class folder and an image file may be symbolic links. A link to a folder inside a class folder is followed only where asked.
An image file counts once, whatever links lead to it: under the path with the fewest links, the first by name among equals. (A
hard link is a file of its own, as a copy is.) Folders that cannot be read are refused.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from vitrel.data.decode import SUFFIXES
from vitrel.files import shown

SHOWN = 3  # paths in a message
_told: set[str] = set()


class ImageFile(NamedTuple):
    """An image file: its path and label, the number of links on the path below the split, and the path without them if any."""

    path: str
    label: int
    links: int
    real: str


class Subfolder(NamedTuple):
    """A folder to look into: its path, the number of links on it, and the path without them."""

    path: str
    links: int
    real: str


class Scan:
    """The images of `folder/<class>/`, in subfolders too, in torchvision's `ImageFolder` order.

    Args:
        folder: of a split.
        classes: names of its class folders, by label.
        follow_links: look into folders that links inside class folders lead to.

    Attributes:
        samples: (path, label) of each image.
        left_out: what is not among them, in words; "" if nothing is left out.

    Raises:
        ValueError: for folders that cannot be read and classes without images, with their names.
    """

    def __init__(self, folder: Path, classes: Sequence[str], follow_links: bool = False) -> None:
        self.folder, self.follow_links = str(folder), follow_links
        self._real = os.path.realpath(folder)
        self._unreadable: list[str] = []
        self._links: list[str] = []  # to folders, not followed
        self._kinds: dict[str, dict[str, str]] = {}  # files that are not decoded: suffix to path without links to path
        self._resolved = cache(os.path.realpath)  # of the folders that links lead into: they are few
        found = [one for label, name in enumerate(classes) for one in self._class(name, label)]
        if self._unreadable:
            raise ValueError(
                f"folders of {shown(folder)} cannot be read, so that their images would be missing: "
                f"{', '.join(self._unreadable)}; allow reading them, or remove them"
            )
        found, again = self._once(found)
        self.samples = [(one.path, one.label) for one in found]
        self.left_out = self._words(again)
        if empty := sorted(set(range(len(classes))) - {one.label for one in found}):
            names = ", ".join(classes[i] for i in empty)
            raise ValueError(
                f"class folders without images in {shown(folder)}: {names}; add {', '.join(SUFFIXES)} files or remove them"
                + (f" ({self.left_out})" if self.left_out else "")
            )

    def _class(self, name: str, label: int) -> Iterator[ImageFile]:
        path, real = os.path.join(self.folder, name), os.path.join(self._real, name)
        top = Subfolder(path, 1, os.path.realpath(path)) if os.path.islink(path) else Subfolder(path, 0, real)
        images: dict[str, list[ImageFile]] = {}
        plain, seen = [top], set()
        linked: list[Subfolder] = []
        while plain or linked:  # plain folders first, so that a folder's own path is the one that counts
            at = plain.pop() if plain else linked.pop(0)
            if at.real in seen:
                continue
            seen.add(at.real)
            images[at.path] = []
            for entry in self._entries(at.path):
                if _leads_to_folder(entry):
                    if not entry.is_symlink():
                        plain.append(Subfolder(entry.path, at.links, os.path.join(at.real, entry.name)))
                    elif self.follow_links:
                        linked.append(Subfolder(entry.path, at.links + 1, os.path.realpath(entry.path)))
                    else:
                        self._links.append(entry.path)
                elif entry.name.lower().endswith(SUFFIXES):
                    links = at.links + entry.is_symlink()
                    images[at.path].append(ImageFile(entry.path, label, links, self._file(entry, at) if links else ""))
                elif self.follow_links and _broken(entry):
                    self._unreadable.append(f"{shown(entry.path)} (a link that leads nowhere)")
                else:
                    kind = "broken link" if _broken(entry) else os.path.splitext(shown(entry.name))[1].lower() or "no suffix"
                    self._kinds.setdefault(kind, {})[self._file(entry, at)] = entry.path
        for path in sorted(images):
            yield from images[path]

    def _entries(self, path: str) -> list[os.DirEntry]:
        try:
            with os.scandir(path) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._unreadable.append(f"{shown(path)} ({error.strerror})")
            return []

    def _file(self, entry: os.DirEntry, at: Subfolder) -> str:
        """The path of a file without links; `os.path.realpath` looks at every folder on the way, for every file."""
        folder, name = at.real, entry.name
        for _ in range(40 if entry.is_symlink() else 0):  # where Linux gives up: a loop
            try:
                target, last = os.path.split(os.readlink(os.path.join(folder, name)))
            except OSError:  # no link any more
                return os.path.join(folder, name)
            folder, name = self._resolved(os.path.join(folder, target)), last
        return os.path.join(at.real, entry.name)

    def _once(self, found: list[ImageFile]) -> tuple[list[ImageFile], list[tuple[ImageFile, ImageFile]]]:
        """Each file once, in the same order; and (path passed over, path that counts)."""
        if not any(one.links for one in found):
            return found, []
        begin = len(self.folder)
        counted: dict[str, ImageFile] = {}
        again = []
        for one in sorted(found, key=lambda one: one.links):  # stable
            first = counted.setdefault(one.real or self._real + one.path[begin:], one)
            if first is not one:
                again.append((one, first))
        passed = {one.path for one, _ in again}
        return [one for one in found if one.path not in passed], again

    def _words(self, again: list[tuple[ImageFile, ImageFile]]) -> str:
        said = []
        if self._links:
            paths = ", ".join(map(shown, sorted(self._links)[:SHOWN])) + ", ..." * (len(self._links) > SHOWN)
            said.append(
                f"{_number(len(self._links), 'folder link')} ({paths}), which Reading(follow_links=True) follows "
                "(in training data.reading.follow_links, in vitrel evaluate and vitrel pack --follow-links)"
            )
        if again:
            other = [pair for pair in again if pair[0].label != pair[1].label]
            one, first = (other or again)[0]
            said.append(
                f"{_number(len(again), 'link')} whose image counts already, {len(other)} of them in another class "
                f"({shown(one.path)} is {shown(first.path)})"
            )
        if self._kinds:
            kinds = {kind: list(paths.values()) for kind, paths in sorted(self._kinds.items())}
            each = ", ".join(f"{len(paths)} {kind} ({shown(paths[0])})" for kind, paths in kinds.items())
            said.append(f"{_number(sum(map(len, kinds.values())), 'file')} of kinds that are not decoded: {each}")
        return f"left out of {shown(self.folder)}: {'; '.join(said)}" if said else ""


def _number(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders of a split.

    ValueError where the folder cannot be read, a link in it leads nowhere (a class would be missing) or a name is no UTF-8.
    """
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except OSError as error:
        raise ValueError(
            f"{shown(folder)} cannot be read ({error.strerror}): allow reading it, or name another folder"
        ) from error
    if broken := sorted(shown(entry.path) for entry in entries if _broken(entry)):
        raise ValueError(
            f"links among class folders that lead nowhere, or where nothing can be read: {', '.join(broken)}; "
            "mend or remove them, since classes would be missing"
        )
    names = sorted(entry.name for entry in entries if _leads_to_folder(entry))
    if strange := [shown(folder / name) for name in names if shown(name) != name]:
        raise ValueError(
            f"names of class folders that are no UTF-8 (bytes that are not are shown as \\x..): {', '.join(strange)}; results "
            "name the classes, so rename these folders"
        )
    return names


def tell_once(text: str) -> None:
    """A warning that this process has not given yet; of several processes that share the work the first gives it."""
    if text in _told or (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        return
    _told.add(text)
    warnings.warn(text, stacklevel=3)


def _leads_to_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links, or a link through a folder that may not be read
        return False


def _broken(entry: os.DirEntry) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)
