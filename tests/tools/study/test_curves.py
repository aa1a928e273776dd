"""Curves of the studies: which rows belong to a model's policy."""

from helpers.rows import row
from tools.study.curves import curves
from vitrel.evaluate.verdicts import aggregate


def test_every_policy_has_a_curve_with_the_sizes_at_which_it_does_not_matter():
    sizes = {"64x64": ["none"], "96x96": ["fixed", "divisor+keep"], "128x128": ["rescale+keep", "rescale+clip"]}
    table = aggregate([row(size, policy=policy) for size, policies in sizes.items() for policy in policies])
    found = {policy: [one["policy"] for one in part] for _, policy, part in curves(table)}
    assert found["divisor+keep"] == ["divisor+keep", "none"] and found["fixed"] == ["fixed", "none"]
    assert sorted(found["rescale+keep"]) == ["fixed", "none", "rescale+keep"] and "none" not in found
    beside = [row(), *(row("96x96", policy=policy) for policy in ("none", "log_n"))]
    assert {policy: len(part) for _, policy, part in curves(beside)} == {"none": 2, "log_n": 2}
