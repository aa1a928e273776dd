"""What the parts share: settings, rows in a folder that another machine can go on with, processes that end at a deadline."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.benchmark.samples import ENDS, ROOT, STAMP, Samples, machine

CODE = tuple(f"vitrel/{name}.py" for name in ("*", "position/*", "ops/*", "ops/backends/*", "layers/*", "models/*"))


@dataclass(frozen=True)
class Setting:
    """What a call of a part is given.

    Args:
        part: its name.
        out: folder of rows and logs.
        until: `time.time()` at which the part has ended.
        small: few and small cases.
        data: folder that `pack` made.
        commit: recorded with the rows.
        arguments: the command line, by which the part starts processes of its own.
    """

    part: str
    out: Path
    until: float
    small: bool
    data: Path | None = None
    commit: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the GPU, or the CPU of a machine without one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def samples(self, code: Sequence[str] = CODE, stamp: Sequence[str] = STAMP) -> Samples:
        """Return the rows of the part; those of other code or another machine count as not measured (see Samples)."""
        stamp = [name for name in stamp if name != "threads"]
        name = f"{self.part}-small.jsonl" if self.small else f"{self.part}.jsonl"
        return Samples(self.out / name, machine(self.device, self.commit, code), stamp)

    def late(self, seconds: float = 0.0) -> bool:
        """Return whether what takes so many seconds would end too late."""
        return time.time() + seconds > self.until


def sync(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def measuring(samples: Samples, **key: str) -> Iterator[None]:
    """Context in which a row is measured: an exception becomes a row "failed", and a GPU that no longer answers an exit.

    The key is in a file meanwhile, so that `run_again` knows which row ended a process.
    """
    now = samples.path.with_suffix(".now")
    now.write_text(json.dumps(key))
    try:
        yield
    except Exception as error:
        refused = isinstance(error, ValueError) and "refuses" in str(error)
        samples.add("refused" if refused else "failed", **key, text=f"{type(error).__name__}: {error}"[:800])
        try:
            sync(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError:
            os._exit(1)
    now.unlink(missing_ok=True)  # other jobs of the part write it too


def known(samples: Samples, kind: str, **key: str) -> bool:
    """Return whether there is a row of this kind and key, or one that says why there is none."""
    return any(samples.has(each, **key) for each in (kind, *ENDS))


class Job(NamedTuple):
    """A process: `python -m tools.gpu PART --job name`, ended after so many seconds, with further environment variables."""

    name: str
    seconds: float = 3600.0
    env: dict[str, str] = {}  # noqa: RUF012


def run(setting: Setting, jobs: Sequence[Job], at_once: int = 1) -> dict[str, int | None]:
    """Run jobs, so many at once, and return their exit statuses; None: it was ended, or not started, because of the time.

    What they print is in `<name>.log` in the folder.
    """
    waiting: deque[Job] = deque(jobs)
    running: dict[str, tuple[subprocess.Popen, float]] = {}
    statuses: dict[str, int | None] = {job.name: None for job in jobs}
    common = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"} | ({"OMP_NUM_THREADS": "1"} if setting.small else {})
    try:
        while running or (waiting and not setting.late()):
            while waiting and len(running) < at_once and not setting.late():
                job = waiting.popleft()
                command = [sys.executable, "-m", "tools.gpu", *setting.arguments, "--job", job.name]
                with (setting.out / f"{setting.part}-{job.name}.log").open("ab") as log:
                    process = subprocess.Popen(
                        [*command, "--until", str(setting.until)], cwd=ROOT, env=common | dict(os.environ) | job.env,
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    )  # fmt: skip
                running[job.name] = process, min(time.time() + job.seconds, setting.until)
            time.sleep(0.1)
            for name, (process, end) in list(running.items()):
                if process.poll() is not None or time.time() > end:
                    statuses[name] = process.poll()
                    del running[name]
                    _end(process)
    finally:
        for process, _ in running.values():
            _end(process)
    return statuses


def run_again(setting: Setting, job: Job, samples: Samples) -> None:
    """Run a job, and again where a crash has ended it: the row that it was at becomes one of kind "failed"."""
    now = samples.path.with_suffix(".now")
    now.unlink(missing_ok=True)
    while not setting.late() and (status := run(setting, [job])[job.name]):
        if now.exists():
            samples.add("failed", **json.loads(now.read_text()), text=f"the process ended with status {status}")
            now.unlink()
        elif status != 1:
            break


def _end(process: subprocess.Popen) -> None:
    """Kill a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def share(items: Sequence[Any], name: str) -> list[Any]:
    """Return the items of a job that is named "...-<i>-<n>": every n-th from the i-th on."""
    i, n = map(int, name.split("-")[-2:])
    return list(items[i::n])
