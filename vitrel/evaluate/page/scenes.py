"""What segmentation models predict for one image: the image, its mask, and the prediction of each model at each size."""

import base64
import colorsys
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrel.common.files import atomic_write
from vitrel.common.sizes import format_size
from vitrel.data.readers.decode import IGNORED
from vitrel.evaluate.predict import AtSizes
from vitrel.evaluate.prepare import Images
from vitrel.evaluate.results.aggregate import by_area
from vitrel.evaluate.sweep import Sweep
from vitrel.evaluate.tasks.base import ImageList
from vitrel.evaluate.tasks.classes import NO_CLASS
from vitrel.evaluate.tasks.segmentation import iou_of, predicted_classes
from vitrel.evaluate.trials import Trial, outputs_of

SIDE = 192  # pixels of the longer side of a picture
NOTHING = (255, 255, 255)  # color of pixels without a class, or that the model's input does not show


def record_scenes(trials: Sequence[Trial], sweep: Sweep, images: Images, photographs: bool) -> list[dict[str, Any]]:
    """Return one item for the first readable image in each trial, under the first policy: {label, protocol, size, iou, image,
    truth, predicted}, of which the last three are pictures as data URLs; image is "" without photographs. iou: percent, of the
    classes in this image.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for trial in trials:
        place = trial.trained.label, trial.protocol, format_size(trial.size)
        if place in found or trial.task.name != "segmentation":
            continue
        _, pixels, target = next(images.items(trial.preprocessing, range(len(images.dataset(trial.preprocessing)))))
        outputs, window = outputs_of(trial, sweep, images), trial.trained.img_size if trial.protocol == "sliding" else None
        with AtSizes(trial.trained.model, trial.policy, sweep.torch_device, window=window) as at, torch.inference_mode():
            size = pixels.shape[-2], pixels.shape[-1]
            logits = at(size)(pixels[None].to(sweep.torch_device)).float().cpu()
        best, shown = predicted_classes(logits[0], target, torch.tensor(outputs))
        kept = trial.task.keep(logits, [target], outputs, trial.trained)
        iou = float(np.nanmean(iou_of({name: values[0] for name, values in kept.items() if name != "outside"})))
        mean, std = (torch.tensor(values)[:, None, None] for values in (trial.trained.mean, trial.trained.std))
        photograph = (255 * (pixels * std + mean).clamp(0, 1)).permute(1, 2, 0).byte().numpy()
        found[place] = {
            "label": place[0],
            "protocol": place[1],
            "size": place[2],
            "iou": round(100 * iou, 1),
            "image": _picture(photograph, Image.Resampling.BILINEAR) if photographs else "",
            "truth": _picture(colored(np.where(target.labels == IGNORED, NO_CLASS, target.labels.astype(int)))),
            "predicted": _picture(colored(np.where(shown.numpy(), best.numpy(), NO_CLASS))),
        }
    return [*found.values()]


def colored(classes: np.ndarray) -> np.ndarray:
    """Return a picture uint8 [h, w, 3] of classes [h, w]; NO_CLASS has the color NOTHING."""
    table = np.array([color(index) for index in range(max(int(classes.max()) + 1, 1))] + [NOTHING], np.uint8)
    return table[np.where(classes < 0, len(table) - 1, classes)]


def color(index: int) -> tuple[int, int, int]:
    """Return the color of a class: gray for the first, then hues far from each other, in alternating lightness."""
    if index == 0:
        return 150, 150, 150
    hue = (0.58 + 0.618034 * (index - 1)) % 1.0  # the golden ratio
    red, green, blue = colorsys.hls_to_rgb(hue, (0.42, 0.62, 0.3)[index % 3], 0.65)
    return round(255 * red), round(255 * green), round(255 * blue)


def legend(images: ImageList) -> list[dict[str, str]]:
    """Return {name, color} of every class."""
    return [{"name": name, "color": "rgb({}, {}, {})".format(*color(index))} for index, name in enumerate(images.classes)]


def draw_scenes(pictures: Mapping[str, Any], folder: Path) -> Path | None:
    """Write scenes.png into `folder`: for every protocol the image of the largest size, its mask, and what each model predicts.

    Return the path, or None where there are no scenes.

    Args:
        pictures: of `read_pictures`.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    scenes = pictures["scenes"]
    if not scenes:
        return None
    rows = []
    for protocol in dict.fromkeys(item["protocol"] for item in scenes):
        of_protocol = [item for item in scenes if item["protocol"] == protocol]
        largest = max((item["size"] for item in of_protocol), key=by_area)
        rows.append([item for item in of_protocol if item["size"] == largest])
    labels = [*dict.fromkeys(item["label"] for item in scenes)]
    columns = ["image", "truth", *labels]
    figure = Figure(figsize=(1.6 * len(columns), 1.85 * len(rows) + 0.5), layout="constrained")
    for axes, items in zip(figure.subplots(len(rows), len(columns), squeeze=False), rows, strict=True):
        shown = {"image": (items[0]["image"], ""), "truth": (items[0]["truth"], "")}
        shown |= {item["label"]: (item["predicted"], f"mIoU {item['iou']:.0f} %") for item in items}
        for ax, name in zip(axes, columns, strict=True):
            ax.set(xticks=[], yticks=[])
            picture, text = shown.get(name, ("", "not evaluated"))
            if pictures["blobs"].get(picture):
                data = base64.b64decode(pictures["blobs"][picture].partition(",")[2])
                ax.imshow(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), interpolation="nearest")
            ax.set_xlabel(text, fontsize=9)
            if items is rows[0]:
                ax.set_title(name, fontsize=10)
        axes[0].set_ylabel(f"{items[0]['protocol']}, {items[0]['size']} px", fontsize=9)
    handles = [Patch(color=_numbers(one["color"]), label=one["name"]) for one in pictures["legend"]]
    figure.legend(handles=handles[:12], loc="outside lower center", ncols=min(6, len(handles)), fontsize=8, frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "scenes.png") as part:
        figure.savefig(part, format="png", dpi=130)
    return folder / "scenes.png"


def _numbers(color: str) -> tuple[float, ...]:
    """The color "rgb(R, G, B)" as numbers from 0 to 1."""
    return tuple(int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(","))


def _picture(pixels: np.ndarray, how: Image.Resampling = Image.Resampling.NEAREST) -> str:
    """A data URL of uint8 [h, w, 3] as a picture of SIDE pixels at most."""
    picture = Image.fromarray(pixels)
    factor = SIDE / max(picture.size)
    if factor < 1:
        picture = picture.resize([max(1, round(side * factor)) for side in picture.size], how)
    file = io.BytesIO()
    picture.save(file, "WEBP", lossless=how == Image.Resampling.NEAREST, quality=80)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
