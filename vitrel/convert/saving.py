"""save and load: write a vitrel model to one file, and read such files, checkpoints and others' weights as vitrel models.

A file is .safetensors. Its metadata hold, as JSON under "vitrel": `format`, an integer; `model`, the configuration of
vitrel.models.config; `position`, the description of the encodings by vitrel.weights.record.
"""

from pathlib import Path
from typing import Any, NamedTuple

import timm
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.files import atomic_write
from vitrel.convert.recognize import as_vitrel, recognize
from vitrel.convert.relativize import absolute_scale, drop_absolute
from vitrel.models.backbone import Backbone
from vitrel.models.config import PREPROCESSING, TRUNKS, Config, config_of, preparation_of, stored_arguments
from vitrel.models.create import check_model_name, create_model, create_sized, on_meta
from vitrel.models.segmenter import BODY, Segmenter
from vitrel.weights.load import apply_plan, plan_weights
from vitrel.weights.read import check_file, guarding, read_file, write_safetensors
from vitrel.weights.record import check_encodings, position_record
from vitrel.weights.rotate import Rotation
from vitrel.weights.swin_names import rename_swin, swin_arguments
from vitrel.weights.tensors import FileTensors
from vitrel.weights.unwrap import unwrap
from vitrel.weights.vit_names import rename_vit, vit_arguments

FORMAT = 2
# Entries of 'vitrel' in a checkpoint of vitrel train: those with one value of a type, and those with a list of values.
_SCALARS = {"model": str, "model_args": dict, "crop_pct": (int, float), "crop_mode": str, "interpolation": str}
_LISTS = {"classes": str, "img_size": int, "mean": (int, float), "std": (int, float)}


def save(model: nn.Module, path: str | Path) -> None:
    """Save a vitrel model as one .safetensors file that `load` reads: weights in their dtypes, and the configuration.

    Args:
        model: a ViT or Swin of vitrel.
        path: of the file, which is written atomically.

    Raises:
        ValueError: the suffix is another, or the model is of another library, or its weights or encodings are not those that
            its configuration builds (a part was replaced); nothing is written then.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"models are saved as .safetensors, not as {path.name}")
    if not isinstance(model, Backbone):
        raise ValueError(
            f"{type(model).__name__} is no vitrel model: convert timm's with vitrel.from_timm, unwrap compiled ones"
        )
    config = config_of(model)
    _check_rebuilds(model, config.build("meta"))
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    about = {"format": FORMAT, "model": config._asdict(), "position": position_record(model)}
    with atomic_write(path) as part:
        write_safetensors(part, state, about)


def _check_rebuilds(model: Backbone, built: Backbone) -> None:
    """Raise ValueError unless the weights and encodings of a model have the names, shapes and options of one built anew."""

    def described(part: Backbone) -> dict[str, Any]:
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
            timm checkpoint with its config.json beside it; or bare weights with the names of timm or vitrel.
        like: for bare weights, the name of a timm or vitrel model with the settings that shapes do not show: number of heads,
            activation, eps, pooling, rotation. The file decides the rest: width, depth, patches, tokens, tables, classes, image
            size. Not needed for a file that holds its model's configuration.
        changes: constructor arguments that replace the file's. With another `num_classes` the head is new; with another
            `img_size` tables and embeddings are resampled to it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: something in the file is missing or damaged; the message names it.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path, changes)
    loaded = read_file(path)
    about = loaded.get("vitrel") if isinstance(loaded, dict) else None
    if isinstance(about, dict) and isinstance(about.get("model"), str):
        return read_checkpoint(path, loaded, changes)[0]
    if isinstance(about, dict) and about and ("model" in about or like is None):
        return _from_saved(path, loaded, about, changes)
    if like is None and (path.parent / "config.json").is_file():
        return _from_folder(path.parent, changes, path)
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
    check_encodings(about.get("position"), path)
    for name, kind in (_SCALARS | _LISTS).items():
        value = about.get(name)
        parts = [value] if name in _SCALARS else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, kind) for part in parts):
            raise ValueError(f"{path} is damaged: {name} in its 'vitrel' is {value!r:.60}; train or copy it again")
    if not timm.is_model(about["model"]):  # timm would download hf-hub:... and read another file for local-dir:...
        raise ValueError(f"{path} is of a model {about['model']!r}, which cannot be built: neither vitrel nor timm has it")
    arguments = stored_arguments(about["model_args"])
    arguments |= dict(num_classes=len(about["classes"]), img_size=tuple(about["img_size"])) | (changes or {})
    try:
        model = create_sized(about["model"], **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is of a model {about['model']} with {arguments}, which cannot be built: {error}") from error
    backbone, head = model, None
    if about.get("task") == "segmentation":
        model = Segmenter(backbone, arguments["num_classes"], about.get("head", "linear"))
        loaded, head = _without_head(loaded, path)
    if isinstance(backbone, Backbone):
        _load_own(backbone, loaded, path, changes or {})
    else:
        _load_other(backbone, loaded, path)
    if head is not None:
        _load_other(model, {"state_dict": head | {BODY + name: value for name, value in backbone.state_dict().items()}}, path)
    settings = {name: about[name] for name in PREPROCESSING}
    if "num_classes" not in (changes or {}):
        settings["label_names"] = list(about["classes"])
    model.pretrained_cfg.update(settings)
    if getattr(backbone, "absolute_fade", None) is not None and absolute_scale(backbone) == 0:
        drop_absolute(backbone)  # else it would be resampled at other sizes and multiplied by 0
    return model.eval(), about


def _without_head(loaded: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of a checkpoint of a segmentation model as that of its backbone, and the other weights of the model."""
    state = loaded["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{path} is damaged: it has no weights by name")
    below = f"model.{BODY}"
    body = {f"model.{name.removeprefix(below)}": value for name, value in state.items() if name.startswith(below)}
    others = {name.removeprefix("model."): value for name, value in state.items() if not name.startswith(below)}
    return loaded | {"state_dict": body}, others


def rebuilt(model: Backbone, **changes: Any) -> Backbone:
    """Return a new model with the weights of `model` and other constructor arguments; `model` is not changed.

    With another `img_size` tables and embeddings are resampled to it; with another `num_classes` the head is new.
    """
    weight = model.patch_embed.proj.weight
    result = config_of(model).build(weight.device, weight.dtype, **changes)
    stored = {"state_dict": model.state_dict(), "vitrel": {"position": position_record(model)}}
    apply_plan(result, plan_weights(result, stored), reset_head="num_classes" in changes)
    return result.train(model.training)


def not_finite(model: nn.Module) -> str:
    """Return the names of at most 5 weights that hold NaN or infinity, "" if there are none."""
    state = model.state_dict().items()
    return ", ".join([name for name, value in state if value.is_floating_point() and not value.isfinite().all()][:5])


def _from_saved(path: Path, loaded: dict[str, Any], about: dict[str, Any], changes: dict[str, Any]) -> Backbone:
    """Return the model of a file of `save`, `about` being its metadata."""
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
        _load_own(model, loaded, path, changes)
        return model.eval()
    try:
        # in the file's dtypes; copied, since memory-mapped tensors may be unaligned, and kernels then round differently
        model.load_state_dict({name: value.clone() for name, value in loaded["state_dict"].items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit its model: {error}") from error
    return model.eval()


def _from_folder(folder: Path, changes: dict[str, Any], weights: Path | None = None) -> nn.Module:
    """Return the model of a run's folder, or of timm's with config.json as a vitrel model, in evaluation mode.

    Args:
        folder: of the run, or written by timm.
        changes: constructor arguments as in `load`.
        weights: for a folder of timm, a file to use instead of the folder's; ignored if the folder has a run's checkpoint.
    """
    run = folder / "checkpoints" / "last.ckpt"
    if run.is_file():
        return load(run, **changes)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no model: neither a run's checkpoints/last.ckpt nor timm's config.json")
    if weights is None:
        model = create_model(f"local-dir:{folder}", pretrained=True, **changes)
    else:
        check_file(weights)
        with guarding(str(weights)):
            model = create_model(f"local-dir:{folder}", checkpoint_path=str(weights), **changes)
    return as_vitrel(model).eval()


def _from_bare(path: Path, loaded: Any, like: str | None, changes: dict[str, Any]) -> Backbone:
    """Return a model with weights that come without a configuration; `like` as in `load`."""
    state = unwrap(loaded, str(path)).state
    tensors = FileTensors(state)
    swin = tensors.has(r"layers\.\d+\.blocks\..*")
    own_names = tensors.has(r".*\.position\..*|pos_embed\.pos_embed")
    try:
        rename_swin(tensors) if swin else rename_vit(tensors)
        shapes = swin_arguments(tensors) if swin else vit_arguments(tensors)
    except (LookupError, ValueError) as error:
        reason = f"no tensor is {error.args[0]}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} holds weights with other names than timm's: {reason}; timm reads some of them, by vitrel.from_timm(NAME, "
            "pretrained=True, pretrained_cfg_overlay=dict(file=...))"
        ) from error
    if like is None and (own_names or not swin or "window_size" not in shapes):
        raise ValueError(
            f"{path} holds bare weights of {_described(shapes)}: their shapes do not show the number of heads, the "
            "activation or the eps of the norms; name a model with the same, for example like='vit_tiny_patch16_224'"
        )
    known = _like(like, swin) if like is not None else _Like(_swin_config(shapes), None, set())
    arguments = _joined(known.config.arguments, shapes, own_names) | changes
    preparation = known.config.preparation | {"input_size": (arguments.get("in_chans", 3), *to_2tuple(arguments["img_size"]))}
    try:
        model = Config(known.config.architecture, arguments, arguments["img_size"], preparation).build()
    except ValueError as error:
        raise ValueError(f"no model like {like} can be built for {path}: {error}") from error
    same_names = state.keys() - {"head.weight", "head.bias"} <= known.names
    try:
        plan = plan_weights(model, loaded, rotation=known.rotation if same_names else None)
        return apply_plan(model, plan, reset_head="num_classes" in changes).eval()  # type: ignore[return-value]
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit a model like {like}: {error}") from error


class _Like(NamedTuple):
    """The model named by `like`: its settings stand in for what the shapes of bare weights do not show."""

    config: Config  # of the model
    rotation: Rotation | None  # layout of timm's rotary encoding
    names: set[str]  # of timm's weights


def _like(like: str, swin: bool) -> _Like:
    check_model_name(like)
    with on_meta():
        model = timm.create_model(like)
    if isinstance(model, Backbone):
        return _Like(config_of(model), None, set())
    recognized = recognize(model)
    if (recognized.architecture == "vitrel_swin") != swin:
        raise ValueError(f"the file is of a {'Swin' if swin else 'plain ViT'}, {like} is not: name a model of the same kind")
    config = Config(
        recognized.architecture, recognized.arguments, recognized.arguments["img_size"], preparation_of(model.pretrained_cfg)
    )
    return _Like(config, recognized.rotation, set(model.state_dict()))


def _swin_config(shapes: dict[str, Any]) -> Config:
    """Return a Config with nothing but a square image size, 32 * the larger side of the window.

    The window is then the grid of the last of 4 stages, for patches of 4. `_joined` adds the arguments in `shapes`.
    """
    size = (32 * max(shapes["window_size"]),) * 2
    return Config("vitrel_swin", dict(img_size=size), size, {})


def _joined(base: dict[str, Any], shapes: dict[str, Any], own_names: bool) -> dict[str, Any]:
    """Return the arguments `base`, updated by those inferred from the file's shapes.

    Args:
        base: arguments of the model named by `like`.
        shapes: arguments that the shapes show.
        own_names: the file has vitrel's names, so it is of the very model `base`: only num_classes is updated. Else layer scale
            and norms in `block_args` are the file's alone; its other entries are those of `base` unless the shapes show them.
    """
    if own_names:  # vitrel's names: the file is of the very model that was named
        return base | {"num_classes": shapes["num_classes"]}
    joined = base | shapes
    if "block_args" in base:
        block_args = {
            name: value
            for name, value in (base["block_args"] or {}).items()
            if name not in ("init_values", "mlp_norm", "attn_norm", "qk_norm")
        }
        if "global_blocks" in block_args:
            block_args["global_blocks"] = tuple(i for i in block_args["global_blocks"] if i < shapes["depth"])
        joined["block_args"] = block_args | shapes["block_args"]
    if "position" in base and "position" not in shapes:
        joined["position"] = base["position"]
    return joined


def _described(shapes: dict[str, Any]) -> str:
    """Describe in an error the model that shapes show."""
    depth = shapes.get("depth") or "+".join(map(str, shapes["depths"]))
    kind = "a Swin" if "depths" in shapes else "a ViT"
    height, width = shapes["patch_size"]
    return (
        f"{kind} of width {shapes['embed_dim']}, {depth} blocks, patches of {height}x{width}, {shapes['num_classes']} classes"
    )


def _load_own(model: Backbone, loaded: dict[str, Any], path: Path, changes: dict[str, Any]) -> None:
    """Load a checkpoint's weights into a vitrel model in place.

    Args:
        model: changed in place.
        loaded: the file's content.
        path: names the file in errors.
        changes: the arguments in which the model differs from the file's. Without any, tables and embeddings of another grid
            are an error, else they are resampled; with `num_classes` the head may be new.

    Raises:
        ValueError: the weights do not fit.
    """
    try:
        plan = plan_weights(model, loaded)
        resampled = [row for row in plan.rows if row.resampled]
        if resampled and not changes:  # without changes the grids of model and file are equal
            raise ValueError(f"{resampled[0].target} is of another grid ({resampled[0].resampled})")
        apply_plan(model, plan, reset_head="num_classes" in changes)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} does not fit its model: {error}") from error
    except (AttributeError, LookupError, TypeError) as error:  # names or records of a wrong type
        raise ValueError(f"{path} is damaged: its weights or its record of positions cannot be read ({error!r})") from error


def _load_other(model: nn.Module, loaded: dict[str, Any], path: Path) -> None:
    """Load a checkpoint's weights into a timm model; raise ValueError that names `path` if they do not fit."""
    try:
        model.load_state_dict({name.removeprefix("model."): value for name, value in loaded["state_dict"].items()})
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} does not fit its model: {str(error)[:600]}") from error
    if bad := not_finite(model):
        raise ValueError(f"{path} does not fit its model: the weights hold NaN or infinity in {bad}")


def _tuples(value: Any) -> Any:
    """Return JSON data with its lists, nested ones too, as tuples."""
    if isinstance(value, list):
        return tuple(_tuples(part) for part in value)
    return {name: _tuples(part) for name, part in value.items()} if isinstance(value, dict) else value
