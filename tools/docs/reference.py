"""Generate the reference pages: command line, configurations, columns of results.csv, API.

python -m tools.docs.reference    # writes the tables of docs/reference/files.md; mkdocs makes the others
"""

import importlib
import os
import re
from itertools import takewhile
from unittest import mock

from tools.study.pages import ROOT, fill
from vitrel.cli.options import packaged
from vitrel.evaluate.folder import COLUMNS

FILES_PAGE = ROOT / "docs" / "reference" / "files.md"

PACKAGES = (
    "vitrel.grid",
    "vitrel.position",
    "vitrel.ops",
    "vitrel.layers",
    "vitrel.models",
    "vitrel.weights",
    "vitrel.inputs",
    "vitrel.conformance",
    "vitrel.inspect.diagnose",
    "vitrel.inspect.attention",
    "vitrel.inspect.explain",
    "vitrel.inspect.features",
    "vitrel.inspect.plot",
    "vitrel.export.hub",
    "vitrel.evaluate.run",
    "vitrel.evaluate.sweep",
    "vitrel.data",
    "vitrel.train",
)
HELP_WIDTH = "110"


def command_line() -> str:
    """Return Markdown with the help of `vitrel` and of every subcommand, as the parsers print it."""
    from vitrel.cli import COMMANDS, build_parser
    from vitrel.cli.train import HELP

    lines = ["# Command line", "", "Written from the parsers themselves: `vitrel COMMAND --help` prints the same.", ""]
    with mock.patch.dict(os.environ, {"COLUMNS": HELP_WIDTH}):
        lines += ["```text", build_parser([]).format_help().rstrip(), "```", ""]
        for name, what in COMMANDS.items():
            parser = build_parser([name])
            [commands] = [action for action in parser._actions if action.choices and name in action.choices]
            text = HELP if name == "train" else commands.choices[name].format_help()
            lines += [f"## vitrel {name}", "", f"{what[0].upper()}{what[1:]}.", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def configurations() -> str:
    """Return a Markdown table of the packaged configurations, with each header's first sentence or command."""
    rows = ["| name | for |", "|---|---|"]
    for name, path in (packaged() | packaged("train")).items():
        lines = path.read_text("utf-8").splitlines()
        header = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
        command = re.match(r"Command: +(.*?)(?=, | \(| [A-Z][a-z]+: )", header)
        what = f"`{command[1]}`" if command else re.split(r"(?<=\.) (?=[A-Z])", header)[0]
        rows.append(f"| [{name}](../../{path.resolve().relative_to(ROOT).as_posix()}) | {what} |")
    return "\n".join(rows)


def columns() -> str:
    """Return a Markdown table of the columns of results.csv and their content."""
    lines = ["| column | holds |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {what.replace('|', '/')} |" for name, what in COLUMNS.items())])


def files_page(text: str) -> str:
    """Return the text of docs/reference/files.md with its two generated tables made anew."""
    return fill(text, [("configurations", configurations()), ("columns", columns())])


def api() -> str:
    """Return Markdown with a directive of mkdocstrings for every public name of the packages."""
    lines = ["# API", "", "Public names by package. `import vitrel` gives those that the examples use.", ""]
    for name in PACKAGES:
        module = importlib.import_module(name)
        own = getattr(module, "__all__", None) or [
            n for n, value in vars(module).items() if not n.startswith("_") and getattr(value, "__module__", "") == name
        ]
        lines += [f"## {name}", "", (module.__doc__ or "").strip().split("\n\n")[0], ""]
        for public in own:
            if public.isupper():
                continue  # constants
            lines += [f"::: {name}.{public}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    FILES_PAGE.write_text(files_page(FILES_PAGE.read_text("utf-8")), "utf-8")
