"""Position encodings: one class per encoding, one file per class.

POSITIONS is the registry of encodings; `create_position` builds one by its key, or several joined by '+'.
"""

import inspect
from collections.abc import Callable
from functools import cache

import torch

from vitrel.common.names import nearest
from vitrel.grid import Grid
from vitrel.position.absolute import Absolute
from vitrel.position.absolute_factorized import AbsoluteFactorized
from vitrel.position.absolute_windowed import AbsoluteWindowed
from vitrel.position.alibi import Alibi
from vitrel.position.clipped import Clipped
from vitrel.position.cpb import CPB
from vitrel.position.deberta import DeBERTa
from vitrel.position.decomposed import Decomposed
from vitrel.position.factorized import Factorized
from vitrel.position.fire import FIRE
from vitrel.position.fourier import Fourier
from vitrel.position.levit import LeViT
from vitrel.position.log_decay import LogDecay
from vitrel.position.lookhere import LookHere
from vitrel.position.none import NoPosition
from vitrel.position.pape import PaPE
from vitrel.position.perturb import SMALLEST_STRENGTHS
from vitrel.position.rope import RopeAxial, RopeMixed
from vitrel.position.rope_normalized import RopeNormalized
from vitrel.position.shaw import Shaw
from vitrel.position.sincos import SinCos
from vitrel.position.t5 import T5
from vitrel.position.table import OffsetTable
from vitrel.position.terms import Composition, PositionEncoding, Table, Terms, combine, pad_prefix
from vitrel.position.transformer_xl import TransformerXL
from vitrel.position.xpos import XPos

__all__ = [
    "POSITIONS",
    "PositionEncoding",
    "Table",
    "Terms",
    "check_options",
    "combine",
    "create_position",
    "key_of",
    "pad_prefix",
    "select_options",
    "split_position",
]

POSITIONS: dict[str, type[PositionEncoding]] = {
    "none": NoPosition,
    "absolute": Absolute,
    "absolute_factorized": AbsoluteFactorized,
    "absolute_windowed": AbsoluteWindowed,
    "sincos": SinCos,
    "fourier": Fourier,
    "table": OffsetTable,
    "levit": LeViT,
    "factorized": Factorized,
    "clipped": Clipped,
    "t5": T5,
    "cpb": CPB,
    "alibi": Alibi,
    "log_decay": LogDecay,
    "fire": FIRE,
    "shaw": Shaw,
    "decomposed": Decomposed,
    "transformer_xl": TransformerXL,
    "deberta": DeBERTa,
    "rope_axial": RopeAxial,
    "rope_mixed": RopeMixed,
    "rope_normalized": RopeNormalized,
    "xpos": XPos,
    "lookhere": LookHere,
    "pape": PaPE,
}

_UNIVERSAL = {"temperature"}  # option of create_position, for any encoding


def split_position(position: str) -> tuple[str, str]:
    """Return the keys in `position` that add to tokens and those that act in attention ("none" too), each joined by '+', or "".

    >>> split_position("absolute+rope_mixed+table")
    ('absolute', 'rope_mixed+table')

    Raises:
        ValueError: a key is unknown (the message suggests the nearest) or given twice, or two of them rotate.
    """
    keys = _keys(position)
    tokens, attention = ("+".join(k for k in keys if POSITIONS[k].site == site) for site in ("tokens", "attention"))
    return tokens, attention


def create_position(
    position: str,
    grid: Grid | tuple[int, int] | tuple[int, int, int],
    num_heads: int,
    head_dim: int,
    *,
    temperature: str | float = "none",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options,
) -> PositionEncoding:
    """Build a position encoding from its key, or several joined by '+', for training on `grid`.

    Args:
        position: a key of POSITIONS, or several joined by '+'.
        grid: the training grid in tokens, (h, w) or (h, w, prefix) with class and register tokens.
        num_heads: number of heads H of the attention layer.
        head_dim: width D of a head; token embeddings are num_heads * head_dim wide.
        temperature: "log_n" (p = 1/2) or a power p: on a grid of N tokens, all logits but biases are multiplied by
            (log N / log N_train)^p (vitrel.position.log_n). "none": they are not.
        device: of the parameters, as for torch's modules.
        dtype: of the parameters, as for torch's modules.
        options: of the encodings; each goes to every part that has it. `policy` is one policy or several joined by '+', each
            for the parts that have it.

    Returns:
        The encoding, or for several keys a Composition of them.

    Raises:
        TypeError: no part has the option.
        ValueError: a key, size or value is unknown or impossible, or `reference` of rope_axial is combined with a policy.
    """
    check_options(position, options)
    grid, built = Grid(*grid), {}
    if min(grid.h, grid.w, num_heads, head_dim) < 1 or grid.prefix < 0:
        raise ValueError(
            f"position {position!r} needs sides, num_heads and head_dim of at least 1 and a prefix of at least 0, not {grid}, "
            f"num_heads={num_heads}, head_dim={head_dim}"
        )
    for key in _keys(position):
        arguments = select_options(key, options)
        policy = arguments.pop("policy", "")
        build: Callable[..., PositionEncoding] = POSITIONS[key]
        built[key] = build(grid, num_heads, head_dim, device=device, dtype=dtype, **arguments)
        if built[key].grid is None:  # of an encoding that does not need it itself
            built[key].grid = grid
        built[key].switch({"policy": policy})  # the names that it does not have belong to other parts
    for name in options["policy"].split("+") if "policy" in options else ():
        if not any(name in part.policies for part in built.values()):  # the class has it, but not with these options
            raise ValueError(f"position {position!r} takes a reference grid or policy={name!r}, not both: leave one out")
    encoding = next(iter(built.values())) if len(built) == 1 else Composition(built)
    encoding.set_temperature(temperature, grid)
    return encoding


def key_of(encoding: PositionEncoding) -> str:
    """Return the key of an encoding in POSITIONS, or the name of its class if it is not registered."""
    return next((key for key, cls in POSITIONS.items() if cls is type(encoding)), type(encoding).__name__)


def select_options(position: str, options: dict) -> dict:
    """Return the items of `options` whose names an encoding in `position` has, or `temperature`; {} if `position` is ""."""
    taken = _options(position) | _UNIVERSAL if position else ()
    return {name: value for name, value in options.items() if name in taken}


def check_options(position: str, options: dict) -> None:
    """Check that an encoding in `position` has each option (all have `temperature`), and the values named below.

    Raises:
        TypeError: no encoding in `position` has the option.
        ValueError: a key or policy is unknown, an option that must be above 0 is not, shift_coords is below 0, jitter_coords
            or rescale_coords below 1, or one of these infinite.
    """
    taken, parts = _options(position) | _UNIVERSAL, [POSITIONS[key] for key in _keys(position)]
    policies = [policy for part in parts for policy in part.policies]
    positive = {option for part in parts for option in part.positive}
    for name, value in options.items():
        if name not in taken:
            raise TypeError(f"position {position!r} has no option {name!r}; it takes {', '.join(sorted(taken))}")
        if name in positive and value is not None and not value > 0:
            raise ValueError(f"option {name}={value!r} of position {position!r} must be greater than 0")
        if name in SMALLEST_STRENGTHS and value is not None and not SMALLEST_STRENGTHS[name] <= value < float("inf"):
            raise ValueError(f"{position} needs {name} of at least {SMALLEST_STRENGTHS[name]}, or None for none, not {value}")
        if name == "policy" and not {*value.split("+")} <= {*policies}:
            raise ValueError(f"policy {value!r} is unknown to {position!r}; choose one of {', '.join(policies)}")


def _keys(position: str) -> list[str]:
    """Return the keys in `position`; raise ValueError for an unknown or repeated key, and for two rotations."""
    keys = position.split("+")
    for key in keys:
        if key not in POSITIONS:
            near = " or ".join(map(repr, nearest(key, POSITIONS)))
            hint = f"; did you mean {near}?" if near else ""
            raise ValueError(f"unknown position {key!r}{hint} (known: {', '.join(POSITIONS)}; join several with '+')")
    if len(set(keys)) < len(keys):
        raise ValueError(f"position {position!r} names the same encoding twice")
    if sum(POSITIONS[key].rotates for key in keys) > 1:
        raise ValueError(f"position {position!r} rotates twice: choose one of its rope_* keys")
    return keys


def _options(position: str) -> set[str]:
    """Return the names of the options that some encoding in `position` has, without `temperature`, which all have.

    `policy` is among them if an encoding has more than one policy.
    """
    keys = _keys(position)
    common = {"policy"} if any(len(POSITIONS[key].policies) > 1 for key in keys) else set()
    return common.union(*(_keywords(POSITIONS[key]) for key in keys))


@cache
def _keywords(encoding: type[PositionEncoding]) -> set[str]:
    """Return the names of the keyword-only parameters of an encoding's constructor but device and dtype: its options."""
    parameters = inspect.signature(encoding).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"device", "dtype"}
