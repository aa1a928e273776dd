"""Training augmentation by albumentations: the only file that imports it.

The random state of every image is drawn from (seed, epoch, index) alone: batches are the same for any number of workers, and a
resumed run augments as an uninterrupted one would have.
"""

import os
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrel.data.folder import normalise


@dataclass
class Augmentation:
    """What is drawn for each training image.

    Args:
        scale: range of the crop's share of the image area.
        ratio: range of the crop's width / height, times that of the target size.
        flip: mirror left and right with probability one half; off where labels tell left from right.
        jitter: strength of brightness, contrast and saturation jitter, 0 for none; hue gets a quarter of it.
        erase: probability of filling a rectangle (2-33 % of the area) with the mean colour.
    """

    scale: tuple[float, float] = (0.35, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    jitter: float = 0.3
    erase: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"augment.scale is a range of area shares, 0 < low <= high <= 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"augment.ratio is a range of width / height, 0 < low <= high, not {self.ratio}")
        if not 0 <= self.jitter <= 1 or not 0 <= self.erase <= 1:
            raise ValueError(f"augment.jitter ({self.jitter}) and augment.erase ({self.erase}) lie between 0 and 1")


class Augmenter:
    """Random-resized crop, flip, colour jitter, erasing; then normalisation.

    Args:
        settings: what is drawn.
        size: (H, W) of the result, pixels.
        mean, std: per channel, in units of the full range (0 to 1).
        seed: of the run.
    """

    def __init__(
        self, settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...], std: tuple[float, ...], seed: int = 0
    ) -> None:
        self.mean, self.std, self.seed = mean, std, seed
        self.pipeline = _pipeline(settings, size, mean)

    def __call__(self, image: Tensor, epoch: int, index: int) -> Tensor:
        """uint8 [3, h, w] to normalised float32 [3, H, W]."""
        state = np.random.SeedSequence((self.seed, epoch, index))
        # Not set_random_seed: it gives every transform the same stream, so that e.g. only mirrored images would be erased.
        # One shared pair of generators keeps the draws independent.
        self.pipeline.set_random_state(np.random.default_rng(state), random.Random(int(state.generate_state(1)[0])))
        array = self.pipeline(image=image.permute(1, 2, 0).contiguous().numpy())["image"]  # [H, W, 3]
        return normalise(torch.from_numpy(array).permute(2, 0, 1), self.mean, self.std)


def _pipeline(settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]):
    # albumentations asks the network for its newest version unless told not to before it is imported;
    # imported here because evaluation and the built-in data need neither it nor OpenCV
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    import albumentations as A
    import cv2

    cv2.setNumThreads(0)  # the loader's workers are the parallelism
    aspect = size[1] / size[0]
    steps = [
        A.RandomResizedCrop(
            size=size,
            scale=settings.scale,
            ratio=(settings.ratio[0] * aspect, settings.ratio[1] * aspect),
            interpolation=cv2.INTER_CUBIC,
            area_for_downscale="image",  # cubic alone aliases when it shrinks
        )
    ]
    if settings.flip:
        steps.append(A.HorizontalFlip(p=0.5))
    if settings.jitter:
        span = (1 - settings.jitter, 1 + settings.jitter)
        hue = (-settings.jitter / 4, settings.jitter / 4)
        steps.append(A.ColorJitter(brightness=span, contrast=span, saturation=span, hue=hue, p=1.0))
    if settings.erase:
        steps.append(A.Erasing(fill=tuple(round(255 * m) for m in mean), p=settings.erase))
    return A.Compose(steps)
