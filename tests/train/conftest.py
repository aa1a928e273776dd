"""Runs of seconds: a two-block ViT on four classes of colored noise."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from vitrel.train import run


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Steps this small only wait for each other on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def colors(root, train, val, sizes):
    """Four classes, noise brightened in no, the first, the second or the third channel, images of `sizes` in turn."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(("gray", "red", "green", "blue")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                array = rng.integers(0, 100, (*sizes[i % len(sizes)], 3))
                array[..., label - 1 : label] += 120  # nothing for label 0
                Image.fromarray(array.astype(np.uint8)).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Images of one size."""
    return colors(tmp_path_factory.mktemp("colors"), 24, 8, [(32, 32)])


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory):
    """Images of several aspect ratios, in number no multiple of a batch."""
    return colors(tmp_path_factory.mktemp("native"), 23, 7, [(32, 32), (24, 48), (50, 20), (30, 40)])


@pytest.fixture(scope="session")
def town(tmp_path_factory):
    """Fields with houses and lakes; a border of two pixels has no class."""
    colors_of = np.array([[40, 40, 40], [230, 30, 30], [30, 30, 230]], np.uint8)
    root, rng = tmp_path_factory.mktemp("town"), np.random.default_rng(0)
    for split, n in (("train", 24), ("val", 7)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(n):
            h, w = [(40, 56), (48, 40)][i % 2]
            mask = np.zeros((h, w), np.uint8)
            for value in (1, 2, 1):
                y, x = rng.integers(0, h - 16), rng.integers(0, w - 16)
                mask[y : y + 16, x : x + 16] = value
            Image.fromarray(colors_of[mask]).save(root / "images" / split / f"{i}.png")
            mask[:2] = 255
            Image.fromarray(mask).save(root / "masks" / split / f"{i}.png")
    (root / "classes.txt").write_text("field\nhouse\nlake\n")
    return root


@pytest.fixture(scope="session")
def command_in(folder):
    """command_in(parent): arguments of a run of seconds in a folder of `parent`: a two-block ViT on four classes, and what is
    given.
    """

    def build(parent, name, *extra, epochs=3):
        return [
            "fit",
            "--model.model=vitrel_vit_n8_table",
            "--model.model_args={depth: 2, embed_dim: 32, num_heads: 2, drop_path_rate: 0.2}",
            "--model.optim.warmup_epochs=0.5",
            "--model.optim.lr=3e-3",
            f"--data.data={folder}",
            "--data.size=32",
            "--data.batch_size=16",
            f"--trainer.default_root_dir={parent / name}",
            f"--trainer.max_epochs={epochs}",
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
            "--seed_everything=3",
            *extra,
        ]

    return lambda parent: partial(build, parent)


@pytest.fixture
def command(command_in, tmp_path):
    """command(name, *extra, epochs=3): arguments of a run in tmp_path / name."""
    return command_in(tmp_path)


@pytest.fixture(scope="session")
def whole(command_in, tmp_path_factory):
    """whole(*extra, epochs=3): the folder of an uninterrupted run, made once for all tests that compare with it."""
    made = {}

    def folder_of(*extra, epochs=3):
        if (extra, epochs) not in made:
            parent = tmp_path_factory.mktemp("whole")
            run(command_in(parent)("run", *extra, epochs=epochs))
            made[extra, epochs] = parent / "run"
        return made[extra, epochs]

    return folder_of


@pytest.fixture(autouse=True)
def no_group_left():
    """A strategy leaves its process group, which would make processes forked later wait for each other."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
