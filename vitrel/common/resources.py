"""Errors that mean a lack of memory, shared memory or loader processes."""

import multiprocessing
import re

_OUT_OF_MEMORY = (  # in the texts of PyTorch, which raises RuntimeError for the CPU
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "could not create a memory",  # this and the next two are oneDNN's
    "could not create a primitive",
    "could not execute a primitive",
    "can't start new thread",
)
_LOADING = ("dataloader worker", "shared memory", "unable to resize file")


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory (of CPU or GPU) ran out; PyTorch's own for the CPU is a plain RuntimeError."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _has(error, _OUT_OF_MEMORY))


def lacking(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, or that loader processes were killed or lack shared memory.

    A process that is killed while it hands over a batch gives a ConnectionResetError.
    """
    loading = isinstance(error, RuntimeError) and _has(error, _LOADING)
    return out_of_memory(error) or loading or isinstance(error, ConnectionResetError)


def _has(error: BaseException, signs: tuple[str, ...]) -> bool:
    return any(sign in str(error).lower() for sign in signs)


def check_workers(workers: int) -> None:
    """Raise OSError, with a note on what to do, if loader processes cannot be started; nothing is tried for 0 `workers`.

    DataLoader's own error comes with others of its cleaning up.
    """
    try:
        if workers:
            multiprocessing.Lock()
    except OSError as error:
        error.add_note("no process that loads images can be started: use no workers, or give /dev/shm more room")
        raise


def without_traceback(text: str) -> str:
    """Return the text of an error, without the traceback of a loader process that DataLoader puts before it."""
    found = re.match(r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback", text)
    return re.split(rf"^(?:\w+\.)*{found[1]}: ", text, flags=re.MULTILINE)[-1] if found else text
