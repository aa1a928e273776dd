"""Two processes never write into one folder at the same time, and a killed one leaves it free."""

import subprocess
import sys

import pytest

from helpers import ROOT
from vitrel.common import lock
from vitrel.common.lock import only_writer

HOLDS = """
import sys, time
from pathlib import Path
from lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock of tmp_path."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]  # the file alone: importing the package takes seconds
    process = subprocess.Popen(command, cwd=ROOT / "vitrel" / "common", stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path, other, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    entered = []
    with pytest.raises(BlockingIOError, match=f"another process is writing into {tmp_path}"), only_writer(tmp_path):
        entered.append("while the other one held it")
    other.kill()
    other.wait()
    with only_writer(tmp_path):
        entered.append("after its death")
    assert entered == ["after its death"]


def test_a_process_may_enter_its_own_folder_again(tmp_path):
    with only_writer(tmp_path):
        with only_writer(tmp_path):
            pass
        with pytest.raises(ZeroDivisionError), only_writer(tmp_path):
            raise ZeroDivisionError
        assert [path.name for path in tmp_path.iterdir()] == [lock.LOCK]


def test_a_file_system_without_locks_is_written_to_and_other_faults_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.FileLock, "acquire", lambda *_, **__: fail(OSError(37, "No locks available")))
    with only_writer(tmp_path):
        pass
    monkeypatch.setattr(lock.FileLock, "acquire", lambda *_, **__: fail(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"), only_writer(tmp_path):
        pass


def fail(error):
    raise error
