"""The results of an evaluation in words: the answer for every model, Markdown tables, and the judgement of claims.

The answers come first, see `vitrel.evaluate.report.answers`. Claims are written down before an evaluation runs; by its
rows they hold, are not shown, or do not hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vitrel.evaluate.metrics import difference_interval
from vitrel.evaluate.report.answers import answer_list
from vitrel.evaluate.results import aggregate, by_area, curve_summary, curves
from vitrel.evaluate.settings import Row
from vitrel.extras import optional_import
from vitrel.sizes import format_size, parse_size

with optional_import():
    import pandas as pd

DETAILS = {
    "label": "model",
    "protocol": "protocol",
    "policy": "policy",
    "img_size": "size",
    "tokens": "tokens",
    "top1": "top-1 %",
    "low": "95 % from",
    "high": "to",
    "top5": "top-5 %",
    "nll": "NLL",
    "ece": "ECE %",
    "retention": "retention",
    "n": "images",
    "seeds": "seeds",
    "window": "windows",
    "pad_fraction": "padding",
    "gflops": "10^9 multiply-adds",
    "attention_span": "attended tokens",
    "attention_distance": "attended patches away",
    "border_leak": "border leak",
    "resized": "rule",
    "resized_params": "values resampled",
    "unseen": "offsets not trained",
    "saturated": "of them read at an edge",
    "unchanged": "weights unchanged",
    "infer_samples_per_sec": "images/s",
    "peak_memory_mb": "peak MiB",
    "batch_size": "batch",
    "oom": "out of memory",
}


def summary(rows: Sequence[Row], folder: Path | None = None) -> str:
    """The answer for every model, then the accuracy tables, as Markdown for a terminal too; folder: of the evaluation."""
    return f"{answer_list(rows, folder)}\n{accuracy_tables(aggregate(rows))}"


def table_page(rows: Sequence[Row], title: str, folder: Path | None = None) -> str:
    """table.md: the answers, the accuracy tables, the curves and every aggregated row."""
    table = aggregate(rows)
    return f"# {title}\n\n{summary(rows, folder)}\n{curves_table(table)}\n{details_table(table)}"


def accuracy_tables(table: pd.DataFrame) -> str:
    """Per protocol, top-1 of every model and policy against size, with half the width of the 95 % interval."""
    sizes = sorted(table["img_size"].unique(), key=by_area)
    parts = []
    for protocol in table["protocol"].unique():
        lines = []
        for label, policy, rows in curves(table[table["protocol"] == protocol]):
            by_size = {row.img_size: f"{row.top1:.1f} ±{(row.high - row.low) / 2:.1f}" for row in rows.itertuples()}
            lines.append([label, policy, _resampled(rows), *(by_size.get(size, "-") for size in sizes)])
        head = ["model", "policy", "values resampled at other sizes", *sizes]
        parts.append(f"Top-1 in percent, {protocol} protocol:\n\n" + markdown(head, lines))
    trained = ", ".join(dict.fromkeys(table["train_size"]))
    kinds = ", ".join(dict.fromkeys(table["interval"]))
    return "\n".join(parts) + f"\nTrained at {trained}. ± is half the width of the 95 % interval ({kinds}).\n"


def details_table(table: pd.DataFrame) -> str:
    """Every aggregated row with its main columns, those of which anything is known."""
    digits = {
        "nll": 3,
        "retention": 3,
        "unseen": 2,
        "saturated": 2,
        "border_leak": 2,
        "gflops": 2,
        "infer_samples_per_sec": 0,
        "peak_memory_mb": 0,
    }

    def text(name: str, value: object) -> str:
        if value != value:  # not known, or of an earlier version
            return "-"
        if isinstance(value, (bool, str)):
            return {True: "yes", False: "NO"}.get(value, str(value))
        if name in ("n", "resized_params", "tokens", "seeds", "batch_size", "oom"):
            return f"{value:,.0f}"
        return f"{value:.{digits.get(name, 1)}f}"

    known = [name for name in DETAILS if table[name].notna().any()]
    return markdown(
        [DETAILS[name] for name in known], [[text(name, row[name]) for name in known] for row in table.to_dict("records")]
    )


def curves_table(table: pd.DataFrame) -> str:
    """Per model, protocol and policy of an aggregated table: the best size and the area under top-1."""
    lines = []
    for protocol in table["protocol"].unique():
        for label, policy, curve in curves(table[table["protocol"] == protocol]):
            found = curve_summary(curve)
            area = "-" if found["top1_area"] != found["top1_area"] else f"{found['top1_area']:.1f}"
            lines.append([label, protocol, policy, found["best_size"], area])
    return markdown(["model", "protocol", "policy", "best size", "mean top-1 over log2 size"], lines)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with padded columns, readable as plain text too; numbers are aligned right."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [header, *lines]]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(header))]
    right = [
        all(line[column][:1].isdigit() or line[column] in ("", "-") for line in cells[1:]) for column in range(len(header))
    ]
    pads = [str.rjust if flag else str.ljust for flag in right]
    rule = ["-" * (width - 1) + ":" if flag else "-" * width for width, flag in zip(widths, right, strict=True)]
    texts = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [texts[0], rule, *texts[1:]]) + "\n"


@dataclass(frozen=True)
class Claim:
    """Each of `better` has a higher top-1 than each of `than` at `img_size` ("128" or "64x96", pixels) and `protocol`.

    better, than: labels, with a policy "label/policy", or "label" for the first in the rows; `than` may be a number, percent.
    translation: with the images' content translated by so many pixels (translation.csv) instead of as they are.
    learned: labels below this top-1 at the training size are left out, and said so: what was not learned cannot transfer.
    """

    text: str
    better: tuple[str, ...]
    than: tuple[str, ...] | float
    img_size: str
    protocol: str = "scale"
    translation: int | None = None
    learned: float = 0.0

    def labels(self) -> set[str]:
        """The labels it names, without policies."""
        return {name.split("/")[0] for name in (*self.better, *(self.than if isinstance(self.than, tuple) else ()))}


def read_claim(given: Any) -> Claim:
    """A claim from a mapping of a configuration; ValueError for what is unknown, missing or no claim."""
    known = [field.name for field in fields(Claim)]
    if not isinstance(given, Mapping) or not {"text", "better", "than", "img_size"} <= given.keys() <= {*known}:
        raise ValueError(
            f"a claim has text, better, than and img_size, and may have protocol, translation and learned, got {given!r:.80}"
        )
    given = dict(given) | {"img_size": format_size(parse_size(given["img_size"]))}
    for side in ("better", "than"):
        value = given[side]
        if not (side == "than" and isinstance(value, (int, float)) and not isinstance(value, bool)):
            given[side] = (value,) if isinstance(value, str) else tuple(value)
    return Claim(**given)


def judge(claims: Sequence[Claim], rows: Sequence[Row], translated: Sequence[Row] = ()) -> list[str]:
    """One Markdown paragraph per claim: its verdict and, for every pair, the mean difference in points with its 95 % interval.

    Differences are taken seed by seed. The interval is Student's over seeds, and never narrower than that over images of two
    independent samples (Agresti and Caffo 2000: normal, with one hit and one miss more in each, so that it has a width at 0 and
    100 % too): conservative, since both models saw the same. ValueError for a label without such rows.
    """
    return [_judged(claim, rows, translated) for claim in claims]


def _resampled(curve: pd.DataFrame) -> str:
    """The most parameter values that are resampled, of how many, by which rules: "2,700 of 469,300 (table bicubic)"."""
    rules = ", ".join(rule for rule in curve["resized"].unique() if rule != "nothing")
    most = curve.loc[curve["resized_params"].idxmax()]
    count = f"{most['resized_params']:,} of {most['params']:,}" if most["resized_params"] else "none"
    return f"{count} ({rules})" if rules else count


def _judged(claim: Claim, rows: Sequence[Row], translated: Sequence[Row]) -> str:
    known = {label: _top1_trained(rows, label) for label in claim.better}
    kept = [label for label in claim.better if known[label] >= claim.learned]
    others = claim.than if isinstance(claim.than, tuple) else (claim.than,)
    pairs = [(label, other, *_difference(claim, rows, translated, label, other)) for label in kept for other in others]
    held = [pair for pair in pairs if pair[2] - pair[3] > 0]
    against = [pair for pair in pairs if pair[2] + pair[3] < 0]
    open_ = [pair for pair in pairs if pair not in held and pair not in against]
    verdict = "holds" if pairs and len(held) == len(pairs) else "does not hold" if against else "is not shown"
    lines = [f"- **{claim.text}** This {verdict} ({len(held)} of {len(pairs)} pairs; {_place(claim)})."]
    for word, some in (("Ahead", held), ("No difference shown", open_), ("Behind", against)):
        if some:
            texts = [f"{a} {mean:+.1f} ±{half:.1f}" + (f" ({b})" if len(others) > 1 else "") for a, b, mean, half in some]
            lines.append(f"  {word}: {', '.join(texts)}.")
    if left := [f"{label} ({known[label]:.1f} %)" for label in claim.better if label not in kept]:
        lines.append(f"  Left out, below {claim.learned:g} % at the training size: {', '.join(left)}.")
    return "\n".join(lines)


def _place(claim: Claim) -> str:
    translated = "" if claim.translation is None else f", translated by {claim.translation} px"
    than = f"against {', '.join(claim.than)}" if isinstance(claim.than, tuple) else f"against {claim.than:g} %"
    return f"{claim.img_size} {claim.protocol}{translated}, points of top-1 {than}"


def _top1_trained(rows: Sequence[Row], label: str) -> float:
    own = [row["top1"] for row in rows if row["label"] == label.split("/")[0] and row["img_size"] == row["train_size"]]
    if not own:
        known = ", ".join(dict.fromkeys(row["label"] for row in rows))
        raise ValueError(f"a claim names {label!r}, of which there are no rows; labels are {known}")
    return sum(own) / len(own)


def _difference(
    claim: Claim, rows: Sequence[Row], translated: Sequence[Row], label: str, other: str | float
) -> tuple[float, float]:
    """(mean, half width of the 95 % interval) of the difference in top-1, points."""
    ours = _accuracies(claim, rows, translated, label)
    if isinstance(other, str):
        theirs = _accuracies(claim, rows, translated, other)
        seeds = sorted(ours.keys() & theirs.keys())
        values: list[float] | float = [theirs[seed][0] for seed in seeds]
    else:
        seeds, values = [*ours], other
    n = min(n for _, n in ours.values())
    return difference_interval([ours[seed][0] for seed in seeds], values, n)


def _accuracies(claim: Claim, rows: Sequence[Row], translated: Sequence[Row], label: str) -> dict[int, tuple[float, int]]:
    """{seed: (top-1, number of images)} of one label at the claim's place."""
    name, _, policy = label.partition("/")
    at: Row = {"label": name, "img_size": claim.img_size, "protocol": claim.protocol}
    at |= {} if claim.translation is None else {"translation": claim.translation}
    found = rows if claim.translation is None else translated
    own = [row for row in found if all(row[key] == value for key, value in at.items())]
    own = [row for row in own if row["policy"] == (policy or own[0]["policy"])]
    if not own:
        raise ValueError(f"no rows of {label} at {_place(claim)}")
    return {row["seed"]: (row["top1"], int(row["n"])) for row in own}
