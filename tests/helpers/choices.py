"""A grid of attention calls, over which tests compare the choice of a backend: encodings, sizes, dtypes, gradients, devices."""

from collections.abc import Iterator

import torch

from helpers.variants import make
from vitrel import POSITIONS, Grid, Terms
from vitrel.ops.reference import Call

GRIDS = (Grid(9, 7, 1), Grid(14, 14, 1), Grid(28, 28), Grid(32, 33, 1), Grid(48, 50), Grid(64, 64))
WINDOWS = ((4, 4), (7, 7))
KINDS = (*((dtype, "cpu") for dtype in ("float32", "bfloat16", "float64")), ("bfloat16", "cuda"), ("float32", "meta"))


def calls() -> Iterator[tuple[str, str, Call]]:
    """Yield encoding, grid and window of each call, the rest of its name, and the call."""
    for key, encoding in POSITIONS.items():
        for grid in GRIDS:
            terms = make(key, grid, 2, 16)(grid) if encoding.site == "attention" else Terms()
            yield from _kinds(key, Call(entry="attention", terms=terms, grid=grid, queries=grid.tokens, **_PLAIN))
        for window in WINDOWS:
            terms = make(key, Grid(*window), 2, 16)(Grid(*window)) if encoding.site == "attention" else Terms()
            windowed = Call(
                entry="window_attention", terms=terms, grid=Grid(28, 30), window=window, shift=(1, 2), queries=840, **_PLAIN
            )
            yield from _kinds(key, windowed)


_PLAIN = {"heads": 2, "width": 16, "dtype": torch.float32, "device": torch.device("cpu"), "grad": False}


def _kinds(key: str, call: Call) -> Iterator[tuple[str, str, Call]]:
    where = f"{key} {'x'.join(map(str, call.grid))} {call.window or 'global'}"
    for dtype, device in KINDS:
        for grad in (False, True):
            for batch in (1, 8):
                kind = call._replace(dtype=getattr(torch, dtype), device=torch.device(device), grad=grad, batch=batch)
                yield where, f"{dtype} {device} {grad} {batch}", kind
    n = call.queries
    yield where, "mask", call._replace(mask=torch.ones(n, n, dtype=torch.bool)) if n < 3000 and not call.window else call
    yield where, "dropout", call._replace(dropout_p=0.1, grad=True)
    yield where, "fixed", call._replace(terms=_fixed(call.terms), grad=True)
    yield where, "wide", call._replace(width=96)
    if call.window is None:
        yield where, "last queries", call._replace(queries=n - 3)


def _fixed(terms: Terms) -> Terms:
    tables = tuple(t._replace(bias=None if t.bias is None else t.bias.detach()) for t in terms.tables)
    return terms._replace(tables=tables)
