"""Trained models: checkpoints of vitrel, timm names with weights from a file, and models in memory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn

from vitrel.common.files import shown
from vitrel.common.sizes import Budget, Size, native_size, nearest_size, parse_size_or_budget, token_count
from vitrel.inspect.any_model import model_name, trained_size
from vitrel.models.backbone import backbone_of
from vitrel.models.config import TRUNKS, preprocessing_of
from vitrel.models.create import check_model_name, create_sized
from vitrel.models.segmenter import Segmenter
from vitrel.position import POSITIONS, key_of
from vitrel.weights.from_timm import timm_model
from vitrel.weights.plan import apply_plan, model_for
from vitrel.weights.read import check_folder, read_file
from vitrel.weights.saving import load, not_finite, read_checkpoint


@dataclass(frozen=True)
class TrainedModel:
    """A trained model with its preprocessing and classes. Bytes in `name` and `label` that are not UTF-8 are escaped.

    Args:
        name: name of the architecture in timm's registry, or the name of its class.
        label: name in tables and plots.
        encoding: keys of its position encodings, see `encoding_of`.
        img_size: training size (h, w) in pixels; of several, that for which the model was built, or the nearest to it.
        classes: names in the order of the outputs, () where unknown.
        mean: per channel, by which images are normalized, of values from 0 to 1.
        std: as mean.
        crop_pct: share of the sides of the resized image that the crop keeps.
        crop_mode: "center", "squash" or "border", see `vitrel.data.Prepare`.
        interpolation: "bicubic" or "bilinear", by which images are resized.
        seed: seed of training, None where unknown.
        path: file of the weights; Path() for a model in memory.
        outputs: {class of the data: index of the output}; None: `class_outputs` finds them by the classes' names or order.
        model_args: JSON of the argument model_args of `load_model`; "" for none, or where the file contains them.
        task: what it predicts, one of `vitrel.tasks.TASKS`.
        train_sizes: all training sizes, (h, w) in pixels; budgets of patch tokens if it was trained at native shape, which is
            on images of their own aspect ratio. By default img_size.
    """

    model: nn.Module
    name: str
    label: str
    encoding: str
    img_size: tuple[int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str
    seed: int | None
    path: Path
    outputs: Mapping[str, int] | None = None
    model_args: str = ""
    crop_mode: str = "center"
    task: str = "classification"
    train_sizes: tuple[Size | Budget, ...] = ()

    def __post_init__(self) -> None:
        if not self.train_sizes:
            object.__setattr__(self, "train_sizes", (self.img_size,))
        for name in ("name", "label"):  # may contain a file's path, with characters that need escaping
            object.__setattr__(self, name, shown(getattr(self, name)))

    @property
    def is_native(self) -> bool:
        """Whether it was trained at native shape: on images of their own aspect ratio, within a budget of patch tokens."""
        return isinstance(self.train_sizes[0], Budget)

    @property
    def train_pixels(self) -> tuple[Size, ...]:
        """Its training sizes (h, w) in pixels, `img_size` first; of a token budget the largest square of whole patches."""
        return tuple(dict.fromkeys((self.img_size, *map(self.size_of, self.train_sizes))))

    def is_training(self, size: Size, budget: int | None = None) -> bool:
        """Return whether the model was trained at `size` (h, w) pixels; one of native shape: with `budget`, at any `size`."""
        return Budget(budget) in self.train_sizes if self.is_native and budget is not None else size in self.train_sizes

    @property
    def patch(self) -> Size | None:
        """(height, width) of a patch in pixels; None for a model that does not cut images into patches."""
        model = backbone_of(self.model) or self.model
        patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
        return None if patch_size is None else to_2tuple(patch_size)

    def size_of(self, size: Size | Budget) -> Size:
        """Return (height, width) in pixels; for a token budget, the largest square of whole patches within it.

        ValueError for a budget if the model has no patches.
        """
        return size if not isinstance(size, Budget) else native_size(1, 1, size.tokens, self._patch_for(str(size)))

    def budget_of(self, size: Size | Budget) -> int:
        """Return the patch tokens of a budget, or of a size in pixels; ValueError for a size if the model has no patches."""
        return size.tokens if isinstance(size, Budget) else token_count(size, self._patch_for("the protocol native"))

    def _patch_for(self, what: str) -> Size:
        """Return the patch size (h, w) in pixels; ValueError if the model has none: `what`, a text, is named as needing it."""
        if self.patch is None:
            raise ValueError(
                f"{what} counts patch tokens, but {self.label} has no patch embedding with a patch_size: give sizes in pixels "
                "and --protocol scale"
            )
        return self.patch


def load_checkpoint(
    path: str | Path,
    label: str | None = None,
    seed: int | None = None,
    *,
    preprocessing: Mapping[str, Any] | None = None,
    outputs: Mapping[str, int] | None = None,
) -> TrainedModel:
    """Load a checkpoint of `vitrel train` or a file of `vitrel.save` (.safetensors), in eval mode on the CPU.

    Only this file is read: paths inside a checkpoint are not followed.

    Args:
        label: default the file's name without suffix for .safetensors; else the model's name, or for a generic one (vitrel_vit)
            that of the run's folder or the file.
        seed: default that of the checkpoint, None for .safetensors.
        preprocessing: any of mean, std, crop_pct, crop_mode, interpolation, in place of those in the file.
        outputs: {class of the data: index of the output}; None: `class_outputs` finds them by the classes' names or order.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is empty, truncated, damaged, not of vitrel, does not fit its model, or contains NaN; the message
            names the path and the problem.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        model = load(path)
        classes = tuple(model.pretrained_cfg.get("label_names") or ())
        trained = replace(trained_model(model, label=label or path.stem, path=path), seed=seed, classes=classes)
        sizes = getattr(backbone_of(model), "train_sizes", ())
    else:
        model, about = read_checkpoint(path)
        name, sizes = about["model"], about.get("train_sizes") or ()
        trained = TrainedModel(
            model=model,
            name=name,
            label=label or _label_of(name, path),
            encoding=encoding_of(model),
            img_size=tuple(about["img_size"]),
            classes=tuple(about["classes"]),
            **_preprocessing({key: about[key] for key in ("mean", "std", "crop_pct", "crop_mode", "interpolation")}),
            seed=seed if seed is not None else about.get("seed"),
            path=path,
            task=about.get("task", "classification"),
        )
    own = {"outputs": outputs, "train_sizes": tuple(map(parse_size_or_budget, sizes))}
    trained = replace(trained, **_preprocessing(preprocessing or {}, trained.task), **own)
    sizes = [trained.size_of(size) for size in trained.train_sizes]
    return trained if trained.img_size in sizes else replace(trained, img_size=nearest_size(trained.img_size, sizes))


def _label_of(name: str, path: Path) -> str:
    """Return the default label of a checkpoint: the model's name.

    For a generic name (vitrel_vit) it is that of the run's folder if the file is in its checkpoints/, else the file's stem.
    """
    if name not in TRUNKS:
        return name
    return path.resolve().parent.parent.name if path.resolve().parent.name == "checkpoints" else path.stem


def load_model(
    name: str,
    weights: str | Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    random: bool = False,
    **about: Any,
) -> TrainedModel:
    """Build the model `name` and load weights from a file, in eval mode on the CPU; it has the file's number of classes.

    Args:
        name: a model of timm's registry, or "local-dir:FOLDER" for a folder of timm's save_for_hf or vitrel export, which
            contains the weights; weights, pretrained and random are then ignored.
        weights: .safetensors, .pth, .bin or .npz file of timm or of the model's authors, or a checkpoint of timm's train.py
            (averaged weights where it has them); for vitrel's models, any file that `vitrel.load_pretrained` reads.
        pretrained: where weights is None, use timm's weights for the name, from its cache or the network.
        random: where weights is None and pretrained False, use random weights (seed 0).
        model_args: arguments of timm.create_model.
        about: arguments of `trained_model`; `img_size` is also passed to the model where it takes one, unless in model_args.

    Raises:
        ValueError: the name is unknown (the message lists similar ones), none of weights, pretrained and random is given, a
            folder is damaged, or weights do not fit or contain NaN or objects other than tensors.
        FileNotFoundError: a file or folder is missing.
    """
    default = {"img_size": about["img_size"]} if about.get("img_size") else {}
    arguments = default | dict(model_args or {})
    if name.startswith("local-dir:"):
        check_folder(name.partition(":")[2])
        model = create_sized(name, **arguments | {"pretrained": True})
    else:
        check_model_name(name)
        if weights is not None:
            model = _build_from_weights(name, Path(weights), arguments)
        elif pretrained:
            model = create_sized(name, **arguments | {"pretrained": True})
        elif random:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = create_sized(name, **arguments)
        else:
            raise ValueError(f"{name} has no weights: give a file (--weights), or --pretrained for timm's weights")
    if bad := not_finite(model):
        raise ValueError(f"the weights of {name} hold NaN or infinity in {bad}")
    trained = trained_model(model.eval(), name, path=Path(weights or name.partition(":")[2]), **about)
    return replace(trained, model_args=json.dumps(model_args, sort_keys=True, default=str)) if model_args else trained


def trained_model(
    model: nn.Module,
    name: str = "",
    *,
    label: str = "",
    img_size: Size | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    outputs: Mapping[str, int] | None = None,
    path: Path = Path(),
    task: str = "",
) -> TrainedModel:
    """Wrap a model in memory as `TrainedModel`, with preprocessing from its `pretrained_cfg` where none is given.

    Args:
        model: any model with `num_classes` that maps normalized images [B, 3, h, w] to logits.
        name: name of the architecture in timm's registry; by default that in its `pretrained_cfg`, or its class.
        label: name in tables and plots; by default `name`.
        img_size: training size (h, w) in pixels; by default that the model was built for.
        preprocessing: any of mean, std, crop_pct, crop_mode, interpolation.
        outputs: {class of the data: index of the output}; None: `class_outputs` finds them by the classes' names or order.
        path: file of the weights, for messages.
        task: by default "segmentation" for a `Segmenter`, else the attribute `task` of the model, or "classification".

    Raises:
        ValueError: the model has no `num_classes`, mean, std or crop_pct is not valid, or crop_pct is given for segmentation.
    """
    name = name or model_name(model)
    if not getattr(model, "num_classes", 0):
        raise ValueError(f"{name} predicts no classes: its num_classes is missing or 0")
    task = task or ("segmentation" if isinstance(model, Segmenter) else getattr(model, "task", "") or "classification")
    return TrainedModel(
        model=model,
        name=name,
        label=label or name,
        encoding=encoding_of(model),
        img_size=to_2tuple(img_size or trained_size(model)),
        classes=(),
        **_preprocessing(preprocessing_of(model)) | _preprocessing(preprocessing or {}, task),
        seed=None,
        path=path,
        outputs=outputs,
        task=task,
    )


def _preprocessing(given: Mapping[str, Any], given_for: str = "") -> dict[str, Any]:
    """Return `given`, any keys of preprocessing, with mean and std as tuples, crop_pct as a float and the others as text.

    ValueError where mean or std does not have three numbers, std has one that is not above 0, or crop_pct is no share. If
    `given_for` names a task with masks, for which a user gives the values, a crop_pct is refused; "": they are the model's own.
    """
    types = {"mean": tuple, "std": tuple, "crop_pct": float}
    known = {name: types.get(name, str)(value) for name, value in given.items()}
    for name in {"mean", "std"} & known.keys():
        if len(known[name]) != 3 or (name == "std" and not all(value > 0 for value in known[name])):
            raise ValueError(f"{name} has three numbers, those of std above 0, got {known[name]}")
    if not 0 < known.get("crop_pct", 1.0) <= 1:
        raise ValueError(f"crop_pct takes shares of the image, above 0 and at most 1, got {known['crop_pct']}")
    if given_for and "crop_pct" in known:
        from vitrel.tasks import task_named  # needs torchmetrics, which loading a model does not

        if task_named(given_for).dense:
            raise ValueError("segmentation evaluates whole images: leave crop_pct out; canvas below the training size crops")
    return known


def encoding_of(model: nn.Module) -> str:
    """Return the keys of a model's position encodings (as in `POSITIONS`) joined by "+"; "none" without any, "timm" for another
    library's model.
    """
    backbone = backbone_of(model)
    if backbone is None:
        return "timm"
    classes = set(POSITIONS.values())
    keys = dict.fromkeys(key_of(module) for module in backbone.modules() if type(module) in classes)
    return "+".join(key for key in keys if key != "none") or "none"


def read_class_indices(path: str | Path) -> dict[str, int]:
    """Read {class: output index} from a text file with a class name (as in the data), a tab and an index on every line.

    Further columns are ignored, and a first line of columns without an index is a heading. A name without blanks may be
    followed by a blank instead of a tab. FileNotFoundError; ValueError for an invalid line, which it names, a class with two
    indices, or a file without a class.
    """
    indices: dict[str, int] = {}
    # surrogateescape: Python decodes folder names that are not UTF-8 in the same way
    for number, line in enumerate(Path(path).read_text("utf-8-sig", "surrogateescape").splitlines(), 1):
        words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
        if not line.strip() or (number == 1 and "\t" in line and not words[1].isdecimal()):
            continue
        if len(words) < 2 or not words[1].isdecimal() or indices.setdefault(words[0], int(words[1])) != int(words[1]):
            raise ValueError(
                f"{path}, line {number}: {line!r} is not a class, a tab and the index of its output, such as 'n01440764\\t0', "
                "or gives a class a second index"
            )
    if not indices:
        raise ValueError(f"{path} contains no class")
    return indices


def _build_from_weights(name: str, weights: Path, arguments: dict[str, Any]) -> nn.Module:
    """Build the model `name` with `arguments` and as many outputs as the file's classifier has, and load all of its weights.

    ValueError where they do not fit.
    """
    try:
        if name.startswith("vitrel_"):
            model, plan = model_for(name, arguments, read_file(weights))
            return apply_plan(model, plan)
        return timm_model(name, weights, **arguments)
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{weights} does not fit {name}: {str(error)[:600]}") from error
