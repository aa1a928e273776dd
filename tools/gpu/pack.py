"""Folders that a machine without a network is given: CamVid and weights for `study`, wheels and photographs for the others."""

import argparse
import subprocess
import sys
import zipfile
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors.torch import save_file

WHEELS = ("pytest", "pytest-xdist", "pytest-timeout", "execnet", "iniconfig", "pluggy", "pygments")  # packaging comes with timm
PYTHON = "3.12"  # of that machine
PHOTOGRAPHS = 1200


def main(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Write what the options name into the folder and print its size."""
    if args.folder is None or not (args.camvid or args.weights or args.images):
        parser.error("pack needs a folder to write, and --camvid with --weights, or --images, to read")
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.camvid:
        archive(args.folder / "camvid.zip", args.camvid, sorted(args.camvid.glob("*/*/*.[jp][pn]g")))
    if args.weights:
        half(args.weights, args.folder / "vit_tiny.safetensors")
    if args.images:
        archive(args.folder / "photographs.zip", args.images, chosen(args.images))
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
        subprocess.run([*pip, "--dest", args.folder / "wheels", *WHEELS], check=True)
    for path in sorted(path for path in args.folder.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")


def archive(path: Path, folder: Path, files: list[Path]) -> None:
    """Write files of a folder into an archive, as they are."""
    if not files:
        raise SystemExit(f"{folder} holds no images where they are looked for")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for file in files:
            target.write(file, file.relative_to(folder))


def chosen(folder: Path) -> list[Path]:
    """Return photographs of the class folders in train/, in turns, and a few of val/, which a training evaluates."""
    found = []
    for split, most in (("train", PHOTOGRAPHS), ("val", 40)):
        classes = [sorted(path.glob("*.[Jj]*")) for path in sorted((folder / split).iterdir()) if path.is_dir()]
        found += [file for row in zip_longest(*classes) for file in row if file][:most]
    return found


def half(weights: Path, path: Path) -> None:
    """Write a state dict in half precision."""
    state = torch.load(weights, weights_only=True)
    save_file({name: value.half().contiguous() for name, value in state.items()}, path)
