"""The study from ImageNet weights: what `vitrel compare study_imagenet` needs besides the configuration.

    python -m tools.study.imagenet_weights prepare --imagenette imagenette224 --flowers flowers256 \
        --ilsvrc ilsvrc-val-nette224 --weights vit_tiny_patch16_224.augreg_in21k_ft_in1k.pth
    vitrel compare study_imagenet --jobs 2
    python -m tools.study.imagenet_weights flowers runs
    python -m tools.study.imagenet_weights pages

`prepare` writes the folder study_imagenet: links to the photographs, to the images of the evaluation and to the weights, and
two students' initial weights. The photographs are those of both data sets without ILSVRC's validation images; of these, 450 are
kept apart for the pilot (photographs/val), and no student is trained on them.

`flowers` is the second task: a linear classifier of the flowers' 36 classes on the features of every student at 224 px
(logistic regression on the training flowers, which every student has seen without labels), evaluated at other sizes and at
native shape as `vitrel evaluate` does. It writes an evaluation into runs/study_imagenet_flowers.

`pages` writes the tables and pictures of docs/studies/imagenet_weights.md from folders of results/study: imagenet
and imagenet_flowers, which hold these files of both folders, and imagenet_untrained, an evaluation of the initial weights (its
command is in results/README.md). The differences that the page's text names are in results/study/imagenet/differences.md.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitrel
from tools.study.curves import Curve, draw_protocols
from tools.study.pages import ROOT, Curves, fill_pages, side_of
from tools.study.results import read_rows, read_scores
from vitrel.cli.options import packaged
from vitrel.common.exits import reported, terminable
from vitrel.common.files import atomic_write
from vitrel.common.sizes import format_size
from vitrel.common.tables import markdown
from vitrel.compare.config import load_comparison
from vitrel.compare.models import trained_models
from vitrel.data import ImageSet, create_dataset
from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.run import at_sizes
from vitrel.evaluate.verdicts import Sample, aggregate, contrast, sample_of
from vitrel.weights.absolute_to_relative import absolute_to_relative

ARCHITECTURE = "vitrel_vit_ti16_absolute"
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation that the weights were trained with
APART = {"imagenette": 300, "flowers": 150}  # photographs for the pilot
FLOWER_SIZES = ((128, 128), (224, 224), (384, 384))  # pixels; at native shape, budgets of as many tokens
SIZES = ["64x64", "96x96", "128x128", "160x160", "224x224", "128x256", "320x224", "288x288", "384x384", "512x512"]
FIXED = {  # curves of the page, trained at 224 px
    ("absolute", "bicubic"): "absolute, kept",
    ("absolute-relearned", "bicubic"): "absolute, relearned",
    ("table", "geometric"): "table",
    ("cpb", "keep"): "cpb",
    ("log_decay", "keep"): "log_decay",
    ("rope_mixed", "none"): "rope_mixed",
    ("none", "none"): "none",
}
CONTROL = ("absolute-relearned", "bicubic")  # it starts where the other students start
CONTROL_SEVERAL = ("absolute-relearned-sizes", "bicubic")
SCALED = {(f"rope_mixed+{key}", "none"): f"rope_mixed, {key}" for key in ("linear", "ntk", "yarn", "log_n")}
SEVERAL = {(f"{label}-sizes", policy): name for (label, policy), name in FIXED.items()}
UNTRAINED = {  # the model as it was, and with the table that a student starts with
    ("vitrel_vit_ti16_absolute", "bicubic"): "as it was, not trained",
    ("vitrel_vit_ti16_table", "geometric"): "table fitted, not trained",
}
RESULTS = ROOT / "results" / "study"
FOLDERS = ("imagenet", "imagenet_untrained", "imagenet_flowers")
PAGE, DIFFERENCES = "docs/studies/imagenet_weights.md", RESULTS / "imagenet" / "differences.md"
Cells = Callable[[Curve, str], str]
FITTED = 64  # photographs to which the table is fitted


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit with a message and status 1 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("prepare", help="write the folder of photographs, images and initial weights").add_argument
    add("--imagenette", type=Path, required=True, help="folder with train/<class>/ and val/<class>/")
    add("--flowers", type=Path, required=True, help="folder with train/<class>/ and val/<class>/")
    add("--ilsvrc", type=Path, required=True, help="500 ILSVRC validation images, val/<WordNet ID>/")
    add("--weights", type=Path, required=True, help="the ViT-Tiny/16, of timm's names")
    add("--out", type=Path, default=Path("study_imagenet"))
    add = commands.add_parser("flowers", help="evaluate linear classifiers of flowers on the students' features").add_argument
    add("runs", type=Path, help="folder in which the comparison's folder is, e.g. runs")
    add("--config", type=Path, default=packaged()["study_imagenet"])
    add("--flowers", type=Path, default=Path("study_imagenet/flowers"))
    add("--out", type=Path, default=Path("runs/study_imagenet_flowers"))
    commands.add_parser("pages", help="write the study's page from the results")
    args = parser.parse_args(argv)
    with reported("the same command goes on"), terminable():
        if args.command == "prepare":
            prepare(args.imagenette, args.flowers, args.ilsvrc, args.weights, args.out)
        elif args.command == "pages":
            write_pages()
        else:
            evaluate_flowers(args.config, args.runs, args.flowers, args.out)


def prepare(imagenette: Path, flowers: Path, ilsvrc: Path, weights: Path, out: Path) -> None:
    """Write the folder `out`; FileNotFoundError for a missing source, FileExistsError if `out` exists."""
    for source in (imagenette / "train", imagenette / "val", flowers / "train", flowers / "val", ilsvrc / "val", weights):
        if not source.exists():
            raise FileNotFoundError(f"{source} does not exist")
    if out.exists():
        raise FileExistsError(f"{out} exists: remove it, or choose another folder with --out")
    validation = {path.stem for path in (ilsvrc / "val").glob("*/*")}
    sources = {"imagenette": [*imagenette.glob("*/*/*")], "flowers": [*(flowers / "train").glob("*/*")]}
    for name, paths in sources.items():
        images = sorted(path for path in paths if path.suffix.lower() in (".jpg", ".jpeg") and path.stem not in validation)
        random.Random(0).shuffle(images)
        for part, chosen in (("val", images[: APART[name]]), ("train", images[APART[name] :])):
            (folder := out / "photographs" / part / name).mkdir(parents=True)
            for path in chosen:
                (folder / f"{path.parent.name}-{path.name}").symlink_to(path.resolve())
            print(f"{len(chosen)} photographs of {name} in {folder}")
    (out / "ilsvrc-val").symlink_to(ilsvrc.resolve())
    (out / "flowers").symlink_to(flowers.resolve())
    (out / "weights.pth").symlink_to(weights.resolve())
    preprocessing = {"mean": HALF, "std": HALF, "crop_pct": 1.0}
    model = timm.create_model(ARCHITECTURE, pretrained_cfg_overlay=preprocessing)
    vitrel.load_pretrained(model, weights)
    table = absolute_to_relative(model.eval(), _photographs(out), "table")
    print(table.conversion)
    vitrel.save(table, out / "table.safetensors")
    with torch.no_grad():
        model.pos_embed.pos_embed.zero_()
    vitrel.save(model, out / "relearned.safetensors")


def _photographs(out: Path) -> torch.Tensor:
    """Return the images [n, 3, 224, 224] that the table is fitted to, drawn from the training photographs."""
    data = create_dataset(str(out / "photographs"), "train", (224, 224), mean=HALF, std=HALF)
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:FITTED]
    return torch.stack([data[i][0] for i in chosen.tolist()])


def evaluate_flowers(config: Path, runs: Path, flowers: Path, out: Path) -> None:
    """Evaluate the flower classifiers of all students of a comparison, and write the results into `out`."""
    how: dict[str, Any] = {"batch_size": 50, "attention_n": 0, "border_leak": False}
    models, protocols = flower_models(config, runs, flowers), ("scale", "native")
    title = "Flowers, linear classifiers"
    at_sizes(models, str(flowers), FLOWER_SIZES, out=out, title=title, protocols=protocols, policies="all", **how)


def flower_models(config: Path, runs: Path, flowers: Path) -> list[TrainedModel]:
    """Return every student that was trained with a classifier of the flowers, which is stored in its run's folder."""
    data = create_dataset(str(flowers), "train", (224, 224), mean=HALF, std=HALF)
    labels, models = torch.tensor(data.labels()), []
    for trained in trained_models(load_comparison(config, runs)[0]):
        if not any(trained.label == label for label, _ in FIXED | SEVERAL):
            continue  # an option of another student's weights
        stored = trained.path.parent / "flowers.pt"
        if not stored.exists():
            print(f"{trained.label}, seed {trained.seed}: features of {len(data)} flowers", flush=True)
            head = logistic_regression(features_of(trained.model, data), labels, len(data.classes))
            with atomic_write(stored) as part:
                torch.save(head.state_dict(), part)
        trained.model.reset_classifier(len(data.classes))
        trained.model.get_classifier().load_state_dict(torch.load(stored, weights_only=True))
        models.append(replace(trained, classes=tuple(data.classes)))
    return models


@torch.inference_mode()
def features_of(model: nn.Module, data: ImageSet, batch: int = 50) -> Tensor:
    """Return what the model's classifier sees of every image, [n, C]."""
    features = []
    for indices in torch.arange(len(data)).split(batch):
        images = torch.stack([data[i][0] for i in indices.tolist()])
        features.append(model.forward_head(model.forward_features(images), pre_logits=True))
    return torch.cat(features)


PENALTY = 1e-3  # of squared weights


def logistic_regression(features: Tensor, labels: Tensor, classes: int) -> nn.Linear:
    """Return the linear classifier of features [n, C] with the lowest cross-entropy plus PENALTY times the squared weights.

    The penalty is on the weights of features that are scaled to mean 0 and variance 1.
    """
    mean, std = features.double().mean(0), features.double().std(0) + 1e-6
    scaled = (features.double() - mean) / std
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(scaled @ weight.T + bias, labels) + PENALTY * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    head = nn.Linear(features.shape[1], classes)
    with torch.no_grad():
        head.weight.copy_(weight / std)
        head.bias.copy_(bias - (weight / std) @ mean)
    return head


class Evaluated:
    """The rows and predictions of an evaluation's folder."""

    def __init__(self, folder: Path) -> None:
        rows = read_rows(folder / "results.csv")
        self.curves, self.trained = Curves(rows, folder.name), rows[0]["train_size"]
        self.scores = {metric: read_scores(folder, rows, metric) for metric in ("top1", "top1_among")}

    def sample(self, curve: Curve, size: str, protocol: str, column: str) -> Sample:
        """Return the sample of a curve, of top1 or top1_among; ValueError if there is none."""
        return sample_of(self.curves.at(curve, size, protocol), self.scores[column], column)

    def cell(self, curve: Curve, size: str, protocol: str, column: str = "top1") -> str:
        """Return the mean over seeds of top1 or top1_among, ± half its 95 % interval over seeds and images."""
        sample = self.sample(curve, size, protocol, column)
        low, high = contrast([sample]).of_share()
        return f"{fmean(sample.means.values()):.1f} ±{(high - low) / 2:.1f}"

    def ahead(self, other: Curve, curve: Curve, size: str, column: str = "top1") -> str:
        """Return the difference in top-1 of a curve to another one in the scale protocol, ± half its 95 % interval."""
        found = contrast(*([self.sample(one, size, "scale", column)] for one in (curve, other)))
        return f"{found.mean:+.1f} ±{found.half():.1f}"


def table_of(cells: Cells, shown: Mapping[Curve, str], sizes: Sequence[str], trained: str) -> str:
    """Return a Markdown table of `cells(curve, size)`: a line for each curve, a column for each size."""
    head = ["", *(f"{side_of(size)} (trained)" if size == trained else side_of(size) for size in sizes)]
    return markdown(head, [[name, *(cells(curve, size) for size in sizes)] for curve, name in shown.items()]).rstrip()


def study_tables() -> tuple[dict[str, str], str]:
    """Return {name: table} of the page, and the text of DIFFERENCES, in Markdown."""
    imagenet, untrained, flowers = (Evaluated(RESULTS / name) for name in FOLDERS)
    everything, found = {**UNTRAINED, **FIXED, **SCALED}, {}
    text = (
        "# Differences to the absolute embedding learned again\n\nPoints of top-1 in the scale protocol, ± half the 95 % "
        "interval over seeds and images; at several sizes one seed.\n"
    )

    def top1(curve: Curve, size: str, column: str) -> str:
        return (untrained if curve in UNTRAINED else imagenet).cell(curve, size, "scale", column)

    for column, among, of in (("top1", "", "of 1,000 classes"), ("top1_among", "_among", "among the ten classes")):
        for name, curves, own, sizes in (
            ("scale", everything, FIXED | SCALED, "at 224 px"),
            ("several", SEVERAL, SEVERAL, "at 128 to 288 px"),
        ):
            found[name + among] = table_of(partial(top1, column=column), curves, SIZES, imagenet.trained)
            control = CONTROL if name == "scale" else CONTROL_SEVERAL
            others = {curve: called for curve, called in own.items() if curve != control}
            cells = partial(imagenet.ahead, control, column=column)
            text += f"\n## Trained {sizes}, {of}\n\n{table_of(cells, others, SIZES, imagenet.trained)}\n"
    both = FIXED | {curve: f"{name}, several sizes" for curve, name in SEVERAL.items()}
    flower_sizes = [format_size(size) for size in FLOWER_SIZES]
    found["flowers_scale"] = table_of(partial(flowers.cell, protocol="scale"), both, flower_sizes, flowers.trained)
    return found, text


def write_pages() -> None:
    """Fill the tables of the page, write DIFFERENCES, and draw the pictures."""
    tables, differences = study_tables()
    fill_pages(ROOT, {PAGE: [*tables.items()]})
    DIFFERENCES.write_text(differences, "utf-8")
    print(DIFFERENCES)
    rows = read_rows(RESULTS / "imagenet" / "results.csv")
    table = aggregate(rows, read_scores(RESULTS / "imagenet", rows, "top1"))
    several = [row | {"label": row["label"].removesuffix("-sizes")} for row in table if row["label"].endswith("-sizes")]
    recipes = {
        "trained at 224 px": [row for row in table if not row["label"].endswith("-sizes")],
        "at 128 to 288 px": several,
    }
    draw_protocols(recipes, {CONTROL: FIXED[CONTROL]} | FIXED, "ImageNet weights, used at other sizes", "imagenet_weights")


if __name__ == "__main__":
    main()
