"""Table, Terms and PositionEncoding: the data that encodings return, and the interface they implement.

Every relative encoding is a table over the (2h-1) x (2w-1) offsets of a grid, or over its two axes; encodings differ in how
they compute the rows. So an encoding is a pure function of the grid that returns tensors, and only attention (vitrel.ops)
combines them with queries, keys and values.
"""

import abc
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vitrel.grid import Grid, clip_saturated, unseen_share
from vitrel.position.log_n import checked_power, log_n_temperature
from vitrel.position.perturb import perturb


class Factory(TypedDict, total=False):
    """Keyword arguments `device` and `dtype` of the tensors that an encoding creates, as for torch's modules."""

    device: torch.device | str | None  # None: torch's default device
    dtype: torch.dtype | None  # None: torch's default dtype


class Table(NamedTuple):
    """Rows that attention looks up by offset class: query i and key j read row r = grid.index(axis)[i, j].

    An encoding may return several tables, whose contributions are summed. Below, R is Grid.classes(axis), `scale` is
    Terms.content_scale(D); q and k are before rotation, and q includes Terms.query_bias. A first dimension of 1 in place of H
    serves all heads alike.

    Args:
        axis: "hw", both axes; "h" or "w", one; or "h+w", the diagonals of equal dy + dx (pape alone).
        bias: [H, R]: logit[i, j] += bias[r].
        query: [H or 1, R, D]: logit[i, j] += scale * q[i] . query[r].
        key: [H or 1, R, D]: logit[i, j] += scale * k[j] . key[r].
        value: [H or 1, R, D]: out[i] += sum_j p[i, j] * value[r], p the attention weights.
        gated: (a [H or 1, G, D], rows [H or 1, R, G]), G numbers per row, weighted by the query's content (pape alone, where a
            softplus stands between query and row): logit[i, j] += scale * sum_g softplus(q[i] . a[g]) * rows[r, g].
    """

    axis: str = "hw"
    bias: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    gated: tuple[Tensor, Tensor] | None = None


class Terms(NamedTuple):
    """Everything that a position encoding adds to a transformer on one grid, as tensors.

    The content logit is scale * temperature * D**-0.5 * rotate(q + query_bias) . rotate(k). Query and key tables multiply the
    *unrotated* q and k, since rotating first would break translation invariance. `scale` and `temperature` multiply content,
    query, key and gated terms, never `Table.bias`. Terms() adds nothing.

    Args:
        tokens: [N, C], added once, after patch embedding.
        rotary: (cos, sin), each [H or 1, N, D/2], of the angles that rotate the channel pairs (p, p + D/2); 1 and 0 for
            prefix tokens.
        key_rotary: the same of the keys, where they decay as 1 / that of queries (xpos alone); None: as the queries.
        query_bias: [H, D], added to every query, before rotation (transformer_xl alone).
        scale: factor that is the same on every grid (deberta alone).
        temperature: 0-d factor that depends on the grid; a float would need a graph per size. None: 1.
        tables: rows looked up by offset class, summed.
    """

    tokens: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    key_rotary: tuple[Tensor, Tensor] | None = None
    query_bias: Tensor | None = None
    scale: float = 1.0
    temperature: Tensor | None = None
    tables: tuple[Table, ...] = ()

    def content_scale(self, width: int) -> float | Tensor:
        """Return the factor of content, query, key and gated terms for heads of width D = `width`.

        It is scale * temperature * D**-0.5.
        """
        scale = self.scale * width**-0.5
        return scale if self.temperature is None else scale * self.temperature

    @property
    def in_attention(self) -> list[Tensor | None]:
        """List of all tensors but `tokens`, which attention does not read; some that are absent stand as None."""
        parts = [*(self.rotary or ()), *(self.key_rotary or ()), self.query_bias, self.temperature]
        for table in self.tables:
            parts += [table.bias, table.query, table.key, table.value, *(table.gated or ())]
        return parts


class PositionEncoding(nn.Module, abc.ABC):
    """Abstract base class of encodings: a module that maps a grid to the terms it adds to tokens or to attention.

    Subclasses are final and are built as (grid, num_heads, head_dim, **options), with the training grid.

    Args:
        shift_coords: in training, each axis moves by a random number of units up to this, either way; None: no shift.
        jitter_coords: s; in training, each axis is multiplied by its own random factor in 1/s..s; None: no stretch.
        rescale_coords: s; in training, both axes are multiplied by one random factor in 1/s..s; None: no scale.

    Attributes:
        site: of the class: "attention" (rotary, query_bias, tables) or "tokens" (rows added to the embedded patches).
        rotates: of the class: True if the terms hold a rotation; a model can have only one.
        at_larger_grid: of the class: what happens at a grid larger than the training grid: "nothing changes" (it reads trained
            rows only, or the same function continues), "evaluated" (a function at arguments beyond those of training),
            "resampled" (parameters are resampled by a policy) or "nothing" (there is no position).
        keeps_range: of the class: True if positions on any grid are within the range of those in training, so that no offset
            counts as unseen.
        lr_scale: of the class: factor on the learning rate of its parameters in fine-tuning, where that of other weights is
            small: AdamW moves a parameter by about the learning rate per update, whatever its units are. Encodings in attention
            only.
        positive: of the class: names of its options that must be a number greater than 0, or None if the option can be None.
        switchable: of the class: names of its options that act only on grids other than the training grid (`switch`).
        policies: names of the policies for another grid, the default first; empty if there is no choice. An attribute of the
            class, which an instance may override.
        grid: the training grid. `create_position` sets it where a subclass does not.
        policy: the policy in use.
        radius: (rows, columns) in patches to which offsets are clipped, or None.
        init_std: standard deviation of initial values.
        temperature: "none", "log_n" or the power of log N by which logits grow on other grids (vitrel.position.log_n).
        temperature_grid: the grid on which the temperature is 1.
    """

    site: ClassVar[str] = "attention"
    rotates: ClassVar[bool] = False
    at_larger_grid: ClassVar[str] = "evaluated"
    keeps_range: ClassVar[bool] = False
    lr_scale: ClassVar[float] = 1.0
    positive: ClassVar[tuple[str, ...]] = ("init_std",)
    switchable: ClassVar[tuple[str, ...]] = ("policy",)
    policies: tuple[str, ...] = ()
    grid: Grid | None = None
    policy: str = ""
    radius: tuple[int, int] | None = None
    init_std: float = 0.02
    temperature: str | float = "none"
    temperature_grid: Grid | None = None

    def __init__(
        self, shift_coords: float | None = None, jitter_coords: float | None = None, rescale_coords: float | None = None
    ) -> None:
        super().__init__()
        self.shift_coords, self.jitter_coords, self.rescale_coords = shift_coords, jitter_coords, rescale_coords
        self.policy = next(iter(self.policies), "")

    @property
    def refers_to_grid(self) -> bool:
        """Whether an encoding with the same parameters and options, built for another training grid, returns other values.

        Weights trained on one grid then do not fit an encoding built for another. False if only the shapes of parameters, or
        values of options (radius, pretrained_window), depend on the training grid.
        """
        return self.temperature != "none" or self.policy == "renormalize"

    @property
    def perturbs(self) -> bool:
        """Whether `terms` draws random numbers: in training with shift_, jitter_ or rescale_coords.

        A Composition returns False, also if one of its parts draws.
        """
        strengths = self.shift_coords, self.jitter_coords, self.rescale_coords
        return self.training and strengths != (None, None, None)

    @abc.abstractmethod
    def terms(self, grid: Grid) -> Terms:
        """Return the terms on `grid` before its temperature, computed from the trained parameters; the module does not change.

        Every encoding defines this method.
        """

    def forward(self, grid: Grid | tuple[int, int] | tuple[int, int, int]) -> Terms:
        """Return the terms on a grid, with the encoding's temperature on that grid, if it has one (`set_temperature`).

        Args:
            grid: of the tokens, (h, w) or (h, w, prefix) with class and register tokens; in windows, that of one window.
        """
        grid = Grid(*grid)
        terms = self.terms(grid)
        if self.temperature_grid is None:
            return terms
        device = next((t.device for t in (*self.parameters(), *self.buffers())), None)
        power = checked_power(self.temperature)
        factor = log_n_temperature(*grid, tuple(self.temperature_grid), power, device=device)
        return combine(terms, Terms(temperature=factor))

    def set_temperature(self, value: str | float, trained: Grid) -> None:
        """Set the factor of the logits on a grid of N tokens: (log N / log N_train)^p (vitrel.position.log_n).

        Args:
            value: "none" (p = 0, no factor), "log_n" (p = 1/2), or p, above 0.
            trained: the training grid, of N_train tokens, on which the factor is 1.

        Raises:
            ValueError: the value is any other.
        """
        checked_power(value)
        self.temperature, self.temperature_grid = value, None if value == "none" else trained

    def switch(self, options: Mapping[str, Any]) -> set[str]:
        """Change the options that act only on grids other than the training grid, and return the names of those applied.

        A Composition has none: switch its parts (`parts_of`).

        Args:
            options: {name: value} of `policy`, names joined by "+" (the last that this encoding has applies), and in subclasses
                of the policy's own options. Options and policies that this encoding does not have are ignored.
        """
        applied = set()
        for policy in options.get("policy", "").split("+"):
            if policy in self.policies:
                self.policy = policy
                applied.add("policy")
        return applied

    def resampled(self, grid: Grid) -> dict[str, int]:
        """Return how forward(grid) departs from the trained values: {"key policy": number of values interpolated}.

        The name is the encoding's key in POSITIONS and its policy, as in "table geometric". The result is {} if every value is
        read as trained. The number is 0 for a policy that interpolates no parameter (clip, yarn, renormalize).
        """
        key = type(self).__module__.rpartition(".")[2]
        return {f"{key} renormalize": 0} if self.policy == "renormalize" and grid[:2] != self.grid[:2] else {}

    def unseen(self, grid: Grid) -> float:
        """Return the share of the (2h-1)(2w-1) offsets of `grid`, 0 to 1, that no pair of tokens of the training grid has.

        It is 0 for a class with keeps_range, and with policy="renormalize", policy="linear" of rope_axial and rope_mixed, or a
        reference grid of rope_axial.

        Raises:
            ValueError: the training grid is needed and not known.
        """
        if self.keeps_range or self.policy == "renormalize":
            return 0.0
        if self.grid is None:
            raise ValueError(
                f"{type(self).__name__} does not know its training grid: build it with vitrel.create_position, or set self.grid"
            )
        return unseen_share(self.grid, grid)

    def saturated(self, grid: Grid) -> float:
        """Return the share of the offsets of `grid`, 0 to 1, that are unseen but read a trained edge row or far bucket.

        An offset is unseen if no pair of tokens of the training grid has it. The share is 0 for encodings that neither clip
        offsets to a radius, nor share rows by buckets (t5), nor have the policy "clip".
        """
        if self.radius is not None:
            return clip_saturated(self.grid, grid, self.radius)
        return self.unseen(grid) if self.policy == "clip" else 0.0

    def reset_parameters(self) -> None:
        """Initialize the parameters in place; by default those of no submodule, truncated normal with deviation `init_std`."""
        for parameter in self.parameters(recurse=False):
            nn.init.trunc_normal_(parameter, std=self.init_std)

    def _perturbed(self, coordinates: Tensor) -> Tensor:
        if not self.perturbs:
            return coordinates
        return perturb(coordinates, self.shift_coords, self.jitter_coords, self.rescale_coords)

    def mark_device(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Register `device_marker`, an empty buffer outside the state dict, for the device and dtype of constants."""
        self.register_buffer("device_marker", torch.empty(0, device=device, dtype=dtype), persistent=False)

    @property
    def precision(self) -> str:
        """Name of the type in which constants are computed: "float64" after `mark_device` with that type, else "float32"."""
        return "float64" if self.device_marker.dtype == torch.float64 else "float32"


class Composition(PositionEncoding):
    """Several encodings, {key: encoding}, whose terms `combine` joins; `create_position("a+b", ...)` builds it.

    `unseen` and `saturated` return the largest value of its parts, `resampled` adds up their counts by name.
    """

    def __init__(self, parts: dict[str, PositionEncoding]):
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def terms(self, grid: Grid) -> Terms:
        return combine(*(part(grid) for part in self.parts.values()))

    def resampled(self, grid: Grid) -> dict[str, int]:
        return sum_counts(part.resampled(grid) for part in self.parts.values())

    def unseen(self, grid: Grid) -> float:
        return max(part.unseen(grid) for part in self.parts.values())

    def saturated(self, grid: Grid) -> float:
        return max(part.saturated(grid) for part in self.parts.values())


def parts_of(encoding: PositionEncoding) -> tuple[PositionEncoding, ...]:
    """Return the parts of a composition, or the encoding itself as the only part."""
    return tuple(encoding.parts.values()) if isinstance(encoding, Composition) else (encoding,)


def combine(*terms: Terms) -> Terms:
    """Combine the terms of several encodings: tokens, query biases and tables add up, scales and temperatures multiply.

    Raises:
        ValueError: two terms are rotary, since a rotation of a rotation has no agreed meaning.
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
    """Return `value` if it is in `known`; otherwise raise ValueError with the option's name and the known values.

    Args:
        key: name of the encoding or layer, for errors.
        name: of the option.
        value: of the option.
        known: possible values.
    """
    if value not in known:
        raise ValueError(f"{key} option {name}={value!r} is unknown; choose one of {', '.join(known)}")
    return value


def check_pair(key: str, name: str, value: int | tuple[int, int], least: int = 1) -> tuple[int, int]:
    """Return an option that is one whole number or a pair (rows, columns) as a pair.

    Args:
        key: name of the encoding, for errors.
        name: of the option, for errors.
        value: of the option.
        least: the least number allowed.

    Raises:
        ValueError: the value is anything else.
    """
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(isinstance(n, int) and n >= least for n in pair):
        raise ValueError(
            f"{key} option {name} must be a whole number of {least} or more, or two, (rows, columns), not {value!r}"
        )
    return pair


def clip_radius(key: str, radius: int | tuple[int, int] | None, grid: Grid) -> tuple[int, int]:
    """Return the option `radius` of the encoding `key` as (rows, columns) in patches.

    None is half of each side of the training grid, rounded down, so that many training pairs train the edge row.

    Raises:
        ValueError: it is anything but one or two whole numbers of 0 or more.
    """
    return (grid.h // 2, grid.w // 2) if radius is None else check_pair(key, "radius", radius, least=0)


def check_prefix(key: str, trained: Grid, grid: Grid, row_each: bool = False) -> None:
    """Raise ValueError unless both grids have prefix tokens or both have none; for encodings with learned prefix rows.

    Args:
        key: name of the encoding, for the error.
        trained: the training grid.
        grid: the grid that is evaluated.
        row_each: every prefix token has a row of its own, so their number must be the same.
    """
    if grid.prefix != trained.prefix and (row_each or not (grid.prefix and trained.prefix)):
        raise ValueError(f"{key} was built for a grid with prefix={trained.prefix}, not {grid.prefix}")


def pad_prefix(rows: Tensor, grid: Grid, dim: int = -1) -> Tensor:
    """Return `rows` with zero rows appended for the three prefix classes, if `grid` has prefix tokens.

    Args:
        rows: a tensor with one row per offset, for example [H, R - 3].
        grid: the grid of the offsets.
        dim: the dimension of `rows` that counts the rows.
    """
    dims = rows.dim() - dim % rows.dim() - 1
    return F.pad(rows, (0, 0) * dims + (0, grid.classes() - grid.offset_classes()))


def upcast(tensor: Tensor) -> Tensor:
    """Return `tensor` as float32 if it has half precision, else unchanged: encodings compute so and round once, at the end."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def run_upcast(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x), [R, in] -> [R, out], in at least float32 (result too), even with half-precision weights or autocast.

    The module is called as a whole, since adapters, pruning and quantization replace its linear layers or their weights.
    """
    parameters = dict(module.named_parameters())
    upcasted = {name: p.float() for name, p in parameters.items() if p.dtype in (torch.float16, torch.bfloat16)}
    x = x.to(upcast(next(iter(parameters.values()), x)).dtype)
    with no_autocast(x.device):
        return functional_call(module, upcasted, (x,)) if upcasted else module(x)


def first_of(module: nn.Module) -> Tensor:
    """Return the first parameter of a module, for its device and dtype; an empty tensor where it has none (quantized)."""
    parameter = next(module.parameters(), None)
    return torch.empty(0) if parameter is None else parameter


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which autocast is off, so that it does not round an encoding's matrix products."""
    # The meta device has no autocast. torch.amp.is_autocast_available would tell, but torch 2.11 cannot compile it.
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return one new dictionary {name: count}, in which the counts of equal names are added up."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _sum(tensors: Iterable[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.stack(present).sum(0) if len(present) > 1 else present[0] if present else None
