"""Small images for tests of data."""

import numpy as np
import torch
from PIL import Image


def picture(h, w, seed=0):
    """Return a random image with smooth and sharp content, uint8 [h, w, 3]."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (h // 8 + 2, w // 8 + 2, 3), dtype=np.uint8)).resize((w, h), Image.BICUBIC)
    return np.clip(np.asarray(coarse, dtype=int) + rng.integers(-30, 30, (h, w, 3)), 0, 255).astype(np.uint8)


def tensor(array):
    """[h, w, 3] -> [3, h, w]."""
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def identity(image):
    return image
