"""Training augmentation of one image with albumentations, and a reproducible random state.

The random state of every view of an image depends on (seed, epoch, index, repeat) only. Therefore batches are the same for any
number of workers, and a resumed run augments images as an uninterrupted run does.
"""

import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms import v2

from vitrel.common.extras import optional_import
from vitrel.data.augmentation import Augmentation
from vitrel.data.prepare import INTERPOLATIONS, Picture, Prepare, as_array
from vitrel.data.readers.decode import ran_out

LIBRARIES = ("albumentations.", "timm.data.", "torchvision.transforms.", "vitrel.data.aug_albumentations")


class AugmentationError(ValueError):
    """An operation of the augmentation failed; the text names the operation and the seed."""


class Augmenter:
    """Returns a randomly augmented view of an image, or of an image and its mask, without random erasing.

    Args:
        settings: the augmentation.
        size: (H, W) of the result, pixels.
        mean: color of what a view shows beyond its image, 0 to 1 per channel.
        seed: seed of the run.
        crop_pct, crop_mode: of the "center" crop, as in `Prepare`.
    """

    def __init__(
        self,
        settings: Augmentation,
        size: tuple[int, int],
        mean: tuple[float, ...],
        seed: int = 0,
        crop_pct: float = 1.0,
        crop_mode: str = "center",
    ) -> None:
        self.settings = replace(settings, crop=settings.crop or "random_resized")
        self.mean, self.seed, self.size = mean, seed, (size[0], size[1])
        self.crop_pct, self.crop_mode = (crop_pct, crop_mode) if settings.crop == "center" else (1.0, "center")
        # the generators of the libraries; crop, flips, jitter, gray and blur have their own
        self.seeds = settings.policy is not None or settings.crop in ("simple", "center")
        with optional_import():  # imported here because evaluation and drawn scenes need neither albumentations nor OpenCV
            from vitrel.data.aug_albumentations import AlbumentationsPipeline
        self.pipelines: dict[tuple[int, int], AlbumentationsPipeline] = {}
        self._pipeline = AlbumentationsPipeline

    def __call__(self, image: Picture, epoch: int, index: int, repeat: int = 0, size: tuple[int, int] | None = None) -> Tensor:
        """Return the augmented image, uint8 [3, H, W].

        Args:
            image: a Pillow image of mode RGB, or uint8 [3, h, w].
            epoch, index: epoch of training, and index of the image, which seed the random numbers.
            repeat: number of this view of the image within the epoch.
            size: (H, W) of the result; by default the augmenter's size.
        """
        return self.joint(image, None, epoch, index, repeat, size)[0]

    def joint(
        self,
        image: Picture,
        mask: np.ndarray | None,
        epoch: int,
        index: int,
        repeat: int = 0,
        size: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the augmented image, uint8 [3, H, W], and its mask of classes, uint8 [H, W] (None without).

        Args:
            image, epoch, index, repeat, size: as in the call.
            mask: uint8 [h, w], taken at the same places as the image by nearest pixel; `IGNORED` where the view leaves it.

        Raises:
            AugmentationError: an operation failed.
            MemoryError: memory ran out.
        """
        size = self.size if size is None else (size[0], size[1])
        if size not in self.pipelines:
            self.pipelines[size] = self._pipeline(self.settings, size, self.mean)
        # SeedSequence pads with zeros, so view 0 has the random numbers of (seed, epoch, index)
        state = np.random.SeedSequence((self.seed, epoch, index, repeat))
        try:
            with seeded(state) if self.seeds else nullcontext():
                if self.settings.crop in ("simple", "center"):
                    image = self._resized_and_cropped(image, size)
                pixels, mask = self.pipelines[size](as_array(image), state, mask)
        except Exception as error:
            if ran_out(error):
                raise MemoryError(f"memory ran out in the augmentation: {error}") from error
            place = f"seed {self.seed}, epoch {epoch}, image number {index}, view {repeat}"
            raise AugmentationError(f"{_operation(error)} failed with the random numbers of {place}: {error}") from error
        return torch.from_numpy(pixels).permute(2, 0, 1), None if mask is None else torch.from_numpy(mask)

    def _resized_and_cropped(self, image: Picture, size: tuple[int, int]) -> Image.Image:
        """The image resized and cropped to `size` by the crop "simple" or "center".

        It uses Python's and torch's global generators.
        """
        interpolation = self.settings.interpolation
        if interpolation == "random":
            interpolation = random.choice(list(INTERPOLATIONS))
        view = Prepare(size, self.mean, None, self.crop_pct, interpolation, crop_mode=self.crop_mode)
        if self.settings.crop == "center":
            return view.cropped(image)
        return v2.RandomCrop(size, padding=4, padding_mode="reflect")(view.resized(image))


def _operation(error: Exception) -> str:
    """Return the name, and magnitude if it has one, of the library's operation in which an error was raised."""
    operation = "augmentation"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_locals
        owner = names.get("self")
        if f"{type(owner).__module__}.".startswith(LIBRARIES):
            # `transform_id` and `magnitude` in the frames of torchvision's TrivialAugment and timm's AugmentOp
            operation = str(names.get("transform_id") or getattr(owner, "name", type(owner).__name__))
            operation += f" of magnitude {names['magnitude']:.6g}" if "magnitude" in names else ""
    return operation


@contextmanager
def seeded(state: np.random.SeedSequence) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU) from `state` within the block, and restore them after it.

    In a loader process, which uses them for nothing else, they are not restored: that takes as long as to decode a small image.
    """
    alone = get_worker_info() is not None
    before = None if alone else (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
    seeds = state.generate_state(4).tolist()  # the first is used by albumentations
    random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would also set the accelerators' generators
    np.random.seed(seeds[3])  # noqa: NPY002  # timm's policies use it
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])
