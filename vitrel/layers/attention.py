"""Self-attention with position terms as an argument, global or windowed, and the drop-in RelativeAttention."""

import math

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.ops import attention, window_attention
from vitrel.ops.window import check_window
from vitrel.position import Terms, create_position, split_position
from vitrel.position.terms import upcast

_MAX_LOG_SCALE = math.log(100.0)
_EPS = 1e-12  # of F.normalize


class Attention(nn.Module):
    """Self-attention over tokens, global or in windows: (x, terms, grid) -> x, with the `Terms` that an encoding returns.

    Global (`window` None): x [B, N, C], terms on `grid`. Windowed: x [B, h, w, C] or [B, h * w, C], terms on Grid(*window).
    `q_norm`, `k_norm` and `norm` are identities if their option is off, as in timm.

    Args:
        dim: width C of the tokens.
        num_heads: number of heads H; head width D = C / H.
        window: (h, w) in tokens; None: global attention.
        shift: (h, w) in tokens by which windows are shifted down and right; opposite borders do not see each other. Ignored
            without a window.
        qkv_bias: the projection to q, k and v has a bias.
        attn_drop: probability of dropping an attention weight in training.
        proj_drop: dropout of the output in training.
        backend: a key of vitrel.ops.BACKENDS or "auto".
        cosine: attention of Swin V2 (arXiv 2111.09883, eq. 2): the content logit is cos(q, k) times a learned scale per head,
            at most 100, and keys have no bias. Rotation, query and key tables and query_bias then apply to k of unit length and
            q of length scale * sqrt(D).
        qk_norm: `q_norm` and `k_norm` normalize q and k of every head before the terms act on them (arXiv 2302.05442, sec. 2).
        attn_norm: `norm` normalizes the output of attention before `proj` (EVA-02's CLIP, BEiT-3).
        norm_eps: epsilon of the norms of qk_norm and attn_norm.
        device: of the parameters, as for torch's modules.
        dtype: of the parameters, as for torch's modules.

    Raises:
        ValueError: num_heads does not divide dim, a side of the window is below 1 or not larger than the shift, or qk_norm is
            combined with cosine.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: tuple[int, int] | None = None,
        shift: tuple[int, int] = (0, 0),
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        backend: str = "auto",
        cosine: bool = False,
        qk_norm: bool = False,
        attn_norm: bool = False,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if cosine and qk_norm:
            raise ValueError("cosine attention already normalizes q and k: leave out qk_norm")
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim {dim} is not divisible by num_heads {num_heads}")
        if window is not None:
            check_window(window, shift)
        self.num_heads, self.window, self.shift, self.backend, self.cosine = num_heads, window, shift, backend, cosine
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias and not cosine, device=device, dtype=dtype)
        if cosine:
            self.logit_scale = nn.Parameter(torch.empty(num_heads, 1, 1, device=device, dtype=dtype))
            for name in ("q_bias", "v_bias"):
                bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if qkv_bias else None
                self.register_parameter(name, bias)

        def norm(width: int, enabled: bool) -> nn.Module:
            return nn.LayerNorm(width, eps=norm_eps, device=device, dtype=dtype) if enabled else nn.Identity()

        self.q_norm, self.k_norm = norm(dim // num_heads, qk_norm), norm(dim // num_heads, qk_norm)
        self.attn_drop = attn_drop
        self.norm = norm(dim, attn_norm)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of `cosine` in place: a scale of 10 per head, zero biases. Linear layers do not change."""
        if self.cosine:
            nn.init.constant_(self.logit_scale, math.log(10.0))
            for bias in (self.q_bias, self.v_bias):
                if bias is not None:
                    nn.init.zeros_(bias)

    def forward(self, x: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """Return the layer's output, of the shape of x.

        Args:
            x: tokens [B, N, C], or in windows also [B, h, w, C].
            terms: what an encoding returns for `grid`, or in windows for Grid(*window).
            grid: of the tokens.
            mask: for global attention only: broadcastable to [B, H, N, N]; bool with True = attend, or added to the logits.

        Raises:
            ValueError: a windowed layer gets a mask.
        """
        if mask is not None and self.window is not None:
            raise ValueError("a windowed layer computes its own mask; pass mask=None, or build it with window=None")
        return self.output(self.attend(self.project(x), terms, grid, mask))

    def attend(self, qkv: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """Return what attention gives before the layer's last projection (`output`), [B, N, 3C] -> [B, N, C].

        Args:
            qkv: what `project` returns; in windows also [B, h, w, 3C], the result then is [B, h, w, C].
            terms: as in `forward`.
            grid: of the tokens.
            mask: as in `forward`; a windowed layer ignores it.
        """
        if self.window is None:
            return attention(*self.heads(qkv), terms, grid, mask, self.dropout_p, self.backend).transpose(1, 2).flatten(2)
        image = qkv.unflatten(1, (grid.h, grid.w)) if qkv.dim() == 3 else qkv  # [B, h, w, 3C]
        out = window_attention(image, terms, grid, self.window, self.shift, self.num_heads, self.dropout_p, self.backend)
        return out.flatten(1, 2) if qkv.dim() == 3 else out

    def project(self, x: Tensor) -> Tensor:
        """Return q, k and v of all heads before the terms act on them, [..., C] -> [..., 3C]: `qkv`, then `normalized`."""
        return self.normalized(self.qkv(x))

    def normalized(self, qkv: Tensor) -> Tensor:
        """Return `qkv` [..., 3C], the output of the linear layer, with q and k of every head normalized, if qk_norm is set.

        With cosine, the biases of q and v are added, k gets length 1 and q length scale * sqrt(D). Without both options the
        result is `qkv` itself.
        """
        if self.cosine:
            return self._cosine(qkv)
        if isinstance(self.q_norm, nn.Identity):
            return qkv
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # [..., H, D] each
        return torch.stack((self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v), -3).flatten(-3)

    def output(self, x: Tensor) -> Tensor:
        """Apply norm, projection and dropout to the result of `attend`, [..., C] -> [..., C]."""
        return self.proj_drop(self.proj(self.norm(x)))

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [B, N, 3C], the result of `project`, into q, k and v, [B, H, N, D] each."""
        return qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    @property
    def dropout_p(self) -> float:
        """Probability of dropping an attention weight; 0 in evaluation mode."""
        return self.attn_drop if self.training else 0.0

    def _cosine(self, qkv: Tensor) -> Tensor:
        """Return `qkv` [..., 3C] with the biases of q and v added, k of length 1 and q of length scale * sqrt(D).

        The scale is learned per head, at most 100. The factor sqrt(D) cancels the D**-0.5 of the logits.
        """
        x = upcast(qkv).unflatten(-1, (3, self.num_heads, -1))  # lengths and scales up to 100 need float32
        if self.q_bias is not None:
            x = x + torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias)).view(x.shape[-3:])
        scale = upcast(self.logit_scale).clamp(max=_MAX_LOG_SCALE).exp() * math.sqrt(x.shape[-1])  # [H, 1, 1]
        length = x[..., :2, :, :].norm(dim=-1, keepdim=True).clamp(min=_EPS)  # of q and k, [..., 2, H, 1]
        factor = F.pad(scale.view(1, -1, 1), (0, 0, 0, 0, 0, 1), value=1.0) / length  # q: scale / length, k: 1 / length
        return (x * F.pad(factor, (0, 0, 0, 0, 0, 1), value=1.0)).to(qkv.dtype).flatten(-3)  # v: 1


class RelativeAttention(nn.Module):
    """Self-attention that holds its position encoding, for any model: (x [B, N, C], grid) -> [B, N, C].

    >>> layer = vitrel.RelativeAttention(96, num_heads=3, position="table", grid=(14, 14))
    >>> layer(torch.randn(2, 14 * 14, 96), (14, 14)).shape
    torch.Size([2, 196, 96])
    >>> layer(torch.randn(2, 10 * 24, 96), (10, 24)).shape  # any other grid
    torch.Size([2, 240, 96])

    Args:
        dim: width C of the tokens.
        num_heads: number of heads.
        position: a key of POSITIONS that acts in attention, or several joined by '+'.
        grid: the training grid of the encoding, (h, w) or (h, w, prefix), in tokens; with a window, the window is the training
            grid instead.
        window: an int or (h, w) in tokens; None: global attention.
        shift: an int or (h, w) in tokens by which windows are shifted; it needs a window.
        qkv_bias: the projection to q, k and v has a bias.
        attn_drop: probability of dropping an attention weight in training.
        proj_drop: dropout of the output in training.
        position_args: options of the encodings, as in `create_position`.
        backend: a key of vitrel.ops.BACKENDS or "auto".
        cosine: Swin V2's attention with a learned scale, see `Attention`.
        device: of the parameters, as for torch's modules.
        dtype: of the parameters, as for torch's modules.

    Raises:
        ValueError: the position is unknown or adds to tokens (add its rows to x instead), num_heads does not divide dim, the
            window is impossible, or there is a shift without a window.
        TypeError: the encoding has no such option.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        position: str = "table",
        grid: tuple[int, int] | tuple[int, int, int] = (14, 14),
        window: tuple[int, int] | int | None = None,
        shift: tuple[int, int] | int = 0,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        position_args: dict | None = None,
        backend: str = "auto",
        cosine: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        tokens, _ = split_position(position)
        if tokens:
            raise ValueError(f"{tokens!r} adds to tokens, not in attention: use x = x + create_position(...)(grid).tokens")
        window, shift = None if window is None else to_2tuple(window), to_2tuple(shift)
        if window is None and shift != (0, 0):
            raise ValueError(f"shift {shift} needs a window; use shift=0 for global attention")
        factory = dict(device=device, dtype=dtype)
        self.attn = Attention(dim, num_heads, window, shift, qkv_bias, attn_drop, proj_drop, backend, cosine, **factory)
        trained = Grid(*grid) if window is None else Grid(*window)
        self.position = create_position(position, trained, num_heads, dim // num_heads, **factory, **(position_args or {}))

    def forward(self, x: Tensor, grid: Grid | tuple[int, int] | tuple[int, int, int], mask: Tensor | None = None) -> Tensor:
        """Return attention of x, [B, N, C] -> [B, N, C].

        Args:
            x: tokens [B, N, C], in row-major order after the prefix tokens.
            grid: of the tokens, (h, w) or (h, w, prefix); windowed layers take no prefix tokens.
            mask: as in `Attention.forward`.

        Raises:
            ValueError: x does not have the tokens of the grid, or a windowed layer gets a mask or prefix tokens.
        """
        grid = Grid(*grid)
        if x.dim() != 3:
            raise ValueError(f"x must be [B, N, C], got shape {tuple(x.shape)}")
        if self.attn.window is not None and grid.prefix:
            raise ValueError(f"windows contain patch tokens only, but the grid has prefix={grid.prefix}: leave them out")
        if x.shape[-2] != grid.tokens:
            raise ValueError(
                f"x has {x.shape[-2]} tokens, but the {grid.h}x{grid.w} grid with prefix={grid.prefix} has {grid.tokens}"
            )
        return self.attn(x, self.position(grid if self.attn.window is None else Grid(*self.attn.window)), grid, mask)
