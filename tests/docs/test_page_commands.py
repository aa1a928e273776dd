"""The `vitrel` commands of README and the pages run, at small sizes, in a folder with the data and weights that they name."""

import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from test_page_examples import COMMANDS, PAGES, blocks, commands, small_models

import vitrel
from helpers import each
from helpers.pictures import write_classes
from helpers.runs import in_child, status
from helpers.timm_peers import write_to_cache
from vitrel import cli
from vitrel.cli.train import _without, expanded
from vitrel.evaluate import run as evaluation
from vitrel.train import run

# Commands of hours or of packages that may be missing, and where they run at a small size.
ELSEWHERE = {
    "compare ": "comparisons: tests/compare and tests/cli/test_cli_compare.py; the quickstart on few images: .ci/run",
    "train --config imagenet_": "recipes, two updates each: tests/train",
    "train --config fixres_finetune": "the same",
    "train --data flowers --trainer.logger": "loggers: tests/train",
    "export runs/flowers --format onnx": "tests/cli/test_cli_export.py; of any size: tests/models/test_export_formats.py",
    "convert runs/flowers --push": "uploads, to a folder: tests/models/test_hub.py",
}
VIT = "vit_tiny_patch16_224"
FLOWERS = ("flowers", "photographs", "folder", "path/to/folder")
SWIN = {"depths": (1,), "embed_dim": 24, "num_heads": (1,)}
DINO = {"depth": 1, "embed_dim": 64, "num_heads": 1}
SMALL = {
    VIT: {"depth": 1, "embed_dim": 48},
    "vit_small_patch16_dinov3": DINO,
    "vit_small_patch14_dinov2": DINO,
    "swin_tiny_patch4_window7_224": SWIN,
    "vitrel_swin_t": SWIN,
}
PORTS = """
import timm

def build_model(depth=4):
    return timm.create_model("test_vit", depth=depth // 4)

def port():
    return timm.create_model("vit_small_patch16_dinov3")
"""
ONE_EPOCH = "--epochs 1 --data.workers 0"
EIGHT = f"--size 64 --n-train 8 --batch-size 8 {ONE_EPOCH}"
FEW = "--n 4 --attention-n 2 --workers 0"
SHORT = {  # {beginning of a command: what makes it short}
    "train --import": f"'--model.model_args={{depth: 1}}' --n-train 8 --batch-size 8 --data.n_val 4 {ONE_EPOCH}",
    "train --task segmentation": f"--size 32x48 --batch-size 4 {ONE_EPOCH}",
    "train --model vit_tiny_patch16_224 --pretrained --data flowers --out runs/native": f"--size 16t {ONE_EPOCH}",
    "train --model vit_tiny_patch16_224 --pretrained --position": f"{EIGHT} --fit 4",
    "train": EIGHT,
    "evaluate runs/flowers runs/table --data flowers --size 28": FEW,
    "evaluate": f"{FEW} --no-report",
    "check my_package.models:build_model --model-args": "--checks batch axes dtype",
    "check my_package.models:port": "--checks like rotation",
    "predict": "--workers 0",
    "features vit_tiny_patch16_224": "--images 4 --layers 0 -1",
    "features": "--images 4 --train-images 8 --val-images 4",
    "convert vit_tiny_patch16_224": "--n 4 --size 64",
}


@pytest.fixture
def folder(tmp_path_factory, monkeypatch):
    """A folder with everything that the commands name: images, masks, weights, modules, and a cache of timm's weights."""
    small_models(monkeypatch, SMALL)
    folder = tmp_path_factory.mktemp("user")
    for name in FLOWERS:
        for split in ("train", "val"):
            write_classes(folder / name / split, ("rose", "tulip"), [f"{i}.jpg" for i in range(4)])
    several = [
        f"flowers/{split}/{kind}/{i}.jpg,{kind}{';car' * (i % 2)},{split}"
        for split in ("train", "val")
        for kind in ("rose", "tulip")
        for i in range(4)
    ]
    (folder / "streets.csv").write_text("\n".join(("path,label,split", *several)))
    write_classes(folder / "imagenet" / "val", [f"{i:03}" for i in range(1000)], ["0.jpg"], (8, 8))
    for split in ("train", "val"):
        for i in range(4):
            for kind, pixels in (("images", np.random.default_rng(i).integers(0, 256, (48, 64, 3))), ("masks", np.eye(48, 64))):
                (folder / "camvid" / kind / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / "camvid" / kind / split / f"{i}.png")
    (folder / "camvid" / "classes.txt").write_text("sky\nroad\n")
    torch.manual_seed(0)
    vit = timm.create_model(VIT).state_dict()
    for name in ("vit.pth", "vit_tiny.pth", "weights.pth"):
        torch.save(vit, folder / name)
    torch.save(timm.create_model("swin_tiny_patch4_window7_224").state_dict(), folder / "swin_t.pth")
    torch.save(timm.create_model("vit_small_patch14_dinov2").state_dict(), folder / "dinov2_vits14.pth")
    vitrel.save(timm.create_model("vitrel_swin_t"), folder / "swin.safetensors")
    write_to_cache(folder / "hub", VIT, vit)
    (folder / "my_package").mkdir()
    (folder / "my_package" / "models.py").write_text(PORTS)
    [code] = blocks("docs/how_to/write_an_encoding.md", "python")
    (folder / "linear_decay.py").write_text(code)
    return folder


def short(argv):
    """Return a command with two sizes of a quarter (features: a half, since they are shifted by two patches) and few images."""
    less = 2 if argv[0] == "features" else 4 if argv[0] in ("evaluate", "train") else 1
    sizes = [bool(re.match(r"[\d\[x]|--data.train_sizes|--model.objective", word)) for word in argv]
    argv = [
        re.sub(r"\d{3}", lambda n: str(int(n[0]) // less), word) if size else word
        for word, size in zip(argv, sizes, strict=True)
    ]
    if "--size" in argv:
        first = argv.index("--size") + 1
        rest = next((i for i in range(first, len(argv)) if argv[i].startswith("-")), len(argv))
        argv[first + 2 : rest] = []
    how = next((text for start, text in SHORT.items() if shlex.join(argv).startswith(start)), "")
    return [*argv, *shlex.split(how)]


def ended_as(argv):
    """Return the exit status of a command; what it writes replaces a link to what an earlier page wrote."""
    for option in ("--out", "--trainer.default_root_dir"):
        if option in argv and (out := Path(argv[argv.index(option) + 1])).is_symlink():
            out.unlink()
    try:
        return cli.main(argv)
    except SystemExit as ended:
        return ended.code


def run_all(folder, pages):
    """Run the commands of each page in a folder of its own, which has the runs that README's commands trained."""
    sys.path.insert(0, str(folder))
    done = set()
    for page in sorted(PAGES, key="README.md".__ne__):
        here = pages / page.replace("/", "_")
        (here / "runs").mkdir(parents=True)
        for file in folder.iterdir():
            (here / file.name).symlink_to(file)
        if done:  # the report of one evaluation is enough
            evaluation.write = lambda folder, *given: folder / "report.html"
            for name, trained in (("flowers", "flowers"), ("a", "flowers"), ("absolute", "flowers"), ("table", "table")):
                (here / "runs" / name).symlink_to(pages / "README.md" / "runs" / trained)
        os.chdir(here)
        for argv in commands(page):
            line = shlex.join(argv)
            if line not in done and not line.startswith(tuple(ELSEWHERE)):
                done.add(line)
                print(f"{page}: vitrel {shlex.join(short(argv))}")
                assert ended_as(short(argv)) in (0, None), f"{page}: vitrel {line}"


@pytest.mark.slow(seconds=40)
def test_commands_of_the_pages_run(folder, tmp_path, monkeypatch):
    """In a process of its own, since a page's encoding is registered, and its module imported by later commands."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    assert status(in_child([], main=lambda _: run_all(folder, tmp_path))) == 0


@pytest.mark.slow
@each("line", [line for line in COMMANDS if line.startswith(tuple(ELSEWHERE)) and line.startswith("train")])
def test_training_that_does_not_run_here_is_parsed(line, capsys, monkeypatch, tmp_path):
    """By Lightning's own parser, which prints the whole configuration and ends."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(["fit", *_without("--import", expanded(COMMANDS[line][1:])), "--print_config"])
    printed = capsys.readouterr().out
    assert not ended.value.code and "data:" in printed and "trainer:" in printed
