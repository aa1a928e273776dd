"""Pictures of a few images and layers for the report, made by running the models: what they see, predict and attend to."""

import base64
import colorsys
import io
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrel.common.exits import one_line
from vitrel.common.files import shown
from vitrel.common.sizes import format_size, short_size
from vitrel.data import IGNORED
from vitrel.evaluate.images import Images
from vitrel.evaluate.predict import AtSizes
from vitrel.evaluate.verdicts import by_area
from vitrel.inspect.attention import Layer, for_each_layer
from vitrel.inspect.plot import attention, offset_maps, similarity
from vitrel.models.backbone import backbone_of
from vitrel.tasks import Kept
from vitrel.tasks.segmentation import NO_CLASS, predicted_classes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrel.evaluate.sweep import Trial

SIDE = 150  # pixels of the longer side of an image
DPI = 80  # of a figure
MODELS = 4  # of which there are pictures: the page stays below 2 MB
HEADS = 4  # heads of a layer that are drawn
LARGEST = 2500  # number of tokens above which attention is not drawn
NOTHING = (255, 255, 255)  # color of pixels without a class, or that the model's input does not show


class Picture(NamedTuple):
    """A picture in report.html: a data URL, its size in CSS pixels, what it shows (alt text), and a caption."""

    uri: str
    width: int
    height: int
    alt: str
    caption: str


@dataclass
class Section:
    """A section of report.html: `tables`, {name of a table: {name of a line: pictures}}, and `colors`, {class: CSS color}."""

    title: str
    text: str
    tables: dict[str, dict[str, list[Picture | None]]] = field(default_factory=dict)
    colors: dict[str, str] = field(default_factory=dict)


def collect(trials: Sequence["Trial"], images: Images, device: torch.device, photographs: bool) -> list[Section]:
    """Run the models and return the pictures for the report, of MODELS models at most: of the first seed and policy of each.

    These are the first image in every protocol at every size; for segmentation its mask and what every model predicts; and of
    every model, in its first protocol at its first and its largest size, where the patch in the middle attends in the first
    and the last layer, and what position adds there. A picture that cannot be made is left out with a warning.

    Args:
        photographs: whether images of the data may be shown.
    """
    firsts = {trial.trained.label: trial.trained for trial in reversed(trials)}  # the first seed
    labels = [*dict.fromkeys(trial.trained.label for trial in trials)][:MODELS]
    plan = [one for one in trials if one.trained is firsts[one.trained.label] and not one.view.translation]
    plan = [*{(one.trained.label, one.protocol, one.size): one for one in reversed(plan)}.values()][::-1]  # the first policy
    plan = [one for one in plan if one.trained.label in labels]
    seen = Section("Predictions", _PREDICTIONS) if plan[0].view.masks else Section("Inputs", _INPUTS)
    attends, adds = Section("Where a patch attends", _ATTENDS), Section("Position in attention", _ADDS)
    if photographs or plan[0].view.masks:
        with _optional(seen.title):
            _images(plan, images, device, photographs, seen)
    for label in labels:
        own = [one for one in plan if one.trained.label == label]
        own = [one for one in own if one.protocol == own[0].protocol]
        for trial in dict.fromkeys([own[0], max(own, key=lambda one: by_area(format_size(one.size)))]):
            with _optional(f"attention of {trial.name}"):
                _attention(trial, images, device, photographs, attends, adds)
    return [section for section in (seen, attends, adds) if section.tables]


_INPUTS = "One image as the models get it."
_PREDICTIONS = (
    "One image, its mask, and what each model predicts at each size, with the mIoU of this image. White: no class, or not in "
    "the model's input."
)
_ATTENDS = (
    "Attention of the outlined patch to all patches of an image, mean over heads: with position, without it, and the "
    "difference. An embedding that is added to the tokens is not taken away."
)
_ADDS = (
    "What position adds to the logits of attention at every offset between query and key, in patches: red adds, blue takes "
    "away. Of a model that adds an embedding to its tokens: how similar the embedding of the outlined patch is to all others."
)


@contextmanager
def _optional(what: str) -> Iterator[None]:
    """Context manager that turns any error while the picture `what` is made into a warning that it is left out."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"left out of the report: {what}: {one_line(error) or type(error).__name__}", stacklevel=3)


@torch.inference_mode()
def _images(plan: Sequence["Trial"], images: Images, device: torch.device, photographs: bool, section: Section) -> None:
    """Add to `section` the first image in every protocol at every size; for segmentation its mask and every model's prediction.

    Without `photographs` only the latter two.
    """
    tables: dict[str, dict[str, dict[str, Picture]]] = defaultdict(lambda: defaultdict(dict))
    for trial in plan:
        _, pixels, target = next(images.items(trial.view, range(len(images))))
        lines, label, size = tables[f"{trial.protocol} protocol"], shown(trial.trained.label), format_size(trial.size)
        where, caption = f"at {size}, {trial.protocol} protocol", f"{short_size(trial.size)} px"
        if photographs and size not in lines["image"]:
            lines["image"][size] = _picture(_photograph(trial, pixels), f"the image {where}", caption)
        if not trial.view.masks:
            continue
        with AtSizes(trial.trained.model, trial.policy, device, window=trial.view.window) as at:
            logits = at((pixels.shape[-2], pixels.shape[-1]))(pixels[None].to(device)).float().cpu()
        best, visible = predicted_classes(logits[0], target, torch.tensor(trial.outputs))
        kept = trial.task.keep(logits, [target], trial.outputs)
        arrays = {name: np.asarray(values) for name, values in kept.items()}
        iou = trial.task.score(Kept(arrays, np.ones(1, bool)))[trial.task.metric]
        truth = np.where(target.labels == IGNORED, NO_CLASS, target.labels.astype(int))
        lines["truth"][size] = _picture(_colored(truth), f"the mask {where}", caption)
        found = np.where(visible.numpy(), best.numpy(), NO_CLASS)
        lines[label][size] = _picture(_colored(found), f"prediction of {label} {where}", f"{iou:.0f} %")
        section.colors = {name: "rgb({}, {}, {})".format(*_color(at)) for at, name in enumerate(images.classes or ())}
    for protocol, lines in tables.items():
        sizes = sorted({size for cells in lines.values() for size in cells}, key=by_area)
        section.tables[protocol] = {name: [*map(cells.get, sizes)] for name, cells in lines.items() if cells}


def _attention(
    trial: "Trial", images: Images, device: torch.device, photographs: bool, attends: Section, adds: Section
) -> None:
    """Add to `attends` where the middle patch attends in the first and the last layer, to `adds` what position adds there.

    Where it adds nothing to attention, `adds` gets the similarity of the position embeddings, if there are any. ValueError for
    more than LARGEST tokens. Without `photographs` the image is gray.
    """
    _, pixels, _ = next(images.items(trial.view, range(len(images))))
    layers: list[Layer] = []
    label, size = shown(trial.trained.label), (pixels.shape[-2], pixels.shape[-1])

    def use(layer: Layer) -> None:
        if layer.grid.tokens > LARGEST:
            raise ValueError(f"more than {LARGEST:,} tokens")
        layers[1:] = [layer.cpu()] if layers else []
        layers[:1] = layers[:1] or [layer.cpu()]

    with AtSizes(trial.trained.model, trial.policy, device) as at:
        model = at(size)
        for_each_layer(model, pixels[None].to(device), use)
        picture = torch.from_numpy(_photograph(trial, pixels).copy()).permute(2, 0, 1) / 255
        background = picture if photographs else torch.full_like(picture, 0.85)
        for number, (layer, which) in enumerate(zip(layers, ("first", "last"), strict=False)):
            figure = attention(layers, pixels, (layer.grid.h // 2, layer.grid.w // 2), number, shown=background)
            alt = f"attention of {label} at {short_size(size)} px in the {which} layer"
            attends.tables.setdefault(label, {})[f"{short_size(size)} px, {which} layer"] = [_drawn(figure, alt)]
        with suppress(ValueError):  # a model without position
            if any(layer.position is not None and bool(layer.position.any()) for layer in layers):
                figure = offset_maps(layers, heads=[*range(min(HEADS, layers[0].weights.shape[2]))])
            else:
                figure = similarity(getattr(model, "backbone", model).cpu(), size if backbone_of(model) else None)
            alt = f"what position adds in {label} at {short_size(size)} px"
            adds.tables.setdefault(label, {})[f"{short_size(size)} px"] = [_drawn(figure, alt)]


def _photograph(trial: "Trial", pixels: Tensor) -> np.ndarray:
    """Return pixels [3, H, W], normalized by the trial's mean and std, as an image uint8 [H, W, 3]."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (trial.view.mean, trial.view.std))
    return (255 * (pixels * std + mean).clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()


def _colored(classes: np.ndarray) -> np.ndarray:
    """Return classes [h, w] as colors, uint8 [h, w, 3]; those below 0, as NO_CLASS, are white."""
    table = np.array([_color(index) for index in range(max(int(classes.max()) + 1, 1))] + [NOTHING], np.uint8)
    return table[np.where(classes < 0, len(table) - 1, classes)]


def _color(index: int) -> tuple[int, int, int]:
    """Return the RGB color of a class: gray for the first, then hues far from each other, in alternating lightness."""
    if index == 0:
        return 150, 150, 150
    hue = (0.58 + 0.618034 * (index - 1)) % 1.0  # the golden ratio
    red, green, blue = colorsys.hls_to_rgb(hue, (0.42, 0.62, 0.3)[index % 3], 0.65)
    return round(255 * red), round(255 * green), round(255 * blue)


def _picture(pixels: np.ndarray, alt: str, caption: str = "", side: int = SIDE) -> Picture:
    """Return uint8 [h, w, 3] as WebP, reduced, or shown enlarged, to a longer side of `side` px; lossless up to 256 colors."""
    picture = Image.fromarray(pixels)
    drawn = len(picture.getcolors(256) or ()) > 0
    factor = side / max(picture.size)
    width, height = (max(1, round(length * factor)) for length in picture.size)
    if factor < 1:
        picture = picture.resize((width, height), Image.Resampling.NEAREST if drawn else Image.Resampling.BILINEAR)
    file = io.BytesIO()
    picture.save(file, "WEBP", lossless=drawn, quality=80, method=4)
    return Picture(f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}", width, height, alt, caption)


def _drawn(figure: "Figure", alt: str) -> Picture:
    """Return a matplotlib figure as a `Picture` in its own size."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, bbox_inches="tight")
    pixels = np.asarray(Image.open(file).convert("RGB"))
    return _picture(pixels, alt, side=max(pixels.shape))
