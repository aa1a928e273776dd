"""Drawn scenes with a class for every pixel: the same whatever the order, right labels, and no way to them but position."""

import numpy as np
import pytest
import torch
from torch import nn

from helpers import each
from vitrel.data import DenseShapes, Draw, class_names, create_dataset
from vitrel.data.dense_shapes import CLASSES, CLEARANCE
from vitrel.data.shapes import PATCH

N = 2000
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.fixture(scope="module")
def drawn():
    """Images [N, 3, 64, 64] and masks [N, 64, 64]."""
    return tuple(map(torch.stack, zip(*DenseShapes(N, seed=5).__getitems__(range(N)), strict=True)))


@pytest.fixture(scope="module")
def scenes():
    return DenseShapes(200, (128, 96), seed=6).scenes(range(200))


@pytest.mark.parametrize("how", [{}, {"size": (40, 96)}, {"size": 96, "protocol": "scale"}])
def test_items_depend_on_seed_and_index_alone(how):
    data = DenseShapes(40, seed=1, **how)
    together = data.__getitems__([39, 0, Draw(3), 7, Draw(7, (72, 48)), 21])
    for index, place in ((39, 0), (3, 2), (7, 3), (21, 5)):
        assert all(map(torch.equal, DenseShapes(1000, seed=1, **how)[index], together[place]))
    assert all(map(torch.equal, together[4], DenseShapes(40, seed=1, **how | {"size": (72, 48)})[7]))
    image, mask = together[0]
    assert image.shape[1:] == mask.shape == data.size and image.dtype == torch.float32 and mask.dtype == torch.uint8
    assert not torch.equal(image, DenseShapes(40, seed=2, **how)[39][0])


@pytest.mark.slow
def test_it_has_what_other_data_sets_have(drawn):
    data = create_dataset("shapes-dense", "train", (64, 64), task="segmentation", seed=2, n=300, **HALF)
    assert isinstance(data, DenseShapes) and data.seed == 5 and data.classes == list(CLASSES)
    assert class_names("shapes-dense", task="segmentation") == list(CLASSES)
    assert torch.equal(data[7][1], drawn[1][7])
    assert data.name(17) == "shapes-dense (seed 5): 17"
    canvas = create_dataset("shapes-dense", "val", (96, 64), task="segmentation", protocol="canvas", base_size=(64, 64), **HALF)
    assert len(canvas) == 1000 and canvas.pixels == 1 and canvas[0][1].shape == (96, 64)


@each(
    ("call", "text"),
    [
        (lambda: class_names("shapes-dense"), "shapes-dense have a class for every pixel, .*: use the task segmentation"),
        (lambda: class_names("shapes", task="segmentation"), "a class for every image, .*: use shapes-dense"),
        (lambda: DenseShapes(3, protocol="native"), "unknown protocol 'native'"),
        (lambda: DenseShapes(3)[3], "index 3 of 3 images"),
    ],
)
def test_errors_name_the_way_out(call, text):
    with pytest.raises((ValueError, IndexError), match=text):
        call()


def test_a_class_is_the_direction_of_the_only_cool_object_near(scenes):
    checked = 0
    for b in range(200):
        shown = scenes.radius[b] > 0
        center, value = scenes.center[b][shown], scenes.value[b][shown]
        cool, warm = center[value == 1], center[value > 1]
        for place, kind in zip(warm, value[value > 1], strict=True):
            inside = ((cool >= 0) & (cool <= (128, 96))).all(1)
            reach = np.abs(cool - place).max(1)
            if kind == 255:
                assert not (inside & (reach <= CLEARANCE)).any()
                continue
            partners = cool[inside & (reach <= CLEARANCE)]
            assert len(partners) == 1 and (reach <= CLEARANCE).sum() == 1
            y, x = partners[0] - place
            assert kind == (2 + (x > 0) if abs(x) > abs(y) else 4 + (y > 0))
            checked += 1
    assert checked > 400


@pytest.mark.slow
def test_masks_are_those_of_the_pixels(drawn):
    images, masks = drawn[0][:300], drawn[1][:300]
    warmth = images[:, 0] - images[:, 2]  # antialiased pixels are between
    assert (warmth[masks == 0].abs() < 0.95).all() and (warmth[masks == 1] < 0).all() and (warmth[masks > 1] > 0).all()
    assert {*masks.unique().tolist()} == {0, 1, 2, 3, 4, 5, 255}
    assert ((warmth.abs() > 0.02) & (masks == 0)).sum() < 0.3 * (masks > 0).sum()  # the rims


def test_no_patch_shows_two_objects():
    """For any place of the grid: between two objects of a row or column of patches lie at least 8 pixels of ground."""
    masks = torch.stack([mask for _, mask in DenseShapes(100, 96, seed=4).__getitems__(range(100))])
    for dy, dx in ((0, 0), (3, 5)):
        patches = masks[:, dy : 88 + dy, dx : 88 + dx].unfold(1, 8, 8).unfold(2, 8, 8).flatten(3)
        kinds = sum((patches == value).any(-1).int() for value in (1, 2, 3, 4, 5, 255))
        assert kinds.max() == 1


@pytest.mark.slow
def test_every_scene_is_a_window_of_the_same_field():
    """Neither places nor the size of the canvas change how many objects there are."""
    density = []
    for size, n in (((64, 64), 800), ((64, 128), 400), ((128, 128), 200)):
        scenes = DenseShapes(n, size, seed=9).scenes(range(n))
        inside = (scenes.radius > 0) & ((scenes.center >= 0) & (scenes.center < size)).all(-1)
        density.append(inside.sum() / n / np.prod(size) * 4096)
    assert np.ptp(density) < 0.08 * np.mean(density) and 1.8 < np.mean(density) < 2.6


def test_colors_are_equally_frequent_at_every_place(drawn):
    masks = drawn[1]
    for value in (masks == 1, masks > 1):
        share = value.float().unfold(1, 8, 8).unfold(2, 8, 8).mean((0, 3, 4))  # [8, 8]
        rim = torch.cat([share[0], share[-1], share[1:-1, 0], share[1:-1, -1]])
        assert share.std() < 0.2 * share.mean()  # about 40 objects a cell
        assert float(rim.mean() / share[1:-1, 1:-1].mean()) == pytest.approx(1, abs=0.1)


def test_directions_are_equally_frequent_and_alike_at_borders(drawn):
    masks = drawn[1]
    shares = torch.bincount(masks[(masks > 1) & (masks < 255)])[2:].float()
    assert (shares / shares.sum() - 0.25).abs().max() < 0.035  # of about 1,500 objects
    # what a border does to the direction that leads to it is the same at all four borders, in steps of 8 px
    one, two, three, four = ((masks == value).float() for value in range(2, 6))
    left, *others = (one.mean((0, 1)), two.mean((0, 1)).flip(0), three.mean((0, 2)), four.mean((0, 2)).flip(0))
    for other in others:
        assert (left - other).view(8, 8).mean(1).abs().mean() < 0.2 * left.mean()


def guesses(features, labels):
    """Share of the second half that a small network, trained on the first half, guesses right."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 0.005, weight_decay=0.1)
    half = len(labels) // 2
    for _ in range(150):
        loss = nn.functional.cross_entropy(net(features[:half]), labels[:half])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float((net(features[half:]).argmax(1) == labels[half:]).float().mean())


@pytest.mark.slow
def test_patches_without_their_places_do_not_tell_the_direction(drawn):
    """A warm patch with the bag of all patches leaves the direction to chance, its place tells little, relative places all.

    The features of the bag are means over random features of the patches, as a model without position computes them.
    """
    images, masks = drawn
    pixels = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # [N, 64, 192]
    classes = masks.unfold(1, 8, 8).unfold(2, 8, 8).flatten(3).flatten(1, 2)  # [N, 64, 64]
    labeled = ((classes > 1) & (classes < 255)).sum(-1) > 20
    scene, patch = labeled.nonzero(as_tuple=True)
    labels = classes[scene, patch].masked_fill(classes[scene, patch] == 255, 0).amax(-1) - 2
    own = pixels[scene, patch]
    random = torch.randn(192, 128, generator=torch.Generator().manual_seed(1)) / 192**0.5
    bag = (pixels @ random).relu().mean(1)[scene] * 4
    assert len(labels) > 1000
    assert guesses(torch.cat([own, bag], 1), labels) == pytest.approx(0.25, abs=0.045)
    place = nn.functional.one_hot(patch, 64).float()
    assert 0.31 < guesses(place, labels) < 0.42
    offset = np.stack([np.arange(64) // 8, np.arange(64) % 8], 1)
    cool = (classes == 1).sum(-1).float() > 8  # where cool patches lie relative to the warm one
    around = torch.zeros(len(scene), 15, 15)
    for row, (s, p) in enumerate(zip(scene.tolist(), patch.tolist(), strict=True)):
        y, x = (offset[cool[s].numpy()] - offset[p] + 7).T
        around[row, y, x] = 1
    assert guesses(around.flatten(1), labels) > 0.85


def test_scale_stretches_what_canvas_extends():
    small, large = DenseShapes(20, seed=3), DenseShapes(20, 128, seed=3, protocol="scale")
    for one, other in zip(small.scenes(range(20)), large.scenes(range(20)), strict=True):
        assert np.array_equal(one, other)
    (_, mask), (_, twice) = small[4], large[4]
    assert (twice[::2, ::2] == mask).float().mean() > 0.97
    assert DenseShapes(20, 128, seed=3).scenes([4]).radius.max() < PATCH
