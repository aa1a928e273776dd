"""Build report.html again from the files of an evaluation's folder, without running a model.

    vitrel report runs/quickstart

Reads results.csv, and per_class.csv, translation.csv, predictions.npz and pictures.json.gz where they exist. One file, no
network: open it in any browser. The numbers of its figures are written into report.json beside it.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel report`."""
    parser.add_argument("folder", type=Path, help="of an evaluation, e.g. runs/quickstart")
    parser.add_argument("--title", default="", help="of the page; default the folder's name")
    parser.add_argument("--no-images", dest="images", action="store_false", help="leave out photographs of the data")


def run(args: argparse.Namespace) -> None:
    """Writes the page and prints its path."""
    from vitrel.evaluate.report.html import write_html

    print(write_html(args.folder, args.title, args.images))
