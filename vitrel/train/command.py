"""The command line: LightningCLI with fixed classes and one folder per run.

The folder is `trainer.default_root_dir`: `config.yaml`, `metrics.csv`, `tensorboard/`, `summary.json`, `curves.png`,
`checkpoints/best.ckpt` (highest `val/top1`) and `checkpoints/last.ckpt`. `--ckpt_path FILE` goes on from a checkpoint,
`--ckpt_path auto` from the folder's `last.ckpt` if there is one.
"""

import logging
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from vitrel.exits import one_line
from vitrel.train import guard
from vitrel.train.datamodule import ImageData
from vitrel.train.execution import check_processes, refused_trainer
from vitrel.train.faults import BadImages, FiniteLoss, RunFolder
from vitrel.train.log import CSVLog
from vitrel.train.module import Classifier
from vitrel.train.profile import DataProfile
from vitrel.train.progress import Speed, progress_of
from vitrel.train.ranks import Ranks
from vitrel.train.saving import AtomicIO, Best, Saving, read_to_resume
from vitrel.train.summary import Predictions, Summary

USAGE = "vitrel train --config FILE [--ckpt_path auto|FILE] [--KEY VALUE ...]"
GO_ON = "go on with the same command and --ckpt_path auto"
LINKED = {
    "data.seed": "seed_everything",
    "model.seed": "seed_everything",
    "model.img_size": "data.size",
    "model.num_classes": "data.data",
}
DEFAULTS = {
    "default_root_dir": "runs/train",
    "max_epochs": 100,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Run:
    """What a run does besides training.

    Args:
        save_every: updates between two writes of `last.ckpt` inside an epoch; it is also written before every evaluation, at
            the end of every epoch and on SIGTERM.
        predictions: validation images shown with the last evaluation's answers in `predictions.png`.
        profile_data: measure loading against training, say which is the limit, and stop; also `--profile_data`.
    """

    save_every: int = 0
    predictions: int = 0
    profile_data: bool = False

    def __post_init__(self) -> None:
        if self.save_every < 0 or self.predictions < 0:
            raise ValueError(f"run.save_every ({self.save_every}) and run.predictions ({self.predictions}) are at least 0")


class PlainParser(LightningArgumentParser):
    """Takes no file in the place of a value: `--config` alone reads files, which are checked."""

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """As jsonargparse's, without `sub_configs`."""
        return super().add_class_arguments(*args, **{**kwargs, "sub_configs": False})


class SaveConfig(SaveConfigCallback):
    """Writes `config.yaml` once training starts: a run that is refused before, when it is to be resumed, leaves the former."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet; Lightning would write it here."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")


class TrainCLI(LightningCLI):
    """`fit` alone, with the run's folder, logs, checkpoints and seed decided in one place."""

    def __init__(self, *args: Any, go_on: str = GO_ON, **kwargs: Any) -> None:
        self.go_on = go_on
        super().__init__(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"] | {"weights_only"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The group `run`; one seed, one image size and one class count for data and model."""
        parser.add_class_arguments(Run, "run")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        parser.link_arguments("data.size", "model.img_size")
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:  # type: ignore[override]
        """Check, then parse; SystemExit 2 with the reason on stderr when a key, a value or a class is not allowed."""
        args = ["--run.profile_data=true" if arg == "--profile_data" else arg for arg in args or []]
        self.command = shlex.join(args)
        keys: guard.Keys = {"seed_everything": {}, "ckpt_path": {}, "trainer": guard.keys_of(Trainer)}
        keys |= {"data": guard.keys_of(ImageData), "model": guard.keys_of(Classifier), "run": guard.keys_of(Run)}
        guard.restrict_imports()
        try:
            guard.check(args, keys, LINKED)
        except ValueError as error:
            self._subcommand_parsers["fit"].error(str(error))
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        # Lightning would overwrite the given configuration by the checkpoint's hyper-parameters without a word; here the
        # configuration decides, and Classifier refuses a checkpoint of another model
        return

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A Trainer with the run's folder; bf16-mixed on a GPU unless a precision is given."""
        config, settings = self._get(self.config_init, "trainer"), self._get(self.config_init, "run")
        folder = Path(config["default_root_dir"])
        last = folder / "checkpoints" / "last.ckpt"
        checkpoint = self._get(self.config_init, "ckpt_path")
        if checkpoint == "auto":
            # no rank writes before all have come this far
            checkpoint = self.config_init[self.subcommand]["ckpt_path"] = str(last) if last.exists() else None
        if checkpoint is not None:
            # says what is wrong with it, before anything is written; a folder, which torch would unpickle, is refused
            stored = read_to_resume(checkpoint)
            done = stored["loops"].get("fit_loop", {}).get("epoch_progress", {}).get("current", {}).get("processed", 0)
            if 0 < (config["max_epochs"] or 0) <= done:
                rank_zero_only(print)(f"{checkpoint} is of a finished run of {done} epochs: raise trainer.max_epochs to go on")
        if config["precision"] is None and config["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available():
            kwargs["precision"] = "bf16-mixed"
        check_processes(config["accelerator"], config["devices"])
        if settings.profile_data:
            self.save_config_callback = None
            nothing = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            return self._trainer(config, **kwargs, **nothing, callbacks=[DataProfile()])
        log = CSVLog(folder, resume=checkpoint is not None)
        given, plugins = config["callbacks"] or [], config["plugins"] or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicIO(folder)]
        kwargs["use_distributed_sampler"] = False  # vitrel.train.order divides the batches between ranks
        kwargs["logger"] = [log, *_loggers(config["logger"], folder)]
        kwargs["callbacks"] = [*(given if isinstance(given, list) else [given]), *self._callbacks(log)]
        trainer = self._trainer(config, **kwargs)
        # by the rank that writes: another rank that starts later would find what this one has begun
        if trainer.is_global_zero and checkpoint is None and last.exists():
            raise FileExistsError(
                f"{folder} holds a run already: go on with --ckpt_path {last} (or auto), choose another "
                "trainer.default_root_dir, or remove the folder"
            )
        return trainer

    def _trainer(self, config: Mapping[str, Any], **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ModuleNotFoundError, TypeError) as error:
            raise ValueError(refused_trainer(config, error)) from error

    def _callbacks(self, log: CSVLog) -> list[Callback]:
        settings, speed, folder = self._get(self.config_init, "run"), Speed(), log.path.parent
        about = {"command": self.command, "seed": self._get(self.config_init, "seed_everything")}
        shown = [] if self._get(self.config_init, "trainer")["enable_progress_bar"] is False else [progress_of(speed)]
        resumed = self._get(self.config_init, "ckpt_path") is not None
        summary = Summary(log, speed, about, resumed, prints=bool(shown))
        saving = Saving(folder / "checkpoints", log, settings.save_every, self.go_on)
        drawn = [Predictions(folder, settings.predictions)] if settings.predictions else []
        # FiniteLoss first: it must speak before anything is logged or saved
        faults = [Ranks(saving.left), RunFolder(folder), FiniteLoss(folder), BadImages(folder)]
        return [*faults, speed, *shown, *drawn, summary, Best(folder / "checkpoints"), saving]

    def fit(self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None) -> None:
        """Train; a checkpoint to resume is read as tensors and plain values alone."""
        try:
            self.trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
        except BaseException as error:
            for callback in self.trainer.callbacks:
                if hasattr(callback, "explain"):
                    callback.explain(error)  # raises the reason, where `error` is only what followed from it
            if isinstance(error.__context__, KeyboardInterrupt):  # where there is nothing to save
                raise error.__context__ from None
            if isinstance(error, MisconfigurationException):
                raise ValueError(one_line(error)) from error
            raise


def run(args: list[str], go_on: str = GO_ON) -> TrainCLI:
    """Train as the command line `args` says, e.g. ["fit", "--config", "configs/train_imagefolder.yaml"].

    go_on: how to go on with a run that was stopped, which is the last line that it prints.

    Returns:
        The finished command line: `.trainer`, `.model`, `.datamodule`, `.config`.

    Raises:
        SystemExit: a key, a value or a class that the configuration does not allow (the message is on stderr); the run was
            stopped by SIGTERM (status 143) or ctrl-c (130).
        ChildProcessError: another process of the run has died.
        ValueError: settings that do not fit each other or the data, or a checkpoint that cannot be read.
        FileExistsError: the run's folder holds a run and no `--ckpt_path` is given.
        FileNotFoundError: `--ckpt_path` names no file.
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
        warnings.filterwarnings("ignore", message=".*`IterableDataset` has `__len__` defined.*")  # shards count exactly
        warnings.filterwarnings("ignore", message=".*compute.. method of metric MeanMetric was called before.*")
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # EpochLoader is, by itself
        return TrainCLI(
            Classifier,
            ImageData,
            args=args,
            seed_everything_default=0,
            trainer_defaults=DEFAULTS,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            parser_class=PlainParser,
            parser_kwargs={"allow_abbrev": False, "fit": {"usage": USAGE, "allow_abbrev": False}},
            auto_configure_optimizers=False,
            go_on=go_on,
        )


def _seed(value: int | bool) -> int:
    if isinstance(value, bool):
        raise ValueError("seed_everything is the seed of the run, a number: true and false are not")
    return value


def _loggers(given: Logger | list[Logger] | bool | None, folder: Path) -> list[Logger]:
    if given is None or given is True:
        return [TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False)]
    return list(given) if isinstance(given, list) else [given] if given else []
