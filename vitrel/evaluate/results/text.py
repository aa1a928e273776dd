"""The results of an evaluation as text: the advice and Markdown tables.

`vitrel.evaluate.results.advice` judges the rows that these tables show.
"""

from collections.abc import Iterable, Sequence

from vitrel.common.sizes import sizes_in_words
from vitrel.evaluate.results.advice import Judged
from vitrel.evaluate.results.aggregate import (
    by_area,
    curve_summary,
    curves,
    does_nothing,
    is_missing,
    is_training,
    main_metric,
    train_sizes_of,
)
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.tasks.base import capital, task_of


def summary(judged: Judged) -> str:
    """Return the advice and the accuracy tables as Markdown, for table.md and the terminal."""
    return f"{advice_list(judged)}\n{accuracy_tables(judged.rows)}"


def advice_list(judged: Judged) -> str:
    """Return the advice as a Markdown list, readable in a terminal: which model is better first, what the words mean last."""
    headline = f"{judged.headline}\n\n" if judged.headline else ""
    return headline + "".join(f"- {one.label}: {one.text}\n" for one in judged.advice) + f"\n{judged.basis}\n"


def table_page(judged: Judged, title: str) -> str:
    """Return the text of table.md: advice, accuracy tables, the table of sizes, the table of curves."""
    return f"# {title}\n\n{summary(judged)}\n{sizes_table(judged)}\n{curves_table(judged.rows)}"


def sizes_table(judged: Judged) -> str:
    """Return a Markdown table of every model, protocol and size, under the policy that the size is judged by: accuracy,
    difference to the training size with its interval, verdict, cost, and what is resampled.
    """
    lines = []
    for row in judged.by_size:
        lines.append(
            [
                row["label"],
                row["protocol"],
                row["img_size"],
                "" if row["resampled"] == "nothing" else row["policy"],
                f"{row[judged.metric]:.1f} ({row['low']:.1f} to {row['high']:.1f})",
                difference_text(row),
                verdict_text(row),
                _speed(row),
                resampled_text(row),
            ]
        )
    head = [
        "model",
        "protocol",
        "size",
        "policy",
        f"{judged.title} %",
        "to training size, points",
        "verdict",
        "images/s",
        "resampled",
    ]
    return (
        f"{markdown(head, lines)}\n{capital(judged.title)} with its 95 % interval; the interval of the difference allows for "
        "all sizes of the model at once (Holm).\n"
    )


def _speed(row: Row) -> str:
    """Images per second with half of the interval, where there is one."""
    if is_missing(row["infer_samples_per_sec"]):
        return "-"
    half = row["infer_samples_per_sec_half"]
    return f"{row['infer_samples_per_sec']:,.0f}" + ("" if is_missing(half) else f" ±{half:,.0f}")


def difference_text(row: Row) -> str:
    """Return the difference of a judged row to the training size: "-1.2 (-2.4 to +0.1)"; "" where there is none."""
    if is_missing(row["difference"]):
        return ""
    return f"{row['difference']:+.1f} ({row['difference_low']:+.1f} to {row['difference_high']:+.1f})"


def verdict_text(row: Row) -> str:
    """Return the verdict of a judged row with what would decide; "training size" for the reference."""
    if row["verdict"]:
        return f"{row['verdict']}: {row['more']} would" if row["more"] else row["verdict"]
    return "training size" if is_training(row) else "-"


def resampled_text(row: Row) -> str:
    """Return what is resampled at a row's size: "2,700 of 469,300 values (table bicubic)", "nothing", "nothing (table clip)".

    Weights that changed although nothing is resampled are an error, and it says so.
    """
    if not row["unchanged"] and not row["resampled_values"]:
        return "nothing, but the weights changed: this is an error"
    if does_nothing(row):
        return "nothing that acts (position does nothing)"
    if row["resampled"] == "nothing":
        return "nothing"
    count = f"{row['resampled_values']:,} of {row['params']:,} values" if row["resampled_values"] else "nothing"
    return f"{count} ({row['resampled']})"


def accuracy_tables(table: Sequence[Row]) -> str:
    """Return a Markdown table per protocol: accuracy of every model and policy by size, ± half its 95 % interval.

    Args:
        table: of `aggregate`.
    """
    sizes = sorted({row["img_size"] for row in table}, key=by_area)
    parts = []
    for protocol in dict.fromkeys(row["protocol"] for row in table):
        lines = []
        for label, policy, rows in curves([row for row in table if row["protocol"] == protocol]):
            by_size = {row["img_size"]: f"{main_metric(row):.1f} ±{(row['high'] - row['low']) / 2:.1f}" for row in rows}
            lines.append([label, policy, _resampled(rows), *(by_size.get(size, "-") for size in sizes)])
        head = ["model", "policy", "values resampled at other sizes", *sizes]
        parts.append(f"{capital(task_of(table[0]).title)} in percent, {protocol} protocol:\n\n" + markdown(head, lines))
    trained = "; ".join(dict.fromkeys(sizes_in_words(train_sizes_of(row)) for row in table))
    over = ", ".join(dict.fromkeys(row["interval"] for row in table))
    return "\n".join(parts) + f"\nTrained at {trained}. ± is half the width of the 95 % interval, over {over}.\n"


def curves_table(table: Sequence[Row]) -> str:
    """Return a Markdown table of every model, protocol and policy: the size of the highest accuracy, and its
    mean over sizes.
    """
    title = task_of(table[0]).title
    lines = []
    for protocol in dict.fromkeys(row["protocol"] for row in table):
        for label, policy, curve in curves([row for row in table if row["protocol"] == protocol]):
            values = curve_summary(curve)
            [mean] = [value for name, value in values.items() if name.endswith("_area")]
            area = "-" if is_missing(mean) else f"{mean:.1f}"
            lines.append([label, protocol, policy, values["best_size"], area])
    return markdown(["model", "protocol", "policy", f"highest {title} at", f"mean {title} over log2 size"], lines)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with padded columns, readable as plain text too; columns of numbers are right-aligned."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [header, *lines]]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(header))]
    right = [
        all(line[column][:1].isdigit() or line[column] in ("", "-") for line in cells[1:]) for column in range(len(header))
    ]
    pads = [str.rjust if flag else str.ljust for flag in right]
    rule = ["-" * (width - 1) + ":" if flag else "-" * width for width, flag in zip(widths, right, strict=True)]
    texts = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [texts[0], rule, *texts[1:]]) + "\n"


def _resampled(curve: Sequence[Row]) -> str:
    """Largest number of values resampled, number of parameters, and policies: "2,700 of 469,300 (table bicubic)"."""
    if all(map(does_nothing, curve)):
        return "none that act"
    policies = ", ".join(name for name in dict.fromkeys(row["resampled"] for row in curve) if name != "nothing")
    most = max(curve, key=lambda row: row["resampled_values"])
    count = f"{most['resampled_values']:,} of {most['params']:,}" if most["resampled_values"] else "none"
    return f"{count} ({policies})" if policies else count
