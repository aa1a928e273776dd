"""Images that one core prepares for training: ours and timm's, as timm's train.py makes them for its PrefetchLoader.

    taskset -c 0 python -m tools.loading --data ../shared/data/imagenette224

Both decode the same photographs, augment them alike (bicubic crop to 224 px, flip, and jitter or RandAugment) and put uint8
batches together, in turns; medians of processor time.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.loader import fast_collate

import vitrel.data.augment
from tools.benchmark.tables import milliseconds, ratio
from tools.benchmark.worker import Repeats, take_turns, timed
from vitrel.data import Augmentation, ImageSet, collate, create_dataset
from vitrel.data.augment import policy_transform

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RANDOM = "rand-m9-mstd0.5-inc1"
CASES = {  # arguments of timm's transform; of our augmentation
    "crop, flip, jitter 0.4": ({"color_jitter": (0.4, 0.4, 0.4)}, {"jitter": (0.4, 0.4, 0.4)}),
    "the same with hue 0.1": ({"color_jitter": (0.4, 0.4, 0.4, 0.1)}, {"jitter": 0.4}),
    "crop, flip, RandAugment": ({"auto_augment": RANDOM, "color_jitter": None}, {"policy": RANDOM}),
}
BATCH = 50


def theirs(dataset: ImageSet, settings: dict) -> Callable[[int], tuple]:
    """Return the function that reads an image by timm."""
    crop = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "hflip": 0.5, "interpolation": "bicubic"}
    transform = create_transform(224, is_training=True, use_prefetcher=True, re_prob=0, mean=MEAN, std=STD, **crop, **settings)
    if "auto_augment" in settings:  # timm's own fails with Pillow 13, which refuses to posterize to no bits
        transform.transforms[-2] = policy_transform(RANDOM, "bicubic", tuple(round(255 * m) for m in MEAN))
    return lambda index: (transform(Image.open(dataset.samples[index][0]).convert("RGB")), dataset.samples[index][1])


def run(read: Callable, collate_fn: Callable, indices: Sequence[int], calls: int) -> list[float]:
    """Return milliseconds of processor time in which `indices` are read and put into batches, so many times."""

    def once() -> None:
        for first in range(0, len(indices), BATCH):
            collate_fn([read(index) for index in indices[first : first + BATCH]])

    return [timed(once) for _ in range(calls)]


def main() -> None:
    """Print images/s of both for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of photographs")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vitrel.data.augment.get_worker_info = lambda: 1  # type: ignore[assignment, return-value]  # as in a loader process
    for name, (settings, augment) in CASES.items():
        how = Augmentation(scale=(0.08, 1.0), **augment)
        ours = create_dataset(args.data, "train", (224, 224), mean=MEAN, std=None, augment=how, interpolation="bicubic")
        indices = np.random.default_rng(0).permutation(len(ours))[: args.images].tolist()  # type: ignore[arg-type]
        loaders = {"timm": (theirs(ours, settings), fast_collate), "vitrel": (ours.__getitem__, collate)}
        runs = {who: partial(run, *loader, indices) for who, loader in loaders.items()}
        rows = {who: {"rounds": times} for who, times in take_turns(runs, Repeats(1, args.rounds, 0.0, 1))[0].items()}
        rates = ", ".join(f"{who} {1e3 * args.images / milliseconds(row):.0f}" for who, row in rows.items())
        print(f"{name}: {rates} images/s; vitrel over timm {ratio(rows['timm'], rows['vitrel'])}", flush=True)


if __name__ == "__main__":
    main()
