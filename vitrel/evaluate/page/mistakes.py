"""Mistakes in a report, from predictions.npz: confused pairs of classes, and images whose prediction changes with size."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vitrel.evaluate.score import LEFT_OUT, NO_CLASS
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.table import Predictions, aggregate, by_area, curves, line_key, protocol_names

PAIRS = 12  # maximum number of confused pairs of classes for a model and protocol
CHANGED = 12  # maximum number of images with changing predictions for a curve and protocol
Place = tuple[str, str, str, str]
PLACE = ("label", "protocol", "policy", "img_size")


def place_of(line: Row, protocol_of: Callable[[Row], str]) -> Place:
    """Return the columns PLACE of a row, or line of translation.csv, as the table of `aggregate` has them.

    protocol_of: the result of `protocol_names` for all rows.
    """
    return line["label"], protocol_of(line), line["policy"], line["img_size"]


def confusions(rows: Sequence[Row], predictions: Predictions) -> list[dict[str, Any]]:
    """Return the PAIRS most frequent confusions (class, predicted class) of every label and protocol, with counts by size.

    Items have label, protocol, pairs (indices of classes), of (number of images of each pair's class) and rows: {policy,
    img_size, n (images), wrong, counts (in the order of the pairs)}. Pairs are ranked by their largest count at any size and
    policy. All counts, also n and of, are sums over seeds; of is that of the first of the rows; wrong includes predictions of
    none of the data's classes. Labels without mistakes are left out.
    """
    counted: dict[Place, Counter[tuple[int, int]]] = {}
    seen: Counter[Place] = Counter()
    wrong: Counter[Place] = Counter()
    images: dict[Place, Counter[int]] = defaultdict(Counter)
    for place, _, predicted in _predicted(rows, predictions):
        read = predicted != LEFT_OUT
        missed = read & (predicted != predictions.labels)
        named = missed & (predicted != NO_CLASS)
        taken = zip(predictions.labels[named].tolist(), predicted[named].tolist(), strict=True)
        counted.setdefault(place, Counter()).update(taken)
        images[place].update(predictions.labels[read].tolist())
        seen[place] += int(read.sum())
        wrong[place] += int(missed.sum())
    items = []
    for label, protocol in dict.fromkeys(place[:2] for place in counted):
        by_place = {place: pairs for place, pairs in counted.items() if place[:2] == (label, protocol)}
        most: Counter[tuple[int, int]] = Counter()
        for pairs in by_place.values():
            most |= pairs  # the largest count at any size
        chosen = [pair for pair, _ in sorted(most.items(), key=lambda item: (-item[1], item[0]))[:PAIRS]]
        if chosen:
            first = next(iter(by_place))
            items.append(
                {
                    "label": label,
                    "protocol": protocol,
                    "pairs": [list(pair) for pair in chosen],
                    "of": [images[first][pair[0]] for pair in chosen],
                    "rows": [
                        {
                            "policy": place[2],
                            "img_size": place[3],
                            "n": seen[place],
                            "wrong": wrong[place],
                            "counts": [pairs[pair] for pair in chosen],
                        }
                        for place, pairs in by_place.items()
                    ],
                }
            )
    return items


def changed_images(rows: Sequence[Row], predictions: Predictions) -> list[dict[str, Any]]:
    """Return the images whose prediction differs between sizes, for every curve and protocol; of the first seed.

    Items have label, policy, protocol, sizes (by area), changed (number of these images), of (number of images read at all
    sizes) and images: at most CHANGED, each with its index and the class predicted at every size (NO_CLASS: none of the
    data's). Images that are right at the training size and wrong at most other sizes come first. Curves with predictions at
    fewer than two sizes are left out.
    """
    predicted: dict[Place, np.ndarray] = {}
    trained = {}
    for place, row, classes in _predicted(rows, predictions):
        predicted.setdefault(place, classes)
        trained[place[0]] = row["train_size"]
    items = []
    for label, policy, table in curves(aggregate(rows)):
        for protocol in dict.fromkeys(row["protocol"] for row in table):
            curve = [row for row in table if row["protocol"] == protocol]
            places = {row["img_size"]: (label, protocol, row["policy"], row["img_size"]) for row in curve}
            sizes = sorted((size for size, place in places.items() if place in predicted), key=by_area)
            if len(sizes) < 2:
                continue
            classes = np.stack([predicted[places[size]] for size in sizes])  # [S, n]
            read = (classes != LEFT_OUT).all(0)
            changes = read & (classes != classes[0]).any(0)
            right = classes == predictions.labels
            at_training = right[sizes.index(trained[label])] if trained[label] in sizes else right.any(0)
            order = np.lexsort((right.sum(0), ~at_training))  # right at the training size first, then right at few sizes
            chosen = [int(image) for image in order if changes[image]][:CHANGED]
            items.append(
                {
                    "label": label,
                    "policy": policy,
                    "protocol": protocol,
                    "sizes": sizes,
                    "changed": int(changes.sum()),
                    "of": int(read.sum()),
                    "images": [{"image": image, "predicted": classes[:, image].tolist()} for image in chosen],
                }
            )
    return items


def _predicted(rows: Sequence[Row], predictions: Predictions) -> Iterator[tuple[Place, Row, np.ndarray]]:
    """(place, row, predicted classes [n]) of every row with predictions."""
    protocol_of = protocol_names(rows)
    for row in rows:
        of_row = predictions.rows.get(line_key(row))
        if of_row is not None:
            yield place_of(row, protocol_of), row, of_row.predicted
