"""The documentation site builds without a warning and without network, with search, pictures and a page for every encoding."""

import re

import pytest

from helpers import ROOT, each
from tools.docs import encodings, reference
from vitrel import POSITIONS
from vitrel.cli import COMMANDS

README = (ROOT / "README.md").read_text("utf-8")
FOLDERS = ("docs", "results", "examples", ".")  # of the pages of this repository
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for name in FOLDERS for path in (ROOT / name).glob("*.md" if name == "." else "**/*.md")
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="pip install -e '.[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "SHOWN", (0,))  # panels take longer than all else, so one encoding of each kind is drawn
        drawn = {key: encodings.picture(key) for key in ("table", "absolute", "lookhere")}
        patch.setattr(encodings, "picture", lambda key: drawn.get(key, drawn["table"]))
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))  # raises Abort on a warning
    return folder


@pytest.mark.slow(seconds=20)
def test_site_builds_with_search_and_generated_pages_and_needs_no_network(site):
    """In one test, since two workers would build it twice; pictures are described."""
    search = (site / "search" / "search_index.json").read_text("utf-8")
    for key in POSITIONS:
        page = (site / "encodings" / f"{key}.html").read_text("utf-8")
        assert "At a larger grid" in page and "double loop" in page and f"encodings/{key}.html" in search
        assert (site / "encodings" / f"{key}.png").stat().st_size > 5_000
    assert "explorer.html" in (site / "how_to" / "pictures.html").read_text("utf-8")
    assert "vitrel explorer" in (site / "explorer.html").read_text("utf-8")
    line = (site / "reference" / "command_line.html").read_text("utf-8")
    assert all(f"vitrel {name}" in line for name in COMMANDS)
    assert "absolute_to_relative" in (site / "reference" / "api.html").read_text("utf-8")
    assert "retention" in (site / "reference" / "files.html").read_text("utf-8")
    for path in site.rglob("*.html"):
        text = path.read_text("utf-8")
        loaded = re.findall(r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:[^"'\s>]+)""", text)
        loaded += re.findall(r"""<link[^>]*rel=["']?stylesheet["']?[^>]*href=["']?(https?:[^"'\s>]+)""", text)
        assert not loaded, path
        for image in re.findall(r"<img[^>]*>", text):
            assert re.search(r'alt="[^"]{10,}"', image), f"{path}: {image}"


def test_tables_of_the_page_on_files_are_up_to_date():
    assert (text := reference.FILES_PAGE.read_text("utf-8")) == reference.files_page(text), "python -m tools.docs.reference"


@each("page", PAGES)
def test_relative_links_of_a_page_reach_files_of_the_checkout(page):
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    files = {target.partition("#")[0] for target in targets if not re.match("[a-z]+:|#", target)}
    assert [file for file in sorted(files) if not ((ROOT / page).parent / file).exists()] == []
