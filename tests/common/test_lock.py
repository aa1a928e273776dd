"""Two processes never write into one folder at the same time, and one that has ended leaves it free."""

import pytest

from helpers.locks import locked
from vitrel.common import lock
from vitrel.common.lock import only_writer


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    entered = []
    refused = pytest.raises(BlockingIOError, match=f"another process is writing into {tmp_path}")
    with locked(tmp_path), refused, only_writer(tmp_path):
        entered.append("while the other one held it")
    with only_writer(tmp_path):
        entered.append("after its end")
    assert entered == ["after its end"]


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
