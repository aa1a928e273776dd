"""T5's logarithmic buckets, per axis."""

from oracles.common import biased, pair


def t5_bucket(delta, num_buckets=32, max_distance=128, bidirectional=True):
    """T5 (1910.10683) bucket of a query-minus-key offset, exact in integers; a later key (delta < 0) adds num_buckets/2.

    Per sign, distances below half its buckets are exact; bucket e + t starts at e*(max_distance/e)^(t/(count - e)).
    """
    count = num_buckets // 2 if bidirectional else num_buckets
    start = count if bidirectional and delta < 0 else 0
    distance = abs(delta) if bidirectional else max(delta, 0)
    exact = count // 2
    if distance < exact:
        return start + distance
    logs = count - exact
    reached = [t for t in range(logs) if distance**logs * exact**t >= max_distance**t * exact**logs]
    return start + exact + reached[-1]


def t5_axis(length, num_buckets=None, max_distance=None, bidirectional=True):
    """(num_buckets, max_distance) of an axis of `length` patches in training; given values are kept, but an axis of one patch
    has one bucket.

    By default the farthest training offset, and the most buckets per sign, but no more than 16 and half the length (plus one,
    so that distances are exact below a quarter of it), that the training distances reach without a gap.
    """
    farthest = length - 1 if max_distance is None else max_distance
    if length == 1:
        return 1, farthest
    if num_buckets is not None:
        return num_buckets, farthest
    reached = [
        count
        for count in range(1, min(16, length // 2 + 1) + 1)
        if {t5_bucket(distance, count, farthest, False) for distance in range(length)} == set(range(count))
    ]
    return (2 if bidirectional else 1) * max(reached), farthest


def t5_axes(trained, num_buckets=None, max_distance=None, bidirectional=True):
    """`t5_axis` of the rows and columns of a training grid; num_buckets, max_distance: one number, or one of each axis."""
    reaches = pair(max_distance) if max_distance is not None else (None, None)
    if isinstance(num_buckets, int | None):
        return [t5_axis(n, num_buckets, reach, bidirectional) for n, reach in zip(trained, reaches, strict=True)]
    lengths = zip(trained, num_buckets, reaches, strict=True)
    return [(count, t5_axis(n, None, reach)[1]) for n, count, reach in lengths]


def t5(
    q,
    k,
    v,
    h,
    w,
    prefix=0,
    *,
    trained=None,
    num_buckets=None,
    max_distance=None,
    mode="product",
    bidirectional=True,
    relative_attention_bias=None,
    table_h=None,
    table_w=None,
):
    """T5 (1910.10683, section 2.1) per axis: one bias per pair of buckets (product) or one per axis, summed.

    product: relative_attention_bias [n_h * n_w (+3), H], row bucket_h * n_w + bucket_w; sum: table_h [n_h (+3), H] and
    table_w [n_w, H]. An axis of one bucket has row 0 for every offset.
    """
    axes = t5_axes(trained or (h, w), num_buckets, max_distance, bidirectional)
    (n_h, _), (n_w, _) = axes
    extra = 3 if prefix else 0

    def rows(*delta):
        return [
            0 if count == 1 else t5_bucket(step, count, farthest, bidirectional)
            for step, (count, farthest) in zip(delta, axes, strict=True)
        ]

    if mode == "sum":
        assert relative_attention_bias is None and (len(table_h), len(table_w)) == (n_h + extra, n_w)

        def along_axes(n, dy, dx):
            row_h, row_w = rows(dy, dx)
            return table_h[row_h, n] + table_w[row_w, n]

        return biased(q, k, v, h, w, prefix, along_axes, table_h[n_h:])
    assert mode == "product" and table_h is None and table_w is None
    assert len(relative_attention_bias) == n_h * n_w + extra

    def of_pairs(n, dy, dx):
        row_h, row_w = rows(dy, dx)
        return relative_attention_bias[row_h * n_w + row_w, n]

    return biased(q, k, v, h, w, prefix, of_pairs, relative_attention_bias[n_h * n_w :])
