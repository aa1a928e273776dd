"""Doubles of a GPU: what would wait for one, and its autocast."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal", "is_nonzero", "item")


class Unread(TorchDispatchMode):
    """Refuses operators whose result depends on values that have to be fetched from a device."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().removeprefix("aten::").partition(".")[0]
        reads = name.startswith(READS) or (name in ("index", "index_put", "_index_put_impl_") and any(map(is_mask, args[1])))
        assert not reads, f"{name} reads back from the device"
        return operator(*args, **(kwargs or {}))


def is_mask(index):
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@contextlib.contextmanager
def autocast(dtype):
    """torch.autocast("cuda", dtype), which does nothing on a machine without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
