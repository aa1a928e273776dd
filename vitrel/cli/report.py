"""Build report.html again from the files of an evaluation's folder, or compare two evaluations on the same images.

    vitrel report runs/quickstart
    vitrel report runs/a runs/b --out runs/a-b

Of one folder it reads results.csv, and predictions.npz, translation.csv and pictures.json.gz where they exist. One file, no
network: open it in any browser; the numbers of its figures are written into report.json beside it.

Of two folders it pairs the rows that match (label, or one label each; size, protocol, policy, seed), prints on how many images
only one of the two is right, the difference with its interval and McNemar's exact test, and writes them as compare.md and
compare.csv.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel report`."""
    parser.add_argument("folder", type=Path, help="of an evaluation, e.g. runs/quickstart")
    parser.add_argument("other", type=Path, nargs="?", help="of a second evaluation of the same images, to compare them")
    parser.add_argument("--out", "-o", type=Path, help="folder of the comparison; default the first")
    parser.add_argument("--title", default="", help="of the page; default the folder's name")
    parser.add_argument("--no-images", dest="images", action="store_false", help="leave out photographs of the data")


def run(args: argparse.Namespace) -> None:
    """Writes the page and prints its path, or writes and prints the comparison."""
    if args.other is not None:
        from vitrel.evaluate.pairs import write_comparison

        print(write_comparison(args.folder, args.other, args.out or args.folder))
        return
    if args.out is not None:
        raise ValueError("--out is the folder of a comparison: name two evaluations")
    from vitrel.evaluate.report.html import write_html

    print(write_html(args.folder, args.title, args.images))
