"""A measurement in a process of its own, started again where it dies or hangs: an illegal access does not end the run."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.benchmark.samples import ROOT, Samples

LOST = 75  # exit status of a worker whose device does not answer any more; it has written why
MOST_RESTARTS = 30


def supervise(command: Sequence[str], samples: Samples, running: Path, until: float, patience: float = 200.0) -> int:
    """Runs `command` until it ends by itself, or until `until`; what it died or hung at becomes a row of `samples`.

    running: the file in which the worker says what it is at. patience: seconds on one thing after which it counts as hung.
    Returns the exit status of the last worker, 1 where it died before it measured anything.
    """
    for _ in range(MOST_RESTARTS):
        running.unlink(missing_ok=True)
        with tempfile.TemporaryFile("w+") as errors:
            worker = subprocess.Popen(command, stderr=errors, env=os.environ | {"PYTHONPATH": str(ROOT)})
            status = _wait(worker, running, until, patience)
            errors.seek(0)
            said = errors.read()
        if status == 0:
            return 0
        if status == LOST:
            continue
        if time.time() > until and status is None:
            return 0
        sys.stderr.write(said)
        if not running.exists():
            return 1
        why = f"no end within {patience:.0f} s" if status is None else f"the process ended with status {status}"
        samples.add("failed", **json.loads(running.read_text()), text=f"{why}: {said[-500:]}")
    return 1


def _wait(worker: subprocess.Popen, running: Path, until: float, patience: float) -> int | None:
    """Exit status; None where the worker had to be stopped."""
    started = time.time()
    try:
        while True:
            try:
                return worker.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                at = running.stat().st_mtime if running.exists() else started
            if time.time() > until + patience / 4 or time.time() > at + patience:
                return None
    finally:
        worker.kill()
        worker.wait()
