"""Augmentation by torchvision (transforms v2) on uint8 tensors.

Policies take torchvision's operations and ranges, at the same share of the full range as timm's magnitudes. What differs:
RandAugment has an identity and neither Invert nor SolarizeAdd, posterizing keeps at least 4 bits (timm 0), the image moves by
up to 150/331 of its side (timm 0.45); geometric operations are bilinear whatever the interpolation.
"""

import random

import numpy as np
from torch import Tensor, nn
from torchvision.transforms import v2

from vitrel.data.augmentation import Augmentation
from vitrel.data.folder import INTERPOLATIONS
from vitrel.data.rand_augment import Policy, parse_policy

BLUR = {"kernel_size": 13, "sigma": (0.1, 2.0)}  # three deviations to each side
BINS = 101  # of the magnitudes 0 to 10


class TorchvisionPipeline:
    """uint8 [3, h, w] to uint8 [3, H, W]: random-resized crop, flips, policy, colour jitter, grey, blur.

    Args:
        settings: what is drawn.
        size: (H, W), pixels.
        mean: fill colour, in units of the full range (0 to 1).
    """

    def __init__(self, settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]) -> None:
        self.steps = []
        if settings.crop == "random_resized":
            how = {"scale": settings.scale, "ratio": settings.crop_ratio(size), "antialias": True}
            names = ("bilinear", "bicubic") if settings.interpolation == "random" else (settings.interpolation,)
            crops = [v2.RandomResizedCrop(size, interpolation=INTERPOLATIONS[name], **how) for name in names]
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
        """Draws from python's and torch's global generators."""
        for step in self.steps:
            image = step(image)
        return image


def _policy_step(policy: Policy, fill: list[int]) -> nn.Module:
    how = {"interpolation": INTERPOLATIONS["bilinear"], "fill": fill}
    if policy.kind == "rand":
        return _RandLayers(policy, **how)
    if policy.kind == "augmix":
        return v2.AugMix(policy.magnitude, policy.width, policy.depth, policy.alpha, **how)
    if policy.kind == "trivial":
        return v2.TrivialAugmentWide(**how)
    return v2.RandomChoice([v2.RandomGrayscale(1.0), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(**BLUR)])


class _RandLayers(nn.Module):
    """torchvision's RandAugment with a probability and a drawn magnitude for each operation, which it has not by itself."""

    def __init__(self, policy: Policy, **how) -> None:
        super().__init__()
        self.policy = policy
        self.operation = v2.RandAugment(1, num_magnitude_bins=BINS, **how)

    def forward(self, image: Tensor) -> Tensor:
        for _ in range(self.policy.layers):
            if random.random() < self.policy.prob:
                self.operation.magnitude = round(self.policy.draw(random) * (BINS - 1) / 10)
                image = self.operation(image)
        return image
