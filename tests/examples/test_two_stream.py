"""The example of two-stream attention against the oracle of the paper, outputs and gradients."""

import pytest
import torch
from torch import nn

import oracles
from examples.two_stream import PatchPredictor, permutation_masks, train, two_stream_attention
from helpers import each
from helpers.variants import make, oracle_logits, perturbed, serving
from vitrel import Grid, Terms

HEADS, DIM = 2, 8
ORDER = [4, 0, 5, 2, 1, 3]
double = torch.float64


def draw(*shape):
    return torch.randn(*shape, dtype=double)


@each("memory", [0, 4])
@each("key", ["none", "table", "log_decay", "rope_mixed"])
def test_two_streams_equal_the_oracle(key, memory):
    grid = Grid((6 + memory) // 2, 2)
    encoding = perturbed(make(key, grid, HEADS, DIM, dtype=double))
    content, query = draw(2, 1, HEADS, 6, DIM)
    k, v = draw(2, 1, HEADS, grid.tokens, DIM)
    found = two_stream_attention(content, query, k, v, encoding(grid), grid, torch.tensor(ORDER), backend="reference")
    added = []
    for q in (content, query):  # what position adds to the logits of each stream: with it minus without
        full = torch.cat((torch.zeros(HEADS, memory, DIM, dtype=double), q[0]), 1)
        both = [
            oracle_logits(key, encoding, full, k[0], grid, grid, {}),
            oracle_logits("none", nn.Identity(), full, k[0], grid, grid, {}),
        ]
        added.append((both[0] - both[1])[:, memory:])
    past = (k[0, :, :memory].numpy(), v[0, :, :memory].numpy()) if memory else None
    own = [x[0, :, memory:].numpy() for x in (k, v)]
    wanted = oracles.two_stream(content[0].numpy(), query[0].numpy(), *own, added[0], ORDER, past, added[1])
    for stream, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(stream[0], torch.from_numpy(other), rtol=0, atol=1e-6)
    if not memory:
        assert not found[1][0, :, ORDER[0]].any()  # nothing comes before the first


def test_streams_have_gradients_and_orders_of_their_own():
    grid = Grid(2, 3)
    encoding = perturbed(make("table", grid, HEADS, DIM, dtype=double))
    orders = torch.stack([torch.tensor(ORDER), torch.arange(6)])
    inputs = [draw(2, HEADS, 6, DIM).requires_grad_() for _ in range(4)]
    backends = serving(encoding(grid), grid, mask=torch.ones(6, 6, dtype=torch.bool))
    found = {b: two_stream_attention(*inputs, encoding(grid), grid, orders, backend=b) for b in backends}
    assert len(backends) > 1
    for b in range(2):
        alone = two_stream_attention(*(x[b : b + 1] for x in inputs), encoding(grid), grid, orders[b])
        for one, both in zip(alone, found["reference"], strict=True):
            torch.testing.assert_close(one[0], both[b])
    gradients = {}
    for backend, streams in found.items():
        leaves = [*inputs, *encoding.parameters()]
        gradients[backend] = torch.autograd.grad(sum(s.square().sum() for s in streams), leaves)
        assert all(g.isfinite().all() for g in gradients[backend])
    for first, second in zip(*(gradients[b] for b in backends), strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.slow
def test_two_streams_compile_without_a_break():
    q, order = draw(1, HEADS, 6, DIM), torch.randperm(6)
    run = torch.compile(
        lambda order: two_stream_attention(q, q, q, q, Terms(), Grid(2, 3), order), backend="eager", fullgraph=True
    )
    for own, wanted in zip(run(order), two_stream_attention(q, q, q, q, Terms(), Grid(2, 3), order), strict=True):
        torch.testing.assert_close(own, wanted)


def test_two_stream_refusals():
    q = draw(1, HEADS, 6, DIM)
    for order in ([0, 1, 2, 3, 4, 4], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ValueError, match=r"must be a permutation of 0\.\.5, such as torch\.randperm\(6\)"):
            two_stream_attention(q, q, q, q, Terms(), Grid(2, 3), torch.tensor(order))
    with pytest.raises(ValueError, match="both streams need one query for each token of the order"):
        two_stream_attention(q, q, q, q, Terms(), Grid(2, 3), torch.arange(5))
    with pytest.raises(ValueError, match=r"an order of shape \(3, 6\) for a batch of 1: give \[M\] for all, or \[B, M\]"):
        two_stream_attention(q, q, q, q, Terms(), Grid(2, 3), torch.arange(6).repeat(3, 1))
    with pytest.raises(ValueError, match="4 keys, but an order of 6 tokens"):
        permutation_masks(torch.arange(6), 4)


def test_a_prediction_knows_the_patches_before_it_and_no_others():
    """A change of the pixels of one patch changes the predictions of the patches that follow it in the order, and no others."""
    torch.manual_seed(0)
    model, image = PatchPredictor("transformer_xl").eval(), torch.randn(1, 3, 48, 48)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    order = torch.randperm(144)
    step, changed = 70, image.clone()
    row, column = divmod(int(order[step]), 12)
    changed[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    difference = (model(changed, order) - model(image, order)).abs().amax((0, 2))
    assert set(difference.nonzero().flatten().tolist()) == set(order[step + 1 :].tolist())


def test_without_position_all_patches_get_one_prediction_from_what_is_visible():
    model, image = PatchPredictor("none", patch=16).eval(), torch.randn(1, 3, 48, 48)
    first, second = torch.arange(9), torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 7])  # 7 and 8 each come after the same seven
    alike = torch.allclose(model(image, first)[0, 7], model(image, second)[0, 8], atol=1e-5)
    relative = PatchPredictor("transformer_xl", patch=16).eval()
    assert alike and not torch.allclose(relative(image, first)[0, 7], relative(image, second)[0, 8], atol=1e-5)


def test_embeddings_added_to_tokens_are_refused():
    with pytest.raises(ValueError, match="absolute is added to tokens"):
        PatchPredictor("table+absolute")


@pytest.mark.slow
def test_training_lowers_the_error_of_prediction():
    """How far it comes with position, and without: results/two_stream."""
    first, later = (train("rope_axial", steps, batch=4, n_val=16, lr=5e-3) for steps in (1, 12))
    assert later < 0.1 * first  # 0.042 and 0.50
