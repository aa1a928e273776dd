"""Warnings to users."""

import warnings

import torch.distributed as dist

_warnings: set[str] = set()  # given by this process


def warn_once(text: str) -> None:
    """Give a UserWarning, but each text once per process at most, and only on rank 0 of a distributed run."""
    if text in _warnings or (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        return
    _warnings.add(text)
    warnings.warn(text, stacklevel=3)
