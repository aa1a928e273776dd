"""Vision transformer (arXiv 2010.11929) with any position encoding.

Class token, pooling, head and parameter names are those of timm's `VisionTransformer`, whose weights load unchanged into the
`absolute` models. The other arguments make it the backbone of DeiT, BEiT, EVA-02, CLIP, SigLIP, DINOv3 and SAM;
`vitrel.from_timm` sets them.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import AttentionPoolLatent, calculate_drop_path_rates, global_pool_nlc, to_2tuple
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.layers import ACTIVATIONS, Attention, Block, Fade, PatchEmbed
from vitrel.models.backbone import Backbone, check_pool, init_linear, records_arguments
from vitrel.models.registry import COMPOSITIONS, Rows, base_cfg, register_family
from vitrel.position import POSITIONS, PositionEncoding, check_options, create_position, select_options, split_position

__all__ = ["ViT"]  # registration appends the entry points

_EPS = 1e-6


class ViT(Backbone):
    """Vision transformer: images [B, in_chans, height, width] -> logits [B, num_classes], at any size of at least one patch.

    Sides need not be equal or whole patches; images are padded on the right and below.

    Args:
        img_size: training size, side or (h, w) in pixels; its patches are the training grid of all encodings outside windows.
        patch_size: side of a patch in pixels.
        in_chans: channels of an image.
        num_classes: 0 for no head.
        global_pool: pooling as in timm: "token", "avg", "avgmax", "max", "" for none, or "map", attention pooling (SigLIP).
        embed_dim: width C of the tokens.
        depth: number of blocks.
        num_heads: number of heads H.
        mlp_ratio: width of the MLP's hidden layer divided by C.
        qkv_bias: the projection to q, k and v has a bias.
        class_token: the model has a class token.
        dist_token: the model has DeiT's distillation token and its head; the logits are the mean of both heads.
        reg_tokens: number of register tokens.
        position: a key of POSITIONS or several joined by '+'.
        position_args: options of the encodings.
        absolute_fade: training steps over which the absolute embedding fades out (see `vitrel.layers.Fade`); None: it does not.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout of the tokens before the first block, also without an absolute embedding.
        proj_drop_rate: dropout of the outputs of attention and MLP.
        attn_drop_rate: dropout of attention weights.
        drop_path_rate: stochastic depth of the last block, from 0 in the first.
        init_gain: the weights of linear layers outside encodings start with a standard deviation of init_gain /
            sqrt(in_features); None: 0.02, as in timm.
        share_position: one encoding in attention for all blocks (BEiT) instead of one per block.
        pre_norm: a norm before the first block (CLIP).
        final_norm: a norm after the last block; None: if there is no fc_norm.
        fc_norm: a norm of the pooled features; None: with global_pool "avg", "avgmax" and "max".
        final_norm_eps: epsilon of final_norm; None: the norm_eps of block_args (SAM has another).
        patch_bias: the patch embedding has a bias.
        pool_args: options of global_pool="map": num_heads, mlp_ratio and include_prefix (pool prefix tokens too).
        block_args: init_values, mlp, mlp_norm and post_norm (see `Block`); qk_norm and attn_norm (see `Attention`); norm_eps of
            every norm; window, an int or (h, w) in tokens, for attention within windows in all blocks but global_blocks
            (indices), as in ViTDet and SAM; without prefix tokens only.
        device: of the parameters, as for torch's modules.
        dtype: of the parameters, as for torch's modules.

    Raises:
        ValueError: a combination is impossible.
        TypeError: an option is unknown.
    """

    @records_arguments
    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        dist_token: bool = False,
        reg_tokens: int = 0,
        position: str = "absolute",
        position_args: dict | None = None,
        absolute_fade: int | None = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        init_gain: float | None = None,
        share_position: bool = False,
        pre_norm: bool = False,
        final_norm: bool | None = None,
        fc_norm: bool | None = None,
        final_norm_eps: float | None = None,
        patch_bias: bool = True,
        pool_args: dict | None = None,
        block_args: dict | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_options(position, position_args or {})
        in_block, in_attn, window, global_blocks = _block_args(block_args or {}, depth)
        check_pool(global_pool, class_token, attention_pool=True)
        if dist_token and (not class_token or global_pool not in ("token", "")):
            raise ValueError("dist_token needs class_token=True and global_pool='token': its head reads those two tokens")
        factory = dict(device=device, dtype=dtype)
        self.init_linear = partial(init_linear, gain=init_gain)
        self.num_classes, self.in_chans, self.global_pool = num_classes, in_chans, global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = int(class_token) + int(dist_token) + reg_tokens
        self.img_size = to_2tuple(img_size)
        options = dict(strict_img_size=False, dynamic_img_pad=True, output_fmt="NHWC", bias=patch_bias, **factory)
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim, **options)

        def tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(1, count, embed_dim, **factory)) if count else None

        self.cls_token, self.dist_token, self.reg_token = tokens(int(class_token)), tokens(int(dist_token)), tokens(reg_tokens)

        on_tokens, in_attention = split_position(position)
        grid, eps = self.token_grid(self.img_size), in_block["norm_eps"]
        if window is not None and (self.num_prefix_tokens or share_position):
            raise ValueError("blocks with a window need class_token=False, reg_tokens=0 and share_position=False")

        def encoding(key: str, grid: Grid) -> PositionEncoding:
            options = select_options(key, position_args or {})
            return create_position(key, grid, num_heads, embed_dim // num_heads, **factory, **options)

        def block(index: int, drop_path: float) -> Block:
            block_window = None if index in global_blocks else window
            drops = dict(attn_drop=attn_drop_rate, proj_drop=proj_drop_rate)
            attn = Attention(embed_dim, num_heads, block_window, (0, 0), qkv_bias, **drops, norm_eps=eps, **in_attn, **factory)
            key = "none" if share_position else in_attention or "none"
            position = encoding(key, Grid(*block_window) if block_window else grid)
            return Block(embed_dim, attn, position, mlp_ratio, drop_path, mlp_drop=proj_drop_rate, **in_block, **factory)

        def norm(enabled: bool, eps: float = eps) -> nn.Module:
            return nn.LayerNorm(embed_dim, eps=eps, **factory) if enabled else nn.Identity()

        def classifier() -> nn.Module:
            return nn.Linear(embed_dim, num_classes, **factory) if num_classes > 0 else nn.Identity()

        self.pos_embed = encoding(on_tokens, grid) if on_tokens else None
        if absolute_fade is not None and self.pos_embed is None:
            raise ValueError(f"absolute_fade={absolute_fade} needs a position that adds to the tokens; {position!r} does not")
        self.absolute_fade = None if absolute_fade is None else Fade(absolute_fade, device)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.norm_pre = norm(pre_norm)
        self.shared_position = encoding(in_attention or "none", grid) if share_position else None
        self.blocks = nn.Sequential(*(block(i, p) for i, p in enumerate(calculate_drop_path_rates(drop_path_rate, depth))))
        self.feature_info = [
            dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=max(self.patch_embed.patch_size)) for i in range(depth)
        ]
        norm_pooled = global_pool in ("avg", "avgmax", "max") if fc_norm is None else fc_norm
        self.norm = norm(not norm_pooled if final_norm is None else final_norm, final_norm_eps or eps)
        self.attn_pool, self.pool_include_prefix = None, False
        if global_pool == "map":
            pool = dict(num_heads=num_heads, mlp_ratio=mlp_ratio, include_prefix=False) | (pool_args or {})
            self.pool_include_prefix = pool.pop("include_prefix")
            act = ACTIVATIONS.get(in_block["mlp"], nn.GELU)
            self.attn_pool = AttentionPoolLatent(
                embed_dim, norm_layer=partial(nn.LayerNorm, eps=eps), act_layer=act, **pool, **factory
            )
        elif pool_args:
            raise ValueError(f"pool_args={pool_args} need attention pooling, global_pool='map', not {global_pool!r}")
        self.fc_norm = norm(norm_pooled)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = classifier()
        self.head_dist = classifier() if dist_token else None
        self.distilled_training = False
        self.init_weights(needs_reset=False)

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialize all parameters and buffers.

        Args:
            needs_reset: False: only prefix tokens, attention pooling, and those linear layers that are in no encoding.
        """
        super().init_weights(needs_reset)
        for token in self.prefix_tokens:
            nn.init.normal_(token, std=1e-6)
        if self.attn_pool is not None:
            self.attn_pool.init_weights()

    def set_distilled_training(self, enable: bool = True) -> None:
        """Let forward return (class logits, distillation logits) in training, as timm's DeiT; without `enable` their mean.

        In evaluation it returns the mean in any case. Without a distillation token or pooling this has no effect.
        """
        self.distilled_training = enable

    def forward_features(self, image: Tensor) -> Tensor:
        """Return the tokens after the last norm, [B, in_chans, height, width] -> [B, N, C], prefix tokens first."""
        x, grid = self.embed(image)
        return self.norm(self._run(x, grid, self.blocks)[0])

    def embed(self, image: Tensor) -> tuple[Tensor, Grid]:
        """Return the input of the first block (`add_tokens`), prefix and patch tokens [B, N, C] of images, and their grid."""
        x = self.embed_patches(image)  # [B, h, w, C]
        grid = Grid(x.shape[1], x.shape[2], self.num_prefix_tokens)
        return self.add_tokens(x, None if self.pos_embed is None else self.pos_embed(grid).tokens), grid

    def add_tokens(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the input of the first block: prefix tokens and patches with the absolute embedding, dropout and norm_pre.

        Args:
            x: patches [B, h, w, C].
            tokens: the absolute embedding [N, C] before its fade; in training, each call is a step of the fade. None without
                one.

        Returns:
            [B, N, C].
        """
        prefix = [token.expand(x.shape[0], -1, -1) for token in self.prefix_tokens]
        x = torch.cat((*prefix, x.flatten(1, 2)), 1)  # [B, N, C]
        if tokens is not None:
            tokens = tokens if self.absolute_fade is None else self.absolute_fade(tokens)
            x = x + tokens.to(self.patch_embed.proj.weight.dtype)  # x's dtype would round under autocast
        return self.norm_pre(self.pos_drop(x))

    @property
    def prefix_tokens(self) -> list[nn.Parameter]:
        """Learned tokens before the patches, [1, n, C] each: class, distillation and register tokens, as far as present."""
        return [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits [B, num_classes] of tokens [B, N, C]; with pre_logits the pooled features [B, C].

        With global_pool "" nothing is pooled: [B, N, num_classes] or [B, N, C]. Else, with a distillation token, the result
        is the mean for both tokens; in training after `set_distilled_training`, it is the pair of their logits.
        """
        if self.head_dist is not None and self.global_pool:
            pooled = self.head_drop(self.fc_norm(x[:, :2]))  # class and distillation token
            if pre_logits:
                return pooled.mean(1)
            logits, distilled = self.head(pooled[:, 0]), self.head_dist(pooled[:, 1])
            if self.training and self.distilled_training:
                return logits, distilled  # type: ignore[return-value]
            return (logits + distilled) / 2
        if self.attn_pool is not None:
            x = self.attn_pool(x if self.pool_include_prefix else x[:, self.num_prefix_tokens :])
        else:
            x = global_pool_nlc(x, self.global_pool, self.num_prefix_tokens)
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list | tuple[Tensor, list]:
        """Return (forward_features(x), [features of the chosen blocks, first to last]) of images x as in timm.

        Args:
            x: images [B, in_chans, height, width].
            indices: blocks, or the number of last blocks; None: all.
            return_prefix_tokens: the list has pairs of patch tokens and prefix tokens [B, prefix, C], if the model has these.
            norm: apply the final norm to all features.
            stop_early: do not run the blocks after the last chosen one; the first value is then the norm of its output.
            output_fmt: "NCHW" for [B, C, h, w] or "NLC" for [B, h*w, C], of patch tokens only.
            intermediates_only: return the list alone.
            attn_mask: for all blocks, broadcastable to [B, H, N, N] with prefix tokens first; bool with True = attend, or added
                to the logits.

        Raises:
            ValueError: output_fmt is unknown.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be NCHW or NLC, not {output_fmt!r}")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self.embed(x)
        x, features = self._run(x, grid, self.blocks[: last + 1] if stop_early else self.blocks, attn_mask, take)
        features = [self.norm(y) for y in features] if norm else features
        prefix = [y[:, : grid.prefix] for y in features]
        features = [y[:, grid.prefix :] for y in features]
        if output_fmt == "NCHW":
            features = [y.mT.unflatten(2, (grid.h, grid.w)).contiguous() for y in features]
        if return_prefix_tokens and grid.prefix:
            features = list(zip(features, prefix, strict=True))
        return features if intermediates_only else (self.norm(x), features)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] | tuple[int, ...] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list:
        """Return the patch features of the last n blocks, or of the blocks with these indices, first to last, as timm and DINO.

        Args:
            x: images [B, in_chans, height, width].
            n: number of last blocks, or indices of blocks.
            reshape: features are [B, C, h, w] instead of [B, h * w, C].
            return_prefix_tokens: the list has pairs of patch features and prefix tokens [B, prefix, C], if the model has any.
            norm: apply the final norm to all features.
            attn_mask: as in `forward_intermediates`.
        """
        options = dict(norm=norm, output_fmt="NCHW" if reshape else "NLC", intermediates_only=True, attn_mask=attn_mask)
        return self.forward_intermediates(x, n, return_prefix_tokens, **options)  # type: ignore[return-value]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last of `indices`, in place, and return the indices as a list of numbers from 0.

        Args:
            indices: blocks, or the number of last blocks.
            prune_norm: also remove the final norm.
            prune_head: also remove the head, the pooling and fc_norm.
        """
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """Return the last linear layer, or an identity without classes; with a distillation token (head, head_dist)."""
        return self.head if self.head_dist is None else (self.head, self.head_dist)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head (with a distillation token both heads) by a newly initialized one.

        Args:
            num_classes: number of classes; 0 for no classifier.
            global_pool: as in the constructor, "map" only for a model built with it (another drops it); None keeps the pooling.

        Raises:
            ValueError: the model cannot have this global_pool.
        """
        if global_pool is not None:
            check_pool(global_pool, self.cls_token is not None, self.attn_pool is not None)
            if self.head_dist is not None and global_pool not in ("token", ""):
                raise ValueError(f"a model with dist_token needs global_pool='token' or '', not {global_pool!r}")
            self.global_pool = global_pool
            self.attn_pool = self.attn_pool if global_pool == "map" else None
        self.num_classes = num_classes
        weight = self.patch_embed.proj.weight
        factory = dict(device=weight.device, dtype=weight.dtype)

        def classifier() -> nn.Module:
            new = nn.Linear(self.embed_dim, num_classes, **factory) if num_classes > 0 else nn.Identity()
            return new.apply(self.init_linear)

        self.head = classifier()
        self.head_dist = None if self.head_dist is None else classifier()

    def group_matcher(self, coarse: bool = False) -> dict:
        """Return {"stem": regex, "blocks": [(regex, order)]} of names, for timm's layer decay; `coarse` is not read."""
        return dict(
            stem=r"^cls_token|^dist_token|^reg_token|^pos_embed|^patch_embed|^norm_pre|^shared_position",
            blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        )

    def current_arguments(self) -> dict[str, Any]:
        depth, block_args = len(self.blocks), dict(self.arguments["block_args"] or {})
        if "global_blocks" in block_args:
            block_args["global_blocks"] = [i for i in block_args["global_blocks"] if i < depth]
        rate = self.arguments["drop_path_rate"] * (depth - 1) / max(self.arguments["depth"] - 1, 1)
        return super().current_arguments() | dict(
            depth=depth,
            drop_path_rate=self.arguments["drop_path_rate"] if depth == self.arguments["depth"] else rate,
            absolute_fade=None if self.absolute_fade is None else self.absolute_fade.fade_steps,
            final_norm=not isinstance(self.norm, nn.Identity),
            fc_norm=not isinstance(self.fc_norm, nn.Identity),
            patch_bias=self.patch_embed.proj.bias is not None,
            pool_args=None if self.attn_pool is None else self.arguments["pool_args"],
            block_args=block_args or None,
        )

    def encodings(self, size: tuple[int, int]) -> Iterator[tuple[PositionEncoding, Grid]]:
        grid = self.token_grid(size)
        if self.pos_embed is not None:
            yield self.pos_embed, grid
        if self.shared_position is not None:
            yield self.shared_position, grid
        for block in self.blocks:
            yield block.position, block.window or grid  # type: ignore[misc]

    def _run(
        self, x: Tensor, grid: Grid, blocks: nn.Sequential, mask: Tensor | None = None, take: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run `blocks` on tokens x [B, N, C]; return the last output, and those of the blocks whose index is in `take`.

        `mask` is the `attn_mask` of forward_intermediates.
        """
        shared = None if self.shared_position is None else self.shared_position(grid)
        features = []
        for i, block in enumerate(blocks):
            x = checkpoint(block, x, grid, shared, mask) if self.grad_checkpointing else block(x, grid, shared, mask)
            if i in take:
                features.append(x)
        return x, features


def _block_args(block_args: dict, depth: int) -> tuple[dict, dict, tuple[int, int] | None, tuple[int, ...]]:
    """Split block_args into options of `Block`, options of `Attention`, the window or None, and the global blocks' indices.

    Raises:
        TypeError: an option is unknown.
        ValueError: global_blocks are given without a window, or contain an index that is not in 0..depth-1.
    """
    known = ("init_values", "mlp", "mlp_norm", "post_norm", "norm_eps", "qk_norm", "attn_norm", "window", "global_blocks")
    if unknown := [name for name in block_args if name not in known]:
        raise TypeError(f"block_args has no option {unknown[0]!r}; it has {', '.join(known)}")
    in_block = dict(norm_eps=_EPS, mlp="gelu") | block_args
    in_attn = {name: in_block.pop(name) for name in ("qk_norm", "attn_norm") if name in in_block}
    window, global_blocks = in_block.pop("window", None), tuple(in_block.pop("global_blocks", ()))
    if invalid := [i for i in global_blocks if window is None or not 0 <= i < depth]:
        raise ValueError(f"global_blocks contains {invalid[0]}; it needs a window, and indices from 0 to {depth - 1}")
    return in_block, in_attn, None if window is None else to_2tuple(window), global_blocks


def _cfg(**changes) -> dict:
    half = (0.5, 0.5, 0.5)
    return base_cfg(mean=half, std=half, classifier="head", license="apache-2.0", **changes)


_SIZES = {  # the published shapes; n8 is for tests and small experiments
    "n8": dict(img_size=64, patch_size=8, embed_dim=96, depth=4, num_heads=3),
    "ti16": dict(patch_size=16, embed_dim=192, depth=12, num_heads=3),
    "s16": dict(patch_size=16, embed_dim=384, depth=12, num_heads=6),
    "b16": dict(patch_size=16, embed_dim=768, depth=12, num_heads=12),
    "l16": dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16),
}
_CFGS = {size: _cfg() for size in _SIZES} | {"n8": _cfg(input_size=(3, 64, 64), crop_pct=1.0)}
_WEIGHTS = {  # weights whose layout vitrel.weights reads
    "vitrel_vit_ti16_absolute": "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vitrel_vit_s16_absolute": "timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
    "vitrel_vit_b16_absolute": "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "vitrel_vit_l16_absolute": "timm/vit_large_patch16_224.augreg_in21k_ft_in1k",
}


def _rows(keys: Iterable[str]) -> Rows:
    """Return {model: (arguments, pretrained cfg)} of every size and each of the `keys` of POSITIONS."""
    return {
        f"vitrel_vit_{size}_{key.replace('+', '_')}": (dict(row, position=key), _CFGS[size])
        for size, row in _SIZES.items()
        for key in keys
    }


_ROWS = _rows((*POSITIONS, *COMPOSITIONS))
_ROWS["vitrel_vit"] = (dict(depth=12), _cfg())  # any ViT, by its arguments, for vitrel.from_timm and vitrel.load
register_family(ViT, _ROWS, _WEIGHTS, globals(), _rows)
