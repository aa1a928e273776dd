"""The model under examination: a copy of it, which is run at image sizes."""

import copy
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
    """A copy of a model, a module or name, in float32 on the CPU, in evaluation mode and without gradients.

    Arguments and errors are those of `vitrel.inspect.any_model.examinable`.
    """

    def __init__(self, model: str | nn.Module, **options: Any):
        self.name = model if isinstance(model, str) else model_name(getattr(model, "_orig_mod", model))
        self.model = copy.deepcopy(examinable(model, **options)).cpu().float().eval().requires_grad_(False)
        self._refusals: dict[Size, str] = {}

    def at(self, size: Size) -> nn.Module:
        """Return a copy of the model, set to images of `size` (h, w) pixels where it has to be; ValueError if that fails."""
        return model_at_size(copy.deepcopy(self.model), size)

    def takes_as_it_is(self, size: Size) -> bool:
        """Return whether the model runs on images of `size` (h, w) pixels without being changed for it."""
        return model_at_size(self.model, size) is self.model and not self.refusal(size)

    def output(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the first tensor, or the logits, that `model` (a copy of the subject's) gives for images; no gradients."""
        with torch.no_grad():
            return first_tensor(on_images(model)(images))

    def images(self, size: Size, batch: int = 1, seed: int = 0) -> Tensor:
        """Return images [batch, channels, height, width] of `pseudo_random`: -1 to 1, a function of shape and `seed`."""
        return pseudo_random((batch, channels_of(self.model), *size), seed)

    def refusal(self, size: Size) -> str:
        """Return the first line of the model's error at images of `size` (h, w) pixels, "" if it runs; a size is run once."""
        if size not in self._refusals:
            try:
                self.output(self.at(size), self.images(size))
                self._refusals[size] = ""
            except REFUSALS as error:
                self._refusals[size] = one_line(error)
        return self._refusals[size]

    def unit(self) -> int:
        """Return the number of pixels that must divide an image's sides: that of a patch, 16 if below 8 or not recognized.

        It is recognized in the first convolution, if its stride is its kernel.
        """
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        side = first.stride[0] if first is not None and first.kernel_size == first.stride else 0
        return side if side >= 8 else 16


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message (or its class's name), at most 200 characters, without the final period."""
    return reason(error)[:200]


def sizes_of(subject: Subject) -> tuple[Size, Size]:
    """Return two image sizes in pixels with height and width exchanged: 6 x 8 and 8 x 6 patches.

    If the model refuses them, patches of _UNITS are tried. With six patches the largest rotation between neighbors of a
    normalized encoding is below pi (DINOv3: 4 pi / 6), so that it has one meaning. ValueError, with the model's reason, if it
    takes no such images.
    """
    unit, refusal = subject.unit(), ""
    for side in dict.fromkeys((unit, *_UNITS)):
        first = (6 * side, 8 * side)
        error = subject.refusal(first) or subject.refusal(first[::-1])
        if not error:
            return first, first[::-1]
        refusal = refusal or error
    raise ValueError(f"the model takes no image of {format_size((6 * unit, 8 * unit))} pixels: {refusal}")
