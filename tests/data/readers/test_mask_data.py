"""Images with masks: every source gives the same classes, a mask that does not fit is named, and view and mask stay aligned."""

import shutil
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import DataLoader

from helpers import each, shared
from vitrel.data import Augmentation, BadImage, Draw, Reading, class_names, collate, create_dataset
from vitrel.data.augment import Augmenter

HOW = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "task": "segmentation"}
COLORS = np.array([[40, 40, 40], [230, 30, 30], [30, 230, 30], [30, 30, 230]], np.uint8)  # of the classes, the last unlabeled


def scene(seed, h=36, w=48):
    """Classes uint8 [h, w]: a few rectangles of the classes 0 to 2 and of 255."""
    rng, mask = np.random.default_rng(seed), np.zeros((h, w), np.uint8)
    for value in (1, 2, 255, 1, 2):
        y, x = rng.integers(0, h - 12), rng.integers(0, w - 12)
        mask[y : y + 12, x : x + 12] = value
    return mask


def picture(mask):
    return Image.fromarray(COLORS[np.minimum(mask, 3)])


def write(root, counts={"train": 6, "val": 3}, encode=Image.fromarray):  # noqa: B006
    for split, n in counts.items():
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True)
        for i in range(n):
            mask = scene(10 * len(split) + i)
            picture(mask).save(root / "images" / split / f"{i}.png")
            encode(mask).save(root / "masks" / split / f"{i}.png")
    (root / "classes.txt").write_text("field\nhouse\nlake\n")
    return root


@pytest.fixture
def root(tmp_path):
    return write(tmp_path / "town")


def palette(mask):
    image = Image.fromarray(mask).convert("P")
    image.putdata(mask.ravel().tolist())
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


def items(data, split="train", **options):
    images = create_dataset(str(data), split, (36, 48), **HOW, **options)
    assert images.classes == class_names(str(data), task="segmentation")
    assert len(images.names()) == len(images)
    return [(image.numpy().tobytes(), mask.numpy().tobytes()) for image, mask in (images[i] for i in range(len(images)))]


@pytest.mark.parametrize("encode", [palette, lambda mask: Image.fromarray(mask.astype(np.uint16))], ids=["palette", "16 bits"])
def test_values_of_a_mask_are_its_classes_however_it_is_encoded(root, tmp_path, encode):
    data = create_dataset(str(root), "train", (36, 48), **HOW)
    image, mask = data[0]
    assert mask.dtype == torch.uint8 and mask.shape == (36, 48) and np.array_equal(mask, scene(50))
    assert torch.equal(
        (image * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(COLORS[np.minimum(scene(50), 3)])
    )
    assert data.classes == ["field", "house", "lake"]
    assert items(write(tmp_path / "other", encode=encode)) == items(root)


def test_layouts(root, tmp_path):
    names = tmp_path / "names"
    write(names, {"train": 6, "validation": 3})
    assert items(names) == items(root) and len(items(names, "val")) == 3
    flat = tmp_path / "flat"
    for folder in ("images", "masks"):
        shutil.copytree(root / folder / "train", flat / folder / "a")
    shutil.copy(root / "classes.txt", flat)
    with pytest.raises(ValueError, match="--val-fraction"):
        items(flat)
    parts = [items(flat, split, reading=Reading(val_fraction=0.34)) for split in ("train", "val")]
    assert list(map(len, parts)) == [4, 2] and sorted(parts[0] + parts[1]) == sorted(items(root))


def saved(change, **how):
    return lambda path: change(Image.open(path)).save(path, **how)


FAULTS = {
    "missing": (
        lambda path: path.unlink(),
        "2 of 6 names in .*images/train and masks/train have not one image and one mask: 1: 1 and 0, 2: 1 and 0;",
    ),
    "double": (
        lambda path: shutil.copy(path, path.with_suffix(".bmp")),
        "2 of 6 names in .* have not one image and one mask: 1: 1 and 2",
    ),
    "colors": (
        saved(lambda mask: mask.convert("RGB")),
        "2 of 6 masks do not fit: the mask of .*1.png is a PNG of mode RGB, and a mask is a gray or palette PNG; the",
    ),
    "lossy": (saved(Image.Image.copy, format="JPEG"), "2 of 6 masks do not fit: the mask of .*1.png is a JPEG of mode L"),
    "half": (
        saved(lambda mask: mask.resize((24, 18))),
        "2 of 6 masks do not fit: the mask of .*1.png has 18x24 pixels and its image 36x48, .* nothing is resampled",
    ),
    "beyond": (
        saved(lambda mask: Image.fromarray(scene(0) % 255 + 7)),
        "2 of 6 masks do not fit: the mask of .*1.png has the value 9, beyond the 3 classes known; ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_masks_that_do_not_fit_are_counted(root, fault):
    make, text = FAULTS[fault]
    for i in (1, 2):
        make(root / f"masks/train/{i}.png")
    with pytest.raises(ValueError, match=text):
        items(root)
    assert len(items(root, "val")) == 3


def test_other_folders_are_refused(root, tmp_path):
    with pytest.raises(ValueError, match="has no masks: segmentation reads"):
        items(tmp_path / "a.csv")
    (root / "classes.txt").unlink()
    with pytest.raises(ValueError, match=r"classes.txt cannot be read .*: write one class a line"):
        items(root)
    (root / "classes.txt").write_text("\n".join(map(str, range(256))))
    with pytest.raises(ValueError, match="names 256 classes: it must be 1 to 255, since 255 means no class"):
        items(root)
    shutil.rmtree(root / "masks")
    (root / "classes.txt").write_text("a\n")
    text = r"found no .*masks/train for segmentation in .*: its layout must be images/<split>/\*.jpg, masks"
    with pytest.raises(ValueError, match=text):
        items(root)


def test_a_damaged_mask_is_an_unreadable_image(root):
    path = root / "masks/val/1.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(BadImage, match=r"cannot decode the mask of .*1.png"):
        items(root, "val")
    data = create_dataset(str(root), "val", (36, 48), **HOW, reading=Reading(on_bad="leave_out"))
    image, mask = data[1]
    assert not image.any() and (mask == 255).all() and mask.shape == (36, 48) and data.bad_indices() == [1]


def test_masks_of_two_classes_as_0_and_255_are_refused(root):
    """In training, in evaluation and for a few chosen images; as 0 and 1 they are read."""
    (root / "classes.txt").write_text("field\nhouse\n")

    def write_as(field, house):
        for path in (root / "masks").rglob("*.png"):
            Image.fromarray(np.where(scene(int(path.stem)) == 1, house, field).astype(np.uint8)).save(path)

    write_as(0, 1)
    assert {*create_dataset(str(root), "train", (36, 48), **HOW)[0][1].unique().tolist()} == {0, 1}
    write_as(0, 255)
    for options in ({}, {"n": 2}):
        with pytest.raises(ValueError, match=r"no pixel of the 6 masks of .*town has the class house \(value 1\): give every"):
            items(root, **options)
        with pytest.raises(ValueError, match=r"no pixel of the 3 masks of .* has a second class: give every"):
            items(root, "val", **options)


def test_a_class_without_a_pixel_in_training_is_named_also_if_some_are_chosen(root):
    (root / "classes.txt").write_text("field\nhouse\nlake\npond\n")
    with pytest.raises(ValueError, match=r"no pixel of the 6 masks of .*town has the class pond \(value 3\)"):
        items(root, n=1)
    assert len(items(root, "val")) == 3
    for i in range(5):
        Image.fromarray(np.zeros((36, 48), np.uint8)).save(root / f"masks/train/{i}.png")
    Image.fromarray(np.arange(36 * 48, dtype=np.uint8).reshape(36, 48) % 4).save(root / "masks/train/5.png")
    assert len(items(root, n=1)) == 1 and len(items(root, n=5)) == 5
    Image.fromarray(np.full((36, 48), 255, np.uint8)).save(root / "masks/train/2.png")
    with pytest.raises(ValueError, match=r"1 of 6 masks do not fit: .*2.png has no pixel with a class, only 255"):
        items(root)


@pytest.mark.parametrize("orientation", [3, 5, 6, 8])
def test_image_and_mask_are_turned_as_viewers_turn_them(root, orientation):
    """The mask is drawn over what a viewer shows; a mask of the stored pixels does not fit if the sides are exchanged."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    back = {6: 8, 8: 6}.get(orientation, orientation)  # the orientation that undoes it
    expected = items(root, "val")
    for i in range(3):
        path = root / f"images/val/{i}.png"
        image = Image.open(path)
        image.getexif()[ExifTags.Base.Orientation] = back
        ImageOps.exif_transpose(image).save(path, exif=exif)
    found = create_dataset(str(root), "val", (36, 48), **HOW)
    assert found.image_sizes() == [(36, 48)] * 3
    for i, (image, mask) in enumerate(expected):
        assert found[i][0].numpy().tobytes() == image and found[i][1].numpy().tobytes() == mask
    if orientation > 4:
        Image.fromarray(scene(30).T.copy()).save(root / "masks/val/0.png")
        with pytest.raises(ValueError, match=r"48x36 pixels and its image 36x48, both turned by their EXIF orientation"):
            items(root, "val")
        Image.fromarray(scene(30).T.copy()).save(root / "masks/val/0.png", exif=exif)  # a tool that copies the tags
        assert items(root, "val")


def test_splits_that_are_links_are_followed_and_other_links_told(root, tmp_path):
    other = tmp_path / "linked"
    for folder in ("images", "masks"):
        (other / folder).mkdir(parents=True)
        for split in ("train", "val"):
            (other / folder / split).symlink_to(root / folder / split)
    (other / "classes.txt").symlink_to(root / "classes.txt")
    (tmp_path / "link").symlink_to(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in (other, tmp_path / "link"):
            assert items(data) == items(root) and len(items(data, "val")) == 3
    for folder in ("images", "masks"):
        (root / folder / "train" / "again").symlink_to("..")
    with pytest.warns(UserWarning, match=r"left out of .*: links to folders: 2 \(.*images/train/again, .*masks/train/again"):
        assert len(items(other)) == 6 and len(items(root)) == 6


def test_the_fingerprint_covers_masks(root):
    before = create_dataset(str(root), "val", (36, 48), **HOW).fingerprints()
    mask = scene(30)
    mask[0] = 2
    Image.fromarray(mask).save(root / "masks/val/0.png")
    assert create_dataset(str(root), "val", (36, 48), **HOW).fingerprints() != before


def test_evaluation_resizes_the_image_alone(root):
    data = create_dataset(str(root), "val", (24, 64), **HOW)
    image, mask = data[Draw(0, (18, 24))]
    assert image.shape == (3, 18, 24) and mask.shape == (36, 48)
    expected = np.asarray(picture(scene(30)).resize((64, 24), Image.BICUBIC))
    assert np.array_equal((data[0][0] * 255).round().permute(1, 2, 0), expected)
    images, masks = next(iter(DataLoader(data, 2, collate_fn=partial(collate, as_list=True))))
    assert images.shape == (2, 3, 24, 64) and [mask.shape for mask in masks] == [(36, 48)] * 2
    canvas = create_dataset(str(root), "val", (40, 64), **HOW, protocol="canvas", base_size=(36, 48))
    image, mask = canvas[0]  # the image at the training size, in the middle of a larger canvas
    assert image.shape == (3, 40, 64) and mask.shape == (36, 48)
    assert torch.equal(image[:, 2:-2, 8:-8], create_dataset(str(root), "val", (36, 48), **HOW)[0][0])
    assert create_dataset(str(root), "val", (24, 64), **HOW, protocol="native")[Draw(1, (8, 16))][0].shape == (3, 8, 16)


def views(root, size=(36, 48), workers=0, epochs=1, seed=3, **settings):
    settings = {"jitter": 0.0, "interpolation": "bilinear"} | settings
    data = create_dataset(str(root), "train", size, **HOW | {"std": None}, augment=Augmentation(**settings), seed=seed)
    loader = DataLoader(data, 2, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(epochs):
        data.set_epoch(epoch)
        yield from ((image, mask) for images, masks in loader for image, mask in zip(images, masks, strict=True))


@pytest.mark.parametrize("crop", ["random_scale", "random_resized"])
def test_image_and_mask_move_alike(root, crop):
    """The image is painted by class, so the nearest color tells the class but where colors blend at borders."""
    colors = torch.from_numpy(COLORS).float()
    for image, mask in views(root, (40, 56), epochs=6, crop=crop, vflip=True, factor=(0.6, 2.5)):
        assert mask.shape == (40, 56) and mask.dtype == torch.uint8
        nearest = torch.cdist(image.flatten(1).T.float(), colors).argmin(1).view(40, 56)
        shown = (image != 0).any(0)  # the color of what stays empty is black here
        labeled = (mask != 255) & shown
        assert (nearest == mask)[labeled].float().mean() > 0.93
        assert (mask[~shown] == 255).all()
    for image, _ in views(root, (64, 48), crop=crop, factor=(1.0, 1.0)):
        assert (image != 0).any(0).all()  # multiples are of the scale at which the image covers the target


def test_masks_are_not_aside_of_their_images():
    """A step enlarged and reduced by any factor has its border at the same place in both, to half a pixel."""
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 33:] = 1
    image = Image.fromarray(np.repeat(mask[..., None] * 255, 3, 2))
    for factor in (0.5, 0.8, 1.7, 3.0):
        settings = Augmentation(factor=(factor, factor), flip=False, jitter=0.0, interpolation="bilinear").for_masks()
        augment = Augmenter(settings, (64, 64), (0.0,) * 3)
        aside = []
        for index in range(30):
            view, target = augment.joint(image, mask, 0, index)
            row = int((target != 255).any(1).nonzero()[0])
            if {0, 1} <= {*target[row].tolist()}:
                aside.append(float(view[0, row, target[row] != 255].sum() / 255 - (target[row] == 1).sum()))
        assert aside and abs(np.mean(aside)) <= 0.51, factor


def test_views_are_the_same_for_any_number_of_workers_and_differ_by_epoch_and_seed(root):
    alone = list(views(root, epochs=3, jitter=0.4, vflip=True))
    of_another_seed = list(views(root, jitter=0.4, vflip=True, seed=4))
    assert len({image.numpy().tobytes() for image, _ in alone + of_another_seed}) == 24
    others = list(views(root, workers=2, epochs=3, jitter=0.4, vflip=True))
    assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(alone, others, strict=True))


@each("settings", [{"policy": "rand-m9-mstd0.5"}, {"erase": 0.2}, {"crop": "simple"}])
def test_what_would_move_the_image_alone_is_refused(root, settings):
    with pytest.raises(ValueError, match="segmentation moves image and mask alike"):
        list(views(root, **settings))
    assert len(list(views(root, policy="3a"))) == 6


def test_camvid():
    data = create_dataset(str(shared("data/camvid")), "val", (192, 256), **HOW)
    assert len(data) == 101 and len(data.classes) == 11
    image, mask = data[7]
    assert image.shape == (3, 192, 256) and mask.shape == (360, 480) and {*mask.unique().tolist()} <= {*range(11), 255}
