"""Training augmentation of one image, with a reproducible random state.

The random state of every view of an image depends on (seed, epoch, index, repeat) only, with every library. Therefore batches
are the same for any number of workers, and a resumed run augments images as an uninterrupted run does.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor, nn
from torchvision.transforms import v2

from vitrel.common.extras import optional_import
from vitrel.data.augmentation import Augmentation, Policy, parse_policy
from vitrel.data.prepare import INTERPOLATIONS, Prepare, normalise

BLUR = {"kernel_size": 13, "sigma": (0.1, 2.0)}  # the kernel covers three standard deviations on each side
BINS = 101  # number of magnitudes from 0 to 10, with torchvision


class Augmenter:
    """Returns a randomly augmented, normalised view of an image.

    Args:
        settings: the augmentation.
        size: (H, W) of the result, pixels.
        mean, std: per-channel normalisation of values from 0 to 1.
        seed: seed of the run.
        crop_pct, crop_mode: of the "center" crop, as in `Prepare`.
    """

    def __init__(
        self,
        settings: Augmentation,
        size: tuple[int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        seed: int = 0,
        crop_pct: float = 1.0,
        crop_mode: str = "center",
    ) -> None:
        self.settings, self.mean, self.std, self.seed = settings, mean, std, seed
        self.size = (size[0], size[1])
        self.crop_pct, self.crop_mode = (crop_pct, crop_mode) if settings.crop == "center" else (1.0, "center")
        erase = {"mode": settings.erase_mode, "max_count": settings.erase_count, "device": "cpu"}
        self.erase = RandomErasing(settings.erase, **erase) if settings.erase else None
        self.pipelines = {self.size: _pipeline(settings, self.size, mean)}

    def __call__(self, image: Tensor, epoch: int, index: int, repeat: int = 0, size: tuple[int, int] | None = None) -> Tensor:
        """Return the augmented image, normalised float32 [3, H, W].

        Args:
            image: uint8 [3, h, w].
            epoch, index: epoch of training, and index of the image, which seed the random numbers.
            repeat: number of this view of the image within the epoch.
            size: (H, W) of the result; by default the augmenter's size.
        """
        size = self.size if size is None else (size[0], size[1])
        if size not in self.pipelines:
            self.pipelines[size] = _pipeline(self.settings, size, self.mean)
        # SeedSequence pads with zeros, so view 0 has the random numbers of (seed, epoch, index)
        state = np.random.SeedSequence((self.seed, epoch, index, repeat))
        with _seeded(state):
            if self.settings.crop != "random_resized":
                image = self._resized_and_cropped(image, size)
            image = normalise(self.pipelines[size](image, state), self.mean, self.std)
            return image if self.erase is None else self.erase(image)

    def _resized_and_cropped(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        """Image uint8 [3, H, W]: `image` resized and cropped to `size` by the crop "simple" or "center".

        It is the same with every library; it uses Python's and torch's global generators.
        """
        interpolation = self.settings.interpolation
        if interpolation == "random":
            interpolation = random.choice(list(INTERPOLATIONS))
        view = Prepare(size, self.mean, self.std, self.crop_pct, interpolation, crop_mode=self.crop_mode)
        if self.settings.crop == "center":
            return view.cropped(image)
        return v2.RandomCrop(size, padding=4, padding_mode="reflect")(view.resized(image))


@contextmanager
def _seeded(state: np.random.SeedSequence) -> Iterator[None]:
    """Seed the global generators of Python and torch (CPU) from `state` within the block, and restore them after it."""
    before = random.getstate(), torch.get_rng_state()
    seeds = state.generate_state(3).tolist()  # the first is used by AlbumentationsPipeline
    random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would also set the accelerators' generators
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])


def _pipeline(settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]):
    if settings.library == "albumentations":
        with optional_import():  # imported here because evaluation and `shapes` need neither albumentations nor OpenCV
            from vitrel.data.aug_albumentations import AlbumentationsPipeline
        return AlbumentationsPipeline(settings, size, mean)
    return (TimmPipeline if settings.library == "timm" else TorchvisionPipeline)(settings, size, mean)


class TimmPipeline:
    """Augments uint8 [3, h, w] to uint8 [3, H, W] with timm's transforms for training, which work on PIL images.

    The steps of every library's pipeline are random-resized crop, flips, policy, colour jitter, grey and blur. The other crops
    and erasing are left to `Augmenter`: with `crop` "simple" or "center", images must have the size (H, W).

    Args:
        settings: the augmentation.
        size: (H, W) of the result, pixels.
        mean: colour of pixels that the policy's geometric operations leave without content, 0 to 1 per channel.
    """

    def __init__(self, settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]) -> None:
        self.steps = transforms_imagenet_train(
            size,
            scale=settings.scale,
            ratio=settings.crop_ratio(size),
            hflip=0.5 * settings.flip,
            vflip=0.5 * settings.vflip,
            color_jitter=settings.jitter_ranges if any(settings.jitter_ranges) else None,
            color_jitter_prob=settings.jitter_prob,
            force_color_jitter=True,
            grayscale_prob=settings.gray_prob,
            gaussian_blur_prob=settings.blur_prob,
            auto_augment=settings.policy,
            interpolation=settings.interpolation,
            mean=mean,
            normalize=False,
        )
        if settings.crop != "random_resized":
            del self.steps.transforms[0]
        for step in self.steps.transforms:
            for operation in getattr(step, "ops", ()):
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = _posterize

    def __call__(self, image: Tensor, state: np.random.SeedSequence) -> Tensor:
        """Return the augmented image, with random numbers of Python's, torch's and NumPy's global generators.

        NumPy's generator is seeded from `state`, and restored afterwards; the caller seeds the other two.
        """
        before = np.random.get_state()  # noqa: NPY002 timm uses the global generator
        np.random.seed(int(state.generate_state(4)[3]))  # noqa: NPY002
        try:
            return self.steps(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()))
        finally:
            np.random.set_state(before)  # noqa: NPY002


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    # timm's function keeps 0 bits at magnitude 10, an error in newer Pillow that would end a run after some thousand images
    bits = min(8, max(0, bits))
    return image.point([level & (256 - (1 << (8 - bits))) for level in range(256)] * 3)


class TorchvisionPipeline:
    """The pipeline of `TimmPipeline` with torchvision (transforms v2) on uint8 tensors.

    Policies use torchvision's operations and ranges, at the same share of the full range as timm's magnitudes. Differences from
    timm: RandAugment has an identity operation and neither Invert nor SolarizeAdd; Posterize keeps at least 4 bits (timm: 0);
    translations go up to 150/331 of the side (timm: 0.45); geometric operations are always bilinear.
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
