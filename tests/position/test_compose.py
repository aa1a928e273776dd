"""create_position, compositions and their errors."""

import pytest
import torch

from helpers import each
from vitrel import Grid, Terms, combine, create_position
from vitrel.position import split_position


def test_split():
    assert split_position("absolute+rope_mixed+table") == ("absolute", "rope_mixed+table")
    assert split_position("table") == ("", "table")


def test_composition_adds_up():
    grid = Grid(3, 4)
    both = create_position("rope_mixed+table", grid, 2, 8, policy="clip")
    rope, table = both.parts["rope_mixed"], both.parts["table"]
    terms = both(Grid(5, 6))
    assert torch.equal(terms.rotary[0], rope(Grid(5, 6)).rotary[0])
    assert torch.equal(terms.tables[0].bias, table(Grid(5, 6)).tables[0].bias)
    assert both.resampled(Grid(5, 6)) == {"table clip": 0}
    assert both.unseen(Grid(5, 6)) == table.unseen(Grid(5, 6)) > 0


def test_combine_multiplies_scales_and_temperatures_and_adds_query_biases():
    u = torch.randn(2, 2, 8)
    hot = torch.tensor(3.0)
    total = combine(Terms(scale=0.5, query_bias=u[0]), Terms(scale=0.2, temperature=hot, query_bias=u[1]), Terms())
    assert total.scale == 0.1 and total.temperature == 3.0
    assert combine(total, total).temperature == 9.0
    torch.testing.assert_close(total.query_bias, u.sum(0))


def test_two_rotations_are_refused():
    with pytest.raises(ValueError, match=r"'rope_axial\+rope_mixed' rotates twice"):
        create_position("rope_axial+rope_mixed", Grid(3, 3), 2, 8)
    once = create_position("rope_axial", Grid(3, 3), 2, 8)(Grid(3, 3))
    with pytest.raises(ValueError, match="two rotary encodings cannot be combined"):
        combine(once, once)


@each(
    ("arguments", "error", "text"),
    [
        (("tabel", (4, 4), 2, 8), ValueError, "unknown position 'tabel'; did you mean 'table'"),
        (("rope", (4, 4), 2, 8), ValueError, "did you mean 'rope_axial' or 'rope_mixed' or 'rope_normalized'"),
        (("table+rope", (4, 4), 2, 8), ValueError, "unknown position 'rope'; did you mean 'rope_axial'"),
        (("table+table", (4, 4), 2, 8), ValueError, "names the same encoding twice"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        create_position(*arguments)


@each("key", ["absolute", "table", "factorized"])
def test_prefix_tokens_must_agree(key):
    with pytest.raises(ValueError, match=f"{key} was built for a grid with prefix=0, not 1"):
        create_position(key, (4, 4), 2, 8)(Grid(4, 4, 1))
