"""explorer.html as a file: whole, with nothing outside it, and never in the place of another file."""

import re

import pytest

from helpers import ROOT
from tools.explorer import __main__ as explorer
from tools.explorer.make import PARTS, write_explorer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = write_explorer(str(tmp_path_factory.mktemp("page") / "explorer.html"))
    return path.read_text("utf-8")


def test_it_is_one_small_file_that_asks_for_nothing(text):
    assert len(text.encode()) < 150_000
    assert "http" not in text and "//" not in re.sub(r"^\s*//.*|[^:]// .*$", "", text, flags=re.M)
    assert re.findall(r"<link[^>]*>", text) == ['<link rel="icon" href="data:,">']
    assert not re.search(r"@import|url\(|\bsrc=|fetch\(|XMLHttpRequest|import\(", text)
    assert all(target.startswith("#") or target == "data:," for target in re.findall(r'href="([^"]*)"', text))


def test_every_part_is_in_it(text):
    assert "{{" not in re.sub(r"\$\{\{|<script>.*</script>", "", text, flags=re.S)
    folder = ROOT / "tools" / "explorer" / "page"
    assert sorted(path.stem for path in folder.glob("*.js")) == sorted(PARTS)
    for part in folder.iterdir():
        if part.suffix != ".html":
            assert part.read_text("utf-8") in text


def test_every_id_that_the_script_or_a_label_names_is_there_once(text):
    ids = re.findall(r'\bid="([\w-]+)"', text)
    assert len(ids) == len(set(ids))
    named = set(re.findall(r'\$\("([\w-]+)"\)', text)) | set(re.findall(r'\bfor="([\w-]+)"', text))
    assert named and named <= set(ids)


def test_it_replaces_an_explorer_and_no_other_file(tmp_path):
    path = write_explorer(tmp_path / "page.html")
    path.write_text(path.read_text("utf-8") + "<!-- older -->", "utf-8")
    assert write_explorer(path) == path and "older" not in path.read_text("utf-8")
    notes = tmp_path / "README.md"
    notes.write_text("mine")
    with pytest.raises(FileExistsError, match=r"README\.md is there and is no explorer page: give another name"):
        write_explorer(notes)
    assert notes.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "page.html"]


def test_places_it_cannot_be_written_to(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write explorer\.html into: create it first"):
        write_explorer(tmp_path / "nowhere" / "explorer.html")
    with pytest.raises(IsADirectoryError, match=r"is a folder: name a file, such as .*explorer\.html"):
        write_explorer(tmp_path)


def test_the_tool(tmp_path, monkeypatch, capsys):
    tool = explorer
    monkeypatch.chdir(tmp_path)
    tool.main([])
    assert capsys.readouterr().out.strip() == "explorer.html"
    assert (tmp_path / "explorer.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(SystemExit, match="error: no folder"):
        tool.main(["--out", "nowhere/explorer.html"])
