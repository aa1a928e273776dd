"""Hooks of mkdocs: add the generated pages, and the files outside docs/ that pages link to."""

import os
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # mkdocs does not set them; pages show tests/oracles

from tools.docs import encodings, reference  # noqa: E402
from tools.explorer.make import explorer_html  # noqa: E402

LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]+)(#[^)\s]+)?")  # Markdown links that begin with ../, and their fragments
GENERATED = {  # {file of the repository, with or without a fragment: page of the site that is made from it}
    "tools/explorer/page/page.html": "explorer.html",
    "vitrel/__init__.py": "reference/api.md",
    "vitrel/cli/__init__.py": "reference/command_line.md",
    "vitrel/train/__init__.py": "reference/api.md#vitreltrain",
    **{f"{kind.__module__.replace('.', '/')}.py#{key}": f"encodings/{key}.md" for key, kind in encodings.POSITIONS.items()},
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page per encoding to the navigation."""
    [section] = [part["Encodings"] for part in config.nav if "Encodings" in part]
    section += [{key: f"encodings/{key}.md"} for key in encodings.POSITIONS]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and pictures, and every file outside docs/ that a page links to, as files/<path>."""
    tables = [(ROOT / "docs" / name).read_text("utf-8") for name in ("encodings/index.md", "studies/scenes.md")]
    for key in encodings.POSITIONS:
        text = encodings.page(key, *tables, config.extra["arxiv"])
        files.append(File.generated(config, f"encodings/{key}.md", content=text))
        files.append(File.generated(config, f"encodings/{key}.png", content=encodings.picture(key)))
    files.append(File.generated(config, "reference/command_line.md", content=reference.command_line()))
    files.append(File.generated(config, "reference/api.md", content=reference.api()))
    files.append(File.generated(config, "explorer.html", content=explorer_html()))
    for page in [*files.documentation_pages()]:
        for target, fragment in LINK.findall(page.content_string):
            path = _outside(page.src_uri, target)
            if path and not _generated(path, fragment) and files.get_file_from_path(f"files/{path}") is None:
                if not (ROOT / path).is_file():
                    raise FileNotFoundError(f"{page.src_uri} links to {target}, which does not exist")
                files.append(File.generated(config, f"files/{path}", content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links to files outside docs/ to the pages made from them, or copies in the site."""

    def redirected(link: re.Match) -> str:
        path, fragment = _outside(page.file.src_uri, link[1]), link[2] or ""
        place = _generated(path, fragment) or f"files/{path}{fragment}"
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".") if path else link[0]

    return LINK.sub(redirected, markdown)


def _outside(page: str, target: str) -> str:
    """Return the path from the repository's root of a link `target` in docs/`page`, "" if it is inside docs/."""
    path = os.path.normpath(posixpath.join("docs", posixpath.dirname(page), target)).replace(os.sep, "/")
    return "" if path.startswith("docs/") else path


def _generated(path: str, fragment: str) -> str:
    """Return the page of the site, and the place in it, for a link to a file that a page is made from; "" for other files."""
    return GENERATED.get(path + fragment) or (GENERATED[path] + fragment if path in GENERATED else "")
