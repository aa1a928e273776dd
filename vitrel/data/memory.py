"""Memory that runs out while an image is read or prepared: a MemoryError that names the image, whatever library ran out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNS = ("DefaultCPUAllocator", "Insufficient memory")  # PyTorch's RuntimeError; libjpeg's in torchvision, and OpenCV's


def ran_out(error: Exception) -> bool:
    """Whether memory of the CPU ran out in Python, PyTorch, torchvision or OpenCV."""
    if isinstance(error, MemoryError):
        return True
    theirs = isinstance(error, RuntimeError) or type(error).__module__ == "cv2"
    return theirs and any(sign in str(error) for sign in SIGNS)


@contextmanager
def names_image(doing: Callable[[], str]) -> Iterator[None]:
    """Where memory runs out in the block, a MemoryError with `doing()`: image, size in pixels, and what is done to it."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        text = f"memory ran out while {doing()}: fewer loader processes, a smaller size or smaller images need less"
        raise MemoryError(text) from error
