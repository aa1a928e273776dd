"""One sentence per model on what had to be resized and what became of its accuracy, true to the rows it is made from."""

from collections.abc import Sequence

import pandas as pd

from vitrel.transfer.evaluate import Row
from vitrel.transfer.report import aggregate, curves


def verdicts(rows: Sequence[Row]) -> list[str]:
    """One sentence per label, in the order of the rows: what was resampled, where, how much of it; its top-1."""
    table = aggregate(rows)
    return [_sentence(label, table[table["label"] == label]) for label in table["label"].unique()]


def _sentence(label: str, table: pd.DataFrame) -> str:
    parts = [_resizing(table), *([] if table["unchanged"].all() else [_touched(table)])]
    accuracy = [_accuracy(group, protocol) for protocol, group in table.groupby("protocol", sort=False)]
    return f"{label}: {'; '.join(parts)}; top-1 {'; '.join(accuracy)}{_basis(table)}."


def _touched(table: pd.DataFrame) -> str:
    return f"THE STATE DICT CHANGED at {_list(table[~table['unchanged']]['img_size'].unique())}"


def _resizing(table: pd.DataFrame) -> str:
    sizes = list(table["img_size"].unique())
    resized = table[table["resized"] != "nothing"]
    same = " (state dict bit-identical)" if table["unchanged"].all() else ""
    if resized.empty:
        what = "nothing interpolated, re-created or touched" if same else "nothing interpolated"
        where = f"any of {len(sizes)} sizes" if len(sizes) > 1 else sizes[0]
        return f"{what} at {where}{same}{_never_trained(table)}"
    where = _where(list(resized["img_size"].unique()), sizes)
    policies = list(resized["policy"].unique())
    if len(policies) == 1 and not resized["resized_params"].any():
        return f"nothing interpolated at any of {len(sizes)} sizes{same}{_never_trained(resized)}"
    if len(policies) == 1:
        return f"{_policy(resized)} at {where}{same}{_never_trained(resized)}"
    alike: dict[str, list[str]] = {}
    for policy in policies:
        rows = resized[resized["policy"] == policy]
        alike.setdefault(_policy(rows, named=False) + _never_trained(rows), []).append(policy)
    each = [f"{' or '.join(names)}: {text}" for text, names in alike.items()]
    return f"the resize policy decides at {where}{same}: {'; '.join(each)}"


def _policy(rows: pd.DataFrame, named: bool = True) -> str:
    counts = sorted(rows["resized_params"].unique())
    if counts[-1] == 0:
        return "nothing interpolated"
    number = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    rules = f" ({' or '.join(rows['resized'].unique())})" if named else ""
    return f"{number} of {rows['params'].iloc[0]:,} parameters interpolated{rules}"


def _never_trained(rows: pd.DataFrame) -> str:
    """Only where untrained offsets are read as they are: interpolation gives every offset a value from trained ones."""
    raw = rows[(rows["unseen"] > 0) & ((rows["resized"] == "nothing") | rows["resized"].str.contains("clip"))]
    if raw.empty:
        return ""
    worst = raw.loc[raw["unseen"].idxmax()]
    edge = " and read the edge value" if "clip" in worst["resized"] else ""
    most = "up to " if raw["unseen"].nunique() > 1 else ""
    return f", {most}{100 * worst['unseen']:.0f} % of the offsets (at {worst['img_size']}) were never trained{edge}"


def _where(resized: list[str], sizes: list[str]) -> str:
    others = [size for size in sizes if size not in resized]
    if not others:
        return "every size"
    return f"every size but {_list(others)}" if len(others) < len(resized) else _list(resized)


def _accuracy(table: pd.DataFrame, protocol: str) -> str:
    """Top-1 at the training size, then at the smallest and the largest other size, policy by policy where they differ."""
    trained = table["train_size"].iloc[0]
    at = table[table["img_size"] == trained]
    start = f"{at['top1'].iloc[0]:.1f} % at {trained}" if len(at) else ""
    others = [size for size in sorted(table["img_size"].unique(), key=_area) if size != trained]
    ends = []
    for size in dict.fromkeys(others[:1] + others[-1:]):
        found = [(policy, rows[rows["img_size"] == size]) for _, policy, rows in curves(table)]
        shown = dict.fromkeys(
            f"{policy + ' ' if row['policy'] != 'none' and len(found) > 1 else ''}{row['top1']:.1f} %"
            for policy, rows in found
            for row in rows.to_dict("records")
        )
        ends.append(f"{', '.join(shown)} at {size}")
    return " -> ".join(filter(None, (start, " and ".join(ends)))) + f" ({protocol})"


def _area(size: str) -> tuple[int, str]:
    height, width = map(int, size.split("x"))
    return height * width, size


def _basis(table: pd.DataFrame) -> str:
    seeds, n = table["seeds"].max(), table["n"].max()
    return f" (mean of {seeds} seeds, n = {n:,} each)" if seeds > 1 else f" (n = {n:,})"


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
