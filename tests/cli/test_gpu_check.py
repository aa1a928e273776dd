"""`vitrel doctor --gpu`: its steps in their order, what it resumes, what it does with a step that fails or takes too long."""

import json
import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch

from helpers.runs import in_child, status
from vitrel import cli
from vitrel.cli import gpu_check
from vitrel.cli.gpu_check import Step, check_gpu, quickstart, steps_of

INFORMATION = {"devices": {"cuda:0": "a double"}, "versions": {"vitrel": "0", "torch": "0", "timm": "0"}}


def python(text):
    return (sys.executable, "-c", text)


@pytest.fixture
def steps(monkeypatch):
    """Two steps of which the second fails until a file is there; `comparison` writes its page."""
    made = []

    def small(folder, device, quick):
        counted = f"open({str(folder / 'runs.log')!r}, 'a').write('x')"
        needs = (
            f"import os; print('no such kernel', flush=True); os._exit(0 if os.path.exists({str(folder / 'mended')!r}) else 3)"
        )
        page = f"open({str(folder / 'compare.md')!r}, 'w').write('| A | B |')"
        made[:] = [
            Step("tune", 60, (python(counted),)),
            Step("benchmarks", 60, (python(needs),)),
            Step("comparison", 60, (python(page),)),
        ]
        return made

    monkeypatch.setattr(gpu_check, "steps_of", small)


def test_a_failed_step_is_told_and_run_again_and_others_are_not(tmp_path, steps, capsys):
    folder = tmp_path / "found"
    archive, unfinished = check_gpu(folder, "cuda", False, INFORMATION)
    assert unfinished == ["benchmarks failed (3): no such kernel"]
    summary = (folder / "summary.md").read_text()
    assert "| benchmarks | failed (3): no such kernel |" in summary and "| A | B |" in summary
    (folder / "mended").touch()
    (folder / "last.ckpt").touch()
    assert check_gpu(folder, "cuda", False, INFORMATION) == (archive, [])
    assert "failed" not in (folder / "summary.md").read_text() and "tune: done before" in capsys.readouterr().out
    assert (folder / "runs.log").read_text() == "x"
    names = zipfile.ZipFile(archive).namelist()
    assert "found/summary.md" in names and "found/benchmarks.log" in names and not any(name.endswith(".ckpt") for name in names)
    with pytest.raises(ValueError, match="give another --out"):
        check_gpu(folder, "cuda:1", False, INFORMATION)


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path):
    child = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)'])"
    )
    found = gpu_check._run(Step("tune", 1.0, (python(child), python("raise SystemExit('never')"))), tmp_path)
    assert "time is up" in found["state"] and 1 <= found["seconds"] < gpu_check.GRACE


def test_steps_take_half_an_hour_and_the_last_one_compares_both_trainings(tmp_path, monkeypatch):
    steps = steps_of(tmp_path, "cuda:1", quick=False)
    assert sum(step.seconds for step in steps) <= 30 * 60
    assert [step.name for step in steps] == ["tune", "benchmarks", "quickstart-gpu", "quickstart-cpu", "comparison"]
    on_gpu, on_cpu = (json.loads((tmp_path / f"quickstart-{name}.yaml").read_text()) for name in ("gpu", "cpu"))
    assert on_gpu["train"]["trainer"]["precision"] == "bf16-mixed" and on_gpu["train"]["trainer"]["devices"] == [1]
    assert on_cpu["train"]["trainer"]["accelerator"] == "cpu" and on_cpu["evaluate"]["device"] == "cpu"
    assert on_gpu["models"] == on_cpu["models"] == quickstart("any", "cpu", "32-true", quick=False)["models"]
    monkeypatch.setattr(gpu_check, "CHECKOUT", tmp_path)  # an installed wheel
    assert "benchmarks" not in [step.name for step in steps_of(tmp_path, "cuda", quick=False)]


def test_without_a_gpu_only_the_small_form_runs():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="--quick"):
        cli.main(["doctor", "--gpu"])
    for wrong in (["--quick"], ["--gpu", "--device", "cpu"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["doctor", *wrong])
        assert stop.value.code == 2


class Forked:
    """In place of subprocess.Popen: a vitrel command in a fork, which has nothing to import."""

    def __init__(self, command, env, stdout, **how):
        assert command[:3] == (sys.executable, "-m", "vitrel") and how["start_new_session"]

        def prepare():
            os.environ |= env
            for stream in (1, 2):
                os.dup2(stdout.fileno(), stream)

        self.pid = in_child(list(command[3:]), prepare, cli.main)

    def wait(self, timeout):
        return status(self.pid, timeout)


@pytest.mark.slow
def test_the_small_form_runs_on_a_cpu(tmp_path, monkeypatch):
    """Less than the small form, of each step: one model is tuned, and one trained for two updates."""

    def trained(*given):
        config = quickstart(*given)
        assert len(config["models"]) == 2
        config["models"] = config["models"][:1]
        config["train"]["data"] |= {"n_train": 96, "n_val": 16}
        config["evaluate"] |= {"sizes": [64], "n": 16}
        return config

    def tuned(*given):
        first, *others = steps_of(*given)
        (command,) = first.commands
        assert "vitrel_swin_n" in command
        return [first._replace(commands=(tuple(word for word in command if word != "vitrel_swin_n"),)), *others]

    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
    monkeypatch.setattr(gpu_check, "CHECKOUT", tmp_path)  # without the benchmark, whose small form has a test of its own
    monkeypatch.setattr(gpu_check, "quickstart", trained)
    monkeypatch.setattr(gpu_check, "steps_of", tuned)
    cli.main(["doctor", "--gpu", "--quick", "--device", "cpu", "--out", str(tmp_path / "found")])
    summary = (tmp_path / "found" / "summary.md").read_text()
    assert summary.count("| done |") == 4, summary
    assert "shaw" in summary and (tmp_path / "found.zip").exists()
