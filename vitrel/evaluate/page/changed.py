"""Images whose predicted class changes with the size, from predictions.npz."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vitrel.evaluate.results.aggregate import aggregate, by_area, curves, is_training, protocol_names
from vitrel.evaluate.results.table import Predictions, line_key
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.tasks.base import Predicted

CHANGED = 12  # maximum number of images for a curve and protocol
Place = tuple[str, str, str, str]
PLACE = ("label", "protocol", "policy", "img_size")


def place_of(line: Row, protocol_of: Callable[[Row], str]) -> Place:
    """Return the columns PLACE of a row, or line of translation.csv, as the table of `aggregate` has them.

    Args:
        protocol_of: the result of `protocol_names` for all rows.
    """
    return line["label"], protocol_of(line), line["policy"], line["img_size"]


def changed_images(rows: Sequence[Row], predictions: Predictions) -> list[dict[str, Any]]:
    """Return the images whose predicted class differs between sizes, for every curve and protocol; of the first seed.

    Items have label, policy, protocol, sizes (by area), changed (number of these images), of (number of images read at all
    sizes) and images: at most CHANGED, each with its index and the class predicted at every size (NO_CLASS: none of the
    data's). Images that are right at the training size and wrong at most other sizes come first. Curves with predictions at
    fewer than two sizes are left out; so are tasks without a class of an image.
    """
    predicted: dict[Place, Predicted] = {}
    protocol_of = protocol_names(rows)
    trained: dict[tuple[str, str], str] = {}  # {(label, protocol): a training size}
    for row in rows:
        stored = predictions.rows.get(line_key(row))
        if stored is not None and "predicted" in stored.arrays:
            predicted.setdefault(place_of(row, protocol_of), stored)
            if is_training(row):
                trained.setdefault((row["label"], protocol_of(row)), row["img_size"])
    items = []
    for label, policy, table in curves(aggregate(rows)) if predicted else ():
        for protocol in dict.fromkeys(row["protocol"] for row in table):
            curve = [row for row in table if row["protocol"] == protocol]
            places = {row["img_size"]: (label, protocol, row["policy"], row["img_size"]) for row in curve}
            places = {size: place for size, place in places.items() if place in predicted}
            sizes = sorted(places, key=by_area)
            if len(sizes) < 2:
                continue
            of_sizes = [predicted[places[size]] for size in sizes]
            classes = np.stack([one.arrays["predicted"] for one in of_sizes])  # [S, n]
            read = np.all([one.seen for one in of_sizes], axis=0)
            changes = read & (classes != classes[0]).any(0)
            right = classes == of_sizes[0].arrays["labels"]
            home = trained.get((label, protocol))
            at_training = right[sizes.index(home)] if home in sizes else right.any(0)
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
