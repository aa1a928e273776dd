"""Draw docs/images/protocols.png: a scene as a model's input at several sizes in every protocol.

python -m tools.docs.pictures
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitrel.data import Prepare

OUT = Path(__file__).parents[2] / "docs" / "images" / "protocols.png"
TRAINED, PATCH = (64, 64), 8  # pixels
SIZES = ((64, 64), (96, 96), (128, 128), (96, 160))
PROTOCOLS = {"scale": "scale: the same view, objects grow", "canvas": "canvas: objects keep their pixels"}


def scene(h: int = 120, w: int = 160) -> Tensor:
    """Return a drawn image, uint8 [3, h, w]: sky, ground, a sun, a house and a tree."""
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    image = torch.tensor([168, 205, 235])[:, None, None].expand(3, h, w).clone()

    def paint(where: Tensor, color: tuple[int, int, int]) -> None:
        image[:, where] = torch.tensor(color)[:, None]

    paint(y > 84, (132, 168, 92))
    paint((y - 22) ** 2 + (x - 132) ** 2 < 144, (250, 208, 70))
    paint((y > 58) & (y < 96) & (x > 58) & (x < 98), (196, 92, 70))
    paint((y > 36) & (y <= 58) & ((x - 78).abs() < (y - 36)), (110, 60, 52))
    paint((y > 76) & (y < 96) & (x > 72) & (x < 83), (70, 46, 40))
    paint((y > 66) & (y < 98) & (x > 20) & (x < 26), (96, 70, 44))
    paint((y - 58) ** 2 + (x - 23) ** 2 < 196, (58, 122, 66))
    return image.to(torch.uint8)


def protocols() -> Figure:
    """Return the figure: a row per protocol, a column per size, to scale, with the patches as a grid."""
    widths = [w for _, w in SIZES]
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    grid = figure.subplots(len(PROTOCOLS), len(SIZES), width_ratios=widths, squeeze=False)
    for row, (protocol, name) in zip(grid, PROTOCOLS.items(), strict=True):
        for axes, (h, w) in zip(row, SIZES, strict=True):
            prepare = Prepare((h, w), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic", protocol, TRAINED)
            seen = prepare(scene()) * 0.5 + 0.5
            axes.imshow(seen.clamp(0, 1).permute(1, 2, 0), extent=(0, w, h, 0), interpolation="nearest")
            axes.set_xticks(range(0, w + 1, PATCH), minor=True)
            axes.set_yticks(range(0, h + 1, PATCH), minor=True)
            axes.set_xticks([0, w])
            axes.set_yticks([0, h])
            axes.grid(which="minor", color="black", alpha=0.25, linewidth=0.5)
            trained = ", as trained" if (h, w) == TRAINED else ""
            axes.set_title(f"{h}×{w} px{trained}\n{h // PATCH}×{w // PATCH} patches", fontsize=9)
        row[0].set_ylabel(name, fontsize=9)
    figure.suptitle("One scene of 120×160 px as a model trained at 64 px sees it at four sizes (height × width)", fontsize=11)
    return figure


def main() -> None:
    """Write the picture and print its path."""
    protocols().savefig(OUT, dpi=110)
    print(OUT)


if __name__ == "__main__":
    main()
