"""`similarity`: the figure of the embedding that a model adds to its tokens, as in the ViT paper (arXiv 2010.11929)."""

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
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


def similarity(source: nn.Module, size: int | Size | None = None) -> Figure:
    """Draw the cosine similarity of every patch's embedding to that of the patch in the middle, which is outlined.

    Args:
        source: a vitrel model, an encoding that adds to tokens, or a ViT of timm, whose stored embedding is drawn.
        size: in pixels for a vitrel model, in patches for an encoding, one side or (h, w). None: that of training, the only one
            for a ViT of timm.

    Raises:
        ValueError: no embedding is added to tokens, or it holds NaN.
    """
    name, trained, rows = _embedding(source, size)  # [h, w, C]
    check_numbers(name, rows)
    y, x = (n // 2 for n in rows.shape[:2])
    unit = torch.nn.functional.normalize(rows.float(), dim=-1)
    alike = unit @ unit[y, x]  # [h, w]
    title = f"{source_name(source)}: similarity of embeddings"
    if trained != rows.shape[:2]:
        title += f"\n{format_size(rows.shape[:2])} patches, trained on {format_size(trained)}"
    figure, ((panel,),) = sheet(1, 1, 2.2, panel_height([alike.shape], 2.2), title)
    image = panel.imshow(alike.numpy(), SEQUENTIAL, vmin=float(alike.min()), vmax=1, interpolation="nearest")
    panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, color="black", lw=1.5))
    panel.set_title(f"to patch ({y}, {x})", fontsize=8)
    panel.set_xlabel("column (patches)", fontsize=7)
    panel.set_ylabel("row (patches)", fontsize=7)
    whole_numbers(panel)
    color_bar(figure, image, figure.axes, f"{name}: cosine similarity")
    return figure


@torch.no_grad()
def _embedding(source: nn.Module, size: int | Size | None) -> tuple[str, Size, Tensor]:
    """Return (key or "pos_embed", training grid (h, w), rows [h, w, C]) of the embedding added to patches, else ValueError."""
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
