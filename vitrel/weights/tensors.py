"""The tensors of a file while they are renamed and rearranged for a model, with a record of the changes."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor


class Row(NamedTuple):
    """Record of a tensor: where it comes from, where it goes, and what was done to it."""

    source: tuple[str, ...]  # names in the file
    target: str  # name in the model; "" if unused
    rule: str  # what was done to it, or why it is unused
    resampled: str = ""  # "14x14 -> 24x24, bicubic" where values were resampled


class Item(NamedTuple):
    """A tensor of a file, and where it comes from."""

    value: Tensor  # as rearranged so far
    source: tuple[str, ...]  # names in the file
    rules: tuple[str, ...] = ()  # descriptions of the changes made to it, in order
    resampled: str = ""  # description of a resampling, as in Row


class FileTensors:
    """Hold the tensors of a file while they are renamed and rearranged step by step, and record every step.

    Attributes:
        items: {current name: Item}.
        recomputed: rows of the tensors that were left out.
    """

    def __init__(self, state: dict[str, Tensor]):
        self.items = {name: Item(value, (name,)) for name, value in state.items()}
        self.recomputed: list[Row] = []

    def __contains__(self, name: str) -> bool:
        return name in self.items

    def __getitem__(self, name: str) -> Tensor:
        return self.items[name].value

    def find(self, pattern: str) -> Iterator[re.Match[str]]:
        """Iterate over full matches of `pattern` with the current names; tensors may be renamed during the iteration."""
        return (match for match in [re.fullmatch(pattern, name) for name in [*self.items]] if match)

    def has(self, pattern: str) -> bool:
        """Return whether `pattern` fully matches a name."""
        return next(self.find(pattern), None) is not None

    def rename(self, *pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> None:
        """Apply re.sub with every (pattern, replacement) in turn to every name.

        Raises:
            ValueError: two tensors get the same name.
        """
        renamed: dict[str, Item] = {}
        first = re.compile("|".join(f"(?:{pattern})" for pattern, _ in pairs))
        for name, item in self.items.items():
            for pattern, replacement in pairs if first.search(name) else ():
                name = re.sub(pattern, replacement, name)
            if name in renamed:
                raise ValueError(f"{item.source[0]} and {renamed[name].source[0]} are both read as {name}")
            renamed[name] = item
        self.items = renamed

    def leave_out(self, pattern: str) -> None:
        """Remove the tensors whose names match `pattern`: buffers that the model computes itself."""
        for match in self.find(pattern):
            self.recomputed.append(Row(self.items.pop(match[0]).source, "", "a buffer, recomputed"))

    def change(self, name: str, value: Tensor, rule: str, resampled: str = "") -> None:
        """Replace the value of a tensor.

        Args:
            name: of the tensor.
            value: the new one.
            rule: description of the change.
            resampled: description of a resampling, as in Row.
        """
        item = self.items[name]
        self.items[name] = Item(value, item.source, (*item.rules, rule), resampled or item.resampled)

    def move(self, name: str, target: str) -> None:
        """Rename one tensor; a tensor already called `target` is lost."""
        self.items[target] = self.items.pop(name)

    def spread(self, name: str, values: dict[str, Tensor], rule: str) -> None:
        """Replace one tensor by several.

        Args:
            name: of the tensor.
            values: {name: tensor} that replace it.
            rule: description of the change.
        """
        item = self.items.pop(name)
        self.items |= {target: Item(value, item.source, (*item.rules, rule)) for target, value in values.items()}

    def fuse(self, names: Sequence[str], target: str, join: Callable[[list[Tensor]], Tensor], rule: str) -> None:
        """Replace several tensors by one.

        Args:
            names: of the tensors.
            target: name of the one.
            join: computes it from the list of tensors.
            rule: description of the change.
        """
        items = [self.items.pop(name) for name in names]
        source = tuple(name for item in items for name in item.source)
        rules = dict.fromkeys(rule for item in items for rule in item.rules)
        self.items[target] = Item(join([item.value for item in items]), source, (*rules, rule))

    def rows(self) -> list[Row]:
        """Return the record of every tensor, removed ones last."""
        used = [
            Row(i.source, n, "; ".join(i.rules) or ("unchanged" if i.source == (n,) else "renamed"), i.resampled)
            for n, i in self.items.items()
        ]
        return used + self.recomputed
