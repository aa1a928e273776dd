"""Train or fine-tune a model on an image folder.

    vitrel train --model vit_tiny_patch16_224 --pretrained --data flowers
    vitrel train --model vit_tiny_patch16_224 --weights vit_tiny.pth --position table --data flowers
    vitrel train --model vit_tiny_patch16_224 --pretrained --position table --distill --data photos
    vitrel train --config my_run.yaml
    vitrel train --config my_run.yaml --data.data flowers --trainer.max_epochs 20 --ckpt_path auto

`--ckpt_path auto` resumes an interrupted run, `--KEY VALUE` overrides a key of the file. Without --config the settings are
those of configs/train: segmentation.yaml with --task segmentation, distill.yaml with --distill, position_free.yaml with
--distill features, finetune.yaml where weights are given, else scratch.yaml.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vitrel.cli.options import check_data, count, packaged, size_or_budget
from vitrel.common.exits import reported
from vitrel.common.extras import TRAINING, require
from vitrel.common.user_modules import import_modules

FLAGS = {"--pretrained": ["--model.tuning.pretrained=true"]}  # {option without a value: keys of a configuration}
UNLABELED = ["--model.objective.distillation.alpha=1.0", "--model.objective.distillation.labels=false"]
DISTILL = {  # {value of --distill, the first by default: (recipe, keys of a configuration)}
    "logits": ("distill", UNLABELED),
    "features": ("position_free", [*UNLABELED, "--model.objective.distillation.features={}"]),
}
SHORT = {  # {short option, as in other subcommands: key of a configuration}
    "--model": "--model.model",
    "--task": "--model.task",
    "--head": "--model.head",
    "--model-args": "--model.model_args",
    "--weights": "--model.tuning.init_from",
    "--position": "--model.tuning.position",
    "--position-args": "--model.tuning.position_args",
    "--absolute": "--model.tuning.absolute",
    "--fit": "--model.tuning.fit",
    "--data": "--data.data",
    "--val-fraction": "--data.reading.val_fraction",
    "--size": "--data.size",
    "--batch-size": "--data.batch_size",
    "--n-train": "--data.n_train",
    "--lr": "--model.optim.lr",
    "--seed": "--seed_everything",
    "--protocol": "--data.protocol",
    "--epochs": "--trainer.max_epochs",
    "--out": "--trainer.default_root_dir",
    "-o": "--trainer.default_root_dir",
}
TYPES = {"--size": size_or_budget, "--data.size": size_or_budget, "--epochs": count, "--batch-size": count, "--n-train": count}
HELP = """usage: vitrel train --data FOLDER [--model NAME|FILE] [--pretrained | --weights FILE] [--position KEY]
                    [--distill [logits|features]] [--config FILE] [--ckpt_path auto|FILE] [--KEY VALUE ...]

Train or fine-tune a model on an image folder. Every KEY may also be set in the file, as sections of YAML; later files and
options override earlier ones. Default of --config: a recipe for distillation, fine-tuning or training from scratch.

  --data FOLDER                   folder with train/<class>/ and val/<class>/; or "shapes", a CSV, tars, hfds/<name>, ...
  --model NAME|FILE               a name of timm or vitrel (vitrel list), or a file for vitrel.load
  --pretrained, --weights FILE    start from timm's weights for the name, or from a file
  --position KEY                  give pretrained weights another encoding in attention, e.g. table: it is fitted to the model's
                                  attention, the embedding dropped; docs/studies say what that changed in our trials
  --fit N                         number of these images (256; 0: do not fit); --absolute keep|drop|fade: the embedding
  --task segmentation|multilabel  a class for every pixel, from images/<split>/, masks/<split>/ and classes.txt or shapes-dense,
                                  --head linear|fpn|upernet; or several labels an image, a CSV with ; between
  --distill [logits|features]     without labels: the model learns to answer as it did before --position and --absolute; with
                                  features its tokens, too, follow the former ones, less what depends on place alone
  --size N|HxW, --epochs N        image size in pixels, and number of epochs
  --lr X, --batch-size N          peak learning rate, not scaled; images per batch and device (64, fewer where images are few)
  --n-train N, --seed N           number of training images (all); seed of weights, order, augmentation, drop path, mixing (0)
  --protocol native               every image at its own aspect ratio, with at most the tokens of --size, or --size 196t
  --out DIR                       folder of the run
  --config FILE                   a YAML file, or a name in configs/train; of several, later ones override earlier ones
  --ckpt_path auto|FILE           resume the run in the folder of --out, or from a checkpoint
  --import MODULE, --print_config  import a Python module first, which registers encodings of your own; print all keys and stop

data
  --data.global_batch_size N      images per update, accumulated over batches, on any number of devices
  --data.workers N                processes that load images (on a GPU all cores but two, at most 16 a device; else 0)
  --data.augment YAML             {} for the defaults, null for none
  --data.n_val N                  number of evaluation images; default all
  --data.train_sizes YAML         sizes between which batches alternate, e.g. '[80, 96, [96, 128]]'
  --data.repeats N, --data.reading YAML, --data.protocol, --data.tokens

model
  --model.model NAME|FILE         the same as --model; every short option above sets a key
  --model.model_args YAML         keywords of timm.create_model, e.g. '{drop_path_rate: 0.1, pretrained: true}'
  --model.tuning YAML             {init_from: FILE, position: table, position_args: {}, absolute: fade, reset_head: true,
                                  trainable: [norm, head]}
  --model.optim YAML              {name: adamw, weight_decay: 0.05, warmup_epochs: 5, layer_decay: 0.75, lr_base_size: 32, ...}
  --model.mixing YAML             mixup and cutmix: {} for the defaults, {mixup: 0.2} for mixup alone, null for none
  --model.label_smoothing X       (0); --model.task and --model.head are --task and --head
  --model.objective YAML          {loss: bce}, {distillation: {teacher: NAME, checkpoint: FILE}}, {dice: 0.5}
  --model.ema YAML                averaged weights: {} for the defaults
  --model.execution YAML          {compile: true, grad_checkpointing: true}

run and trainer
  --run.save_every N              updates between two writes of last.ckpt (0: once an epoch)
  --trainer.devices N, --trainer.accelerator NAME, --trainer.precision NAME, --trainer.gradient_clip_val X, ...

--help-all lists every key; exit status: 0 done, 1 bad settings, data or files, or a failure, 2 bad usage, 130, 143 stopped
"""


def run(argv: Sequence[str]) -> None:
    """Run `vitrel train` with `argv`, the options after these two words.

    Raises:
        SystemExit: with 0 after --help, 1 for bad settings, data or files, or a failure, 2 for bad usage, 130 or 143 if the run
            is stopped. Errors are printed on stderr.
    """
    argv = [*argv[1:]] if argv[:1] == ["fit"] else [*argv]
    if not argv or any(arg in ("-h", "--help") for arg in argv):
        print(HELP, end="", file=sys.stdout if argv else sys.stderr)
        sys.exit(0 if argv else 2)
    argv = expanded(argv)
    with reported("stopped by ctrl-c before training began, nothing was changed"):
        _check(argv)
        import_modules(_values("--import", argv))
        from vitrel.train import run as train  # inside `reported`: the import takes seconds, in which ctrl-c is possible

        again = f": {shlex.join(['vitrel', 'train', *_without('--ckpt_path', argv), '--ckpt_path=auto'])}"
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's options are not known here
            again = " the same command and --ckpt_path auto"
        options = ["--help" if arg == "--help-all" else arg for arg in _without("--import", argv)]
        train(["fit", *options], f"resume with{again}")


def expanded(argv: list[str]) -> list[str]:
    """Return the arguments as `--key=value`, short options by their keys; without --config that of a recipe comes first.

    A recipe is a file of configs/train: the task's, or else that of --distill, or else finetune with weights, scratch without.
    "shapes" data is then not augmented. Where only keys are given, none is added: the other keys then have the defaults of
    `--help-all`. --lr also sets lr_base_size to null. SystemExit 2 for a short option with an invalid value.
    """
    options: list[tuple[str, str | None]] = []
    for arg in argv:
        if options and options[-1][1] is None and options[-1][0] not in FLAGS and not arg.startswith(("--", "-c", "-o")):
            options[-1] = options[-1][0], arg
        else:
            name, equals, value = arg.partition("=")
            options.append((name, value if equals else None))
    keys, names = [key for name, value in options for key in _keys(name, value)], {name for name, _ in options}
    if "--lr" in names:  # the peak itself, as timm's --lr, whatever a recipe's rate is meant for
        keys.append("--model.optim.lr_base_size=null")
    if not names & {*SHORT, *FLAGS, "--distill"} or names & {"--config", "-c", "--help-all"}:
        return keys
    given = dict(key.split("=", 1) for key in keys if "=" in key)
    of_file = "--model.model" in given and Path(given["--model.model"]).exists()  # or of a run's folder
    tuned = "--pretrained" in names or "--model.tuning.init_from" in given or of_file
    distilled = [value or "logits" for name, value in options if name == "--distill"]
    recipe = DISTILL[distilled[-1]][0] if distilled else "finetune" if tuned else "scratch"
    if (task := given.get("--model.task")) in packaged("train"):
        recipe = task
    generated = given.get("--data.data", "").startswith("shapes")  # varied enough without augmentation
    return [f"--config={packaged('train')[recipe]}", *(["--data.augment=null"] if generated else []), *keys]


def _keys(name: str, value: str | None) -> list[str]:
    """Return the arguments `--key=value` that option `name` stands for; SystemExit 2 for an invalid value of a short option.

    A name that is no short option is a key itself; without a `value` (None) it is returned alone.
    """
    if name in TYPES and not (value or "").startswith("["):  # [height, width], as in files
        try:
            TYPES[name](value or "")
        except argparse.ArgumentTypeError as error:
            usage_error(f"argument {name}: {error}")
    if name in FLAGS:
        return FLAGS[name]
    if name == "--distill":
        if (value or "logits") not in DISTILL:
            usage_error(f"argument --distill: {value!r} is none of {', '.join(DISTILL)}")
        return DISTILL[value or "logits"][1]
    key = SHORT.get(name, name)
    if value is None:
        return [key]
    if key == "--data.size":
        if value[-1] in "tT":
            key, value = "--data.tokens", value[:-1]
        elif "x" in value:
            value = f"[{value.replace('x', ', ')}]"
    if key in ("--config", "-c"):
        key, value = "--config", value if Path(value).is_file() else str(packaged("train").get(value, value))
    return [f"{key}={value}"]


def usage_error(text: str) -> NoReturn:
    """Print "vitrel train: error: " and the text on stderr, and end with status 2, as for other subcommands."""
    print(f"vitrel train: error: {text}", file=sys.stderr)
    sys.exit(2)


def _check(argv: list[str]) -> None:
    """Check, before slow imports, that the files of --config and the data folder exist, and the packages that training needs.

    OSError, ValueError, MissingExtra or SystemExit 2 where they do not.
    """
    from vitrel.common.plain_yaml import read_yaml

    require(*TRAINING)
    data: Any = None
    for path in _values("--config", argv):
        if not Path(path).is_file():
            usage_error(f"no file {path} for --config")
        config = read_yaml(path)
        section = config.get("data") if isinstance(config, dict) else None
        data = section.get("data", data) if isinstance(section, dict) else data
    if data := [data, *_values("--data.data", argv)][-1]:
        check_data(str(data))


def _values(option: str, argv: list[str]) -> list[str]:
    """Return the values of an option (`--key`) in arguments `--key=value`, in their order."""
    return [arg.partition("=")[2] for arg in argv if arg.startswith(f"{option}=")]


def _without(option: str, argv: list[str]) -> list[str]:
    """Return the arguments `--key=value` without those of an option (`--key`)."""
    return [arg for arg in argv if not arg.startswith(f"{option}=")]
