"""Oracles for tests: every encoding as a plain double loop over queries i and keys j, in float64, written from its paper.

They import nothing from the package. H heads, N = prefix + h*w tokens (row-major after the prefix), D head width, C = H*D.
Offsets are query minus key, in patches; h comes before w everywhere.
An encoding's oracle is `f(q, k, v, h, w, prefix=0, *, trained=None, options..., parameters...)` -> (logits [H, N, N], output
[H, N, D]), with q, k, v [H, N, D] and the logits complete: scaled, biased, ready for softmax, -inf where a head cannot see.
`trained` is the (h, w) of the grid that the encoding was built for, by default (h, w); an oracle that does not depend on it
has no such argument. Parameters have the names and shapes of the state dict; names with a dot come as **parameters.
"""

# ruff: noqa: F401  what the modules offer, under one name
from oracles.algebra import attention, log_n, window_canvas
from oracles.bias import alibi, clipped, cpb, factorized, fire, levit, log_decay, table
from oracles.buckets import t5, t5_axes, t5_axis, t5_bucket
from oracles.common import (
    attend,
    biased,
    clip,
    offset,
    pair,
    positions,
    prefix_row,
    radii,
    rotate,
    rotated,
    sincos_1d,
    softmax,
    split_heads,
)
from oracles.content import deberta, decomposed, pape, shaw, transformer_xl
from oracles.directional import lookhere, views, xpos
from oracles.rotary import rope_axial, rope_mixed, rope_normalized
from oracles.streams import (
    causal_by_segment,
    masked_attention,
    permutation_masks,
    recurrent,
    segment_mask,
    two_stream,
)
from oracles.tokens import absolute, absolute_factorized, absolute_windowed, fourier, none, sincos, sincos_tokens, stretch

ADDED = (none, absolute, absolute_factorized, absolute_windowed, sincos, fourier)
BIAS = (table, levit, factorized, clipped, t5, cpb, alibi, log_decay, fire)
CONTENT = (shaw, decomposed, transformer_xl, deberta, pape)
ROTARY = (rope_axial, rope_mixed, rope_normalized, xpos)
ORACLES = {rule.__name__: rule for rule in (*ADDED, *BIAS, *CONTENT, *ROTARY, lookhere)}
