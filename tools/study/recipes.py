"""The recipes for small folders beside timm's train.py with its defaults: one folder, model and size.

    python -m tools.study.recipes scratch path/to/flowers256 --every 2 --epochs 8          # and --epochs 9 --by timm
    python -m tools.study.recipes scratch path/to/imagenette224 --every 5 --epochs 8       # and --epochs 13 --by timm
    python -m tools.study.recipes finetune path/to/flowers256 --every 4 --epochs 3 --weights vit_tiny.pth

A row of results/recipes/results.csv is one training: top-1 after its last epoch, and its processor time without imports.
The table of docs/how_to/train.md is made of all rows.
"""

import argparse
import csv
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import timm
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed

from tools.study.pages import ROOT, fill_pages
from tools.study.results import add_row
from vitrel.cli import main as vitrel
from vitrel.common.tables import markdown

PAGE = "docs/how_to/train.md"
RESULTS = ROOT / "results" / "recipes" / "results.csv"
MODELS = {  # the smallest ViT, with patches of 16 px to save time: 36 tokens at 96 px, as the ViT-Tiny
    "scratch": ("vitrel_vit_n8_cpb", {"patch_size": 16}),
    "finetune": ("vit_tiny_patch16_224", {}),
}
SIZE = 96


def by_vitrel(name: str, arguments: Mapping, data: str, epochs: int, seed: int, weights: Path | None) -> float:
    """Return the last top-1 of `vitrel train` with the recipe that it takes by itself."""
    with TemporaryDirectory() as folder:
        options = ["--model", name, "--model-args", repr(dict(arguments)), "--data", data, "--size", str(SIZE), "--out", folder]
        options += ["--epochs", str(epochs), "--seed", str(seed), "--data.workers=0", "--trainer.logger=false"]
        options += [f"--trainer.check_val_every_n_epoch={epochs}"]
        vitrel(["train", *options, *(["--weights", str(weights)] if weights else [])])
        with (Path(folder) / "metrics.csv").open() as file:
            return float([row["val/top1"] for row in csv.DictReader(file) if row["val/top1"]][-1])


def by_timm(name: str, arguments: Mapping, data: str, epochs: int, seed: int, weights: Path | None) -> float:
    """Return the last top-1 of what timm's train.py does with the defaults of its options.

    These are SGD with Nesterov's momentum of 0.9 at 0.1 for 256 images, linear scaling, batches of 128, weight decay of 2e-5,
    five epochs of warm-up from 1e-5 and a cosine to 0 by epoch; crops of 0.08 to 1, mirror images, jitter of 0.4, random
    interpolation, label smoothing of 0.1. Images are loaded in this process, as in `by_vitrel`, so that their time counts.
    """
    random_seed(seed, 0)
    sets = {split: create_dataset("", root=data, split=split, is_training=split == "train") for split in ("train", "val")}
    classes = len(sets["train"].reader.class_to_idx)
    own = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(weights)}} if weights else {}
    model = timm.create_model(name, num_classes=classes, img_size=SIZE, **arguments, **own)
    config = resolve_data_config({"img_size": SIZE}, model=model)
    how = {key: config[key] for key in ("input_size", "mean", "std")}
    how |= {"num_workers": 0, "persistent_workers": False, "device": torch.device("cpu")}
    training = create_loader(
        sets["train"], batch_size=128, is_training=True, re_mode="pixel", scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5,
        color_jitter=0.4, interpolation="random", **how
    )  # fmt: skip
    evaluation = create_loader(
        sets["val"], batch_size=128, interpolation=config["interpolation"], crop_pct=config["crop_pct"], **how
    )
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1 * 128 / 256, weight_decay=2e-5, momentum=0.9)
    scheduler, epochs = create_scheduler_v2(
        optimizer, num_epochs=epochs, warmup_epochs=5, warmup_lr=1e-5, min_lr=0, updates_per_epoch=len(training)
    )
    loss = LabelSmoothingCrossEntropy(0.1)
    for epoch in range(epochs):
        model.train()
        for images, labels in training:
            loss(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(epoch + 1)
    model.eval()
    with torch.inference_mode():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in evaluation)
    return right / len(sets["val"])


def thinned(data: Path, every: int, folder: str) -> Path:
    """Return a folder of links to the evaluation images of `data`, and to every so many training images of each class."""
    for classes in (*sorted((data / "train").iterdir()), *sorted((data / "val").iterdir())):
        (place := Path(folder) / classes.relative_to(data)).mkdir(parents=True)
        for image in sorted(classes.iterdir())[:: every if place.parent.name == "train" else 1]:
            (place / image.name).symlink_to(image.resolve())
    return Path(folder)


def table(results: Path) -> str:
    """Return a Markdown table of the rows: mean and standard deviation of top-1 over seeds, and mean processor time."""
    rows = []
    order = ["recipe", "data", "every", "epochs", "by"]
    ordered = pd.read_csv(results).sort_values(order, ascending=[False, True, True, True, False])
    for (recipe, data, every, epochs, by, model), of in ordered.groupby([*order, "model"], sort=False):
        images = {1: "all", 2: "every second"}.get(every, f"every {every}th")
        name = f"`{recipe}.yaml`" if by == "vitrel" else "timm's defaults"
        top1 = f"{100 * of.top1.mean():.1f}" + (f" ± {100 * of.top1.std():.1f}" if len(of) > 1 else "")
        rows.append([f"{data}, {images}", f"`{model}`", name, epochs, len(of), top1, f"{of.processor_s.mean():.0f} s"])
    return markdown(["training images", "model", "recipe", "epochs", "seeds", "top-1, %", "processor time"], rows)


def main() -> None:
    """Train with both recipes in turns, and add a row for each to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=MODELS)
    parser.add_argument("data", type=Path, help="a folder with train/<class>/ and val/<class>/")
    parser.add_argument("--every", type=int, default=1, help="take one of so many training images of each class")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--weights", type=Path, help="those of finetune's model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--by", nargs="+", choices=["vitrel", "timm"], default=["vitrel", "timm"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    name, arguments = MODELS[args.recipe]
    with TemporaryDirectory() as folder:
        data = thinned(args.data, args.every, folder)
        for seed, by in product(args.seeds, args.by):
            start = time.process_time()
            train = by_vitrel if by == "vitrel" else by_timm
            top1 = train(name, arguments, str(data), args.epochs, seed, args.weights)
            row = {
                "recipe": args.recipe, "data": args.data.name, "every": args.every, "by": by, "model": name, "size": SIZE,
                "epochs": args.epochs, "seed": seed, "top1": round(top1, 4),
            }  # fmt: skip
            add_row(RESULTS, row, start)
    fill_pages(ROOT, {PAGE: [("recipes", table(RESULTS))]})


if __name__ == "__main__":
    main()
