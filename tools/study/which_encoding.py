"""Write the costs of docs/encodings/index.md, and the table and pictures of docs/studies/scenes.md, from the results.

python -m tools.study.which_encoding --measure     # costs first: about four minutes on one core
python -m tools.study.which_encoding               # tables and pictures only
"""

import argparse
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import pandas as pd
import timm
import torch
from torch import nn

from tools.benchmark.tables import markdown, milliseconds, ratio
from tools.benchmark.worker import Repeats, take_turns, timed
from tools.study.curves import draw_protocols
from tools.study.pages import ROOT, fill_pages
from tools.study.results import read_rows
from vitrel.common.files import atomic_write, commit
from vitrel.evaluate.verdicts import aggregate
from vitrel.position import POSITIONS
from vitrel.tasks import Row

TRAINED, LARGER = 224, 448  # pixels
_MODES = (("forward", TRAINED, 4), ("training", TRAINED, 4), ("forward", LARGER, 1))  # (mode, image side, batch)
_PROTOCOLS = ("canvas", "scale")
MEASURED = ROOT / "results" / "encoding_cost" / "costs.csv"
STUDY = ROOT / "results" / "study_shapes" / "shapes" / "results.csv"
COSTS, EVIDENCE = "docs/encodings/index.md", "docs/studies/scenes.md"
DRAWN = {
    ("absolute", "bicubic"): "absolute, interpolated",
    ("lookhere", "none"): "lookhere",
    ("shaw", "none"): "shaw",
    ("cpb", "keep"): "cpb",
    ("rope_normalized", "none"): "rope_normalized",
    ("rope_mixed", "none"): "rope_mixed",
    ("rope_mixed+yarn", "none"): "rope_mixed, yarn",
    ("swin-rope_mixed", "fixed"): "Swin, rope_mixed, fixed",
}


def measure_costs(keys: Sequence[str] = tuple(POSITIONS), rounds: int = 9) -> list[Row]:
    """Measure the time of ViT-Tiny/16 with each encoding over that without: rows of key, mode, img_size, batch, ratio, ...

    CPU time of the process on one thread, all encodings in turn in every round, after one round of warm-up. ratio: median over
    the rounds of time / time of `none` in the same round; low, high: its extremes. ValueError if `keys` lacks "none".
    """
    if "none" not in keys:
        raise ValueError("costs are ratios to the model without an encoding: keys must hold 'none'")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for mode in _MODES for row in _interleaved(keys, *mode, rounds)]
    finally:
        torch.set_num_threads(threads)


def _interleaved(keys: Sequence[str], mode: str, side: int, batch: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    image = torch.randn(batch, 3, side, side)
    models = {key: timm.create_model(f"vitrel_vit_ti16_{key}", num_classes=10) for key in keys}
    found, _ = take_turns({key: _run(model, image, mode) for key, model in models.items()}, Repeats(1, rounds, 0.0, 1))
    rows = []
    for key, times in found.items():
        row = {"rounds": times}
        middle, low, high = (round(x, 4) for x in ratio(row, {"rounds": found["none"]}))
        cost = {"ratio": middle, "low": low, "high": high, "seconds": round(milliseconds(row) / 1e3, 5)}
        rows.append({"key": key, "mode": mode, "img_size": side, "batch": batch} | cost)
    return rows


def _run(model: nn.Module, image: torch.Tensor, mode: str) -> Callable[[int], list[float]]:
    def forward() -> None:
        with torch.inference_mode():
            model(image)

    def training() -> None:
        model.zero_grad()
        model(image).logsumexp(1).sum().backward()

    model.train(mode == "training")
    step = forward if mode == "forward" else training
    return lambda calls: [timed(step) for _ in range(calls)]


def cost_table(costs: Sequence[Row]) -> str:
    """Return a Markdown table: each encoding's parameters in ViT-S/16, its terms, and its time over the model without one."""
    measured = {(row["key"], row["mode"], int(row["img_size"])): float(row["ratio"]) for row in costs}
    body = []
    for key in POSITIONS:
        times = (measured.get((key, mode, side)) for mode, side, _ in _MODES)
        cells = ["" if found is None else f"{found:.2f}" for found in times]
        body.append([f"`{key}`", *_given(key), *cells])
    head = ("key", "values in ViT-S/16", "what attention is given", "forward 224", "training 224", "forward 448")
    return "\n".join(markdown(head, "|---|---|---|---|---|---|", body))


def _given(key: str) -> tuple[str, str]:
    """Return (number of parameters that an encoding adds to ViT-S/16, description of the terms it gives to attention)."""
    model, depth = timm.create_model(f"vitrel_vit_s16_{key}", num_classes=10, depth=1), 12
    parts = (model.pos_embed, 1), (model.blocks[0].position, depth)
    count = sum(n * parameter.numel() for part, n in parts if part is not None for parameter in part.parameters())
    if model.pos_embed is not None:
        return f"{count:,}", "nothing: added to the tokens"
    terms = model.blocks[0].position(model.token_grid((32, 32)))
    described = ["rotated q and k"] if terms.rotary is not None else []
    if any(table.bias is not None for table in terms.tables):
        described.append("a bias, H·N²")
    if any(part is not None for table in terms.tables for part in (table.query, table.key, table.gated)):
        described.append("content scores, B·H·N²")
    if any(table.value is not None for table in terms.tables):
        described.append("values by offset")
    return f"{count:,}", "; ".join(described) or "nothing"


def evidence_table(results: Path, size: str = "128x128") -> str:
    """Return a Markdown table: top-1 of every model and policy at `size` in both protocols, the best in `canvas` first.

    results: path of results.csv. ValueError if it has no rows at `size`.
    """
    table = aggregate(read_rows(results))
    if size not in (sizes := {row["img_size"] for row in table}):
        raise ValueError(f"{results} has no rows at {size}; it has {', '.join(sorted(sizes))}")
    trained: dict[str, list[float]] = defaultdict(list)
    found: dict[tuple[str, str], Row] = {}
    for row in table:
        if row["img_size"] == row["train_size"]:
            trained[row["label"]].append(row["top1"])
        if row["img_size"] == size:
            found.setdefault((row["label"], row["policy"]), {})[row["protocol"]] = row
    body = []
    best = sorted(found.items(), key=lambda item: -_top1(item[1], "canvas"))
    for (label, policy), rows in best:
        cells = [f"{row['top1']:.1f} ±{(row['high'] - row['low']) / 2:.1f}" if row else "" for row in map(rows.get, _PROTOCOLS)]
        name = label if policy == "none" else f"{label}, {policy}"
        resampled = next(iter(rows.values()))["resampled"]
        body.append([name, resampled, f"{fmean(trained[label]):.1f}", *cells])
    head = ("model, policy", "resampled", "trained size", "`canvas`", "`scale`")
    return "\n".join(markdown(head, "|---|---|---|---|---|", body))


def _top1(rows: dict[str, Row], protocol: str) -> float:
    return rows[protocol]["top1"] if protocol in rows else -1.0


def read_costs(path: Path) -> list[Row]:
    """Read the rows of `measure_costs`; FileNotFoundError that names the command which writes them."""
    if not path.exists():
        raise FileNotFoundError(f"no {path}: python -m tools.study.which_encoding --measure writes it")
    return pd.read_csv(path).to_dict("records")


def pages() -> dict[str, list[tuple[str, str]]]:
    """Return {page: [(name, table)]}; FileNotFoundError for results that are missing."""
    return {COSTS: [("costs", cost_table(read_costs(MEASURED)))], EVIDENCE: [("evidence", evidence_table(STUDY))]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the costs again, into results/encoding_cost/costs.csv")
    if parser.parse_args().measure:
        with atomic_write(MEASURED) as part:
            ran_on = {name: version(name) for name in ("torch", "torchvision", "timm", "vitrel")}
            ran_on |= {"python": platform.python_version(), "commit": commit(), "device": f"cpu {platform.machine()}, 1 thread"}
            pd.DataFrame(measure_costs()).assign(**ran_on).to_csv(part, index=False)
    fill_pages(ROOT, pages())
    title = "Nano models trained at 64 px, used at other sizes"
    draw_protocols({"built-in scenes": aggregate(read_rows(STUDY))}, DRAWN, title, "scenes")


if __name__ == "__main__":
    main()
