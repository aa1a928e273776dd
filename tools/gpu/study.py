"""CamVid at 360×480 px: a ViT-Ti with ImageNet weights, its embedding kept or converted to six encodings, three seeds.

All trainings run in one process on data that lie on the device. A converted model is fitted to the original's attention on
training images first (`vitrel.weights.absolute_to_relative`), once for its seeds. Each model is evaluated on the validation
images resized to five sizes, its predictions brought to 360×480 px, the masks' own. Inputs are in a folder that `pack` made.
"""

import copy
import math
import time
import zipfile
from io import BytesIO
from statistics import mean
from typing import NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

import vitrel
from tools.benchmark.tables import Row, markdown
from tools.gpu.parts import Job, Setting, measuring, run_again
from vitrel.data.readers.decode import IGNORED
from vitrel.models.segmenter import Segmenter
from vitrel.weights import absolute_to_relative

POSITIONS = {  # {encoding: its options}; a policy is that of other grids
    "absolute": {},
    "none": {},
    "table": {"policy": "bicubic"},
    "cpb": {},
    "shaw": {},
    "decomposed": {"policy": "bicubic"},
    "rope_mixed": {},
}
SIZE, SIZES = (360, 480), ((180, 240), (270, 360), (360, 480), (540, 720), (720, 960))
CLASSES, SEEDS, EPOCHS, BATCH = 11, 3, 20, 16
RATE, DECAY, LAYER_DECAY, WARMUP = 5e-4, 0.05, 0.75, 0.05  # the warm-up is a share of the updates
ZOOM, JITTER = (0.75, 1.5), 0.2
FITTED = 256  # images to which an encoding is fitted
_FILE = "tools/gpu/study.py"
STAMP = ("code",)  # rows count on another machine as well


class Images(NamedTuple):
    """Images, uint8 [n, 3, h, w], and their masks, uint8 [n, h, w], on the device."""

    pixels: Tensor
    masks: Tensor


class Plan(NamedTuple):
    """What is trained and evaluated."""

    positions: tuple[str, ...]
    seeds: int
    epochs: int
    size: tuple[int, int]
    sizes: tuple[tuple[int, int], ...]
    most: int | None = None  # images of each set

    def runs(self) -> list[tuple[str, int]]:
        """Return (encoding, seed) in order: all encodings of a seed, then those of the next."""
        return [(position, seed) for seed in range(self.seeds) for position in self.positions]


FULL = Plan(tuple(POSITIONS), SEEDS, EPOCHS, SIZE, SIZES)
SMALL = Plan(("absolute", "rope_mixed"), 1, 2, (90, 120), ((90, 120), (180, 240)), 16)


def run_part(setting: Setting) -> None:
    """Train and evaluate what has no rows, in one process."""
    if setting.data is None or not (setting.data / "camvid.zip").exists():
        raise SystemExit("study needs --data, a folder made by `python -m tools.gpu pack FOLDER --camvid DATA --weights FILE`")
    run_again(setting, Job("study"), setting.samples((_FILE,), STAMP))


def work(setting: Setting, name: str) -> None:
    """Train and evaluate what has no rows."""
    samples, plan = setting.samples((_FILE,), STAMP), SMALL if setting.small else FULL
    device, start, longest = setting.device, time.time(), 0.0
    train, val = (read(setting, split, plan) for split in ("train", "val"))
    state = load_file(setting.data / "vit_tiny.safetensors")
    started: dict[str, nn.Module] = {}
    print(f"{len(train.pixels)} and {len(val.pixels)} images read after {time.time() - start:.0f} s", flush=True)
    for position, seed in plan.runs():
        keys = {size: dict(case=position, mode=f"{size[0]}x{size[1]}", contender=f"seed {seed}") for size in plan.sizes}
        ended = samples.has("failed", **keys[plan.size]) or all(samples.has("miou", **key) for key in keys.values())
        if ended or setting.late(1.2 * longest):
            continue
        with measuring(samples, **keys[plan.size]):
            begun = time.time()
            if position not in started:
                started[position] = start_of(position, state, train, plan.size)
            fitted = time.time()
            torch.manual_seed(seed)
            model = Segmenter(copy.deepcopy(started[position]), CLASSES).to(device)
            loss = trained(model, train, seed, plan.epochs)
            seconds = {"fit_s": round(fitted - begun, 1), "train_s": round(time.time() - fitted, 1)}
            for size, key in keys.items():
                samples.add("miou", **key, **evaluated(model, val, size), loss=loss, **seconds)
            longest = max(longest, time.time() - fitted)
            print(position, seed, f"loss {loss:.3f}", seconds, f"in all {longest:.1f} s", flush=True)


def read(setting: Setting, split: str, plan: Plan) -> Images:
    """Return the images of a split, resized where the training size is not theirs."""
    pixels, masks = [], []
    with zipfile.ZipFile(setting.data / "camvid.zip") as file:
        names = sorted(name for name in file.namelist() if name.startswith(f"images/{split}/"))[: plan.most]
        for name in names:
            image = Image.open(BytesIO(file.read(name))).convert("RGB")
            mask = Image.open(BytesIO(file.read(name.replace("images/", "masks/", 1).rsplit(".", 1)[0] + ".png")))
            if plan.size != SIZE:
                image = image.resize(plan.size[::-1], Image.Resampling.BICUBIC)
                mask = mask.resize(plan.size[::-1], Image.Resampling.NEAREST)
            pixels.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
            masks.append(torch.from_numpy(np.array(mask)))
    return Images(torch.stack(pixels).to(setting.device), torch.stack(masks).to(setting.device))


def normalized(pixels: Tensor) -> Tensor:
    """Return pixels 0 to 255 as the weights were trained: mean and standard deviation 0.5."""
    return pixels.float() / 127.5 - 1


def start_of(position: str, state: dict[str, Tensor], train: Images, size: tuple[int, int]) -> nn.Module:
    """Return the backbone that training starts from: ImageNet weights, the embedding kept or converted to an encoding."""
    model = timm.create_model("vitrel_vit_ti16_absolute", img_size=size, drop_path_rate=0.05)
    model = vitrel.load_pretrained(model, {name: value.float() for name, value in state.items()}).to(train.pixels.device)
    if position == "absolute":
        return model
    images = normalized(train.pixels[:: max(1, len(train.pixels) // FITTED)][:FITTED])
    model = absolute_to_relative(model, images, position, POSITIONS[position] or None)
    print(model.conversion, flush=True)
    return model


def trained(model: nn.Module, train: Images, seed: int, epochs: int) -> float:
    """Train a model in place and return the mean loss of the last epoch. Nothing is read from the device before that."""
    device = train.pixels.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, fused=True)
    per_epoch = max(1, len(train.pixels) // BATCH)
    updates = epochs * per_epoch
    warmup = max(1, round(WARMUP * updates))
    model.train()
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(train.pixels), generator=generator, device=device)
        for step in range(per_epoch):
            update = epoch * per_epoch + step
            left = math.cos(math.pi * max(0, update - warmup) / max(1, updates - warmup))
            for group in optimizer.param_groups:
                group["lr"] = RATE * group["lr_scale"] * min((update + 1) / warmup, 0.5 + 0.5 * left)
            images, masks = augmented(train, order[step * BATCH : (step + 1) * BATCH], generator)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), masks, ignore_index=IGNORED)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return round(torch.stack(losses[-per_epoch:]).mean().item(), 4)


def groups(model: nn.Module) -> list[dict]:
    """Return timm's groups of layer-wise decay, encodings in attention in groups of their own, as `vitrel train` has them."""
    scales = {id(p): model.position_lr_scales().get(name) for name, p in model.named_parameters()}
    found = param_groups_layer_decay(model, DECAY, no_weight_decay_list=tuple(model.no_weight_decay()), layer_decay=LAYER_DECAY)
    own = [{"params": [p], "lr_scale": scales[id(p)], "weight_decay": 0.0} for p in model.parameters() if scales[id(p)]]
    return [group | {"params": [p for p in group["params"] if not scales[id(p)]]} for group in found] + own


def augmented(train: Images, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return views of images and masks, each zoomed, moved, mirrored and with another brightness and contrast.

    What a view shows beyond the image is of mean color, and IGNORED in the mask.
    """
    pixels, masks = normalized(train.pixels[chosen]), train.masks[chosen]

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(chosen), generator=generator, device=pixels.device)

    zoom, mirror = ZOOM[0] * (ZOOM[1] / ZOOM[0]) ** draw(0, 1), draw(-1, 1).sign()
    room = (1 - 1 / zoom).abs()
    theta = torch.zeros(len(chosen), 2, 3, device=pixels.device)
    theta[:, 0, 0], theta[:, 0, 2] = mirror / zoom, room * draw(-1, 1)
    theta[:, 1, 1], theta[:, 1, 2] = 1 / zoom, room * draw(-1, 1)
    places = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    images = F.grid_sample(pixels, places, align_corners=False)
    labels = F.grid_sample((masks.float() - IGNORED)[:, None], places, mode="nearest", align_corners=False)[:, 0]
    contrast, brightness = 1 + draw(-JITTER, JITTER), 2 * draw(-JITTER, JITTER)
    return images * contrast[:, None, None, None] + brightness[:, None, None, None], (labels + IGNORED).round().long()


@torch.inference_mode()
def evaluated(model: nn.Module, val: Images, size: tuple[int, int]) -> dict[str, float]:
    """Return mIoU and pixel accuracy of images resized to a size, over all pixels of the masks at their own."""
    model.eval()
    found = torch.zeros(CLASSES * CLASSES + 1, dtype=torch.int64, device=val.pixels.device)
    for pixels, masks in zip(val.pixels.split(BATCH), val.masks.split(BATCH), strict=True):
        images = F.interpolate(normalized(pixels), size, mode="bicubic", antialias=True, align_corners=False)
        with torch.autocast(pixels.device.type, torch.bfloat16):
            logits = model(images)
        logits = F.interpolate(logits.float(), masks.shape[1:], mode="bilinear", align_corners=False)
        pairs = torch.where(masks == IGNORED, CLASSES**2, masks.long() * CLASSES + logits.max(1).indices)
        found += torch.bincount(pairs.flatten(), minlength=len(found))
    matrix = found[:-1].view(CLASSES, CLASSES).double().cpu()  # rows: classes of the masks
    right = matrix.diagonal()
    iou = right / (matrix.sum(0) + matrix.sum(1) - right)  # NaN for a class that does not occur
    return {"miou": round(100 * iou.nanmean().item(), 3), "pixel_accuracy": round(100 * (right.sum() / matrix.sum()).item(), 3)}


def table(setting: Setting) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether something is wrong."""
    rows = setting.samples((_FILE,), STAMP).current()
    lines = [f"- {row['case']}, {row['contender']}: {row['text'][:200]}" for row in rows if row["kind"] == "failed"]
    return [*miou_table(rows), "", *lines], bool(lines)


def miou_table(rows: list[Row]) -> list[str]:
    """Return the table of mIoU: an encoding per line, a size per column; means over the seeds, lowest and highest."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "miou":
            found.setdefault((row["case"], row["mode"]), {})[row["contender"]] = row["miou"]
    sizes = list(dict.fromkeys(size for _, size in found))
    body = []
    for position in dict.fromkeys(position for position, _ in found):
        of = [list(found.get((position, size), {}).values()) for size in sizes]
        cells = [f"{mean(one):.1f} ({min(one):.1f} to {max(one):.1f})" if one else "" for one in of]
        body.append((position, str(max(map(len, of))), *cells))
    head = ("mIoU, %", "seeds", *(size.replace("x", "×") for size in sizes))
    return markdown(head, "|---|---:|" + "---|" * len(sizes), body)
