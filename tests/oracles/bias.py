"""Encodings that add a number to each logit: learned tables, small networks and distances."""

import math

import numpy as np

from oracles.common import biased, clip, pair, radii


def table(q, k, v, h, w, prefix=0, *, per_head=True, relative_position_bias_table):
    """Swin (2103.14030, eq. 4): + B[dy, dx], B [(2h-1)(2w-1) (+3), H], dy-major from the most negative; prefix rows last.

    per_head False: B has one column, for all heads.
    """
    B, rows = columns_of(relative_position_bias_table, per_head, q), (2 * h - 1) * (2 * w - 1)
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: B[(dy + h - 1) * (2 * w - 1) + dx + w - 1, n], B[rows:])


def columns_of(table, per_head, q):
    """Table [R, H], from [R, 1] if not per_head."""
    assert table.shape[1] == (len(q) if per_head else 1)
    return table if per_head else np.repeat(table, len(q), axis=1)


def levit(q, k, v, h, w, prefix=0, *, attention_biases):
    """LeViT (2104.01136, section 4.2): + B[|dy| w + |dx|], B [H, h*w (+3)]; the columns of prefix tokens come last."""
    B = attention_biases
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: B[n, abs(dy) * w + abs(dx)], B[:, h * w :].T)


def factorized(q, k, v, h, w, prefix=0, *, table_h, table_w):
    """+ B_h[dy] + B_w[dx]; table_h [2h-1 (+3), H] alone has the prefix rows, table_w is [2w-1, H]."""
    rows = 2 * h - 1
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: table_h[dy + h - 1, n] + table_w[dx + w - 1, n], table_h[rows:])


def clipped(q, k, v, h, w, prefix=0, *, trained=None, radius=None, per_head=True, relative_position_bias_table):
    """Shaw et al.'s clipping (1803.02155, section 3.2) of Swin's table: + B[clip(dy, Rh), clip(dx, Rw)].

    B [(2Rh+1)(2Rw+1) (+3), H], dy-major from the most negative, prefix rows last; one column for all heads if not per_head.
    """
    B, (Rh, Rw) = columns_of(relative_position_bias_table, per_head, q), radii(radius, trained or (h, w))
    rows = (2 * Rh + 1) * (2 * Rw + 1)
    assert len(B) == rows + (3 if prefix else 0)

    def bias(n, dy, dx):
        return B[(clip(dy, Rh) + Rh) * (2 * Rw + 1) + clip(dx, Rw) + Rw, n]

    return biased(q, k, v, h, w, prefix, bias, B[rows:])


def log_spaced(step, reference):
    """Swin V2's coordinate of an offset along an axis: sign * log2(1 + 8 |step| / (reference - 1)) / log2(8)."""
    return math.copysign(math.log2(1 + 8 * abs(step) / max(reference - 1, 1)) / math.log2(8), step)


def cpb(q, k, v, h, w, prefix=0, *, trained=None, hidden=512, policy="keep", pretrained_window=None, prefix_bias=None, **mlp):
    """Swin V2 (2111.09883, section 3.3): + 16 sigmoid(MLP(g(dy), g(dx))), g `log_spaced` by the training grid.

    cpb_mlp.0.weight [hidden, 2], cpb_mlp.0.bias [hidden], cpb_mlp.2.weight [H, hidden]; prefix_bias [3, H] is added unchanged.
    policy "keep": g has the training grid (pretrained_window, if given); "renormalize": the evaluated grid.
    """
    trained_window = pair(pretrained_window or trained or (h, w))
    reference = {"keep": trained_window, "renormalize": (h, w)}[policy]
    W1, b1, W2 = (mlp.pop(f"cpb_mlp.{name}") for name in ("0.weight", "0.bias", "2.weight"))
    assert not mlp and len(W1) == hidden and (prefix_bias is not None) == bool(prefix)

    def bias(n, *delta):
        g = np.array([log_spaced(step, length) for step, length in zip(delta, reference, strict=True)])
        return 16 / (1 + math.exp(-np.dot(W2[n], np.maximum(W1 @ g + b1, 0))))

    return biased(q, k, v, h, w, prefix, bias, prefix_bias)


def stretched(n, delta, grid, trained, direction, policy):
    """Return the offset whose length is penalized: "renormalize" measures it in training patches, then `direction` weighs it.

    direction [4, H] or None: exp(direction[c, head]) multiplies dy > 0, dy < 0, dx > 0 and dx < 0 for c = 0, 1, 2, 3.
    """
    ratios = {"keep": (1, 1), "renormalize": [a / b for a, b in zip(trained or grid, grid, strict=True)]}[policy]
    steps = []
    for axis in range(2):
        row = 2 * axis + (0 if delta[axis] > 0 else 1)
        steps.append(delta[axis] * ratios[axis] * (1 if direction is None else math.exp(direction[row][n])))
    return steps


LENGTHS = {
    "euclidean": math.hypot,
    "l1": lambda y, x: abs(y) + abs(x),
    "squared": lambda y, x: y * y + x * x,
}


def alibi(
    q,
    k,
    v,
    h,
    w,
    prefix=0,
    *,
    trained=None,
    distance="euclidean",
    learnable=False,
    directional=False,
    policy="keep",
    slopes=None,
    direction=None,
):
    """Symmetric ALiBi (2108.12409) in 2-D: - m_H * distance; no bias with a prefix token.

    m_i = 2^(-8i/H), i = 1..H, or `slopes` [H] if learnable; `direction` [4, H] if directional: see `stretched`.
    """
    assert (slopes is not None) == learnable and (direction is not None) == directional
    m = slopes if learnable else [2 ** (-8 * i / len(q)) for i in range(1, len(q) + 1)]

    def bias(n, *delta):
        return -m[n] * LENGTHS[distance](*stretched(n, delta, (h, w), trained, direction, policy))

    return biased(q, k, v, h, w, prefix, bias)


def log_decay(
    q,
    k,
    v,
    h,
    w,
    prefix=0,
    *,
    trained=None,
    decay=None,
    distance="euclidean",
    directional=False,
    policy="keep",
    log_a=None,
    log_b=None,
    direction=None,
):
    """KERPLE-log (2205.09921): - a_H log(1 + b_H * distance), a = exp(log_a), b = exp(log_b), both [H].

    A fixed `decay` is lambda: - lambda log(1 + distance), without log_a and log_b. directional and policy as `alibi`.
    """
    fixed = decay is not None
    assert (log_a is None) == (log_b is None) == fixed and (direction is not None) == directional
    a, b = ([decay] * len(q), [1.0] * len(q)) if fixed else (np.exp(log_a), np.exp(log_b))

    def bias(n, *delta):
        return -a[n] * math.log(1 + b[n] * LENGTHS[distance](*stretched(n, delta, (h, w), trained, direction, policy)))

    return biased(q, k, v, h, w, prefix, bias)


def fire(q, k, v, h, w, prefix=0, *, trained=None, c, L, prefix_bias=None, **mlp):
    """FIRE (2310.04418) in 2-D: + MLP(log(1 + |c| dist) / log(1 + |c| max(|L| n, h, w)))_H, dist Euclidean.

    n is the longer side of the training grid, so L is the multiplier of the paper's code.
    c, L [1]; mlp.0.weight [32, 1], mlp.0.bias [32], mlp.2.weight [H, 32], mlp.2.bias [H]; prefix_bias [3, H].
    """
    W1, b1, W2, b2 = (mlp.pop(f"mlp.{name}") for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    assert not mlp and (prefix_bias is not None) == bool(prefix)
    c, top = abs(c[0]), max(abs(L[0]) * max(trained or (h, w)), h, w)

    def bias(n, dy, dx):
        position = math.log(1 + c * math.hypot(dy, dx)) / math.log(1 + c * top)
        return np.dot(W2[n], np.maximum(W1[:, 0] * position + b1, 0)) + b2[n]

    return biased(q, k, v, h, w, prefix, bias, prefix_bias)
