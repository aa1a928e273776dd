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


def test_of_a_block_and_of_a_layer():
    """At the grid of training by default: of the image for global attention, of the window otherwise."""
    model = vitrel.create_model("vitrel_vit_n8_table", img_size=32)
    bias = vitrel.position_bias(model.blocks[0])
    assert torch.equal(bias, vitrel.position_bias(model.blocks[0].position, (4, 4, 1))) and bias.shape == (3, 17, 17)
    assert vitrel.position_bias(model.blocks[0], (5, 6, 1)).shape == (3, 31, 31)
    assert vitrel.position_bias(vitrel.create_model("vitrel_swin_n_table").layers[0].blocks[1]).shape[1:] == (16, 16)
    assert vitrel.position_bias(vitrel.RelativeAttention(16, 2, "alibi", grid=(3, 3))).shape == (2, 9, 9)
    with pytest.raises(TypeError, match=r"Linear holds no encoding of vitrel: .*inspect.attention.record"):
        vitrel.position_bias(torch.nn.Linear(2, 2))
