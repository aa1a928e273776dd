"""The evaluation as one function, for notebooks: a model and data in, a DataFrame out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from vitrel.data import Prepare
from vitrel.data.base import subset
from vitrel.evaluate.checkpoint import Trained, load_checkpoint
from vitrel.evaluate.columns import COLUMNS
from vitrel.evaluate.foreign_models import trained_model
from vitrel.evaluate.images import Source
from vitrel.evaluate.plan import check_data
from vitrel.evaluate.report import with_curves
from vitrel.evaluate.rows import evaluate_rows
from vitrel.evaluate.settings import Sweep
from vitrel.inspect.any_model import evaluating
from vitrel.sizes import Size, parse_size


def evaluate(
    model: nn.Module | Trained | str | Path,
    data: str | Dataset | Callable[[Size], Dataset],
    sizes: Sequence[int | str | Size],
    *,
    label: str = "",
    img_size: Size | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    class_indices: Mapping[str, int] | None = None,
    restrict: bool = False,
    **settings: Any,
) -> pd.DataFrame:
    """Evaluates a model at many sizes: one row per size, protocol, crop and policy, with the columns of results.csv.

    >>> vitrel.evaluate.evaluate(model, "shapes", [48, 64, "64x96"], n=200)[["img_size", "policy", "top1", "resized"]]

    Args:
        model: ours or timm's, trained; or the path of a checkpoint of tools/train.py. It is left as it was.
        data: what `create_dataset` takes; or a data set of (uint8 [3, h, w] or PIL image, label), prepared here as folders are;
            or a function from (H, W) to a data set of (normalised float32 [3, H, W], label), for which there is one protocol,
            "scale". With `.classes`, a list of names, where the labels stand for names.
        sizes: in pixels, 96, "160x224" or (160, 224), height first. The size of training is evaluated too.
        label: the model's name in the table.
        img_size: (h, w) in pixels the model was trained at, by default that of its `pretrained_cfg`.
        preprocessing: any of mean, std, crop_pct, interpolation, in the place of those of the `pretrained_cfg`.
        class_indices: {class of the data: index of the model's output}, where they are not in order.
        restrict: only the outputs of the data's classes compete.
        settings: those of `Sweep`: protocols, policies, n, batch_size, device, crop_pct, attention_n, ...

    Raises:
        ValueError: for settings, classes, data or sizes that do not fit.
    """
    about = dict(label=label, img_size=img_size, preprocessing=preprocessing, outputs=class_indices, restrict=restrict)
    trained = _trained(model, about)
    if not isinstance(data, (str, Path)) and not isinstance(data, Dataset):
        settings = {"protocols": ("scale",)} | settings
        if tuple(settings["protocols"]) != ("scale",):
            raise ValueError("a function from size to data decides itself how images fill a size: protocols=('scale',)")
    for name in ("protocols", "policies"):
        if settings.get(name) is not None:
            settings[name] = tuple(settings[name])
    name = str(data) if isinstance(data, (str, Path)) else type(data).__name__
    sweep = Sweep(name, tuple(size if isinstance(size, tuple) else parse_size(size) for size in sizes), **settings)
    source = None if isinstance(data, (str, Path)) else _source(data)
    if source is None:
        check_data(sweep, trained.img_size)
    with _left_as_it_was(trained.model):
        rows = with_curves([one.row for one in evaluate_rows([trained], sweep, source=source)])
    return pd.DataFrame(rows, columns=list(COLUMNS))


class PreparedImages(Dataset):
    """`images` of (uint8 [3, h, w] or PIL image, label) prepared for evaluation, n of them drawn by seed or all."""

    def __init__(self, images: Dataset, prepare: Callable[[Tensor], Tensor], n: int | None, seed: int) -> None:
        self.images, self.prepare = images, prepare
        self.chosen = subset(len(images), n, seed, type(images).__name__)
        self.classes = getattr(images, "classes", None)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[self.chosen[index]]
        if isinstance(image, Image.Image):
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not isinstance(image, Tensor) or image.dtype != torch.uint8:
            kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"the data set gives images of {kind}: give uint8 [3, h, w] or PIL images, or, of images that are prepared "
                "already, a function from (H, W) to the data set of that size"
            )
        return self.prepare(image), int(label)


def _source(data: Dataset | Callable[[Size], Dataset]) -> Source:
    def prepared(size: Size, *, n: int | None, seed: int, reading: Any = None, **view: Any) -> Dataset:
        return PreparedImages(data, Prepare(size, **view), n, seed)

    def given(size: Size, **how: Any) -> Dataset:
        return data(size)

    return prepared if isinstance(data, Dataset) else given


def _trained(model: nn.Module | Trained | str | Path, about: Mapping[str, Any]) -> Trained:
    if isinstance(model, nn.Module):
        return trained_model(model, **about)
    trained = model if isinstance(model, Trained) else load_checkpoint(model)
    if any(about[name] for name in about if name != "label"):
        raise ValueError(
            "a checkpoint says itself how it was trained: img_size, preprocessing and classes are for plain models"
        )
    return replace(trained, label=about["label"] or trained.label)


@contextmanager
def _left_as_it_was(model: nn.Module):
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            yield
    finally:
        model.to(device)
