"""Features that do not know where they are: an ImageNet ViT-Tiny/16 given other encodings, with and without the feature loss.

    python -m tools.study.position_free imagenette224/train ilsvrc-val-nette224/val camvid vit_tiny.pth --out runs/free

For each encoding the model is first fitted, once, without training (`vitrel convert`). From there `vitrel train` trains one
student per seed with the recipe position_free.yaml, and another without its feature loss, on the same images in the same order.
An encoding with the suffix _bare is one without the class token, whose head sees the mean of the patches. A row of
results/position_free/results.csv is one model, measured as `vitrel features` does at its training size, and by a linear head on
its patch tokens that learns street scenes. Rows that the file has are not made again. The tables of
docs/studies/position_free.md are made of all rows.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.study.pages import ROOT, fill_pages
from tools.study.results import add_row
from vitrel import load, save
from vitrel.cli import main as vitrel
from vitrel.common.tables import markdown
from vitrel.data import create_dataset
from vitrel.data.readers.splits import Split
from vitrel.evaluate.checkpoint import TrainedModel, load_checkpoint, load_model
from vitrel.evaluate.frozen import frozen_rows, linear_probe
from vitrel.evaluate.images import Images, scale
from vitrel.inspect.features import measure_features, patch_features
from vitrel.models.config import config_of
from vitrel.models.vit import ViT
from vitrel.tasks import segmentation
from vitrel.train.objective import Objective

PAGE = "docs/studies/position_free.md"
RESULTS = ROOT / "results" / "position_free" / "results.csv"
MODEL, TEACHER = "vit_tiny_patch16_224", "vitrel_vit_ti16_absolute"  # the same model, of timm and at any size
ENCODINGS, BARE = ("alibi", "table", "rope_mixed", "none"), "_bare"
WITHOUT = tuple(f"{encoding}{BARE}" for encoding in ENCODINGS)
LOSSES = ("features", "logits")
STAGES = {
    "teacher": "the teacher",
    "fitted": "fitted, not trained",
    "logits": "trained on logits alone",
    "features": "and on features",
}
SHARES = {"photographs, %": "share", "one color, %": "share_of_colors", "shuffled patches, %": "share_of_textures"}
LEAKS = {
    "row": "leak_row",
    "column": "leak_column",
    "row, of colors": "leak_row_of_colors",
    "column, of colors": "leak_column_of_colors",
    "equivariance": "equivariance",
    "agreement with 320 px": "agreement_320x320",
}
ACCURACY = {
    "k-NN, 160 px": "k-NN_160",
    "linear, 160 px": "linear_160",
    "k-NN, 320 px": "k-NN_320",
    "linear, 320 px": "linear_320",
    "mIoU": "miou",
}
COMPARED = SHARES | {name: ACCURACY[name] for name in ("k-NN, 160 px", "k-NN, 320 px", "mIoU")}
SIZE, SCENE = 160, (160, 208)  # of training, and of street scenes (h, w), in pixels
TRAINED_ON, FITTED_TO, IMAGES, SCENES = 512, 64, 64, 100  # images: of training, of the fit, for position, of street scenes
PROBED = 300, 200  # images for k-NN and the linear probe: of training, of evaluation


def linked(train: Path, val: Path, folder: Path) -> Path:
    """Return a folder of links to the class folders of training and evaluation, which may be named by WordNet IDs alone."""
    for of_class in sorted(train.iterdir()):
        sources = {"train": of_class, "val": val / of_class.name.partition("_")[0]}
        for split, source in sources.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            if not (place := folder / split / of_class.name).exists():
                place.symlink_to(source.resolve())
    return folder


def fitted(weights: Path, data: Path, encoding: str, out: Path) -> Path:
    """Return a file of the model with another encoding, fitted to photographs, which is made if it is not there."""
    if (path := out / f"{encoding}.safetensors").exists():
        return path
    if encoding.endswith(BARE):
        whole = load(fitted(weights, data, encoding.removesuffix(BARE), out))
        bare = config_of(whole).build(class_token=False, global_pool="avg")
        for name, value in bare.state_dict().items():
            value.copy_(whole.state_dict()[name][: len(value)])  # of a table without the last rows, which are the class token's
        save(bare, path)
    else:
        numbers = ["--n", FITTED_TO, "--size", SIZE]
        options = ["--weights", weights, "--position", encoding, "--data", data, *numbers, "--out", path]
        vitrel(["convert", MODEL, *map(str, options)])
    return path


def student(start: Path, weights: Path, data: Path, loss: str, seed: int, out: Path) -> TrainedModel:
    """Train a student from the file `start`."""
    teacher = {"teacher": TEACHER, "checkpoint": weights, "img_size": SIZE}
    options = [f"--model.objective.distillation.{key}={value}" for key, value in teacher.items()]
    options += ["--config=position_free", f"--model={start}", f"--data={data}", f"--size={SIZE}", f"--out={out}"]
    options += [f"--seed={seed}", f"--n-train={TRAINED_ON}", "--batch-size=8", "--data.workers=0", "--data.n_val=16"]
    options += ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    options += ["--model.objective.distillation.features=null"] if loss == "logits" else []
    vitrel(["train", *options])
    return load_checkpoint(out / "checkpoints" / "last.ckpt")


@cache
def scenes(camvid: Path, split: Split) -> tuple[Tensor, list[Tensor], int]:
    """Return images [n, 3, h, w] at the size SCENE, masks [H, W] at their own, and the number of classes."""
    half = (0.5, 0.5, 0.5)
    data = create_dataset(str(camvid), split, SCENE, task="segmentation", n=SCENES, mean=half, std=half)
    images, masks = zip(*(data[at] for at in range(len(data))), strict=True)
    return torch.stack(images), [torch.as_tensor(mask).long() for mask in masks], len(data.classes)


def miou(model: ViT, camvid: Path) -> float:
    """Return the mIoU, in percent, of a linear head on frozen patch tokens.

    It learns the class that most pixels of a patch have; its logits are interpolated to the pixels of a mask.
    """
    (bank, masks, classes), (queries, truth, _) = scenes(camvid, "train"), scenes(camvid, "val")
    bank, queries = (torch.cat([patch_features(model, part)[0] for part in images.split(32)]) for images in (bank, queries))
    counts = torch.stack([
        F.adaptive_avg_pool2d(F.one_hot(mask.clamp(max=classes), classes + 1).movedim(-1, 0).float(), bank.shape[2:])
        for mask in masks
    ])  # fmt: skip
    known = counts.argmax(1).where(counts.argmax(1) < classes, -100)
    # by place first: the probe leaves out every fifth row for its weight decay, which then are those of every fifth image
    rows, asked = (maps.permute(2, 3, 0, 1).flatten(0, 2) for maps in (bank, queries))
    logits = linear_probe(rows, known.permute(1, 2, 0).flatten(), asked, classes)
    pixels = segmentation.TASK.learning(classes, Objective(), 0.0)
    pixels.update(logits.unflatten(0, (*queries.shape[2:], len(queries))).permute(2, 3, 0, 1), truth)
    return round(100 * float(pixels.values["val/miou"].compute()), 2)


def measured(trained: TrainedModel, data: Path, camvid: Path) -> dict[str, float]:
    """Return position in the features at the training size, their agreement with twice the size, accuracy at both, and mIoU."""
    view = scale(trained, (2 * SIZE, 2 * SIZE))
    images = torch.cat([pixels for pixels, _ in Images(str(data), view, n=IMAGES).batches(view)])
    (row,) = measure_features(trained.model, images, SIZE, sizes=[2 * SIZE])
    found = {name: round(value, 5) for name, value in row.to_dict().items() if isinstance(value, float)}
    for accuracy in frozen_rows(trained, str(data), [(SIZE, SIZE), (2 * SIZE, 2 * SIZE)], *PROBED):
        found[f"{accuracy['method']}_{accuracy['size'].partition('x')[0]}"] = accuracy["top1"]
    return found | {"miou": miou(trained.model, camvid)}


def tables(results: Path) -> list[tuple[str, str]]:
    """Return (name, Markdown table) of what was measured: mean over seeds ± their standard deviation."""
    rows = pd.read_csv(results, keep_default_na=False)
    rows[[*SHARES.values()]] *= 100
    rows["encoding"] = pd.Categorical(rows.encoding, ["absolute", *ENCODINGS, *WITHOUT])
    rows["loss"] = pd.Categorical(rows.loss, STAGES)
    bare = rows.encoding.str.endswith(BARE)

    def cells(of: pd.DataFrame, digits: int) -> list[str]:
        spread = of.std()
        return [
            f"{mean:.{digits}f}" + (f" ± {spread[name]:.{digits}f}" if len(of) > 1 else "") for name, mean in of.mean().items()
        ]

    def table(of: pd.DataFrame, columns: Mapping[str, str], digits: int = 2) -> str:
        lines = [
            [f"`{encoding.removesuffix(BARE)}`", STAGES[loss], len(group), *cells(group[[*columns.values()]], digits)]
            for (encoding, loss), group in of.groupby(["encoding", "loss"], observed=True)
        ]
        return markdown(["encoding", "model", "models", *columns], lines)

    gains = []
    for encoding, of in rows[~bare].groupby("encoding", observed=True):
        by_loss = {loss: group.set_index("seed")[[*COMPARED.values()]] for loss, group in of.groupby("loss", observed=True)}
        if by_loss.keys() >= {*LOSSES}:
            gains.append([f"`{encoding}`", *cells((by_loss["features"] - by_loss["logits"]).dropna(), 2)])
    return [
        ("shares", table(rows[~bare], SHARES)),
        ("leaks", table(rows[~bare], LEAKS)),
        ("accuracy", table(rows[~bare], ACCURACY, 1)),
        ("gains", markdown(["encoding", *COMPARED], gains)),
        ("bare", table(rows[bare], COMPARED)),
    ]


def main() -> None:
    """Train and measure what the results lack, and write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="class folders of photographs")
    parser.add_argument("val", type=Path, help="the same classes of ImageNet's validation set")
    parser.add_argument("camvid", type=Path, help="street scenes: images, masks and classes.txt")
    parser.add_argument("weights", type=Path, help=f"those of {MODEL}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of the fitted models")
    parser.add_argument("--encodings", nargs="+", choices=[*ENCODINGS, *WITHOUT], default=ENCODINGS)
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=LOSSES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = linked(args.train, args.val, args.out / "data")
    done = set()
    if RESULTS.exists():
        done = {(row.encoding, row.loss, str(row.seed)) for row in pd.read_csv(RESULTS, keep_default_na=False).itertuples()}

    def measure(model: Callable[[], TrainedModel], encoding: str, loss: str, seed: str = "") -> None:
        if (key := (encoding, loss, seed)) in done:
            return
        start, about = time.process_time(), {"encoding": encoding, "loss": loss, "seed": seed, "size": SIZE}
        add_row(RESULTS, about | measured(model(), data, args.camvid), start)
        done.add(key)

    measure(lambda: load_model(TEACHER, args.weights, img_size=(SIZE, SIZE)), "absolute", "teacher")
    for seed, encoding in product(args.seeds, args.encodings):
        start = fitted(args.weights, data, encoding, args.out)
        measure(partial(load_checkpoint, start), encoding, "fitted")
        for loss in args.losses:
            run = args.out / f"{encoding}_{loss}_{seed}"
            measure(lambda options=(start, args.weights, data, loss, seed, run): student(*options), encoding, loss, str(seed))
    fill_pages(ROOT, {PAGE: tables(RESULTS)})


if __name__ == "__main__":
    main()
