"""The lock that keeps two processes from writing into one folder at the same time."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"  # name of the file in the folder; it stays there, unlocked
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system that has none
PATIENCE = 10.0  # seconds to wait for another process: the loader processes of a killed one outlive it by a few seconds


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Context manager that locks `folder`, which is created if needed, against other processes that lock it.

    It waits up to PATIENCE seconds for another process, then raises BlockingIOError. The lock ends with the process, however
    that ends; its file .lock stays in the folder. A process may enter the same folder several times. On a file system without
    locks nothing is locked.
    """
    with ExitStack() as held:
        try:
            held.enter_context(FileLock(folder / LOCK, is_singleton=True).acquire(timeout=PATIENCE))
        except Timeout:
            text = f"another process is writing into {folder}: wait until it ends, or give another folder"
            raise BlockingIOError(text) from None
        except (NotImplementedError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in NO_LOCKS:
                raise
        yield
