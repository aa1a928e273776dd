"""Augmentation policies as timm's config strings spell them, parsed once for every library; and what a magnitude means.

RandAugment (arXiv 1909.13719), AugMix (arXiv 1912.02781), 3-Augment of DeiT III (arXiv 2204.07118), TrivialAugment
(arXiv 2103.10158). Magnitudes run from 0 to 10 and mean what they mean in timm (`timm.data.auto_augment`).
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
    """One parsed policy.

    Args:
        kind: "rand", "augmix", "3a" or "trivial".
        magnitude: mean strength of every operation, of 10.
        std: deviation of a normally distributed strength; infinite draws it uniformly from 0 to `magnitude`.
        maximum: largest strength that can be drawn.
        layers: operations in sequence (rand).
        prob: probability of each of them (rand).
        increasing: every operation does more as the magnitude rises (rand).
        width, depth: chains and their length, -1 for 1 to 3 (augmix).
        alpha: of the Dirichlet and Beta distributions of the shares (augmix).
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
        """The operations to draw from, and what a strength means for each."""
        return AUGMIX if self.kind == "augmix" else RAND_INCREASING if self.increasing else RAND

    def draw(self, rng: random.Random | ModuleType) -> float:
        """The strength of one operation, 0 to `maximum`; `rng` is a `random.Random` or the module `random` itself."""
        strength: float = self.magnitude
        if math.isinf(self.std):
            strength = rng.uniform(0, strength)
        elif self.std:
            strength = rng.gauss(strength, self.std)
        return max(0.0, min(strength, self.maximum))


def parse_policy(text: str) -> Policy:
    """The policy of a string such as "rand-m9-n2-mstd0.5-inc1", "augmix-m3-w3", "3a" or "trivial".

    Raises:
        ValueError: an unknown name or part, with the nearest ones; a value out of range.
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
            f"augment.policy {text!r} is out of range: m within 0 and mmax ({policy.maximum}), n and w at least 1, p at most 1"
        )
    if policy.alpha <= 0 or policy.depth == 0:
        raise ValueError(f"augment.policy {text!r} is out of range: a is positive and d at least 1")
    return policy


def _value(text: str, kind: str, part: str) -> tuple[str, float]:
    match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part)
    field = FIELDS[kind].get(match[1]) if match else None
    if field is None:
        known = ", ".join(FIELDS[kind]) or "none"
        raise ValueError(
            f"augment.policy {text!r}: {kind} knows no part {part!r}; its parts: {known}, each with a number, "
            f"as in {EXAMPLES[kind]!r}"
        )
    if field not in WHOLE:
        return field, float(match[2])
    if "." in match[2]:
        raise ValueError(f"augment.policy {text!r}: {match[1]} is a whole number, not {match[2]}")
    return field, bool(int(match[2])) if field == "increasing" else int(match[2])


Level = Callable[[float, int], float]  # of a strength (1 is magnitude 10) and a sign (-1 or 1)


def _nothing(x: float, sign: int) -> float:
    return 0.0


def _around_one(x: float, sign: int) -> float:
    return max(0.1, 1 + sign * 0.9 * x)


def _from_a_tenth(x: float, sign: int) -> float:
    return 0.1 + 1.8 * x


# timm's level functions. Rotate: degrees. Posterize: bits kept. Solarize: threshold. SolarizeAdd: grey levels. Color to
# Sharpness: factor, 1 changes nothing. Shear: tangent. Translate: share of the side.
RAND_INCREASING: dict[str, Level] = {
    "AutoContrast": _nothing,
    "Equalize": _nothing,
    "Invert": _nothing,
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
