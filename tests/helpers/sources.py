"""The package's own code, read and parsed once and only where a test asks."""

import ast
import functools

from helpers import ROOT


@functools.cache
def sources() -> dict[str, str]:
    """{path from the root: text} of every file of the package, the tools and the examples, in order."""
    files = sorted(path for folder in ("vitrel", "tools", "examples") for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """{path from the root: syntax tree} of the same files."""
    return {name: ast.parse(text) for name, text in sources().items()}
