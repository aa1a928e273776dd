import pytest

from vitrel.files import whole


def write_to_a_full_disk(path):
    with whole(path) as part:
        part.write_text("ne")
        raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new folder" / "summary.json"
    with pytest.raises(FileNotFoundError):
        write_to_a_full_disk(path)
    path.parent.mkdir()
    with whole(path) as part:
        part.write_text("old")
        assert not path.exists()
    with pytest.raises(OSError, match="No space left"):
        write_to_a_full_disk(path)
    assert path.read_text() == "old" and [p.name for p in path.parent.iterdir()] == ["summary.json"]
    with whole(path) as part:
        part.write_text("new")
    assert path.read_text() == "new"
