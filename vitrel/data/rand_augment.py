"""Augmentation policies, parsed from timm's config strings, and the strength of every operation at a magnitude.

RandAugment (arXiv 1909.13719), AugMix (arXiv 1912.02781), 3-Augment of DeiT III (arXiv 2204.07118), TrivialAugment
(arXiv 2103.10158). Magnitudes range from 0 to 10, with the meaning of timm's (`timm.data.auto_augment`).
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal

from vitrel.names import nearest

EXAMPLES = {"rand": "rand-m9-mstd0.5-inc1", "augmix": "augmix-m3-w3", "3a": "3a", "trivial": "trivial"}
FIELDS = {
    "rand": {"m": "magnitude", "n": "layers", "p": "prob", "mstd": "std", "mmax": "maximum", "inc": "increasing"},
    "augmix": {"m": "magnitude", "w": "width", "d": "depth", "a": "alpha", "mstd": "std"},
    "3a": {},
    "trivial": {},
}
WHOLE = ("magnitude", "layers", "maximum", "width", "depth", "increasing")


@dataclass(frozen=True)
class Policy:
    """A parsed augmentation policy.

    Args:
        kind: "rand", "augmix", "3a" or "trivial".
        magnitude: mean magnitude of the operations, 0 to `maximum`.
        std: standard deviation of a normally distributed magnitude; infinity means uniform from 0 to `magnitude`.
        maximum: maximum magnitude.
        layers: number of operations in sequence (rand).
        prob: probability of each operation (rand).
        increasing: use operations that all become stronger with the magnitude (rand).
        width, depth: number of chains, and operations per chain, -1 for a random number from 1 to 3 (augmix).
        alpha: parameter of the Dirichlet and Beta distributions of the mixing weights (augmix).
    """

    kind: Literal["rand", "augmix", "3a", "trivial"]
    magnitude: int = 10
    std: float = 0.0
    maximum: int = 10
    layers: int = 2
    prob: float = 0.5
    increasing: bool = False
    width: int = 3
    depth: int = -1
    alpha: float = 1.0

    @property
    def levels(self) -> "dict[str, Level]":
        """The operations of a "rand" or "augmix" policy: {name: function from (magnitude / 10, sign) to its argument}.

        sign: -1 or 1. Not for "3a" and "trivial", which have other operations.
        """
        return AUGMIX if self.kind == "augmix" else RAND_INCREASING if self.increasing else RAND

    def draw(self, rng: random.Random | ModuleType) -> float:
        """Return a random magnitude for one operation, 0 to `maximum`; `rng` is a `random.Random` or the module `random`."""
        magnitude: float = self.magnitude
        if math.isinf(self.std):
            magnitude = rng.uniform(0, magnitude)
        elif self.std:
            magnitude = rng.gauss(magnitude, self.std)
        return max(0.0, min(magnitude, self.maximum))


def parse_policy(text: str) -> Policy:
    """Parse a policy string, e.g. "rand-m9-n2-mstd0.5-inc1", "augmix-m3-w3", "3a" or "trivial".

    Raises:
        ValueError: an unknown policy or part, or a value out of range.
    """
    kind, *parts = str(text).split("-")
    if kind not in EXAMPLES:
        near = nearest(kind, EXAMPLES, 2, 0.3) or EXAMPLES
        raise ValueError(f"unknown augment.policy {text!r}; nearest: {', '.join(EXAMPLES[name] for name in near)}")
    policy = Policy(kind, magnitude=3, std=math.inf) if kind == "augmix" else Policy(kind)
    values = dict(_value(text, kind, part) for part in parts)
    if kind == "rand" and values.get("std", 0) > 100:
        values["std"] = math.inf
    policy = replace(policy, **values)
    if not (0 <= policy.magnitude <= policy.maximum and policy.layers > 0 and 0 <= policy.prob <= 1 and policy.width > 0):
        raise ValueError(
            f"augment.policy {text!r} is out of range: m must be within 0..{policy.maximum} (mmax), n and w at least 1, "
            "p within 0..1"
        )
    if policy.alpha <= 0 or policy.depth == 0:
        raise ValueError(f"augment.policy {text!r} is out of range: a must be positive, d at least 1")
    return policy


def _value(text: str, kind: str, part: str) -> tuple[str, float]:
    """(field of `Policy`, value) of one part of the policy string `text`, e.g. ("magnitude", 9) of "m9"."""
    match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part)
    field = FIELDS[kind].get(match[1]) if match else None
    if field is None:
        parts = ", ".join(FIELDS[kind]) or "none"
        raise ValueError(
            f"augment.policy {text!r}: {kind} has no part {part!r}; its parts: {parts}, each with a number, "
            f"as in {EXAMPLES[kind]!r}"
        )
    if field not in WHOLE:
        return field, float(match[2])
    if "." in match[2]:
        raise ValueError(f"augment.policy {text!r}: {match[1]} must be a whole number, not {match[2]}")
    return field, bool(int(match[2])) if field == "increasing" else int(match[2])


Level = Callable[[float, int], float]  # (magnitude / 10, sign -1 or 1) to the argument of an operation


def _no_argument(x: float, sign: int) -> float:
    return 0.0


def _around_one(x: float, sign: int) -> float:
    return max(0.1, 1 + sign * 0.9 * x)


def _from_a_tenth(x: float, sign: int) -> float:
    return 0.1 + 1.8 * x


# timm's level functions; the arguments are: Rotate, degrees; Posterize, bits kept; Solarize, threshold; SolarizeAdd, grey
# levels added; Color to Sharpness, factor (1 changes nothing); Shear, tangent; Translate, share of the side
RAND_INCREASING: dict[str, Level] = {
    "AutoContrast": _no_argument,
    "Equalize": _no_argument,
    "Invert": _no_argument,
    "Rotate": lambda x, sign: sign * 30 * x,
    "Posterize": lambda x, sign: 4 - int(4 * x),
    "Solarize": lambda x, sign: 256 - min(256, int(256 * x)),
    "SolarizeAdd": lambda x, sign: min(128, int(110 * x)),
    "Color": _around_one,
    "Contrast": _around_one,
    "Brightness": _around_one,
    "Sharpness": _around_one,
    "ShearX": lambda x, sign: sign * 0.3 * x,
    "ShearY": lambda x, sign: sign * 0.3 * x,
    "TranslateX": lambda x, sign: sign * 0.45 * x,
    "TranslateY": lambda x, sign: sign * 0.45 * x,
}
RAND: dict[str, Level] = RAND_INCREASING | {
    "Posterize": lambda x, sign: int(4 * x),
    "Solarize": lambda x, sign: min(256, int(256 * x)),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), _from_a_tenth),
}
AUGMIX: dict[str, Level] = {
    **{name: level for name, level in RAND_INCREASING.items() if name not in ("Invert", "SolarizeAdd")},
    "TranslateX": lambda x, sign: sign * 0.3 * x,
    "TranslateY": lambda x, sign: sign * 0.3 * x,
}
