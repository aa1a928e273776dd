"""The study from ImageNet weights: what `vitrel compare configs/study_imagenet.yaml` needs besides the configuration.

    python -m tools.study.imagenet_weights prepare --imagenette imagenette224 --flowers flowers256 \
        --ilsvrc ilsvrc-val-nette224 --weights vit_tiny_patch16_224.augreg_in21k_ft_in1k.pth
    vitrel compare configs/study_imagenet.yaml --jobs 2

`prepare` writes the folder study_imagenet: links to the photographs, to the images of the evaluation and to the weights, and
two students' initial weights. The photographs are those of both data sets without ILSVRC's validation images; of these, 450 are
kept apart for the pilot (photographs/val), and no student is trained on them.
"""

import argparse
import random
from pathlib import Path

import timm
import torch

import vitrel
from vitrel.convert.absolute_to_relative import absolute_to_relative
from vitrel.data import Folder, Prepare
from vitrel.exits import reported

ARCHITECTURE = "vitrel_vit_ti16_absolute"
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation that the weights were trained with
APART = {"imagenette": 300, "flowers": 150}  # photographs for the pilot
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
    args = parser.parse_args(argv)
    with reported("the same command starts again"):
        prepare(args.imagenette, args.flowers, args.ilsvrc, args.weights, args.out)


def prepare(imagenette: Path, flowers: Path, ilsvrc: Path, weights: Path, out: Path) -> None:
    """Write the folder `out`; FileNotFoundError for a missing source, FileExistsError if `out` exists."""
    for source in (imagenette / "train", imagenette / "val", flowers / "train", flowers / "val", ilsvrc / "val", weights):
        if not source.exists():
            raise FileNotFoundError(f"{source} does not exist")
    if out.exists():
        raise FileExistsError(f"{out} exists: remove it, or choose another folder with --out")
    validation = {path.name.split(".")[0] for path in (ilsvrc / "val").glob("*/*")}
    sources = {"imagenette": [*imagenette.glob("*/*/*")], "flowers": [*(flowers / "train").glob("*/*")]}
    for name, paths in sources.items():
        images = sorted(path for path in paths if path.suffix.lower() in (".jpg", ".jpeg") and not _known(path, validation))
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


def _known(path: Path, validation: set[str]) -> bool:
    return path.name.split(".")[0] in validation or "ILSVRC2012_val" in path.name


def _photographs(out: Path) -> torch.Tensor:
    """The images [n, 3, 224, 224] that the table is fitted to, drawn from the training photographs."""
    data = Folder(out / "photographs", "train", Prepare((224, 224), HALF, HALF))
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:FITTED]
    return torch.stack([data[i][0] for i in chosen.tolist()])


if __name__ == "__main__":
    main()
