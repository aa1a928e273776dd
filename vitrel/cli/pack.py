"""Pack a folder of images into tar shards, which are read sequentially instead of file by file; or verify shards.

    vitrel pack imagenet imagenet-shards --workers 8
    vitrel pack imagenet imagenet-256 --resize 256 --shard-size 200MB --workers 8
    vitrel pack --verify imagenet-shards

The shards have the format of WebDataset. Files are copied unchanged unless --resize is given, in shuffled order; every image is
decoded once as a check unless --no-check is given. `index.json` is written last: a folder without it is incomplete.
"""

import argparse
import re
import sys
from pathlib import Path

from vitrel.cli.options import count
from vitrel.common.commands import command_line
from vitrel.common.extras import require

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel pack`."""
    add = parser.add_argument
    add("source", type=Path, nargs="?", help="folder with train/<class>/ and val/<class>/")
    add("out", type=Path, nargs="?", help="output folder, new or empty")
    add("--verify", type=Path, metavar="OUT", help="instead of packing, check the shards of OUT by the checksums of its index")
    shard = parser.add_mutually_exclusive_group()
    shard.add_argument("--shard-size", type=_bytes, default=100e6, help="bytes after which a shard ends (default 100MB)")
    shard.add_argument("--images-per-shard", type=count, help="or number of images after which it ends")
    add("--resize", type=count, metavar="SHORT_SIDE", help="downscale larger images to this shorter side in pixels, as JPEG")
    add("--splits", nargs="+", choices=("train", "val"), help="splits to pack (default: those that SOURCE has)")
    add("--seed", type=int, default=0, help="seed of the order of images (default 0)")
    add("--no-check", dest="check", action="store_false", help="pack without decoding every image")
    add("--max-pixels", type=count, help="raise an error for larger images, before decoding")
    add("--workers", type=int, default=0, help="processes that read and check images (default 0: the main process)")
    add("--follow-links", action="store_true", help="also search folders that are linked inside class folders")


def run(args: argparse.Namespace) -> None:
    """Pack or verify, as the options say; usage error without the folders."""
    if args.verify is None and (args.source is None or args.out is None):
        args.usage_error("give SOURCE and OUT, or --verify OUT")
    require("webdataset")
    if args.verify is not None:
        _verify(args.verify)
        return
    if not args.source.is_dir():
        raise FileNotFoundError(f"no folder {args.source}: give one with train/<class>/ and val/<class>/")
    from vitrel.data.decode import MAX_PIXELS
    from vitrel.data.shards import pack

    index = pack(
        args.source, args.out, args.splits, shard_bytes=args.shard_size, images_per_shard=args.images_per_shard,
        short_side=args.resize, seed=args.seed, check=args.check, max_pixels=args.max_pixels or MAX_PIXELS,
        workers=args.workers, follow_links=args.follow_links, advance=_progress,
    )  # fmt: skip
    for split, content in index["splits"].items():
        total = sum(shard["bytes"] for shard in content["shards"])
        print(f"{split}: {sum(content['counts'])} images in {len(content['shards'])} shards, {total / 1e6:.1f} MB")
    print(f"{len(index['classes'])} classes; written to {args.out}; to train on it:")
    print(f"  {command_line('train', '--data', args.out)}")


def _verify(root: Path) -> None:
    """Check the checksums of all shards in a folder and print a line per split; ValueError where one differs."""
    from vitrel.data import Prepare, Shards
    from vitrel.data.shards import shard_index

    for split in shard_index(root)["splits"]:
        shards = Shards(root, split, Prepare((1, 1), (0.0,), (1.0,)))
        shards.verify()
        print(f"{split}: {len(shards)} images in {len(shards.shards)} shards are as they were packed")


def _progress(split: str, done: int, total: int) -> None:
    if done % 1000 == 0 or done == total:
        print(f"{split}: {done} of {total}", file=sys.stderr)


def _bytes(text: str) -> float:
    """Parse a number of bytes such as 100MB, as a type for argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B|)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 100MB, 1.5GB or a number of bytes")
    return float(match[1]) * UNITS[match[2]]
