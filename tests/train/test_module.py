import random

import numpy as np
import pytest
import torch

from vitrel.train import Classifier


class At:
    """Where a run is, for hooks that ask."""

    def __init__(self, epoch, rank=0):
        self.current_epoch, self.global_rank, self.world_size = epoch, rank, 1


@pytest.fixture(scope="module")
def classifier():
    return Classifier("vitrel_vit_n8_table", 4, 32, {"depth": 1})


def draws(classifier, epoch, batch, rank=0):
    classifier._trainer = At(epoch, rank)
    classifier.on_train_batch_start(None, batch)
    classifier._trainer = None
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002


def test_random_state_is_a_function_of_seed_epoch_batch_and_rank(classifier):
    keys = [(epoch, batch, rank) for epoch in range(2) for batch in range(3) for rank in range(2)]
    drawn = [draws(classifier, *key) for key in keys]
    torch.rand(7), random.random()
    assert drawn == [draws(classifier, *key) for key in keys]
    for source in zip(*drawn, strict=True):
        assert len(set(source)) == len(keys)


def test_forward_and_preprocessing(classifier):
    assert classifier(torch.zeros(2, 3, 32, 32)).shape == (2, 4)
    how = classifier.preprocessing
    assert len(how["mean"]) == len(how["std"]) == 3 and 0 < how["crop_pct"] <= 1 and how["interpolation"] == "bicubic"


def test_non_square_sizes():
    classifier = Classifier("vitrel_vit_n8_absolute", 4, (32, 48), {"depth": 1})
    assert classifier(torch.zeros(1, 3, 32, 48)).shape == (1, 4)


def test_cfg_is_overlaid_from_the_arguments():
    classifier = Classifier("vitrel_vit_n8_table", 4, 32, {"depth": 1, "pretrained_cfg_overlay": {"crop_pct": 0.75}})
    assert classifier.preprocessing["crop_pct"] == 0.75
