"""Out-of-memory errors while an image is read or prepared, converted to a MemoryError that names the image."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MESSAGES = ("DefaultCPUAllocator", "Insufficient memory")  # of PyTorch; of libjpeg in torchvision, and of OpenCV


def ran_out(error: Exception) -> bool:
    """Return whether `error` means that CPU memory ran out, in Python, PyTorch, torchvision or OpenCV."""
    if isinstance(error, MemoryError):
        return True
    from_library = isinstance(error, RuntimeError) or type(error).__module__ == "cv2"
    return from_library and any(message in str(error) for message in MESSAGES)


@contextmanager
def names_image(activity: Callable[[], str]) -> Iterator[None]:
    """Context manager: if memory runs out in the block, raise MemoryError with `activity()`, e.g. "a.jpg was decoded"."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        text = f"memory ran out while {activity()}: fewer loader processes, a smaller size or smaller images need less"
        raise MemoryError(text) from error
