"""The detection example: strides and anchors against their definitions, boxes in pixels, and a step that trains all of it."""

import pytest
import torch
from torchvision.models.detection.image_list import ImageList

from helpers import each, script

example = script("examples/detection.py")
SIZE = (70, 109)  # neither patches nor windows divide it, and each doubling of the stride rounds up
STRIDES = {"vitrel_swin_n": [2, 4, 8, 16, 32], "vitrel_vit_n8_rope_mixed": [4, 8, 16, 32, 64]}
NAMES = list(STRIDES)


@each("name", NAMES)
@torch.no_grad()
def test_maps_have_their_strides(name):
    pyramid = example.Pyramid(name, 16).eval()
    assert pyramid.strides == STRIDES[name]
    maps = list(pyramid(torch.randn(2, 3, *SIZE)).values())
    assert [x.shape for x in maps] == [(2, 16, -(-SIZE[0] // s), -(-SIZE[1] // s)) for s in pyramid.strides]


@each("name", NAMES)
@each("pixel", [(3, 5), (37, 100), (69, 108)], ids=str)
@torch.no_grad()
def test_a_pixel_acts_most_on_the_cell_over_it(name, pixel):
    """Cell (i, j) of a map belongs to the pixels from (i, j) * stride: what joins position in the image and in the map."""
    body, image = example.Pyramid(name, 16).body.body.eval(), torch.randn(1, 3, *SIZE)
    other = image.clone()
    other[:, :, pixel[0], pixel[1]] += 5
    maps = (body.forward_intermediates(x, intermediates_only=True) for x in (image, other))
    for a, b, stride in zip(*maps, (info["reduction"] for info in body.feature_info), strict=True):
        change = (a - b).norm(dim=1)[0]
        assert divmod(int(change.argmax()), change.shape[1]) == (pixel[0] // stride, pixel[1] // stride)


def anchors_of(generator, size, strides):
    """Centers (y, x) [n, 2] and sides (height, width) [n, 2] of the anchors of one image, in pixels."""
    maps = [torch.zeros(1, 1, -(-size[0] // s), -(-size[1] // s)) for s in strides]
    boxes = generator(ImageList(torch.zeros(1, 3, *size), [size]), maps)[0]
    return (boxes[:, [1, 0]] + boxes[:, [3, 2]]) / 2, boxes[:, [3, 2]] - boxes[:, [1, 0]]


def test_anchors_stand_where_their_cells_are():
    strides, at = [8, 16, 32, 64, 128], 0
    centers, sides = anchors_of(example.Anchors(strides), (800, 1333), strides)
    for stride in strides:
        rows, columns = -(-800 // stride), -(-1333 // stride)
        for i, j in [(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1)]:
            of_cell = slice(at + 9 * (i * columns + j), at + 9 * (i * columns + j + 1))
            assert (centers[of_cell] - torch.tensor([i * stride, j * stride])).abs().max() <= 0.5  # torchvision rounds corners
            octaves = [4 * stride * 2 ** (octave / 3) for octave in range(3)]
            expected = [(size * ratio**0.5, size / ratio**0.5) for ratio in (0.5, 1, 2) for size in octaves]
            torch.testing.assert_close(sides[of_cell], torch.tensor(expected), rtol=0, atol=1)
        at += 9 * rows * columns
    assert at == len(centers)


@each("name", NAMES)
def test_a_step_reaches_every_parameter(name):
    model, (image, target) = example.detector(name, SIZE, 16), example.scene(SIZE)
    sum(model([image], [target]).values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.any() for n, p in model.named_parameters() if "backbone.body" in n)


def test_the_image_keeps_its_size_and_boxes_are_pixels():
    model = example.detector("vitrel_swin_n", SIZE, 16)
    image, target = example.scene(SIZE)
    images, targets = model.transform([image], [target])
    assert images.tensors.shape == (1, 3, *SIZE) and images.image_sizes == [SIZE]
    assert torch.equal(targets[0]["boxes"], target["boxes"])
    for x0, y0, x1, y1 in target["boxes"].int().tolist():
        assert 0 <= x0 < x1 <= SIZE[1] and 0 <= y0 < y1 <= SIZE[0]
    inside = image[:, y0:y1, x0:x1]  # the last rectangle, which no other covers
    assert torch.equal(inside, example.COLORS[target["labels"][-1] - 1, :, None, None].expand_as(inside))
    model.score_thresh = 0.0
    with torch.no_grad():
        boxes = model.eval()([image])[0]["boxes"]
    assert len(boxes) and (boxes >= 0).all() and (boxes <= torch.tensor([SIZE[1], SIZE[0]]).repeat(2)).all()


@pytest.mark.slow
def test_command_line(capsys):
    example.main(["--size", "70", "109", "--steps", "14"])
    out = capsys.readouterr().out
    assert "stride   2: 35 x 55 cells, 64 channels\nstride   4: 18 x 28 cells" in out
    losses = [sum(float(part.split()[-1]) for part in line.split(", ")) for line in out.splitlines() if "after" in line]
    assert len(losses) == 15 and losses[14] < 0.7 * losses[0]
    with pytest.raises(SystemExit):
        example.main(["--size", "16", "100"])
    assert "--size must be at least 32 32, not 16 100" in capsys.readouterr().err
