"""The verdicts in plain words: which model to use at which size, where it is safe, and what the data cannot tell."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vitrel.common.sizes import Budget, listed, parse_size, short_size, sizes_in_words
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

PROTOCOLS = {
    "scale": "the image is resized, and objects grow with it",
    "canvas": "objects keep their size in pixels: a center crop, or more around it",
    "sliding": "the images of canvas, in half overlapping windows of the training size",
    "native": "the whole image at its own aspect ratio, resized to a maximum number of tokens",
}


def sentences(judged: Judged) -> dict[str, str]:
    """Return {label: a sentence or a few about the model}."""
    return {label: _of_model(model, judged) for label, model in judged.models.items()}


def notes(judged: Judged) -> list[str]:
    """Return the notes below all sentences, where they apply: there is one seed; unused images could decide what is open."""
    rows = [row for model in judged.models.values() for row in model.used.values()]
    found = []
    if all(row["seeds"] == 1 for row in rows):
        each, these = (
            ("One seed each", "these trained models") if len(judged.models) > 1 else ("One seed", "this trained model")
        )
        found.append(f"{each}: this is about {these}; trained again, results may differ.")
    is_open = any(row["verdict"] == UNKNOWN for row in rows) or any(model.level for model in judged.models.values())
    if judged.unused and is_open:
        found.append(f"{judged.unused:,} images of the data were not used: give a larger --n, or none, to tell more.")
    return found


def legend(judged: Judged) -> dict[str, str]:
    """Return {word: what it means} for those of "bold", "trained" and the verdicts that occur in the main table."""
    rows = [row for model in judged.models.values() for row in model.used.values()]
    words = {row["verdict"] for row in rows} | {"trained" for row in rows if is_training(row)}
    words |= {"bold" for model in judged.models.values() if model.ahead}
    meanings = {
        "bold": "shown to be better than every other model",
        "trained": "the training size, with which the others are compared",
        SAFE: f"shown to lose less than {judged.margin:g} points against the training size",
        LOSES: "shown to lose against the training size",
        UNKNOWN: "neither is shown",
    }
    return {word: text for word, text in meanings.items() if word in words}


def size_name(row: Row) -> str:
    """Return the size of a row without its unit: "48" for 48x48 px, "64x96", or the tokens of a budget."""
    return f"{row['budget']:g}" if known_number(row.get("budget")) else short_size(parse_size(row["img_size"]))


def unit(row: Row) -> str:
    """Return the unit of `size_name`: "px", or "tokens" for a budget."""
    return "tokens" if known_number(row.get("budget")) else "px"


def capital(text: str) -> str:
    """Return a text with a capital first letter, unless its second letter is one, as in mIoU."""
    return text if text[1:2].isupper() else f"{text[:1].upper()}{text[1:]}"


def _of_model(model: Model, judged: Judged) -> str:
    """Return the sentences on a model: comparison, sizes, better policies or protocols, and a position without effect.

    For a model that is not shown to be better than `Task.chance` only that it has to be trained first.
    """
    anchor = max([row for row in model.used.values() if is_training(row)] or model.used.values(), key=main_metric)
    majority = anchor["majority"] if known_number(anchor.get("majority")) else -1.0
    if not anchor["low"] > majority:
        return (
            f"Train {model.label} first: its {judged.task.title} of {main_metric(anchor):.1f} % at {_at([anchor])} is not "
            f"shown to be above the {majority:.1f} % of {judged.task.chance}."
        )
    found = [*_comparison(model), *_sizes(model, judged)]
    alternatives: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in model.better.values():
        alternatives[row["protocol"], row["policy"] if row["protocol"] == model.protocol else ""].append(row)
    for (protocol, policy), rows in alternatives.items():
        by = _points(main_metric(row) - main_metric(model.used[row["img_size"]]) for row in rows)
        names = " ".join(name for name in policy.split("+") if name != "log_n")
        options = [f"--policy {names}"] if names else []
        options += ["--log-n"] if "log_n" in policy.split("+") else []
        what = f"{' '.join(options)} is better by {by}"
        if not policy:
            what = f"the {protocol} protocol is better by {by}, at the same cost ({PROTOCOLS[protocol.split(',')[0]]})"
        found.append(f"At {_at(rows)} {what}")
    share = anchor.get("position_share")
    if known_number(share) and share < NEGLIGIBLE:
        found.append(f"Its position encoding does next to nothing: it changes attention by {100 * share:.2g} %")
    return "".join(f"{text}. " for text in found).rstrip()


def _comparison(model: Model) -> list[str]:
    """Return how the model compares with the others, as a list of one sentence, or [] without others."""
    rest = "the others" if len(model.others) > 1 else "".join(model.others)
    compared = len(model.ahead) + len(model.behind) + len(model.level)
    clauses = []
    if model.ahead:
        where = _where([*model.ahead], model, compared)
        there = "at each of them" if where.startswith("any") else "there"
        by = _points(model.ahead.values())
        if len(model.others) > 1:
            least = min(model.ahead.values())
            by = f"{_points([math.floor(least) if least > 10 else math.floor(10 * least) / 10])} or more"
        clauses.append(f"Use {model.label} at {where}: it is better than {rest} {there}, by {by}")
    if model.behind:
        where = _where([*model.behind], model, compared, "every size")
        better = {other for other, _ in model.behind.values()}
        by = _points(points for _, points in model.behind.values())
        clauses.append(
            f"{'it' if clauses else model.label} is behind {better.pop() if len(better) == 1 else 'others'} at {where}, by {by}"
        )
    two, evidence = len(model.others) == 1, _evidence(model)
    if model.level and clauses:
        clauses.append(f"elsewhere {f'{evidence} cannot tell the two apart' if two else 'no other is shown to be better'}")
    elif model.level:
        alike = f"{capital(evidence)} cannot tell {model.label} from {rest}"
        what = alike if two else f"No other is shown to be better than {model.label}"
        clauses.append(f"{what} at {_where(model.level, model, compared)}")
    return ["; ".join(clauses)] if clauses else []


def _sizes(model: Model, judged: Judged) -> list[str]:
    """Return what changes from the training size to other sizes, or that there is no row at it, as a list of one sentence.

    [] where a model that is compared with others has no other size.
    """
    used, name = model.used, "it" if model.ahead or model.behind else model.label
    trained, others = ([size for size, row in used.items() if is_training(row) == is_trained] for is_trained in (True, False))
    if not trained:
        row = next(iter(used.values()))
        sizes = train_sizes_of(row)
        option = "--protocol native" if isinstance(sizes[0], Budget) else f"--size {row['train_size']}"
        where = sizes_in_words(sizes)
        return [f"Add {option}: {name} was trained at {where}, and without that no size can be called safe"]
    home = f"its training size{'s' if len(trained) > 1 else ''}"
    if not others:
        values = listed([f"{main_metric(used[size]):.1f} % at {_at([used[size]])}" for size in trained])
        alone = f"The {judged.task.title} of {model.label} is {values}, {home}; no other was evaluated"
        return [] if model.others else [alone]
    unknown, parts = [size for size in others if used[size]["verdict"] == UNKNOWN], []
    if len(unknown) == len(others):
        return [f"Whether {name} changes with the size {_evidence(model)} cannot tell"]
    if gains := [size for size in others if used[size]["gains"]]:
        by = _points(used[size]["difference"] for size in gains)
        parts.append(f"gains {by} at {_where(gains, model, len(others))}")
    if safe := [size for size in others if used[size]["verdict"] == SAFE and size not in gains]:
        parts.append(f"is safe at {_where(safe, model, len(others))} (less than {judged.margin:g} points lost)")
    if loses := [size for size in others if used[size]["verdict"] == LOSES]:
        by = _points(-used[size]["difference"] for size in loses)
        parts.append(f"loses {by} at {_where(loses, model, len(others))} (fine-tune it there)")
    text = f"Against {home}, {_at([used[size] for size in trained])}, {name} {listed(parts)}"
    return [f"{text}; for {_where(unknown, model, len(others))} {_evidence(model)} cannot tell" if unknown else text]


def _where(sizes: Sequence[str], model: Model, most: int, all_sizes: str = "any size") -> str:
    """Return sizes in words: a list, or where all of `most` possible sizes are meant "any size" or "any other size".

    Args:
        sizes: keys of `model.used`.
        model: with all evaluated sizes.
        most: number of the sizes that could be named; if fewer than were evaluated, the words are "any other size".
        all_sizes: the words for all sizes, which end with " size".
    """
    if len(sizes) == most > 1:
        return all_sizes if most == len(model.used) else all_sizes.replace(" size", " other size")
    return _at([row for size, row in model.used.items() if size in sizes])


def _at(rows: Sequence[Row]) -> str:
    """Return the sizes of rows in words: "48 and 64x96 px", "196 tokens"."""
    return f"{listed([*map(size_name, rows)])} {unit(rows[0])}"


def _evidence(model: Model) -> str:
    """Return the images and seeds that a statement rests on, in words."""
    row = next(iter(model.used.values()))
    images = f"{int(row['n']):,} images"
    return f"these {images}" if row["seeds"] == 1 else f"these {row['seeds']} seeds and {images}"


def _points(differences: Iterable[float]) -> str:
    """Return differences in words: "9.9 points", "9.4 to 12 points"."""
    values = [*differences]
    ends = [f"{end:.1f}".removesuffix(".0") if round(end, 1) < 10 else f"{end:.0f}" for end in (min(values), max(values))]
    return f"{' to '.join(dict.fromkeys(ends))} point{'' if ends == ['1', '1'] else 's'}"
