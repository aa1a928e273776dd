"""What a training sampler may ask of a data set."""

from typing import NamedTuple


class Draw(NamedTuple):
    """One image of an epoch.

    Args:
        index: of the image in the data set.
        size: (H, W) in pixels that it is made for; None for the data set's own.
        repeat: number of this view where repeated augmentation takes an image several times; each view is augmented anew.
    """

    index: int  # type: ignore[assignment]  # the name hides tuple.index, which nothing here uses
    size: tuple[int, int] | None = None
    repeat: int = 0
