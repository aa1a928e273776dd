"""A torchvision RetinaNet on the features of a vitrel model, trained on synthetic boxes for a few steps, at any image size.

    python examples/detection.py                                          # a nano Swin at 200x333, on a CPU
    python examples/detection.py --model vitrel_vit_n8_rope_mixed         # a ViT, whose last map gives three
    python examples/detection.py --model vitrel_swin_t --size 800 1333 --channels 256

torchvision pads a batch with zeros, at the bottom and on the right, to its largest image and then to a multiple of 32 (1333
columns become 1344). After normalization zeros are the mean color, which a backbone treats as image content: our windows mask
only the padding that they add themselves. torchvision needs the multiple because its anchors use image size // map size as the
stride, 7 instead of 8 for a map of 167 columns and 1333 px. Here the anchors receive the strides, so images stay unpadded
(size_divisible=1).
"""

import argparse

import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

import vitrel

COLORS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])  # colors of classes 1, 2 and 3


class Pyramid(nn.Module):
    """Feature pyramid, [B, 3, h, w] -> five maps [B, channels, ceil(h / s), ceil(w / s)], one for each stride s of `strides` in
    pixels.

    Three are those of `vitrel.pyramid`, the model's coarsest strides, combined by an FPN; two more come from strided
    convolutions. A ViT has one stride: its map is taken at twice, once and half its resolution.
    """

    def __init__(self, name: str, channels: int):
        super().__init__()
        model = timm.create_model(name, drop_path_rate=0.0)
        own = sorted({info["reduction"] for info in model.feature_info})
        strides = own[-3:] if len(own) > 2 else [own[-1] // 2, own[-1], own[-1] * 2]
        self.data = timm.data.resolve_model_data_config(model)
        self.body = vitrel.pyramid(model, strides)
        self.fpn = FeaturePyramidNetwork(self.body.out_channels, channels, LastLevelP6P7(channels, channels))
        self.out_channels, self.strides = channels, [*strides, strides[-1] * 2, strides[-1] * 4]

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return self.fpn(self.body(image))


class Anchors(AnchorGenerator):
    """RetinaNet's nine anchors per cell; those of cell (i, j) have their center at the pixel (i * stride, j * stride)."""

    def __init__(self, strides: list[int]):
        sizes = tuple(tuple(4 * s * 2 ** (octave / 3) for octave in range(3)) for s in strides)
        super().__init__(sizes, ((0.5, 1.0, 2.0),) * len(strides))
        self.strides = strides

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return the anchors of each image, [n, 4] as x1, y1, x2, y2 in pixels, level by level."""
        self.set_cell_anchors(feature_maps[0].dtype, feature_maps[0].device)
        anchors = self.grid_anchors([x.shape[-2:] for x in feature_maps], [(s, s) for s in self.strides])
        return [torch.cat(anchors)] * len(image_list.image_sizes)


def detector(name: str, size: tuple[int, int], channels: int) -> RetinaNet:
    """Return a RetinaNet for three classes that does not resize images of `size` (h, w)."""
    pyramid = Pyramid(name, channels)
    options = dict(
        anchor_generator=Anchors(pyramid.strides),
        image_mean=pyramid.data["mean"],
        image_std=pyramid.data["std"],
        size_divisible=1,
    )
    return RetinaNet(pyramid, len(COLORS) + 1, min(size), max(size), **options)


def scene(size: tuple[int, int], count: int = 4) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an image [3, h, w] of noise in 0..1 with colored rectangles, and its boxes [count, 4] (x1, y1, x2, y2) and
    labels.
    """
    image, boxes = torch.rand(3, *size) * 0.3, []
    labels = torch.arange(count) % len(COLORS) + 1
    for label in labels.tolist():
        box_h, box_w = (int(n * (0.2 + 0.3 * torch.rand(()))) for n in size)
        y, x = (int(torch.randint(n - side, ())) for n, side in zip(size, (box_h, box_w), strict=True))
        image[:, y : y + box_h, x : x + box_w] = COLORS[label - 1, :, None, None]
        boxes.append([x, y, x + box_w, y + box_h])
    return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": labels}


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vitrel_swin_n", help="a ViT or Swin of timm or vitrel; default vitrel_swin_n")
    parser.add_argument("--size", type=int, nargs=2, default=(200, 333), metavar=("H", "W"), help="pixels; default 200 333")
    parser.add_argument("--steps", type=int, default=30, help="updates on one image; default 30")
    parser.add_argument("--channels", type=int, default=64, help="width of the pyramid; default 64 (256 in the papers)")
    args = parser.parse_args(argv)
    if min(args.size) < 32:
        parser.error(f"--size must be at least 32 32, not {args.size[0]} {args.size[1]}")
    torch.manual_seed(0)
    model, (image, target) = detector(args.model, args.size, args.channels), scene(args.size)
    with torch.no_grad():
        for stride, x in zip(model.backbone.strides, model.backbone(image[None]).values(), strict=True):
            print(f"stride {stride:3}: {x.shape[2]} x {x.shape[3]} cells, {x.shape[1]} channels")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(args.steps + 1):
        losses = model([image], [target])
        print(f"after {step} steps:", ", ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items()))
        if step < args.steps:
            optimizer.zero_grad()
            sum(losses.values()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    with torch.no_grad():
        print(f"{len(model.eval()([image])[0]['boxes'])} boxes with a score above {model.score_thresh}")


if __name__ == "__main__":
    main()
