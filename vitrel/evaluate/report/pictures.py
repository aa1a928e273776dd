"""Pictures of a report, recorded by running the models: pictures.json.gz.

What position adds by offset, how alike the embeddings added to tokens are, where patches attend, what the model saw at every
size and protocol, and thumbnails of images whose prediction changes. All has to fit into a budget of bytes: layers are left
out, or recorded with fewer queries and the mean of all heads, and what is left out is named in the file.
"""

import base64
import gzip
import hashlib
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from vitrel.evaluate.images import Images
from vitrel.evaluate.measure import Task, tasks_of
from vitrel.evaluate.models import Trained
from vitrel.evaluate.policies import at_size_with
from vitrel.evaluate.predictions import read_predictions
from vitrel.evaluate.report.mistakes import changed_images
from vitrel.evaluate.settings import Row, Sweep
from vitrel.files import atomic_write
from vitrel.grid import Grid
from vitrel.inspect.any_model import patch_grid
from vitrel.inspect.attention import Layer, for_each_layer, offset_mean
from vitrel.models.backbone import Backbone
from vitrel.sizes import Size, format_size

BUDGET = 1_150_000  # bytes of the compressed file; as text in the page a third more
REACH = 31  # offsets along one axis that are shown, in tokens
QUERIES = 256  # patches of an image whose attention is kept, where there is room
SIMILAR = 36  # patches whose similarity to all others is kept
LARGEST = 4096  # tokens, above which attention is not recorded
IMAGES = 2
SIDE = 192  # pixels of the longer side of a picture
THUMBNAIL = 72  # the same of an image whose prediction changes
THUMBNAILS = 48  # how many of these there are at most
QUALITY = 72  # of WebP
PART = 0.3  # of the room of a size that one map or the offsets of one layer may take
Item = dict[str, Any]


def collect_pictures(
    models: Sequence[Trained],
    sweep: Sweep,
    folder: Path,
    budget: int = BUDGET,
    rows: Sequence[Row] = (),
    images: bool = True,
) -> Path:
    """Writes `folder`/pictures.json.gz, at most about `budget` bytes, and returns its path.

    For the first model of every label, at every size of the sweep: the mean logit that position adds by offset, the cosine
    similarity of the embeddings added to tokens, and the attention of sample images. A model whose attention cannot be seen has
    the reason instead. Each is recorded at the policies that the sweep evaluates, attention at the first of them alone. Of the
    first model also a sample image at every size and protocol, and thumbnails of images whose prediction changes with size
    (predictions in `folder`).

    rows: those of the folder; what the file holds of any that are not recorded now stays in it, and leaves at least a quarter
    of the budget. images: without, no photograph is written.
    """
    firsts = list({trained.label: trained for trained in reversed(models)}.values())[::-1]
    asked = tasks_of(firsts, sweep)
    tasks = _recorded_tasks(asked, sweep)
    former = _former_pictures(folder, rows, {(task.trained.label, format_size(task.size), task.policy) for task in tasks})
    budget = max(budget - len(zlib.compress(json.dumps(former).encode())), budget // 4)
    samples, blobs = Images(sweep), dict[str, str]()
    seen = _what_is_seen([task for task in asked if task.trained is firsts[0]], samples, blobs) if images else []
    thumbnails = _thumbnails(tasks[0], samples, folder, rows) if images else {}
    budget -= len("".join([*blobs.values(), *thumbnails.values()])) * 3 // 4  # base64 compresses to what it encodes
    found = []
    for place, trained in enumerate(firsts):
        own = [task for task in tasks if task.trained is trained]
        one, spent = _record_model(own, sweep, samples, blobs, budget // (len(firsts) - place), images)
        found.append(one)
        budget -= spent
    made = [(item["size"], item["protocol"]) for item in seen]
    stored = {
        "format": 2,
        "models": _merged_models(former["models"], found),
        "seen": [item for item in former["seen"] if (item["size"], item["protocol"]) not in made] + seen,
        "thumbnails": former["thumbnails"] | thumbnails,
        "words": former["words"] | _described_classes(firsts, tasks[0], samples),
        "blobs": former["blobs"] | blobs,
    }
    with atomic_write(Path(folder) / "pictures.json.gz") as part:
        part.write_bytes(gzip.compress(json.dumps(stored, separators=(",", ":")).encode(), mtime=0))
    return Path(folder) / "pictures.json.gz"


def read_pictures(path: Path) -> Item | None:
    """What `collect_pictures` wrote; None where there is no such file, or it is damaged or of another version."""
    try:
        stored = json.loads(gzip.decompress(path.read_bytes()))
        return stored if stored["format"] == 2 else None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):  # pictures can be made again
        return None


def without_images(stored: Item) -> Item:
    """The same without photographs: what the models saw, thumbnails, and the pictures below maps of attention."""
    models = [model | {"maps": [item | {"pictures": []} for item in model["maps"]]} for model in stored["models"]]
    blobs = {key: text for key, text in stored["blobs"].items() if not text.startswith("data:")}
    return stored | {"models": models, "seen": [], "thumbnails": {}, "blobs": blobs}


def encode_lattice(values: Tensor, reach: int = REACH) -> Item:
    """[H, 2h-1, 2w-1] as bytes, a scale per head; NaN is -128, offsets beyond `reach` are cut off."""
    rows, columns = values.shape[1:]
    down, right = max(0, rows // 2 - reach), max(0, columns // 2 - reach)
    shown = values[:, down : rows - down, right : columns - right].float().cpu()
    scale = shown.nan_to_num().abs().amax((1, 2))
    steps = (shown / scale.clamp(min=1e-12)[:, None, None] * 127).round()
    return {
        "shape": list(shown.shape),
        "full": [rows, columns],
        "scale": _rounded(scale),
        "values": _base64(torch.where(steps.isnan(), -128, steps).to(torch.int8)),
    }


def encode_map(layer: Layer, image: int, mean: bool = False, queries: int = QUERIES) -> Item:
    """The attention of image number `image` of a layer, the mean over heads if `mean`: rows of at most about `queries` patches.

    For query q, head g and slot k of its window, weights[q, g, k] / 255 * scale[q, g] is the weight of token
    tokens[windows[q], k], prefix tokens first, -1 for padding; global layers have no `tokens`, slot k being token k. `content`
    is the same without position, None where position does not act in this layer.
    """
    grid = layer.grid
    slots = layer.tokens.cpu().flatten()
    step = _step(grid, queries)
    patch = slots - grid.prefix
    y, x = patch // grid.w, patch % grid.w
    kept = ((slots >= 0) & ((patch < 0) | ((y % step == step // 2) & (x % step == step // 2)))).nonzero().flatten()
    acts = _acts(layer)
    both = [_attention_rows(what[image], kept, mean) for what in ((layer.weights, layer.content) if acts else (layer.weights,))]
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


def encode_similarity(embedding: Tensor) -> Item:
    """Cosine similarity, in steps of 1/127, of about SIMILAR rows of [h, w, C] to all of them: int8 [Q, h*w]."""
    h, w = embedding.shape[:2]
    step = _step(Grid(h, w), SIMILAR)
    index = torch.arange(h * w).view(h, w)[step // 2 :: step, step // 2 :: step].flatten()
    rows = torch.nn.functional.normalize(embedding.flatten(0, 1).float(), dim=-1)
    steps = (rows[index] @ rows.mT * 127).round().clamp(-127, 127).to(torch.int8)
    return {"grid": [h, w], "step": step, "queries": index.tolist(), "values": _base64(steps)}


@torch.no_grad()
def token_embedding(model: nn.Module, size: Size) -> Tensor | None:
    """[h, w, C] of what a model adds to the patches of an image of `size` (h, w) pixels; None where it adds nothing.

    Of timm's models `pos_embed`, resampled as timm does where it is stored for another grid.
    """
    stored = getattr(model, "pos_embed", None)
    if stored is None:
        return None
    if isinstance(model, Backbone):
        grid = model.token_grid(size)
        return stored(grid).tokens[grid.prefix :].unflatten(0, grid[:2]).cpu()
    shape, built = patch_grid(model, size), getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not isinstance(stored, Tensor) or stored.dim() != 3 or shape is None or built is None:
        return None
    prefix = stored.shape[1] - math.prod(built)
    if prefix < 0:
        return None
    rows = stored if built == shape else resample_abs_pos_embed(stored, shape, built, prefix)
    return rows[0, prefix:].unflatten(0, shape).cpu()


class _Recorded(NamedTuple):
    """What was taken of one task."""

    layers: list[str]  # names of all
    acts: bool  # whether position adds to the logits of any layer
    items: list[tuple[int, str, Item]]  # (place among what is wanted, "lattices" or "maps", what it is)


def _former_pictures(folder: Path, rows: Sequence[Row], made: set[tuple[str, str, str]]) -> Item:
    """What the file in `folder` holds of places (label, size, policy) that rows have and that are not made now."""
    nothing: Item = {"models": [], "seen": [], "thumbnails": {}, "words": {}, "blobs": {}}
    places = {(row["label"], row["img_size"], row["policy"]) for row in rows} - made
    stored = read_pictures(Path(folder) / "pictures.json.gz") if places else None
    if stored is None:
        return nothing
    kept = stored | {"models": []}
    for model in stored["models"]:
        own = {place[1:] for place in places if place[0] == model["label"]}
        for kind in ("lattices", "maps", "similar"):
            model[kind] = [item for item in model[kind] if (item["size"], item["policy"]) in own]
        kept["models"] += [model] if own else []
    used = {key for model in kept["models"] for item in model["maps"] for key in item["pictures"]}
    used |= {item["values"] for model in kept["models"] for item in model["lattices"] + model["similar"]}
    used |= {item["picture"] for item in kept["seen"]}
    kept["blobs"] = {key: text for key, text in stored["blobs"].items() if key in used}
    return kept


def _merged_models(former: Sequence[Item], found: Sequence[Item]) -> list[Item]:
    """Entries of the same label as one."""
    merged = {one["label"]: one for one in former}
    for one in found:
        before = merged.get(one["label"], {"layers": [], "lattices": [], "maps": [], "similar": [], "images": []})
        both = {kind: before[kind] + one[kind] for kind in ("lattices", "maps", "similar")}
        merged[one["label"]] = one | both | {kind: one[kind] or before[kind] for kind in ("layers", "images")}
    return [*merged.values()]


def _recorded_tasks(asked: Sequence[Task], sweep: Sweep) -> list[Task]:
    """One per model, size and policy, in the scale protocol where it is evaluated, and at the first crop."""
    protocol = "scale" if "scale" in sweep.protocols else sweep.protocols[0]
    found: dict[tuple, Task] = {}
    for task in asked:
        if task.protocol == protocol:
            found.setdefault((id(task.trained), task.size, task.policy), task)
    return list(found.values())


def _what_is_seen(tasks: Sequence[Task], samples: Images, blobs: dict[str, str]) -> list[Item]:
    """The first sample image at every size and protocol as the model of these tasks saw it."""
    found: dict[tuple[str, str], Item] = {}
    for task in tasks:
        place = format_size(task.size), task.protocol
        if place in found:
            continue
        pixels = samples.first(task.preprocessing, 1)  # at native shape the image's own
        _, names = _samples(task, samples, 1)
        if len(pixels) and names:
            key = _picture(task, 0, pixels[0], blobs)
            about = {"label": task.trained.label, "size": place[0], "protocol": place[1], "class": names[0]}
            found[place] = about | {"shape": list(pixels[0].shape[-2:]), "picture": key}
    return list(found.values())


def _thumbnails(task: Task, samples: Images, folder: Path, rows: Sequence[Row]) -> dict[str, str]:
    """{name of the image: picture} of at most THUMBNAILS images whose prediction changes with size, those of most curves first.

    Empty where `folder` holds no predictions, or they are of other images than the data that is read now.
    """
    predictions, dataset = read_predictions(folder), samples.dataset(task.preprocessing)
    if predictions is None or len(predictions.names) != len(dataset):
        return {}
    times = Counter(item["image"] for curve in changed_images(rows, predictions) for item in curve["images"])
    found = {}
    for place, _ in times.most_common(THUMBNAILS):
        pixels, label = dataset[place]
        if label == predictions.labels[place]:
            found[predictions.names[place]] = _data_url(task.trained, pixels, THUMBNAIL)
    return found


def _described_classes(models: Sequence[Trained], task: Task, samples: Images) -> dict[str, str]:
    """{class of the data: what a model's `pretrained_cfg` calls it}, of classes that are numbers or described there."""
    classes = getattr(samples.dataset(task.preprocessing), "classes", None) or []
    found: dict[str, str] = {}
    for trained in models:
        known = getattr(trained.model, "pretrained_cfg", None) or {}
        names, described = known.get("label_names") or (), known.get("label_descriptions") or {}
        numbered = {str(place): name for place, name in enumerate(names)} if len(names) == len(classes) else {}
        for raw in map(str, classes):
            name = numbered.get(raw, raw)
            if name != raw or name in described:
                found.setdefault(raw, str(described.get(name, name)))
    return found


def _record_model(
    tasks: Sequence[Task], sweep: Sweep, samples: Images, blobs: dict[str, str], budget: int, images: bool
) -> tuple[Item, int]:
    """The entry of one model, and the bytes that it takes."""
    trained, spent, lost = tasks[0].trained, 0, set()
    one: Item = {"label": trained.label, "seed": trained.seed, "train_size": format_size(trained.img_size), "error": None}
    one |= {"acts": False, "layers": [], "lattices": [], "maps": [], "similar": [], "images": [], "left_out": []}
    for place, task in enumerate(tasks):
        room, size = (budget - spent) // (len(tasks) - place), format_size(task.size)
        before, about = room, {"size": size, "policy": task.policy}
        first = all(other.size != task.size for other in tasks[:place])
        pixels, names = _samples(task, samples, IMAGES)
        if not names:
            one["error"] = "none of the sample images can be read"
            break
        one["images"] = names
        try:
            found, embedding = _record_task(task, sweep, pixels, first, room)
        except ValueError as error:
            one["error"] = str(error)
            found, embedding = None, _embedding_at(task)
        if embedding is not None and first:
            room -= _append(one["similar"], about | encode_similarity(embedding), room, blobs)
        if found is None:
            if one["error"] is None:
                one["left_out"].append(f"{trained.label} at {size}: more than {LARGEST:,} tokens")
        else:
            one["layers"], one["acts"] = found.layers, one["acts"] or found.acts
            drawn = [_picture(task, image, pixels[image], blobs) for image in range(len(names))] if images and first else []
            more = {"lattices": about, "maps": about | {"pictures": drawn}}
            for _, kind, item in sorted(found.items, key=lambda item: item[0]):
                took = _append(one[kind], more[kind] | item, room, blobs)
                room -= took
                lost |= set() if took else {size}
        spent += before - room
    if lost:
        one["left_out"].append(f"{trained.label}: some layers and images at {', '.join(sorted(lost))}, for lack of room")
    return one, spent


def _record_task(task: Task, sweep: Sweep, pixels: Tensor, maps: bool, room: int) -> tuple[_Recorded | None, Tensor | None]:
    """What was taken of the layers, maps only if `maps`, None where there are too many tokens; and the embedding of tokens."""
    found: list[tuple[str, Item]] = []
    names, acts = [], []
    device, part = sweep.torch_device, int(PART * room)

    def use(layer: Layer) -> None:
        names.append(layer.name)
        acts.append(_acts(layer))
        at = {"layer": len(names) - 1}
        if acts[-1]:
            lattice = _fitting_lattice(offset_mean(layer, layer.position), part)
            found.append(("lattices", at | {"window": list(layer.window or layer.grid[:2])} | lattice))
        for image in range(len(pixels) if maps else 0):
            found.append(("maps", at | {"image": image} | _fitting_map(layer, image, part)))

    try:
        with at_size_with(task.trained.model.to(device), task.size, task.policy) as ready:
            if ready.tokens > LARGEST:
                return None, None
            embedding = token_embedding(ready.model, task.size)
            for_each_layer(ready.model.to(device), pixels.to(device), use)
    finally:
        task.trained.model.cpu()
    wanted = {len(names) - 1, 0, len(names) // 2}  # the last first, then in the order of layers

    def place(kind: str, item: Item) -> int:
        return 2 * (item["layer"] not in wanted) + 4 * item.get("image", 0) + (kind == "maps")

    return _Recorded(names, any(acts), [(place(kind, item), kind, item) for kind, item in found]), embedding


def _embedding_at(task: Task) -> Tensor | None:
    with at_size_with(task.trained.model, task.size, task.policy) as ready:
        return token_embedding(ready.model, task.size)


def _acts(layer: Layer) -> bool:
    """Whether position adds anything to the logits of a layer."""
    return layer.position is not None and bool(layer.position.any())


def _fitting_lattice(values: Tensor, room: int) -> Item:
    """`encode_lattice` with as many offsets as fit into `room` bytes, at least 7 along an axis."""
    reach = REACH
    while (item := encode_lattice(values, reach)) and reach > 7 and _bytes(item) > room:
        reach = reach * 3 // 4
    return item


def _fitting_map(layer: Layer, image: int, room: int) -> Item:
    """`encode_map` with the heads and queries that fit into `room` bytes, at least the mean of 16 queries."""
    for queries, mean in ((QUERIES, False), (QUERIES, True), (64, True)):
        item = encode_map(layer, image, mean, queries)
        if _bytes(item) <= room:
            return item
    return encode_map(layer, image, True, 16)


def _samples(task: Task, samples: Images, most: int) -> tuple[Tensor, list[str]]:
    """The first image and others evenly from the data, [n, 3, H, W], and the names of their classes."""
    dataset = samples.dataset(task.preprocessing)
    places = sorted({round(i * len(dataset) / most) for i in range(most)})
    items = [item for item in (dataset[place] for place in places if place < len(dataset)) if item[1] >= 0]
    classes = getattr(dataset, "classes", None)
    names = [str(classes[label]) if classes else str(label) for _, label in items]
    return (torch.stack([image for image, _ in items]) if items else torch.zeros(0, 3, *task.size)), names


def _picture(task: Task, image: int, pixels: Tensor, blobs: dict[str, str]) -> str:
    """The key under which an image as the model saw it lies in `blobs`, of at most SIDE pixels."""
    how = task.protocol, f"{task.crop_pct:g}", task.trained.interpolation, format_size(task.trained.img_size)
    key = " ".join((str(image), format_size(task.size), *how))
    if key not in blobs:
        blobs[key] = _data_url(task.trained, pixels, SIDE)
    return key


def _data_url(trained: Trained, pixels: Tensor, side: int) -> str:
    """Normalised pixels [3, H, W] as a WebP picture of at most `side` pixels."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (trained.mean, trained.std))
    picture = to_pil_image((pixels * std + mean).clamp(0, 1))
    picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=QUALITY, method=6)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _append(kept: list[Item], item: Item, room: int, blobs: dict[str, str]) -> int:
    """Appends an item that takes at most `room` bytes; the bytes it takes, 0 where it does not fit.

    `values` are moved to `blobs`, under a key that equal ones share: the offsets of a window are the same at every size.
    """
    values: dict[str, str] = {}
    if "values" in item:
        key = hashlib.sha256(item["values"].encode()).hexdigest()[:12]
        values, item = {key: item["values"]}, item | {"values": key}
    size = _bytes(item) + sum(_bytes(text) for key, text in values.items() if key not in blobs)
    if size > room:
        return 0
    kept.append(item)
    blobs |= values
    return size


def _bytes(item: Item | str) -> int:
    return len(zlib.compress(json.dumps(item).encode(), 1))


def _step(grid: Grid, queries: int) -> int:
    """Every how many rows and columns a patch is kept, so that there are at most so many."""
    step = 1
    while -(-grid.h // step) * -(-grid.w // step) > queries:
        step += 1
    return step


def _attention_rows(what: Tensor, kept: Tensor, mean: bool) -> Tensor:
    """[W, H, N, N] -> rows [Q, H, N] of the kept slots, [Q, 1, N] if mean."""
    rows = what.cpu().transpose(1, 2).flatten(0, 1)[kept]  # [Q, H, N]
    return rows.mean(1, keepdim=True) if mean else rows


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()
