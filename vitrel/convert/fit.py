"""Least squares behind `absolute_to_relative`: the encoding closest to given logits, and the weights to given outputs.

Softmax does not see a constant per query, so logits are fitted up to one. With D[i, j] the mean over images of the logits
wanted minus those there, and r(i, j) the offset class, a table is the solution of min over B, c of sum_ij (D[i, j] - B[r(i,
j)] - c[i])^2, prefix rows included: linear and exact, at the cost of one image whatever their number. A rotation has no such
form; its frequencies descend from several scales of their initial values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.ops.reference import rotate
from vitrel.position import POSITIONS, PositionEncoding

TABLES = ("table", "factorised")
ROTATIONS = ("rope_mixed",)
_STEPS, _RATE, _SCALES, _IMAGES = 100, 0.02, (0.03, 0.1, 0.3, 1.0), 8  # of the descent to a rotation


def parts(encoding: PositionEncoding, keys: Sequence[str]) -> list[PositionEncoding]:
    """Those parts of an encoding, itself or in a composition, that are registered under one of `keys`."""
    kinds = tuple(POSITIONS[key] for key in keys)
    return [part for part in encoding.modules() if isinstance(part, kinds)]


def explained(wanted: Tensor, given: Tensor) -> float:
    """Share of the variance of `wanted` [H, N, N] within its rows that `given` accounts for: 1 is all, below 0 does harm."""
    total = _centred(wanted).square().sum().item()
    return 1 - _centred(wanted - given).square().sum().item() / total if total else 1.0


def fit_tables(part: PositionEncoding, gap: Tensor, grid: Grid, ridge: float = 1e-3) -> None:
    """Set a table, or two along the axes, on its own grid to the least squares fit of `gap` [H, N, N], wanted minus there.

    ridge: added to how often each row is addressed, as a share of it. It settles what pairs leave open, one constant per kind
    of query, and hardly acts otherwise.
    """
    tables = [*part.parameters(recurse=False)]  # [R, H] each
    place = _unknowns(grid, [len(table) for table in tables], gap.device)  # [T, N, N]
    k, n = sum(map(len, tables)), grid.tokens
    rows = gap.new_zeros(n, k + 1, dtype=torch.float64)  # how often query i addresses each unknown; the last is none
    aim = gap.new_zeros(len(gap), k + 1, dtype=torch.float64)
    normal = rows.new_zeros((k + 1) ** 2)
    for one in place:
        rows.scatter_add_(1, one, torch.ones_like(one, dtype=rows.dtype))
        aim.index_add_(1, one.flatten(), _centred(gap.double()).flatten(1))
        for other in place:
            normal += torch.bincount((one * (k + 1) + other).flatten(), minlength=len(normal))
    normal = (normal.view(k + 1, k + 1) - rows.mT @ rows / n)[:k, :k]
    normal.diagonal().add_(ridge * rows[:, :k].sum(0))
    solution = torch.linalg.solve(normal, aim[:, :k].mT)  # [K, H]
    for table, fitted in zip(tables, solution.split([len(table) for table in tables]), strict=True):
        table.copy_(fitted)


def fit_rotation(part: PositionEncoding, q: Tensor, k: Tensor, gap: Tensor, scale: float, grid: Grid) -> None:
    """Set the frequencies of a rotation so that it changes the mean logits of q and k [B, H, N, D] by `gap` [H, N, N].

    From the initial frequencies times several factors, each descended from by Adam; the best is kept, 0 if none does good.
    """
    q, k = (t[:_IMAGES, :, grid.prefix :].float() for t in (q, k))
    gap = gap[:, grid.prefix :, grid.prefix :].float()
    patches, initial = Grid(grid.h, grid.w), part.freqs.detach().clone()
    still = mean_logits(q, k, scale)

    def loss() -> Tensor:
        cos, sin = part(patches).rotary
        return _centred(gap + still - mean_logits(rotate(q, cos, sin), rotate(k, cos, sin), scale)).square().mean()

    best, found = _centred(gap).square().mean(), torch.zeros_like(initial)
    for factor in _SCALES:
        part.freqs.copy_(initial * factor)
        with torch.enable_grad():
            adam = torch.optim.Adam([part.freqs], lr=_RATE * factor)
            for _ in range(_STEPS):
                adam.zero_grad()
                loss().backward()
                adam.step()
        if (end := loss()) < best:
            best, found = end, part.freqs.detach().clone()
    part.freqs.grad = None
    part.freqs.copy_(found)


def mean_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Mean over images of scale * q . k, [B, H, N, D] -> [H, N, N], without the logits of each image."""
    images = len(q)
    q, k = (t.permute(1, 2, 0, 3).flatten(2) for t in (q, k))  # [H, N, B*D]
    return q @ k.mT * (scale / images)


def refit_linear(layer: nn.Linear, x: Tensor, wanted: Tensor, weight: Tensor, ridge: float) -> None:
    """Change a linear layer so that layer(x [B, N, I]) comes closest to `wanted` [B, N, O], by weighted ridge regression.

    weight [B, N] of each token; ridge: cost of changing the weights, as a share of the mean power of an input channel.
    """
    inputs, biased = layer.in_features, layer.bias is not None
    normal = x.new_zeros(inputs + 1, inputs + 1, dtype=torch.float64)
    aim = x.new_zeros(inputs + 1, layer.out_features, dtype=torch.float64)
    for one, goal, share in zip(x, wanted, weight[..., None], strict=True):  # image by image, summed in double precision
        gap, one = goal - layer(one), nn.functional.pad(one, (0, 1), value=float(biased))  # last, that of the bias
        normal += one.mT @ (one * share)
        aim += one.mT @ (gap * share)
    normal.diagonal()[:-1] += ridge * normal.diagonal()[:-1].mean()
    normal.diagonal()[-1] += not biased
    change = torch.linalg.solve(normal, aim).mT  # [O, I + 1]
    layer.weight.add_(change[:, :-1].to(layer.weight.dtype))
    if biased:
        layer.bias.add_(change[:, -1].to(layer.bias.dtype))


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _unknowns(grid: Grid, lengths: list[int], device: torch.device) -> Tensor:
    """Place of each table's row for every pair in the vector of all tables' rows, one past its end for none, [T, N, N]."""
    if len(lengths) == 1:
        return grid.index("hw", device)[None]
    rows, columns = grid.index("h", device), grid.index("w", device)
    none = columns >= lengths[1]  # the tokens before the patches have rows in the first table alone
    return torch.stack((rows, torch.where(none, sum(lengths), columns + lengths[0])))
