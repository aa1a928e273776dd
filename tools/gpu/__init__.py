"""Checks, benchmarks and experiments in minutes of a GPU: `python -m tools.gpu`."""

import tempfile
from pathlib import Path

SCRATCH = Path(tempfile.gettempdir()) / "vitrel-gpu"  # of this machine: caches of compilers, unpacked wheels and photographs
