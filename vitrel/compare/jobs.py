"""Training several configurations, in sequence or in parallel, each in its own folder; finished runs are skipped."""

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

from vitrel.common.exits import INTERRUPTED, TERMINATED, end_with_parent
from vitrel.common.plain_yaml import load_yaml, read_yaml
from vitrel.common.user_modules import import_modules
from vitrel.train.running.command import run as run_command
from vitrel.train.running.resume_check import values_that_differ
from vitrel.weights.read import read_file

_stopped = threading.Event()  # in a worker process: a signal has ended one of its runs
run = partial(run_command, go_on="the same command resumes from there")


def train_all(runs: dict[Path, dict[str, Any]], jobs: int) -> None:
    """Train every configuration in its folder, `jobs` at a time.

    Finished runs are skipped, and interrupted runs are resumed. With several jobs, the CPU's threads are divided among them,
    and each run's output goes to <folder>/train.log.

    Args:
        runs: {folder: configuration of `vitrel train`}.
        jobs: number of runs at a time.

    Raises:
        ValueError: a folder holds a run of another configuration (`begin`), or training ended early.
    """
    if jobs == 1 or len(runs) == 1:
        for number, (folder, config) in enumerate(runs.items(), 1):
            print(f"[{number}/{len(runs)}] {folder.name}: ", end="", flush=True)
            train_one(config, folder)
        return
    waiting: dict[Path, list[str]] = {}
    for number, (folder, config) in enumerate(runs.items(), 1):
        print(f"[{number}/{len(runs)}] {folder.name}: ", end="", flush=True)
        if arguments := begin(config, folder):
            waiting[folder] = arguments
    if not waiting:
        return
    jobs = min(jobs, len(waiting))
    print(f"{jobs} at a time; their output goes to {next(iter(waiting)).parent}/*/train.log", flush=True)
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker, (threads,)) as pool:
        futures = {pool.submit(_train_quietly, arguments, runs[path], path): path for path, arguments in waiting.items()}
        try:
            for number, done in enumerate(as_completed(futures), 1):
                done.result()
                print(f"{futures[done].name}: trained, {number} of {len(waiting)}", flush=True)
        except BrokenProcessPool as error:
            raise ValueError("a training process was killed, perhaps because memory ran out: use fewer --jobs") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()  # SIGTERM to this process does not reach them; each saves its run and ends
            raise


def _start_worker(threads: int) -> None:
    import_modules()
    torch.set_num_threads(threads)
    # if the parent is killed, this process must end too: the command, started again, would write to the same folders
    threading.Thread(target=end_with_parent, daemon=True).start()


def _train_quietly(arguments: list[str], config: dict[str, Any], folder: Path) -> None:
    if _stopped.is_set():  # the pool hands a worker its next run before the present one ends
        raise ValueError(f"{folder}: training was stopped before it began")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with (folder / "train.log").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            _train(arguments, config, folder)
        except SystemExit as stop:
            if stop.code in (INTERRUPTED, TERMINATED):
                _stopped.set()
            # SystemExit would end the worker process, and with it the pool
            raise ValueError(f"{folder}: training ended with {stop.code!r}; its train.log gives the reason") from stop


def train_one(config: dict[str, Any], folder: Path) -> None:
    """Train one configuration in `folder`, resuming from its last.ckpt; does nothing if the run is finished.

    Raises:
        ValueError: the folder holds a run of another configuration (`begin`), or training stopped early.
    """
    if arguments := begin(config, folder):
        _train(arguments, config, folder)


def _train(arguments: list[str], config: dict[str, Any], folder: Path) -> None:
    run(arguments)
    last, epochs = folder / "checkpoints" / "last.ckpt", config["trainer"]["max_epochs"]
    if not last.exists() or epochs_done(last) < epochs:
        raise ValueError(f"{folder}: training stopped before epoch {epochs}; run the same command again to resume")


def begin(config: dict[str, Any], folder: Path) -> list[str]:
    """Prepare a run: write <folder>/train.yaml, print the state, and return the arguments of `vitrel.train.run`.

    The arguments include the checkpoint to resume from, if there is one. The list is empty, and nothing is written, if the run
    is finished. A new run also writes the SHA-256 of its `init_from` file.

    Raises:
        ValueError: the folder holds a run of another configuration, or one that started from other weights.
    """
    last, settings, epochs = folder / "checkpoints" / "last.ckpt", folder / "train.yaml", config["trainer"]["max_epochs"]
    start, arguments = folder / "init_from.sha256", ["fit", "--config", str(settings)]
    config = load_yaml(yaml.safe_dump(config))  # for the comparison: YAML turns tuples into lists
    if last.exists():
        earlier = (read_yaml(settings) if settings.exists() else None) or {}
        # the parent folder of all runs may have been moved, which changes these paths
        free = ["trainer.default_root_dir", *(["model.tuning.init_from"] if _same_name(earlier, config) else [])]
        values = values_that_differ(earlier, config)
        if differ := [f"{name}: {old!r} then, {new!r} now" for name, old, new in values if name not in free]:
            raise ValueError(
                f"{folder} holds a run of another configuration ({'; '.join(differ)}): "
                "remove that folder to train again, or give the comparison another name"
            )
        if start.exists() and (digest := _init_digest(config)) not in (None, start.read_text("utf-8")):
            raise ValueError(
                f"{folder} was fine-tuned from other weights than {config['model']['tuning']['init_from']} holds now (SHA-256 "
                f"{digest:.8}): remove that folder to train again"
            )
        done = epochs_done(last)
        if done >= epochs:
            print("trained already", flush=True)
            return []
        print(f"resuming after epoch {done} of {epochs}", flush=True)
        arguments += ["--ckpt_path", str(last)]
    else:
        print(f"training for {epochs} epochs", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        if digest := _init_digest(config):
            start.write_text(digest, "utf-8")
    settings.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return arguments


def epochs_done(checkpoint: Path) -> int:
    """Return the number of epochs whose training was complete when a checkpoint was saved; ValueError for a damaged file."""
    remedy = f"remove {checkpoint.parent.parent} to train again"
    try:
        return int(read_file(checkpoint)["vitrel"]["epoch"])
    except ValueError as error:
        raise ValueError(f"{error}, or {remedy}") from error
    except (LookupError, TypeError) as error:
        raise ValueError(f"{checkpoint} is no checkpoint of a training run: {remedy}") from error


def _init_from(config: dict[str, Any]) -> Path | None:
    path = ((config.get("model") or {}).get("tuning") or {}).get("init_from")
    return Path(path) if path else None


def _init_digest(config: dict[str, Any]) -> str | None:
    """SHA-256 of the file that `init_from` names; None without a file."""
    path = _init_from(config)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def _same_name(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether both configurations start from a file with the same last three path components (RUN/checkpoints/FILE)."""
    paths = [_init_from(config) for config in (old, new)]
    return all(paths) and len({path.parts[-3:] for path in paths}) == 1
