"""Images are decoded once, shared between processes, and loaded in smaller batches where memory lacks."""

import gc
import weakref

import pytest
from torch.utils.data import DataLoader

from vitrel.data import Reading
from vitrel.evaluate import images

pytestmark = pytest.mark.usefixtures("brief_evaluations")


@pytest.mark.slow
def test_images_are_decoded_once_for_all_models_and_policies(trained, noise, monkeypatch, rows_of):
    models = [trained(f"vitrel_vit_n8_{key}", crop_pct=0.5) for key in ("table", "none")]
    how = {"protocols": ("canvas",), "policies": "all"}
    rows = rows_of(models, [64], **how)
    assert len(rows) == 2 + 4 and noise.decoded == 2 * 12 and {row["crop_pct"] for row in rows} == {0.5}
    assert noise.requested[-1] == {
        "data": "noise", "split": "val", "size": (64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.5,
        "interpolation": "bicubic", "protocol": "canvas", "base_size": (32, 32), "crop_mode": "center", "n": None,
        "seed": 0, "reading": Reading(), "task": "classification",
    }  # fmt: skip
    monkeypatch.setattr(images, "CACHE_BYTES", 0)
    again = rows_of(models, [64], **how)
    assert noise.decoded == 2 * 12 + 6 * 12
    assert [row["nll"] for row in again] == [row["nll"] for row in rows]


def collated(monkeypatch, noise, most, error):
    """Makes more than `most` images in one batch raise `error` where they are collated."""
    sizes = []

    def batch(self, indices):
        sizes.append(len(indices))
        if len(indices) > most:
            raise error
        return [self[index] for index in indices]

    monkeypatch.setattr(noise, "__getitems__", batch, raising=False)
    return sizes


LACKS = [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "error"), [(0, LACKS[0]), (2, LACKS[1])], ids=["here", "in loader processes"])
def test_memory_that_runs_out_while_images_are_loaded_halves_the_batch(trained, noise, monkeypatch, rows_of, workers, error):
    models, one = [trained(f"vitrel_vit_n8_{key}") for key in ("none", "table")[: 1 + (not workers)]], [32]
    alone = rows_of(models, one)
    sizes = collated(monkeypatch, noise, 2, error)
    rows = rows_of(models, one, workers=workers)
    assert workers or sizes == [5] + [2] * 6 + [2] * 6  # kept images are given back: the second model's are loaded again
    assert [(row["batch_size"], row["n"]) for row in rows] == [(2, 12)] * len(models)
    assert [row["top1"] for row in rows] == [row["top1"] for row in alone]
    assert [row["nll"] for row in rows] == pytest.approx([row["nll"] for row in alone], abs=1e-5)


def test_a_loader_that_failed_is_gone_before_the_next_begins(trained, noise, monkeypatch, rows_of):
    """If a process of the next loader collected it, that process would wait for locks that this one held at the fork."""
    failed = []

    class Loader(DataLoader):
        def __iter__(self):
            assert not any(loader() for loader in failed)
            loader = super().__iter__()
            failed.append(weakref.ref(loader))
            return loader

    monkeypatch.setattr("vitrel.evaluate.images.DataLoader", Loader)
    collated(monkeypatch, noise, 2, MemoryError())
    gc.disable()
    try:
        rows_of([trained("vitrel_vit_n8_none")], [32], workers=1)
    finally:
        gc.enable()
    assert len(failed) > 1
