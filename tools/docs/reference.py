"""The generated reference pages: the command line from its parsers, the API from the public names of each package."""

import importlib
import os
from unittest import mock

PACKAGES = (
    "vitrel.grid",
    "vitrel.position",
    "vitrel.ops",
    "vitrel.layers",
    "vitrel.models",
    "vitrel.weights.load",
    "vitrel.convert",
    "vitrel.inputs",
    "vitrel.inspect.diagnose",
    "vitrel.inspect.resolution_report",
    "vitrel.inspect.attention",
    "vitrel.inspect.explain",
    "vitrel.inspect.plot",
    "vitrel.evaluate.run",
    "vitrel.cpu.optimize",
    "vitrel.data",
    "vitrel.train",
)
COLUMNS = "110"  # of help texts


def command_line() -> str:
    """Markdown: the help of `vitrel` and of every subcommand, as the parsers print it."""
    from vitrel.cli import COMMANDS, build_parser
    from vitrel.cli.train import HELP

    lines = ["# Command line", "", "Written from the parsers themselves: `vitrel COMMAND --help` prints the same.", ""]
    with mock.patch.dict(os.environ, {"COLUMNS": COLUMNS}):
        lines += ["```text", build_parser([]).format_help().rstrip(), "```", ""]
        for name, what in COMMANDS.items():
            parser = build_parser([name])
            [commands] = [action for action in parser._actions if action.choices and name in action.choices]
            text = HELP if name == "train" else commands.choices[name].format_help()
            lines += [f"## vitrel {name}", "", f"{what[0].upper()}{what[1:]}.", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def api() -> str:
    """Markdown with one directive of mkdocstrings for every public name of the packages, in their order."""
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
