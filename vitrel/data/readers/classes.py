"""Names of classes: their order, and the file `classes.txt`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from timm.utils.misc import natural_key


def class_order(names: Iterable[str]) -> list[str]:
    """Return class names in the order of their labels: sorted as text, or as numbers if all of them are digits."""
    names = list(names)
    if all(name.isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def order_note(classes: Sequence[str]) -> str:
    """Return a sentence that tells if `classes` are sorted as text or as by timm's readers, and which class would differ first.

    It is "" if the orders are equal, or it is neither. torchvision's `ImageFolder` sorts as text; timm's readers take
    numbers within names as numbers, and ignore case.
    """
    orders = {"as text": sorted(classes), "as timm's readers do, by numbers and without case": sorted(classes, key=natural_key)}
    taken = next((how for how, order in orders.items() if order == list(classes)), None)
    if taken is None or len({*map(tuple, orders.values())}) == 1:
        return ""
    other, order = next((how, order) for how, order in orders.items() if how != taken)
    first = next(i for i, (one, two) in enumerate(zip(classes, order, strict=True)) if one != two)
    return f"sorted {taken}, so class {first} is {classes[first]!r}; {other}, it would be {order[first]!r}"


def read_class_names(path: str | Path) -> list[str]:
    """Return the class names in a text file, one a line, stripped; ValueError if the file or a line before a name is empty."""
    names = [line.strip() for line in Path(path).read_text("utf-8-sig").rstrip().split("\n")]
    if "" in names:
        raise ValueError(f"line {names.index('') + 1} is empty, which would shift the classes after it")
    return names
