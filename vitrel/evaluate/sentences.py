"""What is shown of every model in plain words: which to use at which size, where it is safe, and what the data cannot tell."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vitrel.common.sizes import Budget, format_size, parse_size
from vitrel.evaluate.verdicts import (
    LOSES,
    SAFE,
    UNKNOWN,
    Judged,
    Model,
    Row,
    is_training,
    known_number,
    main_metric,
    train_sizes_of,
)
from vitrel.inspect.attention import NEGLIGIBLE

MOST_MORE = 50  # times the number of images: that many more are not recommended
PROTOCOLS = {
    "scale": "every size shows the same field of view: the image is resized, and objects grow with it",
    "canvas": "objects keep their size in pixels: a smaller size is a center crop, a larger one shows more around, or padding",
    "sliding": "the images of canvas, in half overlapping windows of the training size, whose outputs are averaged",
    "native": "every image keeps its own aspect ratio and is resized to a maximum number of tokens, without cropping",
}


def sentences(judged: Judged) -> dict[str, str]:
    """Return {label: what is shown of the model}, a sentence or a few."""
    return {label: _of_model(model, judged) for label, model in judged.models.items()}


def notes(judged: Judged) -> list[str]:
    """Return what holds for all sentences: whether they are about these trained models, and how much more data would tell."""
    rows = [row for model in judged.models.values() for row in model.used.values()]
    found = []
    if all(row["seeds"] == 1 for row in rows):
        each, these = (
            ("One seed each", "these trained models") if len(judged.models) > 1 else ("One seed", "this trained model")
        )
        found.append(f"{each}: this is about {these}; trained again, results may differ.")
    open_rows = [row for row in rows if row["verdict"] == UNKNOWN]
    if judged.unused and (open_rows or any(model.level for model in judged.models.values())):
        found.append(f"{_counted(judged.unused, 'image')} of the data were not used: give a larger --n, or none, to tell more.")
    elif open_rows and all(row["more"] and row["more"] <= MOST_MORE * row["n"] for row in open_rows):
        more = _rounded(max(row["more"] for row in open_rows))
        where = f'where the table says "{UNKNOWN}", if the differences stay as they are'
        found.append(f"About {_counted(more, 'more image')} would decide {where}.")
    return found


def legend(judged: Judged) -> dict[str, str]:
    """Return {word of the table: what it means}, of the words that occur."""
    words = {row["verdict"] for model in judged.models.values() for row in model.used.values()}
    trained = any(is_training(row) for model in judged.models.values() for row in model.used.values())
    return {
        **({"bold": "shown to be better than every other model"} if any(m.ahead for m in judged.models.values()) else {}),
        **({"trained": "the training size, with which the others are compared"} if trained else {}),
        **({SAFE: f"shown to lose less than {judged.margin:g} points against the training size"} if SAFE in words else {}),
        **({LOSES: "shown to lose against the training size"} if LOSES in words else {}),
        **({UNKNOWN: "neither is shown"} if UNKNOWN in words else {}),
    }


def size_name(row: Row) -> str:
    """Return the size of a row without its unit: "48" for 48x48 px, "64x96", or the tokens of a budget."""
    if known_number(row.get("budget")):
        return f"{row['budget']:g}"
    height, width = parse_size(row["img_size"])
    return f"{height}" if height == width else row["img_size"]


def unit(row: Row) -> str:
    """Return the unit of `size_name`: "px", or "tokens" for a budget."""
    return "tokens" if known_number(row.get("budget")) else "px"


def training_in_words(row: Row) -> str:
    """Return where the model of a row was trained: "64 px", "48 and 64x96 px", "native shape, 196 tokens at most"."""
    sizes = train_sizes_of(row)
    if budgets := [str(size.tokens) for size in sizes if isinstance(size, Budget)]:
        return f"native shape, {_list(budgets)} tokens at most"
    return f"{_list([size_name({'img_size': format_size(size)}) for size in sizes])} px"


def _of_model(model: Model, judged: Judged) -> str:
    anchor = max([row for row in model.used.values() if is_training(row)] or model.used.values(), key=main_metric)
    majority = anchor["majority"] if known_number(anchor.get("majority")) else -1.0
    if not anchor["low"] > majority:
        return (
            f"Train {model.label} first: its {judged.task.title} of {main_metric(anchor):.1f} % at {_at([anchor])} is not "
            f"shown to be above the {majority:.1f} % of always predicting the most frequent class."
        )
    found = [text for text in (_comparison(model),) if text]
    found.append(_sizes(model, judged, "it" if found else model.label))
    if found[0].startswith("these") and found[-1].startswith("whether"):
        found[0] += f", nor {found.pop().partition(' these ')[0]}"
    by_policy = defaultdict(list)
    for size, policy in model.policies.items():
        by_policy[policy].append(model.used[size])
    if by_policy:
        found.append(f"this is with --policy {_list([f'{policy} at {_at(rows)}' for policy, rows in by_policy.items()])}")
    for protocol, at in model.elsewhere.items():
        rows = [model.used[size] for size in at]
        what = f"the {protocol} protocol ({_protocol(protocol, rows)})"
        found.append(f"at {_at(rows)} {what} is better by {_points(at.values())}, at the same cost")
    share = anchor.get("position_share")
    if known_number(share) and share < NEGLIGIBLE:
        found.append(f"its position encoding does next to nothing: it changes attention by {100 * share:.2g} %")
    texts = [text for text in found if text]
    name = re.compile(rf"{re.escape(model.label)}\b")  # which stays as it is
    return " ".join(f"{text if name.match(text) else capital(text)}." for text in texts)


def _comparison(model: Model) -> str:
    """How the model compares with the others; "" where there are none."""
    if not model.others:
        return ""
    compared = [size for size in model.used if size in model.ahead or size in model.behind or size in model.level]
    only = model.others[0] if len(model.others) == 1 else ""
    found = []
    if model.ahead:
        where = _where([*model.ahead], model, compared)
        by = _points(model.ahead.values()) if only else f"{_floor(min(model.ahead.values()))} points or more"
        better = f"it is better than {only or 'the others'}"
        if len(model.used) == 1:
            found.append(f"use {model.label}: {better} at {where}, by {by}")
        else:
            there = "at each of them" if where.startswith("any") else "there"
            found.append(f"use {model.label} at {where}: {better} {there}, by {by}")
    by_other: dict[str, list[str]] = defaultdict(list)
    for size, (other, _) in model.behind.items():
        by_other[other].append(size)
    if len(by_other) > 2:
        by_other = {"others": [*model.behind]}
    if by_other:
        behind = [f"behind {other} at {_where(sizes, model, compared, 'every size')}" for other, sizes in by_other.items()]
        points = _points([points for _, points in model.behind.values()])
        found.append(f"{'it' if found else model.label} is {_list(behind)}, by {points}")
    if model.level:
        where = "elsewhere" if found else f"at {_where([*model.level], model, compared)}"
        if only and found:
            found.append(f"{where} {_evidence(model.used)} cannot tell the two apart")
        elif all(len(names) == len(model.others) for names in model.level.values()) and not found:
            found.append(f"{_evidence(model.used)} cannot tell {model.label} from {only or 'the others'} {where}")
        else:
            than = "" if found else f" than {model.label}"
            found.append(f"{where if found else ''} no other is shown to be better{than} {'' if found else where}".strip())
    return "; ".join(found)


def _sizes(model: Model, judged: Judged, name: str) -> str:
    """What changes from the training size to the others, a sentence about `name`."""
    used, trained = model.used, [row for row in model.used.values() if is_training(row)]
    if not trained:
        row = next(iter(used.values()))
        option = "--protocol native" if isinstance(train_sizes_of(row)[0], Budget) else f"--size {row['train_size']}"
        return f"add {option}: {name} was trained at {training_in_words(row)}, and without that no size can be called safe"
    if len(trained) == len(used):
        values = _list([f"{main_metric(row):.1f} % at {_at([row])}" for row in trained])
        where = f"its training size{'s' if len(trained) > 1 else ''}; no other was evaluated"
        return "" if name == "it" else f"the {judged.task.title} of {name} is {values}, {where}"
    others = [size for size in used if not is_training(used[size])]
    gains = [size for size in others if size in model.gains and used[size]["difference"] > 0]
    safe = [size for size in model.with_verdict(SAFE) if size not in gains]
    loses, unknown = model.with_verdict(LOSES), model.with_verdict(UNKNOWN)
    if len(unknown) == len(others):
        return f"whether {name} changes with the size {_evidence(used)} cannot tell"
    parts = []
    if gains:
        points = _points([used[size]["difference"] for size in gains])
        parts.append(f"gains {points} at {_where(gains, model, others)}")
    if safe:
        parts.append(f"is safe at {_where(safe, model, others)} (less than {judged.margin:g} points lost)")
    if loses:
        points = _points([-used[size]["difference"] for size in loses])
        parts.append(f"loses {points} at {_where(loses, model, others)} (fine-tune it there)")
    home = f"against its training size{'s' if len(trained) > 1 else ''}, {_at(trained)}"
    text = f"{home}, {name} {_list(parts)}"
    return f"{text}; for {_where(unknown, model, others)} {_evidence(used)} cannot tell" if unknown else text


def _where(sizes: Sequence[str], model: Model, of: Sequence[str], all_sizes: str = "any size") -> str:
    """Sizes in words; `all_sizes` for all that were evaluated, "any other size" for all but those of training."""
    if len(sizes) == len(of) > 1:
        return all_sizes if len(of) == len(model.used) else all_sizes.replace(" size", " other size")
    return _at([row for size, row in model.used.items() if size in sizes])


def _at(rows: Sequence[Row]) -> str:
    """The sizes of rows: "48 and 64x96 px", "196 tokens"."""
    return f"{_list([*map(size_name, rows)])} {unit(rows[0])}"


def _protocol(name: str, rows: Sequence[Row]) -> str:
    """A protocol in a few words, at the sizes of the rows."""
    if name.startswith("canvas"):
        areas = [max(math.prod(size) if isinstance(size, tuple) else math.inf for size in train_sizes_of(row)) for row in rows]
        smaller = all(math.prod(parse_size(row["img_size"])) < area for row, area in zip(rows, areas, strict=True))
        return "a center crop instead of a smaller image" if smaller else "objects keep their size in pixels"
    return {"scale": "the image resized", "sliding": "windows of the training size"}.get(name.split(",")[0], "whole images")


def _evidence(used: dict[str, Row]) -> str:
    """The images and seeds that a statement rests on."""
    row = next(iter(used.values()))
    images = _counted(int(row["n"]), "image")
    return f"these {images}" if row["seeds"] == 1 else f"these {row['seeds']} seeds and {images}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _points(differences: Iterable[float]) -> str:
    """Differences in words: "9.9 points", "9.4 to 12 points"."""
    values = [*differences]
    ends = [f"{end:.1f}".removesuffix(".0") if round(end, 1) < 10 else f"{end:.0f}" for end in (min(values), max(values))]
    return f"{' to '.join(dict.fromkeys(ends))} point{'' if ends == ['1', '1'] else 's'}"


def _floor(value: float) -> str:
    return f"{math.floor(10 * value) / 10:.1f}".removesuffix(".0") if value < 10 else f"{math.floor(value)}"


def _rounded(number: int) -> int:
    """A number rounded up to two digits: 1234 -> 1300."""
    step = 10 ** max(0, len(str(number)) - 2)
    return -(-number // step) * step


def _list(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def capital(text: str) -> str:
    """Return a text with a capital, as it begins a sentence; mIoU stays as it is."""
    return text if text[1:2].isupper() else f"{text[:1].upper()}{text[1:]}"
