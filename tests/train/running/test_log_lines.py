import csv

import pytest
from PIL import Image

from helpers import printed_commands
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.train import Classifier, run
from vitrel.train.metrics import CSVLog


@pytest.fixture
def command(tmp_path):
    """Arguments of a run of a second, whatever is given added."""

    def build(*extra):
        return [
            "fit",
            "--model.model=vitrel_vit_n8_table",
            "--model.model_args={depth: 1, embed_dim: 32, num_heads: 2}",
            "--model.optim.warmup_epochs=0",
            "--data.data=shapes",
            "--data.size=32",
            "--data.batch_size=8",
            "--data.n_train=16",
            "--data.n_val=19",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.max_epochs=3",
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
            "--trainer.logger=false",
            "--seed_everything=3",
            *extra,
        ]

    return build


def test_the_printed_command_evaluates_the_images_of_the_run(command, tmp_path, capfd):
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (32, 32), (20 * i, 90, 30)).save(tmp_path / "images" / name / f"{i}.png")
    arguments = [arg for arg in command("--data.n_train=8", "--data.n_val=4") if "enable_progress_bar" not in arg]
    run([*arguments, f"--data.data={tmp_path}/images", "--data.reading={val_fraction: 0.25}", "--trainer.max_epochs=1"])
    [args] = printed_commands(capfd.readouterr().out)
    assert args.val_fraction == 0.25 and not args.follow_links


@pytest.fixture
def stop(monkeypatch):
    """Raises what is given at the start of epoch 1."""

    def at(error):
        def batch(self, batch, batch_idx):
            original(self, batch, batch_idx)
            if self.current_epoch == 1:
                raise error

        patch.setattr(Classifier, "on_train_batch_start", batch)

    original = Classifier.on_train_batch_start
    with monkeypatch.context() as patch:
        at.undo = patch.undo
        yield at


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_says_so(command, tmp_path, capfd):
    for times in range(2):
        run(command("--ckpt_path=auto", f"--trainer.max_epochs={1 + times}"))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]
    assert "run that finished" not in capfd.readouterr().out
    run(command("--ckpt_path=auto", "--trainer.max_epochs=2"))
    assert "run that finished its 2 epochs: raise trainer.max_epochs" in capfd.readouterr().out


SCALED = ["--model.optim.lr=4e-3", "--model.optim.lr_base_size=32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "updates of 8 images (chosen for 16; --batch-size): 1 device, batches of 8, 1 accumulated; learning rate 0.001"),
        ([*SCALED, "--data.batch_size=4", "--trainer.accumulate_grad_batches=2"],
         "batches of 4, 2 accumulated; learning rate 0.001 (0.004 for 32 images, linear scaling)"),
        (["--data.global_batch_size=16", "--data.batch_size=8"],
         "updates of 16 images: 1 device, batches of 8, 2 accumulated; learning rate 0.001"),
    ],
)  # fmt: skip
def test_a_line_says_what_an_update_is(command, capfd, options, line):
    arguments = [
        arg for arg in command("--trainer.max_epochs=1") if "enable_progress_bar" not in arg and "batch_size" not in arg
    ]
    run([*arguments, *options, "--model.optim.warmup_epochs=0"])
    assert f"{line}\n" in capfd.readouterr().out


@pytest.mark.slow
def test_the_output_says_where_a_run_goes_on_and_what_its_folder_stands_for(command, tmp_path, stop, capfd):
    arguments = [arg for arg in command() if "enable_progress_bar" not in arg]
    stop(SystemExit(143))
    with pytest.raises(SystemExit):
        run(arguments)
    stop.undo()
    capfd.readouterr()
    run([*arguments, "--ckpt_path=auto"])
    said = capfd.readouterr().out
    assert f"resumed after update 2, 1 of 3 epochs done: {tmp_path}/checkpoints/last.ckpt" in said
    assert "a run's folder stands for its last.ckpt" in said
    [args] = printed_commands(said)
    assert args.models == [str(tmp_path)] and args.data == "shapes" and (32, 32) in args.size and len(args.size) == 4


def test_several_training_sizes_are_recorded_and_shown(command, tmp_path, capfd):
    arguments = [arg for arg in command("--trainer.max_epochs=1") if "enable_progress_bar" not in arg]
    run([*arguments, "--data.train_sizes=[24, [40, 32]]"])
    said = capfd.readouterr().out
    assert "at 24 and 40x32 px" in said
    [args] = printed_commands(said)
    assert not args.protocols and {(24, 24), (40, 32)} < {*args.size}
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    assert load_checkpoint(checkpoint).train_sizes == ((24, 24), (40, 32))


def written(log):
    with log.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_a_step_are_joined(tmp_path):
    log = CSVLog(tmp_path)
    log.log_metrics({"epoch": 0, "a": 1.0}, 4)
    log.log_metrics({"epoch": 0, "b": 2.0}, 4)
    log.log_metrics({"epoch": 1, "a": 3.0}, 9)
    log.log_metrics({"epoch": 1, "a": 3.0}, 9)  # the rest of an epoch whose evaluation is made up for
    log.save()
    assert written(log) == [
        {"epoch": "0", "step": "4", "a": "1.0", "b": "2.0"},
        {"epoch": "1", "step": "9", "a": "3.0", "b": ""},
    ]


def test_a_resumed_log_goes_on_where_it_is_cut(tmp_path):
    log = CSVLog(tmp_path)
    for step in (4, 9, 14):
        log.log_metrics({"a": float(step)}, step)
    log.save()
    resumed = CSVLog(tmp_path)
    resumed.resume(5)  # updates are done
    resumed.log_metrics({"a": 90.0}, 9)
    resumed.save()
    assert [(row["step"], row["a"]) for row in written(resumed)] == [("4", "4.0"), ("9", "90.0")]
    fresh = CSVLog(tmp_path)
    fresh.log_metrics({"a": 1.0}, 0)
    fresh.save()
    assert len(written(fresh)) == 1
