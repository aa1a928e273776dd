import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vitrel.data import BadImage, Draw, Folder, Prepare, Reading, folder_classes

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


def test_contents_are_told_wherever_the_folder_lies(root):
    """By path below the split, class and deeper folders included, with the label."""
    (root / "train" / "dog" / "more").mkdir()
    (root / "train" / "dog" / "1.png").rename(root / "train" / "dog" / "more" / "1.png")
    found = Folder(root, "train", identity).contents()
    assert found == ["cat/0.png\t0", "cat/1.png\t0", "cat/2.png\t0", "dog/0.png\t1", "dog/2.png\t1", "dog/more/1.png\t1"]
    (root / "a").mkdir()
    (root / "train").rename(root / "a" / "train")
    assert Folder(f"{root}/a/", "train", identity).contents() == found
    assert len(set(Folder(root / "a", "train", identity, n=2).contents()) & set(found)) == 2


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


def test_an_empty_folder_of_one_split_is_called_empty(root):
    (root / "train" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"missing \['zebra'\], .* these folders are empty, remove them: .*train/zebra"):
        Folder(root, "val", identity)


def test_other_classes_in_val_are_named(root):
    (root / "val" / "cat").rename(root / "val" / "cow")
    with pytest.raises(ValueError, match=r"shift the labels: missing \['cat'\], extra \['cow'\]"):
        Folder(root, "val", identity)


def test_val_alone_is_enough_to_evaluate(root):
    (root / "train").rename(root / "elsewhere")
    assert Folder(root, "val", identity).classes == ["cat", "dog"]


@pytest.fixture
def damaged(root):
    """The same folder; of its training images 0 to 5, number 1 is empty and 2 is cut off."""
    files = sorted((root / "train" / "cat").iterdir())
    files[1].write_bytes(b"")
    files[2].write_bytes(files[2].read_bytes()[:200])
    return root


def plain(size=(24, 32)):
    return Prepare(size, **RAW)


def test_an_unreadable_image_stops_by_default(damaged):
    data = Folder(damaged, "train", plain())
    data[0]
    with pytest.raises(BadImage, match=r"cannot decode .*train/cat/1.png: the file is empty; repair or remove it"):
        data[1]
    assert data.bad_indices() == []


def test_an_unreadable_image_is_replaced_by_the_next_with_its_label(damaged):
    data = Folder(damaged, "train", plain(), reading=Reading(on_bad="replace"))
    image, label = data[1]
    assert label == 1 and torch.equal(image, data[3][0])  # over number 2 and into the next class
    assert data.bad_indices() == [1, 2]
    assert [data.name(i).split("train")[1] for i in data.bad_indices()] == ["/cat/1.png", "/cat/2.png"]
    (damaged / "train" / "dog" / "2.png").write_bytes(b"")
    assert torch.equal(data[5][0], data[0][0])  # the last is followed by the first


def test_a_replaced_image_is_augmented_as_the_one_asked_for(damaged):
    asked = []

    def augment(image, epoch, index, repeat, size):
        asked.append((epoch, index, repeat, size))
        return image

    data = Folder(damaged, "train", plain(), augment, reading=Reading(on_bad="replace"))
    data.set_epoch(7)
    data[1], data[Draw(1, (16, 48), 2)], data[np.int64(4)]
    assert asked == [(7, 1, 0, None), (7, 1, 2, (16, 48)), (7, 4, 0, None)]


def test_too_many_in_a_row_stop(damaged):
    data = Folder(damaged, "train", plain(), reading=Reading(on_bad="replace", bad_limit=2))
    with pytest.raises(BadImage, match=r"2 images in a row cannot be read, .* the last: cannot decode .*2.png"):
        data[1]
    assert data[2][1] == 1


def test_evaluation_can_leave_an_unreadable_image_out(damaged):
    data = Folder(damaged, "train", plain(), reading=Reading(on_bad="leave_out"))
    for index, size in ((1, (24, 32)), (Draw(2, (8, 40)), (8, 40))):
        image, label = data[index]
        assert label == -1 and image.shape == (3, *size) and not image.any()
    assert [data[i][1] for i in range(6)] == [0, -1, -1, 1, 1, 1]
    assert data.bad_indices() == [1, 2]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_processes_report_what_they_could_not_read(damaged, start):
    data = Folder(damaged, "train", plain(), reading=Reading(on_bad="replace"))
    loader = DataLoader(data, num_workers=2, multiprocessing_context=start)
    assert [label.item() for _, label in loader] == [0, 1, 1, 1, 1, 1]
    assert data.bad_indices() == [1, 2]


def test_a_large_image_is_refused_by_the_reading(root):
    data = Folder(root, "train", plain(), reading=Reading(max_pixels=700))
    with pytest.raises(BadImage, match=r"train/cat/0.png has 24x32 \(H x W\) pixels, more than max_pixels=700"):
        data[0]


def test_a_draw_is_prepared_at_its_size(root):
    how = {"mean": MEAN, "std": STD, "crop_pct": 0.9, "interpolation": "bilinear"}
    small, large = (Folder(root, "val", Prepare(size, **how)) for size in ((16, 24), (40, 32)))
    assert torch.equal(small[Draw(3, (40, 32))][0], large[3][0])
    assert torch.equal(small[Draw(3)][0], small[3][0])
    canvas = Prepare((16, 24), **how, protocol="canvas", base_size=(16, 24)).at((32, 48))
    assert canvas.cover == (17, 26) and canvas.size == (32, 48)


def test_counts_and_the_end(root):
    (root / "train" / "cat" / "0.png").unlink()
    data = Folder(root, "train", plain())
    assert data.class_counts() == [2, 3] and sum(1 for _ in data) == 5
    assert sum(Folder(root, "train", plain(), n=4).class_counts()) == 4
    with pytest.raises(IndexError, match="index -1 of 5 images"):
        data[-1]
