"""Least-squares fits of `absolute_to_relative`: encodings to attention logits, linear layers to outputs.

Softmax ignores a constant per query, so logits are fitted up to one. With D[i, j] the gap (the mean over images of the target
logits minus the current ones) and r(i, j) the offset class, a table B minimises sum_ij (D[i, j] - B[r(i, j)] - c[i])^2 over B
and c, prefix rows included: a linear problem, solved exactly, whose cost does not depend on the number of images. The
frequencies of a rotation have no closed form: Adam runs from several multiples of their initial values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.ops.reference import rotate
from vitrel.position import POSITIONS, PositionEncoding

TABLES = ("table", "factorised")
ROTATIONS = ("rope_mixed",)
_STEPS, _RATE, _SCALES, _IMAGES = 100, 0.02, (0.03, 0.1, 0.3, 1.0), 8  # of Adam, for a rotation


def parts(encoding: PositionEncoding, keys: Sequence[str]) -> list[PositionEncoding]:
    """Return the encodings in `encoding` (itself, or parts of a composition) whose key is one of `keys`."""
    kinds = tuple(POSITIONS[key] for key in keys)
    return [part for part in encoding.modules() if isinstance(part, kinds)]


def explained(target: Tensor, fitted: Tensor) -> float:
    """R^2 of `fitted` as a prediction of `target`, both [H, N, N], each row minus its mean: 1 is exact, below 0 is harmful.

    1.0 if every row of `target` is constant, whatever is fitted.
    """
    total = _centred(target).square().sum().item()
    return 1 - _centred(target - fitted).square().sum().item() / total if total else 1.0


def fit_tables(part: PositionEncoding, gap: Tensor, grid: Grid, ridge: float = 1e-3) -> None:
    """Set a table, or the two of `factorised`, on its own grid to the least-squares fit of `gap` [H, N, N].

    Their values are overwritten, not added to. gap: target logits minus those without these tables. grid: the part's own, with
    prefix tokens. ridge: penalty, as a share of the number of pairs that read each row. It makes the solution unique (a
    constant per kind of query does not change the attention) and has hardly any other effect.
    """
    tables = [*part.parameters(recurse=False)]  # [R, H] each
    unknowns = _unknowns(grid, [len(table) for table in tables], gap.device)  # [T, N, N]
    k, n = sum(map(len, tables)), grid.tokens
    rows = gap.new_zeros(n, k + 1, dtype=torch.float64)  # number of keys with which query i reads each unknown
    target_sums = gap.new_zeros(len(gap), k + 1, dtype=torch.float64)
    normal = rows.new_zeros((k + 1) ** 2)
    for index in unknowns:
        rows.scatter_add_(1, index, torch.ones_like(index, dtype=rows.dtype))
        target_sums.index_add_(1, index.flatten(), _centred(gap.double()).flatten(1))
        for other in unknowns:
            normal += torch.bincount((index * (k + 1) + other).flatten(), minlength=len(normal))
    normal = (normal.view(k + 1, k + 1) - rows.mT @ rows / n)[:k, :k]
    normal.diagonal().add_(ridge * rows[:, :k].sum(0))
    solution = torch.linalg.solve(normal, target_sums[:, :k].mT)  # [K, H]
    for table, fitted in zip(tables, solution.split([len(table) for table in tables]), strict=True):
        table.copy_(fitted)


def fit_rotation(part: PositionEncoding, q: Tensor, k: Tensor, gap: Tensor, scale: float, grid: Grid) -> None:
    """Set the frequencies of a rotation so that it changes the mean logits of q and k [B, H, N, D] by `gap` [H, N, N].

    q, k: before this rotation. Only patches (not prefix tokens) of the first 8 images are fitted, and constants per row of
    `gap` are ignored. Adam runs from the part's current frequencies times several factors; the result with the lowest loss is
    used, frequencies of 0 if that is better.
    """
    q, k = (t[:_IMAGES, :, grid.prefix :].float() for t in (q, k))
    gap = gap[:, grid.prefix :, grid.prefix :].float()
    patches, initial = Grid(grid.h, grid.w), part.freqs.detach().clone()
    unrotated = mean_logits(q, k, scale)

    def loss() -> Tensor:
        cos, sin = part(patches).rotary
        return _centred(gap + unrotated - mean_logits(rotate(q, cos, sin), rotate(k, cos, sin), scale)).square().mean()

    best, freqs = _centred(gap).square().mean(), torch.zeros_like(initial)
    for factor in _SCALES:
        part.freqs.copy_(initial * factor)
        with torch.enable_grad():
            adam = torch.optim.Adam([part.freqs], lr=_RATE * factor)
            for _ in range(_STEPS):
                adam.zero_grad()
                loss().backward()
                adam.step()
        if (end := loss()) < best:
            best, freqs = end, part.freqs.detach().clone()
    part.freqs.grad = None
    part.freqs.copy_(freqs)


def mean_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Mean over images of scale * q . k, [B, H, N, D] -> [H, N, N]; the logits of single images are never computed."""
    images = len(q)
    q, k = (t.permute(1, 2, 0, 3).flatten(2) for t in (q, k))  # [H, N, B*D]
    return q @ k.mT * (scale / images)


def refit_linear(layer: nn.Linear, x: Tensor, target: Tensor, weight: Tensor, ridge: float) -> None:
    """Update a linear layer in place by weighted ridge regression from its input x [B, N, I] to `target` [B, N, O].

    weight: [B, N], of each token. ridge: penalty on the change of the weights (not of the bias), in units of the mean weighted
    power of an input channel.
    """
    inputs, biased = layer.in_features, layer.bias is not None
    normal = x.new_zeros(inputs + 1, inputs + 1, dtype=torch.float64)
    target_sums = x.new_zeros(inputs + 1, layer.out_features, dtype=torch.float64)
    for tokens, goal, share in zip(x, target, weight[..., None], strict=True):  # image by image, summed in double precision
        gap = goal - layer(tokens)
        tokens = nn.functional.pad(tokens, (0, 1), value=float(biased))  # a last channel for the bias
        normal += tokens.mT @ (tokens * share)
        target_sums += tokens.mT @ (gap * share)
    normal.diagonal()[:-1] += ridge * normal.diagonal()[:-1].mean()
    normal.diagonal()[-1] += not biased  # else the matrix is singular
    change = torch.linalg.solve(normal, target_sums).mT  # [O, I + 1]
    layer.weight.add_(change[:, :-1].to(layer.weight.dtype))
    if biased:
        layer.bias.add_(change[:, -1].to(layer.bias.dtype))


def _centred(logits: Tensor) -> Tensor:
    """Subtract the mean of each row."""
    return logits - logits.mean(-1, keepdim=True)


def _unknowns(grid: Grid, lengths: list[int], device: torch.device) -> Tensor:
    """Index [T, N, N] of each table's row for a pair, in the concatenated tables; the index after their end means no row."""
    if len(lengths) == 1:
        return grid.index("hw", device)[None]
    rows, columns = grid.index("h", device), grid.index("w", device)
    none = columns >= lengths[1]  # pairs with prefix tokens have rows in the first table alone
    return torch.stack((rows, torch.where(none, sum(lengths), columns + lengths[0])))
