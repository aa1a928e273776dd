"""Two PNG files with many figures each: encodings before training (`gallery`), and trained models (`learned_gallery`)."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from vitrel.inspect.attention import Layer, record
from vitrel.inspect.plot.offsets import directions, offset_maps, profiles
from vitrel.inspect.plot.on_image import attention, overruled
from vitrel.inspect.plot.rows import bucket_map, similarity
from vitrel.position import PositionEncoding, create_position

GRID, LARGER = (8, 12), (12, 16)  # patches: training grid, grid of the figures
PIXELS = 100  # per inch


def gallery(path: Path) -> Path:
    """Write one PNG of encodings at their seeded initialization and return its path.

    Tables are left out, since they are noise before training: see `learned_gallery`. Sets torch's seed to 0; creates missing
    folders.
    """

    def built(key: str, heads: int = 3, **options: object) -> PositionEncoding:
        torch.manual_seed(0)
        return create_position(key, GRID, heads, 32, **options)

    def maps(key: str, heads: int = 3, **options: object) -> Figure:
        return offset_maps(built(key, heads, **options), LARGER)

    return _sheet(
        path,
        [maps("alibi"), maps("log_decay")],
        [maps("fire"), maps("cpb")],
        [maps("lookhere", 6, fov=180)],
        [maps("xpos", 4), maps("rope_axial"), maps("rope_normalized")],
        [maps("rope_mixed"), similarity(built("sincos"), GRID, [(0, 0), (4, 6)])],
        [bucket_map(built("t5"), GRID), profiles(built("alibi+log_decay"), LARGER)],
    )


def learned_gallery(path: Path, models: Mapping[str, nn.Module], images: Tensor, shown: Tensor) -> Path:
    """Write one PNG of trained models, {caption: model}, on `images` [B, 3, height, width], and return its path.

    For each model: a layer by offset, content that overrides a bias, the attention of one patch (at the layer, head, image and
    patch where position changes attention most), and the mean offsets of the heads in the last two layers. shown: the images,
    with values from 0 to 1.
    """
    rows = []
    for caption, model in models.items():
        layers = record(model, images)
        place, image, head, query = most_moved(layers)
        of_layer = place - len(layers)
        where = attention(model, images[image], query, place, [head], shown[image])
        figures = [offset_maps(model, layers=[of_layer]), overruled(layers, images, shown=shown)]
        figures += [where, directions(layers, layers=range(-min(2, len(layers)), 0))]
        for figure in figures:
            title = figure.get_suptitle().replace("recorded attention", caption)
            figure.suptitle(title, fontsize=9)
        rows += [figures[:2], figures[2:]]
    return _sheet(path, *rows, pixels=90)


def most_moved(layers: Sequence[Layer]) -> tuple[int, int, int, tuple[int, int]]:
    """(layer, image, head, (row, column) of the query) whose weights on patches position changes most."""
    best, where = -1.0, (0, 0, 0, (0, 0))
    for number, layer in enumerate(layers):
        patches = layer.patches[:, None, None]  # [W, 1, 1, N]
        moved = ((layer.weights - layer.content).abs() * patches).sum(-1) * layer.patches[:, None]  # [B, W, H, N]
        at = int(moved.argmax())
        if float(moved.flatten()[at]) > best:
            best = float(moved.flatten()[at])
            image, window, head, slot = (int(i) for i in torch.unravel_index(torch.tensor(at), moved.shape))
            where = number, image, head, layer.patch_at(window, slot)
    return where


def _sheet(path: Path, *rows: Sequence[Figure], pixels: int = PIXELS) -> Path:
    pictures = [[_rendered(figure, pixels) for figure in row] for row in rows]
    width = max(sum(picture.width for picture in row) for row in pictures)
    sheet = Image.new("RGB", (width, sum(max(p.height for p in row) for row in pictures)), "white")
    top = 0
    for row in pictures:
        left = (width - sum(picture.width for picture in row)) // 2
        for picture in row:
            sheet.paste(picture, (left, top))
            left += picture.width
        top += max(picture.height for picture in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    # 64 levels of each color make the file a quarter smaller; a palette of 256 would lose the colors of thin lines
    sheet.point([min(255, (level + 2) // 4 * 4) for level in range(256)] * 3).save(path, optimize=True)
    return path


def _rendered(figure: Figure, pixels: int) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=pixels)
    return Image.open(file).convert("RGB")
