"""Train a model: `python tools/train.py fit --config configs/train_imagefolder.yaml`.

`--ckpt_path auto` goes on with an interrupted run, `--KEY VALUE` overrides a key of the file, and `--profile_data` measures
whether loading or training is the limit. Exit status: 0, 1 for a run that failed, 2 for settings that are refused, 130 after
ctrl-c and 143 after SIGTERM, which save first.
"""

import os
import sys
import traceback


def main() -> None:
    """Runs the command line; ends with a message on stderr and one of the statuses above."""
    try:
        from vitrel.train import run  # here, since it takes seconds in which ctrl-c may come

        run()
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("ctrl-c: stopped before training began, nothing was changed", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, FloatingPointError) as error:  # what `run` says of settings, data and files; no bug to trace
        sys.exit("".join(traceback.format_exception_only(error)).rstrip())


if __name__ == "__main__":
    main()
