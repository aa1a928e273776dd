"""What a position encoding may add to attention: Table, Terms, and the interface every encoding implements.

Every relative encoding is a table over the (2h-1) x (2w-1) lattice of offsets, or over its two axes; only how the rows are
produced differs. So an encoding is a pure function of the grid that returns tensors, and attention (vitrel.ops) is the only
place where position meets content.
"""

import abc
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.grid import Grid, clip_saturated, unseen_share
from vitrel.position.perturb import perturb
from vitrel.position.rope_scaling import OPTIONS, Scaling


class Factory(TypedDict, total=False):
    """Where and how an encoding makes its tensors, as torch's modules take it."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class Table(NamedTuple):
    """Rows looked up by the offset class r = grid.index(axis)[i, j] of query i and key j; the tables of an encoding are summed.

    `scale` below is Terms.logit_scale(D); q, k are unrotated, q includes Terms.query_bias. gated rows are weighed by the
    query's content: logit[i, j] += scale * sum_g softplus(q[i] . a[g]) * rows[r, g].
    """

    axis: str = "hw"  # "hw" | "h" | "w"
    bias: Tensor | None = None  # [H, R]        logit[i, j] += bias[r]
    query: Tensor | None = None  # [H|1, R, D]  logit[i, j] += scale * q[i] . query[r]
    key: Tensor | None = None  # [H|1, R, D]    logit[i, j] += scale * k[j] . key[r]
    value: Tensor | None = None  # [H|1, R, D]  out[i] += sum_j p[i, j] * value[r]
    gated: tuple[Tensor, Tensor] | None = None  # (a [H|1, G, D], rows [H|1, R, G]), as above


class Terms(NamedTuple):
    """All that a position encoding adds to a transformer, as tensors.

    The content logit is scale * temperature * D**-0.5 * rotate(q + query_bias) . rotate(k). Query and key tables meet the
    *unrotated* q and k (rotating first would break translation invariance). `scale` and `temperature` multiply content, query
    and key terms, never `Table.bias`.
    """

    tokens: Tensor | None = None  # [N, C]  added once, after patch embedding
    rotary: tuple[Tensor, Tensor] | None = None  # (cos, sin), each [H|1, N, D/2]; 1 and 0 on prefix rows
    key_rotary: tuple[Tensor, Tensor] | None = None  # of the keys, where not that of the queries (xPos)
    query_bias: Tensor | None = None  # [H, D]
    scale: float = 1.0  # the same on every grid
    temperature: Tensor | None = None  # 0-d, a factor that depends on the grid: as a float it would cost a graph per size
    tables: tuple[Table, ...] = ()

    def logit_scale(self, width: int) -> float | Tensor:
        """The factor of content, query and key terms for heads of this width D: scale * temperature * D**-0.5."""
        scale = self.scale * width**-0.5
        return scale if self.temperature is None else scale * self.temperature


class PositionEncoding(nn.Module, abc.ABC):
    """Abstract: a pure function of the grid. Every subclass is final and is built as (grid, num_heads, head_dim, **options).

    `site` says where the terms act: "attention" (rotary, query_bias, tables) or "tokens" (added to the embedded patches);
    `rotates`, whether they hold a rotary term, of which a model can have only one.
    `behaviour` is the claim about a grid never trained on: "nothing changes" (every row read there was trained), "evaluated" (a
    function, at arguments never trained), "resized" (parameters are resampled), or "nothing" (there is no position at all).
    `policies` are the rules, the default first, by which it can serve such a grid, where there is a choice; the attribute
    `resize` holds the one in use, `scaling` that of a rotation (vitrel.position.rope_scaling), `grid` the training
    grid, `logit_scale` the temperature (vitrel.position.log_n); `shift`, `jitter`, `rescale` how far training
    perturbs coordinates (vitrel.position.perturb), where the encoding has any.
    """

    site: ClassVar[str] = "attention"
    rotates: ClassVar[bool] = False
    behaviour: ClassVar[str] = "evaluated"
    policies: ClassVar[tuple[str, ...]] = ()
    grid: Grid | None = None
    resize: str = ""
    scaling: Scaling | None = None
    radius: tuple[int, int] | None = None  # beyond which offsets are clipped
    init_std: float = 0.02
    logit_scale: str | float = "none"
    shift: float | None = None
    jitter: float | None = None
    rescale: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.resize = next(iter(self.policies), "")

    @property
    def refers_to_grid(self) -> bool:
        """Whether the function itself, not only the size of its tables, depends on the training grid."""
        return self.logit_scale != "none" or self.resize == "renormalise"

    @property
    def perturbs(self) -> bool:
        """Whether forward draws: in training, with some of `shift`, `jitter` and `rescale`."""
        return self.training and (self.shift, self.jitter, self.rescale) != (None, None, None)

    @abc.abstractmethod
    def forward(self, grid: Grid) -> Terms:
        """Terms on `grid`, always computed from the trained parameters; changes nothing in the module."""

    def switch(self, options: Mapping[str, Any]) -> set[str]:
        """Switches those of `options` that it has and that act at other grids alone, resize and the scaling of a rotation, as
        the constructor takes them; returns their names. ValueError for an impossible scaling.
        """
        taken = set()
        for policy in own_policies(self, options.get("resize", "")):
            self.resize = policy
            taken.add("resize")
        if self.scaling is not None and (own := options.keys() & OPTIONS.keys()):
            self.scaling = self.scaling.switched(options)
            taken |= own
        return taken

    def resized(self, grid: Grid) -> dict[str, int]:
        """What forward(grid) reads other than as it was trained: {rule: number of parameter values interpolated}."""
        key = type(self).__module__.rpartition(".")[2]
        return {f"{key} renormalise": 0} if self.resize == "renormalise" and grid[:2] != self.grid[:2] else {}

    def unseen(self, grid: Grid) -> float:
        """Share of the offset cells of `grid` that no pair of the training grid had, 0 to 1."""
        return 0.0 if self.grid is None or self.resize == "renormalise" else unseen_share(self.grid, grid)

    def saturated(self, grid: Grid) -> float:
        """The part of `unseen` that reads an edge row or a far bucket which the training grid did address, 0 to 1."""
        if self.radius is not None:
            return clip_saturated(self.grid, grid, self.radius)
        return self.unseen(grid) if self.resize == "clip" else 0.0

    def reset_parameters(self) -> None:
        """Initialise: here every parameter truncated normal with standard deviation `init_std`."""
        for parameter in self.parameters(recurse=False):
            nn.init.trunc_normal_(parameter, std=self.init_std)

    def _augmented(self, coordinates: Tensor) -> Tensor:
        return perturb(coordinates, self.shift, self.jitter, self.rescale) if self.perturbs else coordinates

    def mark_device(self, device: torch.device | str | None = None) -> None:
        """For encodings without parameters: an empty buffer that says on which device they are; in no state dict."""
        self.register_buffer("device_marker", torch.empty(0, device=device), persistent=False)


class Composition(PositionEncoding):
    """Several encodings at once, their terms combined. Built by `create_position("a+b", ...)`."""

    def __init__(self, parts: dict[str, PositionEncoding]):
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, grid: Grid) -> Terms:
        return combine(*(part(grid) for part in self.parts.values()))

    def resized(self, grid: Grid) -> dict[str, int]:
        return sum_counts(part.resized(grid) for part in self.parts.values())

    def unseen(self, grid: Grid) -> float:
        return max(part.unseen(grid) for part in self.parts.values())

    def saturated(self, grid: Grid) -> float:
        return max(part.saturated(grid) for part in self.parts.values())


def own_policies(encoding: PositionEncoding, resize: str) -> list[str]:
    """Those of `resize`, one policy or several joined by '+', that `encoding` has."""
    return [policy for policy in resize.split("+") if policy in encoding.policies]


def parts_of(encoding: PositionEncoding) -> tuple[PositionEncoding, ...]:
    """The encodings that a composition joins, or the encoding itself."""
    return tuple(encoding.parts.values()) if isinstance(encoding, Composition) else (encoding,)


def combine(*terms: Terms) -> Terms:
    """The sum of several encodings' terms: tokens, query biases and tables add up, scales and temperatures multiply.

    Raises ValueError for two rotary terms, since a rotation of a rotation has no agreed meaning.
    """
    rotary = [t for t in terms if t.rotary is not None]
    if len(rotary) > 1:
        raise ValueError("two rotary encodings cannot be combined: choose one of the rope_* keys")
    scale, temperature = 1.0, None
    for t in terms:
        scale = scale * t.scale
        if t.temperature is not None:
            temperature = t.temperature if temperature is None else temperature * t.temperature
    return Terms(
        tokens=_sum(t.tokens for t in terms),
        rotary=rotary[0].rotary if rotary else None,
        key_rotary=rotary[0].key_rotary if rotary else None,
        query_bias=_sum(t.query_bias for t in terms),
        scale=scale,
        temperature=temperature,
        tables=tuple(table for t in terms for table in t.tables),
    )


def check_choice(key: str, name: str, value: str, known: tuple[str, ...]) -> str:
    """`value`, or ValueError naming the option and the known values."""
    if value not in known:
        raise ValueError(f"{key} option {name}={value!r} is unknown; choose one of {', '.join(known)}")
    return value


def check_sides(key: str, name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """(h, w) of a grid given as one side or both; ValueError naming the option for anything else."""
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides):
        raise ValueError(f"{key} option {name} is one side or (h, w), in whole patches, not {value!r}")
    return sides


def check_prefix(key: str, trained: Grid, grid: Grid) -> None:
    """ValueError unless both grids have prefix tokens or neither has, for an encoding with learned prefix rows."""
    if bool(grid.prefix) != bool(trained.prefix):
        raise ValueError(f"{key} was built for {trained.prefix} prefix tokens, the grid has {grid.prefix}")


def pad_prefix(rows: Tensor, grid: Grid, dim: int = -1) -> Tensor:
    """Zero rows along `dim` for the three classes of prefix tokens, where `grid` has any."""
    dims = rows.dim() - dim % rows.dim() - 1
    return F.pad(rows, (0, 0) * dims + (0, grid.classes() - grid.offset_classes()))


def upcast(tensor: Tensor) -> Tensor:
    """`tensor` in at least float32: positions are computed there and rounded once, at the end."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Context in which autocast does not round matrix products of position."""
    # The meta device has none. torch.amp.is_autocast_available would say so, but torch 2.11 cannot compile it.
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Merge {rule: count} dictionaries, adding the counts of equal rules."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _sum(tensors: Iterable[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.stack(present).sum(0) if len(present) > 1 else present[0] if present else None
