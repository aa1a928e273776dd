"""Train or fine-tune a model from a clone: `vitrel train` without an installation of vitrel.

python tools/train.py --data shapes --model vitrel_vit_n8_rope_mixed --size 64 --epochs 1
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder
    from vitrel.cli import main

    main(["train", *sys.argv[1:]])
