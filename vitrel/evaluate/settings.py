"""Settings of an evaluation: data, sizes, protocols, policies, and how it runs."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from vitrel.sizes import Budget, Size, format_size

PROTOCOLS = ("scale", "canvas", "native")
DEFAULT_PROTOCOLS = PROTOCOLS[:2]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What an evaluation is asked for; ValueError for settings that cannot be.

    data: what `create_dataset` takes. sizes: (height, width) in pixels, or budgets of patch tokens: the largest square of whole
    patches. protocols: how images fill a size, "scale", "canvas" and "native", for which a size is a budget: every image keeps
    its aspect ratio and has at most the patch tokens of that size. policies: only these policies of windows and encodings
    (None: all; a model with none of them keeps its own). n, data_seed: number of images (None: all) and the seed by which they
    are drawn. batch_size: halved where memory lacks. workers: processes that decode images. device: "auto", "cpu", "cuda",
    "cuda:1". dtype: "float32" or, on a GPU, "bfloat16" (autocast). on_bad_image: an image that cannot be read ends the
    evaluation ("raise"), or is left out and counted ("count"). follow_links: look for images where links to folders inside
    class folders lead to, too. crop_pct: shares of the resized image that the centre crop keeps, each evaluated (None: the
    model's own). translations: pixels by which the content is translated down and right at the training size, each evaluated.
    attention_n: number of images that the attention statistics are taken of, 0 for none. border_leak: look for tokens that see
    the opposite border (models with windows; seconds per size). skip: places left out, such as "192x192 canvas". compile: by
    torch.compile. optimize: by vitrel.optimize, on a CPU; rows made without it still stand, for it changes no figure but speed
    and memory.
    """

    data: str
    sizes: tuple[Size | Budget, ...]
    protocols: tuple[str, ...] = DEFAULT_PROTOCOLS
    policies: tuple[str, ...] | None = None
    n: int | None = None
    data_seed: int = 0
    batch_size: int = 128
    workers: int = 0
    device: str = "auto"
    dtype: str = "float32"
    on_bad_image: str = "raise"
    follow_links: bool = False
    crop_pct: tuple[float, ...] | None = None
    translations: tuple[int, ...] = ()
    attention_n: int = 16
    border_leak: bool = True
    skip: tuple[str, ...] = ()
    compile: bool = False
    optimize: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "protocols", tuple(dict.fromkeys(self.protocols)))  # twice would count as two seeds
        if not self.protocols:
            raise ValueError(f"at least one protocol is needed: {', '.join(PROTOCOLS)}")
        if unknown := [name for name in self.protocols if name not in PROTOCOLS]:
            raise ValueError(f"unknown protocol {unknown[0]!r}: choose from {', '.join(PROTOCOLS)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is float32 or bfloat16, got {self.dtype!r}")
        self._check_device()
        if self.dtype == "bfloat16" and self.torch_device.type != "cuda":
            raise ValueError("bfloat16 evaluation needs a GPU; use float32 on the CPU")
        if self.optimize and (self.compile or self.torch_device.type != "cpu"):
            raise ValueError("optimize is for models on a CPU that torch.compile does not run: leave out one of the two")
        if self.compile and "native" in self.protocols:
            raise ValueError(
                "native runs one shape after another, each of which torch.compile would compile: leave out one of the two"
            )
        if self.crop_pct is not None and self.protocols == ("native",):
            raise ValueError("native crops nothing: leave crop_pct out")
        if self.on_bad_image not in ("raise", "count"):
            raise ValueError(f"on_bad_image is raise or count, got {self.on_bad_image!r}")
        for name, least in (("batch_size", 1), ("attention_n", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        object.__setattr__(self, "skip", tuple(self.skip))
        places = {f"{format_size(size)} {protocol}" for size in self.sizes for protocol in self.protocols}
        if unknown := sorted({*self.skip} - places):
            raise ValueError(
                f"skip names {unknown[0]!r}, which is no size and protocol of this evaluation, as '192x192 canvas'"
            )
        self._several("crop_pct", float, lambda share: 0 < share <= 1, "shares of the image, above 0 and at most 1")
        self._several("translations", int, lambda pixels: pixels >= 0, "whole numbers of pixels, 0 or more")

    def _check_device(self) -> None:
        try:
            device = self.torch_device
        except RuntimeError as error:
            raise ValueError(f"device is auto, cpu, cuda, cuda:1, ..., got {self.device!r}") from error
        if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
            shared = int(os.environ.get("WORLD_SIZE", 1)) > 1 and self.device in ("auto", "cuda")
            way_out = f"start at most {count} processes, or use cpu" if shared else "use auto or cpu"
            raise ValueError(f"there is no device {device} here: {count} GPUs are seen; {way_out}")
        if device.type not in ("cpu", "cuda"):
            try:
                torch.ones(1, device=device).item()
            except (RuntimeError, AssertionError, ImportError) as error:
                reason = str(error).partition("\n")[0]
                raise ValueError(f"there is no device {device} here ({reason:.200}); use auto or cpu") from error

    def _several(self, name: str, kind: type, holds: Any, what: str) -> None:
        """One number or several of a configuration as a tuple; ValueError for anything else."""
        given = getattr(self, name)
        if given is None:
            return
        given = (given,) if isinstance(given, (int, float)) else tuple(given)
        allowed = (int, float) if kind is float else int
        if wrong := [value for value in given if isinstance(value, bool) or not isinstance(value, allowed) or not holds(value)]:
            raise ValueError(f"{name} takes {what}, got {wrong[0]!r}")
        object.__setattr__(self, name, tuple(dict.fromkeys(map(kind, given))))

    @property
    def torch_device(self) -> torch.device:
        return own_device(self.device)


def own_device(name: str) -> torch.device:
    """The device `name`; of "auto" and "cuda" the GPU of this process, by its number on the machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else torch.device(name)
