"""Swin transformer V1 and V2 (arXiv 2103.14030, 2111.09883) with any position encoding in its windows.

The window size M is the same at every image size, so no encoding in attention is resampled. The first stage has
ceil(height / patch) x ceil(width / patch) tokens, and each further stage ceil(h / 2) x ceil(w / 2), from the h x w tokens of
the stage before. A stage of h x w tokens has ceil(h / M) x ceil(w / M) windows; what they cover beyond the grid is masked
padding. Every second block shifts them by M // 2, but not along an axis that one window holds. vitrel.ops.window computes the
layout and the mask.

Stages, blocks and merging are named as in timm's `SwinTransformer` and V2, with downsampling at the start of a stage.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, calculate_drop_path_rates, to_2tuple
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.layers import Attention, Block, PatchEmbed, PatchMerging
from vitrel.models.backbone import Backbone, check_pool, init_linear, records_arguments
from vitrel.models.registry import COMPOSITIONS, Rows, base_cfg, register_family
from vitrel.position import POSITIONS, PositionEncoding, check_options, create_position, select_options, split_position

__all__ = ["Swin"]  # registration appends the entry points


class Stage(nn.Module):
    """A stage of Swin: patch merging (not in the first stage), then blocks that alternate between plain and shifted windows."""

    def __init__(self, downsample: nn.Module, blocks: list[Block]):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stage; patch merging makes [B, h, w, C] to [B, ceil(h/2), ceil(w/2), 2C], blocks keep the shape."""
        x = self.downsample(x)
        grid = Grid(x.shape[1], x.shape[2])
        for block in self.blocks:
            x = checkpoint(block, x, grid) if self.grad_checkpointing else block(x, grid)
        return x


class Swin(Backbone):
    """Swin transformer: images [B, in_chans, height, width] -> logits [B, num_classes], at any size of at least one patch.

    Sides need not be equal or divisible by patch or window; images are padded on the right and below.

    Args:
        img_size: training size, side or (h, w) in pixels; its patches are the training grid of an encoding added to tokens.
        patch_size: side of a patch in pixels.
        in_chans: channels of an image.
        num_classes: 0 for no head.
        global_pool: "avg", "max", "avgmax", or "" for none.
        embed_dim: width C of the first stage, doubled by every merging.
        depths: blocks of each stage.
        num_heads: heads of each stage.
        window_size: an int or (h, w) in tokens, the same at every image size; the training grid of the encodings in attention.
        mlp_ratio: width of the MLP's hidden layer divided by C.
        qkv_bias: the projection to q, k and v has a bias.
        position: a key of POSITIONS or several joined by '+'.
        position_args: options of the encodings. pretrained_window may have one value per stage; without it, it is the window,
            or the stage's training grid where that is smaller, as in Swin V2.
        drop_rate: dropout before the head.
        proj_drop_rate: dropout of the outputs of attention and MLP.
        attn_drop_rate: dropout of attention weights.
        drop_path_rate: stochastic depth of the last block, from 0 in the first.
        init_gain: the weights of linear layers outside encodings start with a standard deviation of init_gain /
            sqrt(in_features); None: 0.02, as in timm.
        version: 2 for cosine attention, residual post-norm and norms after merging, as in Swin V2 (whose published position is
            "cpb").
        norm_eps: epsilon of the norms.
        final_norm: a norm after the last stage.
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
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        num_heads: tuple[int, ...] = (3, 6, 12, 24),
        window_size: int | tuple[int, int] = 7,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        position: str = "table",
        position_args: dict | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        init_gain: float | None = None,
        version: int = 1,
        norm_eps: float = 1e-5,
        final_norm: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_options(position, position_args or {})
        check_pool(global_pool, class_token=False)
        if len(depths) != len(num_heads):
            raise ValueError(f"depths has {len(depths)} stages, but num_heads has {len(num_heads)}; both need one per stage")
        if version not in (1, 2):
            raise ValueError(f"version must be 1 or 2, not {version!r}")
        v2, factory = version == 2, dict(device=device, dtype=dtype)
        self.init_linear = partial(init_linear, gain=init_gain)
        self.num_classes, self.in_chans, self.global_pool, self.output_fmt = num_classes, in_chans, global_pool, "NHWC"
        self.embed_dim, self.num_prefix_tokens, self.img_size = embed_dim, 0, to_2tuple(img_size)
        options = dict(norm_layer=nn.LayerNorm, strict_img_size=False, dynamic_img_pad=True, output_fmt="NHWC", **factory)
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim, **options)
        self.window_size = to_2tuple(window_size)
        window, patches = Grid(*self.window_size), self.token_grid(self.img_size)
        on_tokens, in_attention = split_position(position)

        args = _stage_args(position_args or {}, window, patches, len(depths))

        def encoding(key: str, grid: Grid, dim: int, heads: int, stage: int = 0) -> PositionEncoding:
            return create_position(key, grid, heads, dim // heads, **factory, **select_options(key, args[stage]))

        def block(dim: int, heads: int, stage: int, shifted: bool, drop_path: float) -> Block:
            shift = (window.h // 2, window.w // 2) if shifted else (0, 0)
            attn = Attention(dim, heads, window[:2], shift, qkv_bias, attn_drop_rate, proj_drop_rate, cosine=v2, **factory)
            position = encoding(in_attention or "none", window, dim, heads, stage)
            return Block(dim, attn, position, mlp_ratio, drop_path, norm_eps, v2, mlp_drop=proj_drop_rate, **factory)

        self.pos_embed = encoding(on_tokens, patches, embed_dim, num_heads[0]) if on_tokens else None
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)  # [stage][block]
        stages = []
        for i, (heads, drop_paths) in enumerate(zip(num_heads, rates, strict=True)):
            dim = embed_dim * 2**i
            merge = PatchMerging(dim // 2, dim, norm_eps, v2, **factory) if i else nn.Identity()
            stages.append(Stage(merge, [block(dim, heads, i, bool(j % 2), rate) for j, rate in enumerate(drop_paths)]))
        self.layers = nn.Sequential(*stages)
        self.num_features = embed_dim * 2 ** (len(depths) - 1)
        self.feature_info = [
            dict(num_chs=embed_dim * 2**i, reduction=max(self.patch_embed.patch_size) * 2**i, module=f"layers.{i}")
            for i in range(len(depths))
        ]
        self.norm: nn.Module = nn.LayerNorm(self.num_features, eps=norm_eps, **factory) if final_norm else nn.Identity()
        self.head = ClassifierHead(self.num_features, num_classes, global_pool, drop_rate, input_fmt="NHWC", **factory)
        self.head_hidden_size = self.head.num_features
        self.init_weights(needs_reset=False)

    def forward_features(self, image: Tensor) -> Tensor:
        """Return the features after the last stage and norm, [B, in_chans, height, width] -> [B, h, w, C]."""
        return self.norm(self.layers(self.embed(image)[0]))

    def embed(self, image: Tensor) -> tuple[Tensor, Grid]:
        """Return the patch tokens [B, h, w, C] of an image, with the absolute embedding added, and their grid."""
        x = self.embed_patches(image)
        grid = Grid(x.shape[1], x.shape[2])
        if self.pos_embed is not None:
            tokens = self.pos_embed(grid).tokens
            x = x + tokens.unflatten(0, x.shape[1:3]).to(self.patch_embed.proj.weight.dtype)  # under autocast x's dtype rounds
        return x, grid

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits [B, num_classes] of features [B, h, w, C]; with pre_logits the pooled features [B, C].

        With global_pool "" nothing is pooled: [B, h, w, num_classes] or [B, h, w, C].
        """
        return self.head(x, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return (forward_features(x), [features of the chosen stages, first to last]) of images x as in timm.

        Args:
            x: images [B, in_chans, height, width].
            indices: stages, or the number of last stages; None: all.
            norm: apply the final norm to the features of the last stage.
            stop_early: do not run the stages after the last chosen one, whose output is the first value.
            output_fmt: "NCHW" or "NHWC", of the list; the first value is NHWC.
            intermediates_only: return the list alone.

        Raises:
            ValueError: output_fmt is unknown.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt must be NCHW or NHWC, not {output_fmt!r}")
        take, last = feature_take_indices(len(self.layers), indices)
        features, i, final = [], 0, len(self.feature_info) - 1
        x, _ = self.embed(x)
        for i, stage in enumerate(self.layers[: last + 1] if stop_early else self.layers):
            x = stage(x)
            if i in take:
                y = self.norm(x) if norm and i == final else x
                features.append(y.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else y)
        if intermediates_only:
            return features
        return self.norm(x) if i == final else x, features

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last of `indices`, in place, and return the indices as a list of numbers from 0.

        Final norm, head and pooling are all removed if a stage is, since their width is that of the last stage.

        Args:
            indices: stages, or the number of last stages.
            prune_norm: also remove the final norm.
            prune_head: also remove the head and the pooling.
        """
        take, last = feature_take_indices(len(self.layers), indices)
        shorter = last + 1 < len(self.layers)
        self.layers = self.layers[: last + 1]
        if prune_norm or shorter:
            self.norm = nn.Identity()  # its width is that of the last stage
        if shorter:
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
            self.head.in_features = self.num_features
        if prune_head or shorter:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module:
        """Return the last linear layer, as in timm; an identity without classes."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a newly initialized one.

        Args:
            num_classes: number of classes; 0 for no classifier.
            global_pool: "avg", "max", "avgmax" or "" (no pooling); None keeps the pooling.

        Raises:
            ValueError: global_pool is unknown.
        """
        if global_pool is not None:
            check_pool(global_pool, class_token=False)
        self.num_classes = num_classes
        self.head.reset(num_classes, pool_type=global_pool)
        self.global_pool = self.head.global_pool.pool_type
        self.head.apply(self.init_linear)

    def group_matcher(self, coarse: bool = False) -> dict:
        """Return {"stem": regex, "blocks": [(regex, order)]} of parameters' names, for timm's layer decay.

        With `coarse`, "blocks" is one regex instead, which divides them by stage.
        """
        fine = [(r"^layers\.(\d+).downsample", (0,)), (r"^layers\.(\d+)\.\w+\.(\d+)", None), (r"^norm", (99999,))]
        return dict(stem=r"^pos_embed|^patch_embed", blocks=r"^layers\.(\d+)" if coarse else fine)

    def current_arguments(self) -> dict[str, Any]:
        stages, depths = len(self.layers), self.arguments["depths"]
        all_blocks, blocks = sum(depths), sum(depths[:stages])
        rate = self.arguments["drop_path_rate"]
        return super().current_arguments() | dict(
            depths=depths[:stages],
            num_heads=self.arguments["num_heads"][:stages],
            drop_path_rate=rate if blocks == all_blocks else rate * (blocks - 1) / (all_blocks - 1),
            final_norm=not isinstance(self.norm, nn.Identity),
        )

    def encodings(self, size: tuple[int, int]) -> Iterator[tuple[PositionEncoding, Grid]]:
        if self.pos_embed is not None:
            yield self.pos_embed, self.token_grid(size)
        for stage in self.layers:
            for block in stage.blocks:
                yield block.position, block.window


def _stage_args(position_args: dict, window: Grid, grid: Grid, stages: int) -> list[dict]:
    """Return position_args for each stage, with the pretrained_window of that stage.

    A sequence with a value per stage gives each its own; a number or a pair (h, w) is for all stages, also in a model of two
    stages. Without the option it is the window, or the stage's grid where that is smaller, as in Swin V2.

    Args:
        position_args: of the model.
        window: of all stages.
        grid: of the first stage.
        stages: number of stages.
    """
    pretrained, args = position_args.get("pretrained_window"), []
    for stage in range(stages):
        side = (min(window.h, grid.h), min(window.w, grid.w)) if pretrained is None else pretrained
        if isinstance(pretrained, tuple | list) and len(pretrained) == stages != 2:
            side = pretrained[stage]
        args.append(position_args | {"pretrained_window": side})
        grid = Grid((grid.h + 1) // 2, (grid.w + 1) // 2)
    return args


def _cfg(**changes) -> dict:
    statistics = dict(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    return base_cfg(**({"pool_size": (7, 7)} | statistics | changes), classifier="head.fc", license="mit")


_SIZES = {  # the published shapes; n is for tests and small experiments
    "n": dict(
        img_size=64, patch_size=2, embed_dim=32, depths=(2, 2, 2), num_heads=(1, 2, 4), window_size=4, drop_path_rate=0.0
    ),
    "t": dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    "s": dict(embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24)),
    "b": dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
    "l": dict(embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48)),
}
_V2 = dict(version=2, position="cpb")
_CFGS = {size: _cfg() for size in "tsbl"} | {"n": _cfg(input_size=(3, 64, 64), pool_size=(8, 8), crop_pct=1.0)}
_CFGS_V2 = {size: _cfg(input_size=(3, 256, 256), pool_size=(8, 8)) for size in "tsb"} | {"n": _CFGS["n"]}
_WEIGHTS = {  # weights whose layout vitrel.weights reads
    "vitrel_swin_t": "timm/swin_tiny_patch4_window7_224.ms_in1k",
    "vitrel_swin_s": "timm/swin_small_patch4_window7_224.ms_in1k",
    "vitrel_swin_b": "timm/swin_base_patch4_window7_224.ms_in1k",
    "vitrel_swin_l": "timm/swin_large_patch4_window7_224.ms_in22k_ft_in1k",
    "vitrel_swinv2_t": "timm/swinv2_tiny_window8_256.ms_in1k",
    "vitrel_swinv2_s": "timm/swinv2_small_window8_256.ms_in1k",
    "vitrel_swinv2_b": "timm/swinv2_base_window8_256.ms_in1k",
}


def _rows(keys: Iterable[str]) -> Rows:
    """Return {model: (arguments, pretrained cfg)} of every size and each of the `keys` of POSITIONS that acts in attention."""
    return {
        f"vitrel_swin_{size}_{key.replace('+', '_')}": (dict(row, position=key), _CFGS[size])
        for size, row in _SIZES.items()
        for key in keys
        if split_position(key)[1]
    }


_ROWS = {f"vitrel_swin_{size}": (row, _CFGS[size]) for size, row in _SIZES.items()} | _rows((*POSITIONS, *COMPOSITIONS))
_ROWS |= {
    f"vitrel_swinv2_{size}": (dict(img_size=256, window_size=8) | _SIZES[size] | _V2, cfg) for size, cfg in _CFGS_V2.items()
}
_ROWS["vitrel_swin"] = (dict(depths=(2, 2, 6, 2)), _CFGS["t"])  # any, by its arguments, for vitrel.from_timm and vitrel.load
register_family(Swin, _ROWS, _WEIGHTS, globals(), _rows)
