"""Train a model: `python tools/train.py fit --config configs/train_imagefolder.yaml`.

`--ckpt_path auto` goes on with an interrupted run, `--KEY VALUE` overrides a key of the file, and `--profile_data` measures
whether loading or training is the limit.
"""

import sys
import traceback

from vitrel.train import run

if __name__ == "__main__":
    try:
        run()
    except (ValueError, OSError, FloatingPointError) as error:  # what `run` says of settings, data and files; no bug to trace
        sys.exit("".join(traceback.format_exception_only(error)).rstrip())
