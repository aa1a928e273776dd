"""Wrong options and impossible grids: what the errors say."""

import pytest

from helpers import each
from vitrel import Grid, create_position


@each(
    ("key", "options", "text"),
    [
        ("lookhere", dict(fov=60), "fields of view of 180, 90, 45 degrees, not 60"),
        ("t5", dict(mode="cross"), "t5 option mode='cross' is unknown; choose one of product, sum"),
        ("t5", dict(num_buckets=1), "num_buckets of 2 or more along one axis: with 1 all offsets have one bias"),
        ("t5", dict(num_buckets=7), "even number of buckets, one half for each sign, not 7"),
        (
            "t5",
            dict(num_buckets=32),
            "max_distance 3 lies below its 8 exact buckets per sign; give a larger max_distance or",
        ),
        ("alibi", dict(distance="l2"), "alibi option distance='l2' is unknown; choose one of euclidean, l1, squared"),
        ("alibi", dict(policy="clip"), "policy 'clip' is unknown to 'alibi'; choose one of keep, renormalize"),
        ("log_decay", dict(distance="squared"), "log_decay option distance='squared' is unknown; choose one of euclidean, l1"),
        ("cpb", dict(policy="bicubic"), "policy 'bicubic' is unknown to 'cpb'; choose one of keep, renormalize"),
        (
            "decomposed",
            dict(policy="keep"),
            "'keep' is unknown to 'decomposed'; choose one of linear, clip, geometric",
        ),
        ("clipped", dict(radius=-1), "clipped option radius must be a whole number of 0 or more, or two, .* not -1"),
        ("shaw", dict(radius=(1, 2, 3)), "shaw option radius must be a whole number of 0 or more, or two"),
        ("rope_axial", dict(policy="pi"), "policy 'pi' is unknown to 'rope_axial'; choose one of keep, linear, ntk, yarn"),
        ("rope_axial", dict(reference=4, policy="ntk"), "takes a reference grid or policy='ntk', not both: leave one out"),
        (
            "rope_axial",
            dict(reference=(4,)),
            r"reference must be a whole number of 1 or more, or two, \(rows, columns\), not \(4,\)",
        ),
        ("cpb", dict(pretrained_window=(8,)), "cpb option pretrained_window must be a whole number of 1 or more, or two"),
        ("pape", dict(parabolas=0), "option parabolas=0 of position 'pape' must be greater than 0"),
        ("rope_axial", dict(base=0), "option base=0 of position 'rope_axial' must be greater than 0"),
        ("rope_axial", dict(base=float("nan")), "option base=nan of position 'rope_axial' must be greater than 0"),
        (
            "rope_mixed",
            dict(yarn_turns=(2, 1)),
            r"rope_mixed needs yarn_turns=\(slow, fast\) with 0 < slow < fast, not \(2, 1\)",
        ),
        ("xpos", dict(gamma=-0.5), "option gamma=-0.5 of position 'xpos' must be greater than 0"),
        ("log_decay", dict(decay=-1.0), "log_decay option decay=-1.0 must be 0 or more"),
        ("cpb", dict(pretrained_window=(8, 0)), r"cpb option pretrained_window must be .* of 1 or more, .* not \(8, 0\)"),
        ("t5", dict(max_distance=-1), "t5 option max_distance must be a whole number of 1 or more, .* not -1"),
        ("shaw", dict(radius=1.5), "shaw option radius must be a whole number of 0 or more, .* not 1.5"),
        (
            "table+cpb",
            dict(policy="linear"),
            r"'linear' is unknown to 'table\+cpb'; choose one of geometric, clip, bicubic",
        ),
        ("table", dict(temperature="log"), "option temperature='log' is unknown; choose one of none, log_n"),
    ],
)
def test_wrong_options(key, options, text):
    with pytest.raises(ValueError, match=text):
        create_position(key, Grid(4, 4), 2, 8, **options)


@each("grid", [(0, 4), (4, 0), (4, 4, -1)])
def test_impossible_grids(grid):
    with pytest.raises(ValueError, match="position 'table' needs sides, num_heads and head_dim of at least 1"):
        create_position("table", grid, 2, 8)
