"""The `vitrel` command: one file per subcommand, with what several of them share in `options`.

Nothing here imports torch before the command line is parsed, so that help and usage errors answer at once.
"""

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence

from vitrel import __version__
from vitrel.exits import reported, terminable

COMMANDS = {  # name: what it does, in the order of a project
    "doctor": "print what a bug report needs: versions, devices, attention backends, missing extras",
    "list": "models by name: parameters, cost, what position does at other sizes, where weights come from",
    "diagnose": "what happens to position in any timm model at other image sizes; no data, no weights",
    "train": "train or fine-tune a model on an image folder",
    "evaluate": "accuracy of trained models at many resolutions: tables, plots, a report",
    "compare": "train several models, evaluate each at many resolutions, say what had to be resized",
    "report": "build report.html again from the files of an evaluation",
    "plot": "draw what position does in a model: by offset, along the axes, in the attention of an image",
    "explain": "attention with position taken apart into its steps, for a few tokens of a small grid",
    "convert": "a timm model or anyone's weights as a vitrel model, with relative position if asked, in one file",
    "export": "a trained model as a torch.export program, an ONNX graph, or a folder for timm",
    "pack": "an image folder as tar shards, which are read in order instead of file by file",
    "completion": "print the script that lets a shell complete this command",
}
EPILOG = """exit status: 0 done, 1 bad settings, data or files, 2 bad usage, 130 stopped by ctrl-c, 143 stopped by SIGTERM

vitrel COMMAND --help says more about each."""

ANEW = "nothing was saved; the same command starts anew"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv`, sys.argv without the program when None.

    Raises SystemExit with the statuses of EPILOG; returns where all is done.
    """
    argv = [*(sys.argv[1:] if argv is None else argv)]
    if argv[:1] == ["train"]:  # Lightning parses the rest
        importlib.import_module("vitrel.cli.train").run(argv[1:])
        return
    args = build_parser(argv[:1]).parse_args(argv)
    with reported(args.go_on), terminable():
        args.run(args)


def build_parser(whole: Collection[str]) -> argparse.ArgumentParser:
    """The parser with all subcommands; those in `whole` with their options too."""
    parser = argparse.ArgumentParser(
        prog="vitrel",
        description="Two-dimensional position in vision transformers, at any resolution.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vitrel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, what in COMMANDS.items():
        if name in whole and name != "train":
            module = importlib.import_module(f"vitrel.cli.{name}")
            how = {"description": (module.__doc__ or "").strip(), "formatter_class": argparse.RawDescriptionHelpFormatter}
            own = commands.add_parser(name, help=what, allow_abbrev=False, **how)
            own.set_defaults(run=module.run, usage_error=own.error, go_on=getattr(module, "GO_ON", ANEW))
            module.add_arguments(own)
        else:
            commands.add_parser(name, help=what)
    return parser
