"""Loggers of Lightning and callbacks of a user's own module, named on the command line."""

import functools
import textwrap
import time

import pytest
from lightning.pytorch.loggers import CSVLogger

from helpers.runs import rows
from vitrel.common.user_modules import VARIABLE, import_modules
from vitrel.train import run

pytestmark = pytest.mark.slow

METRICS = ("train/loss_epoch", "val/loss", "val/top1")


def test_weights_and_biases_offline(command, tmp_path):
    pytest.importorskip("wandb")
    options = f"{{class_path: WandbLogger, init_args: {{offline: true, save_dir: {tmp_path}, project: vitrel}}}}"
    done = run([*command("run", epochs=1), f"--trainer.logger={options}"])
    done.trainer.loggers[-1].experiment.finish()
    [record] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    until = time.monotonic() + 30  # a process of wandb's own writes the file
    while not all(name.encode() in record.read_bytes() for name in METRICS):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_mlflow_with_a_local_file_store(command, tmp_path, monkeypatch):
    """From version 3 on MLflow asks for a variable, and without it the run says so in one sentence."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    options = f"{{class_path: MLFlowLogger, init_args: {{experiment_name: flowers, tracking_uri: 'file:{tmp_path}/store'}}}}"
    run([*command("run", epochs=2), f"--trainer.logger={options}"])
    for name in METRICS:
        [path] = (tmp_path / "store").rglob(f"metrics/{name}")
        assert len(path.read_text().splitlines()) == 2


def test_a_logger_that_fails_is_named_in_one_line(command, tmp_path, monkeypatch):
    @functools.wraps(CSVLogger.__init__)  # whose signature tells jsonargparse its options
    def fail(*args, **kwargs):
        raise RuntimeError("no store\nhere")

    monkeypatch.setattr(CSVLogger, "__init__", fail)
    with pytest.raises(ValueError, match=r"^lightning.pytorch.loggers.CSVLogger: no store here$"):
        run([*command("run"), "--trainer.logger={class_path: CSVLogger, init_args: {save_dir: x}}"])


def test_several_loggers_and_a_callback_of_ones_own(command, tmp_path, monkeypatch):
    code = """
        from pathlib import Path
        from lightning.pytorch import Callback
        class Count(Callback):
            def __init__(self, path: str): self.path, self.batches = path, 0
            def on_train_batch_end(self, *_): self.batches += 1
            def on_train_end(self, *_): Path(self.path).write_text(str(self.batches))
        """
    (tmp_path / "my_callbacks.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    import_modules(["my_callbacks"])
    callback = f"{{class_path: my_callbacks.Count, init_args: {{path: {tmp_path}/batches}}}}"
    loggers = ", ".join(
        f"{{class_path: {name}, init_args: {{save_dir: {tmp_path}/logs}}}}" for name in ("CSVLogger", "TensorBoardLogger")
    )
    run([*command("run", epochs=2), f"--trainer.callbacks=[{callback}]", f"--trainer.logger=[{loggers}]"])
    assert (tmp_path / "batches").read_text() == "12"
    assert [*(tmp_path / "logs").rglob("events.out.*")] and not (tmp_path / "run" / "tensorboard").exists()
    [path] = (tmp_path / "logs").rglob("metrics.csv")
    found, ours = rows(path), rows(tmp_path / "run" / "metrics.csv")
    for name in METRICS:
        values = [float(row[name]) for row in found if row[name]]
        assert len(values) == 2 and values == pytest.approx([float(row[name]) for row in ours if row[name]])
