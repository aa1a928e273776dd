"""`shapes`: synthetic images whose class is the relative position of two objects.

One warm-colored and one cool-colored object lie on a flat gray background among gray specks; the class is the direction from
the cool object to the warm one. Lengths are in units: the field is 64 units high and wide, and a unit is one pixel at 64 px.

The class can be found only from the position of patches of 8 px relative to each other:

- the objects are at least 9 units apart along the axis of the label, specks as far from both: no patch shows parts of two;
- the gap along the axis and the offset across it are uniform over 8 units, and the pair's center over a multiple of 8, so the
  bag of patches has the same distribution for every class;
- the pair's center has the same distribution for every class, and both objects always lie completely inside the image. The
  position of one object shows the class in part: from the warm one the best guess is right for 70 % of 64-px images.

With `label="place"` the class is the quarter of the field in which the pair's center lies, at least 4 units from the lines
between quarters: the control for absolute position, which a model can learn from the borders of a finite grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrel.data.readers.base import Draw

CLASSES: tuple[str, ...] = ("left", "right", "above", "below")
PLACES: tuple[str, ...] = ("upper left", "upper right", "lower left", "lower right")
FIELD = 64.0
PATCH = 8.0
GAP = 9.0  # a patch, and half a pixel of antialiasing at either object
OBJECT_RADIUS = (4.0, 5.0)
SPECK_RADIUS = (1.0, 2.0)
SPECKS = 3
PAIR = 4 * OBJECT_RADIUS[1] + GAP + PATCH + 1  # maximum length of a pair, with antialiasing
_AXIS = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]], np.float64)  # (y, x) from cool to warm, by class
_DRAWS = 16 + 5 * SPECKS


class Scene(NamedTuple):
    """Geometry and colors of B scenes of M objects, in drawing order: gray specks, then a cool-colored and a warm-colored one.

    Specks that would be too close to these two have radius 0, and are not drawn. label [B] is an index into CLASSES or PLACES;
    background [B] (a gray) and color [B, M, 3] (RGB) are from 0 to 1; center [B, M, 2] (y, x from the field's upper left)
    and radius [B, M] (half the side of the bounding square) are in units; kind [B, M] is 0 disc, 1 square, 2 diamond.
    """

    label: np.ndarray
    background: np.ndarray
    center: np.ndarray
    radius: np.ndarray
    kind: np.ndarray
    color: np.ndarray


class Drawn(Dataset, ABC):
    """Abstract data set of n synthetic images, each a function of (seed, index) and the size.

    An item is (image, target): a normalized float32 image [3, H, W], and what the subclass defines.

    Args:
        n: number of images.
        size: side or (H, W) of the images, pixels.
        seed: seed of the scenes; different seeds give different scenes.
        protocol: "scale": objects grow with the shorter side of the image. "canvas": they have their size at `base`.
        base: side or (H, W) in pixels, for "canvas".
        mean: per-channel mean that normalizes values from 0 to 1.
        std: per-channel standard deviation, likewise.
        settings: arguments of the subclass, kept to draw the same set at another size.
    """

    classes: list[str]
    kind = "shapes"

    def __init__(
        self,
        n: int,
        size: int | tuple[int, int],
        seed: int,
        protocol: str,
        base: int | tuple[int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        **settings: Any,
    ) -> None:
        self.size, self.n, self.seed = _pair(size, "size"), n, seed
        if n < 1 or seed < 0:
            raise ValueError(f"n ({n}) must be at least 1, seed ({seed}) at least 0")
        if protocol not in ("scale", "canvas"):
            raise ValueError(f"unknown protocol {protocol!r}; use 'scale' or 'canvas'")
        self._settings = {"protocol": protocol, "base": base, "mean": mean, "std": std, **settings}
        self._sizes: dict[tuple[int, int], Drawn] = {}
        self.mean, self.std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
        self.pixels = min(self.size if protocol == "scale" else _pair(base, "base")) / FIELD  # per unit

    @abstractmethod
    def _items(self, indices: Sequence[int]) -> list[tuple[Tensor, Any]]:
        """Return the items (image, target) of the images with these indices, drawn as one batch."""

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int | Draw]) -> list[tuple[Tensor, Any]]:
        """Return the items of `indices`, drawn as one batch: much faster than one by one, with identical bits.

        A `Draw` with a size is drawn at that size, with the set's protocol; `repeat` has no effect.
        """
        draws = [i if isinstance(i, Draw) else Draw(i) for i in indices]
        items: list = [None] * len(draws)
        for size in dict.fromkeys(draw.size for draw in draws):
            members = [i for i, draw in enumerate(draws) if draw.size == size]
            drawn = self._of_size(size)._items([draws[i].index for i in members])  # noqa: SLF001  another of its class
            for i, item in zip(members, drawn, strict=True):
                items[i] = item
        return items

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the images are the same in every epoch."""

    def name(self, index: int) -> str:
        """Return the name of an image for messages, as "shapes (seed 1): 7" for index 7; IndexError if out of range."""
        return f"{self.kind} (seed {self.seed}): {self._check(index)}"

    def _of_size(self, size: tuple[int, int] | None) -> "Drawn":
        """Return the same data set drawn at another (H, W), which is cached; this set itself for None or its own size."""
        if size is None or tuple(size) == self.size:
            return self
        if size not in self._sizes:
            self._sizes[size] = type(self)(self.n, size, self.seed, **self._settings)
        return self._sizes[size]

    def _check(self, index: int) -> int:
        """Return the index as an int; IndexError if it is not within 0..n - 1."""
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} of {self.n} images")
        return int(index)

    def _ground(self, gray: np.ndarray) -> np.ndarray:
        """Return normalized float32 images [B, H, W, 3], each filled with one level of `gray` [B], 0 to 1."""
        images = np.empty((len(gray), *self.size, 3), np.float32)
        images[:] = ((gray.astype(np.float32)[:, None] - self.mean) / self.std)[:, None, None]
        return images

    def _draw(
        self, images: np.ndarray, center: np.ndarray, radius: np.ndarray, kind: np.ndarray, color: np.ndarray
    ) -> Iterator[tuple[int, tuple, np.ndarray]]:
        """Draw M objects onto normalized images [B, H, W, 3] in place, antialiased; yield (m, window, coverage) after each.

        center [B, M, 2] (y, x) and radius [B, M] are in pixels, kind [B, M] as in `Scene`; color [B, M, 3] is RGB from 0 to 1,
        and normalized here. The window indexes the pixels [B, K_y, K_x] around object m of every image; their coverage is 1/2 -
        the distance to its edge in pixels (negative inside), within 0..1.
        """
        h, w = self.size
        center, radius = center.astype(np.float32), radius.astype(np.float32)
        color = (color.astype(np.float32) - self.mean) / self.std
        batch = np.arange(len(images))[:, None, None]
        for m in range(radius.shape[1]):
            # one window size for the whole batch; pixels outside an object have coverage 0
            y, x = (_window(center[:, m, i], radius[:, m].max(), side) for i, side in enumerate((h, w)))
            cover = _coverage(y, x, center[:, m], radius[:, m], kind[:, m])
            window = batch, y[:, :, None], x[:, None, :]
            below = images[window]
            images[window] = below + cover[..., None] * (color[:, m, None, None] - below)
            yield m, window, cover


class Shapes(Drawn):
    """Data set of n synthetic images, each a function of (seed, index) and size; items are (float32 [3, H, W], class index).

    With the protocol "scale" the scene, but not the image, is the same at every size.

    Args:
        n: number of images.
        size: side or (H, W) of the images, pixels.
        seed: seed of the scenes; different seeds give different scenes.
        protocol: "scale" draws the same field of 64 units at every size, centered, as large as the shorter side; "canvas" keeps
            the objects' size in pixels at `base` and places them anywhere on the image.
        base: side or (H, W) in pixels for `canvas`; its shorter side is 64 units.
        region: (top, left, bottom, right) of the part in which objects lie, as shares of the field (`scale`) or of the image
            (`canvas`).
        mean, std: per-channel normalization of values from 0 to 1.
        label: "relation", the direction from the cool object to the warm one (CLASSES), or "place", the quarter of `region`
            (PLACES).

    Raises:
        ValueError: a value out of range, an unknown protocol or label, or a region or size too small for a pair of objects.
    """

    def __init__(
        self,
        n: int,
        size: int | tuple[int, int] = 64,
        seed: int = 0,
        protocol: str = "scale",
        base: int | tuple[int, int] = 64,
        region: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
        mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        std: tuple[float, ...] = (0.5, 0.5, 0.5),
        label: str = "relation",
    ) -> None:
        super().__init__(n, size, seed, protocol, base, mean, std, region=region, label=label)
        if label not in ("relation", "place"):
            raise ValueError(f"unknown label {label!r}; use 'relation' or 'place'")
        self.label_is_place = label == "place"
        self.classes = list(PLACES if self.label_is_place else CLASSES)
        field = np.array([FIELD, FIELD]) if protocol == "scale" else np.array(self.size) / self.pixels
        self.margin = (np.array(self.size) / self.pixels - field) / 2
        self.low, self.high = _limits(region, field, f"the {protocol} protocol at {self.size[0]}x{self.size[1]} px")

    def _items(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        scenes = self.scenes(indices)
        images = self._ground(scenes.background)
        center, radius = (scenes.center + self.margin) * self.pixels, scenes.radius * self.pixels
        for _ in self._draw(images, center, radius, scenes.kind, scenes.color):
            pass
        planes = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        return list(zip(planes.unbind(), scenes.label.tolist(), strict=True))

    def scenes(self, indices: Sequence[int]) -> Scene:
        """Return the scenes of the images, the same at every size with protocol "scale"; IndexError if one is out of range."""
        u = np.stack([uniform(self.seed, self._check(i), _DRAWS) for i in indices])  # [B, number of draws]
        v = u[:, 16:].reshape(len(u), SPECKS, 5)
        label, center, radius = _pairs(u[:, :7], self.low, self.high, self.label_is_place)
        specks, speck_radius = _specks(v, center, radius, self.low, self.high)
        warm = hsv(1.2 * (u[:, 7] - 0.5), 0.7 + 0.3 * u[:, 8], 0.7 + 0.3 * u[:, 9])
        cool = hsv(1.2 * (u[:, 10] - 0.5) + 3.5, 0.7 + 0.3 * u[:, 11], 0.7 + 0.3 * u[:, 12])
        gray = np.repeat(v[..., 3:4], 3, -1)
        kind = np.concatenate([v[..., 4], u[:, 13:15]], 1)  # [B, M]
        return Scene(
            label,
            0.3 + 0.4 * u[:, 15],
            np.concatenate([specks, center], 1),
            np.concatenate([speck_radius, radius], 1),
            (3 * kind).astype(np.int64),
            np.concatenate([gray, cool[:, None], warm[:, None]], 1),
        )


def _pair(size: int | tuple[int, int], name: str) -> tuple[int, int]:
    """Return (H, W) of a side or (H, W), in pixels; ValueError, which calls it `name`, if a side is below 8."""
    h, w = (size, size) if isinstance(size, int) else size
    if min(h, w) < 8:
        raise ValueError(f"{name} must be a side or (H, W) in pixels, at least 8, not {size}")
    return int(h), int(w)


def _limits(region: tuple[float, float, float, float], field: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper left and lower right corner of the region, each (y, x) in units (pixels at 64 px).

    `region` is as in `Shapes`, `field` its [height, width] in units, `where` the text that names both in errors. ValueError for
    shares out of range, or a region too small for a pair of objects.
    """
    share = np.asarray(region, np.float64).reshape(2, 2)
    if not ((share[0] >= 0) & (share[0] < share[1]) & (share[1] <= 1)).all():
        raise ValueError(f"region must be shares (top, left, bottom, right), 0 <= top < bottom <= 1, not {tuple(region)}")
    low, high = share * field
    if (high - low < PAIR + PATCH).any():
        h, w = high - low
        raise ValueError(
            f"objects do not fit: {where} and region {tuple(region)} leave {h:.4g}x{w:.4g} units, but a pair needs "
            f"{PAIR + PATCH:.4g} along each axis (64 units are the shorter side of the field); give a larger size or region"
        )
    return low, high


def uniform(seed: int, index: int, count: int) -> np.ndarray:
    """Return `count` uniform random numbers, 0 <= u < 1, which depend on (seed, index) alone, not on earlier images."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, index, 0, 0])).random(count)


def _quarter(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the quarter of the pair's center, [B] into PLACES, and as (y, x) [B, 2]: -1 above or left, 1 below or right.

    `u` [B, 2] holds uniform random numbers for y and x, where 0.5 and more is below or right.
    """
    return 2 * (u[:, 0] >= 0.5) + (u[:, 1] >= 0.5), np.where(u >= 0.5, 1.0, -1.0)


def _pairs(u: np.ndarray, low: np.ndarray, high: np.ndarray, label_is_place: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return labels [B], and centers (y, x) [B, 2, 2] and radii [B, 2] of the cool and warm object, in units (pixels at 64 px).

    Args:
        u: uniform random numbers [B, 7].
        low: upper left corner (y, x) of the region that holds both objects.
        high: its lower right corner (y, x).
        label_is_place: the label is the quarter of the region in which the pair's center lies (PLACES), not the direction from
            the cool to the warm object (CLASSES).
    """
    label = (len(CLASSES) * u[:, 0]).astype(np.int64)
    radius = OBJECT_RADIUS[0] + (OBJECT_RADIUS[1] - OBJECT_RADIUS[0]) * u[:, 1:3]
    along = radius.sum(1) + GAP + PATCH * u[:, 3]
    across = PATCH * (u[:, 4] - 0.5)
    axis = _AXIS[label]
    offset = along[:, None] * axis + across[:, None] * np.abs(axis[:, ::-1])
    # the center moves by whole patches; otherwise the position within a patch would depend on the label
    freedom = np.floor((high - low - PAIR) / PATCH) * PATCH
    move = freedom * (u[:, 5:7] - 0.5)
    if label_is_place:
        label, side = _quarter(u[:, 5:7])
        move = side * PATCH / 2 + move * (freedom - PATCH) / freedom  # also by whole patches, on either side
    middle = (low + high) / 2 + move
    return label, np.stack([middle - offset / 2, middle + offset / 2], 1), radius


def _specks(
    u: np.ndarray, center: np.ndarray, radius: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return centers (y, x) [B, S, 2] and radii [B, S] of specks, in units; the radius is 0 for specks within GAP of the pair.

    Args:
        u: uniform random numbers [B, S, 5].
        center, radius: of the pair, as `_pairs` returns them; low, high: corners of the region. A unit is a pixel at 64 px.
    """
    edge = SPECK_RADIUS[1] + 0.5
    place = low + edge + (high - low - 2 * edge) * u[..., :2]
    size = SPECK_RADIUS[0] + (SPECK_RADIUS[1] - SPECK_RADIUS[0]) * u[..., 2]
    distance = np.abs(place[:, :, None] - center[:, None]).max(-1)  # [B, S, 2]
    clear = (distance > size[..., None] + radius[:, None] + GAP).all(-1)
    return place, np.where(clear, size, 0.0)


def hsv(hue: np.ndarray, saturation: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the RGB [..., 3] of HSV colors [...]; hue in sixths of the circle, 0 = red."""
    k = (np.array([5.0, 3.0, 1.0]) + hue[..., None]) % 6
    return value[..., None] * (1 - saturation[..., None] * np.clip(np.minimum(k, 4 - k), 0, 1))


def _window(center: np.ndarray, radius: float, side: int) -> np.ndarray:
    """Return pixel indices [B, K] along one axis of `side` pixels around every center [B], shifted to lie inside the image.

    `radius` is the largest of the batch in pixels, which K covers on both sides, or all of a smaller image.
    """
    k = min(int(2 * radius) + 4, side)
    start = np.clip(np.floor(center - k / 2).astype(np.int64), 0, side - k)
    return start[:, None] + np.arange(k)


def _coverage(y: np.ndarray, x: np.ndarray, center: np.ndarray, radius: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Return the share, 0 to 1, of every window pixel that the object covers, [B, K_y, K_x]; 0 for a radius of 0.

    y [B, K_y], x [B, K_x]: pixel indices (`_window`); center [B, 2] (y, x) and radius [B] in pixels; kind [B] as in `Scene`.
    """
    half = np.float32(0.5)
    dy = np.abs(y.astype(np.float32) + half - center[:, :1])[:, :, None]
    dx = np.abs(x.astype(np.float32) + half - center[:, 1:])[:, None, :]
    radius, kind = radius[:, None, None], kind[:, None, None]
    disc = np.sqrt(dy * dy + dx * dx) - radius
    square = np.maximum(dy, dx) - radius
    diamond = (dy + dx - radius) * np.float32(0.5**0.5)
    distance = np.where(kind == 0, disc, np.where(kind == 1, square, diamond))
    cover = np.clip(half - distance, 0, 1)
    return np.where(radius > 0, cover, np.float32(0))
