"""What rolling before padding does to a pyramid of features: opposite borders of the image meet in timm's Swin, not in ours.

`pytest -n 0 -m "" -s tests/models/test_border_leak.py` prints the numbers, those of 800x1333 px too, of the whole Swin-T.
"""

import pytest
import timm
import torch

import vitrel

WINDOW, PATCH, DEPTHS = 7, 4, (2, 2, 6, 2)
SMALL = (238, 299)  # stages of 60x75, 30x38, 15x19 and 8x10 tokens: no window divides any of them
LARGE = pytest.param((800, 1333), marks=pytest.mark.slow)  # the usual size of detectors


@pytest.fixture
def size_and_width(request, size):
    """Size of the image and channels of the first stage. Where numbers are printed, those of Swin-T at 800x1333 px; otherwise
    fewer channels, and as many rows of fewer columns: what meets what is the same.
    """
    printed = request.config.getoption("capture") == "no"
    return (size, 24) if size == SMALL else (size, 96) if printed else ((size[0], SMALL[1]), 24)


def pair(size, width=24):
    """timm's Swin-T built for `size` with random weights, and ours with the same.

    Tables at standard deviation 0.5, matrices at 1 / sqrt(inputs): each block then adds about as much as there was, and every
    table counts. At the published 0.02 attention adds next to nothing.
    """
    how = dict(img_size=size, window_size=WINDOW, strict_img_size=False, num_classes=0, embed_dim=width)
    theirs = timm.create_model("swin_tiny_patch4_window7_224", **how).eval()
    theirs.patch_embed.dynamic_img_pad = True  # it refuses images that patches do not divide, ours pads them so
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias_table" in name:
                parameter.normal_(std=0.5)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    ours = timm.create_model("vitrel_swin_t", num_classes=0, embed_dim=width).eval()
    return vitrel.load_pretrained(ours, theirs.state_dict()), theirs


@torch.no_grad()
def pyramid(model, image):
    """The four stages, [1, C, ceil(height / stride), ceil(width / stride)] at strides 4, 8, 16 and 32."""
    return model.forward_intermediates(image, intermediates_only=True)


def reach(n):
    """Per stage, the first of its rows (columns) that the last of n patch rows (columns) can act on: window after window."""
    first, found = n - 1, []
    for stage, depth in enumerate(DEPTHS):
        if stage:
            first, n = first // 2, (n + 1) // 2
        for block in range(depth):
            shift = WINDOW // 2 if block % 2 and n > WINDOW else 0
            first = max(0, first - (first - shift) % WINDOW)
        found.append(first)
    return found


def test_reach():
    """By hand: row 59 of 60 shares a window with 56, that a shifted one with 52; merged 26, then 21, 17; merged 8, 7, 3, 0."""
    assert reach(60) == [52, 17, 0, 0]
    assert reach(200) == [192, 87, 24, 3]


def relative(a, b):
    """Norm over channels of a - b, divided by the root mean square norm of b's tokens: [h, w]."""
    return (a - b).norm(dim=1)[0] / b.norm(dim=1).square().mean().sqrt()


def last_patches_changed(image, axis):
    """The same image with other pixels in the last row (axis 0) or column (axis 1) of patches."""
    other, n = image.clone(), image.shape[2 + axis]
    start = (n - 1) // PATCH * PATCH
    other.narrow(2 + axis, start, n - start).normal_()
    return other


@pytest.mark.parametrize(
    ("size", "axis"), [(SMALL, 0), (SMALL, 1), pytest.param((800, 1333), 0, marks=pytest.mark.slow)], ids=str
)
def test_opposite_borders_do_not_meet(size_and_width, axis):
    """Other pixels at one border change what they reach, and before it nothing in ours, the opposite border in timm's."""
    size, width = size_and_width
    ours, theirs = pair(size, width)
    image = torch.randn(1, 3, *size)
    other, first = last_patches_changed(image, axis), reach(-(-size[axis] // PATCH))
    pyramids = [(pyramid(model, other), pyramid(model, image)) for model in (ours, theirs)]
    for stage, beyond in enumerate(first):
        moved, leaked = (relative(a[stage], b[stage]).movedim(axis, 0) for a, b in pyramids)
        assert moved[beyond:].max() > 0.1
        assert not moved[:beyond].any()
        if stage == 0:
            assert not leaked[WINDOW // 2 : beyond].any()  # what one shifted block rolls over to the other side
        if beyond:
            assert leaked[:beyond].any()
            share, top = (leaked[:beyond] > 0).float().mean(), leaked[:beyond].max()
            where = f"{size} axis {axis} stage {stage + 1}: tokens 0..{beyond - 1} of {len(moved)}, out of reach"
            print(
                f"\n{where}: ours 0, timm's up to {top:.3f}, {share:.1%} moved; within reach {leaked[beyond:].max():.3f}",
                end="",
            )


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=str)
def test_pyramids_agree_where_windows_divide(size_and_width):
    """The same weights: equal at a multiple of 224 px, and at `size` every stage of timm's differs."""
    size, width = size_and_width
    divisible = tuple(-(-n // 224) * 224 for n in size)
    for shape in (divisible, size):
        ours, theirs = pair(shape, width)
        image = torch.randn(1, 3, *shape)
        for stage, (a, b) in enumerate(zip(pyramid(theirs, image), pyramid(ours, image), strict=True), 1):
            difference, share = (a - b).norm() / b.norm(), (relative(a, b) > 0.01).float().mean()
            print(f"\n{shape} stage {stage}: {difference:.1e}, {share:.1%} of the tokens off by over 1 %", end="")
            assert difference < 1e-5 if shape == divisible else difference > 1e-2
