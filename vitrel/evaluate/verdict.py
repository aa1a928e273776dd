"""One sentence per model on what had to be resized and what became of its accuracy, true to the rows it is made from."""

from collections.abc import Sequence

import pandas as pd

from vitrel.evaluate.policies import policy_parts
from vitrel.evaluate.report import aggregate, curves
from vitrel.evaluate.settings import Row
from vitrel.position import POSITIONS


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
    same = " (state dict bit-identical)" if table["unchanged"].all() else ""
    tried = [(policy, rows[rows["policy"] != "none"]) for _, policy, rows in curves(table)]
    if len(tried) > 1:
        where = _where(list(table[table["policy"] != "none"]["img_size"].unique()), sizes)
        alike: dict[str, list[str]] = {}
        for policy, rows in tried:
            alike.setdefault(_interpolated(rows) + _never_trained(rows), []).append(policy)
        each = [f"{' or '.join(policies)}: {text}" for text, policies in alike.items()]
        parts = policy_parts(table["policy"].unique()).values()
        kind = "policy of windows" if any(name.startswith("window ") for names in parts for name in names) else "resize policy"
        return f"the {kind} decides at {where}{same}: {'; '.join(each)}"
    resized = table[table["resized"] != "nothing"]
    rules = " or ".join(resized["resized"].unique())
    where = _where(list(resized["img_size"].unique()), sizes) if len(resized) else ""
    if resized["resized_params"].any():
        return f"{_interpolated(resized)} ({rules}) at {where}{same}{_never_trained(table)}"
    what = "nothing interpolated, re-created or touched" if same and resized.empty else "nothing interpolated"
    everywhere = f"any of {len(sizes)} sizes" if len(sizes) > 1 else sizes[0]
    read = "" if resized.empty or "clip" in rules else f", read by {rules} at {where}"
    return f"{what} at {everywhere}{same}{read}{_never_trained(table)}"


def _interpolated(rows: pd.DataFrame) -> str:
    counts = sorted(rows["resized_params"].unique())
    if counts[-1] == 0:
        return "nothing interpolated"
    number = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    return f"{number} of {rows['params'].iloc[0]:,} parameters interpolated"


def _never_trained(rows: pd.DataFrame) -> str:
    """Only where untrained offsets are read as they are: interpolation gives every offset a value from trained ones."""
    raw = rows[(rows["unseen"] > 0) & ((rows["saturated"] > 0) | ~rows["resized"].map(_stretches))]
    if raw.empty:
        return ""
    worst = raw.loc[raw["unseen"].idxmax()]
    most = "up to " if raw["unseen"].nunique() > 1 else ""
    if not worst["saturated"]:
        return f", evaluated at offsets never trained ({most}{100 * worst['unseen']:.0f} % of them, at {worst['img_size']})"
    keys = worst["encoding"].split("+")
    edge = "far bucket" if "t5" in keys and "clip" not in worst["resized"] else "edge value"
    part = "" if worst["saturated"] == worst["unseen"] else f" {100 * worst['saturated']:.0f} %"
    turned = ", where the rotation is evaluated" if any(key in POSITIONS and POSITIONS[key].rotates for key in keys) else ""
    share = f"{most}{100 * worst['unseen']:.0f} % of the offsets (at {worst['img_size']})"
    return f", {share} were never trained and{part} read the {edge}{turned}"


def _stretches(resized: str) -> bool:
    """Whether the rules of a row serve all offsets from trained ones, as `table bicubic` does; not `absolute bicubic`."""
    encodings = [POSITIONS[key] for key in (rule.split(" ")[0] for rule in resized.split(" + ")) if key in POSITIONS]
    return any((encoding.site, encoding.behaviour) == ("attention", "resized") for encoding in encodings)


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
        found = [rows[rows["img_size"] == size] for _, _, rows in curves(table)]
        shown = dict.fromkeys(
            f"{row['policy'] + ' ' if row['policy'] != 'none' and len(found) > 1 else ''}{row['top1']:.1f} %"
            for rows in found
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
