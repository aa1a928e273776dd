"""Checks, benchmarks and experiments on a GPU that is there for minutes; writes rows into a folder and prints a table.

    python -m tools.gpu check   # the tests that ask for a GPU; every encoding against float64 on a CPU
    python -m tools.gpu bench   # models and attention alone, against timm and against no position
    python -m tools.gpu sweep   # variants of the kernels
    python -m tools.gpu train   # images/s of a training, against the same step on data that lie on the GPU
    python -m tools.gpu study   # CamVid at 360x480 px: six encodings and the kept embedding, three seeds
    python -m tools.gpu pack FOLDER --camvid DATA --weights FILE --images DATA   # where there is a network: what these need
    python -m tools.gpu page    # tables of the pages, from the rows in results/gpu

The first five need PyTorch, timm and this checkout; `check` pytest too, and `train` measures `vitrel train` where its extra is
installed: `--data FOLDER` names what `pack` has made, wheels of pytest among it. The same command goes on where the last one
stopped, also on another machine that has the folder of --out; times of another kind of GPU are measured anew. Each ends after
--minutes. Without a GPU, or with --small, every part runs a small form of itself.
"""

import argparse
import importlib
import os
import sys
import time
import zipfile
from pathlib import Path

from tools.gpu import SCRATCH

MINUTES = {"check": 2.0, "bench": 2.0, "sweep": 2.0, "train": 1.5, "study": 8.0}
_START = time.time()
_LAST = 8.0  # seconds kept for the table


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit with status 1 if a check has failed."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*MINUTES, "pack", "page"])
    parser.add_argument("folder", nargs="?", type=Path, help="of pack: where to write")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of rows and logs (%(default)s)")
    parser.add_argument("--minutes", type=float, help=f"after which the part ends ({MINUTES})")
    parser.add_argument("--small", action="store_true", help="few and small cases, as without a GPU")
    parser.add_argument("--data", type=Path, help="folder that pack has made")
    parser.add_argument("--commit", default="", help="commit to record where there is no git")
    for name, text in (("camvid", "folder of CamVid"), ("images", "folder of class folders"), ("weights", "of the ViT-Ti")):
        parser.add_argument(f"--{name}", type=Path, help=f"of pack: {text}")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # one process of a part, started by it
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.part in ("pack", "page"):
        module = importlib.import_module(f"tools.gpu.{args.part}")
        return module.main(parser, args)
    site = SCRATCH / "site"
    if args.data and not args.job and not site.exists():
        for wheel in (args.data / "wheels").glob("*.whl"):  # of Python alone: an archive to unpack
            zipfile.ZipFile(wheel).extractall(site)
    sys.path.append(str(site))

    for library in ("TORCHINDUCTOR", "TRITON"):
        os.environ.setdefault(f"{library}_CACHE_DIR", str(SCRATCH / library.lower()))
    from tools.gpu.parts import Setting  # imports torch, which reads them

    module = importlib.import_module(f"tools.gpu.{args.part}")
    until = args.until or _START + 60 * (args.minutes or MINUTES[args.part]) - _LAST
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = args.data and args.data.resolve()
    given = [args.part, "--out", str(out), "--commit", args.commit, *(["--data", str(data)] if data else [])]
    import torch

    small = args.small or not torch.cuda.is_available()
    given += ["--small"] if small else []
    setting = Setting(args.part, out, until, small, data, args.commit, tuple(given))
    if args.job:
        return module.work(setting, args.job)
    module.run_part(setting)
    lines, bad = module.table(setting)
    print("\n".join(lines), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
