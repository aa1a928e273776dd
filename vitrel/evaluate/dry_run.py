"""What an evaluation would do, row by row, without decoding an image or writing a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrel.evaluate.checkpoint import Trained
from vitrel.evaluate.fitting import static_columns
from vitrel.evaluate.folder import read_folder
from vitrel.evaluate.images import Images
from vitrel.evaluate.plan import Task
from vitrel.evaluate.report import markdown
from vitrel.evaluate.rows import check_tasks, complete, known_rows, not_comparable, row_key
from vitrel.evaluate.settings import Row, Sweep
from vitrel.sizes import format_size

HEAD = (
    "model", "size", "protocol", "crop", "policy", "tokens", "GFLOPs", "windows", "padded", "resized", "values resampled",
    "unseen", "done",
)  # fmt: skip


def describe_plan(models: Sequence[Trained], sweep: Sweep, folder: Path, replace: bool = False) -> str:
    """Every row of `plan(models, sweep)` as a Markdown table: what would be resized, what it costs, whether `folder` has it.

    Other rows there that would be refused or moved aside (`run_sweep`) are told. Raises as the evaluation would: ValueError
    for a size that a model cannot take, or for classes that do not fit.
    """
    done, images, known = read_folder(folder), Images(sweep), {}
    found, keys = known_rows(models, sweep, images, done)
    lines, ready, counts = [], 0, set()
    check_tasks([task for task, _ in keys], sweep, images)
    for task, key in keys:
        counts.add(len(images.dataset(task)))
        place = id(task.trained), task.size, task.policy
        if place not in known:
            known[place] = static_columns(task.trained.model, task.size, task.policy)
        row = found.get(row_key(key))
        is_done = row is not None and complete(row, task, sweep)
        ready += is_done
        lines.append(_line(task, known[place], is_done))
    number = " or ".join(f"{count:,}" for count in sorted(counts))
    shifts = f", shifted by {', '.join(map(str, sweep.shifts))} px at the training size" if sweep.shifts else ""
    asked = {row_key(key) for _, key in keys}
    others = [one.row for one in done if row_key(one.row) not in asked]
    differ, note = not_comparable(others, [key for _, key in keys]), ""
    if others and replace:
        note = f"{len(others)} other rows there would be moved aside.\n"
    elif differ:
        note = f"Rows there may not stand in one table with these ({differ}): give another --out, or --replace.\n"
    return (
        f"{markdown(HEAD, lines)}\n{len(lines)} rows of {number} images each{shifts}; {ready} of them are in {folder} already. "
        f"GFLOPs: 10^9 multiply-adds per image.\n{note}"
    )


def _line(task: Task, costs: Row, is_done: bool) -> list[Any]:
    def number(name: str, form: str) -> str:
        return "-" if costs[name] != costs[name] else format(costs[name], form)

    return [
        task.trained.label,
        format_size(task.size),
        task.protocol,
        f"{task.crop_pct:g}",
        task.policy,
        number("tokens", ",.0f"),
        number("gflops", ".3g"),
        costs["window"],
        costs["pad_fraction"],
        costs["resized"],
        f"{costs['resized_params']:,}",
        number("unseen", ".2f"),
        "yes" if is_done else "",
    ]
