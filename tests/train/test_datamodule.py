import multiprocessing
import subprocess
import time
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image

from helpers import each
from vitrel.models.config import preprocessing_of
from vitrel.train.datamodule import ImageData, _outlive_signals, default_batch_size, divided_batch, pair


def test_sizes_are_h_before_w():
    assert pair(64) == (64, 64) and pair((32, 48)) == (32, 48) and pair((1, 100)) == (1, 100)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        pair(0)
    with pytest.raises(ValueError, match=r"^--size 1x101 \(data.size, data.train_sizes\): a side is more than 100 times"):
        pair((1, 101))


def test_counts_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"data.batch_size must be at least 1, not 0"):
        ImageData("shapes", 64, batch_size=0)
    with pytest.raises(ValueError, match=r"data.global_batch_size must be at least 1, not -8"):
        ImageData("shapes", 64, global_batch_size=-8)
    with pytest.raises(ValueError, match="data must be 'shapes', a folder"):
        ImageData(str(tmp_path), 64)


@each(
    ("images", "devices", "size"),
    [
        (1_281_167, 8, 64),
        (3072, 1, 64),
        (3071, 1, 32),
        (1584, 4, 8),
        (25, 1, 8),
        (7, 4, 1),
    ],
)
def test_batches_are_small_where_images_are_few(images, devices, size):
    assert default_batch_size(images, devices) == size


@each(
    ("images", "batch_size", "devices", "even", "divided"),
    [
        (2048, 256, 8, True, (256, 1)),
        (2048, 256, 1, True, (256, 8)),
        (2048, 256, 16, True, (128, 1)),  # more devices than the recipe was made for
        (2048, 256, 3, True, (170, 4)),  # 2,040 images
        (2048, 256, 3, False, (227, 3)),  # 2,043 images
        (2048, 100, 1, True, (64, 32)),
        (2, 64, 1, True, (2, 1)),
    ],
)
def test_a_global_batch_is_divided_between_the_devices_that_exist(images, batch_size, devices, even, divided):
    batch, accumulated = divided_batch(images, batch_size, devices, even)
    assert (batch, accumulated) == divided
    assert batch <= batch_size and 0 <= images - batch * accumulated * devices < accumulated * devices * (1 + even)


@each(("images", "batch_size", "devices", "even"), [(4, 64, 8, False), (8, 64, 8, True), (8, 1, 1, True)])
def test_a_global_batch_that_cannot_be_divided_is_refused(images, batch_size, devices, even):
    with pytest.raises(ValueError, match=f"data.global_batch_size {images} cannot be divided between {devices} devices"):
        divided_batch(images, batch_size, devices, even)


def test_evaluation_crops_images_or_at_native_shape_keeps_them_whole(tmp_path):
    """A picture that is white on the left, which a square crop of its middle does not hold."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        picture = Image.new("RGB", (96, 32))
        picture.paste("white", (0, 0, 16, 32))
        picture.save(tmp_path / split / "a" / "0.png")
    model = timm.create_model("vitrel_vit_n8_none", img_size=32, depth=1)
    module = SimpleNamespace(model=model, preprocessing=preprocessing_of(model), mixup=None)
    for protocol, size, brightest in (("scale", (32, 32), 0), ("native", (16, 56), 255)):
        data = ImageData(str(tmp_path), 32, protocol=protocol, batch_size=1, workers=0)
        data.trainer = SimpleNamespace(lightning_module=module, global_rank=0, world_size=1, accumulate_grad_batches=1)
        data.setup()
        images, _ = next(iter(data.val_dataloader()))
        assert images.shape == (1, 3, *size) and images.dtype == torch.uint8 and images.max() == brightest


def test_training_batches_are_those_of_the_settings():
    """Views of an image next to each other, sizes in turn, in an order by the seed."""
    model, orders = timm.create_model("vitrel_vit_n8_none", img_size=64, depth=1), []
    for seed in (3, 3, 4):
        data = ImageData("shapes", 64, 8, workers=0, n_train=64, n_val=8, train_sizes=[64, 32], repeats=2, seed=seed)
        module = SimpleNamespace(model=model, preprocessing=preprocessing_of(model), mixup=None)
        data.trainer = SimpleNamespace(lightning_module=module, global_rank=0, world_size=1, accumulate_grad_batches=1)
        data.setup()
        orders.append(data.order.batches(0))
    assert orders[0] == orders[1] != orders[2]
    assert {len(batch): {draw.size for draw in batch} for batch in orders[0]} == {8: {(64, 64)}, 32: {(32, 32)}}
    assert all([draw.repeat for draw in batch] == [0, 1] * (len(batch) // 2) for batch in orders[0])


def test_images_for_a_fit_are_without_unreadable_ones(tmp_path):
    for name in ("train/a/0", "train/a/1", "val/a/0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), "white").save(tmp_path / f"{name}.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"damaged")
    preprocessing = preprocessing_of(timm.create_model("vitrel_vit_n8_none", img_size=32, depth=1))
    data = ImageData(str(tmp_path), 32)
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(preprocessing=preprocessing))
    data.train_set = range(2)
    assert len(data.unaugmented(256)) == 1
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"none of the 2 training images .* can be read, such as .*0.png"):
        data.unaugmented(256)


def test_a_loader_process_is_ended_by_its_training_process_alone():
    """SLURM and `timeout` send SIGTERM to every process of a run, which has to save first."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def load():
        _outlive_signals(0)
        ready.set()
        time.sleep(60)

    process = context.Process(target=load, daemon=True)
    process.start()
    assert ready.wait(30)
    subprocess.run(["kill", str(process.pid)], check=True)
    process.join(0.3)
    assert process.is_alive()
    process.terminate()
    process.join(30)
    assert process.exitcode == 0
