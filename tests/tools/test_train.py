import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SHORT = [
    "--model.model=vitrel_vit_n8_none",
    "--model.model_args={depth: 1}",
    "--model.optim.warmup_epochs=0",
    "--data.data=shapes",
    "--data.size=64",
    "--data.batch_size=8",
    "--data.n_train=16",
    "--data.n_val=8",
    "--trainer.max_epochs=1",
    "--trainer.accelerator=cpu",
]


def train(*args):
    command = [sys.executable, str(ROOT / "tools" / "train.py"), "fit", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_shapes_from_the_command_line(tmp_path):
    done = train(*SHORT, f"--trainer.default_root_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "best.ckpt").is_file() and (tmp_path / "metrics.csv").is_file()
    assert "images/s" in done.stdout and "top1" in done.stdout


@pytest.mark.slow
def test_a_loss_that_is_not_finite_exits_non_zero(tmp_path):
    done = train(*SHORT, f"--trainer.default_root_dir={tmp_path}", "--model.optim.lr=1e38", "--trainer.max_epochs=3")
    assert done.returncode == 1 and "FloatingPointError: loss is not finite at epoch" in done.stderr


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"trainer": {"max_epoch": 3}}, "does not accept option 'trainer.max_epoch'"),
        ({"model": {"optim": {"warmup": 3}}}, "does not accept option 'model.optim.warmup'"),
        ({"data": {"size": "big"}}, "Given value: big"),
        ({"data": {"seed": 3}}, "leave out data.seed, it follows from seed_everything"),
        ({"model": {"num_classes": 3}}, "leave out model.num_classes, it follows from data.data"),
        ({"seed_everything": True}, "seed_everything is the seed of the run, a number"),
    ],
)
def test_unknown_keys_and_values_are_refused(tmp_path, change, text, capsys):
    from vitrel.train import run

    config = {"model": {"model": "vitrel_vit_n8_none"}, "data": {"data": "shapes", "size": 64}, "trainer": {"max_epochs": 1}}
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as stopped:
        run(["fit", "--config", str(path)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert text in error and len(error.splitlines()) < 25


def test_abbreviated_options_are_refused(capsys):
    from vitrel.train import run

    with pytest.raises(SystemExit):
        run(["fit", *SHORT, "--trainer.max_epoch=3"])
    assert "--trainer.max_epoch=3" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("train_*.yaml")), ids=lambda path: path.name)
def test_example_configs_parse(path, capsys):
    from vitrel.train import run

    with pytest.raises(SystemExit) as stopped:
        run(["fit", "--config", str(path), "--print_config"])
    assert stopped.value.code == 0 and path.read_text().startswith("#")
    assert yaml.safe_load(capsys.readouterr().out)["data"]["size"]
