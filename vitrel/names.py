"""Suggestions for a name that is not known."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_SAME_WORD = 0.15  # how much more similar names count that share the last word, such as an encoding's or a key's


def nearest(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """The `n` known names, or fewer, that `name` was most probably meant to be, the likeliest first.

    Names that begin with it come first, as `rope_axial` for `rope`; then, by similarity, those of which its last word is a
    word, as `model.optim.lr` for `lr`, and those of similar spelling. Case does not count.

    cutoff: the least similarity, 0 to 1 as `difflib` measures it, of names that are similar in spelling alone.
    """
    given = name.lower()
    last = _words(given)[-1:]
    matcher = SequenceMatcher()
    matcher.set_seq2(given)  # what is compared with many comes second: it is analysed once
    found = []
    for candidate in known:
        text = candidate.lower()
        matcher.set_seq1(text)
        begins, shares = given and text.startswith(given), last and last[0] in _words(text)
        if begins or shares or (matcher.quick_ratio() >= cutoff and matcher.ratio() >= cutoff):
            found.append((not begins, -matcher.ratio() - (_SAME_WORD if shares else 0), candidate))
    return [candidate for *_, candidate in sorted(found)[:n]]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name)
