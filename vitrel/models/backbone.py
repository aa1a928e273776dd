"""Base class of the ViT and Swin backbones: input size, position options, and position reports without running the model."""

import abc
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from timm.layers import to_2tuple, trunc_normal_
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.layers.patches import PatchEmbed
from vitrel.position import PositionEncoding, split_position
from vitrel.position.log_n import checked_power
from vitrel.position.terms import sum_counts

LARGE = (1 << 20, 1 << 20)  # (h, w) in pixels, larger than any image: only windowed encodings have their training grid there


def records_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate a backbone's constructor so that it stores, at its end, a deep copy of its arguments in `self.arguments`.

    Defaults are included; device and dtype are not.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        init(self, *args, **kwargs)
        arguments = {name: value for name, value in bound.arguments.items() if name not in ("self", "device", "dtype")}
        self.arguments = copy.deepcopy(arguments)

    return wrapped


class Backbone(nn.Module, abc.ABC):
    """Abstract base class of ViT and Swin, with what both share: input size, position, initialization, parameter groups.

    A subclass embeds an image as patches on a grid (`embed_patches`) and calls every encoding on that grid, or on the window's.

    Attributes:
        patch_embed: a PatchEmbed with output [B, h, w, C].
        pos_embed: the encoding added to the tokens, or None.
        num_prefix_tokens: number of class, distillation and register tokens.
        arguments: those of the constructor, defaults included; `current_arguments()` includes later changes.
        task: name of the task of `vitrel.tasks` in which a run of vitrel.train trained it; "" if unknown.
        train_sizes: image sizes of that run, each "224x224" or, for a budget of 196 patch tokens, "196t"; empty if unknown.
    """

    arguments: dict[str, Any]
    patch_embed: PatchEmbed
    pos_embed: PositionEncoding | None
    num_prefix_tokens: int
    init_linear: Callable[[nn.Module], None]
    window_size: tuple[int, int] | None = None
    train_sizes: tuple[str, ...] = ()
    task: str = ""
    grad_checkpointing: bool = False

    @abc.abstractmethod
    def encodings(self, size: tuple[int, int]) -> Iterator[tuple[PositionEncoding, Grid]]:
        """Yield every position encoding with the grid that it is called on for an image of `size` (h, w) pixels.

        In windowed attention that is the grid of one window.
        """

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits [B, num_classes] of images [B, in_chans, height, width] of any size of at least one patch.

        Without a head (num_classes 0) they are the pooled features [B, C]. With global_pool "" nothing is pooled: there are
        logits or features of every token.
        """
        return self.forward_head(self.forward_features(image))

    def current_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments of the model in its current state.

        They differ from `arguments` after a new head, pruning or removal of the absolute embedding, not after `set_input_size`.
        """
        _, attention = split_position(self.arguments["position"])
        position = (attention or "none") if self.pos_embed is None else self.arguments["position"]
        return self.arguments | dict(num_classes=self.num_classes, global_pool=self.global_pool, position=position)

    @property
    def _model_args(self) -> dict[str, Any]:
        """{name: value} of `current_arguments()` without None, which timm's save_for_hf stores.

        Without this property timm would store the arguments that its builder was given.
        """
        return {name: value for name, value in self.current_arguments().items() if value is not None}

    @_model_args.setter
    def _model_args(self, value: dict[str, Any]) -> None:
        """Ignore the value; it exists because timm's factory assigns to it."""

    def token_grid(self, size: tuple[int, int]) -> Grid:
        """Return the grid of all tokens, prefix too, for an image of `size` (h, w) pixels; sides are rounded up to patches."""
        (h, w), (ph, pw) = size, self.patch_embed.patch_size
        return Grid(-(-h // ph), -(-w // pw), self.num_prefix_tokens)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        window_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Record the input size as `img_size`. It changes no parameter and no output: forward takes any size without this call.

        Args:
            img_size: an int or (h, w) in pixels; None: as it is.
            patch_size: as in timm's method; None, or that of the model.
            window_size: as in timm's method; None, or that of the model.

        Raises:
            ValueError: patch_size or window_size differs from that of the model.
        """
        for name, new, current in (
            ("patch_size", patch_size, self.patch_embed.patch_size),
            ("window_size", window_size, self.window_size),
        ):
            if new is not None and to_2tuple(new) != current:
                raise ValueError(f"{name} {new} differs from the model's {current} and cannot be changed: build a new model")
        if img_size is not None:
            self.img_size = to_2tuple(img_size)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that the encodings of this model offer for other image sizes, the default first.

        It is empty if there are none. Encodings in windows do not count, since their grid is the same at every size.
        """
        parts = (part for part, grid in parts_with_policies(self, LARGE) if part.grid[:2] != grid[:2])
        return tuple(dict.fromkeys(policy for part in parts for policy in part.policies))

    def set_position_options(self, **options: Any) -> None:
        """Change options of the encodings that act only at other sizes than the training size.

        Parameters and outputs at the training size do not change. `arguments` is updated, so the model is saved with the
        options.

        Args:
            options: policy (one name or several joined by "+"), policy_strength, yarn_turns and temperature, with values as in
                position_args.

        Raises:
            ValueError: no encoding of this model has an option or policy, or a value is impossible; nothing is changed then.
        """
        for policy in options["policy"].split("+") if "policy" in options else ():
            if policy not in self.policies:
                known = ", ".join(self.policies) or "none, since nothing is resampled"
                raise ValueError(f"this model has no policy {policy!r} (it has {known})")
        parts = [part for part in self.modules() if isinstance(part, PositionEncoding)]
        checked_power(options.get("temperature", "none"))
        applied = {name for part in parts for name in copy.copy(part).switch(options)}  # tried first: it may raise
        if unused := [name for name in options if name not in applied | {"temperature"}]:
            raise ValueError(f"no encoding of this model has an option {unused[0]} that can be changed after construction")
        for part in parts:
            part.switch(options)
        if "temperature" in options:
            for encoding, grid in self.trained_encodings():
                encoding.set_temperature(options["temperature"], grid)
        self.arguments["position_args"] = dict(self.arguments["position_args"] or {}, **options)

    def trained_encodings(self) -> Iterator[tuple[PositionEncoding, Grid]]:
        """Yield every position encoding with its grid at the image size that the model was built for."""
        return self.encodings(to_2tuple(self.patch_embed.img_size))

    def resampled(self, size: tuple[int, int]) -> dict[str, int]:
        """Return {"key policy": number of trained values that are interpolated} for images of `size` (h, w) pixels.

        In "table geometric", "table" is a key of POSITIONS; blocks are summed. The dict is empty if every value is read as
        trained. The number is 0 for a policy that interpolates no parameter, as "table clip".
        """
        return sum_counts(encoding.resampled(grid) for encoding, grid in self.encodings(size))

    def unseen(self, size: tuple[int, int]) -> float:
        """Return the largest `PositionEncoding.unseen` of all encodings for images of `size` (h, w) pixels.

        That is the share, 0 to 1, of an encoding's offsets that no pair of tokens had in training.
        """
        return max((encoding.unseen(grid) for encoding, grid in self.encodings(size)), default=0.0)

    def saturated(self, size: tuple[int, int]) -> float:
        """Return the largest `PositionEncoding.saturated` of all encodings for images of `size` (h, w) pixels.

        That is the share, 0 to 1, of an encoding's offsets that no pair of tokens had in training, but that read a trained edge
        row or far bucket.
        """
        return max((encoding.saturated(grid) for encoding, grid in self.encodings(size)), default=0.0)

    def position_parameters(self) -> set[str]:
        """Return the names of the parameters of position encodings, as in named_parameters()."""
        encodings = [name for name, module in self.named_modules() if isinstance(module, PositionEncoding)]
        return {n for n, _ in self.named_parameters() if any(n.startswith(f"{e}.") for e in encodings)}

    def position_lr_scales(self) -> dict[str, float]:
        """Return {each parameter of encodings in attention: its factor on the learning rate in fine-tuning, `lr_scale`}."""
        scales: dict[str, float] = {}
        for name, module in self.named_modules():  # a composition comes before its parts
            if isinstance(module, PositionEncoding) and module.site == "attention":
                scales |= {f"{name}.{parameter}": module.lr_scale for parameter, _ in module.named_parameters()}
        return scales

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay.

        They are all parameters of position encodings, the class, distillation and register tokens, and the scales of cosine
        attention. Norms and biases are not listed, since timm and vitrel.train exclude them in any model.
        """
        others = ("cls_token", "dist_token", "reg_token", "logit_scale")
        return self.position_parameters() | {n for n, _ in self.named_parameters() if n.rpartition(".")[2] in others}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn activation checkpointing of the blocks on or off, by which the backward pass computes activations again."""
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                module.grad_checkpointing = enable  # type: ignore[assignment]

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialize all parameters, for example of a model built on the meta device and moved by `to_empty`.

        Args:
            needs_reset: False: only draw the linear layers outside encodings again; constructors have initialized the rest.
        """
        if needs_reset:
            for module in reversed([*self.modules()]):  # parts first: an encoding overrules the layers it contains
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        in_encodings = {part for module in self.modules() if isinstance(module, PositionEncoding) for part in module.modules()}
        for module in self.modules():
            if module not in in_encodings:
                self.init_linear(module)

    def embed_patches(self, image: Tensor) -> Tensor:
        """Embed images as patches, [B, in_chans, height, width] -> [B, h, w, C].

        Images are padded on the right and below to whole patches.

        Raises:
            ValueError: the image has another shape, or is smaller than one patch; compiled graphs do not check it.
        """
        if not torch.compiler.is_compiling():
            check_image(image, self.in_chans, self.patch_embed.patch_size)
        return self.patch_embed(image)


@torch.fx.wrap  # a leaf of fx graphs, since a trace cannot branch on a size
def check_image(image: Tensor, in_chans: int, patch: tuple[int, int]) -> None:
    """Raise ValueError unless `image` is [B, in_chans, height, width] and at least one patch (h, w), in pixels, large."""
    if image.dim() != 4:
        raise ValueError(f"expected images [B, C, height, width], got shape {tuple(image.shape)}; add a batch dimension?")
    if image.shape[1] != in_chans:
        raise ValueError(f"expected {in_chans} channels, got {image.shape[1]}; build the model with in_chans={image.shape[1]}")
    if image.shape[2] < patch[0] or image.shape[3] < patch[1]:
        size = f"{image.shape[2]}x{image.shape[3]}"
        raise ValueError(f"image of {size} pixels is smaller than one patch of {patch[0]}x{patch[1]}; enlarge it")


def check_pool(global_pool: str, class_token: bool, attention_pool: bool = False) -> None:
    """Raise ValueError unless `global_pool` is avg, max, avgmax or "", token with a class token, or map with attention_pool."""
    known = (*(["token"] if class_token else []), "avg", "max", "avgmax", *(["map"] if attention_pool else []), "")
    if global_pool not in known:
        hint = "needs class_token=True" if global_pool == "token" else "is unknown"
        hint = "needs a model built with global_pool='map'" if global_pool == "map" else hint
        raise ValueError(f"global_pool={global_pool!r} {hint}; choose one of {', '.join(map(repr, known))}")


def init_linear(module: nn.Module, gain: float | None = None) -> None:
    """Draw the weights of a linear layer from a truncated normal and set its bias to zero; other modules are left alone.

    Args:
        module: any module.
        gain: the standard deviation is gain / sqrt(in_features): for the widths of the smallest models 0.02 is too small, and
            attention needs hundreds of updates before heads differ. None: 0.02, as in timm, which suits widths of 192 and more.
    """
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02 if gain is None else gain / math.sqrt(module.in_features))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def parts_with_policies(model: Backbone, size: tuple[int, int]) -> Iterator[tuple[PositionEncoding, Grid]]:
    """Yield every encoding that has policies, alone or in a composition, with its grid for images of `size` (h, w) pixels."""
    for encoding, grid in model.encodings(size):
        for part in encoding.modules():
            if isinstance(part, PositionEncoding) and part.policies:
                yield part, grid


def backbone_of(model: nn.Module) -> Backbone | None:
    """Return the model itself if it is a Backbone, or its attribute `backbone` if that is one (Segmenter); otherwise None."""
    inner = model if isinstance(model, Backbone) else getattr(model, "backbone", None)
    return inner if isinstance(inner, Backbone) else None
