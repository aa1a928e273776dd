"""How a tool ends: one line, and the usual exit codes."""

import os
import signal
import sys
import warnings
from contextlib import contextmanager

import pytest

from vitrel.common.exits import Terminated, reported, terminable


def ended(capsys, error):
    """(exit code or text, what stands on stderr) where a tool raises `error`."""
    with pytest.raises(SystemExit) as caught, reported():
        raise error
    return caught.value.code, capsys.readouterr().err


def noted(error, *notes):
    for note in notes:
        error.add_note(note)
    return error


ERRORS = [
    (ValueError("bad"), "bad"),
    (OSError(28, "No space", "a.csv"), "a.csv: No space"),
    (OSError("bad"), "bad"),
    (MemoryError("bad"), "bad"),
    (FloatingPointError("bad"), "bad"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS, ids=lambda error: type(error).__name__)
def test_what_the_user_can_mend_is_one_line(capsys, error, text):
    code, _ = ended(capsys, noted(error, "3 rows are\n  saved"))
    assert code == f"error: {text}; 3 rows are saved"  # a text: printed on stderr, status 1


def test_lines_are_joined_and_nothing_is_hidden(capsys):
    assert ended(capsys, ValueError("does not fit:\n\tMissing key a"))[0] == "error: does not fit: Missing key a"
    assert ended(capsys, MemoryError())[0] == "error: MemoryError"
    with pytest.raises(TypeError), reported():  # ours to mend: with its traceback
        raise TypeError


def test_ctrl_c_says_what_is_saved_and_how_to_go_on(capsys, monkeypatch):
    code, said = ended(capsys, noted(KeyboardInterrupt(), "3 rows saved in a.csv"))
    assert code == 130 and said == "interrupted: 3 rows saved in a.csv\n"
    code, said = ended(capsys, KeyboardInterrupt())
    assert code == 130 and "nothing was saved" in said and "the same command" in said and said.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    assert ended(capsys, KeyboardInterrupt()) == (130, "")  # of several processes one tells


def test_sigterm_is_cleaned_up_after_and_ends_with_143(capsys):
    former, cleaned = signal.getsignal(signal.SIGTERM), []

    @contextmanager
    def cleaning():
        try:
            yield
        finally:
            cleaned.append(True)

    with pytest.raises(SystemExit) as caught, reported("go on"), terminable(), cleaning():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143 and cleaned and capsys.readouterr().err == "SIGTERM: go on\n"
    assert signal.getsignal(signal.SIGTERM) is former and issubclass(Terminated, KeyboardInterrupt)


def test_warnings_are_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with reported():
        assert warnings.formatwarning("2 files are left out", UserWarning, "a.py", 1) == "warning: 2 files are left out\n"
        assert "a.py:1: DeprecationWarning" in warnings.formatwarning("old", DeprecationWarning, "a.py", 1)


def test_names_that_are_no_utf8_can_be_printed(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with reported():
            print(os.fsdecode(b"caf\xe9"))
    assert (tmp_path / "out").read_text("utf-8") == "caf\\udce9\n"


def test_a_reader_that_goes_ends_the_command_without_a_word(monkeypatch, capsys):
    """As `vitrel list | head` does."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    with pytest.raises(SystemExit) as caught, reported():
        print("a line")
    sys.stdout.close()  # flushes again
    assert (caught.value.code, capsys.readouterr().err) == (141, "")
