"""A whole evaluation in one folder: its tables as they grow, table.md, plots and the report at the end, a progress bar."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitrel.transfer.checkpoint import Trained
from vitrel.transfer.claims import Claim, judge
from vitrel.transfer.folder import read_folder, read_lines, write_folder
from vitrel.transfer.measure import Evaluated
from vitrel.transfer.plan import Task, check_data, plan
from vitrel.transfer.plots import plot_all
from vitrel.transfer.report import accuracy_tables, aggregate, curves_table, details_table, with_curves
from vitrel.transfer.rows import evaluate_rows, line_key
from vitrel.transfer.settings import Row, Sweep
from vitrel.transfer.verdict import verdicts


def run_sweep(
    models: Sequence[Trained],
    sweep: Sweep,
    folder: Path,
    title: str = "",
    report: bool = False,
    claims: Sequence[Claim] = (),
) -> list[Row]:
    """Evaluates everything `plan(models, sweep)` lists and writes results.csv, per_class.csv, translation.csv (where content is
    shifted), table.md, claims.md (where there are claims) and plots/*.png into `folder`; with `report`, pictures.json.gz and
    report.html too.

    The tables are written as they grow, so often that it takes a tenth of the time at most. Rows found there that stem from the
    same weights, data and settings are not made again; rows of anything else are dropped once all is done.
    """
    for size in dict.fromkeys(trained.img_size for trained in models):
        check_data(sweep, size)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {line_key(one.row): one for one in read_folder(folder)}
    done: list[Evaluated] = []
    again = 0.0
    with progress_bar() as bar:
        work = bar.add_task("", total=len(plan(models, sweep)))

        def advance(task: Task, share: float) -> None:
            bar.update(work, advance=share, description=task.name)

        for one in evaluate_rows(models, sweep, list(kept.values()), advance):
            done.append(one)
            known = kept.pop(line_key(one.row), None)
            made_now = known is None or known.per_class is not one.per_class
            if made_now and time.perf_counter() > again:  # of thousands of rows, writing takes as long as a row
                start = time.perf_counter()
                write_folder([*done, *kept.values()], folder)
                again = time.perf_counter() + 10 * (time.perf_counter() - start)
    rows = with_curves([one.row for one in done])
    write_folder([one._replace(row=row) for one, row in zip(done, rows, strict=True)], folder)
    table = aggregate(rows)
    text = f"# {title or folder.name}\n\n{summary(rows)}\n{curves_table(table)}\n{details_table(table)}"
    (folder / "table.md").write_text(text, "utf-8")
    plot_all(rows, folder / "plots", title)
    (folder / "claims.md").unlink(missing_ok=True)
    if claims:
        verdict = "\n".join(judge(claims, rows, read_lines(folder, "translation")))
        (folder / "claims.md").write_text(verdict + "\n", "utf-8")
    if report:
        # pictures run the models, and the page brings in plotly: only where they are wanted
        from vitrel.transfer.html import write_html
        from vitrel.transfer.pictures import collect_pictures

        collect_pictures(models, sweep, folder)
        write_html(folder, title)
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The accuracy tables and one verdict per model, as Markdown that reads well in a terminal."""
    lines = "\n".join(f"- {sentence}" for sentence in verdicts(rows))
    return f"{accuracy_tables(aggregate(rows))}\n{lines}\n"


def progress_bar() -> Progress:
    """A bar over rows with their number, the time they took and the time left."""
    count = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), *count, refresh_per_second=4)
