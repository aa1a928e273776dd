"""Transformer block of ViT and Swin, and Swin's patch merging."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import DropPath, GELUTanh, LayerScale, Mlp, QuickGELU, SwiGLU
from torch import Tensor, nn

from vitrel.geometry import is_known
from vitrel.grid import Grid
from vitrel.layers.attention import Attention
from vitrel.position import PositionEncoding, Terms
from vitrel.position.terms import check_choice

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "gelu_tanh": GELUTanh, "quick_gelu": QuickGELU}
MLPS = (*ACTIVATIONS, "swiglu")


class Block(nn.Module):
    """Pre-norm transformer block with stochastic depth: x + attn(norm1(x)), then x + mlp(norm2(x)).

    The block itself calls its encoding in `forward`, so that sharding, activation checkpointing, pruning, layer-wise decay and
    checkpoint keys work per block.

    Args:
        dim: width C of the tokens.
        attn: the attention layer, with its own dropout.
        position: the block's encoding.
        mlp_ratio: width of the MLP's hidden layer divided by dim.
        drop_path: rate of stochastic depth.
        norm_eps: epsilon of the norms.
        post_norm: norms at the end of the branches (Swin V2, arXiv 2111.09883, sec. 3.2): x + norm1(attn(x)), then x +
            norm2(mlp(x)). The norms' weights start at zero, so a new block is the identity.
        init_values: layer scale (CaiT, arXiv 2103.17239): initial value of a learned vector that multiplies each branch; None:
            no vector.
        mlp: "gelu", "gelu_tanh" (SigLIP), "quick_gelu" (CLIP) or "swiglu" (EVA-02, arXiv 2303.11331, sec. 2.1).
        mlp_norm: a norm of the MLP's hidden layer.
        mlp_drop: dropout in and after the MLP.
        device: of the parameters, as for torch's modules.
        dtype: of the parameters, as for torch's modules.

    Raises:
        ValueError: `mlp` is unknown, or layer scale is combined with `post_norm`, whose norms scale the branches.
    """

    def __init__(
        self,
        dim: int,
        attn: Attention,
        position: PositionEncoding,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        post_norm: bool = False,
        init_values: float | None = None,
        mlp: str = "gelu",
        mlp_norm: bool = False,
        mlp_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_choice("Block", "mlp", mlp, MLPS)
        if post_norm and init_values is not None:
            raise ValueError(f"init_values={init_values} (layer scale) and post_norm exclude each other; pass init_values=None")
        factory = dict(device=device, dtype=dtype)
        norm = ResidualNorm if post_norm else nn.LayerNorm

        def scale() -> nn.Module:
            return nn.Identity() if init_values is None else LayerScale(dim, init_values, **factory)

        self.norm1 = norm(dim, eps=norm_eps, **factory)
        self.attn = attn
        self.position = position
        self.post_norm = post_norm
        self.ls1 = scale()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm(dim, eps=norm_eps, **factory)
        inner = partial(nn.LayerNorm, eps=norm_eps) if mlp_norm else None
        mlp_class = SwiGLU if mlp == "swiglu" else partial(Mlp, act_layer=ACTIVATIONS[mlp])
        self.mlp = mlp_class(dim, int(dim * mlp_ratio), norm_layer=inner, drop=mlp_drop, **factory)
        self.ls2 = scale()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    @property
    def window(self) -> Grid | None:
        """Grid of a window of the attention layer, or None for global attention."""
        return None if self.attn.window is None else Grid(*self.attn.window)

    def forward(self, x: Tensor, grid: Grid, terms: Terms | None = None, mask: Tensor | None = None) -> Tensor:
        """Apply the block and return tokens of the shape of x.

        Args:
            x: tokens [B, N, C], or in windows also [B, h, w, C].
            grid: of the tokens.
            terms: position terms on `grid`, in windows on that of one window, where several blocks share an encoding; None: the
                block's own encoding is called.
            mask: as in `Attention.forward`.
        """
        terms = self.position(self.window or grid) if terms is None else terms
        return self.residuals(x, lambda tokens: self.attn(tokens, terms, grid, mask))

    def residuals(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the block with the function `attend` in place of its attention layer, and return tokens of the shape of x.

        Args:
            x: tokens, as for `forward`.
            attend: takes tokens of this shape, normalized by norm1 unless the block has post_norm, and returns the same shape.
        """
        if self.post_norm:
            x = x + self.drop_path1(self.norm1(attend(x)))
            return x + self.drop_path2(self.norm2(self.mlp(x)))
        x = x + self.drop_path1(self.ls1(attend(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ResidualNorm(nn.LayerNorm):
    """LayerNorm at the end of a residual branch; weight and bias start at zero, so the branch adds nothing at first."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class PatchMerging(nn.Module):
    """Swin's downsampling (arXiv 2103.14030, sec. 3.1): merge each 2x2 neighborhood into one token.

    [B, h, w, C] -> [B, ceil(h/2), ceil(w/2), C']; an odd side is padded with zeros at the bottom or on the right.

    Args:
        dim: width C of the input.
        out_dim: width C' of the output.
        norm_eps: epsilon of the norm.
        post_norm: the norm acts on the C' channels after the reduction (Swin V2), not on the 4C channels before it.
        device: of the parameters, as for torch's modules.
        dtype: of the parameters, as for torch's modules.
    """

    def __init__(
        self,
        dim: int,
        out_dim: int,
        norm_eps: float = 1e-5,
        post_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.post_norm = post_norm
        self.norm = nn.LayerNorm(out_dim if post_norm else 4 * dim, eps=norm_eps, device=device, dtype=dtype)
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the merged tokens, [B, h, w, C] -> [B, ceil(h/2), ceil(w/2), C']."""
        x = join_neighbors(x)
        return self.norm(self.reduction(x)) if self.post_norm else self.reduction(self.norm(x))


def join_neighbors(x: Tensor) -> Tensor:
    """Join the channels of each 2x2 neighborhood, [B, h, w, C] -> [B, ceil(h/2), ceil(w/2), 4C].

    Their order is top left, bottom left, top right, bottom right. An odd side is padded with zeros at the bottom or right.
    """
    x = pad_to_even(pad_to_even(x, 1), 2)
    x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # [B, h/2, 2, w/2, 2, C]
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3)  # within a neighborhood column by column, as in Swin's weights


def pad_to_even(x: Tensor, dim: int) -> Tensor:
    """Return x with a zero slice appended along `dim` if its length is odd."""
    n = x.shape[dim]
    if is_known(n):
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, n % 2)) if n % 2 else x
    # A gather pads without a branch on the size.
    at = torch.arange((n + 1) // 2 * 2, device=x.device)
    valid = (at < n).to(x.dtype).view(-1, *(1,) * (x.dim() - 1 - dim))
    return x.index_select(dim, at.clamp(max=n - 1)) * valid
