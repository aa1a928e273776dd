"""The command line: LightningCLI with fixed classes and one folder per run.

The folder is `trainer.default_root_dir`: `config.yaml`, `metrics.csv`, `tensorboard/`, `checkpoints/best.ckpt` (highest
`val/top1`) and `checkpoints/last.ckpt`.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from vitrel.train.callbacks import CSVLog, FiniteLoss, Progress, Speed
from vitrel.train.datamodule import ImageData
from vitrel.train.module import Classifier

USAGE = "train.py fit --config FILE [--ckpt_path RUN/checkpoints/last.ckpt] [--KEY VALUE ...]"
LINKED = {
    ("data", "seed"): "seed_everything",
    ("model", "seed"): "seed_everything",
    ("model", "img_size"): "data.size",
    ("model", "num_classes"): "data.data",
}
DEFAULTS = {
    "default_root_dir": "runs/train",
    "max_epochs": 100,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    "enable_model_summary": False,
}


class TrainCLI(LightningCLI):
    """`fit` alone, with the run's folder, logs, checkpoints and seed decided in one place."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One seed, one image size and one class count for data and model."""
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        parser.link_arguments("data.size", "model.img_size")
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; SystemExit when a file sets a key that follows from another, which would be ignored without a word."""
        given = sys.argv[1:] if args is None else args
        for path in _config_files(given):
            for (group, key), source in LINKED.items():
                if key in (_read(path).get(group) or {}):
                    parser.error(f"{path}: leave out {group}.{key}, it follows from {source}")
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        # Lightning would overwrite the given configuration by the checkpoint's hyper-parameters without a word; here the
        # configuration decides, and Classifier refuses a checkpoint of another model
        return

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A Trainer with the run's folder; bf16-mixed on a GPU unless a precision is given."""
        config = self._get(self.config_init, "trainer")
        resume = self._get(self.config_init, "ckpt_path") is not None
        folder = Path(config["default_root_dir"])
        if not resume and (folder / "checkpoints" / "last.ckpt").exists():
            raise FileExistsError(
                f"{folder} holds a run already: go on with --ckpt_path {folder}/checkpoints/last.ckpt, "
                "choose another trainer.default_root_dir, or remove the folder"
            )
        if config["precision"] is None and config["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available():
            kwargs["precision"] = "bf16-mixed"
        if config["logger"] in (None, True):
            kwargs["logger"] = _loggers(folder, resume)
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        kwargs["callbacks"] = [*given, *_callbacks(folder, config["enable_progress_bar"] is not False)]
        return super().instantiate_trainer(**kwargs)


def run(args: list[str] | None = None) -> TrainCLI:
    """Train as the command line `args` says, e.g. ["fit", "--config", "configs/train_imagefolder.yaml"]; sys.argv when None.

    Returns:
        The finished command line: `.trainer`, `.model`, `.datamodule`, `.config`.

    Raises:
        SystemExit: a key or value that the configuration does not allow (the message is on stderr).
        ValueError: settings that do not fit each other or the data.
        FileExistsError: the run's folder holds a run and no `--ckpt_path` is given.
        FloatingPointError: the loss is not finite.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no advertisements, no lists of absent hardware
    with warnings.catch_warnings():
        # the arguments are given on purpose, and small data needs no loader processes
        warnings.filterwarnings("ignore", message=".*args parameter is intended to run from within Python.*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        return TrainCLI(
            Classifier,
            ImageData,
            args=args,
            seed_everything_default=0,
            trainer_defaults=DEFAULTS,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"allow_abbrev": False, "fit": {"usage": USAGE, "allow_abbrev": False}},
            auto_configure_optimizers=False,
        )


def _seed(value: int | bool) -> int:
    if isinstance(value, bool):
        raise ValueError("seed_everything is the seed of the run, a number: true and false are not")
    return value


def _config_files(args: list[str]) -> list[Path]:
    pairs = zip(args, [*args[1:], ""], strict=True)
    named = [value if arg in ("--config", "-c") else arg.removeprefix("--config=") for arg, value in pairs if _is_config(arg)]
    return [Path(name) for name in named if Path(name).is_file()]


def _is_config(arg: str) -> bool:
    return arg in ("--config", "-c") or arg.startswith("--config=")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return {}  # the parser says what is wrong with it
    return content if isinstance(content, dict) else {}


def _loggers(folder: Path, resume: bool) -> list[Logger]:
    return [CSVLog(folder, resume), TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False)]


def _callbacks(folder: Path, progress: bool) -> list[Callback]:
    # Two callbacks: Lightning's save_last writes only when the best improves, so that "last" would be the best
    save = {"dirpath": folder / "checkpoints", "enable_version_counter": False}
    # when an evaluation ends, since not every epoch has one
    best = ModelCheckpoint(filename="best", monitor="val/top1", mode="max", save_on_train_epoch_end=False, **save)
    last = ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **save)
    # FiniteLoss first: it must speak before anything is logged or saved
    speed = Speed()
    return [FiniteLoss(), speed, *([Progress(speed)] if progress else []), best, last]
