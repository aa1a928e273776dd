"""report.html: the results of an evaluation folder as one file that needs no network, no server and no other file.

Its maps, of what position adds by offset and where patches attend, come from pictures.json.gz, which is recorded by running the
models. What does not fit into the byte budget is left out layer by layer, and named in the file.
"""

import base64
import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from vitrel.evaluate.images import Images
from vitrel.evaluate.measure import Task, tasks_of
from vitrel.evaluate.metrics import t_interval
from vitrel.evaluate.models import Trained
from vitrel.evaluate.policies import at_size_with
from vitrel.evaluate.report import DETAILS
from vitrel.evaluate.report.answers import answer_lines
from vitrel.evaluate.results import COLUMNS, aggregate, by_area, curves, read_csv, read_lines, top1_interval
from vitrel.evaluate.settings import Row, Sweep
from vitrel.extras import optional_import
from vitrel.files import atomic_write, one_page, shown
from vitrel.inspect.attention import Layer, for_each_layer, offset_mean
from vitrel.sizes import format_size, parse_size

with optional_import():
    import pandas as pd
    from plotly.offline import get_plotlyjs

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
BUDGET = 8 << 20  # bytes of the compressed file; as text in the page a third more
REACH = 31  # offsets along one axis that are shown, in tokens
QUERIES = 256  # patches of an image whose attention is kept
LARGEST = 4096  # tokens, above which attention is not recorded
IMAGES = 2
SIDE = 224  # pixels of the longer side of a picture
Item = dict[str, Any]


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
        "vitrel.evaluate.report",
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
    sizes = sorted(table["img_size"].unique(), key=by_area)
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
        "verdicts": answer_lines(rows),
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
        counts = found.setdefault(_place(line, crops), {"n": [0] * len(names), "hits": [0] * len(names)})
        for what, count in counts.items():
            count[place[line["class"]]] += int(line[what])
    return {"names": names, "rows": [_named(key) | counts for key, counts in found.items()]} if lines else None


def _translation(lines: Sequence[Row], crops: bool) -> list[Row]:
    """Top-1 by translation, averaged over seeds, with its interval as `aggregate` makes it."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for line in lines:
        groups[(*_place(line, crops), int(line["translation"]))].append(line)
    found = []
    for (*key, by), own in groups.items():
        top1, n = sum(line["top1"] for line in own) / len(own), int(own[0]["n"])
        low, high, _ = top1_interval([line["top1"] for line in own], n)
        found.append(
            _named(key) | {"translation": by, "n": n, "seeds": len(own), "top1": round(top1, 4), "low": low, "high": high}
        )
    return found


def _place(line: Row, crops: bool) -> tuple:
    protocol = f"{line['protocol']}, crop {line['crop_pct']:g}" if crops else line["protocol"]
    return line["label"], protocol, line["policy"], line["img_size"]


def _named(key: Sequence[str]) -> Row:
    return dict(zip(("label", "protocol", "policy", "img_size"), key, strict=True))


def collect_pictures(
    models: Sequence[Trained], sweep: Sweep, folder: Path, budget: int = BUDGET, rows: Sequence[Row] = ()
) -> Path:
    """Writes `folder`/pictures.json.gz, at most about `budget` bytes: for the first model of every label, at every size of the
    sweep, the mean logit that position adds by offset, and the attention of sample images. Returns its path.

    A model whose attention cannot be seen has the reason instead. Each is recorded at the policies that the sweep evaluates,
    attention at the first of them alone. rows: those of the folder; what the file holds of any that are not recorded now stays
    in it, and leaves at least a quarter of the budget.
    """
    firsts = list({trained.label: trained for trained in reversed(models)}.values())[::-1]
    tasks = _recorded_tasks(firsts, sweep)
    former = _former_pictures(folder, rows, {(task.trained.label, format_size(task.size), task.policy) for task in tasks})
    budget = max(budget - len(zlib.compress(json.dumps(former).encode())), budget // 4)
    samples, left_out, found = Images(sweep), [], []
    pictures: dict[str, str] = {}
    for place, trained in enumerate(firsts):
        own = [task for task in tasks if task.trained is trained]
        one, spent = _record_model(own, sweep, samples, pictures, budget // (len(firsts) - place))
        left_out += one.pop("left_out")
        found.append(one)
        budget -= spent
    found = _merged_models(former["models"], found)
    pictures, left_out = former["pictures"] | pictures, former["left_out"] + left_out
    stored = {"format": 1, "models": found, "pictures": pictures, "left_out": left_out}
    with atomic_write(Path(folder) / "pictures.json.gz") as part:
        part.write_bytes(gzip.compress(json.dumps(stored, separators=(",", ":")).encode(), mtime=0))
    return Path(folder) / "pictures.json.gz"


def encode_lattice(values: Tensor) -> Item:
    """[H, 2h-1, 2w-1] as bytes, a scale per head; NaN is -128, offsets beyond REACH are cut off."""
    rows, columns = values.shape[1:]
    down, right = max(0, rows // 2 - REACH), max(0, columns // 2 - REACH)
    shown = values[:, down : rows - down, right : columns - right].float().cpu()
    scale = shown.nan_to_num().abs().amax((1, 2))
    steps = (shown / scale.clamp(min=1e-12)[:, None, None] * 127).round()
    return {
        "shape": list(shown.shape),
        "full": [rows, columns],
        "scale": _rounded(scale),
        "values": _base64(torch.where(steps.isnan(), -128, steps).to(torch.int8)),
    }


def encode_map(layer: Layer, image: int, mean: bool = False) -> Item:
    """The attention of image number `image` of a layer, the mean over heads if `mean`: rows of at most about QUERIES patches.

    For query q, head g and slot k of its window, weights[q, g, k] / 255 * scale[q, g] is the weight of token
    tokens[windows[q], k], prefix tokens first, -1 for padding; global layers have no `tokens`, slot k being token k.
    """
    grid = layer.grid
    slots = layer.tokens.cpu().flatten()
    step = 1
    while -(-grid.h // step) * -(-grid.w // step) > QUERIES:
        step += 1
    patch = slots - grid.prefix
    y, x = patch // grid.w, patch % grid.w
    kept = ((slots >= 0) & ((patch < 0) | ((y % step == step // 2) & (x % step == step // 2)))).nonzero().flatten()
    both = [_attention_rows(what[image], kept, mean) for what in (layer.weights, layer.content) if what is not None]
    scale = torch.stack(both).amax((0, -1))  # [Q, H]
    levels = [(what / scale.clamp(min=1e-12)[..., None] * 255).round().to(torch.uint8) for what in both]
    return {
        "grid": list(grid),
        "shape": list(both[0].shape),
        "step": step,
        "mean": mean,
        "queries": slots[kept].tolist(),
        "windows": (kept // layer.tokens.shape[1]).tolist(),
        "tokens": None if layer.window is None else layer.tokens.tolist(),
        "scale": _rounded(scale.flatten()),
        "weights": _base64(levels[0]),
        "content": _base64(levels[1]) if len(levels) > 1 else None,
    }


class _Recorded(NamedTuple):
    """What was taken of one task: one lattice a layer, and maps by layer and image."""

    lattices: list[Item]
    maps: list[Item]


def _former_pictures(folder: Path, rows: Sequence[Row], made: set[tuple[str, str, str]]) -> Item:
    """What the file in `folder` holds of places (label, size, policy) that rows have and that are not made now."""
    kept: Item = {"models": [], "pictures": {}, "left_out": []}
    places = {(row["label"], row["img_size"], row["policy"]) for row in rows} - made
    try:
        stored = json.loads(gzip.decompress((Path(folder) / "pictures.json.gz").read_bytes())) if places else kept
        for model in stored["models"]:
            own = {place[1:] for place in places if place[0] == model["label"]}
            for kind in ("lattices", "maps"):
                model[kind] = [item for item in model[kind] if (item["size"], item["policy"]) in own]
            kept["models"] += [model] if own else []
        used = {key for model in kept["models"] for item in model["maps"] for key in item["pictures"]}
        kept["pictures"] = {key: text for key, text in stored["pictures"].items() if key in used}
        again = tuple(f"{label} at {size}:" for label, size, _ in made)
        kept["left_out"] = [text for text in stored["left_out"] if not text.startswith(again)]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):  # none, or damaged: pictures can be made again
        return {"models": [], "pictures": {}, "left_out": []}
    return kept


def _merged_models(former: Sequence[Item], found: Sequence[Item]) -> list[Item]:
    """Entries of the same label as one."""
    merged = {one["label"]: one for one in former}
    for one in found:
        before = merged.get(one["label"], {"layers": [], "lattices": [], "maps": [], "images": []})
        both = {kind: before[kind] + one[kind] for kind in ("lattices", "maps")}
        merged[one["label"]] = one | both | {kind: one[kind] or before[kind] for kind in ("layers", "images")}
    return [*merged.values()]


def _recorded_tasks(models: Sequence[Trained], sweep: Sweep) -> list[Task]:
    """One per model, size and policy, in the scale protocol where it is evaluated, and at the first crop."""
    protocol = "scale" if "scale" in sweep.protocols else sweep.protocols[0]
    found: dict[tuple, Task] = {}
    for task in tasks_of(models, sweep):
        if task.protocol == protocol:
            found.setdefault((id(task.trained), task.size, task.policy), task)
    return list(found.values())


def _record_model(
    tasks: Sequence[Task], sweep: Sweep, samples: Images, pictures: dict[str, str], budget: int
) -> tuple[Item, int]:
    """The entry of one model, and the bytes that it takes."""
    trained, spent = tasks[0].trained, 0
    one: Item = {"label": trained.label, "seed": trained.seed, "train_size": format_size(trained.img_size), "error": None}
    one |= {"layers": [], "lattices": [], "maps": [], "images": [], "left_out": []}
    for place, task in enumerate(tasks):
        share, size = (budget - spent) // (len(tasks) - place), format_size(task.size)
        first = all(other.size != task.size for other in tasks[:place])
        pixels, names = _samples(task, samples)
        if not names:
            one["error"] = "none of the sample images can be read"
            break
        one["images"] = names
        try:
            layers, found = _record_task(task, sweep, pixels, first, share)
        except ValueError as error:
            one["error"] = str(error)
            break
        if layers is None:
            one["left_out"].append(f"{trained.label} at {size}: more than {LARGEST:,} tokens")
            continue
        one["layers"] = layers
        about: Item = {"size": size, "policy": task.policy}
        spent += _append_within(one, "lattices", found.lattices, about, share)
        if first:
            known, before, all_maps = len("".join(pictures.values())), len(one["maps"]), len(layers) * len(names)
            about["pictures"] = [_picture(task, image, pixels[image], pictures) for image in range(len(names))]
            drawn = len("".join(pictures.values())) - known
            spent += drawn
            spent += _append_within(one, "maps", found.maps, about, share - drawn)
            if lost := all_maps - (len(one["maps"]) - before):
                one["left_out"].append(f"{trained.label} at {size}: attention of {lost} of {all_maps} layers and images")
    return one, spent


def _record_task(task: Task, sweep: Sweep, pixels: Tensor, maps: bool, share: int) -> tuple[list[str] | None, _Recorded]:
    """Names of all layers, None where there are too many tokens; what was taken, most wanted first, maps only if `maps`."""
    names, found = [], _Recorded([], [])
    device = sweep.torch_device

    def use(layer: Layer) -> None:
        names.append(layer.name)
        if layer.position is not None:
            at = {"layer": len(names) - 1, "window": list(layer.window or layer.grid[:2])}
            found.lattices.append(at | encode_lattice(offset_mean(layer, layer.position)))
        for image in range(len(pixels) if maps else 0):
            item = encode_map(layer, image)
            if len(item["weights"]) + len(item["content"] or "") > 4 * share:
                item = encode_map(layer, image, mean=True)
            found.maps.append({"layer": len(names) - 1, "image": image} | item)

    try:
        with at_size_with(task.trained.model.to(device), task.size, task.policy) as ready:
            if ready.tokens > LARGEST:
                return None, found
            for_each_layer(ready.model.to(device), pixels.to(device), use)
    finally:
        task.trained.model.cpu()
    wanted = [len(names) - 1, 0, len(names) // 2]
    found.maps.sort(key=lambda item: (item["layer"] not in wanted, item["image"]))
    return names, found


def _samples(task: Task, samples: Images) -> tuple[Tensor, list[str]]:
    """The first image and one from the middle of the data, [n, 3, H, W], and the names of their classes."""
    dataset = samples.dataset(task.preprocessing)
    places = sorted({round(i * len(dataset) / IMAGES) for i in range(IMAGES)})
    items = [item for item in (dataset[place] for place in places if place < len(dataset)) if item[1] >= 0]
    classes = getattr(dataset, "classes", None)
    names = [str(classes[label]) if classes else str(label) for _, label in items]
    return (torch.stack([image for image, _ in items]) if items else torch.zeros(0, 3, *task.size)), names


def _picture(task: Task, image: int, pixels: Tensor, pictures: dict[str, str]) -> str:
    """The key under which an image as the model saw it lies in `pictures`, a PNG of at most SIDE pixels."""
    key = (
        f"{image} {format_size(task.size)} {task.crop_pct:g} {task.trained.interpolation} {format_size(task.trained.img_size)}"
    )
    if key not in pictures:
        mean, std = (torch.tensor(values)[:, None, None] for values in (task.trained.mean, task.trained.std))
        picture = to_pil_image((pixels * std + mean).clamp(0, 1))
        picture.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        picture.save(file, "PNG", optimize=True)
        pictures[key] = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return key


def _append_within(one: Item, name: str, items: Sequence[Item], about: Item, room: int) -> int:
    """Appends to `one[name]` the items that take at most `room` bytes together; the bytes they take."""
    spent = 0
    for item in items:
        item = about | item
        size = len(zlib.compress(json.dumps(item).encode()))
        if spent + size <= room:
            one[name].append(item)
            spent += size
    return spent


def _attention_rows(what: Tensor, kept: Tensor, mean: bool) -> Tensor:
    """[W, H, N, N] -> rows [Q, H, N] of the kept slots, [Q, 1, N] if mean."""
    rows = what.cpu().transpose(1, 2).flatten(0, 1)[kept]  # [Q, H, N]
    return rows.mean(1, keepdim=True) if mean else rows


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()
