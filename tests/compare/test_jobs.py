"""Training several configurations at a time: none outlives the process that started it."""

import os
import signal
import sys
import time

import pytest

from helpers.runs import in_child, status
from vitrel.compare import jobs


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends them")
def test_a_comparison_that_is_killed_leaves_no_training_running(tmp_path, monkeypatch):
    program = tmp_path / "python"  # in place of training
    program.write_text(f"#!/bin/sh\nmkfifo {tmp_path}/end-$5\nexec sleep 100 > {tmp_path}/end-$5\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(jobs, "begin", lambda config, folder: ["fit", folder.name])
    runs = {tmp_path / name: {} for name in "ab"}
    for folder in runs:
        folder.mkdir()
    process, end = in_child(runs, main=lambda given: jobs.train_all(given, 2)), time.monotonic() + 60
    pipes = [tmp_path / f"end-{folder.name}" for folder in runs]
    while not all(pipe.exists() for pipe in pipes) and time.monotonic() < end:
        time.sleep(0.02)
    readers = [os.open(pipe, os.O_RDONLY) for pipe in pipes]  # blocks until `sleep` has it open
    os.kill(process, signal.SIGKILL)
    assert status(process) == -signal.SIGKILL
    assert time.monotonic() < end
    for reader in readers:
        assert os.read(reader, 1) == b""  # the end of the pipe, when its last writer has ended
        os.close(reader)
    assert time.monotonic() < end
