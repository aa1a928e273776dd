import csv
import os
import subprocess

import pytest

from vitrel.common.files import atomic_write, commit, shown, write_cells


def write_to_a_full_disk(path):
    with atomic_write(path) as part:
        part.write_text("ne")
        raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new folder" / "summary.json"
    with pytest.raises(FileNotFoundError):
        write_to_a_full_disk(path)
    path.parent.mkdir()
    with atomic_write(path) as part:
        part.write_text("old")
        assert not path.exists()
    with pytest.raises(OSError, match="No space left"):
        write_to_a_full_disk(path)
    assert path.read_text() == "old" and [p.name for p in path.parent.iterdir()] == ["summary.json"]
    with atomic_write(path) as part:
        part.write_text("new")
    assert path.read_text() == "new"


def test_a_full_disk_names_the_file_that_could_not_be_written(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught:
        write_to_a_full_disk(tmp_path / "results.csv")
    assert caught.value.errno == 28 and caught.value.filename == str(tmp_path / "results.csv")
    folder = tmp_path / "in the way"
    folder.mkdir()
    with pytest.raises(FileNotFoundError) as caught, atomic_write(folder / "none" / "a.csv") as part:
        part.write_text("")  # whose own error names the part, which is hidden
    assert caught.value.filename == str(folder / "none" / "a.csv")
    with pytest.raises(FileNotFoundError, match="other"), atomic_write(folder / "a.csv"):
        (tmp_path / "other").read_text()


def test_what_a_killed_process_left_is_overwritten_by_the_next(tmp_path):
    (tmp_path / ".a.csv.part").write_text("half, and longer than the whole")
    with atomic_write(tmp_path / "a.csv") as part:
        part.write_text("whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.csv", "whole")]


def test_a_table_of_names_is_written_whatever_they_are(tmp_path):
    bad = os.fsdecode(b"caf\xe9=.jpg")
    write_cells(tmp_path / "a.csv", [("image", "n"), ("=1+1", -1.5), (bad, 2), ("two\nlines", 3)])
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["image", "n"], ["=1+1", "-1.5"], [shown(bad), "2"], ["two\nlines", "3"]]
    assert shown(bad) == "caf\\xe9=.jpg" and shown("née") == "née"


def test_the_commit_is_that_of_the_checkout(tmp_path):
    assert commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert commit(tmp_path) == head[:12]
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{head[:12]}-dirty"
