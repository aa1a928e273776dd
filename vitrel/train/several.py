"""Several training runs, one after another or a few at a time, each into its own folder; what is done is not done again."""

import contextlib
import hashlib
import logging
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from vitrel.exits import end_with_parent
from vitrel.plain_yaml import load_yaml, read_yaml
from vitrel.train.command import run as train_as
from vitrel.train.same_run import values_that_differ
from vitrel.weights.read import read_file

# what began the runs begins them anew, and goes on with those that were stopped
run = partial(train_as, go_on="the same command goes on from there")


def train_all(runs: dict[Path, dict[str, Any]], jobs: int) -> None:
    """Trains every configuration into its folder, `jobs` at a time; several write what they print into <folder>/train.log.

    Runs whose last epoch is there are left as they are, and those that were stopped go on. The CPU's threads are divided among
    the jobs. Raises the errors of `begin`, and ValueError where training ends early.
    """
    if jobs == 1 or len(runs) == 1:
        for number, (place, config) in enumerate(runs.items(), 1):
            print(f"[{number}/{len(runs)}] {place.name}: ", end="", flush=True)
            train_one(config, place)
        return
    waiting: dict[Path, list[str]] = {}
    for number, (place, config) in enumerate(runs.items(), 1):
        print(f"[{number}/{len(runs)}] {place.name}: ", end="", flush=True)
        if arguments := begin(config, place):
            waiting[place] = arguments
    if not waiting:
        return
    jobs = min(jobs, len(waiting))
    print(f"{jobs} at a time; what they print goes into {next(iter(waiting)).parent}/*/train.log", flush=True)
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker, (threads,)) as pool:
        futures = {pool.submit(_train_quietly, arguments, runs[place], place): place for place, arguments in waiting.items()}
        try:
            for number, done in enumerate(as_completed(futures), 1):
                done.result()
                print(f"{futures[done].name}: trained, {number} of {len(waiting)}", flush=True)
        except BrokenProcessPool as error:
            raise ValueError("a training process was killed, for want of memory perhaps: use fewer --jobs") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    # else another start of a program that was killed would write into the same folders
    threading.Thread(target=end_with_parent, daemon=True).start()


def _train_quietly(arguments: list[str], config: dict[str, Any], folder: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with (folder / "train.log").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            _train(arguments, config, folder)
        except SystemExit as stop:  # which would end the process, and the pool with it
            raise ValueError(f"{folder}: training ended with {stop.code!r}; train.log there says why") from stop


def train_one(config: dict[str, Any], folder: Path) -> None:
    """Trains one model into `folder`, unless its last epoch is there; goes on from last.ckpt if that is of an earlier epoch.

    Raises the errors of `begin`, and ValueError when training stopped early.
    """
    if arguments := begin(config, folder):
        _train(arguments, config, folder)


def _train(arguments: list[str], config: dict[str, Any], folder: Path) -> None:
    run(arguments)
    last, epochs = folder / "checkpoints" / "last.ckpt", config["trainer"]["max_epochs"]
    if not last.exists() or epochs_done(last) < epochs:
        raise ValueError(f"{folder}: training stopped before epoch {epochs}; give the same command again to go on")


def begin(config: dict[str, Any], folder: Path) -> list[str]:
    """Prints what is to do and writes <folder>/train.yaml; the arguments of `vitrel.train.run`, none where it is done already.

    ValueError when the folder holds a run of another configuration.
    """
    last, settings, epochs = folder / "checkpoints" / "last.ckpt", folder / "train.yaml", config["trainer"]["max_epochs"]
    start, arguments = folder / "init_from.sha256", ["fit", "--config", str(settings)]
    # as it will be read back: YAML knows no tuples
    config = load_yaml(yaml.safe_dump(config))
    if last.exists():
        known = (read_yaml(settings) if settings.exists() else None) or {}
        # the folder may have been moved with all that is in it and beside it
        moved = ["trainer.default_root_dir", *(["model.tuning.init_from"] if _same_name(known, config) else [])]
        values = values_that_differ(known, config)
        if differ := [f"{name}: {old!r} then, {new!r} now" for name, old, new in values if name not in moved]:
            raise ValueError(
                f"{folder} holds a run of another configuration ({'; '.join(differ)}): "
                "remove that folder to train anew, or give the comparison another name"
            )
        if start.exists() and (found := _start(config)) not in (None, start.read_text("utf-8")):
            raise ValueError(
                f"{folder} was tuned from other weights than {config['model']['tuning']['init_from']} holds now (SHA-256 "
                f"{found:.8}): remove that folder to train anew"
            )
        done = epochs_done(last)
        if done >= epochs:
            print("trained already", flush=True)
            return []
        print(f"going on after epoch {done} of {epochs}", flush=True)
        arguments += ["--ckpt_path", str(last)]
    else:
        print(f"training for {epochs} epochs", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        if found := _start(config):
            start.write_text(found, "utf-8")
    settings.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return arguments


def epochs_done(checkpoint: Path) -> int:
    """Epochs that a checkpoint's model has been trained for; ValueError when the file is broken."""
    way_out = f"remove {checkpoint.parent.parent} to train anew"
    try:
        return int(read_file(checkpoint)["vitrel"]["epoch"])
    except ValueError as error:
        raise ValueError(f"{error}, or {way_out}") from error
    except (LookupError, TypeError) as error:
        raise ValueError(f"{checkpoint} is no checkpoint of a training run: {way_out}") from error


def _init_from(config: dict[str, Any]) -> Path | None:
    given = ((config.get("model") or {}).get("tuning") or {}).get("init_from")
    return Path(given) if given else None


def _start(config: dict[str, Any]) -> str | None:
    """Hash of the file that training starts from; None where there is none."""
    path = _init_from(config)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def _same_name(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether both start from a run's checkpoint of the same name, in whatever folder that run's lies."""
    paths = [_init_from(config) for config in (old, new)]
    return all(paths) and len({path.parts[-3:] for path in paths}) == 1
