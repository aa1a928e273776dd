"""Training on images that are cached in memory: the same batches from any number of loader processes, evaluation untouched."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.runs import read
from vitrel.data import Augmentation, Folder, Reading
from vitrel.train import ImageData, run

HOW = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
EVERYTHING = Augmentation(jitter=0.4, policy="rand-m9-mstd0.5-inc1", erase=0.5, vflip=True)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """12 training and 4 evaluation images of two classes, of 48x64 pixels."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
                coarse.resize((64, 48), Image.BICUBIC).save(root / split / name / f"{i}.png")
    return root


class Module:
    """What `ImageData` asks of the trained module."""

    mixup = None

    @property
    def preprocessing(self):
        return dict(HOW)


class Data:
    """The loaders of `ImageData` outside a run, epoch by epoch."""

    def __init__(self, root, side, on_bad="replace", **how):
        how = {"batch_size": 4, "augment": EVERYTHING, "seed": 5} | how
        self.data = ImageData(str(root), (24, 32), reading=Reading(cached_side=side, on_bad=on_bad), **how)
        epochs, batches = SimpleNamespace(ready=0, processed=0), SimpleNamespace(ready=0)
        inner = SimpleNamespace(batch_progress=SimpleNamespace(current=batches))
        loop = SimpleNamespace(epoch_progress=SimpleNamespace(current=epochs), epoch_loop=inner)
        self.data.trainer = SimpleNamespace(lightning_module=Module(), global_rank=0, world_size=1, fit_loop=loop)
        self.data.setup("fit")

    def train(self, epochs=2):
        loader, found = self.data.train_dataloader(), []
        for epoch in range(epochs):
            self.data.trainer.fit_loop.epoch_progress.current.ready = epoch
            self.data.trainer.fit_loop.epoch_progress.current.processed = epoch
            found += [(images, labels) for images, labels in loader]
        return found

    def evaluation(self):
        return [*self.data.val_dataloader()]


def assert_equal(one, two):
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_any_number_of_loader_processes_gives_the_same_batches(photos):
    alone = Data(photos, 24).train()
    assert len(alone) == 6 and not torch.equal(alone[0][0], alone[3][0])
    for workers in (1, 2):
        assert_equal(Data(photos, 24, workers=workers).train(), alone)


def test_two_trainings_of_one_data_module_are_the_same(photos):
    data = Data(photos, 24)
    first = data.train()
    assert_equal(data.train(), first)  # from memory


@pytest.mark.parametrize("side", [48, 500])
def test_images_that_are_small_enough_make_the_batches_of_before(photos, side):
    assert_equal(Data(photos, side).train(), Data(photos, None).train())


def test_larger_images_make_other_batches_in_the_same_order(photos):
    cached, plain = Data(photos, 24), Data(photos, None)
    pairs = [*zip(cached.train(), plain.train(), strict=True)]
    assert all(torch.equal(a[1], b[1]) for a, b in pairs) and not any(torch.equal(a[0], b[0]) for a, b in pairs)
    assert cached.data.names(1, 2) == plain.data.names(1, 2)


def test_only_the_reduction_differs(photos, tmp_path):
    """The cached images, written to files, are the same training without a cache."""
    cached = Folder(photos, "train", lambda image: image, reading=Reading(cached_side=24))
    for i in range(12):
        path = tmp_path / "train" / ("cat", "dog")[i // 6] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = cached[i][0]
        assert image.shape == (3, 24, 32)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    (tmp_path / "val").symlink_to(photos / "val")
    how = {"train_sizes": [(24, 32), (48, 64)], "repeats": 2, "batch_size": 8}
    assert_equal(Data(photos, 24, **how).train(3), Data(tmp_path, None, **how).train(3))


def test_evaluation_images_are_those_without(photos):
    data = Data(photos, 8)
    assert_equal(data.evaluation(), Data(photos, None).evaluation())
    blurred = data.train(1)[0][0]
    assert blurred.shape == (4, 3, 24, 32)
    plain = [Data(photos, side, augment=None).data.train_set[0][0] for side in (8, None)]
    assert not torch.equal(*plain)  # while training images are reduced, without augmentation too


@pytest.mark.slow
def test_a_run_differs_by_the_reduction_alone(command, tmp_path):
    """Images of 32 pixels: cached as they are, the runs are the same to the last bit; reduced, they are not."""
    flags = ["--data.augment={flip: true, jitter: 0.3}", "--trainer.limit_val_batches=1"]
    run(command("None", *flags, epochs=2))
    plain = read(tmp_path / "None" / "checkpoints" / "last.ckpt")["state_dict"]
    for side in (32, 16):
        done = run(command(f"{side}", *flags, f"--data.reading.cached_side={side}", epochs=2))
        assert not done.datamodule.train_set._cached  # nothing stays in memory from one run to the next
        cached = read(tmp_path / f"{side}" / "checkpoints" / "last.ckpt")["state_dict"]
        assert cached.keys() == plain.keys()
        assert all(torch.equal(cached[name], plain[name]) for name in plain) == (side == 32)
