"""Build report.html again from the files of an evaluation's folder, or compare two evaluations on the same images.

    vitrel report runs/quickstart
    vitrel report runs/a runs/b --out runs/a-b

With one folder, the report is made from results.csv, and from predictions.npz, translation.csv and pictures.json.gz where these
exist. It is one file that works offline in any browser; report.json beside it has the numbers of its figures.

With two folders, matching rows are paired: same size, protocol, policy and seed, and same label or a single label each. For
each pair the command prints the number of images that only one of the two classifies correctly, the difference in top-1 with
its interval, and which is better, and writes them as compare.md and compare.csv.
"""

import argparse
from pathlib import Path

from vitrel.cli.options import add_margin, check_files
from vitrel.common.extras import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel report`."""
    parser.add_argument("folder", type=Path, help="folder of an evaluation, e.g. runs/quickstart")
    parser.add_argument(
        "other", type=Path, nargs="?", help="folder of a second evaluation of the same images, to compare the two"
    )
    parser.add_argument("--out", "-o", type=Path, help="folder for the comparison of two; default the first")
    parser.add_argument("--title", default="", help="title of the page; default the folder's name")
    add_margin(parser)
    parser.add_argument("--no-images", dest="images", action="store_false", help="no photographs of the data in report.html")


def run(args: argparse.Namespace) -> None:
    """Write the report and print its path, or with two folders write and print the comparison."""
    require("pandas", *(["vl_convert"] if args.other is None else []))
    if args.other is None and args.out is not None:
        raise ValueError("--out is for the comparison of two evaluations: give a second folder, or leave --out out")
    tables = [folder / "results.csv" for folder in (args.folder, args.other) if folder is not None]
    check_files(*tables, fix="give the folder of an evaluation, such as runs/quickstart")
    if args.other is not None:
        from vitrel.evaluate.results.text import write_comparison

        print(write_comparison(args.folder, args.other, args.out or args.folder, args.margin))
        return
    from vitrel.evaluate.page import write_html

    print(write_html(args.folder, args.title, args.images, args.margin))
