"""pictures.json.gz: what position adds by offset, and where patches attend, for the maps of report.html.

What does not fit into the byte budget is left out layer by layer, and named in the file.
"""

import base64
import gzip
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from vitrel.evaluate.checkpoint import Trained
from vitrel.evaluate.fitting import fitted
from vitrel.evaluate.images import Images
from vitrel.evaluate.plan import Task, plan
from vitrel.evaluate.settings import Row, Sweep
from vitrel.files import atomic_write
from vitrel.inspect.attention import Layer, for_each_layer, offset_mean
from vitrel.sizes import format_size

BUDGET = 8 << 20  # bytes of the compressed file; as text in the page a third more
REACH = 31  # offsets along one axis that are shown, in tokens
QUERIES = 256  # patches of an image whose attention is kept
LARGEST = 4096  # tokens, above which attention is not recorded
IMAGES = 2
SIDE = 224  # pixels of the longer side of a picture

Item = dict[str, Any]


class Found(NamedTuple):
    """What was taken of one task: one lattice a layer, and maps by layer and image."""

    lattices: list[Item]
    maps: list[Item]


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
    tasks = _tasks(firsts, sweep)
    former = _former(folder, rows, {(task.trained.label, format_size(task.size), task.policy) for task in tasks})
    budget = max(budget - len(zlib.compress(json.dumps(former).encode())), budget // 4)
    samples, pictures, left_out, found = Images(sweep), {}, [], []
    for place, trained in enumerate(firsts):
        own = [task for task in tasks if task.trained is trained]
        one, spent = _model(own, sweep, samples, pictures, budget // (len(firsts) - place))
        left_out += one.pop("left_out")
        found.append(one)
        budget -= spent
    found = _merged_models(former["models"], found)
    pictures, left_out = former["pictures"] | pictures, former["left_out"] + left_out
    stored = {"format": 1, "models": found, "pictures": pictures, "left_out": left_out}
    with atomic_write(Path(folder) / "pictures.json.gz") as part:
        part.write_bytes(gzip.compress(json.dumps(stored, separators=(",", ":")).encode(), mtime=0))
    return Path(folder) / "pictures.json.gz"


def _former(folder: Path, rows: Sequence[Row], made: set[tuple[str, str, str]]) -> Item:
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
        "values": _text(torch.where(steps.isnan(), -128, steps).to(torch.int8)),
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
    both = [_rows(what[image], kept, mean) for what in (layer.weights, layer.content) if what is not None]
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
        "weights": _text(levels[0]),
        "content": _text(levels[1]) if len(levels) > 1 else None,
    }


def _tasks(models: Sequence[Trained], sweep: Sweep) -> list[Task]:
    """One per model, size and policy, in the scale protocol where it is evaluated, and at the first crop."""
    protocol = "scale" if "scale" in sweep.protocols else sweep.protocols[0]
    found: dict[tuple, Task] = {}
    for task in plan(models, sweep):
        if task.protocol == protocol:
            found.setdefault((id(task.trained), task.size, task.policy), task)
    return list(found.values())


def _model(tasks: Sequence[Task], sweep: Sweep, samples: Images, pictures: dict[str, str], budget: int) -> tuple[Item, int]:
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
            layers, found = _record(task, sweep, pixels, first, share)
        except ValueError as error:
            one["error"] = str(error)
            break
        if layers is None:
            one["left_out"].append(f"{trained.label} at {size}: more than {LARGEST:,} tokens")
            continue
        one["layers"] = layers
        about = {"size": size, "policy": task.policy}
        spent += _keep(one, "lattices", found.lattices, about, share)
        if first:
            known, before, all_maps = len("".join(pictures.values())), len(one["maps"]), len(layers) * len(names)
            about["pictures"] = [_picture(task, image, pixels[image], pictures) for image in range(len(names))]
            drawn = len("".join(pictures.values())) - known
            spent += drawn
            spent += _keep(one, "maps", found.maps, about, share - drawn)
            if lost := all_maps - (len(one["maps"]) - before):
                one["left_out"].append(f"{trained.label} at {size}: attention of {lost} of {all_maps} layers and images")
    return one, spent


def _record(task: Task, sweep: Sweep, pixels: Tensor, maps: bool, share: int) -> tuple[list[str] | None, Found]:
    """Names of all layers, None where there are too many tokens; what was taken, most wanted first, maps only if `maps`."""
    names, found = [], Found([], [])
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
        with fitted(task.trained.model.to(device), task.size, task.policy) as fit:
            if fit.tokens > LARGEST:
                return None, found
            for_each_layer(fit.model.to(device), pixels.to(device), use)
    finally:
        task.trained.model.cpu()
    wanted = [len(names) - 1, 0, len(names) // 2]
    found.maps.sort(key=lambda item: (item["layer"] not in wanted, item["image"]))
    return names, found


def _samples(task: Task, samples: Images) -> tuple[Tensor, list[str]]:
    """The first image and one from the middle of the data, [n, 3, H, W], and the names of their classes."""
    dataset = samples.dataset(task)
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


def _keep(one: Item, name: str, items: Sequence[Item], about: Item, room: int) -> int:
    """Enters the items for which there is room; the bytes that they take."""
    spent = 0
    for item in items:
        item = about | item
        size = len(zlib.compress(json.dumps(item).encode()))
        if spent + size <= room:
            one[name].append(item)
            spent += size
    return spent


def _rows(what: Tensor, kept: Tensor, mean: bool) -> Tensor:
    """[W, H, N, N] -> rows [Q, H, N] of the kept slots, [Q, 1, N] if mean."""
    rows = what.cpu().transpose(1, 2).flatten(0, 1)[kept]  # [Q, H, N]
    return rows.mean(1, keepdim=True) if mean else rows


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _text(values: Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()
