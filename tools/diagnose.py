"""What happens to position in any timm model at other image sizes: interpolated values, leaks, padding, windows, bias.

    python tools/diagnose.py swin_tiny_patch4_window7_224 --sizes 160 224 320
    python tools/diagnose.py swinv2_tiny_window8_256 vitrel_swinv2_t --sizes 192x288 512 --plot leak.png --json leak.json

Random weights, no data, no training. A size is pixels, or height x width.
"""

import argparse
import json
import sys
from pathlib import Path

import vitrel
from vitrel.inspect.diagnose import diagnose
from vitrel.sizes import parse_size


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="models as timm.create_model takes them, ours too")
    parser.add_argument("--sizes", nargs="+", required=True, metavar="SIZE", help="pixels, 224 or 160x224 (height x width)")
    parser.add_argument("--compile", action="store_true", help="count the graphs torch.compile makes over the sizes (slower)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found, a list with one entry a model")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the tokens that see across the border, a PNG")
    args = parser.parse_args(argv)
    try:
        sizes = [parse_size(size) for size in args.sizes]
        found = []
        for name in args.names:
            found.append(diagnose(name, sizes, compile=args.compile))
            print(found[-1], end="\n\n", flush=True)
        if args.json:
            args.json.write_text(json.dumps([one.to_dict() for one in found], indent=1) + "\n")
        if args.plot:
            vitrel.inspect.plot.leak(found).savefig(args.plot, dpi=110)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
