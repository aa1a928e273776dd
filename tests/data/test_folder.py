import numpy as np
import pytest
import timm
import torch
from PIL import Image

from vitrel.data import Folder, Prepare, decode, folder_classes

MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
RAW = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def picture(h, w, seed=0):
    """Smooth and sharp content together, [h, w, 3] uint8."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (h // 8 + 2, w // 8 + 2, 3), dtype=np.uint8)).resize((w, h), Image.BICUBIC)
    return np.clip(np.asarray(coarse, dtype=int) + rng.integers(-40, 40, (h, w, 3)), 0, 255).astype(np.uint8)


def tensor(array):
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def identity(image):
    return image


@pytest.fixture
def root(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(picture(24, 32, i)).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("protocol", ["scale", "canvas"])
def test_a_squashed_image_at_its_own_size_is_untouched(protocol):
    array = picture(96, 96)
    out = Prepare((96, 96), MEAN, STD, protocol=protocol, base_size=(96, 96))(tensor(array))
    expected = (array / 255 - MEAN) / STD
    torch.testing.assert_close(out, torch.from_numpy(expected).permute(2, 0, 1).float())


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [48, 112, 160])
def test_resizing_equals_pil(size, interpolation):
    array = picture(96, 96)
    out = Prepare((size, size), **RAW, interpolation=interpolation)(tensor(array)) * 255
    filters = {"bicubic": Image.BICUBIC, "bilinear": Image.BILINEAR}
    pil = np.asarray(Image.fromarray(array).resize((size, size), filters[interpolation]), dtype=np.float32)
    difference = (out - tensor(pil)).abs()  # grey levels; PIL rounds after each axis
    assert difference.mean() < (0.2 if size < 96 else 0.25)


@pytest.mark.parametrize(("size", "crop"), [(64, 0.875), (96, 0.9), (224, 1.0)])
@pytest.mark.parametrize(("h", "w"), [(120, 97), (83, 140)])
def test_square_sizes_equal_timm(size, crop, h, w):
    array = picture(h, w)
    ours = Prepare((size, size), MEAN, STD, crop)(tensor(array))
    timms = timm.data.create_transform((3, size, size), interpolation="bicubic", mean=MEAN, std=STD, crop_pct=crop)
    difference = (ours - timms(Image.fromarray(array))) * torch.tensor(STD)[:, None, None] * 255
    assert difference.abs().mean() < 0.25


def test_scale_covers_a_non_square_size_and_keeps_the_centre():
    array = picture(60, 60)
    prepare = Prepare((40, 80), **RAW)
    assert prepare.resized(60, 60) == [80, 80]
    pil = np.asarray(Image.fromarray(array).resize((80, 80), Image.BICUBIC), dtype=np.float32)[20:60]
    assert (prepare(tensor(array)) * 255 - tensor(pil)).abs().mean() < 0.25


@pytest.mark.parametrize(("h", "w"), [(64, 64), (50, 90), (120, 70)])
def test_canvas_equals_scale_at_the_training_size(h, w):
    image = tensor(picture(h, w))
    scale = Prepare((48, 64), MEAN, STD, 0.9)(image)
    canvas = Prepare((48, 64), MEAN, STD, 0.9, protocol="canvas", base_size=(48, 64))(image)
    assert torch.equal(scale, canvas)


def test_canvas_keeps_pixels_shows_more_content_and_pads_with_the_mean():
    image = tensor(picture(64, 128))
    base = Prepare((64, 64), MEAN, STD)(image)
    wide = Prepare((96, 96), MEAN, STD, protocol="canvas", base_size=(64, 64))(image)
    assert torch.equal(wide[:, 16:80, 16:80], base)  # same pixels, in the middle
    assert (wide[:, 16:80, :16] != 0).float().mean() > 0.9  # content that training cropped away
    assert (wide[:, :16] == 0).all() and (wide[:, 80:] == 0).all()  # 0 is the mean colour once normalised
    small = Prepare((32, 48), MEAN, STD, protocol="canvas", base_size=(64, 64))(image)
    assert torch.equal(small, base[:, 16:48, 8:56])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"interpolation": "lanczos"}, "unknown interpolation 'lanczos'; use one of bicubic, bilinear"),
        ({"protocol": "stretch"}, "unknown protocol 'stretch'; use 'scale' or 'canvas'"),
        ({"crop_pct": 0.0}, "0 < crop_pct <= 1, not 0.0"),
        ({"protocol": "canvas"}, "give base_size"),
    ],
)
def test_settings_are_checked(arguments, text):
    with pytest.raises(ValueError, match=text):
        Prepare((32, 32), MEAN, STD, **arguments)


def test_items_and_classes(root):
    train = Folder(root, "train", identity)
    assert train.classes == ["cat", "dog"] and len(train) == 6
    image, label = train[4]
    assert label == 1 and image.shape == (3, 24, 32)
    assert torch.equal(image, tensor(picture(24, 32, 1)))


def test_a_subset_is_drawn_by_the_seed(root):
    pick = [[p for p, _ in Folder(root, "train", identity, n=3, seed=s).samples] for s in (0, 0, 1)]
    assert pick[0] == pick[1] != pick[2] and len(set(pick[0])) == 3
    with pytest.raises(ValueError, match="holds 6 images, 7 were asked for"):
        Folder(root, "train", identity, n=7)


def test_missing_folders_say_which_layout_is_expected(tmp_path):
    with pytest.raises(ValueError, match=r"'shapes' or a folder laid out as .*/train/<class>/\*.jpg and .*/val/<class>"):
        folder_classes(tmp_path / "nowhere")


def test_an_empty_class_folder_is_named(root):
    for split in ("train", "val"):
        (root / split / "bird").mkdir()
    with pytest.raises(ValueError, match=r"class folders without images in .*train: bird"):
        Folder(root, "train", identity)


def test_other_classes_in_val_are_named(root):
    (root / "val" / "cat").rename(root / "val" / "cow")
    with pytest.raises(ValueError, match=r"shift the labels: missing \['cat'\], extra \['cow'\]"):
        Folder(root, "val", identity)


def test_val_alone_is_enough_to_evaluate(root):
    (root / "train").rename(root / "elsewhere")
    assert Folder(root, "val", identity).classes == ["cat", "dog"]


@pytest.mark.parametrize("fault", ["truncated", "empty", "html"])
def test_an_undecodable_file_is_named(tmp_path, fault):
    path = tmp_path / "bad.jpg"
    Image.fromarray(picture(64, 64)).save(path)
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "html": b"<html>not found</html>"}[fault])
    with pytest.raises(ValueError, match=r"cannot decode .*bad.jpg: "):
        decode(path)
