"""Training augmentation: what is drawn, and from which random state.

The random state of every view of an image is drawn from (seed, epoch, index, repeat) alone, whichever library draws: batches
are the same for any number of workers, and a resumed run augments as an uninterrupted one would have.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms.functional import center_crop, resize
from torchvision.transforms.v2 import RandomCrop

from vitrel.data.augmentation import Augmentation
from vitrel.data.folder import INTERPOLATIONS, Prepare, normalise
from vitrel.extras import optional_import


class Augmenter:
    """Draws one view of an image and normalises it.

    Args:
        settings: what is drawn.
        size: (H, W) of the result, pixels.
        mean, std: per channel, in units of the full range (0 to 1).
        seed: of the run.
        crop_pct: share of the resized image that the "center" crop keeps, as in evaluation.
    """

    def __init__(
        self,
        settings: Augmentation,
        size: tuple[int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        seed: int = 0,
        crop_pct: float = 1.0,
    ) -> None:
        self.settings, self.mean, self.std, self.seed = settings, mean, std, seed
        self.size = (size[0], size[1])
        self.crop_pct = crop_pct if settings.crop == "center" else 1.0
        erase = {"mode": settings.erase_mode, "max_count": settings.erase_count, "device": "cpu"}
        self.erase = RandomErasing(settings.erase, **erase) if settings.erase else None
        self.pipelines = {self.size: _pipeline(settings, self.size, mean)}

    def __call__(self, image: Tensor, epoch: int, index: int, repeat: int = 0, size: tuple[int, int] | None = None) -> Tensor:
        """uint8 [3, h, w] to normalised float32 [3, H, W]; `size` (H, W) takes the place of the own size, for this image only.

        `repeat` numbers the views of one image within an epoch.
        """
        size = self.size if size is None else (size[0], size[1])
        if size not in self.pipelines:
            self.pipelines[size] = _pipeline(self.settings, size, self.mean)
        # the sequence pads with zeros: view 0 draws as (seed, epoch, index) alone
        state = np.random.SeedSequence((self.seed, epoch, index, repeat))
        with _seeded(state):
            if self.settings.crop != "random_resized":
                image = self._covered(image, size)
            image = normalise(self.pipelines[size](image, state), self.mean, self.std)
            return image if self.erase is None else self.erase(image)

    def _covered(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        """The "simple" and the "center" crop, the same in every library."""
        interpolation = self.settings.interpolation
        if interpolation == "random":
            interpolation = random.choice(list(INTERPOLATIONS))
        view = Prepare(size, self.mean, self.std, self.crop_pct, interpolation)
        image = resize(image, view.resized(*image.shape[-2:]), INTERPOLATIONS[interpolation], antialias=True)
        if self.settings.crop == "center":
            return center_crop(image, list(size))
        return RandomCrop(size, padding=4, padding_mode="reflect")(image)


@contextmanager
def _seeded(state: np.random.SeedSequence) -> Iterator[None]:
    """The global generators of python and torch draw from `state` inside, and go on after as if nothing had been drawn."""
    before = random.getstate(), torch.get_rng_state()
    seeds = state.generate_state(3).tolist()  # the first is albumentations' own
    random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would also set the accelerators' generators
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])


def _pipeline(settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]):
    # imported here because evaluation and the built-in data need neither albumentations nor OpenCV
    if settings.library == "albumentations":
        with optional_import():
            from vitrel.data.aug_albumentations import AlbumentationsPipeline
        return AlbumentationsPipeline(settings, size, mean)
    if settings.library == "timm":
        from vitrel.data.aug_timm import TimmPipeline

        return TimmPipeline(settings, size, mean)
    from vitrel.data.aug_torchvision import TorchvisionPipeline

    return TorchvisionPipeline(settings, size, mean)
