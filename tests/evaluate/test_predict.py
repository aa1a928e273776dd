"""Forward passes: batches that fit, what is kept of every image, speed, memory, attention."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from helpers import each
from vitrel.common.resources import out_of_memory
from vitrel.evaluate import images
from vitrel.evaluate.predict import ROUNDS, Runner, joined, peak_mb, predict, reset_peak, speeds
from vitrel.inspect.attention import attention_statistics_of, position_shares
from vitrel.tasks import Kept

pytestmark = pytest.mark.usefixtures("brief_evaluations")

CPU = torch.device("cpu")


class Limited(nn.Module):
    """Fails as if memory ran out above `limit` images."""

    def __init__(self, limit: int, error: BaseException) -> None:
        super().__init__()
        self.limit, self.error, self.batches = limit, error, []

    def forward(self, pixels):
        self.batches.append(len(pixels))
        if len(pixels) > self.limit:
            raise self.error
        return pixels.flatten(1)[:, :3]


ERRORS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    RuntimeError("could not create a primitive"),  # oneDNN
    MemoryError(),
]


@each("error", ERRORS)
def test_runner_halves_the_batch_until_it_fits_and_keeps_it(error):
    model = Limited(5, error)
    runner = Runner(model, CPU, batch_size=16)
    pixels = torch.arange(40 * 3.0).view(40, 3, 1, 1)
    assert torch.equal(runner(pixels), pixels.flatten(1))
    assert runner.batch_size == 4
    runner(pixels[:8])
    assert model.batches[-2:] == [4, 4]


def test_runner_names_the_way_out_when_one_image_does_not_fit():
    with pytest.raises(MemoryError, match="one image does not fit in memory: use a smaller size"):
        Runner(Limited(0, MemoryError()), CPU, batch_size=8)(torch.zeros(8, 3, 1, 1))


def test_a_real_failed_allocation_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.float32)
    assert out_of_memory(caught.value)
    assert not out_of_memory(ValueError("out of memory"))


def test_peak_memory_sees_what_was_allocated():
    reset_peak(CPU)
    before = peak_mb(CPU)
    held = torch.ones(64 * 2**18)
    assert peak_mb(CPU) - before > 32 < held.numel() / 2**18


def test_what_is_kept_is_in_the_order_of_the_data_with_zeros_for_what_could_not_be_read():
    batches = [(torch.ones(3, 3, 1, 1) * at, [at, None, 10 * at]) for at in (1, 2)]
    seen = []
    kept = predict(
        Runner(nn.Flatten(), CPU, 2),
        batches,
        [5, 1, 3, 0, 4, 2],
        lambda logits, targets: {"sum": logits.sum(1), "target": targets},
        seen.append,
    )
    assert kept.seen.tolist() == [True, False, True, True, False, True] and seen == [0.5, 0.5]
    assert kept.arrays["sum"].tolist() == [6, 0, 6, 3, 0, 3] and kept.arrays["target"].tolist() == [2, 0, 20, 10, 0, 1]


@each("world", [1, 2, 3])
def test_shares_of_processes_are_joined_by_rank(world):
    n = 7
    whole = Kept({"a": np.arange(1, n + 1)}, np.arange(n) % 3 > 0)
    parts = [Kept({"a": whole.arrays["a"][rank::world]}, whole.seen[rank::world]) for rank in range(world)]
    back = joined(parts)
    assert back.arrays["a"].tolist() == whole.arrays["a"].tolist() and back.seen.tolist() == whole.seen.tolist()
    lost = joined([Kept({}, np.zeros(2, bool)), Kept({"a": np.array([5, 6])}, np.ones(2, bool))])
    assert lost.arrays["a"].tolist() == [0, 5, 0, 6] and lost.seen.tolist() == [False, True, False, True]


def test_the_speeds_of_models_of_a_size_are_measured_in_turn():
    order, most = [], 2

    class Named(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, pixels):
            order.append(self.name)
            if len(pixels) > most:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return pixels.flatten(1)

    models = {name: Named(name) for name in ("a", "b")}
    found = speeds(models, (8, 8), 4, CPU, "float32")
    assert order == ["a", *["a", "b"] * (ROUNDS + 1)]  # the first with a batch that does not fit
    assert found["a"] > 0 and found["b"] > 0
    most = 0
    assert all(map(math.isnan, speeds(models, (8, 8), 4, CPU, "float32").values()))


def test_attention_that_lacks_memory_for_its_images_is_left_empty(trained, monkeypatch, rows_of):
    def lacking(*_):
        raise MemoryError
        yield

    monkeypatch.setattr(images.Images, "items", lacking)
    [row] = rows_of([trained("vitrel_vit_n8_none")], [32], attention_n=2)
    assert row["attention_entropy"] is None and row["n"] == 12


@pytest.mark.slow
def test_attention_is_that_of_the_first_images(trained, noise, rows_of):
    model = trained("vitrel_swin_n", (32, 32))
    [row] = rows_of([model], [32], attention_n=3)
    pixels = torch.stack([noise((32, 32))[i][0] for i in range(3)])
    for name, value in attention_statistics_of(model.model, pixels).items():
        assert row[name] == pytest.approx(value, rel=1e-3), name
    assert row["attention_span"] == pytest.approx(math.exp(row["attention_entropy"]), rel=1e-3)
    assert row["position_share"] == pytest.approx(max(position_shares(model.model, pixels[:1]).values()), abs=1e-4)
    [none] = rows_of([model], [32])
    assert none["position_share"] is None and none["attention_entropy"] is None
