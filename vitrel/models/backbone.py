"""What both trunks share: the input, and every question one can ask about position without running the model."""

import abc
import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from timm.layers import PatchEmbed, to_2tuple, trunc_normal_
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.position import PositionEncoding, split_position
from vitrel.position.log_n import set_logit_scale
from vitrel.position.terms import sum_counts

LARGE = (1 << 20, 1 << 20)  # pixels, larger than any image: there only windowed encodings keep their training grid


def records_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a trunk's constructor: leaves its arguments, defaults included, in `self.arguments`."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        init(self, *args, **kwargs)
        own = {name: value for name, value in given.arguments.items() if name not in ("self", "device", "dtype")}
        self.arguments = copy.deepcopy(own)

    return wrapped


class Backbone(nn.Module, abc.ABC):
    """Abstract. A trunk has `patch_embed` (timm's, NHWC), `pos_embed` (an encoding or None) and `num_prefix_tokens`.

    `arguments`: those of its constructor, as given; `current_arguments` follows what was changed since.
    """

    arguments: dict[str, Any]
    patch_embed: PatchEmbed
    pos_embed: PositionEncoding | None
    num_prefix_tokens: int
    init_linear: Callable[[nn.Module], None]
    window_size: tuple[int, int] | None = None
    grad_checkpointing: bool = False

    @abc.abstractmethod
    def encodings(self, size: tuple[int, int]) -> Iterator[tuple[PositionEncoding, Grid]]:
        """Every position encoding with the grid that forward gives it for an image of `size` (h, w) pixels."""

    def forward(self, image: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(image))

    def current_arguments(self) -> dict[str, Any]:
        """Arguments that build this model anew as it is now: with another head, pruned, its embedding taken away."""
        _, attention = split_position(self.arguments["position"])
        position = (attention or "none") if self.pos_embed is None else self.arguments["position"]
        return self.arguments | dict(num_classes=self.num_classes, global_pool=self.global_pool, position=position)

    @property
    def _model_args(self) -> dict[str, Any]:
        """What timm's save_for_hf writes for the model to be built anew; timm records what its factory was given only."""
        return {name: value for name, value in self.current_arguments().items() if value is not None}

    @_model_args.setter
    def _model_args(self, given: dict[str, Any]) -> None:
        """Nothing: timm's factory sets it."""

    def token_grid(self, size: tuple[int, int]) -> Grid:
        """Tokens after patch embedding of an image of `size` (h, w) pixels; a last partial patch counts."""
        (h, w), (ph, pw) = size, self.patch_embed.patch_size
        return Grid(-(-h // ph), -(-w // pw), self.num_prefix_tokens)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        window_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Record the size (h, w) in pixels used from now on. Changes no parameter: every size works at forward without this.

        patch_size, window_size: accepted, as in timm's call, where they are the model's own; else ValueError.
        """
        for name, asked, own in (
            ("patch_size", patch_size, self.patch_embed.patch_size),
            ("window_size", window_size, self.window_size),
        ):
            if asked is not None and to_2tuple(asked) != own:
                raise ValueError(f"{name} {asked} is not the model's {own}, which stays at every size; build a model with it")
        if img_size is not None:
            self.img_size = to_2tuple(img_size)

    @property
    def resize_policies(self) -> tuple[str, ...]:
        """Policies, the default first, by which this model's encodings can serve a grid they were not trained on."""
        met = (part for part, grid in choosing(self, LARGE) if part.grid[:2] != grid[:2])
        return tuple(dict.fromkeys(policy for part in met for policy in part.policies))

    def set_resize_policy(self, policy: str) -> None:
        """Switch every encoding that has a choice to `policy`, or to its own of several joined by "+".

        Raises ValueError for one that no encoding here has.
        """
        self.set_position_options(resize=policy)

    def set_position_options(self, **options: Any) -> None:
        """Switch options of the encodings that act at other sizes alone, as position_args takes them: resize, scaling,
        scaling_strength, yarn_turns, logit_scale. Parameters, and all that is computed at the training size, stay.

        The arguments follow, so that the model is saved with them. ValueError for an option that no encoding here has.
        """
        for policy in options["resize"].split("+") if "resize" in options else ():
            if policy not in self.resize_policies:
                known = ", ".join(self.resize_policies) or "none, since nothing is resized"
                raise ValueError(f"this model has no resize policy {policy!r} (it has {known})")
        with self._restored(on_error=True):
            parts = [part for part in self.modules() if isinstance(part, PositionEncoding)]
            taken = {name for part in parts for name in part.switch(options)}
            if lacking := [name for name in options if name not in taken | {"logit_scale"}]:
                raise ValueError(f"no encoding of this model has the option {lacking[0]}, or none that can be switched")
            if "logit_scale" in options:
                for encoding, grid in self.trained_encodings():
                    set_logit_scale(encoding, options["logit_scale"], grid)
            self.arguments["position_args"] = dict(self.arguments["position_args"] or {}, **options)

    @contextlib.contextmanager
    def position_options(self, **options: Any) -> Iterator[None]:
        """The model with `set_position_options(**options)` in force; afterwards its own are back."""
        with self._restored():
            if options:
                self.set_position_options(**options)
            yield

    @contextlib.contextmanager
    def _restored(self, on_error: bool = False) -> Iterator[None]:
        """Afterwards, or after an error alone, the options of the encodings are what they are now."""
        parts = [(part, part.resize, part.scaling) for part in self.modules() if isinstance(part, PositionEncoding)]
        scales = [(encoding, encoding.logit_scale, grid) for encoding, grid in self.trained_encodings()]
        arguments, failed = self.arguments["position_args"], True
        try:
            yield
            failed = False
        finally:
            if failed or not on_error:
                for part, resize, scaling in parts:
                    part.resize = resize
                    if scaling is not None:
                        part.scaling = scaling
                for encoding, own, grid in scales:
                    if encoding.logit_scale != own:
                        set_logit_scale(encoding, own, grid)
                self.arguments["position_args"] = arguments

    def trained_encodings(self) -> Iterator[tuple[PositionEncoding, Grid]]:
        """`encodings` at the size that the parameters are of."""
        return self.encodings(to_2tuple(self.patch_embed.img_size))

    def resized(self, size: tuple[int, int]) -> dict[str, int]:
        """What forward at `size` (h, w) pixels resamples: {rule: number of parameter values}, empty for nothing."""
        return sum_counts(encoding.resized(grid) for encoding, grid in self.encodings(size))

    def unseen(self, size: tuple[int, int]) -> float:
        """Largest share, over the encodings, of offset cells at `size` that no pair of the training grid had, 0 to 1."""
        return max((encoding.unseen(grid) for encoding, grid in self.encodings(size)), default=0.0)

    def saturated(self, size: tuple[int, int]) -> float:
        """Largest share, over the encodings, of unseen offset cells that read an edge row or far bucket which was trained."""
        return max((encoding.saturated(grid) for encoding, grid in self.encodings(size)), default=0.0)

    def position_parameters(self) -> set[str]:
        """Names of the parameters that belong to position encodings."""
        encodings = [name for name, module in self.named_modules() if isinstance(module, PositionEncoding)]
        return {n for n, _ in self.named_parameters() if any(n.startswith(f"{e}.") for e in encodings)}

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters to keep out of weight decay: position, class and register tokens, cosine scales."""
        other = ("cls_token", "dist_token", "reg_token", "logit_scale")
        return self.position_parameters() | {n for n, _ in self.named_parameters() if n.rpartition(".")[2] in other}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass instead of storing them."""
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                module.grad_checkpointing = enable  # type: ignore[assignment]

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all parameters, e.g. of a model made on the meta device and moved by `to_empty`.

        needs_reset False: the layers have initialised themselves at construction, only linear layers are drawn anew.
        """
        if needs_reset:
            for module in reversed([*self.modules()]):  # the owner after its parts: an encoding knows best
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        inside = {part for module in self.modules() if isinstance(module, PositionEncoding) for part in module.modules()}
        for module in self.modules():
            if module not in inside:
                self.init_linear(module)

    def embed_patches(self, image: Tensor) -> Tensor:
        """[B, 3, height, width] pixels -> [B, h, w, C]; padded right and below to whole patches. ValueError below one patch."""
        if not torch.compiler.is_compiling():
            check_image(image, self.in_chans, self.patch_embed.patch_size)
        return self.patch_embed(image)


@torch.fx.wrap  # a leaf of fx graphs, which cannot branch on a size
def check_image(image: Tensor, in_chans: int, patch: tuple[int, int]) -> None:
    """ValueError unless `image` is [B, in_chans, height, width] with at least one patch (h, w) of pixels."""
    if image.dim() != 4:
        raise ValueError(f"expected images [B, C, height, width], got shape {tuple(image.shape)}; add a batch dimension?")
    if image.shape[1] != in_chans:
        raise ValueError(f"expected {in_chans} channels, got {image.shape[1]}; build the model with in_chans={image.shape[1]}")
    if image.shape[2] < patch[0] or image.shape[3] < patch[1]:
        size = f"{image.shape[2]}x{image.shape[3]}"
        raise ValueError(f"image of {size} pixels is smaller than one patch of {patch[0]}x{patch[1]}; enlarge it")


def check_pool(global_pool: str, class_token: bool, attention_pool: bool = False) -> None:
    """ValueError unless a trunk with or without a class token and attention pooling can pool by `global_pool`."""
    known = (*(["token"] if class_token else []), "avg", "max", "avgmax", *(["map"] if attention_pool else []), "")
    if global_pool not in known:
        hint = "needs class_token=True" if global_pool == "token" else "is unknown"
        hint = "needs a model built with global_pool='map'" if global_pool == "map" else hint
        raise ValueError(f"global_pool={global_pool!r} {hint}; choose one of {', '.join(map(repr, known))}")


def init_linear(module: nn.Module, gain: float | None = None) -> None:
    """Truncated normal weights and zero biases for linear layers, in place.

    gain None: standard deviation 0.02, as in timm, made for widths of 192 and more. Else gain / sqrt(inputs): at the
    widths of the smallest models 0.02 is far too small, and attention needs hundreds of updates to break its symmetry.
    """
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02 if gain is None else gain / math.sqrt(module.in_features))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def choosing(model: Backbone, size: tuple[int, int]) -> Iterator[tuple[PositionEncoding, Grid]]:
    """The encodings that have policies, parts of compositions too, with the grid each meets at `size` (h, w) pixels."""
    for encoding, grid in model.encodings(size):
        for part in encoding.modules():
            if isinstance(part, PositionEncoding) and part.policies:
                yield part, grid
