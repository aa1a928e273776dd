"""XLNet's permutation objective (arXiv 1906.08237, sec. 2.2 and 2.3) over the patches of an image, with two-stream attention.

    python examples/two_stream.py --position transformer_xl none

Patches are predicted in a random order, each from the patches before it. The content stream of a patch knows its pixels; the
query stream knows only its position, so it can predict them. Both streams read the keys and values of the content stream. The
order changes only the attention mask: positions stay those of the grid.

The command trains `PatchPredictor` on drawn shapes, one to two minutes of one CPU core per encoding, and prints the error
on images that it was not trained on (results/two_stream). Without position, every patch gets the same prediction from the
same visible patches.
"""

import argparse
import time

import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.data.shapes import Shapes
from vitrel.grid import Grid
from vitrel.ops.dispatch import attention
from vitrel.position import POSITIONS, create_position
from vitrel.position.terms import Terms

SIZE = 48  # of the drawn images, in pixels


def permutation_masks(order: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the masks (content, query), each [..., M, keys] bool: keys that each of the M queries, the last of `keys` tokens,
    may see.

    order: permutation of 0..M-1, [M] or [B, M], the token predicted at each step. The content stream sees tokens up to its own
    step, the query stream those before it; keys before the last M (memory, prefix tokens) are seen by all. ValueError if
    `order` is not a permutation, or there are fewer keys than tokens.
    """
    m = order.shape[-1]
    if keys < m:
        raise ValueError(f"{keys} keys, but an order of {m} tokens: keys must include all of them, after those of memory")
    rank = order.argsort(-1)  # [..., M], the step of each token
    has_values = not (torch.compiler.is_compiling() or order.is_meta)
    if has_values and (
        order.is_floating_point() or bool((order.gather(-1, rank) != torch.arange(m, device=order.device)).any())
    ):
        raise ValueError(f"order must be a permutation of 0..{m - 1}, such as torch.randperm({m})")
    before = rank[..., None, :] < rank[..., None]  # [..., M, M]
    earlier = before.new_ones(*before.shape[:-1], keys - m)
    itself = torch.eye(m, dtype=torch.bool, device=order.device)
    return torch.cat((earlier, before | itself), -1), torch.cat((earlier, before), -1)


def two_stream_attention(
    content: Tensor,
    query: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    grid: Grid,
    order: Tensor,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the attention of both streams: queries [B, H, M, D] of each, keys and values [B, H, N, D] of the content -> two
    [B, H, M, D].

    grid: of the keys, N = grid.tokens; the M tokens are its last ones, and all tokens before them (memory, prefix tokens) are
    seen by all. order: see `permutation_masks`. In the query stream, a token that is first in the order with no other keys
    returns 0. Raises ValueError as `permutation_masks` and `vitrel.ops.attention`, and for streams of different shapes.
    """
    if content.shape != query.shape or order.shape[-1] != content.shape[-2]:
        raise ValueError(
            f"streams of shapes {tuple(content.shape)} and {tuple(query.shape)} under an order of {order.shape[-1]} tokens: "
            "both streams need one query for each token of the order"
        )
    if order.dim() > 2 or (order.dim() == 2 and len(order) not in (1, len(content))):
        raise ValueError(f"an order of shape {tuple(order.shape)} for a batch of {len(content)}: give [M] for all, or [B, M]")
    masks = (mask[..., None, :, :] for mask in permutation_masks(order, grid.tokens))  # [(B,) 1, M, N]
    first, second = (
        attention(q, k, v, terms, grid, mask, dropout_p, backend) for q, mask in zip((content, query), masks, strict=True)
    )
    return first, second


class TwoStreamBlock(nn.Module):
    """A pre-norm transformer block whose weights both streams share (XLNet, sec. 2.3)."""

    def __init__(self, dim: int, num_heads: int, position: str, grid: Grid) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = timm.layers.Mlp(dim, 4 * dim)
        self.position = create_position(position, grid, num_heads, dim // num_heads)
        self.num_heads = num_heads

    def forward(self, content: Tensor, query: Tensor, grid: Grid, order: Tensor) -> tuple[Tensor, Tensor]:
        """Content and query streams [B, N, C] after the block; order: see `permutation_masks`."""
        q, k, v = self.qkv(self.norm1(content)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weight, bias = self.qkv.weight.chunk(3)[0], self.qkv.bias.chunk(3)[0]
        g = F.linear(self.norm1(query), weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        attended = two_stream_attention(q, g, k, v, self.position(grid), grid, order)
        streams = [x + self.proj(out.transpose(1, 2).flatten(2)) for x, out in zip((content, query), attended, strict=True)]
        first, second = (x + self.mlp(self.norm2(x)) for x in streams)
        return first, second


class PatchPredictor(nn.Module):
    """Predicts the pixels of every patch of an image from the patches before it in an order.

    position: one or several keys of POSITIONS that act in attention. The query stream starts from one learned vector, the same
    at every patch, so that position enters through attention alone. ValueError for an encoding that is added to tokens.
    """

    def __init__(self, position: str, patch: int = 4, dim: int = 64, num_heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        if added := [key for key in position.split("+") if key in POSITIONS and POSITIONS[key].site == "tokens"]:
            raise ValueError(f"{added[0]} is added to tokens, but the query stream gets its position in attention")
        self.grid, self.patch = Grid(SIZE // patch, SIZE // patch), patch
        self.embed = nn.Linear(3 * patch**2, dim)
        self.query = nn.Parameter(torch.randn(dim) * 0.02)
        self.blocks = nn.ModuleList(TwoStreamBlock(dim, num_heads, position, self.grid) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 3 * patch**2)

    def patches(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, N, 3 * patch * patch], row by row."""
        return F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)

    def forward(self, images: Tensor, order: Tensor) -> Tensor:
        """The predicted patches [B, N, 3 * patch * patch] of images [B, 3, H, W] under orders [B, N] or [N]."""
        content = self.embed(self.patches(images))
        query = self.query.expand_as(content)
        for block in self.blocks:
            content, query = block(content, query, self.grid, order)
        return self.head(self.norm(query))


def prediction_error(model: PatchPredictor, images: Tensor, order: Tensor) -> Tensor:
    """Mean squared error over the second half of each order, where something is visible (sec. 2.2, partial prediction).

    order: [B, N], one permutation per image.
    """
    predicted = order[:, order.shape[1] // 2 :, None]
    error = (model(images, order) - model.patches(images)).square().mean(-1, keepdim=True)
    return error.gather(1, predicted).mean()


def train(position: str, steps: int = 800, batch: int = 8, n_val: int = 256, seed: int = 0, lr: float = 3e-3) -> float:
    """Trains a `PatchPredictor` on drawn shapes and returns its error on `n_val` other images."""
    torch.manual_seed(seed)
    model, unseen = PatchPredictor(position), Shapes(n_val, SIZE, seed=seed + 1)
    data = Shapes(steps * batch, SIZE, seed=seed + 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    n = model.grid.tokens
    for step in range(steps):
        images = torch.stack([image for image, _ in data.__getitems__(range(step * batch, (step + 1) * batch))])
        loss = prediction_error(model, images, torch.rand(batch, n).argsort(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    images = torch.stack([image for image, _ in unseen.__getitems__(range(n_val))])
    orders = torch.rand(n_val, n, generator=torch.Generator().manual_seed(0)).argsort(-1)  # the same for every encoding
    with torch.no_grad():
        return float(prediction_error(model, images, orders))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--position", nargs="+", default=["transformer_xl", "none"], help="encodings that act in attention")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # operators are small: on a busy machine several threads wait for each other most of the time
    for position in args.position:
        start = time.perf_counter()
        error = train(position, args.steps, seed=args.seed)
        print(f"{position}: mean squared error {error:.4f} on unseen images, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
