import pytest
import torch
from torch import nn

from vitrel.evaluate.runner import Runner, out_of_memory, peak_mb, reset_peak

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
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_runner_halves_the_batch_until_it_fits_and_keeps_it(error):
    model = Limited(5, error)
    runner = Runner(model, CPU, batch_size=16)
    pixels = torch.arange(40 * 3.0).view(40, 3, 1, 1)
    assert torch.equal(runner(pixels), pixels.flatten(1))
    assert (runner.batch_size, runner.oom, runner.seen) == (4, 2, 40)
    runner(pixels[:8])
    assert runner.oom == 2 and model.batches[-2:] == [4, 4]
    assert runner.seconds > 0


def test_runner_names_the_way_out_when_one_image_does_not_fit():
    with pytest.raises(MemoryError, match="one image does not fit in memory: use a smaller size"):
        Runner(Limited(0, MemoryError()), CPU, batch_size=8)(torch.zeros(8, 3, 1, 1))


def test_runner_passes_other_errors_on():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Runner(Limited(0, RuntimeError("mat1 and mat2 shapes cannot be multiplied")), CPU, batch_size=8)(
            torch.zeros(8, 3, 1, 1)
        )


def test_a_real_failed_allocation_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.float32)
    assert out_of_memory(caught.value)
    assert not out_of_memory(ValueError("out of memory"))


def test_peak_memory_sees_what_was_allocated():
    reset_peak(CPU)
    before, kind = peak_mb(CPU)
    held = torch.ones(64 * 2**18)
    after, _ = peak_mb(CPU)
    assert after >= before and kind.startswith("process resident")
    if kind == "process resident":
        assert after - before > 32 < held.numel() / 2**18
