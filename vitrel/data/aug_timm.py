"""Augmentation with timm's transforms, which work on PIL images."""

import numpy as np
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor

from vitrel.data.augmentation import Augmentation


class TimmPipeline:
    """Augments uint8 [3, h, w] to uint8 [3, H, W]: `timm.data.create_transform` for training, without normalisation.

    The other crops and erasing are left to `Augmenter`: with `crop` "simple" or "center", images must have the size (H, W).

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
