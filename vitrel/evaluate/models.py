"""Trained models: loading, and bringing them to an image size under a policy.

They are checkpoints of vitrel, timm names with weights from a file, and models in memory.

Policies are rules for windows and for the resampling of position encodings at image sizes other than the training size.
A policy is written as in the column `policy` of results.csv: "none" where no policy changes anything; else the window policy,
where window policies differ, and one resize policy for each kind of encoding, joined by "+": "clip", "geometric+keep",
"divisor", "rescale+geometric".

Window policies choose the windows of a windowed model at a new size. fixed: windows stay as trained, and grids that they do not
divide are padded and masked. divisor: in every stage and along each axis, the largest window up to the trained one that divides
the grid; the bias is the matching part of the table, without resampling, and nothing is padded. rescale: the window scales with
the image, M * r / r_train rounded down along each axis (r / 32 for the published Swin), and the encoding is resampled for it by
its resize policy.
"""

import argparse
import copy
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.layers import to_2tuple
from timm.models import load_checkpoint as load_timm_checkpoint
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from vitrel.common.files import shown
from vitrel.common.sizes import Budget, Size, native_size, token_count
from vitrel.convert.saving import load, not_finite, read_checkpoint
from vitrel.evaluate.settings import Row
from vitrel.grid import Grid
from vitrel.inspect.any_model import StageWindows, at_size, model_at_size, model_name, trained_size
from vitrel.inspect.footprint import border_leak
from vitrel.inspect.resolution_report import StageReport, resolution_report, stages
from vitrel.layers import Attention
from vitrel.models.backbone import LARGE, Backbone, resizable_parts
from vitrel.models.config import TRUNKS, preprocessing_of
from vitrel.models.create import check_model_name, create_sized
from vitrel.ops import BACKENDS
from vitrel.ops.dispatch import Call, choose
from vitrel.position import POSITIONS, PositionEncoding, key_of
from vitrel.weights.load import apply_plan, model_for, read_file
from vitrel.weights.read import ARRAYS, check_file, guarding
from vitrel.weights.unwrap import unwrap


@dataclass(frozen=True)
class Trained:
    """A trained model with its preprocessing and classes.

    name: timm name. label: name in tables and plots. encoding: keys of its position encodings, see `encoding_of`. img_size:
    training size (h, w) in pixels. classes: names in the order of the outputs, () where unknown. mean, std, crop_pct,
    crop_mode, interpolation: preprocessing. seed: seed of training, None where unknown. path: file of the weights. outputs:
    {class of the data: index of the output}, None for the same order. restrict: compare only the logits of the data's classes.
    model_args: JSON of the arguments it was built with, without those that the checkpoint contains, "" for none.
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
    restrict: bool = False
    model_args: str = ""
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        for name in ("name", "label"):  # may contain a file's path, with characters that need escaping
            object.__setattr__(self, name, shown(getattr(self, name)))

    @property
    def patch(self) -> Size | None:
        """(height, width) of a patch in pixels; None for a model that does not cut images into patches."""
        patch_size = getattr(getattr(self.model, "patch_embed", None), "patch_size", None)
        return None if patch_size is None else to_2tuple(patch_size)

    def size_of(self, size: Size | Budget) -> Size:
        """Return (height, width) in pixels; for a token budget, the largest square of whole patches within it."""
        return size if not isinstance(size, Budget) else native_size(1, 1, size.tokens, self._patch_for(str(size)))

    def budget_of(self, size: Size | Budget) -> int:
        """Return the number of patch tokens of a token budget or of a size in pixels."""
        return size.tokens if isinstance(size, Budget) else token_count(size, self._patch_for("the protocol native"))

    def _patch_for(self, what: str) -> Size:
        """The patch size; ValueError, saying `what` needs it, where the model has none."""
        if self.patch is None:
            raise ValueError(
                f"{what} counts patch tokens, but {self.label} has no patch embedding with a patch_size: give sizes in pixels "
                "and --protocols scale canvas"
            )
        return self.patch


def load_checkpoint(path: str | Path, label: str | None = None, seed: int | None = None) -> Trained:
    """Load a checkpoint of `vitrel train` or a file of `vitrel.save` (.safetensors), in eval mode on the CPU.

    Only this file is read: paths inside a checkpoint are not followed. label: default the file's name without suffix for
    .safetensors; else the model's name, or for a generic one (vitrel_vit) that of the run's folder or the file. seed:
    default that of the checkpoint, None for .safetensors.
    Raises FileNotFoundError for a missing file and ValueError for a file that is empty, truncated, damaged, not of vitrel, does
    not fit its model, or contains NaN; messages name the path and the problem.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        model = load(path)
        classes = tuple(model.pretrained_cfg.get("label_names") or ())
        return replace(trained_model(model, label=label or path.stem, path=path), seed=seed, classes=classes)
    model, about = read_checkpoint(path)
    return Trained(
        model=model,
        name=about["model"],
        label=label or _label_of(about["model"], path),
        encoding=encoding_of(model),
        img_size=tuple(about["img_size"]),
        classes=tuple(about["classes"]),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        crop_pct=float(about["crop_pct"]),
        crop_mode=about["crop_mode"],
        interpolation=about["interpolation"],
        seed=seed if seed is not None else about.get("seed"),
        path=path,
    )


def _label_of(name: str, path: Path) -> str:
    """The label of a checkpoint: the model's name, or for a generic name (vitrel_vit) that of the run's folder or the file."""
    if name not in TRUNKS:
        return name
    return path.resolve().parent.parent.name if path.resolve().parent.name == "checkpoints" else path.stem


def load_model(
    name: str,
    weights: str | Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    **about: Any,
) -> Trained:
    """Build the model `name` and load weights from a file, in eval mode on the CPU; it has the file's number of classes.

    name: a model of timm's registry, or "local-dir:FOLDER" for a folder of timm's save_for_hf or vitrel export, which contains
    the weights. weights: .safetensors, .pth, .bin or .npz file of timm or of the model's authors, or a checkpoint of timm's
    train.py (averaged weights where it has them); for vitrel's models, any file that `vitrel.load_pretrained` reads.
    pretrained: instead of a file, use timm's weights for the name, from its cache or the network. model_args: arguments of
    timm.create_model. about: arguments of `trained_model`; `img_size` is also passed to the model where it takes one.
    Raises ValueError for an unknown name (listing similar ones), missing weights, a damaged folder, and weights that do not fit
    or contain NaN or objects other than tensors; FileNotFoundError for a missing file or folder.
    """
    arguments = _arguments(model_args, about)
    if name.startswith("local-dir:"):
        model = _create(name, arguments | {"pretrained": True})
    else:
        check_model_name(name)
        if weights is not None:
            model = _build_from_weights(name, Path(weights), arguments)
        elif pretrained:
            model = _create(name, arguments | {"pretrained": True})
        else:
            raise ValueError(f"{name} has no weights: give a file (--weights), or --pretrained for timm's weights")
    if bad := not_finite(model):
        raise ValueError(f"the weights of {name} hold NaN or infinity in {bad}")
    trained = trained_model(model.eval(), name, path=Path(weights or name.partition(":")[2]), **about)
    return replace(trained, model_args=json.dumps(model_args, sort_keys=True, default=str)) if model_args else trained


def random_model(name: str, model_args: Mapping[str, Any] | None = None, **about: Any) -> Trained:
    """Build the model `name` with random weights (seed 0), in eval mode on the CPU; arguments as in `load_model`."""
    arguments = _arguments(model_args, about)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = _create(name, arguments)
        except RuntimeError as error:
            raise ValueError(f"{name} cannot be built: {error}") from error
    return trained_model(model.eval(), name, **about)


def trained_model(
    model: nn.Module,
    name: str = "",
    *,
    label: str = "",
    img_size: Size | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    outputs: Mapping[str, int] | None = None,
    restrict: bool = False,
    path: Path = Path(),
) -> Trained:
    """Wrap a model in memory as `Trained`, with preprocessing from its `pretrained_cfg` where none is given.

    img_size: training size (h, w) in pixels. preprocessing: any of mean, std, crop_pct, crop_mode, interpolation. outputs,
    restrict: see `Trained`. ValueError for a model without `num_classes`, or an invalid mean or std.
    """
    name = name or model_name(model)
    if not getattr(model, "num_classes", 0):
        raise ValueError(f"{name} is not a classifier: its num_classes is missing or 0")
    known = preprocessing_of(model) | dict(preprocessing or {})
    for key in ("mean", "std"):
        if len(known[key]) != 3 or (key == "std" and min(known[key]) <= 0):
            above = " above 0" if key == "std" else ""
            raise ValueError(f"{key} must be three numbers{above}, for red, green and blue, got {list(known[key])}")
    return Trained(
        model=model,
        name=name,
        label=label or name,
        encoding=encoding_of(model),
        img_size=to_2tuple(img_size or trained_size(model)),
        classes=(),
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
        crop_pct=float(known["crop_pct"]),
        crop_mode=known["crop_mode"],
        interpolation=known["interpolation"],
        seed=None,
        path=path,
        outputs=outputs,
        restrict=restrict,
    )


def encoding_of(model: nn.Module) -> str:
    """Return the keys of a model's position encodings joined by '+'; "none" without any, "timm" for another library's model."""
    if not isinstance(model, Backbone):
        return "timm"
    classes = set(POSITIONS.values())
    keys = dict.fromkeys(key_of(module) for module in model.modules() if type(module) in classes)
    return "+".join(key for key in keys if key != "none") or "none"


def class_outputs(trained: Trained, classes: Sequence[str], data: str) -> tuple[int, ...]:
    """Return the index of the model's output for each class of the data, in the data's order.

    A model that knows its classes has to know all classes of the data, by name, and may know more. For others:
    `trained.outputs` where it is given; an ImageNet head where the classes are named by WordNet IDs (n01440764); else the
    classes' own order, with as many outputs as classes. ValueError where classes and outputs do not match; `data` names the
    data in messages.
    """
    if trained.classes:
        return _by_name(trained, classes, data)
    count = trained.model.num_classes
    if trained.outputs is not None:
        if missing := [name for name in classes if name not in trained.outputs]:
            raise ValueError(f"the class indices of {trained.label} lack {', '.join(missing[:5])}, classes of {data}")
        if invalid := [name for name in classes if not 0 <= trained.outputs[name] < count]:
            mapping = f"{invalid[0]} to output {trained.outputs[invalid[0]]}"
            raise ValueError(f"{trained.label} has outputs 0 to {count - 1}, but its class indices map {mapping}")
        return tuple(trained.outputs[name] for name in classes)
    if (outputs := _by_wordnet(count, classes)) is not None:
        return outputs
    if count != len(classes):
        raise ValueError(
            f"{trained.label} has {count} outputs, but {data} has {len(classes)} classes: give the output of each class "
            "(--class-indices FILE, a class and its index per line)"
        )
    return tuple(range(count))


def class_map(trained: Trained, classes: Sequence[str]) -> str:
    """Return the column class_map, how `class_outputs` maps classes to outputs: "order", "names" (the model knows them in
    another order, or knows more), "wordnet" (by WordNet IDs), or "file" with a digest of `trained.outputs`; followed by
    ", restricted" where only these outputs are compared.
    """
    if trained.classes:
        source = "order" if list(trained.classes) == list(classes) else "names"
    elif trained.outputs is not None:
        pairs = repr(sorted(trained.outputs.items()))
        source = f"file {hashlib.sha256(pairs.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
    else:
        by_id = _by_wordnet(trained.model.num_classes, classes) is not None
        source = "wordnet" if by_id else "order"
    return f"{source}, restricted" if trained.restrict else source


def read_class_indices(path: str | Path) -> dict[str, int]:
    """Read {class: output index} from a text file with a class name (as in the data) and an index on every line.

    Further columns and a heading line are ignored. FileNotFoundError, or ValueError naming an invalid line.
    """
    indices: dict[str, int] = {}
    # surrogateescape: Python decodes folder names that are not UTF-8 in the same way
    for number, line in enumerate(Path(path).read_text("utf-8", "surrogateescape").splitlines(), 1):
        words = line.split()
        if not words or (number == 1 and len(words) > 1 and not words[1].isdigit()):
            continue
        if len(words) < 2 or not words[1].isdigit() or indices.setdefault(words[0], int(words[1])) != int(words[1]):
            raise ValueError(
                f"{path}, line {number}: {line!r} is not a class and the index of its output, such as 'n01440764 0', or gives "
                "a class a second index"
            )
    if not indices:
        raise ValueError(f"{path} contains no class")
    return indices


def _by_wordnet(count: int, classes: Sequence[str]) -> tuple[int, ...] | None:
    """The outputs of classes named by WordNet IDs, for an ImageNet head of `count` outputs; None for other names or heads."""
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None or not all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return None
    index = {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())}
    return tuple(index[name] for name in classes) if all(name in index for name in classes) else None


def _by_name(trained: Trained, classes: Sequence[str], data: str) -> tuple[int, ...]:
    """The outputs of classes by the names that the model knows; ValueError where it does not know all, or one name twice."""
    if list(trained.classes) == list(classes):
        return tuple(range(len(classes)))
    index = {name: i for i, name in enumerate(trained.classes)}
    if unknown := [name for name in classes if name not in index]:
        raise ValueError(
            f"{trained.path} was trained on {len(trained.classes)} classes ({_listed(trained.classes)}), which lack "
            f"{len(unknown)} of the {len(classes)} classes of {data}: {_listed(unknown)}. Evaluate on data with classes of the "
            "training data alone, under the same names"
        )
    if len(index) < len(trained.classes):
        twice = next(name for name in trained.classes if trained.classes.count(name) > 1)
        raise ValueError(f"{trained.path} has several outputs named {twice}: evaluate on data with its classes in its order")
    return tuple(index[name] for name in classes)


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _build_from_weights(name: str, weights: Path, arguments: dict[str, Any]) -> nn.Module:
    """The model with all of the file's weights, and as many outputs as the file's classifier."""
    try:
        if name.startswith("vitrel_"):
            model, plan = model_for(name, arguments, read_file(weights))
            return apply_plan(model, plan)
        if weights.suffix in ARRAYS:  # JAX checkpoints, which timm's model code reads
            check_file(weights)
            model = _create(name, arguments)
            with guarding(str(weights)):
                load_timm_checkpoint(model, str(weights))
            return model
        state = _read_state(weights)
        head = state.get(f"{timm.get_pretrained_cfg(name).classifier}.weight")
        if isinstance(head, torch.Tensor):
            arguments = {"num_classes": len(head)} | arguments
        model = _create(name, arguments)
        rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)  # converts old checkpoint keys
        model.load_state_dict(state if rename is None else rename(state, model))
        return model
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{weights} does not fit {name}: {str(error)[:600]}") from error


def _arguments(model_args: Mapping[str, Any] | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments to build the model with: `model_args`, and img_size where only `about` has it."""
    default = {"img_size": about["img_size"]} if about.get("img_size") else {}
    return default | dict(model_args or {})


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Create the model, without img_size where the architecture does not take it."""
    with guarding(name, arguments):
        return create_sized(name, **arguments)


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    """The state dict in a file of timm or of its train.py, averaged weights where it has them; see `vitrel.weights.unwrap`."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}" + (": it is a folder" if path.is_dir() else ""))
    loaded = read_file(path, allowed=(argparse.Namespace,))  # checkpoints of timm's train.py contain their options
    unwrapped = unwrap(loaded, str(path))
    if unwrapped.beside:
        raise ValueError(f"{path} holds {', '.join(unwrapped.beside[:5])} beside the weights of a model")
    return unwrapped.state


WINDOW_POLICIES = ("fixed", "divisor", "rescale")
MOST_SHAPES = 5  # image shapes whose cost is counted in the native protocol, about a second each


def policies_at(model: nn.Module, size: tuple[int, int], wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the policies of a model that differ at `size` (h, w) pixels; ("none",) where no policy changes anything.

    wanted: only these policies; encodings and windows for which none is named keep their current policy. Encodings that share a
    policy's name switch together; encodings that do not are tried in all combinations. A model of another library has only
    "none".
    """
    if not isinstance(model, Backbone):
        return ("none",)
    windows = window_policies_at(model, size)
    if not windows:
        return _resize_policies_at(model, size, wanted)
    joined = []
    for window in [name for name in windows if wanted is None or name in wanted] or windows[:1]:
        windowed = with_policy(model, size, window)
        joined += [join_policy(window, policy) for policy in _resize_policies_at(windowed, size, wanted)]
    return tuple(joined)


def policies_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all policies that a model has, window policies first; () for a model of another library."""
    if not isinstance(model, Backbone):
        return ()
    if not any(isinstance(part, Attention) and part.window is not None for part in model.modules()):
        return model.resize_policies
    parts = (part for part in model.modules() if isinstance(part, PositionEncoding))
    return tuple(dict.fromkeys((*WINDOW_POLICIES, *(policy for part in parts for policy in part.policies))))


def with_policy(model: nn.Module, size: tuple[int, int], policy: str, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a model for images of `size` (h, w) pixels under `policy`, one of `policies_at(model, size)`.

    It is a copy that shares parameters and buffers, or the model itself where nothing changes. Encodings resample their
    parameters for another window. options: of `Backbone.set_position_options`, set on the copy.

    For a model of another library `policy` is ignored; the result is a copy where its size is fixed, and whether it takes
    the size is not checked. ValueError for a policy or an option that the model does not have.
    """
    if not isinstance(model, Backbone):
        return model_at_size(model, size, share_weights=True)
    window, _, resize = policy.partition("+")
    window, resize = (window, resize or "none") if window in WINDOW_POLICIES else ("fixed", policy)
    if (window, resize) == ("fixed", "none") and not options:
        return model
    changed = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    if options:
        changed.set_position_options(**options)
    if window != "fixed":  # before `resize`: which resize policies a model has depends on its windows
        for attn, grid in _windowed(changed, size):
            attn.window = _window_at(changed, attn, grid, size, window)
            if any(attn.shift):
                attn.shift = attn.window[0] // 2, attn.window[1] // 2
    if resize != "none":
        changed.set_resize_policy(resize)
    return changed


def window_policies_at(model: nn.Module, size: tuple[int, int]) -> tuple[str, ...]:
    """Return the window policies that differ at `size` (h, w) pixels, "fixed" first; () where all give the same windows."""
    layers = list(_windowed(model, size))
    divided = any(
        min(m, n) != d
        for attn, grid in layers
        for m, n, d in zip(attn.window, grid, _window_at(model, attn, grid, size, "divisor"), strict=True)
    )
    rescaled = any(tuple(attn.window) != _window_at(model, attn, grid, size, "rescale") for attn, grid in layers)
    different = [name for name, differs in (("divisor", divided), ("rescale", rescaled)) if differs]
    return ("fixed", *different) if different else ()


def join_policy(window: str, resize: str) -> str:
    """Join a window and a resize policy: ("rescale", "geometric") -> "rescale+geometric", ("divisor", "none") -> "divisor"."""
    return window if resize == "none" else f"{window}+{resize}"


def policy_parts(policy: str) -> frozenset[str]:
    """Split a policy into its names: "rescale+geometric" -> {"rescale", "geometric"}, "none" -> {}."""
    return frozenset(policy.split("+")) - {"none"}


class ModelWithPolicy(NamedTuple):
    """A model for images of one size, and what is resampled for it.

    model: see `with_policy`. resized: number of parameter values resampled, by rule. unseen, saturated: shares of offsets, see
    `resolution_report`; NaN for a model of another library. tokens: number of patch tokens, NaN where unknown. stages: grid,
    window and padding of every stage at this size.
    """

    model: nn.Module
    resized: dict[str, int]
    unseen: float
    saturated: float
    tokens: float
    stages: tuple[StageReport, ...] | tuple[StageWindows, ...]


def at_size_with(model: nn.Module, size: Size, policy: str) -> ModelWithPolicy:
    """Return the model for `size` (h, w) pixels under `policy` (see `with_policy`), and what is resampled for it.

    ValueError for a size that the model does not support.
    """
    if not isinstance(model, Backbone):
        resized = at_size(model, size, share_weights=True)
        unknown = float("nan")
        h, w = resized.windows[0].grid if resized.windows else (unknown, 1)
        return ModelWithPolicy(resized.model, resized.resized, unknown, unknown, h * w, resized.windows)
    changed, grid = with_policy(model, size, policy), model.token_grid(size)
    report = resolution_report(changed, size)
    return ModelWithPolicy(changed, report.resized, report.unseen, report.saturated, grid.h * grid.w, report.stages)


def static_columns(model: nn.Module, size: Size, policy: str, leak: bool = False, batch: int = 1) -> Row:
    """Return the columns of results.csv that need no images: tokens, windows, resampling, backend, gflops, border_leak.

    leak: run the border-leak test (else NaN). batch: the batch size that the attention backend is chosen for.
    """
    ready = at_size_with(model, size, policy)
    windows = any(stage.window is not None for stage in ready.stages)
    leaked = border_leak(ready.model, size) if leak and windows else None
    share = float("nan") if leaked is None else round(leaked, 4)
    backend = _vitrel_backend(ready.model, size, batch) if isinstance(ready.model, Backbone) else _timm_backend(ready.model)
    return _geometry(ready) | {"backend": backend, "gflops": round(gflops(ready.model, size), 4), "border_leak": share}


def native_columns(model: nn.Module, policy: str, shapes: Counter[Size], patch: Size) -> Row:
    """Return the columns of `static_columns` that depend on the images' shapes in the native protocol.

    shapes: number of images of each size (h, w) in pixels. patch: (h, w) in pixels. tokens is the mean over all images. The
    other columns use `sample_shapes` only: gflops and pad_fraction are means over the images of these shapes, resized names all
    rules, and resized_params, unseen and saturated are the largest values.
    """
    sampled, columns, costs = sample_shapes(shapes), [], []
    for size in sampled:
        ready = at_size_with(model, size, policy)
        columns.append(_geometry(ready) | {"rules": ready.resized})
        costs.append(gflops(ready.model, size) * shapes[size])
    count = sum(shapes[size] for size in sampled)
    pads = [
        [float(share) * shapes[size] for share in row["pad_fraction"].split()]
        for size, row in zip(sampled, columns, strict=True)
    ]
    same_stages = len({len(stages) for stages in pads}) == 1  # not so in every model of another library
    rules = dict.fromkeys(rule for row in columns for rule in row["rules"])
    return {
        "tokens": round(sum(token_count(size, patch) * n for size, n in shapes.items()) / shapes.total(), 2),
        "pad_fraction": " ".join(f"{sum(stage) / count:.2g}" for stage in zip(*pads, strict=True)) if same_stages else "",
        "gflops": round(sum(costs) / count, 4),
        "resized": " + ".join(rules) or "nothing",
        **{name: max(row[name] for row in columns) for name in ("resized_params", "unseen", "saturated")},
    }


def sample_shapes(shapes: Counter[Size]) -> list[Size]:
    """Return the MOST_SHAPES most frequent image sizes (h, w), and those with the smallest and the largest h / w.

    shapes: number of images of each size.
    """
    extremes = [pick(shapes, key=lambda size: size[0] / size[1]) for pick in (min, max)]
    return list(dict.fromkeys([size for size, _ in shapes.most_common(MOST_SHAPES)] + extremes))


def gflops(model: nn.Module, size: Size) -> float:
    """Return 10^9 multiply-adds of one image's forward pass, counting matrix products and convolutions (timm's GMACs)."""
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: torch.empty_like(tensor, device="meta", requires_grad=False) for name, tensor in named}
    pixels = torch.empty(1, getattr(model, "in_chans", 3), *size, device="meta", dtype=next(model.parameters()).dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, shapes, pixels)
    return counter.get_total_flops() / 2e9  # the counter counts a multiply-add as two operations


def _resize_policies_at(model: Backbone, size: tuple[int, int], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The resize policies that differ at `size` (h, w) pixels with the model's windows, joined by "+" where encodings have
    different ones; ("none",) where no policy changes anything. wanted: as for `policies_at`.
    """
    affected = [part.policies for part, grid in resizable_parts(model, size) if _is_resized(part, grid)]
    options = []
    for group in _policy_groups(model):
        if any(set(group) & set(policies) for policies in affected):
            chosen = [policy for policy in group if wanted is None or policy in wanted]
            options.append(chosen or [next(part.resize for part, _ in resizable_parts(model, size) if part.resize in group)])
    return tuple("+".join(names) for names in product(*options)) if options else ("none",)


def _policy_groups(model: Backbone) -> list[tuple[str, ...]]:
    """Policies of the encodings that are resized at a large size; those of encodings that share a name form one group."""
    groups: list[tuple[str, ...]] = []
    for policies in dict.fromkeys(part.policies for part, grid in resizable_parts(model, LARGE) if _is_resized(part, grid)):
        overlapping = [group for group in groups if set(group) & set(policies)]
        merged = tuple(dict.fromkeys(name for group in (*overlapping, policies) for name in group))
        groups = [group for group in groups if group not in overlapping] + [merged]
    return groups


def _is_resized(part: PositionEncoding, grid: Grid) -> bool:
    """Whether some policy of an encoding resamples, or reads otherwise than as trained, its parameters on `grid`."""
    trial = copy.copy(part)  # shares the parameters; the model keeps its policy
    rules = []
    for policy in part.policies:
        trial.resize = policy
        rules.append(trial.resized(grid))
    return any(rules)


def _window_at(model: Backbone, attn: Attention, grid: tuple[int, int], size: tuple[int, int], policy: str) -> tuple[int, int]:
    """The window (h, w) in tokens of a layer with `grid` tokens under the policy "divisor" or "rescale"."""
    if policy == "divisor":
        h, w = (max(d for d in range(1, m + 1) if n % d == 0) for m, n in zip(attn.window, grid, strict=True))
    else:
        trained = to_2tuple(model.patch_embed.img_size)
        h, w = (max(1, m * r // at) for m, r, at in zip(attn.window, size, trained, strict=True))
    return h, w


def _windowed(model: nn.Module, size: tuple[int, int]) -> Iterator[tuple[Attention, tuple[int, int]]]:
    """Every windowed attention layer of a vitrel model with its grid (h, w) at `size`; none for other models."""
    if not isinstance(model, Backbone):
        return
    for blocks, grid, _ in stages(model, model.token_grid(size)):
        yield from ((block.attn, grid[:2]) for block in blocks if block.attn.window is not None)  # type: ignore[misc]


def _geometry(ready: ModelWithPolicy) -> Row:
    """Columns on tokens, windows, padding and resampling."""
    windows = ["global" if stage.window is None else f"{stage.window[0]}x{stage.window[1]}" for stage in ready.stages]
    return {
        "tokens": ready.tokens,
        "window": " ".join(windows),
        "pad_fraction": " ".join(f"{stage.padded_share:.2g}" for stage in ready.stages),
        "resized": " + ".join(ready.resized) or "nothing",
        "resized_params": sum(ready.resized.values()),
        "unseen": round(ready.unseen, 4),
        "saturated": round(ready.saturated, 4),
    }


def _vitrel_backend(model: Backbone, size: Size, batch: int) -> str:
    """The attention backends that vitrel.ops chooses for the layers at this image and batch size, joined by "+"."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    names, weight, grid = {layer.backend for layer in layers}, layers[0].proj.weight, model.token_grid(size)
    if "auto" in names:
        heads, window = layers[0].num_heads, layers[0].window
        how: dict = dict(
            entry="attention" if window is None else "window_attention", window=window, grid=grid, queries=grid.tokens,
            heads=heads, width=len(weight) // heads, dtype=weight.dtype, device=weight.device, grad=False, batch=batch,
        )  # fmt: skip
        with torch.no_grad():
            terms = [encoding(part) for encoding, part in model.encodings(size) if encoding.site == "attention"]
            modules = [choose("auto", Call(terms=term, **how)) for term in terms]
        names = names - {"auto"} | {name for name, module in BACKENDS.items() if module in modules}
    return "+".join(sorted(names))


def _timm_backend(model: nn.Module) -> str:
    fused = {module.fused_attn for module in model.modules() if isinstance(getattr(module, "fused_attn", None), bool)}
    return "+".join(sorted("timm fused" if flag else "timm" for flag in fused))
