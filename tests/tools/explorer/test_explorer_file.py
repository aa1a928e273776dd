"""explorer.html as a file: whole, with nothing outside it."""

import re

import pytest

from tools.explorer import __main__ as explorer
from tools.explorer.make import write_explorer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = write_explorer(tmp_path_factory.mktemp("page") / "explorer.html")
    return path.read_text("utf-8")


def test_it_is_one_small_file_that_asks_for_nothing(text):
    assert len(text.encode()) < 150_000
    assert "http" not in text and "//" not in re.sub(r"^\s*//.*|[^:]// .*$", "", text, flags=re.M)
    assert re.findall(r"<link[^>]*>", text) == ['<link rel="icon" href="data:,">']
    assert not re.search(r"@import|url\(|\bsrc=|fetch\(|XMLHttpRequest|import\(", text)
    assert all(target.startswith("#") or target == "data:," for target in re.findall(r'href="([^"]*)"', text))


def test_every_id_that_the_script_or_a_label_names_is_there_once(text):
    ids = re.findall(r'\bid="([\w-]+)"', text)
    assert len(ids) == len(set(ids))
    named = set(re.findall(r'\$\("([\w-]+)"\)', text)) | set(re.findall(r'\bfor="([\w-]+)"', text))
    assert named and named <= set(ids)


def test_the_tool(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explorer.html").write_text("an older one")
    explorer.main([])
    assert capsys.readouterr().out.strip() == "explorer.html"
    assert (tmp_path / "explorer.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(SystemExit, match=r"error: .*nowhere"):
        explorer.main(["--out", "nowhere/explorer.html"])
