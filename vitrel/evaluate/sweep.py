"""The options of an evaluation: data, sizes, protocols, policies, precision, batch size."""

from dataclasses import dataclass
from typing import Any

import torch

from vitrel.common.processes import checked_device, local_device
from vitrel.common.sizes import Budget, Size, format_size

PROTOCOLS = ("scale", "canvas", "native", "sliding")


DEFAULT_PROTOCOLS = PROTOCOLS[:2]
NATIVE = PROTOCOLS[2:3]  # the default for models trained at native shape
MARGIN = 2.0  # points


Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Settings of an evaluation.

    Args:
        data: a data set as `create_dataset` takes it.
        sizes: (height, width) in pixels, or budgets of patch tokens, each evaluated at the largest square of whole patches
            within the budget.
        protocols: how images fill a size: "scale", "canvas" and "native" (see `vitrel.data.Prepare`); "native" takes a size as
            a budget, and no image has more patch tokens than that size. "sliding", for segmentation, has the images of "canvas"
            in windows of the training size, half overlapping, whose logits are averaged; an image smaller than a window is
            padded to it with the mean color.
        policies: evaluate only these policies of windows and encodings; None: all. A model with none of them keeps its default.
        log_n: evaluate every policy with an attention temperature of log N too (`vitrel.position.log_n`).
        n: number of images, drawn with the seed `data_seed`; None: all.
        data_seed: seed of generated or sampled images.
        batch_size: number of images in a batch, halved when memory runs out.
        workers: processes that decode images.
        device: "auto", "cpu", "cuda", "cuda:1".
        dtype: "float32" or, on a GPU, "bfloat16" (autocast).
        on_bad_image: "raise" ends the evaluation at an unreadable image, "count" leaves it out and counts it.
        follow_links: also search folders that are linked inside class folders.
        val_fraction: share of the images to evaluate where the data has no evaluation split, as in `vitrel.data.Reading`.
        crop_pct: shares of the resized image that the center crop keeps, each evaluated; None: the model's.
        translations: numbers of pixels by which the content is translated down and right at the training size, each evaluated.
        attention_n: number of images for the attention statistics, 0 for none.
        border_leak: test whether tokens see the opposite border (models with windows; seconds per size).
        skip: combinations of size and protocol to leave out, such as "192x192 canvas".
        compile: run the models through torch.compile.
        margin: the loss, in points, that does not matter (`vitrel.evaluate.results.advice`).
        report: write report.html into an output folder.
        photographs: whether the report may contain images of the data.

    Raises:
        ValueError: a value or a combination is impossible.
    """

    data: str
    sizes: tuple[Size | Budget, ...]
    protocols: tuple[str, ...] = DEFAULT_PROTOCOLS
    policies: tuple[str, ...] | None = None
    log_n: bool = False
    n: int | None = None
    data_seed: int = 0
    batch_size: int = 128
    workers: int = 0
    device: str = "auto"
    dtype: str = "float32"
    on_bad_image: str = "raise"
    follow_links: bool = False
    val_fraction: float | None = None
    crop_pct: tuple[float, ...] | None = None
    translations: tuple[int, ...] = ()
    attention_n: int = 16
    border_leak: bool = True
    skip: tuple[str, ...] = ()
    compile: bool = False
    margin: float = MARGIN
    report: bool = False
    photographs: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "protocols", tuple(dict.fromkeys(self.protocols)))  # a duplicate would count as a second seed
        if not self.protocols:
            raise ValueError(f"at least one protocol is needed: {', '.join(PROTOCOLS)}")
        if unknown := [name for name in self.protocols if name not in PROTOCOLS]:
            raise ValueError(f"unknown protocol {unknown[0]!r}: choose from {', '.join(PROTOCOLS)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is float32 or bfloat16, got {self.dtype!r}")
        checked_device(self.device)
        if self.dtype == "bfloat16" and self.torch_device.type != "cuda":
            raise ValueError("bfloat16 evaluation needs a GPU; use float32 on the CPU")
        if self.compile and "native" in self.protocols:
            raise ValueError(
                "the native protocol has many image shapes, and torch.compile would compile for each: leave out one of the two"
            )
        if self.crop_pct is not None and self.protocols == ("native",):
            raise ValueError("the native protocol does not crop: leave crop_pct out")
        if self.on_bad_image not in ("raise", "count"):
            raise ValueError(f"on_bad_image is raise or count, got {self.on_bad_image!r}")
        if not 0 < self.margin < 100:
            raise ValueError(f"the margin is a loss in points and must be above 0, got {self.margin:g}")
        for name, least in (("batch_size", 1), ("attention_n", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        object.__setattr__(self, "skip", tuple(self.skip))
        combinations = {f"{format_size(size)} {protocol}" for size in self.sizes for protocol in self.protocols}
        if unknown := sorted({*self.skip} - combinations):
            raise ValueError(
                f"skip names {unknown[0]!r}, but takes a size and a protocol of this evaluation, such as '192x192 canvas'"
            )
        self._set_numbers("crop_pct", float, lambda share: 0 < share <= 1, "shares of the image, above 0 and at most 1")
        self._set_numbers("translations", int, lambda pixels: pixels >= 0, "whole numbers of pixels, 0 or more")

    def _set_numbers(self, name: str, kind: type, is_valid: Any, description: str) -> None:
        """Set the field `name` to a tuple of distinct numbers; ValueError, with the description, for an invalid one."""
        values = getattr(self, name)
        if values is None:
            return
        values = (values,) if isinstance(values, (int, float)) else tuple(values)
        types = (int, float) if kind is float else int
        wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, types) or not is_valid(value)]
        if wrong:
            raise ValueError(f"{name} takes {description}, got {wrong[0]!r}")
        object.__setattr__(self, name, tuple(dict.fromkeys(map(kind, values))))

    @property
    def torch_device(self) -> torch.device:
        """The device of this process; see `local_device`."""
        return local_device(self.device)
