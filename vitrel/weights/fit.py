"""The fits of `absolute_to_relative`: an encoding to attention maps, linear layers to a block's outputs, a model to features.

An encoding of any kind is fitted to the attention of the original block on several images: its parameters minimize the
Kullback-Leibler divergence KL(original || converted), mean over images, heads and queries, by L-BFGS. Before that, those that
add a bias are fitted by least squares to the mean gap in logits, which costs as much as one image and is a good start.

A rotation acts on pairs of channels of q and k, which were not trained for it. So the basis of q and k is changed first, per
head, in a way that leaves q . k as it is: afterwards the channels of q and k have equal power, the strongest come first, and
those rotate slowly. Its frequencies, and a bias of q and k that gives it a kernel without content, are then fitted from several
starts.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.layers import Attention, Block
from vitrel.models.backbone import Backbone
from vitrel.ops.reference import masked_logits
from vitrel.ops.window import windows
from vitrel.position import PositionEncoding, Terms
from vitrel.position.rope import RopeMixed
from vitrel.position.terms import parts_of

PREFIX_SHARE = 0.1  # weight of class and register tokens in the fits: they are few, but the class token feeds the head
_ITERATIONS, _START_ITERATIONS, _BIAS_ITERATIONS = 60, 25, 200
_STARTS = ((0.5, 1.0), (0.75, 1.0), (0.5, 0.3), (0.75, 0.1))  # (share of the channel pairs at rest, factor on the others)
_SLOWEST, _FASTEST = 0.15, 1.5  # radians per patch of the pairs that rotate at the start
_HIDDEN = -1e4  # added to the logits of keys that a query does not see; with -inf the divergence would be 0 * inf
_RATE, _BATCH, _PART, _WARMUP = 2e-4, 32, 8, 0.1  # of distillation: learning rate, images per update and at a time, warm-up
STEPS = 32  # updates of distillation
_JUDGED = 64  # images by which it is decided whether `distil` has helped


class Attended(NamedTuple):
    """Queries and keys [B, H, N, D] of a block before position acts, with the mask and the weight of each query in the fit.

    In windowed attention each window counts as an image of the batch. The weights [B, N] sum to 1.
    """

    q: Tensor  # [B, H, N, D]
    k: Tensor  # [B, H, N, D]
    grid: Grid  # of the N tokens
    mask: Tensor | None  # added to the logits, [B, 1, N, N]
    weight: Tensor  # of each query, [B, N], with sum 1

    def logits(self, terms: Terms) -> Tensor:
        """Return the logits before the softmax, [B, H, N, N], with the mask and an encoding's `terms` for the grid."""
        return masked_logits(self.q, self.k, terms, self.grid, self.mask)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` [B, H, N] over heads, and over queries by their weights."""
        return (values.mean(1) * self.weight).sum()


class Agreement(NamedTuple):
    """How closely attention follows a target's attention.

    `explained` is the share of the variance of the target's weights within rows, 1 at best; `divergence` is KL(target,
    attention) in nats.
    """

    explained: float  # share of the variance of its weights within rows that is explained; 1 is all
    divergence: float  # Kullback-Leibler divergence, in nats


def attended(block: Block, x: Tensor, grid: Grid) -> Attended:
    """Return the queries and keys of a block for its input x, [B, N, C] or [B, h, w, C] on `grid`, in float32.

    In windowed attention B, N and `grid` of the result are of windows.
    """
    attn = block.attn
    qkv = attn.project(x if block.post_norm else block.norm1(x)).float()
    share = torch.full((grid.tokens,), (1 - PREFIX_SHARE if grid.prefix else 1) / (grid.h * grid.w), device=x.device)
    share[: grid.prefix] = PREFIX_SHARE / max(grid.prefix, 1)
    share, mask = share / len(x), None
    if attn.window is None:
        q, k, _ = attn.heads(qkv)
        return Attended(q, k, grid, mask, share.expand(len(x), -1))
    window = Grid(*attn.window)
    layout = windows(grid.h, grid.w, attn.window, attn.shift, x.device)
    qkv = qkv.view(len(x), grid.tokens, -1)[:, layout.source].unflatten(1, (-1, window.tokens)).flatten(0, 1)
    q, k, _ = attn.heads(qkv)
    seen = layout.visible.view(-1, 1, window.tokens, window.tokens)
    mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, _HIDDEN).repeat(len(x), 1, 1, 1)
    weight = torch.zeros_like(layout.source, dtype=q.dtype).index_copy_(0, layout.inverse, share)  # 0 for padding
    return Attended(q, k, window, mask, weight.view(-1, window.tokens).repeat(len(x), 1))


@torch.no_grad()
def fit_attention(block: Block, x: Tensor, grid: Grid, target: Tensor, new_rotation: bool) -> tuple[Agreement, Agreement]:
    """Fit the encoding of a block in place to attention logits, and return the agreement with them before and after.

    An encoding without parameters stays as it is.

    Args:
        block: changed in place.
        x: the block's input.
        grid: of its tokens.
        target: [B, H, N, N], as of `Attended.logits`.
        new_rotation: whether the encoding holds a rotation that was not trained with these q and k. Their weights then change
            too (see the module), and for DeBERTa in any case, unless q and k are normalized.
    """
    encoding, here = block.position, attended(block, x, grid)
    before = agreement(here, target, here.logits(encoding(here.grid)))
    if not any(True for _ in encoding.parameters()):
        return before, before
    rotations = [part for part in parts_of(encoding) if isinstance(part, RopeMixed)] if new_rotation else []
    linear = not block.attn.cosine and isinstance(block.attn.q_norm, nn.Identity)  # q and k are linear in the tokens
    scale = encoding(here.grid).scale
    if linear and scale != 1:  # of DeBERTa, which would otherwise flatten the attention that is there
        block.attn.qkv.weight[: x.shape[-1]] /= scale
        if block.attn.qkv.bias is not None:
            block.attn.qkv.bias[: x.shape[-1]] /= scale
    if linear and rotations:
        change_basis(block.attn, here)
    here = attended(block, x, grid)
    shift = None
    if linear and rotations and block.attn.qkv.bias is not None:
        generator = torch.Generator().manual_seed(0)
        heads, width = here.q.shape[1], here.q.shape[-1]
        # both at 0 would be a saddle point
        shift = torch.stack((0.1 * torch.randn(heads, width, generator=generator), torch.zeros(heads, width))).to(x.device)
    fit_encoding(encoding, here, target, shift, rotations)
    if shift is not None:
        block.attn.qkv.bias[: 2 * x.shape[-1]] += shift.flatten()
    here = attended(block, x, grid)
    return before, agreement(here, target, here.logits(encoding(here.grid)))


def fit_encoding(
    encoding: PositionEncoding,
    here: Attended,
    target: Tensor,
    shift: Tensor | None = None,
    rotations: Iterable[RopeMixed] = (),
) -> None:
    """Fit an encoding's parameters, from their current values, so that attention follows that of given logits closely.

    Args:
        encoding: changed in place.
        here: queries and keys.
        target: logits, [B, H, N, N].
        shift: [2, H, D], added to q and to k and fitted too, in place.
        rotations: parts of the encoding whose frequencies are not fitted from their values, but from several starts.
    """
    fitted = [*encoding.parameters(), *([] if shift is None else [shift])]
    log_p = target.log_softmax(-1)
    p = log_p.exp()

    def divergence() -> Tensor:
        moved = here if shift is None else here._replace(q=here.q + shift[0, :, None], k=here.k + shift[1, :, None])
        return here.mean((p * (log_p - moved.logits(encoding(here.grid)).log_softmax(-1))).sum(-1))

    _fit_bias(encoding, here, target)
    ends = []
    initial = [parameter.detach().clone() for parameter in fitted]
    for start in _STARTS if rotations else ():
        _restore(fitted, initial)
        for part in rotations:
            set_frequencies(part, *start)
        ends.append((minimize(fitted, divergence, _START_ITERATIONS), [parameter.detach().clone() for parameter in fitted]))
    if ends:
        _restore(fitted, min(ends, key=lambda end: end[0])[1])
    minimize(fitted, divergence, _ITERATIONS)


def _fit_bias(encoding: PositionEncoding, here: Attended, target: Tensor) -> None:
    """Fit the parameters that an encoding's bias depends on, in place: by least squares to `target` less logits without bias.

    The difference is averaged over images first; queries count by their weights; a constant for each query is ignored.
    """
    with torch.no_grad():
        terms = encoding(here.grid)
        seen = torch.ones_like(target[:, :1]) if here.mask is None else (here.mask == 0).to(target.dtype)
        gap = ((target - here.logits(terms)) * seen).sum(0) / seen.sum(0).clamp(min=1)  # [H, N, N]
        nothing = Attended(torch.zeros_like(here.q[:1]), torch.zeros_like(here.k[:1]), here.grid, None, here.weight[:1])
        gap = gap + nothing.logits(terms)[0]
    weight = here.weight.sum(0)[:, None] * (seen.sum(0) > 0)  # a constant per query does not change its attention

    def distance() -> Tensor:
        left = gap - nothing.logits(encoding(here.grid))[0]
        left = left - (left * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1e-12)
        return (left.square() * weight).sum((-2, -1)).mean()

    minimize([*encoding.parameters()], distance, _BIAS_ITERATIONS)


def minimize(parameters: list[Tensor], loss: Callable[[], Tensor], iterations: int) -> float:
    """Minimize a loss in place by `iterations` of L-BFGS at most, and return its least value, which the parameters then give.

    `loss` is computed from their current values; parameters that it does not depend on stay as they are.
    """
    needed = [parameter.requires_grad for parameter in parameters]
    best, kept = math.inf, [parameter.detach().clone() for parameter in parameters]

    def closure() -> Tensor:
        nonlocal best, kept
        optimizer.zero_grad()
        value = loss()
        if value.requires_grad:
            value.backward()
        if value.item() < best:  # False for NaN
            best, kept = value.item(), [parameter.detach().clone() for parameter in parameters]
        return value

    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        options = dict(history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=1e-12)
        optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, max_eval=iterations * 5 // 4, **options)
        try:
            optimizer.step(closure)
        except RuntimeError as error:  # a step beyond the range of floats ends the search; the best values are kept
            if "without overflow" not in str(error):
                raise
    for parameter, needs in zip(parameters, needed, strict=True):
        parameter.grad = None
        parameter.requires_grad_(needs)
    _restore(parameters, kept)
    return best


@torch.no_grad()
def _restore(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def change_basis(attn: Attention, here: Attended) -> None:
    """Change the basis of q and k in `attn.qkv` in place, so that a rotation pairs the strongest channels of each head.

    q . k before position does not change. Over the patch tokens in `here`, the channels of q are then uncorrelated, and so are
    those of k; both have equal power in each channel, and the pairs (p, p + D/2) are in descending order of power. The layer
    must have neither cosine attention nor a norm of q and k.
    """
    heads, width = here.q.shape[1], here.q.shape[-1]
    order = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))  # channel 2p to p, 2p + 1 to p + D/2
    # [H, 3 * D]: rows of the weight that make q and k of a head
    q_rows, k_rows = torch.arange(2 * heads * width, device=here.q.device).view(2, heads, width)
    for head in range(heads):
        q, k = (_covariance(t[:, head, here.grid.prefix :].flatten(0, 1).double()) for t in (here.q, here.k))
        root = torch.linalg.cholesky(q)
        power, axes = torch.linalg.eigh(root.mT @ k @ root)  # in ascending order
        power, axes = power.flip(0).clamp(min=1e-12).sqrt(), axes.flip(1)
        change = (power.sqrt()[:, None] * (axes.mT @ torch.linalg.inv(root)))[order]
        for rows, matrix in ((q_rows[head], change), (k_rows[head], torch.linalg.inv(change).mT)):
            for parameter in (attn.qkv.weight, attn.qkv.bias):
                if parameter is not None:
                    parameter[rows] = (matrix @ parameter[rows].double()).to(parameter.dtype)


def _covariance(tokens: Tensor) -> Tensor:
    """Return the covariance [D, D] of tokens [n, D], with a little added to its diagonal, so that it can be inverted."""
    centered = tokens - tokens.mean(0)
    covariance = centered.mT @ centered / len(tokens)
    covariance.diagonal().add_(1e-4 * covariance.diagonal().mean())  # channels may be constant
    return covariance


@torch.no_grad()
def set_frequencies(part: RopeMixed, still: float, factor: float) -> None:
    """Set the frequencies of all heads in place: the first pairs do not rotate, the others slow to fast in all directions.

    `still` is the share of pairs that do not rotate, 0 to 1; `factor` multiplies all frequencies.
    """
    pairs = part.freqs.shape[-1]
    at_rest = int(pairs * still)
    magnitude = torch.zeros(pairs)
    magnitude[at_rest:] = factor * torch.linspace(math.log(_SLOWEST), math.log(_FASTEST), pairs - at_rest).exp()
    angle = torch.arange(pairs) * math.pi * (3 - 5**0.5)  # the golden angle, so that neighbors in speed differ in direction
    part.freqs.copy_(torch.stack((angle.sin() * magnitude, angle.cos() * magnitude))[:, None])


@torch.no_grad()
def agreement(here: Attended, target: Tensor, logits: Tensor) -> Agreement:
    """Return how closely attention with `logits` follows attention with the logits `target`, both [B, H, N, N], mask included.

    `here` has the queries' weights and the mask. With a target uniform in every row, `explained` is 1 or 0: equal or not.
    """
    log_p, log_q = target.log_softmax(-1), logits.log_softmax(-1)
    p = log_p.exp()
    seen = torch.ones_like(target[:, :1]) if here.mask is None else (here.mask == 0).to(target.dtype)
    total = here.mean((p - seen / seen.sum(-1, keepdim=True)).square().sum(-1))
    left = here.mean((p - log_q.exp()).square().sum(-1))
    explained = 1 - (left / total).item() if total > 0 else float(left == 0)
    return Agreement(explained, here.mean((p * (log_p - log_q)).sum(-1)).item())


@torch.no_grad()
def refit_linear(layer: nn.Linear, batches: Iterable[tuple[Tensor, Tensor, Tensor]], ridge: float = 1.0) -> None:
    """Update a linear layer in place by weighted ridge regression from its inputs to targets.

    Args:
        layer: changed in place.
        batches: (input [..., I], target [..., O], weight [...] of each token, 0 or more), at least one. A target is an output
            of the layer, with its bias.
        ridge: penalty on the squared change of the weights (not of the bias), in units of the mean over input channels of the
            weighted sum of squares.
    """
    inputs, biased, device = layer.in_features, layer.bias is not None, layer.weight.device
    normal = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64, device=device)
    target_sums = torch.zeros(inputs + 1, layer.out_features, dtype=torch.float64, device=device)
    for x, target, weight in batches:
        root = weight.flatten()[:, None].sqrt()
        gap = (target - layer(x)).flatten(0, -2) * root
        tokens = F.pad(x, (0, 1), value=float(biased)).flatten(0, -2) * root  # a last channel for the bias
        normal += tokens.mT @ tokens
        target_sums += tokens.mT @ gap
    normal.diagonal()[:-1] += ridge * normal.diagonal()[:-1].mean()
    normal.diagonal()[-1] += not biased  # else the matrix is singular
    change = torch.linalg.solve(normal, target_sums).mT  # [O, I + 1]
    layer.weight.add_(change[:, :-1].to(layer.weight.dtype))
    if biased:
        layer.bias.add_(change[:, -1].to(layer.bias.dtype))


def distil(model: Backbone, original: Backbone, images: Tensor) -> None:
    """Train a model in place, without labels, to give the original's last features on images and their mirror images.

    Each of 32 updates takes 32 of the images [B, C, height, width]; both models must be in evaluation mode. The loss is
    the squared distance of each token, divided by the variance of the original's; class and register tokens together count as
    much as patches. Unless the loss of the first 64 images is smaller afterwards, the model stays as it was: updates of this
    size can only harm a model that already follows the original closely.
    """
    scales = model.position_lr_scales()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [p for name, p in named.items() if scales.get(name, 1.0) == scale], "lr": _RATE * scale}
              for scale in sorted({scales.get(name, 1.0) for name in named})]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    warmup = max(1, round(_WARMUP * STEPS))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, i - warmup) / max(1, STEPS - warmup)))
    )
    generator = torch.Generator().manual_seed(0)
    drawn, size = _draw(len(images), STEPS * _BATCH, generator), min(_PART, _BATCH)

    def loss_of(image: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = original.forward_features(image)
        left = ((model.forward_features(image) - wanted).square() / wanted.var(-1, keepdim=True)).mean(-1).flatten(1)
        prefix, patches = left[:, : model.num_prefix_tokens], left[:, model.num_prefix_tokens :]
        return patches.mean() + (prefix.mean() if prefix.numel() else 0)

    @torch.no_grad()
    def loss_now() -> float:
        parts = images[:_JUDGED].to(next(iter(named.values())).device).split(size)
        return sum(loss_of(part).item() * len(part) for part in parts)

    initial, loss_before = [parameter.detach().clone() for parameter in named.values()], loss_now()
    for _ in range(STEPS):
        mirrored = torch.rand((), generator=generator) < 0.5
        for _ in range(_BATCH // size):  # in parts, for memory
            image = images[[next(drawn) for _ in range(size)]].to(next(iter(named.values())).device)
            image = image.flip(-1) if mirrored else image
            with torch.enable_grad():
                (loss_of(image) * size / _BATCH).backward()
        nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if not loss_now() < loss_before:
        _restore(named.values(), initial)


def _draw(n: int, count: int, generator: torch.Generator) -> Iterator[int]:
    """Yield at least `count` indices below n: one random permutation after another."""
    for _ in range(-(-count // n)):
        yield from torch.randperm(n, generator=generator).tolist()
