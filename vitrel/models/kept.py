"""What an optimized model keeps: terms and what was expanded from them, once per grid and version of the weights."""

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position import PositionEncoding, Terms

_GRIDS = 2  # kept for each block, the last ones used


class Kept(dict):
    """What has been computed, by grid, the last used last; copies and files of a model begin without."""

    def __deepcopy__(self, memo: dict) -> "Kept":
        return Kept()

    def __reduce__(self) -> tuple:
        return Kept, ()

    def get_or_make(self, key: Any, most: int, make: Callable[[], Any], valid: Callable[[Any], bool] = lambda _: True) -> Any:
        """What is kept under a key if it is valid, else what is made, of which the `most` last used are kept."""
        found = self.pop(key, None)
        if found is None or not valid(found):
            found = make()
        self[key] = found
        while len(self) > most:
            del self[next(iter(self))]
        return found


class KeptTerms(Terms):
    """Terms, and what blocks have expanded from them."""

    expanded: Kept | None = None


class KeptPosition:
    """In place of the forward of an encoding, whose class stays, for the package tells encodings by their classes."""

    def __init__(self, encoding: PositionEncoding):
        self.encoding, self.kept = encoding, Kept()

    def __call__(self, grid: Grid) -> Terms:
        """See PositionEncoding.forward; once per grid and version of the parameters."""
        if elsewhere() or any(type(n) is not int for n in grid) or watched(self.encoding):
            return self._compute(grid)
        if self.encoding.training or torch.is_grad_enabled():
            self.kept.clear()  # an update may follow, and those of fused optimizers leave the version as it is
            return self._compute(grid)
        now = _stamp(self.encoding)
        if any(x.device.type != "cpu" for x, _, _ in now[0]):
            return self._compute(grid)
        return self.kept.get_or_make(grid, _GRIDS, lambda: self._make(grid, now), lambda found: _same(found[0], now))[1]

    def _compute(self, grid: Grid) -> Terms:
        return type(self.encoding).forward(self.encoding, grid)

    def _make(self, grid: Grid, now: tuple) -> tuple[tuple, Terms]:
        terms = KeptTerms(*self._compute(grid))
        terms.expanded = Kept()
        return now, terms


def elsewhere() -> bool:
    """Whether operators are recorded, transformed or cast here, rather than computed."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def watched(module: nn.Module) -> bool:
    """Whether anyone looks at the parts of a module, or has replaced their forward."""
    everywhere = torch.nn.modules.module
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks) or any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or type(vars(part).get("forward")) not in (NoneType, KeptPosition)
        for part in module.modules()
    )


def _stamp(position: PositionEncoding) -> tuple:
    """What terms depend on beside the grid: parameters and buffers with their versions, and the options."""
    tensors = [*position.parameters(), *position.buffers()]
    options = [
        (name, value)
        for part in position.modules()
        for name, value in vars(part).items()
        if isinstance(value, str | int | float | tuple | NoneType) and not name.startswith("_")
    ]
    # The alias keeps the memory from being given to another tensor, whose address and version could be the same.
    return [(x, x.detach(), None if x.is_inference() else x._version) for x in tensors], options


def _same(old: tuple, new: tuple) -> bool:
    pairs = zip(old[0], new[0], strict=False)
    unchanged = all(
        a is b and alias.data_ptr() == other.data_ptr() and version == count for (a, alias, version), (b, other, count) in pairs
    )
    return unchanged and len(old[0]) == len(new[0]) and old[1] == new[1]
