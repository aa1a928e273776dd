"""Small images for tests of data."""

import os

import numpy as np
import torch
from PIL import Image

from vitrel.data.prepare import as_tensor


def picture(h, w, seed=0):
    """Return a random image with smooth and sharp content, uint8 [h, w, 3]."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (h // 8 + 2, w // 8 + 2, 3), dtype=np.uint8)).resize((w, h), Image.BICUBIC)
    return np.clip(np.asarray(coarse, dtype=int) + rng.integers(-30, 30, (h, w, 3)), 0, 255).astype(np.uint8)


def write_classes(folder, classes, files, size=(40, 50)):
    """Write random images of size (h, w), each different, as folder/<class>/<file>, in the formats of the suffixes."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for file in files:
            rng = np.random.default_rng([*os.fsencode(f"{folder.name}/{name}/{file}")])
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name / file)


def tensor(array):
    """[h, w, 3] -> [3, h, w]."""
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def identity(image):
    return as_tensor(image)
