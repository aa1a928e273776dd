"""create_position, compositions and their errors; the founding documents' numbers through Terms."""

import math

import pytest
import torch

from vitrel import Grid, Table, Terms, combine, create_position
from vitrel.ops import attention
from vitrel.position import split_position


def test_split():
    assert split_position("absolute+rope_mixed+table") == ("absolute", "rope_mixed+table")
    assert split_position("table") == ("", "table")


def test_composition_adds_up():
    grid = Grid(3, 4)
    both = create_position("rope_mixed+table", grid, 2, 8, resize="clip")
    rope, table = both.parts["rope_mixed"], both.parts["table"]
    terms = both(Grid(5, 6))
    assert torch.equal(terms.rotary[0], rope(Grid(5, 6)).rotary[0])
    assert torch.equal(terms.tables[0].bias, table(Grid(5, 6)).tables[0].bias)
    assert both.resized(Grid(5, 6)) == {"table clip": 0}
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


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("tabel", (4, 4), 2, 8), ValueError, "unknown position 'tabel'; did you mean 'table'"),
        (("rope", (4, 4), 2, 8), ValueError, "did you mean 'rope_axial' or 'rope_mixed' or 'rope_normalised'"),
        (("table+rope", (4, 4), 2, 8), ValueError, "unknown position 'rope'; did you mean 'rope_axial'"),
        (("table+table", (4, 4), 2, 8), ValueError, "names the same encoding twice"),
        (("rope_axial", (4, 4), 2, 6), ValueError, "rope_axial needs a head width divisible by 4"),
        (("rope_mixed", (4, 4), 2, 10), ValueError, "rope_mixed needs a head width divisible by 4"),
        (("sincos", (4, 4), 1, 6), ValueError, "sincos needs a width divisible by 4"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        create_position(*arguments)


def test_unknown_option():
    with pytest.raises(TypeError, match="position 'table' has no option 'bse'; it takes init_std, logit_scale, resize"):
        create_position("table", (4, 4), 2, 8, bse=3)


@pytest.mark.parametrize("key", ["absolute", "table", "factorised"])
def test_prefix_tokens_must_agree(key):
    with pytest.raises(ValueError, match=f"{key} was built for 0 prefix tokens, the grid has 1"):
        create_position(key, (4, 4), 2, 8)(Grid(4, 4, 1))


def test_documents_rope_and_antisymmetric_bias():
    """The founding documents' three tokens and 2x2 grid: the best test of the sign, since the biases are antisymmetric."""
    x = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64)[None, None]
    grid = Grid(1, 3)
    angle = torch.arange(3, dtype=torch.float64)[None, :, None] * math.pi / 6
    got = logits(x, Terms(rotary=(angle.cos(), angle.sin())), grid)
    expected = [[0.7071, -0.3536, -0.2588], [-0.3536, 0.7071, 0.9659], [-0.2588, 0.9659, 1.4142]]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=6e-5, rtol=0)
    mixed = create_position("rope_mixed", grid, 1, 4, dtype=torch.float64)  # its frequencies are a parameter: set both
    with torch.no_grad():
        mixed.freqs.copy_(torch.tensor([[[0.0, 0.0]], [[math.pi / 6, 0.0]]]))
    torch.testing.assert_close(mixed(grid).rotary[0][..., :1], angle.cos())

    x = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]], dtype=torch.float64)[None, None]
    bias = {(0, 1): -0.2, (1, 0): -0.1, (1, 1): -0.3, (-1, 0): 0.1, (0, -1): 0.2, (-1, -1): 0.3}
    rows = [bias.get(tuple(offset), 0.0) for offset in Grid(2, 2).offsets().tolist()]
    got = logits(x, Terms(tables=(Table(bias=torch.tensor([rows], dtype=torch.float64)),)), Grid(2, 2))
    expected = [
        [0.7071, 0.2, 0.8071, 0.3],
        [-0.2, 0.7071, 0.7071, 0.1],
        [0.6071, 0.7071, 1.4142, 0.2],
        [-0.3, -0.1, -0.2, 0],
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=6e-5, rtol=0)


def logits(x, terms, grid):
    """Logits of self-attention on x [1, 1, N, D], up to the row constant that the diagonal fixes."""
    eye = torch.eye(grid.tokens, dtype=x.dtype)[None, None]
    weights = attention(x, x, eye, terms, grid, backend="reference")[0, 0]
    ratio = weights.log()
    return ratio - ratio.diagonal()[:, None] + diagonal(x, terms)[:, None]


def diagonal(x, terms):
    """The logits of offset 0, where neither a rotation nor an antisymmetric bias acts."""
    return (x[0, 0] ** 2).sum(-1) * x.shape[-1] ** -0.5
