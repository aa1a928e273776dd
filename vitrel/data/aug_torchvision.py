"""Augmentation with torchvision (transforms v2) on uint8 tensors.

Policies use torchvision's operations and ranges, at the same share of the full range as timm's magnitudes. Differences from
timm: RandAugment has an identity operation and neither Invert nor SolarizeAdd; Posterize keeps at least 4 bits (timm: 0);
translations go up to 150/331 of the side (timm: 0.45); geometric operations are always bilinear.
"""

import random

import numpy as np
from torch import Tensor, nn
from torchvision.transforms import v2

from vitrel.data.augmentation import Augmentation
from vitrel.data.folder import INTERPOLATIONS
from vitrel.data.rand_augment import Policy, parse_policy

BLUR = {"kernel_size": 13, "sigma": (0.1, 2.0)}  # the kernel covers three standard deviations on each side
BINS = 101  # number of magnitudes from 0 to 10


class TorchvisionPipeline:
    """Augments uint8 [3, h, w] to uint8 [3, H, W]: random-resized crop, flips, policy, colour jitter, grey, blur.

    The other crops and erasing are left to `Augmenter`: with `crop` "simple" or "center", images must have the size (H, W).

    Args:
        settings: the augmentation.
        size: (H, W) of the result, pixels.
        mean: colour of pixels that the policy's geometric operations leave without content, 0 to 1 per channel.
    """

    def __init__(self, settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]) -> None:
        self.steps = []
        if settings.crop == "random_resized":
            options = {"scale": settings.scale, "ratio": settings.crop_ratio(size), "antialias": True}
            names = ("bilinear", "bicubic") if settings.interpolation == "random" else (settings.interpolation,)
            crops = [v2.RandomResizedCrop(size, interpolation=INTERPOLATIONS[name], **options) for name in names]
            self.steps.append(v2.RandomChoice(crops))
        if settings.flip:
            self.steps.append(v2.RandomHorizontalFlip(0.5))
        if settings.vflip:
            self.steps.append(v2.RandomVerticalFlip(0.5))
        if settings.policy is not None:
            self.steps.append(_policy_step(parse_policy(settings.policy), [round(255 * m) for m in mean]))
        if any(settings.jitter_ranges):
            self.steps.append(v2.RandomApply([v2.ColorJitter(*settings.jitter_ranges)], settings.jitter_prob))
        if settings.gray_prob:
            self.steps.append(v2.RandomGrayscale(settings.gray_prob))
        if settings.blur_prob:
            self.steps.append(v2.RandomApply([v2.GaussianBlur(**BLUR)], settings.blur_prob))

    def __call__(self, image: Tensor, state: np.random.SeedSequence) -> Tensor:
        """Return the augmented image, with random numbers of Python's and torch's global generators.

        The caller seeds both; `state` is not used.
        """
        for step in self.steps:
            image = step(image)
        return image


def _policy_step(policy: Policy, fill: list[int]) -> nn.Module:
    options = {"interpolation": INTERPOLATIONS["bilinear"], "fill": fill}
    if policy.kind == "rand":
        return _RandLayers(policy, **options)
    if policy.kind == "augmix":
        return v2.AugMix(policy.magnitude, policy.width, policy.depth, policy.alpha, **options)
    if policy.kind == "trivial":
        return v2.TrivialAugmentWide(**options)
    return v2.RandomChoice([v2.RandomGrayscale(1.0), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(**BLUR)])


class _RandLayers(nn.Module):
    """torchvision's RandAugment, extended by a probability and a random magnitude for each operation."""

    def __init__(self, policy: Policy, **options) -> None:
        super().__init__()
        self.policy = policy
        self.operation = v2.RandAugment(1, num_magnitude_bins=BINS, **options)

    def forward(self, image: Tensor) -> Tensor:
        for _ in range(self.policy.layers):
            if random.random() < self.policy.prob:
                self.operation.magnitude = round(self.policy.draw(random) * (BINS - 1) / 10)
                image = self.operation(image)
        return image
