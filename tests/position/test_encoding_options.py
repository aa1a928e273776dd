"""Options of the encodings: frequencies, policies, temperature, slopes, initialization, and the errors of wrong ones."""

import copy
import math
import pickle

import pytest
import torch

import oracles
from helpers import each
from helpers.variants import KEYS, attend, make, oracle_output, perturbed, qkv, tensors
from vitrel import POSITIONS, Grid, create_position


@each("base", [None, 10.0, 50.0])
def test_frequencies_of_rope_mixed(base):
    """Magnitudes base^(-4t/D), base 10 unless given, once along a random direction per head and once at right angles to it."""
    heads, n = 64, 4
    encoding = create_position("rope_mixed", Grid(3, 3), heads, 4 * n, **({} if base is None else {"base": base}))
    freqs = encoding.freqs.detach()  # [2, H, D/2], rows (y) first
    magnitude = torch.tensor([(base or 10.0) ** (-t / n) for t in range(n)])
    torch.testing.assert_close(freqs.norm(dim=0), magnitude.repeat(2).expand(heads, -1))
    direction = freqs / freqs.norm(dim=0)
    first, second = direction[..., :1], direction[..., n : n + 1]  # [2, H, 1]
    torch.testing.assert_close(direction, torch.cat((first.expand(2, -1, n), second.expand(2, -1, n)), -1))
    torch.testing.assert_close((first * second).sum(0), torch.zeros(heads, 1), atol=1e-6, rtol=0)
    turn = torch.atan2(first[0, :, 0], first[1, :, 0]).sort().values
    assert turn[0] < -2.5 and turn[-1] > 2.5 and turn.diff().max() < 1  # all around, not one direction for all heads


@each("base", [None, 10000.0, 100.0])
def test_frequencies_of_sincos(base):
    encoding = create_position("sincos", Grid(3, 3), 2, 8, **({} if base is None else {"base": base}))
    frequency = torch.tensor([(base or 10000.0) ** (-t / 4) for t in range(4)])
    y, x = 2 * frequency, 1 * frequency
    torch.testing.assert_close(encoding(Grid(3, 2)).tokens[5], torch.cat((y.sin(), y.cos(), x.sin(), x.cos())))


def test_base_of_transformer_xl():
    """One step apart along y: the first band turns by 1 radian, the next by base^(-1/2) for a width of 8."""
    encoding = create_position("transformer_xl", Grid(3, 3), 1, 8, base=100.0)
    with torch.no_grad():
        encoding.w_r.copy_(torch.eye(8)[None])
    rows = encoding(Grid(2, 1)).tables[0].query[0]  # offsets -1, 0, 1
    torch.testing.assert_close(rows[2, :4], torch.tensor([math.sin(1), math.sin(0.1), math.cos(1), math.cos(0.1)]))


@each("policy", ["linear", "ntk", "yarn"])
@each("key", ["rope_axial", "rope_mixed"])
def test_rope_policies_act_on_larger_grids_alone(key, policy):
    torch.manual_seed(0)
    plain, scaled = make(key, Grid(6, 5), dim=16), make(key, Grid(6, 5), dim=16, policy=policy)
    scaled.load_state_dict(plain.state_dict())
    for grid in (Grid(6, 5), Grid(3, 4), Grid(1, 5)):
        for a, b in zip(plain(grid).rotary, scaled(grid).rotary, strict=True):
            assert torch.equal(a, b)
        assert scaled(grid).temperature in (None, 1.0) and scaled.resampled(grid) == {}
    larger = Grid(6, 9)
    assert (plain(larger).rotary[1] - scaled(larger).rotary[1]).abs().max() > 0.05
    assert scaled.resampled(larger) == {f"{key} {policy}": 0} and plain.resampled(larger) == {}
    assert plain.unseen(larger) > 0 and (scaled.unseen(larger) == 0) == (policy == "linear")
    if key == "rope_axial":  # only x grew: the bands of y are those of training
        assert torch.equal(plain(larger).rotary[0][..., :4], scaled(larger).rotary[0][..., :4])


@each("key", KEYS)
def test_log_n_temperature(key):
    """The factor of the oracle at any grid, exactly 1 at the trained one, and no parameter renamed."""
    trained = Grid(4, 3, 1)
    plain, scaled = (perturbed(make(key, trained, **o)) for o in ({}, {"temperature": "log_n"}))
    scaled.load_state_dict(plain.state_dict())
    assert scaled.temperature == "log_n" and plain.temperature == "none"
    for grid in (trained, Grid(9, 7, 1), Grid(1, 1, 1)):
        a, b = plain(grid), scaled(grid=grid)
        assert a.scale == b.scale and a.temperature is None
        assert float(b.temperature) == pytest.approx(oracles.log_n(grid.tokens, trained.tokens), rel=1e-6)
        for x, y in zip(tensors(a), tensors(b._replace(temperature=None)), strict=True):
            assert torch.equal(x, y)
    assert scaled(trained).temperature == 1.0


def test_log_n_survives_copies_and_compositions():
    both = create_position("rope_mixed+table", Grid(3, 3), 2, 8, temperature="log_n")
    assert set(both.state_dict()) == set(create_position("rope_mixed+table", Grid(3, 3), 2, 8).state_dict())
    for other in (both, copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert float(other(Grid(6, 6)).temperature) == pytest.approx(oracles.log_n(36, 9), rel=1e-6)


def test_alibi_slopes():
    """2^(-8 i/H), also where H is no power of two; learned slopes begin there."""
    for heads in (3, 8):
        expected = torch.tensor([2 ** (-8 * i / heads) for i in range(1, heads + 1)])
        fixed, learned = (make("alibi", Grid(3, 3), heads, learnable=on) for on in (False, True))
        for encoding in (fixed, learned):
            torch.testing.assert_close(-encoding(Grid(1, 2)).tables[0].bias[:, 0], expected)
        assert not list(fixed.parameters()) and list(dict(learned.named_parameters())) == ["slopes"]


@each("key", ["alibi", "log_decay"])
def test_directional_begins_symmetric_and_can_lean(key):
    plain, directional = make(key, Grid(3, 4)), make(key, Grid(3, 4), directional=True)
    directional.load_state_dict(plain.state_dict(), strict=False)
    grid = Grid(4, 5)
    torch.testing.assert_close(directional(grid).tables[0].bias, plain(grid).tables[0].bias)
    with torch.no_grad():
        directional.direction[0] = 1.0  # keys above: steeper
    bias = directional(grid).tables[0].bias.view(2, 7, 9)
    assert (bias[:, 4, 4] < bias[:, 2, 4]).all()  # dy = 1, a key above, against dy = -1
    torch.testing.assert_close(bias[:, 3, 5], bias[:, 3, 3])


def test_positive_parameters_stay_positive():
    encoding = make("log_decay", Grid(4, 4), heads=200)
    with torch.no_grad():
        a, b = encoding.log_a.exp(), encoding.log_b.exp()
    assert 0.02 <= a.min() < 0.2 and 1.8 < a.max() <= 2 and 0.01 <= b.min() < 0.1 and 0.9 < b.max() <= 1


@each("heads", [1, 2, 3, 4, 6, 12, 16, 24])
@each("fov", [180, 90, 45])
def test_lookhere_heads(heads, fov):
    """Every token sees itself; the last heads see everything; the fields of view have the angle they say."""
    bias = make("lookhere", Grid(3, 3), heads, fov=fov)(Grid(41, 41)).tables[0].bias
    seen = bias.isfinite().float().mean(1)
    undirected = max(1, min(4, heads // 3))
    assert (seen[heads - undirected :] == 1).all()
    assert (bias.view(heads, 81, 81)[:, 40, 40] == 0).all()
    for share in seen[: heads - undirected].tolist():
        assert share == pytest.approx(fov / 360, abs=0.02)


@each(("fov", "heads"), [(180, 5), (90, 11), (45, 11)])
def test_lookhere_has_every_view_from_as_many_heads_on_as_it_says(fov, heads):
    def views(count):
        bias = make("lookhere", Grid(3, 3), count, fov=fov)(Grid(3, 3)).tables[0].bias
        return {tuple(head.isfinite().tolist()) for head in bias}

    assert len(views(heads)) == len(views(3 * heads)) > len(views(heads - 1))


def test_xpos_decays_and_stays_finite():
    """The content of a pair that is seen never grows with distance, and 4 times the grid does not overflow."""
    encoding = make("xpos", Grid(7, 7), heads=4)
    grid = Grid(1, 28)
    (cos, sin), (key_cos, key_sin) = (encoding(grid).rotary, encoding(grid).key_rotary)
    size, key_size = (cos.square() + sin.square()).sqrt(), (key_cos.square() + key_sin.square()).sqrt()
    product = size[2, -1] * key_size[2]  # head 2 looks left; the query is the last token
    assert (product.diff(dim=0) > 0).all() and product[-1] == pytest.approx(torch.ones(4))
    assert size.max() < 150 and size.isfinite().all()


def test_xpos_is_bounded_towards_prefix_tokens():
    """A pair with a prefix token gains no more on a large grid than it could on the training grid."""
    encoding = make("xpos", Grid(7, 5, 1), heads=4)

    def largest(grid):
        sizes = [(cos.square() + sin.square()).sqrt() for cos, sin in (encoding(grid).rotary, encoding(grid).key_rotary)]
        return torch.cat([a[:, :1] * b for a, b in (sizes, sizes[::-1])], 1).amax((1, 2))  # [H]

    trained = largest(Grid(7, 5, 1))
    assert (trained > 1.2).all()
    for grid in (Grid(28, 20, 1), Grid(7, 60, 1), Grid(3, 2, 1)):
        assert (largest(grid) <= trained + 1e-5).all()


DRAWN = ["absolute", "table", "factorized", "clipped", "t5", "shaw", "deberta", "decomposed", "transformer_xl"]


@each("key", DRAWN)
def test_standard_deviation_at_initialization(key):
    for options in [{}] if key == "absolute" else [{}, {"init_std": 0.3}]:
        for parameter in create_position(key, Grid(40, 50), 8, 8, **options).parameters():
            assert parameter.std().item() == pytest.approx(options.get("init_std", 0.02), rel=0.15)


def test_a_policy_goes_to_the_parts_that_have_it():
    both = create_position("table+cpb", Grid(4, 4), 2, 8, policy="renormalize")
    assert both.parts["table"].policy == "geometric" and both.parts["cpb"].policy == "renormalize"
    both = create_position("table+decomposed", Grid(4, 4), 2, 8, policy="clip")
    assert both.parts["table"].policy == both.parts["decomposed"].policy == "clip"


def test_yarn_ramp():
    """Bands of more turns than the second threshold are kept, of fewer than the first divided by the growth."""
    plain, yarn = (
        make("rope_axial", Grid(8, 8), dim=16),
        make("rope_axial", Grid(8, 8), dim=16, policy="yarn", yarn_turns=(0.5, 1.0)),
    )
    grid = Grid(16, 16)
    angle = [torch.atan2(*e(grid).rotary[::-1])[0, 1] for e in (plain, yarn)]  # of the token one column to the right
    turns = 8 * 100.0 ** (-torch.arange(4) / 4) / (2 * math.pi)  # 1.27, 0.40, 0.13, 0.04
    assert turns[0] > 1 and turns[1] < 0.5
    torch.testing.assert_close(angle[1][4:], angle[0][4:] * torch.tensor([1, 0.5, 0.5, 0.5]))
    assert float(yarn(grid).temperature) == pytest.approx((0.1 * math.log(2) + 1) ** 2)
    with pytest.raises(ValueError, match="needs a policy_strength above 0, not 0"):
        yarn.switch({"policy": "ntk", "yarn_turns": (1.0, 2.0), "policy_strength": 0})
    assert yarn.rotary_policy == ("yarn", Grid(8, 8), (0.5, 1.0), 1.0)  # nothing has changed


def test_initial_prefix_rows_of_cpb():
    """They begin where the biases of the tokens do, 16 sigmoid(0): else no token would see the class token."""
    bias = create_position("cpb", Grid(7, 7, 1), 3, 8)(Grid(7, 7, 1)).tables[0].bias.detach()
    assert (bias - 8).abs().max() < 0.5


SHARED = [key for key, encoding in POSITIONS.items() if encoding.rotates] + ["sincos", "transformer_xl"]  # by the axes


@each(("trained", "grid"), [((1, 5), (1, 8, 1)), ((5, 1), (8, 1, 1)), ((1, 1), (3, 1)), ((4, 1), (3, 4, 1))])
@each("key", SHARED)
def test_a_sequence_needs_an_even_width_alone(key, trained, grid):
    """On a grid of one row or column 4 need not divide the width, also where the sequence grows by a rule."""
    trained, grid = Grid(*trained), Grid(*grid)
    heads = 4 if key == "xpos" else 1 if key in ("sincos", "transformer_xl") else 2  # for these the width is of all heads
    scaled = key in ("rope_axial", "rope_mixed")
    for width, policy in ((2, "keep"), (6, "ntk"), (10, "yarn")):
        options = {"policy": policy} if scaled else {}
        encoding = perturbed(make(key, trained, heads, width, dtype=torch.float64, **options))
        q, k, v = qkv(grid, heads, width)
        out = attend(encoding, q, k, v, grid).detach()
        expected = torch.as_tensor(oracle_output(key, encoding, q[0], k[0], v[0], grid, trained, options))
        torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=0)
    for width in (1, 3):
        with pytest.raises(
            ValueError, match=f"{key} needs a .*width divisible by 4 .*by 2 on one row or column.*, not {width}"
        ):
            make(key, trained, heads, width)
    with pytest.raises(ValueError, match=f"{key} needs a .*width divisible by 4"):
        make(key, Grid(2, 3), heads, 2)


def test_one_bias_for_all_heads():
    for key, options, rows in (("table", {}, 5 * 7), ("clipped", {"radius": (1, 2)}, 3 * 5)):
        encoding = make(key, Grid(3, 4), 3, 8, per_head=False, **options)
        assert encoding.relative_position_bias_table.shape == (rows, 1)
        (table,) = encoding(Grid(6, 4)).tables
        assert table.bias.shape[0] == 3 and (table.bias == table.bias[:1]).all()


def test_biases_by_offset_in_either_convention():
    table = make("table", Grid(2, 3, 1), 3, 8).set_biases({(1, -2): 0.5, (0, 1): -0.2})
    bias, offsets = table(Grid(2, 3, 1)).tables[0].bias, Grid(2, 3, 1).offsets().tolist()
    found = {tuple(offsets[r]): bias[2, r].item() for r in bias[2].nonzero()[:, 0]}
    assert found == pytest.approx({(1, -2): 0.5, (0, 1): -0.2})
    other = make("table", Grid(2, 3, 1), 3, 8).set_biases({(-1, 2): 0.5, (0, -1): -0.2}, offset="key-query")
    assert torch.equal(table.relative_position_bias_table, other.relative_position_bias_table)
    with pytest.raises(ValueError, match=r"table has no offset \(2, 0\) on a 2x3 grid"):
        table.set_biases({(2, 0): 1.0})
    with pytest.raises(ValueError, match="offset='i-j' is unknown; choose one of query-key, key-query"):
        table.set_biases({}, offset="i-j")


def test_buckets_of_each_axis():
    """One number is for axes that have offsets; a pair is taken as it is, 1 for an axis without buckets."""

    def rows(grid, **options):
        return make("t5", Grid(*grid), 2, 8, **options).relative_attention_bias.shape[0]

    assert rows((1, 512), num_buckets=32, max_distance=128) == rows((512, 1), num_buckets=32, max_distance=128) == 32
    assert rows((7, 9), num_buckets=(1, 8)) == 8 and rows((7, 9), num_buckets=(4, 8), max_distance=(5, 8)) == 32
    assert rows((1, 9), num_buckets=(4, 8), max_distance=8) == 32
    with pytest.raises(ValueError, match=r"t5 option num_buckets must be a whole number of 1 or more, or two, .* not \(8,\)"):
        rows((7, 9), num_buckets=(8,))


def test_no_decay_is_a_decay():
    (table,) = make("log_decay", Grid(2, 3), decay=0)(Grid(4, 3)).tables
    assert not table.bias.any()


def test_biases_of_an_unknown_offset_leave_the_table_as_it_was():
    table = create_position("table", (2, 3), 2, 4)
    before = table.relative_position_bias_table.detach().clone()
    with pytest.raises(ValueError, match=r"no offset \(2, 0\) on a 2x3 grid"):
        table.set_biases({(0, 1): 0.5, (2, 0): 0.1})
    assert torch.equal(table.relative_position_bias_table, before)
    row = table.set_biases({(1, -2): 0.5}, offset="key-query").relative_position_bias_table[:, 0].unflatten(0, (3, 5))
    assert row[0, 4] == 0.5 and row.count_nonzero() == 1  # query minus key: (-1, 2)
