"""Evaluate models at many image sizes from a clone: `vitrel evaluate` without an installation.

python tools/evaluate.py runs/a --data shapes --size 48 64 96
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from vitrel.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["evaluate"]
    main()
