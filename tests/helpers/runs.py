"""Helpers for tests of training runs: settings with every random feature, runs in a child process, comparison of runs."""

import csv
import functools
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch

from vitrel.train import Classifier, run

EVERYTHING = (
    "--data.augment={flip: false, erase: 0.2}",
    "--model.mixing.mixup=0.2",
    "--model.mixing.cutmix=1.0",
    "--model.label_smoothing=0.1",
    "--trainer.accumulate_grad_batches=2",
    "--model.ema={decay: 0.9, warmup: true}",
    "--trainer.gradient_clip_val=1.0",
    "--trainer.log_every_n_steps=2",
)


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# columns that differ between equal runs; the means of an epoch in which a run is resumed are those of its rest
MEANS = ("loss", "top1", "pixel_accuracy", "label_accuracy")
MEASURED = {"images_per_s", "data_wait", *(f"train/{name}_epoch" for name in MEANS)}


@functools.cache
def _import_what_runs_import():
    """Otherwise every child would import it again: a second each."""
    for name in ("albumentations", "s3fs", "torch.utils.tensorboard"):
        with suppress(ImportError):
            importlib.import_module(name)


def in_child(args, hook=None, main=run):
    """Start a run (or `main` with the arguments) in a forked process and return its process id."""
    _import_what_runs_import()
    pid = os.fork()
    if pid == 0:
        code = 1
        # What the parent left in cycles is not collected here: some of it, such as a process group of gloo, would wait for
        # threads that only the parent has, for ever or until it crashes.
        gc.freeze()
        # creates PyTorch's thread pool again, which does not survive a fork, while only one thread may use it
        torch.set_num_threads(torch.get_num_threads())
        try:
            if hook is not None:
                hook()
            main(args)
            code = 0
        except SystemExit as stop:
            if isinstance(stop.code, str):  # as the interpreter does
                print(stop.code, file=sys.stderr)
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def status(pid, seconds=600):
    """Wait for a child process and return its exit status; kill it, and fail, if it takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"process {pid} did not end within {seconds} s")
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(done[1])


def environment(rank, port):
    """Return a function that sets what torchrun sets for a process."""

    def install():
        about = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, GROUP_RANK=0, MASTER_PORT=port)
        os.environ |= {name: str(value) for name, value in about.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}

    return install


def on_two(args, *hooks, main=run):
    """Run the command on two ranks and return their exit statuses."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def both(rank):
        def install():
            environment(rank, port)()
            for hook in hooks:
                hook()

        return install

    children = [in_child(args, both(rank), main) for rank in range(2)]
    return [status(child) for child in children]


def at(call, action, hook="on_train_batch_start"):
    """Return a function that makes the `call`-th call of a Classifier method first send a signal (or run a function)."""
    calls = 0

    def install():
        original = getattr(Classifier, hook)

        def patched(self, *args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                action() if callable(action) else os.kill(os.getpid(), action)
            return original(self, *args, **kwargs)

        setattr(Classifier, hook, patched)

    return install


def resumed(args, folder):
    last = folder / "checkpoints" / "last.ckpt"
    return [*args, f"--ckpt_path={last}"] if last.exists() else args


def assert_same_run(a, b):
    """Assert that two finished runs left equal checkpoints (every tensor) and logs."""
    one, two = (read(folder / "checkpoints" / "last.ckpt") for folder in (a, b))
    for key in ("state_dict", "current_model_state"):
        assert one.get(key, {}).keys() == two.get(key, {}).keys()
        assert all(torch.equal(one[key][name], value) for name, value in two.get(key, {}).items()), key
    assert one["vitrel"] | {"data": ""} == two["vitrel"] | {"data": ""}  # the images may have been moved since
    assert one["lr_schedulers"] == two["lr_schedulers"]
    moments = [[state for state in c["optimizer_states"][0]["state"].values()] for c in (one, two)]
    assert all(torch.equal(x[k], y[k]) for x, y in zip(*moments, strict=True) for k in x)
    logs = [[{k: v for k, v in row.items() if k not in MEASURED} for row in rows(f / "metrics.csv")] for f in (a, b)]
    differ = [pair for pair in zip(*logs, strict=False) if pair[0] != pair[1]]
    assert logs[0] == logs[1], f"{len(logs[0])} and {len(logs[1])} lines of metrics.csv; the first that differ: {differ[:2]}"
    assert {path.name for path in (a / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    best = [read(folder / "checkpoints" / "best.ckpt") for folder in (a, b)]
    assert best[0]["vitrel"] | {"data": ""} == best[1]["vitrel"] | {"data": ""}
    assert all(torch.equal(best[0]["state_dict"][name], value) for name, value in best[1]["state_dict"].items())
