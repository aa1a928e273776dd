"""Folders of class folders: which files count, in which order and under which class, and what is left out, told or refused."""

import os
import pickle
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from helpers.pictures import identity, picture, tensor
from vitrel.data import BadImage, Draw, ImageSet, Prepare, Reading
from vitrel.data.readers.folder import folder_classes, folder_reader

MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
LEAVE_OUT = Reading(on_bad="leave_out")
NO_TEXT = os.fsdecode(b"caf\xe9")
ORDINARY = [(f"{name}/{i}.png", label) for label, name in enumerate(("cat", "dog")) for i in range(3)]


def opened(root, split="train", prepare=identity, augment=None, reading=Reading(), **options):
    return ImageSet(folder_reader(str(root), split, reading), prepare, augment, reading=reading, **options)


def plain(size=(24, 32)):
    return Prepare(size, (0.0,) * 3, (1.0,) * 3)


def save(path, seed=0, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(24, 32, seed)).save(path, **how)


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def names(data):
    """Paths below the split, and labels."""
    return [(path.split("/train/")[1], label) for path, label in data.samples]


@pytest.fixture
def root(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for name, i in product(("cat", "dog"), range(count)):
            save(tmp_path / split / name / f"{i}.png", i)
    return tmp_path


@pytest.fixture
def damaged(root):
    """The same folder; of its training images 0 to 5, number 1 is empty and 2 is cut off."""
    files = sorted((root / "train" / "cat").iterdir())
    files[1].write_bytes(b"")
    files[2].write_bytes(files[2].read_bytes()[:200])
    return root


def test_contents_are_told_wherever_the_folder_lies(root):
    """By path below the split, class and deeper folders included, with the label."""
    (root / "train" / "dog" / "more").mkdir()
    (root / "train" / "dog" / "1.png").rename(root / "train" / "dog" / "more" / "1.png")
    found = opened(root)
    prints = found.fingerprints()
    assert found.names() == ["cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/2.png", "dog/more/1.png"]
    (root / "a").mkdir()
    (root / "train").rename(root / "a" / "train")
    moved = opened(f"{root}/a/")
    assert moved.names() == found.names() and moved.fingerprints() == prints
    assert len(set(opened(root / "a", n=2).names()) & set(found.names())) == 2


def test_items_and_classes(root):
    (root / "train" / "cat" / "0.png").unlink()
    data = opened(root)
    assert data.classes == ["cat", "dog"] and data.labels() == [0, 0, 1, 1, 1] and sum(1 for _ in data) == 5
    image, label = data[3]
    assert label == 1 and torch.equal(image, tensor(picture(24, 32, 1)))
    with pytest.raises(IndexError, match="index -1 of 5 images"):
        data[-1]
    (root / "train").rename(root / "elsewhere")  # the others are enough to evaluate
    assert opened(root, "val").classes == ["cat", "dog"]


def test_a_subset_is_drawn_by_the_seed(root):
    pick = [[p for p, _ in opened(root, n=3, seed=s).samples] for s in (0, 0, 1)]
    assert pick[0] == pick[1] != pick[2] and len(set(pick[0])) == 3 == len(opened(root, n=3).labels())
    with pytest.raises(ValueError, match=r"holds 6 images: .* not 7"):
        opened(root, n=7)


def in_both(act):
    return lambda root: [act(root / split) for split in ("train", "val")]


REFUSED = {
    "an empty class": (in_both(lambda split: (split / "bird").mkdir()), r"folders without images: .*train/bird; add"),
    "other classes": (
        lambda root: (root / "val" / "cat").rename(root / "val" / "cow"),
        r"shift the labels: missing \['cat'\], extra \['cow'\]",
    ),
    "one class twice": (
        in_both(lambda split: link(split / "kitten", "cat")),
        r"without images: .*train/kitten; .*links to images already used.*another class",
    ),
    "a link to nothing": (
        in_both(lambda split: link(split / "emu", "nowhere")),
        r"broken links among the class folders: .*train/emu; repair or remove",
    ),
    "a link to itself": (in_both(lambda split: link(split / "emu", "emu")), r"broken links among the class folders: .*/emu"),
    "a name that is no text": (
        in_both(lambda split: save(split / NO_TEXT / "0.png")),
        r"not valid UTF-8, rename them: .*caf\\xe9$",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_folders_without_the_layout_are_refused(root, fault):
    make, text = REFUSED[fault]
    make(root)
    with pytest.raises(ValueError, match=text):
        opened(root)


def test_missing_folders_say_which_layout_is_expected(tmp_path):
    with pytest.raises(ValueError, match=r"'shapes', a folder with the layout .*/train/<class>/\*.jpg and .*/val/<class>"):
        folder_classes(tmp_path / "nowhere")


def test_an_unreadable_image_stops_by_default(damaged):
    data = opened(damaged, prepare=plain())
    for _ in range(2):
        data[0]
        with pytest.raises(BadImage, match=r"cannot decode .*train/cat/1.png: the file is empty; repair or remove it"):
            data[1]
    assert data.bad_indices() == []


def test_an_unreadable_image_can_be_left_out(damaged):
    """Also by loader processes, which report what they could not read."""
    data = opened(damaged, prepare=plain(), reading=LEAVE_OUT)
    for index, size in ((1, (24, 32)), (Draw(2, (8, 40)), (8, 40))):
        image, label = data[index]
        assert label == -1 and image.shape == (3, *size) and not image.any()
    assert data.bad_indices() == [1, 2]
    data = opened(damaged, prepare=Prepare((24, 32), MEAN, None), reading=LEAVE_OUT)
    assert torch.cat([label for _, label in DataLoader(data, 3, num_workers=2)]).tolist() == [0, -1, -1, 1, 1, 1]
    assert data.bad_indices() == [1, 2]


def test_sizes_from_headers_are_those_of_the_decoded_images(root):
    """Without a quarter turn by EXIF; an unreadable header stops, or counts as square."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (25, 40)).save(root / "train" / "dog" / "9.jpg", exif=exif)
    data = opened(root)
    assert data.image_sizes() == [(24, 32)] * 6 + [(40, 25)] == [data.read(i)[0].size[::-1] for i in range(7)]
    (root / "train" / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match=r"cannot decode .*1\.png: not a JPEG"):
        opened(root).image_sizes()
    assert opened(root, reading=LEAVE_OUT).image_sizes()[:3] == [(24, 32), (1, 1), (24, 32)]


def test_a_folder_that_is_gone_is_no_bad_image(root):
    data = opened(root, prepare=plain(), reading=LEAVE_OUT)
    (root / "train").rename(root / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"/train is gone, with the images in it: .*no longer mounted"):
        data[1]
    assert data.bad_indices() == []


def test_the_draw_seeds_the_augmentation(root):
    requested = []

    def augment(image, *given):
        requested.append(given)
        return image

    data = opened(root, prepare=plain(), augment=augment)
    data.set_epoch(7)
    data[1], data[Draw(1, (16, 48), 2)], data[np.int64(4)]
    assert requested == [(7, 1, 0, None), (7, 1, 2, (16, 48)), (7, 4, 0, None)]


def test_a_draw_is_prepared_at_its_size(root):
    how = {"mean": MEAN, "std": STD, "crop_pct": 0.9, "interpolation": "bilinear"}
    small, large = (opened(root, "val", Prepare(size, **how)) for size in ((16, 24), (40, 32)))
    assert torch.equal(small[Draw(3, (40, 32))][0], large[3][0])
    assert torch.equal(small[Draw(3)][0], small[3][0])
    canvas = {"protocol": "canvas", "base_size": (16, 24), "crop_mode": "squash"}
    image = tensor(picture(24, 32))
    assert torch.equal(Prepare((16, 24), **how, **canvas).at((32, 48))(image), Prepare((32, 48), **how, **canvas)(image))


@pytest.mark.filterwarnings("error")
def test_the_order_is_that_of_torchvision_and_nothing_is_told_of_an_ordinary_folder(root):
    for name in ("cat/b/10.jpg", "cat/b/2.jpg", "cat/b-c/0.jpg", "cat/b/d/x.JPEG", "cat/A.jpeg", "dog/deeper/1.png"):
        save(root / "train" / name)
    save(root / "train" / "dog" / "w.webp")
    by_torchvision = ImageFolder(str(root / "train")).samples
    assert opened(root).samples == by_torchvision and len(by_torchvision) == 13


@pytest.mark.parametrize("follow", [False, True])
def test_links_that_are_followed_give_each_file_once_under_its_own_class(root, tmp_path_factory, follow):
    store = tmp_path_factory.mktemp("store")
    save(store / "more" / "sub" / "7.png")
    link(store / "more" / "back", store)  # a loop outside
    link(root / "train" / "dog" / "more", store / "more")
    link(root / "train" / "dog" / "again", store / "more")
    link(root / "train" / "dog" / "up", "..")
    link(root / "train" / "cat" / "up", "..")
    with pytest.warns(UserWarning, match="left out of") as reported:
        data = opened(root, reading=Reading(follow_links=follow))
    assert sorted(names(data)) == sorted([*ORDINARY, *[("dog/again/sub/7.png", 1)] * follow])
    text = str(reported[0].message)
    assert ("links to folders: 4 (" in text) == ("follow_links" in text) == (not follow) and ("already used" in text) == follow


def test_class_folders_and_images_may_be_links(root, tmp_path_factory):
    """Sets assembled from others by links alone read as if they were copied, from the same paths."""
    other, before = tmp_path_factory.mktemp("assembled"), opened(root)
    link(other / "train" / "cat", root / "train" / "cat")
    for i in range(3):
        link(other / "train" / "dog" / f"{i}.png", root / "train" / "dog" / f"{i}.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = opened(other)
    assert names(data) == names(before) and all(path.startswith(str(other)) for path, _ in data.samples)
    assert torch.equal(data[4][0], before[4][0])
    link(other / "again", other / "train")
    assert names(opened(link(tmp_path_factory.mktemp("root") / "root", other))) == ORDINARY


def test_one_file_counts_once_whatever_links_lead_to_it(root, tmp_path_factory):
    store, train = tmp_path_factory.mktemp("store"), root / "train"
    save(store / "7.png")
    link(store / "to 7.png", "7.png")
    link(train / "cat" / "0 is dog 1.png", "../dog/1.png")  # sorts before the file itself, which counts
    link(train / "dog" / "x.png", store / "7.png")
    link(train / "dog" / "y.png", store / "to 7.png")
    link(train / "dog" / "z.png", train.resolve() / ".." / "train" / "dog" / "x.png")
    text = r"already used: 3 .* 1 of them in another class, such as .*0 is dog 1.png is .*dog/1.png"
    with pytest.warns(UserWarning, match=text):
        data = opened(root)
    assert names(data) == [*ORDINARY, ("dog/x.png", 1)]
    os.link(train / "cat" / "0.png", train / "cat" / "9.png")  # as a copy is, which it may be to save room
    assert len(opened(root)) == 8


def test_loops_of_links_are_unreadable_images_or_left_out_or_refused(root):
    train = root / "train"
    link(train / "cat" / "a.png", "b.png")
    link(train / "cat" / "b.png", "a.png")
    link(train / "cat" / "gone.png", "nowhere.png")
    link(train / "cat" / "round", "round")
    with pytest.warns(UserWarning, match=r"broken link \(not decoded\): 1 \(.*cat/round\)"):
        data = opened(root, prepare=plain(), reading=LEAVE_OUT)
    assert [label for _, label in data] == [0, 0, 0, -1, -1, -1, 1, 1, 1]
    assert [data.name(i).split("train/")[1] for i in data.bad_indices()] == ["cat/a.png", "cat/b.png", "cat/gone.png"]
    with pytest.raises(ValueError, match=r"cannot be read, .*cat/round \(a broken link\)"):
        opened(root, reading=Reading(follow_links=True))


def test_folders_that_may_not_be_read_are_refused_and_all_named(root, monkeypatch):
    """What the system says of them; tests may run as root, who may read all."""
    original, closed = os.scandir, set()

    def scandir(path):
        if str(path) in closed:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for name in ("cat/more", "dog/a/b"):
        save(root / "train" / name / "7.png")
        closed.add(str(root / "train" / name))
    with pytest.raises(ValueError, match=r"cannot be read, .*cat/more \(Permission denied\), .*dog/a/b \(Permission"):
        opened(root)
    closed.add(str(root / "val"))
    with pytest.raises(ValueError, match=r"/val cannot be read \(Permission denied\)"):
        folder_classes(root)


def test_every_kind_that_is_decoded_is_read_and_others_are_told_by_kind_once(root):
    train = root / "train"
    for i, kind in enumerate(("gif", "BMP", "webp", "jpe", "jfif", "apng", "tif", "TIFF")):
        save(train / "cat" / f"x{i}.{kind}", i)
    for name in ("a.heic", "b.HEIC", "c.raw", "README", "LICENSE"):
        (train / "dog" / name).write_bytes(b"?")
    os.mkfifo(train / "dog" / "pipe.jpg")  # reading one waits for ever
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        data = opened(root, prepare=plain())
        again = pickle.loads(pickle.dumps(data))  # as to a loader process
        opened(root, prepare=plain((8, 8)))
    assert len(data) == len(again) == 14 and all(label >= 0 for _, label in data)
    [text] = [str(one.message) for one in reported]
    assert ".heic (not decoded): 2 (" in text and "dog/a.heic," in text and "no suffix (not decoded): 2 (" in text
    assert ".raw (not decoded): 1 (" in text and ".jpg (not decoded): 1 (" in text


HIDDEN = (".thumbs/0.png", "__MACOSX/0.png", "@eaDir/0.png", "cat/.trash/0.png", "dog/._0.png", "cat/Thumbs.db", ".DS_Store")


def test_hidden_files_and_folders_are_no_classes_and_no_images_and_are_counted(root):
    for name in HIDDEN:
        save(root / "train" / name, format="PNG")
    link(root / "train" / ".gone", "nowhere")
    assert folder_classes(root) == folder_classes(root, "val") == ["cat", "dog"]
    with pytest.warns(UserWarning, match=r"train: hidden files and folders: 8 \(.*train/.DS_Store, .*train/.gone, "):
        data = opened(root)
    assert names(data) == ORDINARY


@pytest.mark.filterwarnings("error")
def test_of_several_processes_that_share_the_work_the_first_tells(root, monkeypatch):
    (root / "train" / "dog" / "a.heic").write_bytes(b"?")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    opened(root)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    with pytest.raises(UserWarning, match="not decoded"):
        opened(root)


def test_an_image_whose_name_is_no_utf8_is_an_image_like_any_other(root):
    folder = root / "train" / "cat"
    save(folder / f"{NO_TEXT}.png", 5, format="PNG")
    (folder / f"{NO_TEXT} cut.jpg").write_bytes(b"")
    data = opened(root, prepare=plain(), reading=LEAVE_OUT)
    assert [label for _, label in data] == [0, 0, 0, -1, 0, 1, 1, 1] and data[4][0].any()
    assert data.name(4).encode().endswith(b"caf\\xe9.png") and data.name(0) == data.samples[0][0]
    with pytest.raises(BadImage, match=r"train/cat/caf\\xe9 cut.jpg: the file is empty"):
        opened(root, prepare=plain())[3]


def test_a_folder_without_evaluation_images_asks_for_a_share(root):
    (root / "val").rename(root.parent / "val")
    assert len(opened(root)) == 6
    with pytest.raises(ValueError, match=r"/train has no evaluation split .*--val-fraction"):
        opened(root, "val")
    assert len(opened(root, "val", reading=Reading(val_fraction=0.3))) == 2
