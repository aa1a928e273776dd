"""What a machine lacks is said in one line, and errors of the code keep their traceback."""

import pytest
import torch
from torch.utils.data import DataLoader

from helpers import each
from vitrel.common.exits import reported
from vitrel.common.resources import lacking, out_of_memory, without_traceback


class Faulty:
    """Eight images whose loading fails by `fault` at the fourth."""

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            self.fault()
        return torch.zeros(1)


def full():
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")


def bad():
    raise ValueError("cat/1.png:\n cut off")


def caught(fault):
    with pytest.raises((RuntimeError, ValueError)) as error:
        list(DataLoader(Faulty(fault), num_workers=1))
    return error.value


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
LACKING = [  # tests/train/running/test_faults.py kills one
    NO_ROOM,
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
    ConnectionResetError(104, "Connection reset by peer"),
    RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are"),
]


@each("fault", [full, *LACKING])
def test_what_loading_lacks_is_one_line(fault):
    error = fault if isinstance(fault, Exception) else caught(fault)
    assert lacking(error) and out_of_memory(error) == (fault is NO_ROOM)
    with pytest.raises(SystemExit) as ended, reported():
        raise error
    text = ended.value.code
    assert "\n" not in text and "Traceback" not in text and text.startswith(f"error: {without_traceback(str(error))[:20]}")


def test_an_error_of_a_loader_process_is_told_without_its_traceback():
    error = caught(bad)
    assert "Traceback" in str(error) and not lacking(error)
    with pytest.raises(SystemExit) as ended, reported():
        raise error
    assert ended.value.code == "error: cat/1.png: cut off"


def test_other_errors_stay_what_they_are():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not out_of_memory(error) and not lacking(error)
    with pytest.raises(RuntimeError), reported():
        raise error
