"""Errors that come from a lack of memory, shared memory or loader processes, and what to do about them."""

import multiprocessing
import re
import traceback

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
_SHARED_MEMORY = (
    "out of shared memory",
    "insufficient shared memory",
    "unable to allocate shared memory",
    "unable to open shared memory",
    "unable to resize file",
    "killed by signal: bus error",
    "caught sigbus",
)
_DIED = re.compile(r"DataLoader worker.*(exited unexpectedly|is killed by signal)")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; PyTorch reports a failed CPU allocation as a plain RuntimeError."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _has(error, _OUT_OF_MEMORY))


def loading_failed(error: BaseException) -> bool:
    """Whether an error means that a DataLoader's processes died, could not be started, or lacked shared memory."""
    if isinstance(error, OSError | EOFError):  # of what the processes share; names no file
        return getattr(error, "filename", None) is None and _passed_through(error, "multiprocessing")
    return isinstance(error, RuntimeError) and (_has(error, _SHARED_MEMORY) or bool(_DIED.search(str(error))))


def check_workers(workers: int) -> None:
    """Raise OSError where no loader process can be started; DataLoader would also print errors of its own cleaning up."""
    if workers:
        multiprocessing.Lock()


def lack_of(error: BaseException) -> str:
    """Return one sentence for an error of `out_of_memory` or `loading_failed`: what is lacking and what helps; else ""."""
    what = f" ({first_line(error)})" if str(error) else ""
    if out_of_memory(error):
        return f"memory ran out{what}"
    if not loading_failed(error):
        return ""
    if isinstance(error, ConnectionError | EOFError) or (_DIED.search(str(error)) and not _has(error, _SHARED_MEMORY)):
        what = "perhaps because memory or shared memory (/dev/shm) ran out"
        return f"a process that loads images was killed, {what}: use fewer workers, or none"
    return (
        f"processes that load images cannot be started, or cannot share them{what}: use no workers, or give /dev/shm "
        "more room, as docker run --shm-size=8g does"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; of one that a loader process raised, of the text without its traceback."""
    lines = without_traceback(str(error)).strip().splitlines()
    return lines[0].rstrip(". ") if lines else ""


def without_traceback(text: str) -> str:
    """Return the text of an error; DataLoader puts the traceback of a loader process before it."""
    found = re.match(r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback", text)
    return re.split(rf"^(?:\w+\.)*{found[1]}: ", text, flags=re.MULTILINE)[-1] if found else text


def _has(error: BaseException, signs: tuple[str, ...]) -> bool:
    return any(sign in str(error).lower() for sign in signs)


def _passed_through(error: BaseException, package: str) -> bool:
    """Whether code of `package` called what raised an error."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").partition(".")[0] == package for frame, _ in frames)
