"""A whole evaluation in one folder: its tables as they grow, table.md, plots and the report at the end, a progress bar."""

from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitrel.evaluate.checkpoint import Trained
from vitrel.evaluate.claims import Claim, judge
from vitrel.evaluate.folder import Tables, only_writer, read_folder, read_lines, read_names, set_aside
from vitrel.evaluate.images import Images
from vitrel.evaluate.plan import Task, check_data, plan
from vitrel.evaluate.plots import plot_all
from vitrel.evaluate.report import accuracy_tables, aggregate, curves_table, details_table, with_curves
from vitrel.evaluate.rows import evaluate_rows, not_comparable, planned, row_key
from vitrel.evaluate.runner import out_of_memory
from vitrel.evaluate.settings import Row, Sweep
from vitrel.evaluate.verdict import verdicts
from vitrel.files import atomic_write, shown


def run_sweep(
    models: Sequence[Trained],
    sweep: Sweep,
    folder: Path,
    title: str = "",
    report: bool = False,
    claims: Sequence[Claim] = (),
    replace: bool = False,
) -> list[Row]:
    """Evaluates everything `plan(models, sweep)` lists and writes results.csv, per_class.csv, translation.csv (where content is
    shifted), bad_images.csv (where some cannot be read), table.md, claims.md (where there are claims) and plots/*.png into
    `folder`; with `report`, pictures.json.gz and report.html too.

    No row is ever lost. Rows in `folder` that stem from the same weights, data and settings are not made again, and those at
    other sizes, protocols, policies or of other models stay beside the new ones. Where rows there may not stand in one table
    with the new ones (`not_comparable`), a ValueError says what differs before anything is computed. With `replace`, all files
    of an evaluation with any row that is not asked for now are moved into a folder replaced-1 there, which is printed; rows
    that are asked for stay. Tables are written as they grow. An exception gets a note (`add_note`) of how many rows are saved.
    """
    for size in dict.fromkeys(trained.img_size for trained in models):
        check_data(sweep, size)
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        tables = _opened(models, sweep, folder, replace)
        try:
            _evaluate(models, sweep, tables)
            rows = with_curves([one.row for one in tables.rows.values()])
            tables.write(rows)
            _show(rows, folder, shown(title), claims)
            if replace and not claims:
                (folder / "claims.md").unlink(missing_ok=True)
            if report:
                # pictures run the models, and the page brings in plotly: only where they are wanted
                from vitrel.evaluate.html import write_html
                from vitrel.evaluate.pictures import collect_pictures

                collect_pictures(models, sweep, folder, rows=rows)
                write_html(folder, shown(title))
        except BaseException as error:
            saved = tables.write_rest()
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise _noted(MemoryError(f"memory ran out: {str(error).splitlines()[0]}"), saved) from error
            _noted(error, saved)
            raise
    return rows


def _noted(error: BaseException, saved: str) -> BaseException:
    if saved:
        error.add_note(saved)
    return error


def _opened(models: Sequence[Trained], sweep: Sweep, folder: Path, replace: bool) -> Tables:
    """The folder with the rows that stay there; see `run_sweep`."""
    found, names = read_folder(folder), read_names(folder)
    keys = [key for _, key in planned(models, sweep, Images(sweep))]
    asked = {row_key(key) for key in keys}
    others = [one for one in found if row_key(one.row) not in asked]
    why = not_comparable([one.row for one in others], keys)
    if why and not replace:
        raise ValueError(
            f"{folder} holds rows that may not stand in one table with those asked for now ({why}). Nothing was computed. Give "
            f"another folder (--out), or --replace, which first moves what is in {folder} into a folder of its own there"
        )
    if not replace or not others:
        return Tables(folder, found, names)
    place, rest = set_aside(folder), [one for one in found if row_key(one.row) in asked]
    tables = Tables(folder, rest, names)
    if rest:
        tables.write()
    print(
        f"{len(others)} of the {len(found)} rows in {folder} are not asked for now{f' ({why})' if why else ''}: the evaluation "
        f"that was there is in {place}, {len(rest)} rows of it stay"
    )
    return tables


def _evaluate(models: Sequence[Trained], sweep: Sweep, tables: Tables) -> None:
    with progress_bar() as bar:
        work = bar.add_task("", total=len(plan(models, sweep)))

        def advance(task: Task, share: float) -> None:
            bar.update(work, advance=share, description=task.name)

        for one in evaluate_rows(models, sweep, list(tables.rows.values()), advance):
            tables.add(one)


def _show(rows: Sequence[Row], folder: Path, title: str, claims: Sequence[Claim]) -> None:
    """Writes table.md, plots/ and claims.md."""
    table = aggregate(rows)
    text = f"# {title or shown(folder.name)}\n\n{summary(rows)}\n{curves_table(table)}\n{details_table(table)}"
    with atomic_write(folder / "table.md") as part:
        part.write_text(text, "utf-8")
    plot_all(rows, folder / "plots", title)
    if claims:
        verdict = "\n".join(judge(claims, rows, read_lines(folder, "translation")))
        with atomic_write(folder / "claims.md") as part:
            part.write_text(verdict + "\n", "utf-8")


def summary(rows: Sequence[Row]) -> str:
    """The accuracy tables and one verdict per model, as Markdown that reads well in a terminal."""
    lines = "\n".join(f"- {sentence}" for sentence in verdicts(rows))
    return f"{accuracy_tables(aggregate(rows))}\n{lines}\n"


def progress_bar() -> Progress:
    """A bar over rows with their number, the time they took and the time left."""
    count = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), *count, refresh_per_second=4)
