"""The `vitrel` command: one module per subcommand; options that several of them share are in `options`.

torch is imported only after the command line is parsed, so help and usage errors appear at once.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Collection, Sequence

from vitrel.common.exits import reported, terminable
from vitrel.common.names import did_you_mean
from vitrel.common.user_modules import import_modules
from vitrel.version import __version__

COMMANDS = {  # {name: help}, in the order of a project
    "doctor": "print information for a bug report: versions, devices, attention backends, missing extras",
    "list": "list vitrel's models: image size, patch, width, depth, heads, position, source of weights",
    "diagnose": "show how other image sizes affect position in any timm model; no data, no weights",
    "check": "find position errors in anyone's model: its encoding is identified and tested; no data, no weights",
    "train": "train or fine-tune a model on an image folder",
    "evaluate": "evaluate trained models at many image sizes: tables, plots, a report",
    "predict": "predict the classes of images, as a CSV",
    "compare": "train several models and evaluate each at many image sizes",
    "features": "measure position in features, and the accuracy of frozen features at many image sizes",
    "explain": "print every term that position adds to attention, for a few tokens of a small grid",
    "convert": "convert a timm model or a file of weights to a vitrel model, optionally with relative position",
    "export": "export a trained model as a torch.export program, an ONNX graph, or a folder for timm",
}
EPILOG = """exit status: 0 done, 1 bad settings, data or files, 2 bad usage, 130 stopped by ctrl-c, 141 nobody
reads the output, 143 stopped by SIGTERM

vitrel COMMAND --help describes a command and its options."""

ANEW = "nothing was saved; the same command starts again from the beginning"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv`, by default that of the process (sys.argv[1:]).

    Returns on success, and raises SystemExit with the statuses of EPILOG (1, 2, 130, 141, 143) otherwise, 0 after --help.
    """
    argv = [*(sys.argv[1:] if argv is None else argv)]
    if argv[:1] == ["train"]:  # Lightning parses the rest
        importlib.import_module("vitrel.cli.train").run(argv[1:])
        return
    parser = build_parser(argv[:1])
    if argv and argv[0][:1] != "-" and argv[0] not in COMMANDS:
        parser.error(f"there is no command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        kind = "there is no option" if unknown[0].startswith("-") else "unexpected argument"
        args.usage_error(f"{kind} {unknown[0]}{did_you_mean(unknown[0], args.option_names)}")
    with reported(args.go_on), terminable():
        import_modules(args.modules)
        args.run(args)


def build_parser(complete: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser with the names of all commands; it imports those in `complete`, but "train", and has their options."""
    parser = argparse.ArgumentParser(
        prog="vitrel",
        description="Two-dimensional position in vision transformers, at any resolution.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vitrel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if name in complete and name != "train":
            module = importlib.import_module(f"vitrel.cli.{name}")
            options = {"description": (module.__doc__ or "").strip(), "formatter_class": argparse.RawDescriptionHelpFormatter}
            subparser = commands.add_parser(name, help=text, allow_abbrev=False, **options)
            module.add_arguments(subparser)
            text = "import a Python module first, which registers encodings of your own (vitrel.register_position)"
            subparser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=text)
            about = {"usage_error": subparser.error, "option_names": re.findall(r"--[\w-]+", subparser.format_usage())}
            subparser.set_defaults(run=module.run, go_on=getattr(module, "GO_ON", ANEW), **about)
        else:
            commands.add_parser(name, help=text)
    return parser
