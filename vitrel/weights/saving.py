"""save and load: a vitrel model is written to one file; such files, checkpoints and others' weights are read as vitrel models.

A file is .safetensors. Its metadata hold, as JSON under "vitrel": `format`, an integer; `model`, the configuration of
vitrel.models.config; `position`, the description of the encodings by vitrel.weights.record.
"""

from pathlib import Path
from typing import Any

import timm
from torch import nn

from vitrel.any_size import side_multiple
from vitrel.common.files import atomic_write
from vitrel.models.backbone import Backbone
from vitrel.models.config import PREPROCESSING, TRUNKS, Config, config_of, stored_arguments
from vitrel.models.create import create_model, create_sized
from vitrel.models.segmenter import BODY, Segmenter
from vitrel.weights.from_timm import from_timm
from vitrel.weights.plan import KNOWN, apply_plan, fitted, model_for
from vitrel.weights.read import ARRAYS, check_folder, read_file, unwrap, write_safetensors
from vitrel.weights.recognize import as_vitrel
from vitrel.weights.record import check_encodings, position_record
from vitrel.weights.relativize import absolute_scale, drop_absolute

FORMAT = 2


def save(model: nn.Module, path: str | Path) -> None:
    """Save a vitrel model as one .safetensors file that `load` reads: weights in their dtypes, and the configuration.

    Args:
        model: a ViT or Swin of vitrel, or a Segmenter with one.
        path: of the file, in a folder that exists; it is written atomically.

    Raises:
        ValueError: the suffix is another, or the model is of another library, or its weights or encodings are not those that
            its configuration builds (a part was replaced); nothing is written then.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"models are saved as .safetensors, not as {path.name}")
    trunk = model.backbone if isinstance(model, Segmenter) else model
    if side_multiple(trunk):
        raise ValueError(
            f"{type(trunk).__name__} keeps timm's trunk and names, so there is no vitrel model to save: write its state_dict() "
            "with torch.save, and read that, or timm's own file, with vitrel.from_timm(NAME, checkpoint_path=FILE)"
        )
    if not isinstance(trunk, Backbone):
        raise ValueError(
            f"{type(model).__name__} is no vitrel model: convert timm's with vitrel.from_timm, unwrap compiled ones"
        )
    config = config_of(model)
    _check_rebuilds(model, config.build("meta"))
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    about = {"format": FORMAT, "model": config._asdict(), "position": position_record(model)}
    with atomic_write(path) as part:
        write_safetensors(part, state, about)


def _check_rebuilds(model: nn.Module, built: nn.Module) -> None:
    """Raise ValueError unless names and shapes of weights and options of encodings are those of `built`, a new model."""

    def described(part: nn.Module) -> dict[str, Any]:
        shapes = {name: getattr(value, "shape", None) for name, value in part.state_dict().items()}
        return shapes | position_record(part, free=True)

    own, anew = described(model), described(built)
    for name in (*own, *anew):
        if own.get(name) != anew.get(name):
            raise ValueError(
                f"the model cannot be saved, since its configuration builds another: {name} is {own.get(name)}, and would be "
                f"{anew.get(name)}"
            )


def load(path: str | Path, like: str | None = None, **changes: Any) -> nn.Module:
    """Return the model in a file, in evaluation mode on the CPU.

    A run that trained a timm model gives that timm model, not converted; its shapes cannot be changed.

    Args:
        path: a file of `save`; a checkpoint of `vitrel train`, or the run's folder; a folder written by timm's save_for_hf; a
            timm checkpoint with its config.json beside it; or bare weights.
        like: for bare weights, the name of their timm or vitrel model; with a timm name the file is read as by
            `from_timm(like, checkpoint_path=path, **changes)`. Not needed for a folder, or a file that holds its model's
            configuration, which decides; another name is then an error. A timm name is not compared with the configuration of a
            model that was converted from timm, which does not hold timm's name.
        changes: constructor arguments that replace the file's. With another `num_classes` the head is new; with another
            `img_size` tables and embeddings are resampled to it; with another `in_chans` the first convolution is adapted as by
            timm.

    Raises:
        FileNotFoundError: there is no such file, or the folder holds no model.
        ValueError: something in the file is missing or damaged, and the message names it; bare weights come without `like`, or
            others with the name of another model.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path, like, changes)
    loaded = read_file(path)
    about = loaded.get("vitrel") if isinstance(loaded, dict) else None
    about = about if isinstance(about, dict) else {}
    model = about.get("model")  # the name in a checkpoint, the configuration in a file of `save`
    name = model.get("architecture") if isinstance(model, dict) else model
    if name is not None and (name not in [*TRUNKS] or (like or "").startswith("vitrel_")):
        _check_name(path, name, like)
    if isinstance(model, str):
        return read_checkpoint(path, loaded, changes)[0]
    if about and ("model" in about or like is None):
        return _from_saved(path, loaded, about, changes)
    if like is None and (path.parent / "config.json").is_file():
        return _from_folder(path.parent, None, changes, path)
    return _from_bare(path, loaded, like, changes)


def read_checkpoint(path: Path, loaded: Any = None, changes: dict[str, Any] | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a checkpoint of vitrel train, in evaluation mode, and its entry 'vitrel' (see vitrel.train.module).

    A run of a timm model gives the timm model. An absolute embedding that has faded to 0 is dropped. No other file is read and
    nothing is downloaded, whatever the content.

    Args:
        path: names the file in errors, and is read if `loaded` is None.
        loaded: the file's content.
        changes: constructor arguments as in `load`.

    Raises:
        ValueError: the file is not such a checkpoint, is damaged, does not fit its own model, or holds NaN; or `changes`
            changes the shape of a tensor of a timm model.
    """
    loaded = read_file(path) if loaded is None else loaded
    if not isinstance(loaded, dict) or not {"vitrel", "state_dict"} <= loaded.keys() or not isinstance(loaded["vitrel"], dict):
        keys = ", ".join(sorted(map(str, loaded))[:6]) if isinstance(loaded, dict) else type(loaded).__name__
        raise ValueError(f"{path} is not a checkpoint of vitrel train: it needs 'vitrel' and 'state_dict', it holds {keys}")
    about = loaded["vitrel"]
    if missing := [key for key in ("model", "model_args", "classes", "img_size", *PREPROCESSING) if key not in about]:
        raise ValueError(f"{path} is damaged: its entry 'vitrel' has no {', '.join(missing)}")
    check_encodings(about.get("position"), path)
    if not timm.is_model(about["model"]):  # timm would download hf-hub:... and read another file for local-dir:...
        raise ValueError(f"{path} is of a model {about['model']!r}, which cannot be built: neither vitrel nor timm has it")
    arguments = stored_arguments(about["model_args"])
    arguments |= dict(num_classes=len(about["classes"]), img_size=tuple(about["img_size"])) | (changes or {})
    try:
        model = create_sized(about["model"], **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is of a model {about['model']} with {arguments}, which cannot be built: {error}") from error
    backbone, position = model, about.get("position", {})
    if about.get("task") == "segmentation":
        model = Segmenter(backbone, arguments["num_classes"], about.get("head", "linear"))
        position = {BODY + name: entry for name, entry in position.items()}
    _load(model, loaded, position, path, changes or {})
    if isinstance(backbone, Backbone):
        backbone.train_sizes = () if "img_size" in (changes or {}) else tuple(about.get("train_sizes") or ())
        backbone.task = about.get("task", "") if model is backbone else ""
    settings = {name: about[name] for name in PREPROCESSING}
    if "num_classes" not in (changes or {}):
        settings["label_names"] = list(about["classes"])
    model.pretrained_cfg.update(settings)
    if getattr(backbone, "absolute_fade", None) is not None and absolute_scale(backbone) == 0:
        drop_absolute(backbone)  # else it would be resampled at other sizes and multiplied by 0
    return model.eval(), about


def not_finite(model: nn.Module) -> str:
    """Return the names of at most 5 weights that hold NaN or infinity, joined by commas; "" if there are none."""
    state = model.state_dict().items()
    return ", ".join([name for name, value in state if value.is_floating_point() and not value.isfinite().all()][:5])


def _from_saved(path: Path, loaded: dict[str, Any], about: dict[str, Any], changes: dict[str, Any]) -> nn.Module:
    """Return the model of a file of `save`, in evaluation mode, by its content and metadata `about`; `changes` as in `load`.

    Without `changes` the weights keep the file's dtypes, else they are cast to the new model's. `path` is for errors.
    """
    check_encodings(about.get("position"), path)
    if about.get("format") != FORMAT or "model" not in about:
        raise ValueError(
            f"{path} has format {about.get('format')}, this version of vitrel reads {FORMAT}: upgrade vitrel, or if the file "
            "holds no configuration, name its model: vitrel.load(path, like='vitrel_...')"
        )
    try:
        config = Config(**{name: _tuples(value) for name, value in about["model"].items()})
        if not (config.architecture.startswith(tuple(TRUNKS)) and timm.is_model(config.architecture)):
            raise ValueError(f"vitrel has no model {config.architecture!r}")  # timm would download some names
        if len(config.input_size) != 2:
            raise ValueError(f"its input size is {config.input_size}")
        model = config.build("meta" if changes else None)
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} has a configuration that builds no model: {error}; save it again") from error
    if changes:
        model = config.build(**changes)
        _load(model, loaded, about.get("position", {}), path, changes)
        return model.eval()
    try:
        # in the file's dtypes; copied, since memory-mapped tensors may be unaligned, and kernels then round differently
        model.load_state_dict({name: value.clone() for name, value in loaded["state_dict"].items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit its model: {error}") from error
    return model.eval()


def _check_name(path: Path, name: str, like: str | None) -> None:
    """Raise ValueError if a file or folder of the model `name` is to be loaded as another, `like`."""
    if like not in (None, name):
        raise ValueError(f"{path} is of the model {name}, not of {like}: give that name, or none")


def _from_folder(folder: Path, like: str | None, changes: dict[str, Any], weights: Path | None = None) -> nn.Module:
    """Return the model in the folder of a run, as `load` does, or in one with timm's config.json, converted to a vitrel model.

    Args:
        folder: of the run, or written by timm.
        like: name of the model, an error if the folder is of another; None: not given.
        changes: constructor arguments as in `load`.
        weights: for a folder of timm, a file to use instead of the folder's; ignored if the folder has a run's checkpoint.
    """
    run = folder / "checkpoints" / "last.ckpt"
    if run.is_file():
        return load(run, like, **changes)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no model: neither a run's checkpoints/last.ckpt nor timm's config.json")
    if weights is None:
        check_folder(folder)
        model = create_model(f"local-dir:{folder}", pretrained=True, **changes)
    else:
        if weights.suffix not in ARRAYS:
            read_file(weights)  # which finds damage, and timm does not
        model = create_model(f"local-dir:{folder}", checkpoint_path=str(weights), **changes)
    _check_name(folder, model.pretrained_cfg["architecture"], like)
    return as_vitrel(model).eval()


def _from_bare(path: Path, loaded: Any, like: str | None, changes: dict[str, Any]) -> nn.Module:
    """Return a model in evaluation mode with weights that come without a configuration; `like` and `changes` are as in `load`.

    For a vitrel name `loaded` is used, and `path` names the file in errors; for a timm name `from_timm` reads `path` again.
    ValueError if `like` is None.
    """
    if like is None:
        first = ", ".join([*unwrap(loaded, str(path))][:5])
        raise ValueError(
            f"{path} holds weights without their model's name: name it, for example like='vit_tiny_patch16_224', in commands "
            f"vit_tiny_patch16_224 --weights FILE. The first names are {first}; {KNOWN}"
        )
    if not like.startswith("vitrel_"):
        return from_timm(like, checkpoint_path=path, **changes).eval()
    try:
        model, plan = model_for(like, changes, loaded)
        return apply_plan(model, plan, reset_head="num_classes" in changes).eval()
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {like}: {error}") from error


def _load(model: nn.Module, loaded: dict[str, Any], position: Any, path: Path, changes: dict[str, Any]) -> None:
    """Load a checkpoint's weights into its own model, of vitrel or timm, in place.

    `position` is the file's record of the encodings (vitrel.weights.record). `changes` are the arguments in which the model
    differs from the file's. Without any, tables and embeddings of another grid are an error, else they are resampled; with
    `num_classes` the head may be new.

    Raises:
        ValueError: the weights do not fit, or hold NaN.
    """
    try:
        plan = fitted(model, unwrap(loaded, "the file"), position)
        if plan.rows and not changes:  # without changes the grids of model and file are equal
            raise ValueError(f"{plan.rows[0].target} is of another grid ({plan.rows[0].resampled})")
        apply_plan(model, plan, reset_head="num_classes" in changes)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} does not fit its model: {error}") from error


def _tuples(value: Any) -> Any:
    """Return JSON data with its lists, nested ones too, as tuples."""
    if isinstance(value, list):
        return tuple(_tuples(part) for part in value)
    return {name: _tuples(part) for name, part in value.items()} if isinstance(value, dict) else value
