"""The model under examination: a copy of it, run at an image size."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
from vitrel.conformance.vectors import pseudo_random
from vitrel.inspect.any_model import REFUSALS as OF_SIZES
from vitrel.inspect.any_model import channels_of, examinable, model_at_size, model_name, on_images, reason
from vitrel.inspect.recorder import first_tensor

REFUSALS = (*OF_SIZES, KeyError)
_UNITS = (16, 14, 8, 32)  # pixels tried as the side of a patch where the model does not show it


class Subject:
    """A copy of a model in float32 on the CPU, in evaluation mode; arguments and errors as of `examinable`."""

    def __init__(self, model: str | nn.Module, **options: Any):
        self.name = model if isinstance(model, str) else model_name(getattr(model, "_orig_mod", model))
        self.model = copy.deepcopy(examinable(model, **options)).cpu().float().eval().requires_grad_(False)
        self._refusals: dict[Size, str] = {}

    def at(self, size: Size) -> nn.Module:
        """A copy of the model for images of `size`, at others than the native one with masks and tables made anew."""
        return model_at_size(copy.deepcopy(self.model), size)

    def takes_as_it_is(self, size: Size) -> bool:
        """Whether the model takes `size` without being changed for it."""
        return model_at_size(self.model, size) is self.model and not self.refusal(size)

    def output(self, model: nn.Module, images: Tensor) -> Tensor:
        """The first tensor that `model`, a copy of the subject's, returns for images, without gradients."""
        with torch.no_grad():
            return first_tensor(on_images(model)(images))

    def images(self, size: Size, batch: int = 1, seed: int = 0) -> Tensor:
        """Images [batch, channels, height, width] that are no tensors of a generator of torch: `pseudo_random`."""
        return pseudo_random((batch, channels_of(self.model), *size), seed)

    def refusal(self, size: Size) -> str:
        """An empty text if the model takes images of `size`, or else the first line of its error."""
        if size not in self._refusals:
            self._refusals[size] = _error_of(lambda: self.output(self.at(size), self.images(size)))
        return self._refusals[size]

    def unit(self) -> int:
        """Pixels by which an image must be divisible: the side of a patch, of 16 pixels where patches are smaller than 8."""
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        side = first.stride[0] if first is not None and first.kernel_size == first.stride else 0
        return side if side >= 8 else 16


def _error_of(run: Callable[[], Any]) -> str:
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
        error = subject.refusal(first) or subject.refusal(first[::-1])
        if not error:
            return first, first[::-1]
        refusal = refusal or error
    raise ValueError(f"the model takes no image of {format_size((6 * unit, 8 * unit))} pixels: {refusal}")
