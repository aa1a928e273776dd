"""Every encoding inside shifted, padded windows, against its oracle on each window with the absent tokens left out."""

from collections import defaultdict

import numpy as np
import pytest
import torch

import oracles
from helpers import each
from helpers.variants import IN_ATTENTION, VARIANTS, make, oracle_logits, perturbed, serving, spread
from vitrel import Grid
from vitrel.ops import attention, window_attention

double = torch.float64
CASES = [(key, options) for key, options in VARIANTS if key in IN_ATTENTION]


def regions(h, w, window, shift):
    """For every window of the infinite partition that the image meets: {slot in the window: (y, x)}."""
    shift = [0 if n <= m else s for n, m, s in zip((h, w), window, shift, strict=True)]
    found = defaultdict(dict)
    for y in range(h):
        for x in range(w):
            (down, row), (across, column) = divmod(y - shift[0], window[0]), divmod(x - shift[1], window[1])
            found[down, across][row * window[1] + column] = (y, x)
    return found.values()


@pytest.mark.slow
@each(("key", "options", "size"), spread(CASES, [(5, 7), (2, 6)]))
def test_equals_the_oracle_of_each_window(key, options, size):
    """Alike for every backend that takes the terms; Shaw's values have a test of their own below."""
    (h, w), window, shift, heads, dim = size, (3, 4), (1, 2), 4, 8
    options = options | ({"values": False} if key == "shaw" else {})
    encoding = perturbed(make(key, Grid(*window), heads, dim, dtype=double, **options))
    terms, qkv = encoding(Grid(*window)), torch.randn(1, h, w, 3 * heads * dim, dtype=double)
    q, k, v = qkv[0].view(h, w, 3, heads, dim).permute(2, 3, 0, 1, 4)  # [H, h, w, D] each
    expected = np.zeros((h, w, heads, dim))
    for slots in regions(h, w, window, shift):
        filled = torch.zeros(2, heads, 12, dim, dtype=double)
        for slot, (y, x) in slots.items():
            filled[0, :, slot], filled[1, :, slot] = q[:, y, x], k[:, y, x]
        logits = oracle_logits(key, encoding, *filled, Grid(*window), Grid(*window), options)
        for n in range(heads):
            for slot, at in slots.items():
                weights = oracles.softmax(logits[n, slot, list(slots)])
                expected[(*at, n)] = sum(p * v[n, y, x].numpy() for p, (y, x) in zip(weights, slots.values(), strict=True))
    for backend in serving(terms, Grid(h, w), heads, dim, window=window):
        out = window_attention(qkv, terms, Grid(h, w), window, shift, heads, backend=backend).detach()
        np.testing.assert_allclose(out[0].view(h, w, heads, dim).numpy(), expected, atol=3e-6)


@each("per_head", [False, True])
def test_values_of_shaw(per_head):
    """One window at a time, as global attention in which the tokens of other windows are masked."""
    window, shift, heads, dim, (h, w) = (3, 4), (1, 2), 2, 8, (5, 7)
    encoding = perturbed(make("shaw", Grid(*window), heads, dim, dtype=double, per_head=per_head))
    terms, qkv = encoding(Grid(*window)), torch.randn(2, h, w, 3 * heads * dim, dtype=double)
    out = window_attention(qkv, terms, Grid(h, w), window, shift, heads)
    for slots in regions(h, w, window, shift):
        filled = torch.zeros(3, 2, heads, 12, dim, dtype=double)
        present = torch.zeros(12, dtype=torch.bool)
        for slot, (y, x) in slots.items():
            filled[:, :, :, slot] = qkv[:, y, x].view(2, 3, heads, dim).transpose(0, 1)
            present[slot] = True
        own = attention(*filled, terms, Grid(*window), present)
        for slot, (y, x) in slots.items():
            torch.testing.assert_close(out[:, y, x], own[:, :, slot].flatten(1), atol=1e-10, rtol=0)


@each(("key", "options"), CASES, ids=str)
def test_backends_agree_on_gradients(key, options):
    options = options | ({"values": False} if key == "shaw" else {})
    encoding = perturbed(make(key, Grid(3, 4), 2, 8, dtype=double, **options))
    qkv = torch.randn(2, 5, 7, 48, dtype=double, requires_grad=True)
    weight, leaves = torch.randn(2, 5, 7, 16, dtype=double), [qkv, *encoding.parameters()]
    backends = serving(encoding(Grid(3, 4)), Grid(5, 7), window=(3, 4))
    assert len(backends) > 1
    found = []
    for backend in backends:
        out = window_attention(qkv, encoding(Grid(3, 4)), Grid(5, 7), (3, 4), (1, 2), 2, backend=backend)
        found.append(torch.autograd.grad((out * weight).sum(), leaves))
    for own in found[:-1]:
        for x, y in zip(own, found[-1], strict=True):  # those of the reference
            assert x.isfinite().all()
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
