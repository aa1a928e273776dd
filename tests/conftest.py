"""Every test starts from the same seed, and parallel workers do not fight over cores."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """Tests that fork come first, in every worker: PyTorch does not train in the fork of a process whose autograd engine has
    started threads, as some later tests (of compiled models) make it do.
    """
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "in_child"))
