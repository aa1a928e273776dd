"""Tensors on their way from a file to a model, with a record of what was done to each."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor


class Row(NamedTuple):
    """What became of tensors of the file. target "": of nothing in the model, for the reason in `rule`."""

    source: tuple[str, ...]
    target: str
    rule: str
    resized: str = ""  # "14x14 -> 24x24, bicubic" where values were resampled


class Item(NamedTuple):
    """A tensor on its way, under the name of now; what was done to it is told in `rules`, in order."""

    value: Tensor
    source: tuple[str, ...]  # names in the file
    rules: tuple[str, ...] = ()
    resized: str = ""


class Draft:
    """{name: tensor} of a file, renamed and rearranged step by step; every step is recorded."""

    def __init__(self, state: dict[str, Tensor]):
        self.items = {name: Item(value, (name,)) for name, value in state.items()}
        self.recomputed: list[Row] = []  # buffers, which the model computes itself
        self.implied: set[str] = set()  # keys of the encodings that the file was trained with, where its layout tells

    def __contains__(self, name: str) -> bool:
        return name in self.items

    def __getitem__(self, name: str) -> Tensor:
        return self.items[name].value

    def find(self, pattern: str) -> Iterator[re.Match[str]]:
        """Matches of `pattern` with whole names, over the names of now: the draft may be changed meanwhile."""
        return (match for match in [re.fullmatch(pattern, name) for name in [*self.items]] if match)

    def has(self, pattern: str) -> bool:
        """Whether `pattern` matches a whole name."""
        return next(self.find(pattern), None) is not None

    def rename(self, *pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> None:
        """re.sub of every pair in turn on every name. Raises ValueError if two tensors would come to share one."""
        renamed: dict[str, Item] = {}
        for name, item in self.items.items():
            for pattern, replacement in pairs:
                name = re.sub(pattern, replacement, name)
            if name in renamed:
                raise ValueError(f"{item.source[0]} and {renamed[name].source[0]} are both read as {name}")
            renamed[name] = item
        self.items = renamed

    def leave_out(self, pattern: str, why: str = "a buffer, computed anew") -> None:
        """Take the matching tensors out: the model has its own."""
        for match in self.find(pattern):
            self.recomputed.append(Row(self.items.pop(match[0]).source, "", why))

    def change(self, name: str, value: Tensor, rule: str, resized: str = "") -> None:
        """Another value under the same name."""
        item = self.items[name]
        self.items[name] = Item(value, item.source, (*item.rules, rule), resized or item.resized)

    def move(self, name: str, target: str) -> None:
        """One tensor to another name."""
        self.items[target] = self.items.pop(name)

    def spread(self, name: str, values: dict[str, Tensor], rule: str) -> None:
        """One tensor becomes several."""
        item = self.items.pop(name)
        self.items |= {target: Item(value, item.source, (*item.rules, rule)) for target, value in values.items()}

    def fuse(self, names: Sequence[str], target: str, join: Callable[[list[Tensor]], Tensor], rule: str) -> None:
        """Several tensors become one."""
        items = [self.items.pop(name) for name in names]
        source = tuple(name for item in items for name in item.source)
        rules = dict.fromkeys(rule for item in items for rule in item.rules)
        self.items[target] = Item(join([item.value for item in items]), source, (*rules, rule))

    def rows(self) -> list[Row]:
        """What was done to every tensor, the recomputed ones last."""
        used = [
            Row(i.source, n, "; ".join(i.rules) or ("as it is" if i.source == (n,) else "renamed"), i.resized)
            for n, i in self.items.items()
        ]
        return used + self.recomputed
