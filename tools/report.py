"""Builds report.html again from the files of an evaluation folder, without running a model.

    python tools/report.py runs/quickstart

Reads results.csv, and per_class.csv, translation.csv and pictures.json.gz where they exist. One file, no network: open it
in any browser.
"""

import argparse
from pathlib import Path

from vitrel.command_line import reported, terminable
from vitrel.evaluate.report.html import write_html


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="of an evaluation, e.g. runs/quickstart")
    parser.add_argument("--title", default="", help="of the page; default the folder's name")
    args = parser.parse_args(argv)
    with reported(), terminable():
        print(write_html(args.folder, args.title))


if __name__ == "__main__":
    main()
