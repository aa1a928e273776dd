"""`vitrel.create_model`: timm.create_model with helpful errors, for names and for folders with config.json and weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import nn
from torch.overrides import TorchFunctionMode

from vitrel.common.names import nearest

_FILLS = {"uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "zero_", "fill_"}  # of torch.nn.init and of Tensor
_FILLS |= {"kaiming_uniform_", "kaiming_normal_"}  # which are seen as one call


def create_model(name: str, **kwargs) -> nn.Module:
    """Build a model by timm.create_model, with this package's models registered.

    Args:
        name: of a model in timm's registry, or a source: "local-dir:FOLDER", "hf-hub:REPOSITORY".
        kwargs: arguments of timm.create_model, for example pretrained, num_classes, img_size, position_args.

    Raises:
        ValueError: the name is unknown (the message gives the nearest known names), or the pretrained weights do not exist.
        ConnectionError: the pretrained weights are neither in timm's cache nor can be downloaded.
        FileNotFoundError: the folder of "local-dir:" does not exist, or holds no model of timm's.
        TypeError: the model has no such argument.
    """
    check_model_name(name, allow_sources=True)
    overlay = kwargs.get("pretrained_cfg_overlay") or {}
    local = name.startswith("local-dir:") or "file" in overlay or "state_dict" in overlay
    if local or not kwargs.get("pretrained"):  # nothing is downloaded
        return timm.create_model(name, **kwargs)
    if timm.is_model(name) and not timm.get_pretrained_cfg(name).has_weights and not kwargs.get("pretrained_cfg"):
        raise ValueError(f"there are no pretrained weights for {name}: give a file with weights (--weights FILE), or train it")
    try:
        return timm.create_model(name, **kwargs)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, URLError):
        raise ConnectionError(
            f"the weights of {name} are not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot be reached "
            "(or HF_HUB_OFFLINE is set): give a file with the weights (--weights FILE, in Python vitrel.load)"
        ) from None


@contextmanager
def on_meta() -> Iterator[None]:
    """Return a context in which models are built on the meta device: shapes without values, in little time."""
    with torch.device("meta"), Uninitialized():
        yield


class Uninitialized(TorchFunctionMode):
    """Context in which parameters keep what `torch.empty` gave them, for models whose weights are loaded at once.

    The in-place functions `_FILLS` (normal_, zero_, mul_ and the like) leave a parameter, or any tensor on the meta device, as
    it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in _FILLS:
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta or isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **(kwargs or {}))


def create_sized(name: str, img_size: tuple[int, int] | None = None, **kwargs) -> nn.Module:
    """Build a model as `create_model`, with `img_size` if its architecture has that argument, otherwise without.

    Args:
        name: as in `create_model`.
        img_size: (h, w) in pixels; None: the model keeps its default.
        kwargs: as in `create_model`.

    Raises:
        TypeError: an argument other than img_size is wrong; other errors as in `create_model`.
    """
    try:
        return create_model(name, **kwargs | ({} if img_size is None else {"img_size": img_size}))
    except TypeError as error:
        if img_size is None or "img_size" not in str(error):
            raise
    return create_model(name, **kwargs)


def check_model_name(name: str, allow_sources: bool = False) -> None:
    """Check that a model is in timm's registry.

    Args:
        name: of the model.
        allow_sources: accept sources such as local-dir:folder and hf-hub:repository, without looking into them.

    Raises:
        ValueError: it is not (the message gives the nearest names), or the name is that of a file or folder.
    """
    if ":" not in name and Path(name).exists() and not timm.is_model(name):
        raise ValueError(
            f"{name} is a file or folder, and a model's name is expected: give the one that it was trained under (model.model "
            "in the run's config.yaml), or in Python the model itself"
        )
    if not (timm.is_model(name) or (allow_sources and (":" in name or "/" in name))):
        near = nearest(name, timm.list_models(), cutoff=0.5)
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(near) or 'none'} (timm.list_models lists all)")
