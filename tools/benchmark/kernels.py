"""Measures the attention kernels beside their peers, here; writes results/kernels/<device>/samples.jsonl and table.md.

    python -m tools.benchmark.kernels                          # all, the most important first; again: what is still missing
    python -m tools.benchmark.kernels --quick                  # tiny shapes, to see that all of it runs (on a CPU too)
    python -m tools.benchmark.kernels --only "Swin-T 56"       # the cases whose name matches
    python -m tools.benchmark.kernels --table                  # the table anew, from the samples

Nothing is timed that does not pass its gate: output and gradients against the definition in float64. A failure is a row.
Without a GPU the Triton kernels are measured only where TRITON_INTERPRET=1 is set, and those times mean nothing.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

import torch

from tools.benchmark.cases import CASES, QUICK
from tools.benchmark.kernel_table import write_table
from tools.benchmark.runner import DeviceLost, Measurement
from tools.benchmark.samples import ROOT, Samples, machine, read_rows, stamp
from tools.benchmark.supervise import LOST, supervise
from tools.benchmark.timing import Repeats
from vitrel.files import atomic_write

HOW = {
    "cuda": "CUDA events around one call; the second-level cache flushed by writing 256 MiB before each; the device kept busy "
    "while the host queues the call; inputs and tables of random numbers, tables of standard deviation 0.5",
    "cpu": "process time of one call",
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with status 1 where the measurement itself broke, 2 on bad usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few repeats")
    parser.add_argument("--table", action="store_true", help="measure nothing, rewrite the table")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--seconds", type=float, default=520, help="after which no further case is started")
    parser.add_argument("--commit", default="", help="what to write as commit where there is no git")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "kernels", help="folder, with one folder a device in it")
    parser.add_argument("--worker", type=float, metavar="UNTIL", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    until = args.worker or time.time() + args.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ran_on = machine(device, args.commit)
    folder = args.out / re.sub(r"[^a-z0-9]+", "-", ran_on["device"].lower()).strip("-")
    path, running = folder / "samples.jsonl", folder / ".running.json"
    if args.table:
        sys.exit(_write(folder) if path.exists() else f"{path} is not there: measure first")
    samples = Samples(path, stamp(ran_on))
    if args.worker:
        samples.add("machine", **ran_on, how=HOW[device.type])
        plan = Repeats(2, 3, 0.0, 1) if args.quick else Repeats()
        _measure(Measurement(samples, device, plan, until, running), args, folder)
        return
    again = [sys.executable, "-m", "tools.benchmark.kernels", *(sys.argv[1:] if argv is None else argv), "--worker", str(until)]
    status = supervise(again, samples, running, until)
    running.unlink(missing_ok=True)
    _write(folder)
    print((folder / "table.md").read_text())
    sys.exit(status)


def _measure(runner: Measurement, args: argparse.Namespace, folder: Path) -> None:
    cases = [case for case in (QUICK if args.quick else CASES) if re.search(args.only, case.name)]
    try:
        finished = runner.run(cases, lambda: _write(folder))
    except DeviceLost as error:
        print(f"the device does not answer: {error}", file=sys.stderr)
        os._exit(LOST)  # an ordinary exit would wait for the device
    print("all measured" if finished else "time is up: run it again for the rest", flush=True)


def _write(folder: Path) -> None:
    with atomic_write(folder / "table.md") as part:
        part.write_text(write_table(read_rows(folder / "samples.jsonl")), "utf-8")


if __name__ == "__main__":
    main()
