"""The model under examination: built from a name, an import path or a module, run at an image size, on a copy."""

import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
from vitrel.inspect.any_model import channels_of, image_options, model_at_size, model_name, reason, trained_size
from vitrel.inspect.recorder import first_tensor

REFUSALS = (AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_UNITS = (16, 14, 8, 32)  # pixels tried as the side of a patch where the model does not show it


class Subject:
    """A copy of a model in float32 on the CPU, in evaluation mode, whose tables of zeros are filled with noise.

    Position cannot be seen in tables that were initialized with zeros (BEiT, SAM); the noise has a fixed seed.
    """

    def __init__(self, model: nn.Module, name: str = ""):
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if any(value.is_meta for value in (*model.parameters(), *model.buffers())):
            raise ValueError("the model is on the meta device and has no values to examine: load its weights first")
        self.model = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
        self.name = name or model_name(model)
        generator = torch.Generator().manual_seed(0)
        for value in self.model.parameters():
            if value.dim() > 1 and value.is_floating_point() and not value.any():
                value.copy_(0.02 * torch.randn(value.shape, generator=generator))
        self.channels = channels_of(self.model)
        self.extra = image_options(self.model)

    def at(self, size: Size) -> nn.Module:
        """A copy of the model that ran nothing before, for images of `size`.

        At the native size it is as it was built; at others it is changed by `set_input_size` where it has one, which makes
        masks and tables anew.
        """
        return copy.deepcopy(self.model if size == self.native() and self._runs_as_built else model_at_size(self.model, size))

    @functools.cached_property
    def _runs_as_built(self) -> bool:
        return not _refusal(lambda: self.output(copy.deepcopy(self.model), self.images(self.native())))

    def takes_as_it_is(self, size: Size) -> bool:
        """Whether the model takes `size` without being changed for it."""
        return model_at_size(self.model, size) is self.model and not self.takes(size)

    def call(self, model: nn.Module) -> Callable[[Tensor], Any]:
        """A function that runs `model`, a copy of the subject's, on images."""
        return lambda images: model(images, **self.extra)

    def output(self, model: nn.Module, images: Tensor) -> Tensor:
        """The first tensor that `model` returns for images, without gradients."""
        with torch.no_grad():
            return first_tensor(self.call(model)(images))

    def images(self, size: Size, batch: int = 1, seed: int = 0) -> Tensor:
        """Random images [batch, channels, height, width]."""
        return torch.randn(batch, self.channels, *size, generator=torch.Generator().manual_seed(seed))

    def takes(self, size: Size) -> str:
        """An empty text if the model takes images of `size`, or else the first line of its error."""
        return _refusal(lambda: self.output(self.at(size), self.images(size)))

    def native(self) -> Size:
        """The image size (h, w) that the model was built for."""
        config = getattr(self.model, "config", None)
        if getattr(config, "image_size", None):
            return tuple(to_2tuple(config.image_size))
        built_for = getattr(self.model, "image_size", None)  # torchvision's ViT
        return tuple(to_2tuple(built_for)) if isinstance(built_for, int) else trained_size(self.model)

    def unit(self) -> int:
        """Pixels by which an image must be divisible: the side of a patch, of 16 pixels where patches are smaller than 8."""
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        side = first.stride[0] if first is not None and first.kernel_size == first.stride else 0
        return side if side >= 8 else 16


def load(name: str, **options: Any) -> nn.Module:
    """Build a model from a name of timm or a Python import path.

    Raises ValueError for a name that is neither, TypeError for options that the model does not take.

    Args:
        name: of timm.create_model, which gives random weights, or "package.module:thing" (also with a dot), where thing is a
            module or a function or class that returns one.
        options: arguments of timm.create_model, or of the function.
    """
    if ":" not in name or name.startswith("hf"):
        import timm

        import vitrel.models  # noqa: F401  registers vitrel's names with timm

        if timm.is_model(name.partition(".")[0]) or "." not in name:
            from vitrel.models.create import check_model_name

            check_model_name(name, allow_sources=True)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                return timm.create_model(name, **options)
    module, _, thing = name.replace(":", ".").rpartition(".")
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), thing)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"{name!r} is neither a name of timm.list_models() nor an import path, as package.module:function: {error}"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = found if isinstance(found, nn.Module) else found(**options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} gives {type(model).__name__}, not a torch.nn.Module: name a module, or what returns one")
    return model


def _refusal(run: Callable[[], Any]) -> str:
    try:
        run()
    except REFUSALS as error:
        return one_line(error)
    return ""


def one_line(error: BaseException) -> str:
    """The first line of an error, at most 200 characters."""
    return reason(error)[:200]


def sizes_of(subject: Subject) -> tuple[Size, Size]:
    """Two image sizes with the same number of tokens, height and width exchanged: 6 x 8 and 8 x 6 patches (or units).

    With six patches the largest rotation between neighbors of a normalized encoding is below pi (DINOv3: 4 pi / 6), so that it
    has one meaning. ValueError if the model takes no such images, with its reason.
    """
    unit, refusal = subject.unit(), ""
    for side in dict.fromkeys((unit, *_UNITS)):
        first = (6 * side, 8 * side)
        error = subject.takes(first)
        if not error and not subject.takes(first[::-1]):
            return first, first[::-1]
        refusal = refusal or error or subject.takes(first[::-1])
    raise ValueError(f"the model takes no image of {format_size((6 * unit, 8 * unit))} pixels: {refusal}")
