"""`vitrel.position_bias` against the logits of the plain reference with content of zero."""

import pytest
import torch

import vitrel
from helpers import each
from vitrel import POSITIONS, Grid, create_position
from vitrel.ops.reference import masked_logits

CONTENT = {"shaw", "decomposed", "transformer_xl", "deberta", "rope_axial", "rope_mixed", "rope_normalized", "xpos", "pape"}


@each("grid", [Grid(3, 4), Grid(2, 5, 2)])
@each("key", [key for key, encoding in POSITIONS.items() if encoding.site == "attention"])
def test_it_is_what_the_reference_adds_or_is_refused(key, grid):
    torch.manual_seed(0)
    encoding = create_position(key, Grid(3, 3, grid.prefix), 2, 8)
    if key in CONTENT:
        with pytest.raises(ValueError, match="so what it adds depends on content"):
            vitrel.position_bias(encoding, grid)
        return
    nothing = torch.zeros(1, 2, grid.tokens, 8)
    expected = masked_logits(nothing, nothing, encoding(grid), grid)[0]
    torch.testing.assert_close(vitrel.position_bias(encoding, grid).expand_as(expected), expected)


def test_rows_for_tokens_are_no_bias():
    with pytest.raises(ValueError, match="adds rows to the tokens"):
        vitrel.position_bias(create_position("absolute", (3, 3), 2, 8), (3, 3))
