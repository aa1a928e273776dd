"""Writes the tables and pictures of the study on photographs, docs/study.md and README.md, from the rows of its evaluations.

python tools/study.py            # into the pages
python tools/study.py --check    # write nothing; fail where a page is not what the results give
"""

import argparse
import sys
from pathlib import Path

from vitrel.evaluate.guide import fill
from vitrel.evaluate.study import headline, kept_beside, study_figure, study_tables

ROOT = Path(__file__).parent.parent
DATA = ("imagenette224", "flowers256")
CURVES = {  # of README's table; all are in those of the page
    ("absolute", "bicubic"): "absolute, interpolated",
    ("table", "bicubic"): "table, bicubic",
    ("table", "clip"): "table, clipped",
    ("log_decay", "keep"): "log_decay",
    ("rope_mixed", "none"): "rope_mixed",
    ("rope_mixed+yarn", "none"): "rope_mixed, yarn",
    ("swin", "keep"): "Swin, window kept",
    ("swin", "rescale+geometric"): "Swin, window rescaled",
}
DRAWN = {curve: name for curve, name in CURVES.items() if curve != ("table", "clip")}  # as many as there are colours
PLACES = (("64x64", "scale"), ("128x128", "scale"), ("192x192", "scale"), ("128x128", "canvas"))

AWAY = (("48x48", "scale"), ("128x128", "scale"), ("192x192", "scale"), ("128x128", "canvas"))


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is not what the results give")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "study", help="folder with one of each data set")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    args = parser.parse_args(argv)
    try:
        tables = study_tables(args.results, DATA)
        tables.append(("kept", kept_beside(args.results, DATA, CURVES, AWAY)))
        pretrained = (args.results / "pretrained" / "table.md").read_text("utf-8").replace("## flowers: ", "### ").rstrip()
        tables.append(("pretrained", pretrained))
        pages = {"docs/study.md": tables, "README.md": [("study", headline(args.results, DATA, CURVES, PLACES))]}
        for name, found in pages.items():
            path = args.root / name
            before = path.read_text("utf-8")
            after = fill(before, found)
            if args.check and after != before:
                sys.exit(f"{path} is not what the results give: run python tools/study.py")
            if not args.check:
                path.write_text(after, "utf-8")
        if not args.check:
            figure = study_figure(args.results, DATA, DRAWN)
            figure.savefig(args.root / "docs" / "study_curves.png", dpi=130, bbox_inches="tight")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
