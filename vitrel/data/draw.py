"""The extended index by which a training sampler requests images: with size and repeat."""

from typing import NamedTuple


class Draw(NamedTuple):
    """A request for one image of a data set.

    Args:
        index: index of the image in the data set.
        size: (H, W) of the result in pixels; None for the data set's size.
        repeat: number of this view of the image with repeated augmentation; each view has its own random augmentation.
    """

    index: int  # type: ignore[assignment]  # the name hides tuple.index, which nothing here uses
    size: tuple[int, int] | None = None
    repeat: int = 0
