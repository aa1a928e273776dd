"""Evaluate models at many image sizes from a clone: `vitrel evaluate` without an installation of vitrel.

python tools/evaluate.py runs/a --data shapes --size 48 64 96
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder
    from vitrel.cli import main

    sys.argv[1:1] = ["evaluate"]
    main()
