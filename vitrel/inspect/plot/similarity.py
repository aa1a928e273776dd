"""How alike the embeddings of places are, for position that adds to tokens: the usual picture of a ViT (arXiv 2010.11929)."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.inspect.attention_layer import evaluating
from vitrel.inspect.plot.lattice import check_numbers, encodings_of, parts_of, source_name
from vitrel.inspect.plot.style import SEQUENTIAL, columns_for, panel_height, sheet, whole_numbers
from vitrel.inspect.resolution_report import Pair
from vitrel.position import key_of


def similarity(source: nn.Module, size: int | Pair | None = None, patches: Sequence[Pair] | None = None) -> Figure:
    """Cosine similarity of the embedding of every patch to those of `patches`, one picture for each, that patch outlined.

    source, size: as of `lattices`; of timm's ViTs the embedding as it is stored, without a size. patches: (row,
    column), by default the middle one. Raises ValueError where nothing is added to tokens, or for a patch outside the grid.
    """
    name, trained, rows = _embedding(source, size)  # [h, w, C]
    grid = Grid(*rows.shape[:2])
    patches = list(patches or [(grid.h // 2, grid.w // 2)])
    if outside := [patch for patch in patches if not (0 <= patch[0] < grid.h and 0 <= patch[1] < grid.w)]:
        raise ValueError(f"patch {tuple(outside[0])} is outside the {grid.h}x{grid.w} patches of {source_name(source)}")
    alike = cosine_similarity(check_numbers(name, rows).flatten(0, 1), grid.w, patches)  # [M, h*w]
    (rows, columns), title = columns_for(len(patches)), f"{source_name(source)}: similarity of embeddings"
    if trained != grid[:2]:
        title += f"\n{grid.h}x{grid.w} patches, trained on {trained[0]}x{trained[1]}"
    figure, axes = sheet(rows, columns, 2.2, panel_height([grid[:2]], 2.2), title)
    panels, low = [panel for row in axes for panel in row], float(alike.min())
    for panel, (y, x), values in zip(panels, patches, alike, strict=False):
        image = panel.imshow(values.view(grid.h, grid.w).numpy(), SEQUENTIAL, vmin=low, vmax=1, interpolation="nearest")
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, color="black", lw=1.5))
        panel.set_title(f"to patch ({y}, {x})", fontsize=8)
        panel.set_xlabel("column (patches)", fontsize=7)
        panel.set_ylabel("row (patches)", fontsize=7)
        whole_numbers(panel.xaxis, panel.yaxis)
        panel.tick_params(labelsize=7)
    for panel in panels[len(patches) :]:
        panel.set_axis_off()
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.01, aspect=14)
    bar.set_label(f"{name}: cosine similarity", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    return figure


def cosine_similarity(rows: Tensor, width: int, patches: Sequence[Pair]) -> Tensor:
    """Of the rows [h*w, C] of a grid `width` patches wide to those of `patches` (row, column), [M, h*w]."""
    rows = torch.nn.functional.normalize(rows.float(), dim=-1)
    return rows[[y * width + x for y, x in patches]] @ rows.mT


@torch.no_grad()
def _embedding(source: nn.Module, size: int | Pair | None) -> tuple[str, Pair, Tensor]:
    """Name, training grid (h, w) and rows [h, w, C] of what is added to patches."""
    for _, encoding, grid in encodings_of(source, size):
        for part in parts_of(encoding):
            if part.site == "tokens":
                with evaluating(part):
                    rows = part(grid).tokens[grid.prefix :]
                return key_of(part), part.grid[:2], rows.detach().unflatten(0, grid[:2]).cpu()
    rows, grid = getattr(source, "pos_embed", None), getattr(getattr(source, "patch_embed", None), "grid_size", None)
    if isinstance(rows, nn.Parameter) and rows.dim() == 3 and grid is not None and size is None:
        return "pos_embed", grid, rows[0, -grid[0] * grid[1] :].detach().unflatten(0, grid).cpu()
    instead = "vitrel.inspect.plot.offset_maps draws what attention gets"
    raise ValueError(f"{source_name(source)} adds no embedding to tokens: {instead}")
