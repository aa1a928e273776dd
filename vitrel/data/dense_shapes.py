"""`shapes-dense`: drawn scenes with a class for every pixel, of many pairs of a cool and a warm object on a gray field.

A pixel is ground, cool, or warm with the cool partner to the left, to the right, above or below. Lengths are in units; a unit
is one pixel at 64 px. The image is a window of a field without end: a larger canvas shows more pairs of the same size, and a
pair can be cut by the border. A warm object whose partner has its center outside the image has no class (`IGNORED`).

The direction of a partner can be found only from the position of patches relative to each other: objects of a pair are at
least 9 units apart, those of other pairs more than 28 (along an axis), which is farther than partners are, so the partner is
the only cool object near a warm one. Colors, kinds and radii are drawn independently of the direction, and the field has no
place of its own. Only the rule for cut pairs tells something: from the place of a warm object alone, to 4 px, the best guess
is right for 37 % at 64 px, 32 % at 96 and 128 px and 29 % at 192 px, where chance is 25 %.

Two ways to a larger image: "canvas" keeps the objects' size and shows more of the field; "scale" stretches the same field.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrel.data.readers.decode import IGNORED
from vitrel.data.shapes import FIELD, GAP, OBJECT_RADIUS, PATCH, Drawn, hsv, uniform

CLASSES = ("ground", "cool", "partner left", "partner right", "partner above", "partner below")  # the last four are warm
CLEARANCE = 28.0  # of the objects of different pairs along the longer axis; partners are at most 27 apart
MARGIN = 40.0  # of the field around the image in which pairs are placed, so that the border of the image is not theirs
TRIES = 6  # candidates for 64x64 units; about one in five finds room
_AXIS = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]], np.float64)  # (y, x) from warm to cool, by direction
_DRAWS = 15  # random numbers of a pair


class DenseScene(NamedTuple):
    """The objects of B scenes, those that the image shows at least in part; rows are filled up to M by objects of radius 0.

    center [B, M, 2] (y, x) and radius [B, M] are in units (of one pixel at 64 px) from the image's upper left corner; kind and
    color are as in `vitrel.data.shapes.Scene`; value [B, M] is the class of the object's pixels, IGNORED for a warm object
    whose cool partner has its center outside the image. background [B] is the gray of the ground, 0 to 1.
    """

    background: np.ndarray
    center: np.ndarray
    radius: np.ndarray
    kind: np.ndarray
    color: np.ndarray
    value: np.ndarray


class DenseShapes(Drawn):
    """The data set of n synthetic scenes, each a function of (seed, index) and the size; items are (image, mask).

    The image is normalized float32 [3, H, W], the mask uint8 [H, W] of indices into CLASSES, or 255 (IGNORED).

    Args:
        n: number of images.
        size: side or (H, W) of the images, pixels.
        seed: seed of the scenes; different seeds give different scenes.
        protocol: "canvas" keeps the objects' size in pixels at `base`, so a larger image shows more of the scene; "scale"
            stretches the scene, so that the shorter side is 64 units at every size.
        base: side or (H, W) in pixels for `canvas`; its shorter side is 64 units.
        mean, std: per-channel normalization of values from 0 to 1.

    Raises:
        ValueError: a value out of range, or an unknown protocol.
    """

    kind = "shapes-dense"

    def __init__(
        self,
        n: int,
        size: int | tuple[int, int] = 64,
        seed: int = 0,
        protocol: str = "canvas",
        base: int | tuple[int, int] = 64,
        mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        std: tuple[float, ...] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__(n, size, seed, protocol, base, mean, std)
        self.classes = list(CLASSES)
        self.field = np.array(self.size) / self.pixels
        self.tries = int(np.ceil(TRIES * (self.field + 2 * MARGIN).prod() / FIELD**2))

    def scenes(self, indices: Sequence[int]) -> DenseScene:
        """Return the scenes of the images with these indices, as a batch; IndexError for an index out of range."""
        u = np.stack([uniform(self.seed, self._check(i), 1 + _DRAWS * self.tries) for i in indices])
        v = u[:, 1:].reshape(len(u), self.tries, _DRAWS)  # [B, T, draws]
        direction = (4 * v[..., 0]).astype(np.int64)
        radius = OBJECT_RADIUS[0] + (OBJECT_RADIUS[1] - OBJECT_RADIUS[0]) * v[..., 1:3]
        along, across = radius.sum(-1) + GAP + PATCH * v[..., 3], PATCH * (v[..., 4] - 0.5)
        axis = _AXIS[direction]
        offset = along[..., None] * axis + across[..., None] * np.abs(axis[..., ::-1])
        middle = (self.field + 2 * MARGIN) * v[..., 5:7] - MARGIN
        center = np.stack([middle + offset / 2, middle - offset / 2], 2)  # [B, T, cool and warm, 2]
        inside = ((center >= 0) & (center <= self.field)).all(-1)
        seen = ((center > -radius[..., None] - 0.5) & (center < self.field + radius[..., None] + 0.5)).all(-1)
        seen &= _with_room(center)[..., None]
        value = np.stack([np.ones_like(direction), np.where(inside[..., 0], 2 + direction, IGNORED)], 2)
        hue = 1.2 * (v[..., 7:9] - 0.5) + np.array([3.5, 0.0])
        color = hsv(hue, 0.7 + 0.3 * v[..., 9:11], 0.7 + 0.3 * v[..., 11:13])
        kind = (3 * v[..., 13:15]).astype(np.int64)
        first = np.argsort(~seen.reshape(len(u), -1), axis=1, kind="stable")[:, : max(1, seen.sum((1, 2)).max())]

        def shown(values: np.ndarray) -> np.ndarray:
            flat = values.reshape(len(u), 2 * self.tries, *values.shape[3:])
            return np.take_along_axis(flat, first.reshape(*first.shape, *[1] * (flat.ndim - 2)), 1)

        objects = shown(center), shown(np.where(seen, radius, 0.0)), shown(kind), shown(color), shown(value)
        return DenseScene(0.3 + 0.4 * u[:, 0], *objects)

    def _items(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        scenes = self.scenes(indices)
        images, masks = self._ground(scenes.background), np.zeros((len(indices), *self.size), np.uint8)
        center, radius = scenes.center * self.pixels, scenes.radius * self.pixels
        for m, window, cover in self._draw(images, center, radius, scenes.kind, scenes.color):
            masks[window] = np.where(cover > 0.5, scenes.value[:, m, None, None], masks[window])
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        return list(zip(torch.from_numpy(images).unbind(), torch.from_numpy(masks).unbind(), strict=True))


def _with_room(center: np.ndarray) -> np.ndarray:
    """Return which of T candidate pairs are placed, bool [B, T].

    In order, a pair is placed if its objects are farther than CLEARANCE, along y or x, from those of all pairs placed before.
    `center` [B, T, 2, 2] holds the centers (y, x) of the two objects of every pair, in units (pixels at 64 px).
    """
    y, x = center[..., 0], center[..., 1]  # [B, T, 2]
    near = np.zeros((*center.shape[:2], center.shape[1]), bool)  # [B, T, T]
    for i in range(2):
        for j in range(2):
            beside, above = (np.abs(part[:, :, None, i] - part[:, None, :, j]) <= CLEARANCE for part in (x, y))
            near |= beside & above
    placed = np.zeros(center.shape[:2], bool)
    for t in range(center.shape[1]):
        placed[:, t] = ~(near[:, t, :t] & placed[:, :t]).any(1)
    return placed
