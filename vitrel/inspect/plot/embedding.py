"""`similarity`: the figure of the embedding that a model adds to its tokens, as in the ViT paper (arXiv 2010.11929)."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import evaluated
from vitrel.inspect.plot.common import (
    SEQUENTIAL,
    check_numbers,
    color_bar,
    encodings_of,
    panel_height,
    sheet,
    source_name,
    whole_numbers,
)
from vitrel.position import key_of
from vitrel.position.terms import parts_of


def similarity(source: nn.Module, size: int | Size | None = None, patches: Sequence[tuple[int, int]] | None = None) -> Figure:
    """Draw the cosine similarity of every patch's embedding to those of `patches`, one panel for each, that patch outlined.

    Args:
        source: a vitrel model, an encoding that adds to tokens, or a ViT of timm, whose stored embedding is drawn.
        size: pixels for a vitrel model, patches for an encoding, one side or (h, w), default: of training; None for timm.
        patches: (row, column) pairs, by default the middle patch.

    Raises:
        ValueError: no embedding is added to tokens, it holds NaN, or a patch lies outside the grid.
    """
    name, trained, rows = _embedding(source, size)  # [h, w, C]
    check_numbers(name, rows)
    grid = Grid(*rows.shape[:2])
    patches = list(patches or [(grid.h // 2, grid.w // 2)])
    if outside := [patch for patch in patches if not (0 <= patch[0] < grid.h and 0 <= patch[1] < grid.w)]:
        raise ValueError(f"patch {tuple(outside[0])} is outside the {grid.h}x{grid.w} patches of {source_name(source)}")
    unit = torch.nn.functional.normalize(rows.float().flatten(0, 1), dim=-1)
    alike = unit[[y * grid.w + x for y, x in patches]] @ unit.mT  # [M, h*w]
    title = f"{source_name(source)}: similarity of embeddings"
    if trained != grid[:2]:
        title += f"\n{grid.h}x{grid.w} patches, trained on {trained[0]}x{trained[1]}"
    figure, (panels,) = sheet(1, len(patches), 2.2, panel_height([grid[:2]], 2.2), title)
    low = float(alike.min())
    for panel, (y, x), values in zip(panels, patches, alike, strict=True):
        image = panel.imshow(values.view(grid.h, grid.w).numpy(), SEQUENTIAL, vmin=low, vmax=1, interpolation="nearest")
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, color="black", lw=1.5))
        panel.set_title(f"to patch ({y}, {x})", fontsize=8)
        panel.set_xlabel("column (patches)", fontsize=7)
        panel.set_ylabel("row (patches)", fontsize=7)
        whole_numbers(panel)
    color_bar(figure, image, figure.axes, f"{name}: cosine similarity")
    return figure


@torch.no_grad()
def _embedding(source: nn.Module, size: int | Size | None) -> tuple[str, Size, Tensor]:
    """(name, training grid (h, w), rows [h, w, C]) of the embedding added to patches; ValueError if there is none."""
    for _, encoding, grid in encodings_of(source, size):
        for part in parts_of(encoding):
            if part.site == "tokens":
                rows = evaluated(part, grid).tokens[grid.prefix :]
                return key_of(part), part.grid[:2], rows.detach().unflatten(0, grid[:2]).cpu()
    stored, patches = getattr(source, "pos_embed", None), getattr(getattr(source, "patch_embed", None), "grid_size", None)
    if isinstance(stored, nn.Parameter) and stored.dim() == 3 and patches is not None and size is None:
        return "pos_embed", patches, stored[0, -patches[0] * patches[1] :].detach().unflatten(0, patches).cpu()
    hint = "vitrel.inspect.plot.offset_maps draws what position adds in attention"
    raise ValueError(f"{source_name(source)} adds no embedding to tokens: {hint}")
