"""The steps of `vitrel doctor --gpu`: tuning, benchmarks, and one training on the GPU and on the CPU, in one folder."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from vitrel.common.files import CHECKOUT, atomic_write, shown

SENT = (".csv", ".json", ".jsonl", ".log", ".md", ".png", ".yaml")  # suffixes of the files in the archive; no weights
GRACE = 30.0  # seconds between SIGTERM and SIGKILL for a step whose time is up


class Step(NamedTuple):
    """A step: its name, the longest time in seconds, and the command lines to run in turn. Each command resumes by itself."""

    name: str
    seconds: float
    commands: tuple[tuple[str, ...], ...]


def check_gpu(folder: Path, device: str, quick: bool, information: dict[str, Any]) -> tuple[Path, list[str]]:
    """Run all steps that `folder` does not have yet; return the path of an archive of the results, and what is unfinished.

    A step that fails or takes too long is reported in the summary, and is a line of the returned list; the next call runs it
    again.

    Args:
        device: "cuda", "cuda:1", ...; "cpu" with `quick`, which runs a small form of every step.
        information: as of `vitrel.cli.doctor.examine`.
    """
    folder = folder.resolve()  # the benchmark runs in another directory
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "information.json") as path:
        path.write_text(json.dumps(information, indent=1), encoding="utf-8")
    steps = steps_of(folder, device, quick)
    longest = sum(step.seconds for step in steps) / 60
    print(f"{len(steps)} steps, at most {longest:.0f} min; the same command resumes")
    print(f"results and logs are written to {shown(folder)}")
    settings, stored = {"device": device, "quick": quick}, folder / "steps.json"
    states = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    if states.get("settings", settings) != settings:
        raise ValueError(f"{shown(folder)} has results with other settings, {states['settings']}: give another --out")
    states["settings"] = settings
    for step in steps:
        if states.get(step.name, {}).get("state") == "done":
            print(f"{step.name}: done before")
            continue
        print(f"{step.name}: at most {step.seconds / 60:.0f} min", flush=True)
        states[step.name] = _run(step, folder)
        print(f"{step.name}: {states[step.name]['state']} after {states[step.name]['seconds']:.0f} s", flush=True)
        with atomic_write(stored) as path:
            path.write_text(json.dumps(states, indent=1), encoding="utf-8")
    with atomic_write(folder / "summary.md") as path:
        path.write_text(summary(folder, steps, states, information), encoding="utf-8")
    unfinished = [f"{step.name} {states[step.name]['state']}" for step in steps if states[step.name]["state"] != "done"]
    return _pack(folder), unfinished


def steps_of(folder: Path, device: str, quick: bool) -> list[Step]:
    """Return the steps; those of the benchmark only in a checkout of the repository, which has its suites."""
    command = (sys.executable, "-m", "vitrel")
    small = ("vitrel_vit_n8_table", "vitrel_swin_n", "--size", "64") if quick else ()
    tune = (*command, "tune", *small, "--device", device, "--seconds", "360", "--out", str(folder / "profile.json"))
    steps = [Step("tune", 420, (tune,))]
    if (CHECKOUT / "tools" / "benchmark").is_dir():
        suites = ("cpu",) if device == "cpu" else ("ops", "gpu")
        benchmark = (sys.executable, "-m", "tools.benchmark", "--out", str(folder / "benchmark"))
        limits = ("--quick", "--seconds", "1") if quick else ("--seconds", "240")
        steps.append(Step("benchmarks", 660, tuple((*benchmark, "--suite", suite, *limits) for suite in suites)))
    for name, on, precision in (("quickstart-gpu", device, "bf16-mixed"), ("quickstart-cpu", "cpu", "32-true")):
        config = folder / f"{name}.yaml"
        config.write_text(json.dumps(quickstart(name, on, precision, quick), indent=1), encoding="utf-8")  # JSON is YAML
        steps.append(Step(name, 330, ((*command, "compare", str(config), "--out", str(folder), "--no-report"),)))
    runs = (str(folder / "quickstart-gpu"), str(folder / "quickstart-cpu"))
    return [*steps, Step("comparison", 60, ((*command, "report", *runs, "--out", str(folder)),))]


def quickstart(name: str, device: str, precision: str, quick: bool) -> dict[str, Any]:
    """Return the quickstart's configuration with another name, device and precision.

    Args:
        quick: two models, ten updates.
    """
    from vitrel.cli.options import packaged
    from vitrel.common.plain_yaml import read_yaml

    config = read_yaml(packaged()["quickstart"])
    config["name"], config["evaluate"]["device"] = name, device
    accelerator, _, index = device.partition(":")
    config["train"]["trainer"] |= {"precision": precision, "accelerator": "cpu" if accelerator == "cpu" else "gpu"}
    config["train"]["trainer"] |= {"devices": [int(index)] if index else 1}
    if quick:
        config["models"] = [entry | {"train": {}} for entry in config["models"][1:3]]
        config["train"]["data"] |= {"n_train": 320, "n_val": 48}
        config["evaluate"] |= {"sizes": [64, 96], "protocols": ["canvas"], "policies": None, "skip": []}
        config["evaluate"] |= {"n": 48, "batch_size": 48, "attention_n": 2}
    return config


def summary(folder: Path, steps: list[Step], states: dict[str, Any], information: dict[str, Any]) -> str:
    """Return the text of summary.md: how each step ended, and the quickstart trained on the GPU against that on the CPU."""
    devices = "; ".join(f"{name}: {value}" for name, value in information["devices"].items())
    versions = ", ".join(
        f"{name} {information['versions'].get(name, 'missing')}" for name in ("vitrel", "torch", "timm", "triton")
    )
    lines = ["# vitrel on this GPU", "", devices, "", versions, "", "| step | result | seconds |", "|---|---|---|"]
    for step in steps:
        state = states[step.name]["state"].replace("|", "\\|")
        lines.append(f"| {step.name} | {state} | {states[step.name]['seconds']:.0f} |")
    if not any(step.name == "benchmarks" for step in steps):
        lines += ["", "The benchmark was left out: its suites are in the repository, so run this command in a clone of it."]
    if states["comparison"]["state"] == "done":
        lines += ["", "The quickstart trained on the GPU in bf16 (a) and on the CPU in float32 (b):", ""]
        lines.append((folder / "compare.md").read_text("utf-8"))
    return "\n".join([*lines, ""])


def _run(step: Step, folder: Path) -> dict[str, Any]:
    """Run a step's commands one after another, output to STEP.log; return {"state": "done" or what went wrong, "seconds"}."""
    log, start, state = folder / f"{step.name}.log", time.monotonic(), "done"
    profile = folder / "profile.json"
    environment = os.environ | ({"VITREL_PROFILE": str(profile)} if step.name != "tune" and profile.exists() else {})
    with log.open("ab") as output:
        for command in step.commands:
            process = subprocess.Popen(
                command, cwd=CHECKOUT if "tools.benchmark" in command else None, env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=max(0.0, start + step.seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
                state = "time is up: the same command goes on"
                break
            except BaseException:
                _end(process)
                raise
            if code:
                state = f"failed ({code}): {_last_line(log)}"
                break
    return {"state": state, "seconds": time.monotonic() - start}


def _end(process: subprocess.Popen) -> None:
    """End a process and those that it has started."""
    for number, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=wait)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _pack(folder: Path) -> Path:
    """Write the files of `folder` with a suffix of SENT into an archive beside it, and return its path."""
    archive = folder.with_name(f"{folder.name}.zip")
    with atomic_write(archive) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as target:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in SENT:
                target.write(path, Path(folder.name) / path.relative_to(folder))
    return archive
