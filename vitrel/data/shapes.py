"""`shapes`: images drawn on demand whose class is where one object lies relative to another.

One warm-hued and one cool-hued object lie on flat grey among grey specks; the class is the direction from the cool object to
the warm one. Lengths are in units: a field is 64 units high and wide, one unit is one pixel at 64 px.

The label must come from position between patches, so with patches of 8 px on a 64-px image:

- the two objects are at least 9 units apart along the axis of the label, and specks at least as far from both: no patch
  shows parts of both objects, nor of an object and a speck;
- the gap and the offset across the axis are uniform over 8 units, and the pair's centre over a multiple of 8: where each
  object falls within its patches is uniform and independent of the other and of the label.

So the bag of patches that the pair makes, and a model without position sees nothing else, has the same distribution for
every class; the specks, independent but for those left out near the pair, add nothing that a classifier was seen to use.
The pair's centre is drawn alike for every class and both objects always lie wholly inside: neither the place of the pair nor
truncation tells the class. The place of one object alone must in part, since one at the left edge cannot be right of another:
the best guess from the warm object's place alone is right for 70 % of 64-px images.

With `label="place"` the class is the quarter of the field that the pair's centre lies in, 4 units or more off the lines between
quarters, whatever the direction: the control for absolute position, which finite grids leak through their borders.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrel.data.draw import Draw

CLASSES: tuple[str, ...] = ("left", "right", "above", "below")
PLACES: tuple[str, ...] = ("upper left", "upper right", "lower left", "lower right")
FIELD = 64.0
PATCH = 8.0
GAP = 9.0  # a patch, and half a pixel of antialiasing on either object
OBJECT_RADIUS = (4.0, 5.0)
SPECK_RADIUS = (1.0, 2.0)
SPECKS = 3
PAIR = 4 * OBJECT_RADIUS[1] + GAP + PATCH + 1  # the longest pair with its antialiasing
_AXIS = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]], np.float64)  # (y, x) from cool to warm, by class
_DRAWS = 16 + 5 * SPECKS


class Scene(NamedTuple):
    """Vector scenes; arrays of the batch [B, ...] or of one scene, M objects in drawing order, the pair last (cool, warm).

    A radius of 0 draws nothing: that speck would have come too close to the pair.
    """

    label: np.ndarray  # [...]        index into CLASSES, or into PLACES
    background: np.ndarray  # [...]        grey, 0 to 1
    centre: np.ndarray  # [..., M, 2]  y, x in units from the field's upper left corner
    radius: np.ndarray  # [..., M]     half the side of the bounding square, units
    kind: np.ndarray  # [..., M]     0 disc, 1 square, 2 diamond
    colour: np.ndarray  # [..., M, 3]  RGB, 0 to 1


class Shapes(Dataset):
    """n images of scenes that are a function of (seed, index) alone; items are (float32 [3, H, W], class index).

    Args:
        n: number of images.
        size: side or (H, W), pixels.
        seed: of the scenes; different seeds share none.
        protocol: "scale" draws the same 64-unit field at every size, on the shorter side, with background beyond it on the
            longer one; "canvas" keeps objects as large as at `base` and lays them anywhere on the image.
        base: side or (H, W) in pixels that `canvas` takes the size of objects from: its shorter side is 64 units.
        region: (top, left, bottom, right) that objects are limited to, as shares of the field (`scale`) or of the image
            (`canvas`).
        mean, std: per channel, in units of the full range (0 to 1).
        label: "relation", from the cool object to the warm one (CLASSES), or "place", the quarter of `region` (PLACES).

    Raises:
        ValueError: an impossible n, size, seed, protocol, region or label, or one that the pair of objects does not fit into.
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
        self.size, self.n, self.seed = _pair(size, "size"), n, seed
        if n < 1 or seed < 0:
            raise ValueError(f"n ({n}) is at least 1 and seed ({seed}) at least 0")
        if protocol not in ("scale", "canvas"):
            raise ValueError(f"unknown protocol {protocol!r}; use 'scale' or 'canvas'")
        if label not in ("relation", "place"):
            raise ValueError(f"unknown label {label!r}; use 'relation' or 'place'")
        self.of_place = label == "place"
        self.classes = list(PLACES if self.of_place else CLASSES)
        self.bad = torch.zeros(n, dtype=torch.uint8)  # as other data sets have it; nothing drawn is unreadable
        self._settings = {"protocol": protocol, "base": base, "region": region, "mean": mean, "std": std, "label": label}
        self._sizes: dict[tuple[int, int], Shapes] = {}
        self.mean, self.std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
        if protocol == "scale":
            self.pixels = min(self.size) / FIELD  # per unit
            field = np.array([FIELD, FIELD])
            self.margin = (np.array(self.size) / self.pixels - FIELD) / 2
        else:
            self.pixels = min(_pair(base, "base")) / FIELD
            field = np.array(self.size) / self.pixels
            self.margin = np.zeros(2)
        self.low, self.high = _limits(region, field, f"the {protocol} protocol at {self.size[0]}x{self.size[1]} px")

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int | Draw]) -> list[tuple[Tensor, int]]:
        """The items of `indices`, drawn together: many times faster than, and bit-identical to, one by one.

        A `Draw` with a size is drawn at it, by the set's own protocol; all views of an image (`repeat`) are the same.
        """
        draws = [i if isinstance(i, Draw) else Draw(i) for i in indices]
        items: list = [None] * len(draws)
        for size in dict.fromkeys(draw.size for draw in draws):
            at = [i for i, draw in enumerate(draws) if draw.size == size]
            drawn = self._of_size(size)._items([draws[i].index for i in at])
            for i, item in zip(at, drawn, strict=True):
                items[i] = item
        return items

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the images of every epoch are the same."""

    def name(self, index: int) -> str:
        """What messages call an image."""
        return f"shapes (seed {self.seed}): {self._check(index)}"

    def class_counts(self) -> list[int]:
        """Number of images of each class; draws the label of each."""
        u = np.stack([_uniform(self.seed, i) for i in range(self.n)])
        labels = _quarter(u[:, 5:7])[0] if self.of_place else _direction(u[:, 0])
        return np.bincount(labels, minlength=len(self.classes)).tolist()

    def bad_indices(self) -> list[int]:
        """None: every image can be drawn."""
        return []

    def _of_size(self, size: tuple[int, int] | None) -> "Shapes":
        if size is None or tuple(size) == self.size:
            return self
        if size not in self._sizes:
            self._sizes[size] = Shapes(self.n, size, self.seed, **self._settings)
        return self._sizes[size]

    def _items(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        scenes = self._scenes(indices)
        images = torch.from_numpy(self._draw(scenes))
        return list(zip(images.unbind(), scenes.label.tolist(), strict=True))

    def scene(self, index: int) -> Scene:
        """The scene that image `index` shows; in the `scale` protocol the same at every size."""
        return Scene(*(values[0] for values in self._scenes([index])))

    def _scenes(self, indices: Sequence[int]) -> Scene:
        u = np.stack([_uniform(self.seed, self._check(i)) for i in indices])  # [B, draws]
        v = u[:, 16:].reshape(len(u), SPECKS, 5)
        label, centre, radius = _pairs(u[:, :7], self.low, self.high, self.of_place)
        specks, speck_radius = _specks(v, centre, radius, self.low, self.high)
        warm = _colour(1.2 * (u[:, 7] - 0.5), 0.7 + 0.3 * u[:, 8], 0.7 + 0.3 * u[:, 9])
        cool = _colour(1.2 * (u[:, 10] - 0.5) + 3.5, 0.7 + 0.3 * u[:, 11], 0.7 + 0.3 * u[:, 12])
        grey = np.repeat(v[..., 3:4], 3, -1)
        kind = np.concatenate([v[..., 4], u[:, 13:15]], 1)  # [B, M]
        return Scene(
            label,
            0.3 + 0.4 * u[:, 15],
            np.concatenate([specks, centre], 1),
            np.concatenate([speck_radius, radius], 1),
            (3 * kind).astype(np.int64),
            np.concatenate([grey, cool[:, None], warm[:, None]], 1),
        )

    def _check(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} of {self.n} images")
        return int(index)

    def _draw(self, scenes: Scene) -> np.ndarray:
        """Images [B, 3, H, W], normalised: coverage of a pixel is 1/2 - signed distance of its centre, within 0 to 1."""
        h, w = self.size
        centre = ((scenes.centre + self.margin) * self.pixels).astype(np.float32)
        radius = (scenes.radius * self.pixels).astype(np.float32)
        colour = (scenes.colour.astype(np.float32) - self.mean) / self.std
        ground = (scenes.background.astype(np.float32)[:, None] - self.mean) / self.std
        images = np.empty((len(ground), h, w, 3), np.float32)
        images[:] = ground[:, None, None]
        batch = np.arange(len(ground))[:, None, None]
        for m in range(radius.shape[1]):
            # a window of one side for the whole batch; what lies outside an object has coverage 0
            y, x = (_window(centre[:, m, i], radius[:, m].max(), side) for i, side in enumerate((h, w)))
            cover = _coverage(y, x, centre[:, m], radius[:, m], scenes.kind[:, m])[..., None]
            at = batch, y[:, :, None], x[:, None, :]
            under = images[at]
            images[at] = under + cover * (colour[:, m, None, None] - under)
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _pair(size: int | tuple[int, int], name: str) -> tuple[int, int]:
    h, w = (size, size) if isinstance(size, int) else size
    if min(h, w) < 8:
        raise ValueError(f"{name} is a side or (H, W) in pixels, at least 8, not {size}")
    return int(h), int(w)


def _limits(region: tuple[float, float, float, float], field: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) corners [2] of the region in units; ValueError where the pair has no room to move by a patch."""
    share = np.asarray(region, np.float64).reshape(2, 2)
    if not ((share >= 0).all() and (share <= 1).all() and (share[0] < share[1]).all()):
        raise ValueError(f"region is (top, left, bottom, right) in shares, 0 <= top < bottom <= 1, not {tuple(region)}")
    low, high = share * field
    if (high - low < PAIR + PATCH).any():
        h, w = high - low
        raise ValueError(
            f"objects do not fit: {what} and region {tuple(region)} leave {h:.4g}x{w:.4g} units, and a pair needs "
            f"{PAIR + PATCH:.4g} each way (64 units are the shorter side of the field); give a larger size or region"
        )
    return low, high


def _uniform(seed: int, index: int) -> np.ndarray:
    # counter-based: any image can be drawn without those before it
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, index, 0, 0])).random(_DRAWS)


def _direction(u: np.ndarray) -> np.ndarray:
    return (len(CLASSES) * u).astype(np.int64)


def _quarter(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index into PLACES [B], side of the middle, -1 or 1, along each axis [B, 2])."""
    return 2 * (u[:, 0] >= 0.5) + (u[:, 1] >= 0.5), np.where(u >= 0.5, 1.0, -1.0)


def _pairs(u: np.ndarray, low: np.ndarray, high: np.ndarray, of_place: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(label [B], centres [B, 2, 2], radii [B, 2]) of the cool and the warm object."""
    label = _direction(u[:, 0])
    radius = OBJECT_RADIUS[0] + (OBJECT_RADIUS[1] - OBJECT_RADIUS[0]) * u[:, 1:3]
    along = radius.sum(1) + GAP + PATCH * u[:, 3]
    across = PATCH * (u[:, 4] - 0.5)
    axis = _AXIS[label]
    offset = along[:, None] * axis + across[:, None] * np.abs(axis[:, ::-1])
    # whole patches of freedom: otherwise the phase within a patch would depend on the label
    freedom = np.floor((high - low - PAIR) / PATCH) * PATCH
    move = freedom * (u[:, 5:7] - 0.5)
    if of_place:
        label, side = _quarter(u[:, 5:7])
        move = side * PATCH / 2 + move * (freedom - PATCH) / freedom  # again over whole patches, on either side
    middle = (low + high) / 2 + move
    return label, np.stack([middle - offset / 2, middle + offset / 2], 1), radius


def _specks(
    u: np.ndarray, centre: np.ndarray, radius: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(centres [B, S, 2], radii [B, S]) of specks from u [B, S, 5]; radius 0 where one is within a patch of the pair."""
    edge = SPECK_RADIUS[1] + 0.5
    place = low + edge + (high - low - 2 * edge) * u[..., :2]
    size = SPECK_RADIUS[0] + (SPECK_RADIUS[1] - SPECK_RADIUS[0]) * u[..., 2]
    distance = np.abs(place[:, :, None] - centre[:, None]).max(-1)  # [B, S, 2]
    clear = (distance > size[..., None] + radius[:, None] + GAP).all(-1)
    return place, np.where(clear, size, 0.0)


def _colour(hue: np.ndarray, saturation: np.ndarray, value: np.ndarray) -> np.ndarray:
    """HSV to RGB [B, 3]; hue in sixths of the circle, 0 = red."""
    k = (np.array([5.0, 3.0, 1.0]) + hue[:, None]) % 6
    return value[:, None] * (1 - saturation[:, None] * np.clip(np.minimum(k, 4 - k), 0, 1))


def _window(centre: np.ndarray, radius: float, side: int) -> np.ndarray:
    """Pixel indices [B, K] along one axis around every centre, moved inside the image."""
    k = min(int(2 * radius) + 4, side)
    start = np.clip(np.floor(centre - k / 2).astype(np.int64), 0, side - k)
    return start[:, None] + np.arange(k)


def _coverage(y: np.ndarray, x: np.ndarray, centre: np.ndarray, radius: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Share [B, K, K] of every pixel of the window that the object covers; all kinds lie within ±radius of the centre."""
    half = np.float32(0.5)
    dy = np.abs(y.astype(np.float32) + half - centre[:, :1])[:, :, None]
    dx = np.abs(x.astype(np.float32) + half - centre[:, 1:])[:, None, :]
    radius, kind = radius[:, None, None], kind[:, None, None]
    disc = np.sqrt(dy * dy + dx * dx) - radius
    square = np.maximum(dy, dx) - radius
    diamond = (dy + dx - radius) * np.float32(0.5**0.5)
    distance = np.where(kind == 0, disc, np.where(kind == 1, square, diamond))
    cover = np.clip(half - distance, 0, 1)
    return np.where(radius > 0, cover, np.float32(0))
