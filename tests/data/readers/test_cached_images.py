"""Reading(cached_side=...): images reduced once, cached in memory, and never changed by what is drawn from them."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from helpers.pictures import identity, picture, tensor
from vitrel.data import Augmentation, BadImage, Draw, Folder, Prepare, Reading
from vitrel.data.augment import Augmenter

HALF = (0.5, 0.5, 0.5)
CROPS = ("random_resized", "simple", "center")
EVERYTHING = {"policy": "rand-m9-mstd0.5-inc1", "jitter": 0.4, "vflip": True, "erase": 0.5, "gray_prob": 0.2, "blur_prob": 0.3}
SIDE = 24
SHAPES = [(24, 24), (24, 40), (20, 64), (48, 48), (48, 96), (96, 48)]  # the first three are not larger than SIDE
KEPT = [(24, 24), (24, 40), (20, 64), (24, 24), (24, 48), (48, 24)]


@pytest.fixture
def root(tmp_path):
    """Six training images in two classes, of the sizes in SHAPES."""
    for i, (h, w) in enumerate(SHAPES):
        path = tmp_path / "train" / ("cat", "dog")[i // 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(h, w, i)).save(path)
    return tmp_path


def files(root):
    return sorted((root / "train").rglob("*.png"))


def cached(root, side=SIDE, **how):
    return Folder(root, "train", identity, reading=Reading(cached_side=side, **how))


def augmented(root, size, side=SIDE, crop_pct=1.0, **settings):
    augment = Augmenter(Augmentation(**settings), size, HALF, HALF, 3, crop_pct)
    return Folder(root, "train", Prepare(size, HALF, HALF), augment, reading=Reading(cached_side=side, on_bad="replace"))


def test_the_shorter_side_is_reduced_and_small_images_stay_as_decoded(root):
    plain, data = Folder(root, "train", identity), cached(root)
    for i, (shape, expected) in enumerate(zip(SHAPES, KEPT, strict=True)):
        image, label = data[i]
        assert image.shape == (3, *expected) and image.dtype == torch.uint8 and label == i // 3
        if shape == expected:
            assert torch.equal(image, plain[i][0])


@pytest.mark.parametrize(("h", "w"), [(48, 72), (100, 75), (61, 83)])
def test_the_reduction_is_antialiased_bicubic(root, h, w):
    array = picture(h, w)
    Image.fromarray(array).save(files(root)[0])
    image, _ = cached(root)[0]
    height, width = image.shape[1:]
    assert min(height, width) == SIDE and abs(max(height, width) - SIDE * max(h, w) / min(h, w)) < 1
    pil = tensor(np.asarray(Image.fromarray(array).resize((width, height), Image.BICUBIC)))
    difference = (image.int() - pil.int()).abs()
    assert difference.max() <= 2 and difference.float().mean() < 0.25
    coarse = torch.nn.functional.interpolate(tensor(array)[None].float(), (height, width), mode="bicubic")[0]
    assert (coarse.clamp(0, 255) - pil).abs().mean() > 2  # without antialiasing it would be another image


def test_only_the_reduced_pixels_are_held(root):
    data = cached(root)
    for i, (h, w) in enumerate(KEPT):
        assert data[i][0].untyped_storage().nbytes() == 3 * h * w


def test_each_file_is_decoded_once(root):
    """Later draws need no file, whatever becomes of it, and other images are decoded when they are first read."""
    data, fresh = cached(root), cached(root)
    first = [data[i][0].clone() for i in range(5)]
    for path in files(root)[:5]:
        path.unlink()
    Image.fromarray(picture(48, 48, 9)).save(files(root)[0])  # number 5, not drawn yet
    data.set_epoch(4)
    assert all(torch.equal(data[i][0], first[i]) for i in (4, 3, 2, 1, 0, 0))
    assert data[5][0].shape == (3, 24, 24)
    with pytest.raises(BadImage, match="No such file"):
        fresh[0]  # a data set has its own


def test_without_a_cache_every_image_is_decoded_anew(root):
    assert Reading().cached_side is None
    for reading in (Reading(), Reading(cached_side=None)):
        data = Folder(root, "train", identity, reading=reading)
        assert data[5][0].shape == (3, 96, 48)
        for seed in (11, 12):
            array = picture(96, 48, seed)
            Image.fromarray(array).save(files(root)[5])
            assert torch.equal(data[5][0], tensor(array))


@pytest.mark.parametrize("side", [0, -8])
def test_the_side_is_at_least_one_pixel(side):
    with pytest.raises(ValueError, match=rf"cached_side .*{side}"):
        Reading(cached_side=side)
    assert Reading(cached_side=1).cached_side == 1


@pytest.mark.parametrize("crop", CROPS)
def test_an_item_drawn_again_is_the_same(root, crop):
    """At the first sizes some cached images fit as they are, and nothing resizes them into new memory."""
    size = [(24, 24), (24, 48), (16, 20)][CROPS.index(crop)]
    for settings in ({"jitter": 0.4}, {"jitter": 0.4, "flip": False, "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}, EVERYTHING):
        settings = settings | {"crop": crop}
        data = augmented(root, size, **settings)
        first = [data[i][0].clone() for i in range(6)]
        for epoch in (1, 0):
            data.set_epoch(epoch)
            for draw in (Draw(0, None, 1), Draw(3, (24, 24), 2), Draw(4, (24, 48)), Draw(5, (48, 24)), *range(6)):
                data[draw]
        again = [data[i][0] for i in range(6)]
        fresh = augmented(root, size, **settings)
        assert all(map(torch.equal, again, first)) and all(torch.equal(fresh[i][0], first[i]) for i in range(6))


def test_an_item_that_is_changed_does_not_change_the_next(root):
    prepared = Folder(root, "train", Prepare((24, 24), HALF, HALF), reading=Reading(cached_side=SIDE))
    for data in (prepared, augmented(root, (24, 24), crop="center", jitter=0.0, flip=False)):
        first = [data[i][0].clone() for i in range(6)]
        for i in range(6):
            data[i][0].zero_()  # as mixing in place does
        assert all(torch.equal(data[i][0], first[i]) and first[i].any() for i in range(6))


@pytest.mark.parametrize("crop", CROPS)
def test_drawn_as_from_files_that_were_reduced_before(root, tmp_path, crop):
    """Nothing but the reduction differs: the images cached, written to files, are drawn the same without a cache."""
    for source, i in zip(files(root), range(6), strict=True):
        path = tmp_path / "reduced" / source.relative_to(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(cached(root)[i][0].permute(1, 2, 0).numpy()).save(path)
    settings = EVERYTHING | {"crop": crop}
    data, other = augmented(root, (20, 28), **settings), augmented(tmp_path / "reduced", (20, 28), side=None, **settings)
    for epoch in (0, 1):
        data.set_epoch(epoch)
        other.set_epoch(epoch)
        assert all(torch.equal(data[i][0], other[i][0]) and data[i][1] == other[i][1] for i in range(6))


def test_images_that_are_small_enough_are_drawn_as_without(root):
    data, other = augmented(root, (24, 24), side=96, **EVERYTHING), augmented(root, (24, 24), side=None, **EVERYTHING)
    for epoch in (0, 1):
        data.set_epoch(epoch)
        other.set_epoch(epoch)
        assert all(torch.equal(data[i][0], other[i][0]) for i in range(6))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_processes_give_the_same(root, start):
    """The same images in every epoch, and what they could not read is known here."""
    files(root)[1].write_bytes(b"")

    def batches(workers, drawn_before):
        data = augmented(root, (24, 24), **EVERYTHING)
        if drawn_before:
            data[0], data[4]
        context = {"multiprocessing_context": start, "persistent_workers": True} if workers else {}
        loader, found = DataLoader(data, 2, num_workers=workers, **context), []
        for epoch in range(3):
            data.set_epoch(epoch)
            found += [image for image, _ in loader]
        assert data.bad_indices() == [1]
        return found

    alone = batches(0, False)
    assert len(alone) == 9 and not torch.equal(alone[0], alone[3])
    for workers, drawn_before in ((1, False), (2, True)) if start == "fork" else ((1, True),):
        assert all(map(torch.equal, batches(workers, drawn_before), alone))


def test_a_pickled_data_set_draws_the_same(root):
    """Loader processes that are spawned get it by pickle, used or not."""
    data = augmented(root, (24, 24), **EVERYTHING)
    first = [data[i][0].clone() for i in range(3)]
    again = pickle.loads(pickle.dumps(data))
    assert all(torch.equal(again[i][0], first[i]) for i in range(3)) and torch.equal(again[4][0], data[4][0])


def test_the_limit_of_pixels_is_that_of_the_file(root):
    data = cached(root, max_pixels=48 * 48)
    assert data[3][0].shape == (3, 24, 24)
    with pytest.raises(BadImage, match=r"4.png has 48x96 \(H x W\) pixels, more than max_pixels=2,304"):
        data[4]
