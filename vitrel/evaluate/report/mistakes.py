"""What models get wrong, from predictions.npz: pairs of classes taken for each other, and images whose prediction changes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vitrel.evaluate.predictions import LEFT_OUT, NO_CLASS, Predictions
from vitrel.evaluate.results import aggregate, by_area, curves, line_key
from vitrel.evaluate.settings import Row

PAIRS = 12  # of classes, of a model and protocol
CHANGED = 12  # images, of a curve and protocol
Place = tuple[str, str, str, str]
PLACE = ("label", "protocol", "policy", "img_size")


def place_of(line: Row, crops: bool) -> Place:
    """Where a row or a line of one stands in the table of `aggregate`, by PLACE. crops: models were evaluated with several."""
    protocol = f"{line['protocol']}, crop {line['crop_pct']:g}" if crops else line["protocol"]
    return line["label"], protocol, line["policy"], line["img_size"]


def has_crops(rows: Sequence[Row]) -> bool:
    """Whether a model was evaluated with several crops."""
    found = defaultdict(set)
    for row in rows:
        found[row["label"]].add(row["crop_pct"])
    return any(len(crops) > 1 for crops in found.values())


def confusions(rows: Sequence[Row], predictions: Predictions) -> list[dict[str, Any]]:
    """Of every label and protocol the PAIRS most frequent pairs (class, predicted class), and how often at each size.

    Seeds are added up. pairs: indices of classes; of: images of the class; rows: policy, img_size, n (images), wrong, and
    counts in the order of the pairs. Labels without a mistake are left out.
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
    found = []
    for label, protocol in dict.fromkeys(place[:2] for place in counted):
        own = {place: pairs for place, pairs in counted.items() if place[:2] == (label, protocol)}
        most: Counter[tuple[int, int]] = Counter()
        for pairs in own.values():
            most |= pairs  # the largest count at any size
        chosen = [pair for pair, _ in sorted(most.items(), key=lambda item: (-item[1], item[0]))[:PAIRS]]
        if chosen:
            first = next(iter(own))
            found.append(
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
                        for place, pairs in own.items()
                    ],
                }
            )
    return found


def changed_images(rows: Sequence[Row], predictions: Predictions) -> list[dict[str, Any]]:
    """Of every curve and protocol, by the first seed, the images whose prediction is not the same at all sizes.

    label, policy, protocol, sizes (by area), changed (how many), of (images), and images: at most CHANGED of them, those first
    that are right at the training size and wrong at most others, each with its index and the class predicted at every size
    (NO_CLASS: none of the data's).
    """
    predicted: dict[Place, np.ndarray] = {}
    trained = {}
    for place, row, own in _predicted(rows, predictions):
        predicted.setdefault(place, own)
        trained[place[0]] = row["train_size"]
    found = []
    for label, policy, table in curves(aggregate(rows).reset_index(drop=True)):
        for protocol in table["protocol"].unique():
            here = table[table["protocol"] == protocol].to_dict("records")
            places = {row["img_size"]: (label, protocol, row["policy"], row["img_size"]) for row in here}
            sizes = sorted((size for size, place in places.items() if place in predicted), key=by_area)
            if len(sizes) < 2:
                continue
            classes = np.stack([predicted[places[size]] for size in sizes])  # [S, n]
            read = (classes != LEFT_OUT).all(0)
            changes = read & (classes != classes[0]).any(0)
            right = classes == predictions.labels
            home = right[sizes.index(trained[label])] if trained[label] in sizes else right.any(0)
            order = np.lexsort((right.sum(0), ~home))  # right at home first, then right at few sizes
            chosen = [int(image) for image in order if changes[image]][:CHANGED]
            found.append(
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
    return found


def _predicted(rows: Sequence[Row], predictions: Predictions) -> Iterator[tuple[Place, Row, np.ndarray]]:
    """(place, row, classes predicted [n]) of every row that has predictions."""
    crops = has_crops(rows)
    for row in rows:
        own = predictions.rows.get(line_key(row))
        if own is not None:
            yield place_of(row, crops), row, own.predicted
