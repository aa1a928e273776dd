"""Training of several configurations, each in its own folder, some at a time; finished runs are skipped."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # of Linux; elsewhere it does nothing

from vitrel.common.plain_yaml import read_yaml
from vitrel.train.running.command import run as run_command
from vitrel.train.running.resume_check import values_that_differ
from vitrel.weights.read import read_file

run = partial(run_command, go_on="the same command resumes from there")
FREE = ("trainer.default_root_dir", "model.tuning.init_from")  # a moved folder changes these paths; weights have a digest


def train_all(runs: Mapping[Path, dict[str, Any]], jobs: int) -> None:
    """Train every configuration in its folder, `jobs` at a time; interrupted runs are resumed, and complete ones skipped.

    What happens to each run is printed. One job runs in this process; of several jobs each is a process with a part of the
    CPU's threads, whose output goes to <folder>/train.log, and all are ended if one fails.

    Args:
        runs: {folder: configuration of `vitrel train`}.
        jobs: number of runs at a time.

    Raises:
        ValueError: a folder holds a run of another configuration (`begin`), or training failed or stopped early.
    """
    waiting: dict[Path, list[str]] = {}
    for number, (folder, config) in enumerate(runs.items(), 1):
        print(f"[{number}/{len(runs)}] {folder.name}: ", end="", flush=True)
        if arguments := begin(config, folder):
            if jobs == 1:
                run(arguments)
                _check_end(config, folder)
            else:
                waiting[folder] = arguments
    if waiting:
        print(f"{jobs} at a time; their output goes to {next(iter(waiting)).parent}/*/train.log", flush=True)
    running: dict[Path, subprocess.Popen] = {}
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // max(1, min(jobs, len(waiting)))))}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                folder = next(iter(waiting))
                command = [sys.executable, "-m", "vitrel", "train", *waiting.pop(folder)]
                # A session of its own: ctrl-c comes to this process alone. If this one is killed, the kernel sends SIGTERM.
                how: dict[str, Any] = dict(start_new_session=True, preexec_fn=partial(_prctl_pr_set_pdeathsig, signal.SIGTERM))
                with (folder / "train.log").open("a") as log:
                    running[folder] = subprocess.Popen(command, env=environment, stdout=log, stderr=log, **how)
            for folder in [folder for folder, process in running.items() if process.poll() is not None]:
                if status := running.pop(folder).returncode:
                    raise ValueError(f"{folder}: training ended with status {status}; its train.log gives the reason")
                _check_end(runs[folder], folder)
                print(f"{folder.name}: trained", flush=True)
            time.sleep(0.1)
    finally:
        for process in running.values():
            process.terminate()  # each saves its run and ends
        for process in running.values():
            process.wait()


def _check_end(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError where the run in `folder` has no checkpoint, or one from before the last epoch."""
    last, epochs = folder / "checkpoints" / "last.ckpt", config["trainer"]["max_epochs"]
    if not last.exists() or epochs_done(last) < epochs:
        raise ValueError(f"{folder}: training stopped before epoch {epochs}; run the same command again to resume")


def begin(config: dict[str, Any], folder: Path) -> list[str]:
    """Write <folder>/train.yaml, print the state of the run, and return the arguments of `vitrel train` to start or resume it.

    For a run that is complete nothing is written and [] is returned. A run without checkpoint is new: init_from.sha256 gets the
    SHA-256 of the weights that it starts from ("" for none). ValueError if a checkpoint is there and the configuration differs
    (FREE settings may), or the file of weights.
    """
    last, settings, epochs = folder / "checkpoints" / "last.ckpt", folder / "train.yaml", config["trainer"]["max_epochs"]
    source, start = Path(config["model"].get("tuning", {}).get("init_from") or ""), folder / "init_from.sha256"
    digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""
    arguments = ["fit", "--config", str(settings)]
    if last.exists():
        values = values_that_differ(read_yaml(settings), config)
        differ = [f"{name}: {old!r} then, {new!r} now" for name, old, new in values if name not in FREE]
        if digest and digest != (start.read_text("utf-8") if start.exists() else ""):
            differ.append(f"other weights in {source}, SHA-256 {digest:.8} now")
        if differ:
            raise ValueError(
                f"{folder} holds a run of another configuration ({'; '.join(differ)}): remove that folder to train again, or "
                "give the comparison another name"
            )
        done = epochs_done(last)
        if done >= epochs:
            print("trained already", flush=True)
            return []
        print(f"resuming after epoch {done} of {epochs}", flush=True)
        arguments += ["--ckpt_path", str(last)]
    else:
        print(f"training to epoch {epochs}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        start.write_text(digest, "utf-8")
    settings.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return arguments


def epochs_done(checkpoint: Path) -> int:
    """Return the number of epochs that were complete when a checkpoint was saved; ValueError if it is not of `vitrel train`."""
    try:
        return int(read_file(checkpoint)["vitrel"]["epoch"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{checkpoint} is no checkpoint of vitrel train: remove its folder to train again") from error
