"""Segmentation as a task of an evaluation: metrics by hand, masks at their own resolution, protocols, rows, the page."""

import math
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import interpolate
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index
from torchvision.transforms.functional import InterpolationMode, resize

from helpers import each
from vitrel.data import create_dataset
from vitrel.data.readers.decode import IGNORED
from vitrel.evaluate import at_sizes
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.folder import columns_of, read_folder
from vitrel.evaluate.predict import SlidingWindow, window_places
from vitrel.evaluate.statistics import estimate
from vitrel.models.segmenter import Segmenter
from vitrel.tasks import Kept
from vitrel.tasks.segmentation import TASK, Mask, predicted_classes

CLASSES = ["dark", "red", "green"]
COLORS = np.array([(20, 20, 20), (220, 30, 30), (30, 220, 30)], np.uint8)
HOW = {"device": "cpu", "report": False}


class ByColor(nn.Module):
    """A perfect segmenter of pixels: the logit of a class falls with the distance of a pixel's color from the class's."""

    num_classes = 3

    def __init__(self, backbone=None):
        super().__init__()
        self.colors = nn.Parameter(torch.tensor(COLORS / 255.0 * 2 - 1, dtype=torch.float32))
        if backbone is not None:
            self.backbone = backbone

    def forward(self, pixels):
        logits = -(pixels[:, None] - self.colors[:, :, None, None]).square().sum(2)
        if hasattr(self, "backbone"):  # position takes part
            tokens = self.backbone.forward_features(pixels)
            tokens = tokens[:, -math.prod(self.backbone.token_grid(pixels.shape[-2:])[:2]) :].mean((1, 2))
            logits = logits + 1e-3 * tokens[:, None, None, None]
        return logits


def segmenter(img_size=(32, 48), label="by color", backbone=None, **changes):
    preprocessing = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}
    made = trained_model(ByColor(backbone), label, img_size=img_size, preprocessing=preprocessing, task="segmentation")
    return replace(made, seed=0, **changes)


def vitrel_segmenter(key="table"):
    torch.manual_seed(0)
    backbone = timm.create_model(f"vitrel_vit_n8_{key}", img_size=(32, 48), num_classes=3, depth=1).eval()
    return segmenter(label=key, backbone=backbone)


@pytest.fixture
def folder(tmp_path):
    """Five images of 32 x 48 px (one of 64 x 96) in blocks of 8 px, with their masks; some pixels are ignored."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        for split in ("train", "val"):
            (tmp_path / "data" / kind / split).mkdir(parents=True)
    for index in range(5):
        classes = rng.integers(0, 3, (4, 6)).repeat(8, 0).repeat(8, 1)
        if index == 4:
            classes = classes.repeat(2, 0).repeat(2, 1)
        for split in ("train", "val"):
            Image.fromarray(COLORS[classes]).save(tmp_path / "data" / "images" / split / f"{index}.png")
            mask = classes.astype(np.uint8)
            mask[:3, :5] = IGNORED
            Image.fromarray(mask).save(tmp_path / "data" / "masks" / split / f"{index}.png")
    (tmp_path / "data" / "classes.txt").write_text("\n".join(CLASSES))
    return tmp_path / "data"


def kept_of(masks, guesses, count=3):
    """What is kept of masks and guessed classes of one size [h, w] each."""
    logits = torch.stack(
        [torch.nn.functional.one_hot(torch.tensor(guess), count).permute(2, 0, 1).float() for guess in guesses]
    )
    targets = [Mask(np.array(mask, np.uint8), 0, 0, *logits.shape[-2:]) for mask in masks]
    arrays = {name: np.asarray(value) for name, value in TASK.keep(logits, targets, range(count)).items()}
    return Kept(arrays, np.ones(len(masks), bool))


def test_metrics_are_those_computed_by_hand():
    masks = [[[0, 0, 1], [1, 255, 0]], [[0, 1, 1], [255, 1, 1]]]
    guesses = [[[0, 1, 1], [1, 2, 0]], [[0, 0, 1], [1, 1, 1]]]
    # class 0: 4 pixels, 4 predicted so, 3 of both: 3 / 5; class 1: 6, 6 and 5: 5 / 7; class 2 does not occur
    row = TASK.score(kept_of(masks, guesses))
    assert row["miou"] == pytest.approx(100 * (3 / 5 + 5 / 7) / 2, abs=1e-4)
    assert row["pixel_accuracy"] == pytest.approx(80.0) and row["outside"] == 0
    assert row["class_accuracy"] == pytest.approx(100 * (3 / 4 + 5 / 6) / 2, abs=1e-4)
    assert row["majority"] == pytest.approx(100 * 6 / 10 / 2)
    union, both = TASK.by_class(kept_of(masks, guesses), 3)
    assert (union.sum(0).tolist(), both.sum(0).tolist()) == ([5, 7, 0], [3, 5, 0]) and union.shape == (2, 3)


def test_metrics_agree_with_torchmetrics_and_scores_have_them_as_their_mean():
    rng = np.random.default_rng(1)
    masks, guesses = rng.integers(0, 3, (2, 20, 6, 5))
    masks[rng.random(masks.shape) < 0.1] = IGNORED
    predicted = kept_of(masks, guesses)
    row, given = TASK.score(predicted), (torch.tensor(guesses), torch.tensor(masks), 3)
    assert row["miou"] == pytest.approx(100 * multiclass_jaccard_index(*given, ignore_index=IGNORED).item(), abs=1e-3)
    accuracy = multiclass_accuracy(*given, average="micro", ignore_index=IGNORED).item()
    assert row["pixel_accuracy"] == pytest.approx(100 * accuracy, abs=1e-3)
    for metric in ("miou", "pixel_accuracy"):
        assert 100 * TASK.scores(predicted, metric).mean() == pytest.approx(row[metric], abs=1e-3)


@pytest.mark.slow
def test_the_interval_of_miou_has_the_spread_of_other_images():
    """The linearized variance against that of mIoU over many draws of as many images."""
    rng, values, halves = np.random.default_rng(2), [], []
    for _ in range(40):
        masks = rng.integers(0, 3, (40, 4, 4))
        hard = rng.random((40, 1, 1))  # images differ in how many pixels are wrong
        guesses = np.where(rng.random(masks.shape) < 0.7 * hard, rng.integers(0, 3, masks.shape), masks)
        found = kept_of(masks, guesses)
        values.append(TASK.score(found)["miou"])
        halves.append(float(np.sqrt(estimate([TASK.scores(found, "miou")[None]]).variance)))
    assert np.mean(halves) == pytest.approx(np.std(values, ddof=1), rel=0.3)


def test_outputs_without_a_class_are_wrong():
    logits, mask = torch.zeros(1, 3, 2, 2), Mask(np.zeros((2, 2), np.uint8), 0, 0, 2, 2)
    logits[:, 2], logits[:, 1, 0] = 2.0, 1.0  # output 2 stands for no class of the data
    kept = TASK.keep(logits, [mask], (0, 1))
    assert [kept[name].tolist() for name in ("intersection", "truth", "guessed")] == [[[0, 0]], [[4, 0]], [[0, 0]]]
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        TASK.keep(logits * float("nan"), [mask], (0, 1))


@each("own", [(9, 14), (40, 21), (16, 24)])
def test_predictions_come_back_as_pytorch_and_torchvision_resize(own):
    torch.manual_seed(0)
    logits = torch.randn(3, 16, 24)
    best, shown = predicted_classes(logits, Mask(np.zeros(own, np.uint8), 0, 0, 16, 24), torch.arange(3))
    assert shown.all()
    assert torch.equal(best, interpolate(logits[None], own, mode="bilinear", align_corners=False)[0].argmax(0))
    assert torch.equal(best, resize(logits, [*own], InterpolationMode.BILINEAR, antialias=False).argmax(0))


def rows_of(models, folder, sizes, protocols, **how):
    return at_sizes(models, str(folder), sizes, protocols=protocols, **HOW | how).to_dict("records")


@each("size", [(48, 80), (16, 24), (40, 30)])
def test_on_a_canvas_every_pixel_is_compared_with_its_own(folder, size):
    """A segmenter of colors is perfect where images keep their size, whether the canvas adds a border or takes one away."""
    row = rows_of([segmenter()], folder, (size,), ("canvas",))[-1]
    shown = math.prod(min(side, own) / own for side, own in zip(size, (32, 48), strict=True))
    images = create_dataset(str(folder), "val", (32, 48), mean=(0.5,) * 3, std=(0.5,) * 3, task="segmentation")
    assert row["n"] == len(images) == 5
    assert row["miou"] > 99.0 and (row["outside"] > 0) == (shown < 1)


@pytest.mark.slow
def test_scale_and_native_show_whole_images_and_masks_stay_as_they_are(folder):
    rows = rows_of([vitrel_segmenter()], folder, ((64, 96), (8, 8)), ("scale", "native"), policies=("clip", "geometric"))
    assert {row["protocol"] for row in rows} == {"scale", "native"} and all(row["outside"] == 0 for row in rows)
    at = {(row["protocol"], row["img_size"], row["policy"]): row for row in rows}
    assert at["scale", "64x96", "geometric"]["resampled_values"] > 0 == at["scale", "64x96", "clip"]["resampled_values"]
    small = next(row for (protocol, size, _), row in at.items() if (protocol, size) == ("scale", "8x8"))
    assert at["scale", "64x96", "clip"]["miou"] > 95 > small["miou"]  # blocks of 8 px become 2 x 1.3 px
    assert all(row["task"] == "segmentation" for row in rows)
    assert set(rows[0]) == set(columns_of("segmentation")) and "top1" not in rows[0]


@pytest.mark.slow
def test_a_sliding_window_joins_windows_of_the_training_size_and_says_what_they_cost(folder):
    assert window_places((48, 80), (32, 48)) == [(top, left) for top in (0, 16) for left in (0, 24, 32)]
    assert window_places((32, 48), (32, 48)) == [(0, 0)]
    model = vitrel_segmenter()
    rows = rows_of([model], folder, ((48, 80), (16, 16)), ("canvas", "sliding"), policies=("clip",))
    at = {(row["protocol"], row["img_size"]): row for row in rows}
    assert at["sliding", "16x16"]["tokens"] == 24  # padded to one window
    assert at["sliding", "16x16"]["outside"] == at["canvas", "16x16"]["outside"] > 0
    assert at["sliding", "16x16"]["resampled"] == "nothing"
    assert at["sliding", "48x80"]["tokens"] == 6 * at["sliding", "32x48"]["tokens"] == 6 * 24
    assert at["sliding", "48x80"]["gflops"] == pytest.approx(6 * at["sliding", "32x48"]["gflops"], rel=1e-3)
    assert at["sliding", "48x80"]["resampled"] == "nothing" and at["canvas", "48x80"]["unseen"] > 0
    assert at["sliding", "48x80"]["miou"] == pytest.approx(at["canvas", "48x80"]["miou"], abs=1.0)
    assert at["sliding", "32x48"]["miou"] == at["canvas", "32x48"]["miou"]


@each("size", [(16, 24), (48, 24), (31, 47), (32, 48)])
def test_an_image_smaller_than_a_window_is_padded_around_its_middle(size):
    """Logits that are the pixels themselves come back in their places; the model sees nothing but windows."""
    seen = []

    class Echo(torch.nn.Module):
        def forward(self, pixels):
            seen.append(pixels)
            return pixels

    pixels = torch.randn(2, 3, *size)
    torch.testing.assert_close(SlidingWindow(Echo(), (32, 48))(pixels), pixels)
    assert {tuple(window.shape[-2:]) for window in seen} == {(32, 48)}
    (top, left), (h, w) = ([max(0, own - side) // 2 for own, side in zip((32, 48), size, strict=True)], size)
    assert torch.equal(seen[0][..., top : top + min(h, 32), left : left + w], pixels[..., :32, :])
    assert not seen[0][..., :top, :].any() and not seen[0][..., :left].any()  # the mean color


@pytest.mark.slow(seconds=3)
def test_a_timm_backbone_of_one_size_is_set_to_others_and_has_its_pictures(folder, tmp_path):
    torch.manual_seed(0)
    model = Segmenter(timm.create_model("test_vit", img_size=(32, 48), depth=1), 3).eval()
    assert model.img_size == (32, 48)
    preprocessing = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}
    trained = trained_model(model, "timm", preprocessing=preprocessing)
    out, sizes = tmp_path / "out", ((32, 48), (64, 64))
    rows = at_sizes([trained], str(folder), sizes, protocols=("canvas",), out=out, **HOW | {"report": True})
    assert rows.resampled_values.tolist() == [0, 2 * 3 * 64]
    page = (out / "report.html").read_text()
    for size in ("32x48", "64"):
        assert f"what position adds in timm at {size} px" in page and f"attention of timm at {size} px in the first" in page


def test_what_does_not_fit_the_task_is_refused_by_name(folder):
    plain = trained_model(timm.create_model("vitrel_vit_n8_none", num_classes=4).eval())
    with pytest.raises(ValueError, match="sliding protocol joins the outputs of windows pixel by pixel: it is for"):
        rows_of([plain], "shapes", ((32, 32),), ("sliding",))
    (folder / "classes.txt").write_text("\n".join([*CLASSES, "blue"]))
    four = replace(segmenter(), outputs={"dark": 0, "red": 1, "green": 2, "blue": 2})
    with pytest.raises(ValueError, match="models of classification and segmentation cannot share an evaluation"):
        rows_of([four, plain], folder, ((32, 32),), ("scale",))
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    with pytest.raises(ValueError, match="masks are not translated"):
        rows_of([segmenter()], folder, ((32, 48),), ("scale",), translations=(4,))
    with pytest.raises(ValueError, match="evaluates whole images: leave crop_pct out"):
        trained_model(ByColor(), preprocessing={"crop_pct": 0.9}, task="segmentation")
    (folder / "classes.txt").write_text("\n".join([*CLASSES, "blue"]))
    with pytest.raises(ValueError, match=r"3 outputs, but .* has 4 classes"):
        rows_of([segmenter()], folder, ((32, 48),), ("scale",))


def test_an_unreadable_image_is_left_out_and_counted(folder):
    (folder / "images" / "val" / "1.png").write_bytes(b"no image")
    [row] = rows_of([segmenter()], folder, ((32, 48),), ("scale",), on_bad_image="count")
    assert (row["n"], row["left_out"]) == (4, 1) and row["miou"] > 99


def test_a_data_set_in_memory_and_drawn_scenes(folder):
    class Pairs(torch.utils.data.Dataset):
        classes = CLASSES

        def __len__(self):
            return 2

        def __getitem__(self, index):
            path = folder / "images" / "val" / f"{index}.png"
            return Image.open(path), np.asarray(Image.open(folder / "masks" / "val" / path.name))

    frame = at_sizes(segmenter(), Pairs(), [(48, 80)], protocols=("canvas",), **HOW)
    assert frame["miou"].min() > 99 and frame["n"].tolist() == [2, 2]


class Constant(nn.Module):
    """Predicts class 0 everywhere."""

    num_classes = 6

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.eye(6)[0])

    def forward(self, pixels):
        return self.bias[None, :, None, None].expand(len(pixels), 6, *pixels.shape[-2:])


def test_drawn_scenes_are_drawn_for_every_size_with_masks_of_that_size():
    preprocessing = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    model = trained_model(Constant(), "constant", img_size=(64, 64), preprocessing=preprocessing, task="segmentation")
    how = HOW | {"n": 4, "protocols": ("scale", "canvas", "sliding")}
    frame = at_sizes(model, "shapes-dense", [(64, 96)], **how)
    assert frame["n"].tolist() == [4] * 6 and set(frame["outside"]) == {0.0}
    assert np.allclose(frame["miou"], frame["majority"])  # ground is the most frequent class
    by_place = frame.set_index(["protocol", "img_size"])["pixel_accuracy"]
    assert by_place["canvas", "64x96"] == by_place["sliding", "64x96"] != by_place["canvas", "64x64"]


@pytest.mark.slow
def test_a_folder_gives_back_what_paired_intervals_need(folder, tmp_path):
    frame = at_sizes(
        segmenter(), str(folder), [(64, 96), (16, 24)], protocols=("canvas", "sliding"), out=tmp_path / "out", **HOW
    )
    found = read_folder(tmp_path / "out")
    assert [row["miou"] for row in found.rows] == frame["miou"].tolist() and found.settings["classes"] == CLASSES
    for row in found.rows:
        assert 100 * found.scores[row["key"]].mean() == pytest.approx(row["miou"], abs=1e-3)
        union, both = found.by_class[row["key"]]
        assert 100 * (both.sum(0) / union.sum(0)).mean() == pytest.approx(row["miou"], abs=1e-3) and len(union) == 5
    assert "miou" in (tmp_path / "out" / "results.csv").read_text()
