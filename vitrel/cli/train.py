"""Train a model on an image folder, from a YAML file.

    vitrel train --config my_run.yaml
    vitrel train --config my_run.yaml --data.data flowers --trainer.max_epochs 20 --ckpt_path auto

`--ckpt_path auto` goes on with an interrupted run, `--KEY VALUE` overrides a key of the file.
"""

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrel.cli.options import check_data

HELP = """usage: vitrel train [--config FILE] [--ckpt_path auto|FILE] [--KEY VALUE ...]

Train a model on an image folder. Every KEY can stand in the file too, as sections of YAML; later files and options win.

  --config FILE                   a YAML file; several are laid over each other
  --ckpt_path auto|FILE           go on with the run in trainer.default_root_dir, or from a checkpoint
  --profile_data                  measure whether loading or training is the limit, and stop
  --seed_everything N             of weights, order, augmentation, drop path, mixing (0)
  --print_config                  print the whole configuration and end

data
  --data.data WHERE               "shapes", a folder with train/<class>/ and val/<class>/, shards, or <set>:<folder>
  --data.size N | '[H, W]'        pixels; the model is built for it
  --data.batch_size N             images per batch and device (64)
  --data.workers N                processes that load images (0: the training process)
  --data.augment YAML             {} for the defaults, null for none
  --data.n_train N, --data.n_val N    a subset; default all
  --data.train_sizes YAML         sizes that batches take turns at, e.g. '[80, 96, [96, 128]]'
  --data.repeats N, --data.reading YAML, --data.region YAML

model
  --model.model NAME              any of timm.list_models(), ours are vitrel_*
  --model.model_args YAML         keywords of timm.create_model, e.g. '{drop_path_rate: 0.1, pretrained: true}'
  --model.tuning.init_from FILE   start from these weights; tuning.reset_head, tuning.trainable
  --model.optim.lr X              peak learning rate (0.001); optim.name, weight_decay, warmup_epochs, layer_decay, ...
  --model.mixing YAML             {mixup: 0.8, cutmix: 1.0}
  --model.label_smoothing X       (0)
  --model.objective YAML          {loss: bce}, {distillation: {teacher: NAME, checkpoint: FILE}}
  --model.ema YAML                averaged weights: {} for the defaults
  --model.execution YAML          {compile: true, grad_checkpointing: true, channels_last: true}

run and trainer
  --run.save_every N              updates between two writes of last.ckpt (0: once an epoch)
  --run.predictions N             validation images shown with their answers in predictions.png
  --trainer.default_root_dir DIR  folder of the run (runs/train)
  --trainer.max_epochs N          (100)
  --trainer.devices N, --trainer.accelerator NAME, --trainer.precision NAME, --trainer.gradient_clip_val X, ...

exit status: 0 done, 1 the run failed, 2 settings that are refused, 130 after ctrl-c and 143 after SIGTERM, which save first
vitrel train --help-all lists every key with its type and default.
"""


def run(argv: Sequence[str]) -> None:
    """Trains as the options say; SystemExit with one of the statuses above, and a message on stderr."""
    argv = [*argv[1:]] if argv[:1] == ["fit"] else [*argv]
    if not argv or any(arg in ("-h", "--help") for arg in argv):
        print(HELP, end="", file=sys.stdout if argv else sys.stderr)
        sys.exit(0 if argv else 2)
    try:
        _check(argv)
        from vitrel.train import run as train  # here, since it takes seconds in which ctrl-c may come

        again = f": {shlex.join(['vitrel', 'train', *_without('--ckpt_path', argv), '--ckpt_path', 'auto'])}"
        if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun, whose own options are not known here
            again = " the same command and --ckpt_path auto"
        train(["fit", *("--help" if arg == "--help-all" else arg for arg in argv)], f"go on with{again}")
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("ctrl-c: stopped before training began, nothing was changed", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, FloatingPointError, ImportError) as error:  # of settings, data and files; no bug to trace
        sys.exit("".join(traceback.format_exception_only(error)).rstrip())


def _check(argv: list[str]) -> None:
    """What needs no training code: files of settings and the place of the data. OSError or ValueError, as of the run itself."""
    from vitrel.plain_yaml import read_yaml

    data: Any = None
    for path in (*_values("-c", argv)[::-1], *_values("--config", argv)[::-1]):
        if not Path(path).is_file():
            print(f"vitrel train: error: no file {path} for --config", file=sys.stderr)
            sys.exit(2)
        found = read_yaml(path)
        section = found.get("data") if isinstance(found, dict) else None
        data = section.get("data", data) if isinstance(section, dict) else data
    if data := [*_values("--data.data", argv), data][0]:
        check_data(str(data))


def _values(option: str, argv: list[str]) -> list[str]:
    """What is given to `option`, the last one first."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    found = [
        arg.partition("=")[2] if "=" in arg else value for arg, value in pairs if arg == option or arg.startswith(f"{option}=")
    ]
    return found[::-1]


def _without(option: str, argv: list[str]) -> list[str]:
    kept = [arg for arg in argv if not arg.startswith(f"{option}=")]
    while option in kept:
        del kept[kept.index(option) : kept.index(option) + 2]
    return kept
