"""Tables of the pages from the rows in results/gpu: docs/performance.md, and that of the study of street scenes."""

import argparse
from pathlib import Path

from tools.benchmark.page import PAGE
from tools.benchmark.samples import ROOT, read_rows
from tools.benchmark.tables import Row, times
from tools.gpu import bench, check, study, train
from tools.study.pages import fill_pages

STUDY = "docs/studies/camvid.md"
_NONE = "No rows are committed yet."


def main(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill the tables of both pages."""
    fill_pages(ROOT, pages(args.out))


def pages(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Return {page: [(name, Markdown)]}."""
    made = {  # what is shown of the rows of a part
        "check": (check.check_table,),
        "bench": (times, bench.attention_table),
        "train": (train.train_table,),
        "study": (study.miou_table,),
    }
    text = {}
    for part, tables in made.items():
        rows = _rows(folder / f"{part}.jsonl")
        text[part] = [line for table in tables for line in (*table(rows), "")] + [_machine(rows), ""] if rows else []
    lines = [*text["check"], *text["bench"], *text["train"]]
    return {
        page: [(name, "\n".join(shown).strip() or _NONE)]
        for page, name, shown in ((PAGE, "gpu", lines), (STUDY, "gpu_camvid", text["study"]))
    }


def _rows(path: Path) -> list[Row]:
    """Return the rows that were measured as the last one was: with the same code, on the same kind of machine."""
    rows = read_rows(path)
    stamp = study.STAMP if path.stem == "study" else ("device", "torch", "triton", "timm", "code")
    return [row for row in rows if all(row[name] == rows[-1][name] for name in stamp)]


def _machine(rows: list[Row]) -> str:
    """Return a line with hardware, versions and commits of rows."""
    names = ("torch", "triton", "timm", "python")
    found = dict.fromkeys(", ".join([row["device"], *(f"{name} {row[name]}" for name in names)]) for row in rows)
    commits = dict.fromkeys(row["commit"] for row in rows if row["commit"])
    return f"{'; '.join(found)}; commit {', '.join(commits) or 'unknown'}."
