"""Print the completion script of this command for a shell.

vitrel completion bash > ~/.local/share/bash-completion/completions/vitrel
vitrel completion zsh > "${fpath[1]}/_vitrel"
"""

import argparse

from vitrel.common.extras import optional_import


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    with optional_import():
        import shtab
    from vitrel.cli import COMMANDS, build_parser

    print(shtab.complete(build_parser(COMMANDS), args.shell))
