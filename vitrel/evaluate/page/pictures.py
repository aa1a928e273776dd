"""What a report shows of single images and of single layers: pictures.json.gz, recorded by running the models.

pictures.json.gz holds the mean position bias by offset, the similarity of position embeddings, attention maps of sample images,
a sample image as preprocessed for every size and protocol, and thumbnails of images whose prediction changes. Its size is
limited: where bytes run out, layers are left out or recorded with fewer queries and the mean of all heads, and the file lists
what is missing.
"""

import base64
import gzip
import hashlib
import io
import json
import math
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from vitrel.common.exits import one_line
from vitrel.common.files import atomic_write, shown
from vitrel.common.sizes import Size, format_size
from vitrel.evaluate.checkpoint import TrainedModel, backbone_of
from vitrel.evaluate.page.changed import changed_images
from vitrel.evaluate.page.scenes import legend, record_scenes
from vitrel.evaluate.policies import at_size_with
from vitrel.evaluate.prepare import Images
from vitrel.evaluate.results.table import read_predictions
from vitrel.evaluate.sweep import Row, Sweep
from vitrel.evaluate.trials import Trial, trials_of
from vitrel.grid import Grid
from vitrel.inspect.any_model import patch_grid
from vitrel.inspect.attention import Layer, for_each_layer, layer_position_share, offset_mean
from vitrel.models.backbone import Backbone

FORMAT = 5  # of the file
BUDGET = 1_000_000  # bytes of the compressed file; as text in the page a third more
REACH = 31  # largest offset along an axis in the maps by offset, in tokens
QUERIES = 256  # maximum number of query patches of an attention map
SIMILAR = 36  # number of patches whose similarity to all others is recorded, about
LARGEST = 4096  # number of tokens above which attention is not recorded
IMAGES = 2  # sample images with attention maps
SIDE = 192  # pixels of the longer side of a picture
THUMBNAIL = 72  # pixels of the longer side of a thumbnail
THUMBNAILS = 48  # maximum number of thumbnails
QUALITY = 72  # of WebP
PART = 0.3  # largest share of the bytes of a size for one attention map, or the map by offset of one layer
Item = dict[str, Any]


def collect_pictures(
    models: Sequence[TrainedModel],
    sweep: Sweep,
    folder: Path,
    budget: int = BUDGET,
    rows: Sequence[Row] = (),
) -> Path:
    """Record the pictures of a report into `folder`/pictures.json.gz, and return its path.

    For the first model of every label, at every size of the sweep: the mean logit that position adds by offset, the cosine
    similarity of the embeddings added to tokens, and the attention of sample images; or the reason why attention cannot be
    recorded. They are recorded in the scale protocol (the first one without it) at the first crop, for every policy, attention
    only for the first. For the first model also a sample image at every size and protocol, and thumbnails of images whose
    prediction changes with size (by predictions.npz); for segmentation the maps of the first image.

    Pictures of rows that are not evaluated now stay in the file. Photographs are left out if `sweep.photographs` is false.
    A picture that cannot be made is left out with a warning, and `left_out` in the file names it.

    Args:
        budget: bytes of the file. New pictures get what the others leave, at least a quarter, so the file may grow beyond it.
        rows: the rows of the folder.
    """
    images = sweep.photographs
    firsts = list({trained.label: trained for trained in reversed(models)}.values())[::-1]
    all_trials = trials_of(firsts, sweep)
    trials = _recorded_trials(all_trials, sweep)
    former = _former_pictures(folder, rows, {(trial.trained.label, format_size(trial.size), trial.policy) for trial in trials})
    budget = max(budget - len(zlib.compress(json.dumps(former).encode())), budget // 4)
    samples, blobs = Images(sweep), dict[str, str]()
    left_out: list[str] = []
    seen: list[Item] = []
    thumbnails: dict[str, str] = {}
    scenes: list[Item] = []
    if images:
        with optional_picture("a sample image at every size", left_out):
            seen = _preprocessed([trial for trial in all_trials if trial.trained is firsts[0]], samples, blobs)
        with optional_picture("images whose prediction changes with size", left_out):
            thumbnails = _thumbnails(trials[0], samples, folder, rows)
    with optional_picture("maps of predicted classes", left_out):
        scenes = record_scenes(all_trials, sweep, samples, images)
    for item in scenes:
        for kind in _SCENE:
            key = hashlib.sha256(item[kind].encode()).hexdigest()[:12]
            blobs[key], item[kind] = item[kind], key
    budget -= len("".join([*blobs.values(), *thumbnails.values()])) * 3 // 4  # gzip undoes the overhead of base64
    recorded = []
    for index, trained in enumerate(firsts):
        of_model = [trial for trial in trials if trial.trained is trained]
        entry, spent = _record_model(of_model, sweep, samples, blobs, budget // (len(firsts) - index), images)
        recorded.append(entry)
        budget -= spent
    replaced = [(item["size"], item["protocol"]) for item in seen]
    stored = {
        "format": FORMAT,
        "models": _merged_models(former["models"], recorded),
        "seen": [item for item in former["seen"] if (item["size"], item["protocol"]) not in replaced] + seen,
        "thumbnails": former["thumbnails"] | thumbnails,
        "scenes": [item for item in former["scenes"] if _scene(item) not in {*map(_scene, scenes)}] + scenes,
        "legend": legend(samples.listed(trials[0].preprocessing)) if scenes else former["legend"],
        "words": former["words"] | _described_classes(firsts, trials[0], samples),
        "left_out": left_out,
        "blobs": former["blobs"] | blobs,
    }
    with atomic_write(Path(folder) / "pictures.json.gz") as part:
        part.write_bytes(gzip.compress(json.dumps(stored, separators=(",", ":")).encode(), mtime=0))
    return Path(folder) / "pictures.json.gz"


@contextmanager
def optional_picture(what: str, left_out: list[str] | None = None) -> Iterator[None]:
    """Context for a picture of a report: where it cannot be made, for whatever reason, a warning says so and the run goes on.

    Args:
        what: the picture, for the warning.
        left_out: list to which the warning's text is added.
    """
    try:
        yield
    except Exception as error:  # the rows, which took the time, are measured and must not be lost for a picture
        text = f"{what}: {one_line(error) or type(error).__name__}"
        warnings.warn(f"left out of the report: {text}", stacklevel=3)
        if left_out is not None:
            left_out.append(text)


def read_pictures(path: Path) -> Item | None:
    """Read a file of `collect_pictures`; None where it is missing, damaged or of another version."""
    try:
        stored = json.loads(gzip.decompress(path.read_bytes()))
        return stored if stored["format"] == FORMAT else None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):  # no error: pictures can be recorded again
        return None


def without_images(stored: Item) -> Item:
    """Return the pictures without photographs: sample images, thumbnails, and images below attention maps."""
    models = [model | {"maps": [item | {"pictures": []} for item in model["maps"]]} for model in stored["models"]]
    blobs = {key: text for key, text in stored["blobs"].items() if not text.startswith("data:")}
    maps = {item[kind] for item in stored["scenes"] for kind in _SCENE[1:]}  # of classes, which are no photographs
    blobs |= {key: stored["blobs"][key] for key in maps}
    return stored | {"models": models, "seen": [], "thumbnails": {}, "blobs": blobs}


_SCENE = ("image", "truth", "predicted")


def _scene(item: Item) -> tuple[str, str, str]:
    """What a picture of a prediction is of."""
    return item["label"], item["protocol"], item["size"]


def encode_lattice(values: Tensor, reach: int = REACH) -> Item:
    """Encode a map by offset [H, 2h-1, 2w-1], for `reach` tokens along an axis at most: shapes, scale per head, base64 int8.

    A value is (byte / 127) * scale of its head; NaN is -128.
    """
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
    """Encode the attention of one image in a layer, for at most about `queries` query patches and all prefix tokens.

    For query q, head g and slot k of its window, weights[q, g, k] / 255 * scale[q, g] is the attention weight of token
    tokens[windows[q], k]: prefix tokens come first, -1 is padding. Global layers have no `tokens`; slot k is token k. `content`
    has the weights without position, or None where position adds nothing in this layer.

    Args:
        mean: averaged over heads.
    """
    grid = layer.grid
    slots = layer.tokens.cpu().flatten()
    step = _step(grid, queries)
    patch = slots - grid.prefix
    y, x = patch // grid.w, patch % grid.w
    kept = ((slots >= 0) & ((patch < 0) | ((y % step == step // 2) & (x % step == step // 2)))).nonzero().flatten()
    sources = (layer.weights, layer.content) if _acts(layer) else (layer.weights,)
    both = [_attention_rows(weights[image], kept, mean) for weights in sources]
    scale = torch.stack(both).amax((0, -1))  # [Q, H]
    levels = [(rows / scale.clamp(min=1e-12)[..., None] * 255).round().to(torch.uint8) for rows in both]
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
    """Encode the cosine similarity of about SIMILAR patches of an embedding [h, w, C] to all patches: int8 [Q, h*w] / 127."""
    h, w = embedding.shape[:2]
    step = _step(Grid(h, w), SIMILAR)
    index = torch.arange(h * w).view(h, w)[step // 2 :: step, step // 2 :: step].flatten()
    rows = torch.nn.functional.normalize(embedding.flatten(0, 1).float(), dim=-1)
    steps = (rows[index] @ rows.mT * 127).round().clamp(-127, 127).to(torch.int8)
    return {"grid": [h, w], "step": step, "queries": index.tolist(), "values": _base64(steps)}


@torch.no_grad()
def token_embedding(model: nn.Module, size: Size) -> Tensor | None:
    """Return the position embedding [rows, columns, C] that a model adds to the patches at `size`, (h, w) in pixels.

    For timm's models this is `pos_embed`, resampled as timm does where it is stored for another grid. None for a model without
    one, or whose `pos_embed` has another layout.
    """
    model = backbone_of(model) or model
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
    """The maps recorded for one trial."""

    layers: list[str]  # names of all layers
    shares: list[float | None]  # `layer_position_share` of all layers, None where it is not known
    acts: bool  # whether position adds to the logits of any layer
    items: list[tuple[int, str, Item]]  # (priority, lowest first; "lattices" or "maps"; encoded map)


def _former_pictures(folder: Path, rows: Sequence[Row], recorded: set[tuple[str, str, str]]) -> Item:
    """The pictures in `folder` of those (label, size, policy) that `rows` have and that are not `recorded` now."""
    nothing: Item = {"models": [], "seen": [], "thumbnails": {}, "scenes": [], "legend": [], "words": {}, "blobs": {}}
    places = {(row["label"], row["img_size"], row["policy"]) for row in rows} - recorded
    stored = read_pictures(Path(folder) / "pictures.json.gz") if places else None
    if stored is None:
        return nothing
    kept = stored | {"models": []}
    for model in stored["models"]:
        of_model = {place[1:] for place in places if place[0] == model["label"]}
        for kind in ("lattices", "maps", "similar"):
            model[kind] = [item for item in model[kind] if (item["size"], item["policy"]) in of_model]
        kept["models"] += [model] if of_model else []
    used = {key for model in kept["models"] for item in model["maps"] for key in item["pictures"]}
    used |= {item["values"] for model in kept["models"] for item in model["lattices"] + model["similar"]}
    used |= {item["picture"] for item in kept["seen"]} | {item[kind] for item in kept["scenes"] for kind in _SCENE}
    kept["blobs"] = {key: text for key, text in stored["blobs"].items() if key in used}
    return kept


def _merged_models(former: Sequence[Item], new: Sequence[Item]) -> list[Item]:
    """Former and new entries of models; those of the same label are merged."""
    merged = {entry["label"]: entry for entry in former}
    for entry in new:
        before = merged.get(
            entry["label"], {"layers": [], "shares": [], "lattices": [], "maps": [], "similar": [], "images": []}
        )
        both = {kind: before[kind] + entry[kind] for kind in ("lattices", "maps", "similar")}
        merged[entry["label"]] = entry | both | {kind: entry[kind] or before[kind] for kind in ("layers", "shares", "images")}
    return [*merged.values()]


def _recorded_trials(trials: Sequence[Trial], sweep: Sweep) -> list[Trial]:
    """One trial per model, size and policy: of the scale protocol (else the first), and the first crop."""
    protocol = "scale" if "scale" in sweep.protocols else sweep.protocols[0]
    first: dict[tuple, Trial] = {}
    for trial in trials:
        if trial.protocol == protocol:
            first.setdefault((id(trial.trained), trial.size, trial.policy), trial)
    return list(first.values())


def _preprocessed(trials: Sequence[Trial], samples: Images, blobs: dict[str, str]) -> list[Item]:
    """One item for every size and protocol of the trials, which are of one model: the first sample image as preprocessed there.

    The pictures are added to `blobs`; items have their keys. Where the image cannot be read there is no item.
    """
    items: dict[tuple[str, str], Item] = {}
    for trial in trials:
        place = format_size(trial.size), trial.protocol
        if place in items:
            continue
        pixels = [*samples.first(trial.preprocessing, 1)]  # in the native protocol with a shape of its own
        _, names = _samples(trial, samples, 1)
        if len(pixels) and names:
            key = _picture(trial, 0, pixels[0], blobs)
            item = {"label": trial.trained.label, "size": place[0], "protocol": place[1], "class": names[0]}
            items[place] = item | {"shape": list(pixels[0].shape[-2:]), "picture": key}
    return list(items.values())


def _thumbnails(trial: Trial, samples: Images, folder: Path, rows: Sequence[Row]) -> dict[str, str]:
    """{name of the image: picture} of at most THUMBNAILS images whose prediction changes with size, on most curves first.

    Empty where `folder` has no predictions, or has predictions of other images than the current data.
    """
    predictions, dataset = read_predictions(folder), samples.dataset(trial.preprocessing)
    if predictions is None or len(predictions.images.names) != len(dataset):
        return {}
    times = Counter(item["image"] for curve in changed_images(rows, predictions) for item in curve["images"])
    thumbnails = {}
    for index, _ in times.most_common(THUMBNAILS):
        for _, pixels, _ in samples.items(trial.preprocessing, [index]):
            thumbnails[predictions.images.names[index]] = _data_url(trial.trained, pixels, THUMBNAIL)
    return thumbnails


def _described_classes(models: Sequence[TrainedModel], trial: Trial, samples: Images) -> dict[str, str]:
    """{class of the data: its name or description in a model's `pretrained_cfg`}, for classes where these differ."""
    classes = getattr(samples.dataset(trial.preprocessing), "classes", None) or []
    words: dict[str, str] = {}
    for trained in models:
        config = getattr(trained.model, "pretrained_cfg", None) or {}
        names, described = config.get("label_names") or (), config.get("label_descriptions") or {}
        numbered = {str(index): name for index, name in enumerate(names)} if len(names) == len(classes) else {}
        for raw in map(str, classes):
            name = raw if raw in names else numbered.get(raw, raw)
            if name != raw or name in described:
                words.setdefault(shown(raw), shown(str(described.get(name, name))))
    return words


def _record_model(
    trials: Sequence[Trial], sweep: Sweep, samples: Images, blobs: dict[str, str], budget: int, images: bool
) -> tuple[Item, int]:
    """Record the pictures of one model; return its entry in the file, and the bytes that this takes."""
    trained, spent, incomplete = trials[0].trained, 0, set()
    entry: Item = {"label": trained.label, "seed": trained.seed, "train_size": format_size(trained.img_size), "error": None}
    entry |= {
        "acts": False,
        "layers": [],
        "shares": [],
        "lattices": [],
        "maps": [],
        "similar": [],
        "images": [],
        "left_out": [],
    }
    for index, trial in enumerate(trials):
        room, size = (budget - spent) // (len(trials) - index), format_size(trial.size)
        before, keys = room, {"size": size, "policy": trial.policy}
        first = all(other.size != trial.size for other in trials[:index])
        pixels, names = _samples(trial, samples, IMAGES)
        if not names:
            entry["error"] = "none of the sample images can be read"
            break
        entry["images"] = names
        failed: list[str] = []
        recorded, embedding = None, None
        with optional_picture(f"maps of {trial.name}", failed):
            try:
                recorded, embedding = _record_trial(trial, sweep, pixels, first, room)
            except ValueError as error:
                entry["error"] = str(error)
                embedding = _embedding_at(trial)
        entry["left_out"] += failed
        if embedding is not None and first:
            room -= _append(entry["similar"], keys | encode_similarity(embedding), room, blobs)
        if recorded is None:
            if entry["error"] is None and not failed:
                entry["left_out"].append(f"{trained.label} at {size}: more than {LARGEST:,} tokens")
        else:
            entry["layers"], entry["acts"] = recorded.layers, entry["acts"] or recorded.acts
            entry["shares"] = entry["shares"] or recorded.shares
            pictures = [_picture(trial, image, pixels[image], blobs) for image in range(len(names))] if images and first else []
            columns = {"lattices": keys, "maps": keys | {"pictures": pictures}}
            for _, kind, item in sorted(recorded.items, key=lambda item: item[0]):
                taken = _append(entry[kind], columns[kind] | item, room, blobs)
                room -= taken
                incomplete |= set() if taken else {size}
        spent += before - room
    if incomplete:
        entry["left_out"].append(
            f"{trained.label}: some layers and images at {', '.join(sorted(incomplete))}, to limit the size of the page"
        )
    return entry, spent


def _record_trial(
    trial: Trial, sweep: Sweep, images: Sequence[Tensor], maps: bool, room: int
) -> tuple[_Recorded | None, Tensor | None]:
    """Run a trial's model on sample images; return maps of its layers (None above LARGEST tokens) and its position embedding.

    Images of different shapes, in the native protocol, are run apart; the maps by offset and the embedding are then those at
    the shape of the first.

    Args:
        images: [3, h, w] each.
        maps: record attention maps too, not only maps by offset.
        room: bytes for this trial.
    """
    encoded: list[tuple[str, Item]] = []
    names: list[str] = []
    acts: list[bool] = []
    shares: list[float | None] = []
    embedding, part = None, int(PART * room)
    by_shape: dict[Size, list[int]] = defaultdict(list)
    for index, image in enumerate(images):
        by_shape[image.shape[-2], image.shape[-1]].append(index)

    def record_shape(model: nn.Module, numbers: Sequence[int]) -> None:
        at, is_first = 0, not names

        def use(layer: Layer) -> None:
            nonlocal at
            keys = {"layer": at}
            at += 1
            if is_first:
                names.append(layer.name)
                acts.append(_acts(layer))
                shares.append(round(layer_position_share(layer), 5) if layer.position is not None else None)
                if acts[-1]:
                    lattice = _fitting_lattice(offset_mean(layer, layer.position), part)
                    encoded.append(("lattices", keys | {"window": list(layer.window or layer.grid[:2])} | lattice))
            for index, number in enumerate(numbers if maps else ()):
                encoded.append(("maps", keys | {"image": number} | _fitting_map(layer, index, part)))

        for_each_layer(model, torch.stack([images[number] for number in numbers]).to(sweep.torch_device), use)

    try:
        for size, numbers in by_shape.items():
            ready = at_size_with(trial.trained.model.to(sweep.torch_device), size, trial.policy)
            if ready.tokens > LARGEST:
                return None, None
            if not names:
                embedding = token_embedding(ready.model, size)
            record_shape(ready.model.to(sweep.torch_device), numbers)
    finally:
        trial.trained.model.cpu()
    preferred = {len(names) - 1, 0, len(names) // 2}  # the first, middle and last layer

    def priority(kind: str, item: Item) -> int:
        return 2 * (item["layer"] not in preferred) + 4 * item.get("image", 0) + (kind == "maps")

    return _Recorded(names, shares, any(acts), [(priority(kind, item), kind, item) for kind, item in encoded]), embedding


def _embedding_at(trial: Trial) -> Tensor | None:
    return token_embedding(at_size_with(trial.trained.model, trial.size, trial.policy).model, trial.size)


def _acts(layer: Layer) -> bool:
    """Whether position changes any logit of a layer: by a bias, a mask, a rotation or a scale; False if not recorded."""
    return layer.position is not None and bool(layer.position.any())


def _fitting_lattice(values: Tensor, room: int) -> Item:
    """`encode_lattice` with as many offsets as fit into `room` bytes, but at least some 7 along an axis."""
    reach = REACH
    while (item := encode_lattice(values, reach)) and reach > 7 and _bytes(item) > room:
        reach = reach * 3 // 4
    return item


def _fitting_map(layer: Layer, image: int, room: int) -> Item:
    """`encode_map` with as many queries and heads as fit into `room` bytes, but at least 16 queries averaged over heads."""
    for queries, mean in ((QUERIES, False), (QUERIES, True), (64, True)):
        item = encode_map(layer, image, mean, queries)
        if _bytes(item) <= room:
            return item
    return encode_map(layer, image, True, 16)


def _samples(trial: Trial, samples: Images, most: int) -> tuple[list[Tensor], list[str]]:
    """At most `most` images [3, H, W] at equal distances in the data, from the first, and the names of their classes."""
    dataset = samples.dataset(trial.preprocessing)
    chosen = sorted({min(round(i * len(dataset) / most), len(dataset) - 1) for i in range(most)})
    items, listed = [*samples.items(trial.preprocessing, chosen)], samples.listed(trial.preprocessing)
    if trial.task.name == "classification":
        names = [listed.classes[int(label)] if listed.classes else str(int(label)) for _, _, label in items]
    else:
        names = [listed.names[index] for index, *_ in items]
    return [image for _, image, _ in items], names


def _picture(trial: Trial, image: int, pixels: Tensor, blobs: dict[str, str]) -> str:
    """Add a preprocessed image to `blobs` as a picture of at most SIDE pixels, and return its key."""
    trained = trial.trained
    crop = f"{trial.crop_pct:g} {trained.crop_mode} {trained.interpolation}"
    key = " ".join((str(image), format_size(trial.size), trial.protocol, crop, format_size(trained.img_size)))
    if key not in blobs:
        blobs[key] = _data_url(trial.trained, pixels, SIDE)
    return key


def _data_url(trained: TrainedModel, pixels: Tensor, side: int) -> str:
    """A data URL of normalized pixels [3, H, W] as a WebP picture of at most `side` pixels."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (trained.mean, trained.std))
    picture = to_pil_image((pixels * std + mean).clamp(0, 1))
    picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=QUALITY, method=6)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _append(kept: list[Item], item: Item, room: int, blobs: dict[str, str]) -> int:
    """Append an item if it takes at most `room` bytes; return its bytes, 0 where it does not fit.

    Its `values` are moved to `blobs` under a hash, because many are equal: the offsets of a window are the same at every size.
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
    """The compressed size of an item."""
    return len(zlib.compress(json.dumps(item).encode(), 1))


def _step(grid: Grid, queries: int) -> int:
    """The smallest step between rows and columns with which at most `queries` patches of a grid remain."""
    step = 1
    while -(-grid.h // step) * -(-grid.w // step) > queries:
        step += 1
    return step


def _attention_rows(weights: Tensor, kept: Tensor, mean: bool) -> Tensor:
    """Rows [Q, H, N] of attention weights [W, H, N, N], of the kept slots; averaged over heads, [Q, 1, N], if mean."""
    rows = weights.cpu().transpose(1, 2).flatten(0, 1)[kept]  # [Q, H, N]
    return rows.mean(1, keepdim=True) if mean else rows


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()
