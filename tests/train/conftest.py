"""Runs of seconds: a two-block ViT on four classes of coloured noise."""

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Steps this small only wait for each other on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Four classes, noise brightened in no, the first, the second or the third channel: 24 to train, 8 to evaluate each."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for label, name in enumerate(("grey", "red", "green", "blue")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                array = rng.integers(0, 100, (32, 32, 3))
                array[..., label - 1 : label] += 120  # nothing for label 0
                Image.fromarray(array.astype(np.uint8)).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture
def command(folder, tmp_path):
    """Arguments of a run of seconds: a two-block ViT on the folder, whatever is given added."""

    def build(name, *extra, epochs=3):
        return [
            "fit",
            "--model.model=vitrel_vit_n8_table",
            "--model.model_args={depth: 2, embed_dim: 32, num_heads: 2, drop_path_rate: 0.2}",
            "--model.optim.warmup_epochs=0.5",
            "--model.optim.lr=3e-3",
            f"--data.data={folder}",
            "--data.size=32",
            "--data.batch_size=16",
            f"--trainer.default_root_dir={tmp_path / name}",
            f"--trainer.max_epochs={epochs}",
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
            "--seed_everything=3",
            *extra,
        ]

    return build


@pytest.fixture(autouse=True)
def no_group_left():
    """A strategy leaves its process group, which would make processes forked later wait for each other."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
