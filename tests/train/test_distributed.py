"""Two processes over gloo: the same training and evaluation as one process at the same images per update."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from helpers.runs import EVERYTHING, MEASURED, assert_same_run, at, in_child, on_two, read, resumed, rows, status
from vitrel.data import create_dataset
from vitrel.train.batch_order import EpochOrder

pytestmark = pytest.mark.slow
# Without drop path, whose draws per rank would differ.
PLAIN = ("--model.model_args={depth: 2, embed_dim: 32, num_heads: 2}", "--model.ema={decay: 0.9}")
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=8")


def test_the_same_as_one_process(command, whole, native_folder, tmp_path):
    """At native shape and the same images per batch: two processes until the middle of the second epoch, then one.

    Evaluation is of 27 images: what fills the batches of one process would show in the means. The learning rate is for the
    images of both.
    """
    plain = *PLAIN, "--data.protocol=native", f"--data.data={native_folder}", "--data.n_val=27", "--model.optim.lr_base_size=16"
    assert on_two(command("two", *plain, *TWO, epochs=2), at(9, signal.SIGTERM)) == [143, 143]
    args = resumed(command("two", *plain, epochs=2), tmp_path / "two")
    assert status(in_child([*args, "--data.batch_size=8"])) == 1
    assert status(in_child(args)) == 0
    folders = whole(*plain, epochs=2), tmp_path / "two"
    one, two = (rows(folder / "metrics.csv") for folder in folders)
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for a, b in zip(one, two, strict=True):
        for key in ("lr-AdamW/decayed", "train/loss_epoch", "train/top1_epoch", "val/loss", "val/top1"):
            assert (a[key] == "") == (b[key] == "")
            if a[key] and not (key in MEASURED and a["epoch"] == "1"):
                assert float(a[key]) == pytest.approx(float(b[key]), abs=1e-4), key
    a, b = (read(folder / "checkpoints" / "last.ckpt") for folder in folders)
    assert a["vitrel"]["step"] == b["vitrel"]["step"]
    for kind in ("state_dict", "current_model_state"):  # the average, and the weights
        for key, value in a[kind].items():
            torch.testing.assert_close(b[kind][key], value, atol=1e-4, rtol=0)  # sums in another order, 12 updates


def on_rank(rank, *args):
    """A hook as `at`, on one rank alone."""

    def install():
        if os.environ["RANK"] == str(rank):
            at(*args)()

    return install


def test_a_run_goes_on_as_if_nothing_had_stopped_it(command, tmp_path, capfd):
    """Ctrl-c at one rank stops both; then rank 0, which writes the checkpoints, is killed, and the other fails."""
    assert on_two(command("whole", *TWO, *EVERYTHING, epochs=1)) == [0, 0]
    args = command("cut", *TWO, *EVERYTHING, "--run.save_every=1", epochs=1)

    def tell():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        on_rank(1, 2, signal.SIGINT)()

    assert on_two(args, tell) == [130, 130]
    assert capfd.readouterr().out.count(f"ctrl-c: saved {tmp_path}/cut/checkpoints/last.ckpt (update 1)") == 1
    assert on_two(resumed(args, tmp_path / "cut"), on_rank(0, 3, signal.SIGKILL)) == [-signal.SIGKILL, 1]
    assert on_two(resumed(args, tmp_path / "cut")) == [0, 0]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert read(tmp_path / "cut" / "checkpoints" / "last.ckpt")["vitrel"]["step"] == 3  # of 16 images, accumulated twice


def test_an_error_of_one_rank_is_told_by_it(command, capfd):
    def fail():
        raise ValueError("a bad image")

    assert on_two(command("run", *TWO), on_rank(1, 2, fail, "training_step")) == [1, 1]
    assert "ValueError: a bad image" in capfd.readouterr().err


def test_a_rank_without_any_readable_image_does_not_stop_the_other(command, folder, tmp_path, capfd):
    """Unreadable images of both are counted."""
    shutil.copytree(folder, tmp_path / "images")
    images = create_dataset(str(tmp_path / "images"), "train", (32, 32), mean=(0.0,) * 3, std=(1.0,) * 3, n=16, seed=3)
    orders = [EpochOrder(16, 8, (32, 32), rank=rank, world=2, seed=3).batches(0)[0] for rank in range(2)]
    bad = [images.name(draw.index) for draw in [*orders[1], orders[0][0]]]
    for name in bad:
        Path(name).write_bytes(b"no image")
    args = f"--data.data={tmp_path / 'images'}", "--data.n_train=16", "--data.reading.bad_share=0.9"
    assert on_two(command("run", *TWO, *args, epochs=1)) == [0, 0]
    [loss] = [float(row["train/loss_epoch"]) for row in rows(tmp_path / "run" / "metrics.csv") if row["train/loss_epoch"]]
    assert 0 < loss < 10  # of the images of rank 0
    listed = (tmp_path / "run" / "bad_images.csv").read_text().splitlines()[1:]
    assert sorted(listed) == sorted(bad) and "9 of 16 training images" in capfd.readouterr().out
