"""What a run prints and writes into its log; printed commands can be pasted into a shell."""

from pathlib import Path

import pytest
from PIL import Image

from helpers import each, printed_commands
from helpers.runs import rows
from vitrel.common.sizes import Budget
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.train import Classifier, run
from vitrel.train.metrics import CSVLog
from vitrel.train.running.progress import evaluate_line


@pytest.fixture
def printing(command, tmp_path):
    """printing(*extra, epochs=1): arguments of a run on drawn images, in tmp_path / "run", that prints its lines."""

    def build(*extra, epochs=1):
        drawn = "--data.data=shapes", "--data.n_train=16", "--data.n_val=19", "--model.optim.warmup_epochs=0"
        more = "--model.optim.lr=1e-3", "--trainer.logger=false", "--trainer.enable_progress_bar=true"
        args = [arg for arg in command("run", epochs=epochs) if not arg.startswith("--data.batch_size")]
        return [*args, *drawn, *more, *extra]

    return build


@pytest.mark.slow
def test_lines_of_a_run_of_a_folder_with_a_share_for_evaluation(printing, tmp_path, capfd):
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (32, 32), (20 * i, 90, 30)).save(tmp_path / "images" / name / f"{i}.png")
    folder = f"--data.data={tmp_path}/images", "--data.reading={val_fraction: 0.25}"
    run(printing(*folder, "--data.n_val=4"))
    said = capfd.readouterr().out
    assert (
        "updates of 8 images (chosen for 16; --batch-size): 1 device, batches of 8, 1 accumulated; learning rate 0.001\n"
        in said
    )
    [args] = printed_commands(said)
    assert args.val_fraction == 0.25 and not args.follow_links


@pytest.mark.slow
def test_lines_of_a_run_of_several_sizes_and_a_scaled_rate(printing, tmp_path, capfd):
    scaled = "--model.optim.lr=4e-3", "--model.optim.lr_base_size=32", "--data.batch_size=4"
    run(printing(*scaled, "--trainer.accumulate_grad_batches=2", "--data.train_sizes=[24, [40, 32]]"))
    said = capfd.readouterr().out
    assert "batches of 4, 2 accumulated; learning rate 0.001 (0.004 for 32 images, linear scaling)\n" in said
    assert "at 24 and 40x32 px" in said
    [args] = printed_commands(said)
    assert not args.protocols and {(24, 24), (40, 32)} < {*args.size}
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt").train_sizes == ((24, 24), (40, 32))


@pytest.mark.slow
def test_lines_of_a_run_that_goes_on_and_of_one_that_has_finished(printing, tmp_path, monkeypatch, capfd):
    def stop(self, batch, batch_idx):
        original(self, batch, batch_idx)
        if self.current_epoch == 1:
            raise SystemExit(143)

    original = Classifier.on_train_batch_start
    args = printing("--data.global_batch_size=16", "--data.batch_size=8", "--ckpt_path=auto", epochs=2)
    monkeypatch.setattr(Classifier, "on_train_batch_start", stop)
    with pytest.raises(SystemExit):
        run(args)
    monkeypatch.undo()
    said, last = capfd.readouterr().out, tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert "updates of 16 images: 1 device, batches of 8, 2 accumulated; learning rate 0.001\n" in said
    run(args)
    said = capfd.readouterr().out
    assert f"resumed after update 1, 1 of 2 epochs done: {last}" in said and "run that finished" not in said
    assert "a run's folder stands for its last.ckpt" in said
    [parsed] = printed_commands(said)
    assert parsed.models == [f"{tmp_path}/run"] and parsed.data == "shapes"
    assert (32, 32) in parsed.size and len(parsed.size) == 4
    assert [row["epoch"] for row in rows(tmp_path / "run" / "metrics.csv")] == ["0", "1"]
    run(args)
    assert "run that finished its 2 epochs: raise trainer.max_epochs" in capfd.readouterr().out


@each(
    ("trained", "protocols", "expected"),
    [
        ([(224, 224)], [], [(112, 112), (224, 224), (336, 336), (448, 448)]),
        ([(1, 3)], [], [(1, 2), (1, 3), (2, 4), (2, 6)]),
        ([(96, 96), (48, 48), (64, 96)], [], [(24, 24), (48, 48), (64, 96), (96, 96), (144, 144), (192, 192)]),
        ([Budget(100), Budget(36)], ["native"], [Budget(9), Budget(36), Budget(100), Budget(225), Budget(400)]),
    ],
)
def test_an_evaluation_with_real_values(trained, protocols, expected):
    folder, data = Path("my runs/it's a"), "data $HOME/a;b"
    [args] = printed_commands(evaluate_line(folder, data, trained, folder / "evaluation"))
    assert args.protocols == protocols and args.models == [str(folder)] and args.data == data and args.size == expected
    assert args.out == folder / "evaluation"


def test_rows_of_a_step_are_joined(tmp_path):
    log = CSVLog(tmp_path)
    log.log_metrics({"epoch": 0, "a": 1.0}, 4)
    log.log_metrics({"epoch": 0, "b": 2.0}, 4)
    log.log_metrics({"epoch": 1, "a": 3.0}, 9)
    log.log_metrics({"epoch": 1, "a": 3.0}, 9)  # the rest of an epoch whose evaluation is made up for
    log.save()
    assert rows(log.path) == [
        {"epoch": "0", "step": "4", "a": "1.0", "b": "2.0"},
        {"epoch": "1", "step": "9", "a": "3.0", "b": ""},
    ]
    other = CSVLog(tmp_path)  # of a run that replaces this one
    other.log_metrics({"a": 1.0}, 0)
    other.save()
    assert len(rows(other.path)) == 1
