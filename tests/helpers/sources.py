"""The source code of the package, tools and examples, read and parsed once on demand."""

import ast
import functools

from helpers import ROOT


@functools.cache
def sources() -> dict[str, str]:
    """Return {path from the root: text} of every file of the package, the tools and the examples, sorted."""
    files = sorted(path for folder in ("vitrel", "tools", "examples") for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return {path from the root: syntax tree} of the files of `sources`."""
    return {name: ast.parse(text) for name, text in sources().items()}


def statements(tree: ast.AST) -> list[ast.stmt]:
    """Return the statements in a tree at any depth, without a look into expressions, which takes seconds."""
    nodes = [tree]
    for node in nodes:  # while it grows
        inner = ast.iter_child_nodes(node)
        nodes += [child for child in inner if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)]
    return [node for node in nodes if isinstance(node, ast.stmt)]


@functools.cache
def import_statements(name: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports anywhere in a file of `sources`."""
    return [node for node in statements(trees()[name]) if isinstance(node, ast.Import | ast.ImportFrom)]
