"""A whole evaluation in one folder: results.csv as it grows, table.md and plots at the end, a progress bar throughout."""

from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitrel.transfer.checkpoint import Trained
from vitrel.transfer.evaluate import Row, Sweep, Task, check_data, evaluate, format_size, plan, row_key
from vitrel.transfer.plots import plot_all
from vitrel.transfer.report import accuracy_tables, aggregate, details_table, read_csv, write_csv
from vitrel.transfer.verdict import verdicts


def run_sweep(models: Sequence[Trained], sweep: Sweep, folder: Path, title: str = "") -> list[Row]:
    """Evaluates everything `plan(models, sweep)` lists and writes results.csv, table.md and plots/*.png into `folder`.

    results.csv is written after every evaluation. Rows found there that stem from the same weights, data and settings are
    not made again; rows of anything else are dropped once all is done.
    """
    for size in dict.fromkeys(trained.img_size for trained in models):
        check_data(sweep, size)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.csv"
    kept = {row_key(row): row for row in read_csv(path)}
    rows: list[Row] = []
    with _progress() as bar:
        work = bar.add_task("", total=len(plan(models, sweep)))

        def advance(task: Task, share: float) -> None:
            what = f"{task.trained.label} {format_size(task.size)} {task.protocol}"
            bar.update(work, advance=share, description=what if task.policy == "none" else f"{what} {task.policy}")

        for row in evaluate(models, sweep, list(kept.values()), advance):
            rows.append(row)
            kept.pop(row_key(row), None)
            write_csv([*rows, *kept.values()], path)
    write_csv(rows, path)
    (folder / "table.md").write_text(f"# {title or folder.name}\n\n{summary(rows)}\n{details_table(aggregate(rows))}", "utf-8")
    plot_all(rows, folder / "plots", title)
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The accuracy tables and one verdict per model, as Markdown that reads well in a terminal."""
    lines = "\n".join(f"- {sentence}" for sentence in verdicts(rows))
    return f"{accuracy_tables(aggregate(rows))}\n{lines}\n"


def _progress() -> Progress:
    count = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), BarColumn(), *count, refresh_per_second=4)
