"""The founding documents' worked examples through the package itself: encodings built by key, weights from attention."""

import math

import pytest
import torch

from helpers import golden
from helpers.variants import serving
from vitrel import Grid, create_position
from vitrel.ops import attention

CASES = golden("founding_documents")["cases"]
double = torch.float64


def build(key, grid, heads, dim, parameters=None, **options):
    encoding = create_position(key, grid, heads, dim, dtype=double, **options)
    with torch.no_grad():
        for name, parameter in encoding.named_parameters():
            parameter.copy_(torch.tensor(parameters[name], dtype=double).view_as(parameter))
    return encoding


def weights(case, encoding, tokens=None):
    """[N, N] attention weights of the case, by every backend that takes the terms."""
    inputs = CASES[case]["inputs"]
    q, k = (torch.tensor(inputs.get(name, inputs.get("x")), dtype=double)[None, None] for name in "qk")
    if tokens is not None:
        q, k = q + tokens, k + tokens
    grid = Grid(inputs["h"], inputs["w"])
    terms = encoding(grid)
    eye = torch.eye(grid.tokens, dtype=double)[None, None]
    found = [attention(q, k, eye, terms, grid, backend=backend)[0, 0] for backend in serving(terms, grid, *q.shape[1::2])]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-6, rtol=0)
    return found[0].detach()


def same(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=double), atol=6e-5, rtol=0)


def test_fixed_log_decay():
    inputs, expected = CASES["five_tokens_log_decay"]["inputs"], CASES["five_tokens_log_decay"]["expected"]
    p = weights("five_tokens_log_decay", build("log_decay", Grid(1, 5), 1, 4, decay=inputs["lambda"]))
    same(p, expected["weights"])
    same(p @ torch.tensor(inputs["v"], dtype=double), expected["output"])
    plain = weights("five_tokens_no_decay", build("none", Grid(1, 5), 1, 4)) @ torch.tensor(inputs["v"], dtype=double)
    for row, values in CASES["five_tokens_no_decay"]["expected"]["output_rows"].items():
        same(plain[int(row)], values)


def test_lambda_exercise():
    case = CASES["lambda_exercise"]

    def row(decay):
        return weights("lambda_exercise", build("log_decay", Grid(1, 5), 1, 4, decay=decay))[case["inputs"]["row"]]

    same(row(case["inputs"]["lambda"]), case["expected"]["weights"])
    turn, half = case["expected"]["becomes_maximum_at"], case["expected"]["exceeds_half_at"]
    assert row(turn - 1e-3).argmax() != 0 and row(turn + 1e-3).argmax() == 0
    assert row(half - 2e-3)[0] < 0.5 < row(half + 2e-3)[0]


def test_linear_decay():
    case = CASES["linear_decay"]
    p = weights("linear_decay", build("alibi", Grid(1, 5), 1, 4, {"slopes": case["inputs"]["slope"]}, learnable=True))
    same(p[case["inputs"]["row"]], case["expected"]["weights"])


def logits(case):
    return torch.tensor(CASES[case]["expected"]["logits"], dtype=double).softmax(-1)


@pytest.mark.parametrize(
    ("case", "key", "parameters", "options"),
    [
        ("three_tokens_content", "none", {}, {}),
        ("three_tokens_additive", "table", {"relative_position_bias_table": [-0.3, -0.2, 0, 0.2, 0.3]}, {}),
        ("three_tokens_additive", "clipped", {"relative_position_bias_table": [-0.3, -0.2, 0, 0.2, 0.3]}, {"radius": (0, 2)}),
        ("three_tokens_additive", "factorised", {"table_h": [0], "table_w": [-0.3, -0.2, 0, 0.2, 0.3]}, {}),
        ("three_tokens_alibi_signed", "table", {"relative_position_bias_table": [0.2, 0.1, 0, -0.1, -0.2]}, {}),
        ("three_tokens_alibi_symmetric", "alibi", {"slopes": [0.1]}, {"learnable": True}),
        ("three_tokens_alibi_symmetric", "alibi", {"slopes": [0.1]}, {"learnable": True, "distance": "l1"}),
        ("square_content", "none", {}, {}),
        ("square_relative", "table", {"relative_position_bias_table": [0.3, 0.1, 0, 0.2, 0, -0.2, 0, -0.1, -0.3]}, {}),
    ],
)
def test_logits(case, key, parameters, options):
    inputs = CASES[case]["inputs"]
    encoding = build(key, Grid(inputs["h"], inputs["w"]), 1, 2, parameters, **options)
    same(weights(case, encoding), logits(case))


def test_shaw_keys():
    keys = CASES["three_tokens_shaw_keys"]["inputs"]["keys"]
    encoding = build("shaw", Grid(1, 3), 1, 2, {"key_h": [[0, 0]], "key_w": keys}, radius=(0, 2), values=False)
    same(weights("three_tokens_shaw_keys", encoding), logits("three_tokens_shaw_keys"))


def test_rope_of_thirty_degrees():
    """Two channels, one pair: a sequence is a grid of one row."""
    encoding = build("rope_mixed", Grid(1, 3), 1, 2, {"freqs": [[[0]], [[math.radians(30)]]]})
    same(weights("three_tokens_rope", encoding), logits("three_tokens_rope"))


def test_absolute():
    rows = CASES["square_absolute"]["inputs"]["pos_embed"]
    encoding = build("absolute", Grid(2, 2), 1, 2, {"pos_embed": [rows]})
    tokens = encoding(Grid(2, 2)).tokens
    same(weights("square_absolute", encoding, tokens), logits("square_absolute"))
