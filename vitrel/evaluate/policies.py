"""Policies of a model at one size: which can be chosen there, and the model with one of them in force.

A policy is written as the `policy` column has it: "none" where none makes a difference; else that of the windows where there
is a choice, then one resize policy of each kind of encodings: "clip", "geometric+keep", "divisor", "rescale+geometric".
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from torch import nn

from vitrel.evaluate.window_policies import WINDOW_POLICIES, window_policies_at, window_policy
from vitrel.grid import Grid
from vitrel.layers import Attention
from vitrel.models.backbone import LARGE, Backbone, choosing
from vitrel.position import PositionEncoding


def policies_at(model: nn.Module, size: tuple[int, int], wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """The policies to try at `size` (h, w) pixels, all or those `wanted`; ("none",) where each reads as trained.

    Encodings that share a policy are switched together; of encodings that share none, all combinations are tried. Where none of
    an encoding's policies is wanted, the one in use is kept; where no window policy is, the window. A model of another library
    has none.
    """
    if not isinstance(model, Backbone):
        return ("none",)
    windows = window_policies_at(model, size)
    if not windows:
        return _resize_policies_at(model, size, wanted)
    found = []
    for window in [name for name in windows if wanted is None or name in wanted] or windows[:1]:
        with window_policy(model, window, size):
            found += [join_policy(window, policy) for policy in _resize_policies_at(model, size, wanted)]
    return tuple(found)


def policies_of(model: nn.Module) -> tuple[str, ...]:
    """All policies that a model may be asked for at some size, those of windows first; none of another library's model."""
    if not isinstance(model, Backbone):
        return ()
    if not any(isinstance(part, Attention) and part.window is not None for part in model.modules()):
        return model.resize_policies
    parts = (part for part in model.modules() if isinstance(part, PositionEncoding))
    return tuple(dict.fromkeys((*WINDOW_POLICIES, *(policy for part in parts for policy in part.policies))))


@contextlib.contextmanager
def in_force(model: nn.Module, policy: str, size: tuple[int, int]) -> Iterator[None]:
    """The model with `policy`, one that `policies_at(model, size)` lists, in force; afterwards its own are back."""
    window, _, rest = policy.partition("+")
    if window_policies_at(model, size) and window in WINDOW_POLICIES:
        with window_policy(model, window, size), resize_policy(model, rest or "none"):
            yield
    else:
        with resize_policy(model, policy):
            yield


@contextlib.contextmanager
def resize_policy(model: nn.Module, policy: str) -> Iterator[None]:
    """The model with resize policies such as "geometric+keep", or "none", in force; afterwards its own are back."""
    before = [(part, part.resize) for part in model.modules() if isinstance(part, PositionEncoding) and part.policies]
    try:
        for name in policy.split("+") if policy != "none" else ():
            model.set_resize_policy(name)
        yield
    finally:
        for part, own in before:
            part.resize = own


def join_policy(window: str, resize: str) -> str:
    """("rescale", "geometric") -> "rescale+geometric", ("divisor", "none") -> "divisor"."""
    return window if resize == "none" else f"{window}+{resize}"


def policy_parts(policies: Iterable[str]) -> dict[str, frozenset[str]]:
    """What each of a model's policies consists of, {} for "none"; a window policy as "window keep", since encodings may have
    a policy "keep" too.
    """
    split = {policy: policy.split("+") for policy in policies}
    windowed = any(names[0] in ("divisor", "rescale") for names in split.values())
    for names in split.values():
        if windowed and names[0] in WINDOW_POLICIES:
            names[0] = f"window {names[0]}"
    return {policy: frozenset(names) - {"none"} for policy, names in split.items()}


def _resize_policies_at(model: Backbone, size: tuple[int, int], wanted: Sequence[str] | None) -> tuple[str, ...]:
    here = [part.policies for part, grid in choosing(model, size) if _matters(part, grid)]
    options = []
    for group in _groups(model):
        if any(set(group) & set(policies) for policies in here):
            chosen = [policy for policy in group if wanted is None or policy in wanted]
            options.append(chosen or [next(part.resize for part, _ in choosing(model, size) if part.resize in group)])
    return tuple("+".join(names) for names in product(*options)) if options else ("none",)


def _groups(model: Backbone) -> list[tuple[str, ...]]:
    """Policies of the encodings that can meet another grid; those that share a name form one group."""
    groups: list[tuple[str, ...]] = []
    for policies in dict.fromkeys(part.policies for part, grid in choosing(model, LARGE) if _matters(part, grid)):
        near = [group for group in groups if set(group) & set(policies)]
        merged = tuple(dict.fromkeys(name for group in (*near, policies) for name in group))
        groups = [group for group in groups if group not in near] + [merged]
    return groups


def _matters(part: PositionEncoding, grid: Grid) -> bool:
    """Whether some policy reads `part` on `grid` other than as it was trained."""
    other = copy.copy(part)  # shares the parameters; the model's own policy stays
    rules = []
    for policy in part.policies:
        other.resize = policy
        rules.append(other.resized(grid))
    return any(rules)
