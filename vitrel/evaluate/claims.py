"""Claims about an evaluation, written down before it runs and judged by its rows: they hold, are not shown, or do not hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vitrel.evaluate.metrics import Z95, t_interval
from vitrel.evaluate.settings import Row
from vitrel.sizes import format_size, parse_size


@dataclass(frozen=True)
class Claim:
    """Each of `better` has a higher top-1 than each of `than` at `img_size` ("128" or "64x96", pixels) and `protocol`.

    better, than: labels, with a policy "label/policy", or "label" for the first in the rows; `than` may be a number, percent.
    shift: under a shift of the images' content by so many pixels (translation.csv) instead of as they are.
    learned: labels below this top-1 at the training size are left out, and said so: what was not learned cannot transfer.
    """

    text: str
    better: tuple[str, ...]
    than: tuple[str, ...] | float
    img_size: str
    protocol: str = "scale"
    shift: int | None = None
    learned: float = 0.0

    def labels(self) -> set[str]:
        """The labels it names, without policies."""
        return {name.split("/")[0] for name in (*self.better, *(self.than if isinstance(self.than, tuple) else ()))}


def read_claim(given: Any) -> Claim:
    """A claim from a mapping of a configuration; ValueError for what is unknown, missing or no claim."""
    known = [field.name for field in fields(Claim)]
    if not isinstance(given, Mapping) or not {"text", "better", "than", "img_size"} <= given.keys() <= {*known}:
        raise ValueError(
            f"a claim has text, better, than and img_size, and may have protocol, shift and learned, got {given!r:.80}"
        )
    given = dict(given) | {"img_size": format_size(parse_size(given["img_size"]))}
    for side in ("better", "than"):
        value = given[side]
        if not (side == "than" and isinstance(value, (int, float)) and not isinstance(value, bool)):
            given[side] = (value,) if isinstance(value, str) else tuple(value)
    return Claim(**given)


def judge(claims: Sequence[Claim], rows: Sequence[Row], shifted: Sequence[Row] = ()) -> list[str]:
    """One Markdown paragraph per claim: its verdict and, for every pair, the mean difference in points with its 95 % interval.

    Differences are taken seed by seed. The interval is Student's over seeds, and never narrower than that over images of two
    independent samples (Agresti and Caffo 2000: normal, with one hit and one miss more in each, so that it has a width at 0 and
    100 % too): conservative, since both models saw the same. ValueError for a label without such rows.
    """
    return [_judged(claim, rows, shifted) for claim in claims]


def _judged(claim: Claim, rows: Sequence[Row], shifted: Sequence[Row]) -> str:
    known = {label: _trained(rows, label) for label in claim.better}
    kept = [label for label in claim.better if known[label] >= claim.learned]
    others = claim.than if isinstance(claim.than, tuple) else (claim.than,)
    pairs = [(label, other, *_difference(claim, rows, shifted, label, other)) for label in kept for other in others]
    held = [pair for pair in pairs if pair[2] - pair[3] > 0]
    against = [pair for pair in pairs if pair[2] + pair[3] < 0]
    open_ = [pair for pair in pairs if pair not in held and pair not in against]
    verdict = "holds" if pairs and len(held) == len(pairs) else "does not hold" if against else "is not shown"
    lines = [f"- **{claim.text}** This {verdict} ({len(held)} of {len(pairs)} pairs; {_where(claim)})."]
    for word, some in (("Ahead", held), ("Intervals that hold zero", open_), ("Behind", against)):
        if some:
            texts = [f"{a} {mean:+.1f} ±{half:.1f}" + (f" ({b})" if len(others) > 1 else "") for a, b, mean, half in some]
            lines.append(f"  {word}: {', '.join(texts)}.")
    if left := [f"{label} ({known[label]:.1f} %)" for label in claim.better if label not in kept]:
        lines.append(f"  Left out, below {claim.learned:g} % at the training size: {', '.join(left)}.")
    return "\n".join(lines)


def _where(claim: Claim) -> str:
    shift = "" if claim.shift is None else f", shifted by {claim.shift} px"
    than = f"against {', '.join(claim.than)}" if isinstance(claim.than, tuple) else f"against {claim.than:g} %"
    return f"{claim.img_size} {claim.protocol}{shift}, points of top-1 {than}"


def _trained(rows: Sequence[Row], label: str) -> float:
    own = [row["top1"] for row in rows if row["label"] == label.split("/")[0] and row["img_size"] == row["train_size"]]
    if not own:
        known = ", ".join(dict.fromkeys(row["label"] for row in rows))
        raise ValueError(f"a claim names {label!r}, of which there are no rows; labels are {known}")
    return sum(own) / len(own)


def _difference(
    claim: Claim, rows: Sequence[Row], shifted: Sequence[Row], label: str, other: str | float
) -> tuple[float, float]:
    """(mean, half width of the 95 % interval) of the difference in top-1, points."""
    ours = _accuracies(claim, rows, shifted, label)
    if isinstance(other, str):
        theirs = _accuracies(claim, rows, shifted, other)
        seeds = sorted(ours.keys() & theirs.keys())
        differences = [ours[seed][0] - theirs[seed][0] for seed in seeds]
        means = [sum(side[seed][0] for seed in seeds) / len(seeds) for side in (ours, theirs)]
    else:
        differences, means = [value - other for value, _ in ours.values()], [sum(v for v, _ in ours.values()) / len(ours)]
    n = min(n for _, n in ours.values())
    shares = [(n * mean / 100 + 1) / (n + 2) for mean in means]
    half = 100 * Z95 * math.sqrt(sum(share * (1 - share) for share in shares) / (n + 2))
    if len(differences) > 1:
        low, high = t_interval(differences)
        half = max(half, (high - low) / 2)
    return sum(differences) / len(differences), half


def _accuracies(claim: Claim, rows: Sequence[Row], shifted: Sequence[Row], label: str) -> dict[int, tuple[float, int]]:
    """{seed: (top-1, number of images)} of one label at the claim's place."""
    name, _, policy = label.partition("/")
    at = {"label": name, "img_size": claim.img_size, "protocol": claim.protocol}
    at |= {} if claim.shift is None else {"shift": claim.shift}
    found = rows if claim.shift is None else shifted
    own = [row for row in found if all(row[key] == value for key, value in at.items())]
    own = [row for row in own if row["policy"] == (policy or own[0]["policy"])]
    if not own:
        raise ValueError(f"no rows of {label} at {_where(claim)}")
    return {row["seed"]: (row["top1"], int(row["n"])) for row in own}
