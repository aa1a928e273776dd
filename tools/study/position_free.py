"""Features that do not know where they are: an ImageNet ViT-Tiny/16 given other encodings, with and without the feature loss.

    python -m tools.study.position_free path/to/imagenette224/train path/to/ilsvrc-val-nette224/val vit_tiny.pth --out runs/free

For each encoding the model is first fitted, once, without training (`vitrel convert`). From there `vitrel train` trains one
student per seed with the recipe position_free.yaml, and another without its feature loss, on the same images in the same order.
A row of results/position_free/results.csv is one model, measured by `vitrel features` at its training size. Rows that the file
has are not made again. The tables of docs/studies/position_free.md are made of all rows.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch

from tools.study.pages import ROOT, fill_pages
from tools.study.results import add_row
from vitrel.cli import main as vitrel
from vitrel.common.tables import markdown

PAGE = "docs/studies/position_free.md"
RESULTS = ROOT / "results" / "position_free" / "results.csv"
MODEL, TEACHER = "vit_tiny_patch16_224", "vitrel_vit_ti16_absolute"  # the same model, of timm and at any size
ENCODINGS = ("alibi", "table", "rope_mixed", "none")
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
SIZE = 160  # training size in pixels
TRAINED_ON, FITTED_TO, IMAGES = 512, 64, 64  # images: of training, of the fit, for position


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
    if not (path := out / f"{encoding}.safetensors").exists():
        numbers = ["--n", FITTED_TO, "--size", SIZE]
        options = ["--weights", weights, "--position", encoding, "--data", data, *numbers, "--out", path]
        vitrel(["convert", MODEL, *map(str, options)])
    return path


def trained(start: Path, weights: Path, data: Path, loss: str, seed: int, out: Path) -> Path:
    """Train a student from the file `start`, and return its checkpoint."""
    teacher = {"teacher": TEACHER, "checkpoint": weights, "img_size": SIZE}
    options = [f"--model.objective.distillation.{key}={value}" for key, value in teacher.items()]
    options += ["--config=position_free", f"--model={start}", f"--data={data}", f"--size={SIZE}", f"--out={out}"]
    options += [f"--seed={seed}", f"--n-train={TRAINED_ON}", "--batch-size=8", "--data.workers=0", "--data.n_val=16"]
    options += ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    options += ["--model.objective.distillation.features=null"] if loss == "logits" else []
    vitrel(["train", *options])
    return out / "checkpoints" / "last.ckpt"


def measured(model: Sequence[str | Path], data: Path, out: Path) -> dict[str, float]:
    """Return what `vitrel features` measures of a model, at the training size and at twice the size."""
    numbers = ["--size", 2 * SIZE, "--images", IMAGES, "--train-images", 300, "--val-images", 200]
    vitrel(["features", *map(str, [*model, "--data", data, *numbers, "--out", out])])
    (position,) = pd.read_csv(out / "position.csv").to_dict("records")
    found = {name: round(value, 5) for name, value in position.items() if isinstance(value, float)}
    for row in pd.read_csv(out / "accuracy.csv").itertuples():
        found[f"{row.method}_{row.size.partition('x')[0]}"] = row.top1
    return found


def tables(results: Path) -> list[tuple[str, str]]:
    """Return (name, Markdown table) of what `vitrel features` measured: mean over seeds ± their standard deviation."""
    rows = pd.read_csv(results, keep_default_na=False)
    order = pd.Index(["absolute", *ENCODINGS]).get_indexer(rows.encoding) * 10 + pd.Index([*STAGES]).get_indexer(rows.loss)
    groups = [of for _, of in rows.assign(order=order).groupby("order")]

    def table(columns: Mapping[str, str], factor: float = 1.0, digits: int = 2) -> str:
        lines = []
        for of in groups:
            found = of[[*columns.values()]].astype(float) * factor
            spread = found.std() if len(of) > 1 else None
            cells = [
                f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread[name]:.{digits}f}")
                for name, mean in found.mean().items()
            ]
            lines.append([f"`{of.encoding.iloc[0]}`", STAGES[of.loss.iloc[0]], len(of), *cells])
        return markdown(["encoding", "model", "models", *columns], lines)

    accuracy = {f"{method}, {side} px": f"{method}_{side}" for side in (SIZE, 2 * SIZE) for method in ("k-NN", "linear")}
    return [("shares", table(SHARES, 100.0)), ("leaks", table(LEAKS)), ("accuracy", table(accuracy, digits=1))]


def main() -> None:
    """Train and measure what the results lack, and write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="class folders of photographs")
    parser.add_argument("val", type=Path, help="the same classes of ImageNet's validation set")
    parser.add_argument("weights", type=Path, help=f"those of {MODEL}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of the fitted models")
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=ENCODINGS)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = linked(args.train, args.val, args.out / "data")
    done = set()
    if RESULTS.exists():
        done = {(row.encoding, row.loss, str(row.seed)) for row in pd.read_csv(RESULTS, keep_default_na=False).itertuples()}

    def measure(model: Callable[[], Sequence[str | Path]], encoding: str, loss: str, seed: str = "") -> None:
        if (key := (encoding, loss, seed)) in done:
            return
        start, about = time.process_time(), {"encoding": encoding, "loss": loss, "seed": seed, "size": SIZE}
        add_row(RESULTS, about | measured(model(), data, args.out / "_".join(filter(None, key))), start)
        done.add(key)

    measure(lambda: [TEACHER, "--weights", args.weights, "--img-size", str(SIZE)], "absolute", "teacher")
    for seed, encoding in product(map(str, args.seeds), args.encodings):
        start = fitted(args.weights, data, encoding, args.out)
        measure(lambda start=start: [start], encoding, "fitted")
        for loss in args.losses:
            run = args.out / f"{encoding}_{loss}_{seed}"
            train = partial(trained, start, args.weights, data, loss, int(seed), run)
            measure(lambda train=train: [train()], encoding, loss, seed)
    fill_pages(ROOT, {PAGE: tables(RESULTS)})


if __name__ == "__main__":
    main()
