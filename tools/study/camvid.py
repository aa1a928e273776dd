"""Write the table of docs/studies/camvid.md from results/study/camvid/table.md.

python -m tools.study.camvid
"""

import argparse
import re
from pathlib import Path

from tools.study.pages import ROOT, add_page_arguments, fill_pages
from vitrel.common.tables import markdown

PAGE = "docs/studies/camvid.md"
MODELS = {  # label and policy in the results: name in the page
    ("absolute", "bicubic"): "absolute, kept",
    ("decomposed", "bicubic"): "decomposed, bicubic",
    ("shaw", "none"): "shaw",
    ("cpb", "keep"): "cpb",
    ("rope_mixed", "keep"): "rope_mixed",
    ("table", "bicubic"): "table, bicubic",
    ("lookhere", "none"): "lookhere",
    ("none", "none"): "none",
}
COLUMNS = {  # protocol and size: head in the page
    ("scale", "96x128"): "96×128, trained",
    ("scale", "48x64"): "48×64",
    ("scale", "192x256"): "192×256",
    ("scale", "128x96"): "128×96",
    ("canvas", "48x64"): "crop of half the side",
    ("canvas", "192x256"): "canvas of twice the side",
    ("sliding", "192x256"): "sliding window there",
}


def cells_of(text: str) -> dict[tuple[str, str, str, str], str]:
    """Return {(protocol, size, label, policy): mIoU ± half its interval} of a table.md; "sliding" has the policy "none"."""
    cells = {}
    for protocol, lines in re.findall(r"in percent, (\w+) protocol:\n\n((?:\|.*\n)+)", text):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines())
        for label, policy, _, *values in rows:
            cells |= {(protocol, size, label, policy): value for size, value in zip(head[3:], values, strict=True)}
    return cells


def table(results: Path) -> str:
    """Return the Markdown table of the page, from the table.md in `results`; KeyError for a missing cell."""
    cells = cells_of((results / "table.md").read_text("utf-8"))
    rows = []
    for (label, policy), name in MODELS.items():
        own = [cells[protocol, size, label, "none" if protocol == "sliding" else policy] for protocol, size in COLUMNS]
        rows.append([name, *own])
    return markdown(["", *COLUMNS.values()], rows)


def main() -> None:
    """Run the command that the file's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_page_arguments(parser, ROOT / "results" / "study" / "camvid")
    args = parser.parse_args()
    fill_pages(args.root, {PAGE: [("camvid", table(args.results))]}, "python -m tools.study.camvid", args.check)


if __name__ == "__main__":
    main()
