"""Writes explorer.html: attention with position in small examples whose numbers can be changed, as one page without network.

    python -m tools.explorer --out explorer.html

Open the file in any browser.
"""

import argparse
import sys
from pathlib import Path

from tools.explorer.make import write_explorer


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("explorer.html"), help="the file to write (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        print(write_explorer(args.out))
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
