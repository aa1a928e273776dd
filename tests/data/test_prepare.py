"""Preprocessing for evaluation: timm's pixels in every crop mode, and what the protocols make of them at other sizes."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import _registry

from helpers import each
from helpers.pictures import picture, tensor
from vitrel.data import Augmentation, Prepare, collate, normalize
from vitrel.data.augment import Augmenter
from vitrel.data.prepare import as_tensor

MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
RAW = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
MODES = ("center", "squash", "border")


def both(array, input_size, crop_pct, crop_mode, interpolation, mean, normalize):
    """An image prepared by timm's transform and by ours; without normalize as uint8."""
    options = dict(crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation, mean=mean, std=STD)
    theirs = timm.data.create_transform(input_size, is_training=False, normalize=normalize, **options)(Image.fromarray(array))
    prepare = Prepare(input_size[1:], **options)
    return theirs, prepare(tensor(array)) if normalize else as_tensor(prepare.cropped(tensor(array)))


@each(("h", "w"), [(30, 60), (90, 45), (48, 47), (64, 64)])
@each("crop_pct", [0.875, 1.0, 1.15])
@each("crop_mode", MODES)
def test_pixels_are_those_of_timm(crop_mode, crop_pct, h, w):
    for size in ((3, 56, 56), (3, 64, 40)):
        for interpolation in ("bicubic", "bilinear"):
            torch.testing.assert_close(*both(picture(h, w), size, crop_pct, crop_mode, interpolation, MEAN, normalize=True))


@pytest.mark.slow
def test_pixels_are_those_of_timm_for_every_model_of_its_registry():
    """Of models that differ in size alone, for the smallest."""
    names, smallest = ("input_size", "crop_pct", "crop_mode", "interpolation", "mean"), {}
    for cfg in sorted(tuple(getattr(cfg, name) for name in names) for cfg in _registry._model_pretrained_cfgs.values()):
        smallest.setdefault(cfg[1:], cfg)
    assert len(smallest) > 30 and {cfg[2] for cfg in smallest.values()} == {*MODES}
    array = picture(100, 200)  # other shapes: the test before
    assert [cfg for cfg in smallest.values() if not torch.equal(*both(array, *cfg, normalize=False))] == []


def test_what_a_crop_mode_shows():
    """A bright frame along the border of a wide image: cropped away at its ends, squashed, or whole between borders."""
    frame = torch.full((3, 40, 80), 255, dtype=torch.uint8)
    frame[:, 4:-4, 4:-4] = 0
    center, squash, border = (as_tensor(Prepare((40, 40), MEAN, STD, crop_mode=mode).cropped(frame))[0] for mode in MODES)
    assert torch.equal(center, frame[0, :, 20:60])
    assert (squash[:4] > 200).all() and (squash[8:32, :2] > 200).all() and (squash[8:32, 4:-4] < 50).all()
    assert (border[:10] == 128).all() and (border[30:] == 128).all() and (border[10:30, 0] > 200).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("protocol", ["scale", "canvas"])
def test_a_square_image_at_its_own_size_is_untouched(protocol, mode):
    array = picture(96, 96)
    out = Prepare((96, 96), MEAN, STD, protocol=protocol, base_size=(96, 96), crop_mode=mode)(tensor(array))
    expected = (array / 255 - MEAN) / STD
    torch.testing.assert_close(out, torch.from_numpy(expected).permute(2, 0, 1).float())


def test_scale_covers_a_non_square_size_and_keeps_the_center():
    array = picture(60, 60)
    pil = np.asarray(Image.fromarray(array).resize((80, 80), Image.BICUBIC), dtype=np.float32)[20:60]
    assert torch.equal((Prepare((40, 80), **RAW)(tensor(array)) * 255).round(), tensor(pil))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("h", "w"), [(64, 64), (50, 90), (120, 70)])
def test_canvas_equals_scale_at_the_training_size(h, w, mode):
    image = tensor(picture(h, w))
    for crop_pct in (0.9, 1.15):
        scale = Prepare((48, 64), MEAN, STD, crop_pct, crop_mode=mode)(image)
        canvas = Prepare((48, 64), MEAN, STD, crop_pct, protocol="canvas", base_size=(48, 64), crop_mode=mode)(image)
        assert torch.equal(scale, canvas)


def test_canvas_keeps_pixels_shows_more_content_and_pads_with_the_mean():
    image = tensor(picture(64, 128))
    base = Prepare((64, 64), MEAN, STD)(image)
    wide = Prepare((96, 96), MEAN, STD, protocol="canvas", base_size=(64, 64))(image)
    assert torch.equal(wide[:, 16:80, 16:80], base)  # same pixels, in the middle
    assert (wide[:, 16:80, :16] != 0).float().mean() > 0.9  # content that training cropped away
    assert (wide[:, :16] == 0).all() and (wide[:, 80:] == 0).all()  # 0 is the mean color once normalized
    small = Prepare((32, 48), MEAN, STD, protocol="canvas", base_size=(64, 64))(image)
    assert torch.equal(small, base[:, 16:48, 8:56])


@pytest.mark.parametrize("mode", ["squash", "border"])
def test_canvas_pads_what_shows_the_whole_image_already(mode):
    """Objects keep the size and shape of training; there is no content beyond that view."""
    image, canvas = tensor(picture(64, 128)), {"protocol": "canvas", "base_size": (64, 64), "crop_mode": mode}
    base = Prepare((64, 64), MEAN, STD, crop_mode=mode)(image)
    wide, small = (Prepare(size, MEAN, STD, **canvas)(image) for size in ((80, 96), (32, 48)))
    assert torch.equal(wide[:, 8:72, 16:80], base) and torch.equal(small, base[:, 16:48, 8:56])
    wide[:, 8:72, 16:80] = 0
    assert not wide.any()
    cut = Prepare((72, 64), MEAN, STD, 0.5, **canvas)(image)  # of a smaller view, more is shown
    assert (cut[:, :4] != 0).any() == (mode == "squash")


@pytest.mark.parametrize("mode", MODES)
def test_native_shows_the_whole_image_in_every_crop_mode(mode):
    image = tensor(picture(60, 100))
    native = {"protocol": "native", "crop_pct": 0.5, "crop_mode": mode}
    pil = np.array(Image.fromarray(picture(60, 100)).resize((40, 24), Image.BICUBIC))
    assert torch.equal((Prepare((8, 8), **RAW, **native).at((24, 40))(image) * 255).round(), tensor(pil).float())


@pytest.mark.parametrize("mode", MODES)
def test_the_center_crop_of_training_is_the_view_of_evaluation(mode):
    image, plain = tensor(picture(60, 100)), Augmentation(crop="center", flip=False, jitter=0.0)
    half = (0.5,) * 3
    augmented = Augmenter(plain, (32, 48), half, crop_pct=0.875, crop_mode=mode)(image, 0, 0)
    assert torch.equal(augmented, Prepare((32, 48), half, None, 0.875, crop_mode=mode)(image))


@each(
    ("arguments", "text"),
    [
        ({"interpolation": "lanczos"}, "unknown interpolation 'lanczos'; use one of bicubic, bilinear"),
        ({"protocol": "stretch"}, "unknown protocol 'stretch'; use one of scale, canvas, native"),
        ({"crop_mode": "stretch"}, "unknown crop_mode 'stretch'; use one of center, squash, border"),
        ({"crop_pct": 0.0}, "crop_pct must be above 0 .* not 0.0"),
        ({"protocol": "canvas"}, "give base_size"),
        ({"protocol": "canvas", "base_size": (32, 32), "std": None}, "give std"),
    ],
)
def test_settings_are_checked(arguments, text):
    with pytest.raises(ValueError, match=text):
        Prepare((32, 32), MEAN, **{"std": STD} | arguments)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_normalized_later_are_the_normalized_image(mode):
    images = [tensor(picture(60, 100, seed)) for seed in range(3)]
    left, whole = (Prepare((40, 32), MEAN, std, 0.875, crop_mode=mode) for std in (None, STD))
    batch, labels = collate([(left(image), 7) for image in images])
    assert batch.dtype == torch.uint8 and batch.is_contiguous(memory_format=torch.channels_last) and labels.tolist() == [7] * 3
    assert torch.equal(normalize(batch, torch.tensor(MEAN), torch.tensor(STD)), torch.stack([whole(image) for image in images]))
