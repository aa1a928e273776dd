"""The command line: LightningCLI with fixed classes and one folder per run.

The folder is `trainer.default_root_dir`: `config.yaml`, `metrics.csv`, `tensorboard/`,
`checkpoints/best.ckpt` (highest `val/top1`, `val/miou` or `val/map`) and `checkpoints/last.ckpt`. `--ckpt_path FILE`
resumes from a checkpoint, `--ckpt_path auto` from the folder's `last.ckpt` if there is one.
"""

import logging
import math
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import jsonargparse
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from vitrel.common.exits import one_line
from vitrel.common.extras import optional_import
from vitrel.common.lock import only_writer
from vitrel.common.names import did_you_mean, nearest
from vitrel.common.plain_yaml import read_yaml
from vitrel.common.user_modules import imported_modules
from vitrel.train.datamodule import ImageData
from vitrel.train.metrics import CSVLog
from vitrel.train.module import Classifier
from vitrel.train.running.faults import BadImages, FiniteLoss
from vitrel.train.running.progress import Progress
from vitrel.train.running.saving import AtomicIO, Best, Saving, read_to_resume

USAGE = "vitrel train --config FILE [--ckpt_path auto|FILE] [--KEY VALUE ...]"
GO_ON = "to resume, run the same command with --ckpt_path auto"
COMPUTED = {  # keys that are set from others; in a file jsonargparse would ignore them
    "data.seed": "seed_everything",
    "model.seed": "seed_everything",
    "model.img_size": "data.size",
    "model.num_classes": "data.data",
    "data.task": "model.task",
}
PARSING = {"allow_abbrev": False}
MODULES = ("lightning.pytorch", "lightning.fabric", "vitrel")  # whose classes a configuration may name
DEFAULTS = {
    "default_root_dir": "runs/train",
    "max_epochs": 100,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Run:
    """Options of a run besides training.

    Args:
        save_every: updates between two writes of `last.ckpt` inside an epoch (0: none). `last.ckpt` is also written before
            every evaluation, at the end of every epoch, and on SIGTERM or ctrl-c. ValueError if negative.
    """

    save_every: int = 0

    def __post_init__(self) -> None:
        if self.save_every < 0:
            raise ValueError(f"run.save_every must be 0 or positive, not {self.save_every}")


class Parser(LightningArgumentParser):
    """An argument parser whose errors are one line, as those of vitrel's other subcommands, with the nearest known key."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message as one line to stderr and raise SystemExit 2."""
        print(f"vitrel train: error: {_sentence(message)}", file=sys.stderr)
        raise SystemExit(2)


class SaveConfig(SaveConfigCallback):
    """Writes `config.yaml` when training starts, so that a resumed run that fails before leaves the earlier file unchanged."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing; Lightning would write the file here, before the checkpoint is checked."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")


class TrainCLI(LightningCLI):
    """LightningCLI with the single subcommand `fit`; sets up the run's folder, loggers, callbacks and seed.

    Args:
        go_on: how to resume a stopped run, for the messages that the run prints when it stops.
    """

    def __init__(self, *args: Any, go_on: str = GO_ON, **kwargs: Any) -> None:
        self.go_on = go_on
        super().__init__(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"] | {"weights_only"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of `Run`, and let one key set another: `seed_everything` the seeds of data and model.

        `data.size` sets `model.img_size`, `model.task` the data's task, and the data the number of classes.
        """
        parser.add_class_arguments(Run, "run")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_seed)
        parser.link_arguments("data.size", "model.img_size")
        parser.link_arguments("model.task", "data.task")
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:  # type: ignore[override]
        """Parse the arguments; SystemExit 2 (reason on stderr) for a key or value not allowed, ValueError by `_check_file`."""
        args = args or []
        for option, value in zip(args, [*args[1:], ""], strict=True):
            name, equals, path = option.partition("=")
            if name in ("-c", "--config"):
                _check_file(path if equals else value)
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        # Lightning would silently replace the configuration by the checkpoint's hyper-parameters. Here the configuration
        # counts, and Classifier raises an error for a checkpoint of another model.
        return

    def instantiate_classes(self) -> None:
        """Build the trainer, model and data; ValueError for a class that cannot be built, as without its package."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if "Problem with given class_path" in str(error):
                raise ValueError(_sentence(str(error))) from error
            if named := re.search(r"Given value: Namespace\(class_path='([^']+)'", str(error)):  # the class itself has failed
                raise ValueError(f"{named[1]}: {one_line(error.__cause__ or error)}") from error
            if told := re.search(r"Errors:\n\s+- (.+)\n\s+- Expected a <class 'NoneType'>", str(error)):  # of settings or null
                raise ValueError(told[1]) from error
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return a Trainer with the run's loggers and callbacks; bf16-mixed on a GPU unless a precision is set.

        Replaces `ckpt_path` "auto" in the configuration by the path of `last.ckpt`, or None if there is none. Prints a line if
        the checkpoint is of a run that finished all its epochs.

        Raises:
            ValueError: a damaged checkpoint, or settings that Lightning's Trainer does not accept.
        """
        config = self._get(self.config_init, "trainer")
        folder = Path(config["default_root_dir"])
        last = folder / "checkpoints" / "last.ckpt"
        checkpoint = self._get(self.config_init, "ckpt_path")
        if checkpoint == "auto":
            # all ranks find the same file: none writes a checkpoint before every rank has passed this line
            checkpoint = self.config_init[self.subcommand]["ckpt_path"] = str(last) if last.exists() else None
        if checkpoint is not None:
            # a bad checkpoint is reported before anything is written; a folder is an error too, since torch would unpickle it
            stored = read_to_resume(checkpoint)
            done = stored["loops"].get("fit_loop", {}).get("epoch_progress", {}).get("current", {}).get("processed", 0)
            if 0 < (config["max_epochs"] or 0) <= done:
                rank_zero_only(print)(
                    f"{checkpoint} is from a run that finished its {done} epochs: raise trainer.max_epochs to train longer"
                )
        if config["precision"] is None and config["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available():
            kwargs["precision"] = "bf16-mixed"
        if config["accumulate_grad_batches"] < 1:
            raise ValueError(f"trainer.accumulate_grad_batches must be at least 1, not {config['accumulate_grad_batches']}")
        log = CSVLog(folder)
        kwargs["plugins"] = [*_listed(config["plugins"]), AtomicIO()]
        kwargs["use_distributed_sampler"] = False  # vitrel.train.batch_order divides the batches between ranks
        kwargs["logger"] = [log, *_loggers(config["logger"], folder)]
        callbacks = _listed(config["callbacks"])
        prints = config["enable_progress_bar"] is not False
        bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if prints and not bar and sys.stdout.isatty():
            callbacks.append(RichProgressBar(refresh_rate=10))  # more often, a GPU would wait for the metrics to be read
            bar = True
        kwargs["callbacks"] = [*callbacks, *self._callbacks(log, prints, bar)]
        kwargs["enable_progress_bar"] = bar
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ModuleNotFoundError, TypeError) as error:
            raise ValueError(one_line(error)) from error

    def _callbacks(self, log: CSVLog, prints: bool, bar: bool) -> list[Callback]:
        folder = log.path.parent
        best = Best(folder / "checkpoints", self._get(self.config_init, "model").task.metric)
        progress = Progress(best, prints, math.inf if bar else 60.0)
        saving = Saving(folder / "checkpoints", log, self._get(self.config_init, "run").save_every, self.go_on)
        # FiniteLoss comes first: it must raise before anything is logged or saved
        return [FiniteLoss(folder), BadImages(folder), LearningRateMonitor("step"), progress, best, saving]

    def fit(self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None) -> None:
        """Train; a checkpoint to resume from is read as tensors and plain values only (`weights_only`).

        Raises:
            BlockingIOError: another process is writing into the run's folder.
            FileExistsError: the folder holds a `last.ckpt` and no checkpoint to resume from is given.
        """
        with ExitStack() as held:
            # only rank 0 writes into the folder; a rank that starts later could find the checkpoints of this very run
            if self.trainer.is_global_zero:
                folder = Path(self._get(self.config_init, "trainer")["default_root_dir"])
                last = folder / "checkpoints" / "last.ckpt"
                held.enter_context(only_writer(folder))
                if ckpt_path is None and last.exists():
                    raise FileExistsError(
                        f"{folder} holds a run already: resume it with --ckpt_path auto, name another folder with --out, or "
                        "remove this one"
                    )
            self._fit(model, datamodule, ckpt_path)

    def _fit(self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None) -> None:
        """Train; an error that Lightning wraps is raised as its cause, and ctrl-c ends with status 130."""
        try:
            self.trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
        except BaseException as error:
            cause = error
            if "iter(combined_loader)" in str(error) and error.__context__ is not None:
                cause = error.__context__  # Lightning's teardown fails where the loaders could not be started
            if isinstance(cause, SystemExit) and isinstance(cause.__context__, KeyboardInterrupt):
                raise SystemExit(128 + signal.SIGINT) from None  # Lightning's status is 1
            if isinstance(cause, MisconfigurationException):
                raise ValueError(one_line(cause)) from cause
            if cause is not error:
                raise cause from None
            raise


@contextmanager
def _threads_in_a_line() -> Iterator[None]:
    """Context in which an OSError of a thread, as of TensorBoard's writer on a full disk, prints one line, no traceback."""
    before = threading.excepthook

    def say(failed: threading.ExceptHookArgs) -> None:
        if isinstance(failed.exc_value, OSError):
            print(f"warning: a log could not be written: {one_line(failed.exc_value)}", file=sys.stderr)
        else:
            before(failed)

    threading.excepthook = say
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    """Context in which a CPU takes denormal numbers as 0, also in threads that start in it.

    With the encoding `pape` the attention weights of far tokens underflow, and Intel's processors would take twice the time
    for a step. Gradients with and without it differ by a relative 1e-7.
    """
    before = not (torch.tensor(1e-39) * 1).any()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def run(args: list[str], go_on: str = GO_ON) -> TrainCLI:
    """Train with the command-line arguments `args`, e.g. ["fit", "--config", "my_run.yaml"].

    Sets Lightning's loggers to the level WARNING, and jsonargparse to import only what a configuration may name; both stay so.

    Args:
        args: the arguments, "fit" first.
        go_on: how to resume a stopped run; printed when the run is stopped.

    Returns:
        The LightningCLI after training: `.trainer`, `.model`, `.datamodule`, `.config`.

    Raises:
        SystemExit: a key, a value or a class that the configuration does not allow (the message is on stderr); the run was
            stopped by SIGTERM (status 143) or ctrl-c (130).
        RuntimeError: memory ran out, or a loader process was killed (`vitrel.common.resources.lacking`).
        BlockingIOError: another process is writing into the run's folder.
        ValueError: settings that do not fit each other or the data, or a checkpoint that cannot be read.
        FileExistsError: the run's folder holds a run and no `--ckpt_path` is given.
        FileNotFoundError: `--ckpt_path` names no file.
        FloatingPointError: the loss or a weight is not finite.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no advertisements, no lists of absent hardware
    # loggers import what they need only when they are built
    with warnings.catch_warnings(), optional_import(), _denormals_flushed(), _threads_in_a_line():
        # passing `args` is intended here, and small data sets need no loader processes
        warnings.filterwarnings("ignore", message=".*args parameter is intended to run from within Python.*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*compute.. method of metric MeanMetric was called before.*")
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # EpochLoader is, by itself
        _parse_plain_values()
        return TrainCLI(
            Classifier,
            ImageData,
            args=args,
            seed_everything_default=0,
            trainer_defaults=DEFAULTS,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            parser_class=Parser,
            parser_kwargs={**PARSING, "fit": {**PARSING, "usage": USAGE}},
            auto_configure_optimizers=False,
            go_on=go_on,
        )


def keys() -> list[str]:
    """Return every key of a configuration, such as "model.optim.lr", and of its sections below the first, as "model.optim"."""
    groups = {"model": Classifier, "data": ImageData, "trainer": Trainer, "run": Run}
    return ["seed_everything", "ckpt_path", *(key for name, group in groups.items() for key in _keys_of(group, name))]


def _keys_of(group: type, prefix: str) -> Iterator[str]:
    """Yield "PREFIX.NAME" of every argument of a class's constructor; for dataclasses also "PREFIX.NAME.FIELD", recursively."""
    for name, hint in get_type_hints(group.__init__).items():  # type: ignore[misc]
        if name != "return":
            yield f"{prefix}.{name}"
            for part in (hint, *get_args(hint)):
                if isinstance(part, type) and is_dataclass(part):
                    yield from _keys_of(part, f"{prefix}.{name}")


def _check_file(path: str) -> None:
    """Raise ValueError for what jsonargparse would ignore in a YAML file: keys of COMPUTED, and a number or list for a section.

    A missing file is not an error here: jsonargparse reports it.
    """
    if not Path(path).is_file():
        return
    known = keys()
    for key, value in _flat(read_yaml(path)):
        if key in COMPUTED:
            raise ValueError(f"{path}: leave out {key}: it is set from {COMPUTED[key]}")
        if isinstance(value, bool | int | float | list) and any(other.startswith(f"{key}.") for other in known):
            raise ValueError(f"{path}: {key} takes keys, not {value}")


def _flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every entry of nested mappings, sections too; keys are joined by dots, as "model.optim.lr"."""
    for name, value in section.items() if isinstance(section, dict) else ():
        yield f"{prefix}{name}", value
        yield from _flat(value, f"{prefix}{name}.")


def _sentence(message: str) -> str:
    """Return a message of jsonargparse as one line: the key, what it takes and the value, or the nearest keys if unknown."""
    message = re.sub(r"^Call to compute_fn .* failed: ", "", message)
    if denied := re.search(r"Importing '([^']+)' is not allowed", message):
        return f"{denied[1]} is not allowed: a configuration names classes of {', '.join(MODULES)} and modules of --import only"
    option = r"(?:(?:Group '(.+)'|Subcommand 'fit') does not accept o|O)ption '([^']+)'|unrecognized arguments: -*([^ =]+)"
    if unknown := re.search(option, message):
        name = ".".join(filter(None, unknown.groups())).removeprefix("fit.")
        meant = name.replace("-", "_").replace("learning_rate", "lr")
        words = [known.rpartition(".")[2] for known in keys()]  # of a key within another, only the last word is known
        alike = nearest(meant.rpartition(".")[2], words, len(words))  # keys of a section look alike by its name alone
        of_alike = [known for known in keys() if known.rpartition(".")[2] in alike]
        near = did_you_mean(meant, of_alike) or did_you_mean(meant, alike) or "; --help-all lists the keys"
        return f"unknown key {name}{near}"
    key = re.match(r'Parser key "([^"]+)":', message)
    if problem := re.search(r"Problem with given class_path '(.+)':\s+(.+)", message):
        return f"{key[1]}: {problem[1]}: {problem[2]}" if key else f"{problem[1]}: {problem[2]}"
    values = re.findall(r"(?:Given value:|Got value:) (.*)", message)
    types = re.search(r"Subtypes: \[(.*)\]", message) or re.search(r"Expected an? (.*)\. Got", message)
    if key is None or not values or types is None:
        return " ".join(message.split())
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.*?)\]", r"\1\2", types[1]).replace("NoneType", "null")
    return f"{key[1]} must be {'one of ' if ', ' in text else ''}{text.replace('typing.', '')}, not {values[-1]!r}"


def _parse_plain_values() -> None:
    """Let jsonargparse import only MODULES (Lightning, vitrel) and those of --import, and fetch no configuration by URL."""
    jsonargparse.set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*MODULES, *imported_modules()],
        instantiate_subclass_spec_in_any=False,
        config_read_mode_urls_enabled=False,
        config_read_mode_fsspec_enabled=False,
    )


def _seed(value: int | bool) -> int:
    """Return the seed; ValueError unless it is an integer from 0 to 2**32 - 1."""
    if isinstance(value, bool) or not 0 <= value < 2**32:
        raise ValueError(f"seed_everything must be an integer from 0 to 2**32 - 1, not {str(value).lower()}")
    return value


def _loggers(setting: Logger | list[Logger] | bool | None, folder: Path) -> list[Logger]:
    """Return `trainer.logger` as a list: for None or true, TensorBoard's in the run's `folder`; for false, []."""
    if setting is None or setting is True:
        return [TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False)]
    return _listed(setting or None)


def _listed(setting: Any) -> list[Any]:
    """Return a setting as a list: a list as a copy, None as [], anything else as its only element."""
    return list(setting) if isinstance(setting, list) else [] if setting is None else [setting]
