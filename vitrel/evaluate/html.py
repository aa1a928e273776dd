"""report.html: the results of an evaluation folder as one file that needs no network, no server and no other file."""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from plotly.offline import get_plotlyjs

from vitrel.evaluate.columns import COLUMNS
from vitrel.evaluate.folder import read_lines
from vitrel.evaluate.metrics import t_interval
from vitrel.evaluate.report import DETAILS, aggregate, curves, read_csv, top1_interval
from vitrel.evaluate.settings import Row
from vitrel.evaluate.verdict import verdicts
from vitrel.files import atomic_write, one_page, shown
from vitrel.sizes import parse_size

SCRIPTS = ("base", "curves", "rows", "lattices", "attention", "lines", "start")
# what may be drawn against resolution: name with unit, and whether the axis is logarithmic
METRICS = {
    "top1": ("top-1 (%)", False),
    "retention": ("retention", False),
    "top5": ("top-5 (%)", False),
    "nll": ("NLL (nats)", False),
    "ece": ("ECE (%)", False),
    "infer_samples_per_sec": ("images / s", True),
    "peak_memory_mb": ("peak memory (MiB)", True),
    "gflops": ("GFLOPs (multiply-adds)", True),
    "attention_entropy": ("attention entropy (nats)", False),
    "attention_span": ("attention span (tokens)", True),
    "attention_distance": ("attended distance (patches)", True),
    "attention_distance_share": ("attended distance (share of diagonal)", False),
    "unseen": ("offsets never trained (share)", False),
    "resized_params": ("values resampled", False),
}
# of one seed, or said otherwise in the table
_LEFT_OUT = {"seed", "top1_err", "top5_err", "top1_low", "top1_high", "state_hash_before", "state_hash_after"}
_ABOUT = {
    "low": "lower end of the 95 % interval of top1",
    "high": "upper end of the 95 % interval of top1",
    "seeds": "trainings averaged over",
    "interval": "how the 95 % interval is made",
}


def write_html(folder: Path, title: str = "") -> Path:
    """Writes `folder`/report.html from results.csv, and claims.md, per_class.csv, translation.csv, pictures.json.gz if there.

    Returns its path. FileNotFoundError where there is no results.csv, ValueError where it holds no row or lacks columns.
    """
    folder = Path(folder)
    if not (folder / "results.csv").is_file():
        raise FileNotFoundError(f"no results.csv in {folder}: give the folder of an evaluation, such as runs/quickstart")
    rows = read_csv(folder / "results.csv")
    if not rows:
        raise ValueError(f"{folder / 'results.csv'} holds no rows: evaluate first")
    title = shown(title or folder.resolve().name)
    pictures = folder / "pictures.json.gz"
    text = one_page(
        "vitrel.evaluate",
        SCRIPTS,
        title=escape(title),
        plotly=get_plotlyjs(),
        data=json.dumps(contents(rows, folder, title), allow_nan=False).replace("<", "\\u003c"),
        pictures=base64.b64encode(pictures.read_bytes()).decode() if pictures.exists() else "",
    )
    with atomic_write(folder / "report.html") as part:
        part.write_text(text, "utf-8")
    return folder / "report.html"


def contents(rows: Sequence[Row], folder: Path, title: str) -> dict[str, Any]:
    """Everything the page shows but the pictures, as plain JSON values: numbers that are missing are None."""
    table = aggregate(rows).reset_index(drop=True)
    crops = pd.DataFrame(rows).groupby("label")["crop_pct"].nunique().max() > 1
    seen = [column for column in table if column not in _LEFT_OUT and table[column].notna().any()]
    varying = [column for column in seen if column in DETAILS or table[column].astype(str).nunique() > 1]
    varying.sort(key=lambda column: list(DETAILS).index(column) if column in DETAILS else len(DETAILS))
    records = json.loads(table.to_json(orient="records", double_precision=8))
    for record, intervals in zip(records, _intervals(rows, table), strict=True):
        record["intervals"] = intervals
    known = {key: value for key, value in METRICS.items() if key in seen and pd.to_numeric(table[key], "coerce").any()}
    sizes = sorted(table["img_size"].unique(), key=lambda size: (parse_size(size)[0] * parse_size(size)[1], parse_size(size)))
    return {
        "title": title,
        "sizes": [{"name": size, "h": parse_size(size)[0], "w": parse_size(size)[1]} for size in sizes],
        "protocols": list(table["protocol"].unique()),
        "columns": [
            {
                "key": key,
                "name": DETAILS.get(key, key),
                "about": _ABOUT.get(key) or COLUMNS.get(key, ""),
                "main": key in DETAILS,
            }
            for key in varying
        ],
        "common": [[key, COLUMNS.get(key) or _ABOUT[key], str(table[key].iloc[0])] for key in seen if key not in varying],
        "about": [[key, text] for key, text in COLUMNS.items()],
        "metrics": [{"key": key, "name": name, "log": log} for key, (name, log) in known.items()],
        "rows": records,
        "curves": [
            {"label": label, "policy": policy, "name": curve_name(label, policy), "rows": part.index.tolist()}
            for label, policy, part in curves(table)
        ],
        "verdicts": verdicts(rows),
        "claims": _claims(folder),
        "classes": _classes(read_lines(folder, "per_class"), crops),
        "translation": _translation(read_lines(folder, "translation"), crops),
    }


def curve_name(label: str, policy: str) -> str:
    """The name of a curve: the model's, with its policy where there is one."""
    return label if policy == "none" else f"{label}, {policy}"


def _claims(folder: Path) -> list[dict[str, str]]:
    """The claims of claims.md: what is claimed, and what the rows say."""
    path = folder / "claims.md"
    text = path.read_text("utf-8") if path.exists() else ""
    found = re.findall(r"^- \*\*(.+?)\*\* (This .+?)(?=\n- \*\*|\Z)", text, re.M | re.S)
    return [{"claim": claim, "verdict": " ".join(verdict.split())} for claim, verdict in found]


def _intervals(rows: Sequence[Row], table: pd.DataFrame) -> list[dict[str, list[float]]]:
    """Per aggregated row the 95 % interval of every metric: that of top1, of others Student's where there are two seeds."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["label"], row["protocol"], row["policy"], row["img_size"], row["crop_pct"]].append(row)
    found = []
    for row in table.to_dict("records"):
        own = groups[row["label"], row["protocol"].split(",")[0], row["policy"], row["img_size"], row["crop_pct"]]
        intervals = {"top1": [row["low"], row["high"]]}
        for key in METRICS:
            values = [one[key] for one in own if pd.notna(one.get(key))]
            if key != "top1" and len(values) > 1:
                intervals[key] = [round(end, 6) for end in t_interval(values)]
        found.append(intervals)
    return found


def _classes(lines: Sequence[Row], crops: bool) -> dict[str, Any] | None:
    """Images and hits of every class, seeds added up: class names, and lists in their order for every evaluation."""
    names = list(dict.fromkeys(line["class"] for line in lines))
    place = {name: at for at, name in enumerate(names)}
    found: dict[tuple, dict[str, list[int]]] = {}
    for line in lines:
        counts = found.setdefault(_key(line, crops), {"n": [0] * len(names), "hits": [0] * len(names)})
        for what, count in counts.items():
            count[place[line["class"]]] += int(line[what])
    return {"names": names, "rows": [_named(key) | counts for key, counts in found.items()]} if lines else None


def _translation(lines: Sequence[Row], crops: bool) -> list[Row]:
    """Top-1 by shift, averaged over seeds, with its interval as `aggregate` makes it."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for line in lines:
        groups[(*_key(line, crops), int(line["shift"]))].append(line)
    found = []
    for (*key, shift), own in groups.items():
        top1, n = sum(line["top1"] for line in own) / len(own), int(own[0]["n"])
        low, high, _ = top1_interval([line["top1"] for line in own], n)
        found.append(
            _named(key) | {"shift": shift, "n": n, "seeds": len(own), "top1": round(top1, 4), "low": low, "high": high}
        )
    return found


def _key(line: Row, crops: bool) -> tuple:
    protocol = f"{line['protocol']}, crop {line['crop_pct']:g}" if crops else line["protocol"]
    return line["label"], protocol, line["policy"], line["img_size"]


def _named(key: Sequence[str]) -> Row:
    return dict(zip(("label", "protocol", "policy", "img_size"), key, strict=True))
