"""Every test starts from the same seed, and parallel workers do not fight over cores."""

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; subprocesses inherit them
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import pytest
import torch
from torch.utils.data import _utils, dataloader

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# A loader looks every 0.5 s, not every 5, whether its processes live, and waits as long for them to end: tests kill some and
# leave others in the middle of an epoch.
for _module in (_utils, _utils.worker):
    _module.MP_STATUS_CHECK_INTERVAL = 0.5
dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.5,)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """What a module imported and left in caches need not be looked through at each collection of the modules after it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def brief_evaluations():
    """Evaluations leave out what takes most of a small one: the report is an empty file, and a forward pass costs 1 GFLOP."""

    def empty(folder, *given):
        (folder / "report.html").touch()
        return folder / "report.html"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrel.evaluate.run.write", empty)
        patch.setattr("vitrel.evaluate.policies.gflops", lambda model, size: 1.0)
        yield


@pytest.hookimpl(trylast=True)  # after the selection by -m
def pytest_collection_modifyitems(items):
    """Every worker begins with its share of the modules that fork; then come the longest, so that none is left with one.

    PyTorch does not train in the fork of a process whose autograd engine has started threads, as some later tests (of compiled
    models) make it do. xdist gives each worker one stretch of the list, and an idle one takes from the end of another's. A
    module stays on one worker where it can, since each worker that has a part of it sets up its fixtures anew.
    """

    def seconds(module):
        markers = [item.get_closest_marker("slow") for item in module]
        return sum(marker.kwargs.get("seconds", 1) for marker in markers if marker)

    def forks(module):
        return hasattr(getattr(module[0], "module", None), "in_child")

    modules = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    modules = sorted(modules.values(), key=lambda module: (not forks(module), -seconds(module)))
    stretches = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))]
    for module in modules:
        min(stretches, key=len).extend(module)
    items[:] = [item for stretch in stretches for item in stretch]


def pytest_collection_finish():
    """What is imported by now stays, so that the garbage collector need not look through it again (7 % of the time)."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """What is left is not collected, which pytest would do five times in order to warn of errors of finalizers: seconds."""
    gc.freeze()
