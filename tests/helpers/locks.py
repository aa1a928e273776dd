"""A folder into which another process seems to write."""

import fcntl
from contextlib import contextmanager

from vitrel.common.lock import LOCK


@contextmanager
def locked(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
