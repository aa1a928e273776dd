"""What position adds at every offset (query minus key, in patches), read from the terms of encodings or from recorded layers.

Three readings of `Terms`, for what depends on content has no single number at an offset:
bias, what the logit gains whatever the content: the tables' biases, and those parts of query and gated tables that remain
where the projected query is zero (Transformer-XL's v . W r, PaPE's parabolas);
rotation, the mean over frequencies of cos(angle of the query - angle of the key), what q . k becomes for q = k with equal
energy in every frequency (xPos: times its decay);
rows, the length of a query or key table's row (both axes added) times the scale of the logits: what a query or key of unit
length gains at most.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.inspect.attention import Layer, offset_mean
from vitrel.inspect.attention_layer import evaluating, model_name
from vitrel.inspect.resolution_report import Pair
from vitrel.models.backbone import Backbone
from vitrel.position import PositionEncoding, Table, Terms, key_of
from vitrel.position.terms import Composition, upcast

Source = nn.Module | Sequence[Layer]  # a model or an encoding, or what `vitrel.inspect.attention.record` gives


class Lattice(NamedTuple):
    """One picture: `values` [H, 2h-1, 2w-1], offset (dy, dx) at [:, dy + h-1, dx + w-1]; H is 1 where all heads are alike.

    -inf where position hides the key, NaN where no pair with that offset was recorded. `signed`: zero means nothing is added.
    """

    layer: str  # path of the layer in the model, "" for an encoding alone
    what: str  # what is drawn, in a few words
    unit: str
    values: Tensor
    trained: Pair | None  # grid (h, w) of training, None where it is not known
    signed: bool = True


def lattices(source: Source, size: int | Pair | None = None, layers: Sequence[int] | None = None) -> list[Lattice]:
    """All that can be drawn over offsets of a model or an encoding, layer by layer; a composition part by part.

    source: any of our models or one with our encodings inside; an encoding; or layers recorded on images, whose mean logit
    from position is taken, also where it depends on content. size: of our models, pixels; of an encoding, patches; one side or
    (h, w), that of training unless given. layers: indices into the layers of attention that have an encoding.
    Raises ValueError where there is nothing to draw, and why.
    """
    if not isinstance(source, nn.Module):
        if size is not None:
            raise ValueError("recorded layers have the size they were recorded at: leave size out")
        measured = [_measured(layer) for layer in chosen(source, layers)]
        if not any(bool(one.values.nan_to_num().any()) for one in measured):
            raise ValueError("nothing to draw by offset: position adds nothing to the logits that were recorded")
        return measured
    found = [
        [lattice for part in parts for lattice in _drawn(name, part, grid)]
        for name, parts, grid in chosen(_in_attention(source, size), layers)
    ]
    if not any(found):
        raise ValueError(_nothing(source))
    return [lattice for layer in found for lattice in layer]


def check_numbers(name: str, values: Tensor) -> Tensor:
    """The values; ValueError where one is NaN, which a picture would show as something else."""
    if bool(values.isnan().any()):
        raise ValueError(f"{name or 'the encoding'} holds NaN: its weights, or the image, are not numbers")
    return values


def source_name(source: Source) -> str:
    """What titles call a model, an encoding or recorded layers."""
    if isinstance(source, Composition):
        return "+".join(source.parts)
    if isinstance(source, PositionEncoding):
        return key_of(source)
    return model_name(source) if isinstance(source, nn.Module) else "recorded attention"


def chosen(layers: Sequence, indices: Sequence[int] | None) -> list:
    """Those of `layers` at `indices`, counted from the end where negative, all for None; ValueError for one there is not."""
    if indices is None:
        return list(layers)
    for index in indices:
        if layers and not -len(layers) <= index < len(layers):
            raise ValueError(f"there is no layer {index}: the layers that can be drawn are 0 to {len(layers) - 1}")
    return [layers[index] for index in indices] if layers else []


def encodings_of(source: nn.Module, size: int | Pair | None = None) -> list[tuple[str, PositionEncoding, Grid]]:
    """(name, encoding, grid) of every encoding of a model, or of the encoding itself, at `size`; see `lattices`."""
    if size is not None and min(to_2tuple(size)) < 1:
        raise ValueError(f"size is a side or (h, w), at least 1, not {size}")
    if isinstance(source, PositionEncoding):
        own = next((part.grid for part in source.modules() if getattr(part, "grid", None) is not None), None)
        if own is None:
            return []
        grid = own if size is None else Grid(*to_2tuple(size), own.prefix)
        return [("", source, grid)]
    names = {module: name for name, module in source.named_modules() if isinstance(module, PositionEncoding)}
    if isinstance(source, Backbone):
        asked = source.img_size if size is None else to_2tuple(size)
        return [(_path(names[encoding]), encoding, grid) for encoding, grid in source.encodings(asked)]
    if names and size is not None:
        raise ValueError(f"the encodings of {source_name(source)} are drawn on their own grids: leave size out")
    inner = {part for module in names for part in module.modules() if part is not module}
    return [
        (_path(name), module, grid)
        for module, name in names.items()
        if module not in inner
        for _, _, grid in encodings_of(module)
    ]


def parts_of(encoding: PositionEncoding) -> list[PositionEncoding]:
    """The encodings a composition joins, or the encoding itself."""
    return list(encoding.parts.values()) if isinstance(encoding, Composition) else [encoding]


def _in_attention(source: nn.Module, size: int | Pair | None) -> list[tuple[str, list[PositionEncoding], Grid]]:
    named = [
        (name, [part for part in parts_of(encoding) if part.site == "attention" and part.behaviour != "nothing"], grid)
        for name, encoding, grid in encodings_of(source, size)
    ]
    return [layer for layer in named if layer[1]]


def _path(name: str) -> str:
    return "all blocks" if name == "shared_position" else name.removesuffix(".position") or "layer"


def _nothing(source: nn.Module) -> str:
    name = source_name(source)
    own = {key_of(part) for _, encoding, _ in encodings_of(source) for part in parts_of(encoding) if part.site == "tokens"}
    if own:
        keys = " and ".join(sorted(own))
        return f"nothing to draw by offset: {keys} of {name} adds to tokens; use vitrel.inspect.plot.similarity"
    if any(isinstance(module, PositionEncoding) for module in source.modules()):
        return f"nothing to draw by offset: {name} has no position in attention"
    return f"{name} holds no encodings of vitrel: give vitrel.inspect.attention.record(model, images), which sees timm's layers"


def _measured(layer: Layer) -> Lattice:
    if layer.position is None:
        raise ValueError(f"{layer.name} was recorded without position: use vitrel.inspect.attention.record")
    check_numbers(layer.name, layer.weights)
    return Lattice(layer.name, "mean of what position adds", "logits", offset_mean(layer, layer.position), None)


@torch.no_grad()
def _drawn(name: str, encoding: PositionEncoding, grid: Grid) -> list[Lattice]:
    with evaluating(encoding):
        terms = encoding(grid)
    key, trained = key_of(encoding), None if encoding.grid is None else tuple(encoding.grid[:2])
    found = [
        Lattice(name, f"{key} {what}", unit, check_numbers(name, values.detach()), trained, signed)
        for what, unit, values, signed in _pictures(terms, grid)
    ]
    return [one for one in found if _varies(one.values)] or found[:1]


def _pictures(terms: Terms, grid: Grid) -> Iterator[tuple[str, str, Tensor, bool]]:
    """(what, unit, values, signed) of everything in the terms that has a number at each offset."""
    bias, content = _bias(terms, grid), any(table.gated is not None for table in terms.tables)
    if terms.rotary is not None:
        kernel = _kernel(terms, grid)
        if bias is not None:  # a field of view
            kernel = torch.where(bias == float("-inf"), bias, kernel)
        yield "rotation", "mean cos of angle", kernel, True
    if bias is not None:
        yield "bias, query 0" if content or terms.query_bias is not None else "bias", "logits", bias, True
    for kind in ("query", "key"):
        rows = [_lattice(getattr(t, kind), t.axis, grid) for t in terms.tables if getattr(t, kind) is not None]
        if rows:
            scale = float(terms.logit_scale(rows[0].shape[-1]))
            length = torch.linalg.vector_norm(sum(rows), dim=-1) * scale
            yield f"{kind} rows, length", f"logits per unit of {kind}", length.cpu(), False


def _kernel(terms: Terms, grid: Grid) -> Tensor:
    """Mean over frequencies of cos(angle of query - angle of key), scales of xpos included, [H|1, 2h-1, 2w-1]."""
    y, x = grid.offsets(device=terms.rotary[0].device).unbind(-1)
    query, key = (grid.prefix + dy.clamp(min=0) * grid.w + dx.clamp(min=0) for dy, dx in ((y, x), (-y, -x)))
    cos_q, sin_q = (t[..., query, :] for t in terms.rotary)  # [H|1, R, D/2]
    cos_k, sin_k = (t[..., key, :] for t in terms.key_rotary or terms.rotary)
    kernel = upcast(cos_q * cos_k + sin_q * sin_k).mean(-1)
    return kernel.unflatten(1, (2 * grid.h - 1, 2 * grid.w - 1)).cpu()


def _bias(terms: Terms, grid: Grid) -> Tensor | None:
    """The logit that remains of the tables where the projected query and the key are zero, [H, 2h-1, 2w-1], or None."""
    found = [part for table in terms.tables for part in _of_zero_query(table, terms, grid)]
    return sum(found[1:], found[0]).cpu() if found else None


def _of_zero_query(table: Table, terms: Terms, grid: Grid) -> Iterator[Tensor]:
    if table.bias is not None:
        yield _lattice(table.bias[..., None], table.axis, grid)[..., 0]
    if table.query is not None and terms.query_bias is not None:
        scale = float(terms.logit_scale(table.query.shape[-1]))
        rows = upcast(table.query) @ upcast(terms.query_bias)[..., None]  # [H, R, 1]
        yield _lattice(rows, table.axis, grid)[..., 0] * scale
    if table.gated is not None:
        weights, rows = (upcast(part) for part in table.gated)
        query = weights.new_zeros(weights.shape[-1]) if terms.query_bias is None else upcast(terms.query_bias)[:, None]
        gates = F.softplus((weights * query).sum(-1))  # [H, G]
        scale = float(terms.logit_scale(weights.shape[-1]))
        yield _lattice(rows @ gates[..., None], table.axis, grid)[..., 0] * scale


def _lattice(rows: Tensor, axis: str, grid: Grid) -> Tensor:
    """Rows [H, R, D] of a table -> [H, 2h-1, 2w-1, D]."""
    h, w = 2 * grid.h - 1, 2 * grid.w - 1
    rows = upcast(rows)[:, : grid.offset_classes(axis)]
    rows = rows.unflatten(1, (h, w)) if axis == "hw" else rows.unsqueeze(2 if axis == "h" else 1)
    return rows.expand(-1, h, w, -1)


def _varies(values: Tensor) -> bool:
    seen = values[values.isfinite()]
    return seen.numel() > 0 and bool(seen.max() - seen.min() > 1e-6 * max(1.0, float(seen.abs().max())))
