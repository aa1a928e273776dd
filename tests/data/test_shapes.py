"""The built-in set: the same images whatever the order, sizes that agree, and no label within a patch."""

import numpy as np
import pytest
import torch

from helpers import each
from vitrel.data import Draw
from vitrel.data.shapes import CLASSES, FIELD, GAP, PATCH, PLACES, SPECK_RADIUS, Shapes

N = 2000


@pytest.fixture(scope="module")
def scenes():
    """Scenes of N images, as arrays."""
    return Shapes(N, seed=3).scenes(range(N))


def images(dataset, n=None):
    return torch.stack([image for image, _ in dataset.__getitems__(range(n or len(dataset)))])


def warm_and_cool(image):
    """Pixels [H, W] of the warm and of the cool object: the only ones that are not gray."""
    return image[0] - image[2] > 0.02, image[2] - image[0] > 0.02


def test_items_depend_on_seed_and_index_alone():
    one, other = Shapes(40, seed=1), Shapes(1000, seed=1)
    alone = [one[i] for i in (7, 3, 39)]
    together = other.__getitems__([39, 0, 3, 7, 21])
    for (image, label), (again, label_again) in zip(alone, [together[i] for i in (3, 2, 0)], strict=True):
        assert torch.equal(image, again) and label == label_again
    assert image.dtype == torch.float32 and image.shape == (3, 64, 64) and type(label) is int
    assert not torch.equal(images(one), images(Shapes(40, seed=2)))
    one.set_epoch(4)
    assert torch.equal(one[39][0], image) and one.name(17) == "shapes (seed 1): 17"
    drawn = Shapes(12, seed=3).scenes(range(12))  # as earlier versions did, whose results stay comparable
    assert drawn.label.tolist() == [3, 1, 0, 3, 0, 2, 3, 0, 2, 0, 1, 0]
    assert drawn.center[11, -1].tolist() == pytest.approx([36.65005, 16.740935], abs=1e-5)
    assert drawn.color[11, -2:].flatten().tolist() == pytest.approx(
        [0.156415, 0.160345, 0.967001, 0.874695, 0.066056, 0.174882], abs=1e-5
    )


@pytest.mark.parametrize("how", [{}, {"protocol": "canvas", "region": (0.0, 0.0, 0.75, 1.0)}])
def test_draws_of_several_sizes_are_those_of_sets_of_that_size(how):
    dataset, large = Shapes(20, seed=3, **how), Shapes(20, size=(96, 80), seed=3, **how)
    batch = dataset.__getitems__([Draw(3), Draw(5, (96, 80)), 7, Draw(5, (96, 80), repeat=2), Draw(9, (64, 64))])
    expected = [dataset[3], large[5], dataset[7], large[5], dataset[9]]
    for (image, label), (again, label_again) in zip(batch, expected, strict=True):
        assert torch.equal(image, again) and label == label_again


def test_label_names_the_side_of_the_warm_object(scenes):
    cool, warm = scenes.center[:, -2], scenes.center[:, -1]
    dy, dx = (warm - cool).T
    direction = np.where(np.abs(dx) > np.abs(dy), np.where(dx < 0, 0, 1), np.where(dy < 0, 2, 3))
    assert CLASSES == ("left", "right", "above", "below")
    assert (direction == scenes.label).all() and np.abs(np.bincount(scenes.label) / N - 0.25).max() < 0.04
    image, label = Shapes(8)[0]
    red, blue = warm_and_cool(image)
    y, x = (red.nonzero().float().mean(0) - blue.nonzero().float().mean(0)).tolist()
    assert CLASSES[label] == (("left" if x < 0 else "right") if abs(x) > abs(y) else "above" if y < 0 else "below")


def test_no_patch_shows_both_objects():
    x = images(Shapes(400, seed=5))
    red, blue = zip(*(warm_and_cool(image) for image in x), strict=True)
    patches = [torch.stack(mask).unfold(1, 8, 8).unfold(2, 8, 8).flatten(3).any(-1) for mask in (red, blue)]
    assert patches[0].flatten(1).any(1).all() and patches[1].flatten(1).any(1).all()
    assert not (patches[0] & patches[1]).any()


def test_specks_keep_a_patch_away_from_the_pair(scenes):
    specks, pair = scenes.center[:, :-2], scenes.center[:, -2:]
    gap = np.abs(specks[:, :, None] - pair[:, None]).max(-1) - scenes.radius[:, :-2, None] - scenes.radius[:, None, -2:]
    drawn = scenes.radius[:, :-2] > 0
    assert drawn.any(1).mean() > 0.5 and not drawn.all()
    assert gap[drawn].min() > GAP
    sizes = scenes.radius[:, :-2][drawn]
    assert SPECK_RADIUS[0] <= sizes.min() < sizes.max() <= SPECK_RADIUS[1]


def phase_counts(scenes, label):
    """Counts [4^4] of the pair's places within patches, in cells of 2 units."""
    cell = (scenes.center[scenes.label == label, -2:].reshape(-1, 4) % PATCH // 2).astype(int)
    return np.bincount(np.ravel_multi_index(cell.T, (4,) * 4), minlength=256)


def test_phases_within_patches_are_uniform_for_every_label():
    scenes = Shapes(30_000, seed=11).scenes(range(30_000))
    for label in range(4):
        counts = phase_counts(scenes, label)
        expected = counts.sum() / 256
        chi2 = ((counts - expected) ** 2 / expected).sum()
        assert chi2 < 255 + 5 * (2 * 255) ** 0.5, (CLASSES[label], chi2)


@pytest.mark.slow
def test_bag_of_patches_does_not_tell_the_label():
    """A ridge classifier on order-free statistics of 8-px patches is at chance on unseen images; of 32-px patches it is not."""
    x, y = zip(*Shapes(2400, seed=2).__getitems__(range(2400)), strict=True)
    x, target = torch.stack(x), torch.nn.functional.one_hot(torch.tensor(y), 4).double()
    for side, low, high in ((8, 0.2, 0.3), (32, 0.4, 1.0)):
        patch = x.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        basis = torch.linalg.qr(torch.randn(patch.shape[-1], 24, generator=torch.Generator().manual_seed(0)))[0]
        tokens = patch @ basis  # [B, patches, 24]
        moments = (tokens.mT @ tokens).flatten(1)[:, torch.ones(24, 24).triu().flatten().bool()]
        features = torch.cat([tokens.mean(1), moments], 1).double()
        features = (features - features[:1800].mean(0)) / features[:1800].std(0)
        gram = features[:1800].mT @ features[:1800] + 100 * torch.eye(features.shape[1])
        weight = torch.linalg.solve(gram, features[:1800].mT @ (target[:1800] - 0.25))
        accuracy = ((features[1800:] @ weight).argmax(1) == target[1800:].argmax(1)).float().mean().item()
        assert low < accuracy < high


def test_center_of_the_pair_is_alike_for_every_label(scenes):
    middle = scenes.center[:, -2:].mean(1)
    for label in range(4):
        here = middle[scenes.label == label]
        assert np.abs(here.mean(0) - FIELD / 2).max() < 1.5
        assert np.abs(here.min(0) - middle.min(0)).max() < 0.5 and np.abs(here.max(0) - middle.max(0)).max() < 0.5


@pytest.mark.parametrize("size", [64, (64, 96), (80, 64)])
def test_scale_draws_the_same_scene_at_every_size(size):
    h, w = (size, size) if isinstance(size, int) else size
    small, large = Shapes(64, size=size, seed=4), Shapes(64, size=(2 * h, 2 * w), seed=4)
    assert all(map(np.array_equal, small.scenes(range(3)), large.scenes(range(3))))
    halved = torch.nn.functional.avg_pool2d(images(large), 2)
    difference = (halved - images(small)).abs()
    assert difference.max() < 0.5 and difference.mean() < 2e-3


def test_longer_sides_show_more_background_and_objects_stay_round():
    square, wide = images(Shapes(16, size=64)), images(Shapes(16, size=(64, 96)))
    assert torch.allclose(wide[:, :, :, 16:80], square, atol=1e-4)
    assert (wide[:, :, :, :16] == wide[:, :, :1, :1]).all() and (wide[:, :, :, 80:] == wide[:, :, :1, :1]).all()


@pytest.mark.parametrize("size", [48, 128, (96, 48)])
def test_canvas_keeps_objects_as_large_as_at_the_base(size):
    base, canvas = Shapes(200, seed=6), Shapes(200, size=size, seed=6, protocol="canvas")
    warm = [[warm_and_cool(x)[0].sum().item() for x in images(d)] for d in (base, canvas)]
    assert np.mean(warm[1]) == pytest.approx(np.mean(warm[0]), rel=0.03) and min(warm[1]) > 20
    h, w = (size, size) if isinstance(size, int) else size
    drawn = canvas.scenes(range(200))
    low, high = drawn.center - drawn.radius[..., None], drawn.center + drawn.radius[..., None]
    assert low.min() >= 0 and (high.max((0, 1)) <= (h, w)).all()
    if h > 64:
        assert drawn.center[:, -1, 0].min() < 20 and drawn.center[:, -1, 0].max() > h - 20


def test_region_limits_every_object():
    region = (0.25, 0.0, 1.0, 0.75)
    scenes = Shapes(500, region=region).scenes(range(500))
    radius = scenes.radius[..., None]
    low, high = (scenes.center - radius).min((0, 1)), (scenes.center + radius).max((0, 1))
    assert (low >= (16, 0)).all() and (high <= (64, 48)).all()
    on_canvas = Shapes(500, size=(96, 128), protocol="canvas", region=(0.0, 0.5, 0.5, 1.0)).scenes(range(500))
    assert (on_canvas.center[..., 1] > 64).all() and (on_canvas.center[..., 0] < 48).all()


def test_normalized_by_mean_and_std():
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    raw = images(Shapes(8, mean=(0.0,) * 3, std=(1.0,) * 3))
    assert raw.min() >= 0 and raw.max() <= 1
    expected = (raw - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(images(Shapes(8, mean=mean, std=std)), expected, atol=1e-5)


@each(
    ("kwargs", "text"),
    [
        ({"n": 0}, r"n \(0\) must be at least 1"),
        ({"seed": -1}, r"seed \(-1\) at least 0"),
        ({"protocol": "zoom"}, "unknown protocol 'zoom'; use 'scale' or 'canvas'"),
        ({"size": 4}, "size must be a side or .* at least 8, not 4"),
        ({"base": (0, 64), "protocol": "canvas"}, "base must be a side"),
        ({"size": 32, "protocol": "canvas"}, "objects do not fit: the canvas protocol at 32x32 px .* 32x32 units.* needs 46"),
        ({"region": (0.0, 0.0, 1.0, 0.5)}, "objects do not fit: the scale protocol .* leave 64x32 units"),
        ({"region": (0.5, 0.0, 0.2, 1.0)}, "region must be shares"),
        ({"region": (-0.5, 0.0, 1.0, 1.0)}, "region must be shares"),
    ],
)
def test_errors_name_the_way_out(kwargs, text):
    with pytest.raises(ValueError, match=text):
        Shapes(**{"n": 4, **kwargs})


def test_a_label_of_place_is_the_quarter_of_the_image_whatever_the_direction():
    dataset = Shapes(N, seed=3, label="place")
    scenes = dataset.scenes(range(N))
    middle = scenes.center[:, -2:].mean(1)  # [N, 2]
    off = middle - FIELD / 2
    assert dataset.classes == list(PLACES) == ["upper left", "upper right", "lower left", "lower right"]
    assert (scenes.label == 2 * (off[:, 0] > 0) + (off[:, 1] > 0)).all()
    assert 4 <= np.abs(off).min() < 4.1 and 11.9 < np.abs(off).max() <= 12
    # where the middle falls within a patch tells nothing, and the direction is that of the other label
    assert np.histogram(middle[:, 0] % PATCH, 4, (0, PATCH))[0].min() > 0.2 * N
    assert (Shapes(N, seed=3).scenes(range(N)).radius[:, -2:] == scenes.radius[:, -2:]).all()
    offset = scenes.center[:, -1] - scenes.center[:, -2]
    directions = np.where(np.abs(offset[:, 1]) > np.abs(offset[:, 0]), offset[:, 1] > 0, 2 + (offset[:, 0] > 0))
    table = np.histogram2d(scenes.label, directions, bins=4)[0] / N
    assert np.abs(table - 1 / 16).max() < 0.02
    wide = Shapes(N, (64, 192), 3, "canvas", label="place").scenes(range(N))
    assert (wide.label % 2 == (wide.center[:, -2:, 1].mean(1) > 96)).all()
    with pytest.raises(ValueError, match="unknown label 'class'; use 'relation' or 'place'"):
        Shapes(4, label="class")
