"""Suggestions for misspelt names."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_SAME_WORD = 0.15  # added to the similarity of names that share the last word


def nearest(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` of the `known` names that `name` may be meant for, the most probable first; case does not count.

    Names that begin with `name` come first (`rope_axial` for `rope`), then, by similarity, names that contain its last word
    (`model.optim.lr` for `lr`) and names of similar spelling. Equal ones are in alphabetical order. `cutoff` is the minimum
    similarity, 0 to 1 as of `difflib`, of names that are similar in spelling only.
    """
    text = name.lower()
    last = _words(text)[-1:]
    matcher = SequenceMatcher()
    matcher.set_seq2(text)  # the second sequence is analyzed once and compared with many
    matches = []
    for candidate in known:
        other = candidate.lower()
        matcher.set_seq1(other)
        begins, shares = text and other.startswith(text), last and last[0] in _words(other)
        if begins or shares or (matcher.quick_ratio() >= cutoff and matcher.ratio() >= cutoff):
            matches.append((not begins, -matcher.ratio() - (_SAME_WORD if shares else 0), candidate))
    return [candidate for *_, candidate in sorted(matches)[:n]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean NAME?" with the nearest of the `known` names, for the end of an error; "" if none is similar."""
    near = nearest(name, known, 1)
    return f": did you mean {near[0]}?" if near else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name)
