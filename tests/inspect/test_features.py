"""Position in features, with planted truth: what is known of row and column, of shifts and of sizes is what is measured."""

import math

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from helpers import each
from vitrel.inspect.features import (
    agreement,
    measure_features,
    patch_features,
    position_leak,
    position_variance,
    resized,
    shuffled,
)


class Maps(nn.Module):
    """Patches of 4 pixels, with place(row, column) in [0, 1] beside the mean of their pixels, mixed by a rotation."""

    in_chans, img_size = 3, (32, 48)

    def __init__(self, place=None):
        super().__init__()
        self.place = place
        self.register_buffer("mix", torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))[0])

    def forward_features(self, image):
        x = nn.functional.avg_pool2d(image, 4)  # no padding: nothing here knows the border
        h, w = x.shape[2:]
        y, column = torch.meshgrid(*(torch.arange(n, device=x.device) / n for n in (h, w)), indexing="ij")
        place = x.new_zeros(2, h, w) if self.place is None else torch.stack(self.place(y, column))
        return torch.einsum("cd,bdhw->bchw", self.mix, torch.cat((x, place.expand(len(x), -1, -1, -1)), 1))

    forward = forward_features


def images(n=8, size=(64, 96)):
    return torch.randn(n, 3, *size, generator=torch.Generator().manual_seed(1))


def test_tokens_that_are_functions_of_row_and_column_leak_both():
    (row,) = measure_features(Maps(lambda y, x: (y + 2 * x, x - y)), images())
    assert row.size == (32, 48) and row.grid == (8, 12)
    for leak in (row.leak, row.leak_of_colors):
        assert leak == pytest.approx((1.0, 1.0), abs=1e-4)
    assert row.equivariance < 0.999


def test_one_axis_leaks_alone():
    (row,) = measure_features(Maps(lambda y, x: (y, 0 * x)), images(32))
    assert row.leak.row == pytest.approx(1.0, abs=1e-4) and row.leak.column < 0.02
    assert row.leak_of_colors.row == pytest.approx(1.0, abs=1e-4) and row.leak_of_colors.column < 0.02


def test_a_function_that_is_not_linear_is_found_as_far_as_it_is():
    """R² of a straight line through y^2 on 8 equal steps, known in closed form."""
    h = 8
    y = (2 * torch.arange(h, dtype=torch.float64) + 1) / h - 1
    feature = ((torch.arange(h) / h) ** 2).double()
    slope = ((feature - feature.mean()) * y).sum() / (feature - feature.mean()).square().sum()
    expected = 1 - ((feature - feature.mean()) * slope - y).square().sum() / y.square().sum()
    (row,) = measure_features(Maps(lambda y, x: (y**2, 0 * x)), images(32))
    assert row.leak_of_colors.row == pytest.approx(float(expected), abs=1e-3)


def test_a_convolution_without_padding_has_no_position_and_follows_shifts():
    (row,) = measure_features(Maps(), images(16))
    assert max(row.leak) < 0.02 and max(row.leak_of_colors) < 0.02
    assert row.equivariance == pytest.approx(1.0, abs=1e-5)


def test_the_border_of_a_padded_convolution_leaks():
    class Padded(Maps):
        def forward_features(self, image):
            return nn.functional.conv2d(super().forward_features(image), image.new_ones(5, 1, 5, 5) / 25, padding=2, groups=5)

    assert measure_features(Padded(), images(16))[0].equivariance < 0.99
    assert measure_features(Maps(), images(16))[0].equivariance > 0.9999


@each(("y", "x"), [(1, 0), (0, 1), (2, 1)])
def test_the_share_of_position_is_that_of_the_planted_variances(y, x):
    """A place of known variance beside the mean colors of a patch."""
    (row,) = measure_features(Maps(lambda a, b: (y * a, x * b)), images(64))
    place = (y**2 * (8**2 - 1) / 8**2 + x**2 * (12**2 - 1) / 12**2) / 12  # of 0, 1/8, ..., 7/8 and 0, 1/12, ...
    content = F.avg_pool2d(resized(images(64), (32, 48)), 4).var(dim=(0, 2, 3), correction=0).sum()
    assert row.share == pytest.approx((place / (place + float(content)),) * 3, rel=0.03)
    columns = row.to_dict()
    assert row.share == (columns["share"], columns["share_of_colors"], columns["share_of_textures"])


def test_content_alone_has_no_share_of_position():
    (row,) = measure_features(Maps(), images(64))
    assert max(map(abs, row.share)) < 2e-3 and row.share.colors == pytest.approx(0, abs=1e-12)


def test_position_variance_of_maps_that_it_explains_and_of_noise():
    border = torch.tensor([[min(i, 4 - i, j, 6 - j) for j in range(7)] for i in range(5)]).double()
    explained = torch.stack((border**2, torch.arange(5.0).exp()[:, None].expand(5, 7), torch.arange(7.0).sin().expand(5, 7)))
    whole = explained.var(dim=(1, 2), correction=0).sum()
    assert position_variance(explained.expand(6, -1, -1, -1)) == pytest.approx(float(whole))
    spot = torch.zeros(4, 1, 5, 7)
    spot[:, 0, 1, 2] = 1  # neither a row, a column nor a distance: it is explained in part
    assert 0 < position_variance(spot) < 0.7 * float(spot[0].var(correction=0))
    generator = torch.Generator().manual_seed(0)
    noise = torch.tensor([position_variance(torch.randn(8, 3, 5, 7, generator=generator)) for _ in range(99)])
    assert noise.mean().abs() < 4 * noise.std() / 99**0.5  # the noise of few images is no position


@each("size", [(32, 48), (30, 45)])
def test_shuffled_patches_are_those_of_the_images(size):
    x = images(3, (32, 48))
    mixed = shuffled(x, size, (4, 6))
    assert mixed.shape == (3, 3, *size) and not torch.equal(mixed, x[:, :, : size[0], : size[1]])

    def corners(of):
        return sorted(of[b, :, 8 * i, 8 * j].tolist() for b in range(3) for i in range(4) for j in range(6))

    assert corners(mixed) == corners(x)
    assert torch.equal(mixed, shuffled(x, size, (4, 6)))


def test_agreement_of_sizes():
    x = images(4, (8, 12))
    assert agreement(x, x) == pytest.approx(1.0, abs=1e-6) == agreement(x, 3 * x + 5)
    assert agreement(x, -x) == pytest.approx(-1.0, abs=1e-6)
    smooth = resized(images(4, (4, 6)), (64, 96))  # what a smaller grid can hold
    (row,) = measure_features(Maps(), smooth, sizes=[(16, 24), (64, 96), (32, 48)])
    assert row.agreement[(32, 48)] == pytest.approx(1.0, abs=1e-6)
    assert all(value > 0.97 for value in row.agreement.values())
    (by_place,) = measure_features(Maps(lambda y, x: (torch.sin(40 * y), torch.sin(55 * x))), smooth * 0.01, sizes=[(16, 24)])
    assert by_place.agreement[(16, 24)] < 0.9


def test_features_of_one_vector_say_nothing():
    leak = position_leak(torch.ones(6, 4, 3, 5))
    assert leak == pytest.approx((0.0, 0.0), abs=1e-9) and math.isnan(position_leak(torch.randn(6, 4, 1, 5)).row)
    (row,) = measure_features(Maps(), torch.zeros(8, 3, 32, 48))
    assert all(map(math.isnan, row.share))  # no variance to share


@pytest.mark.slow
@each(
    ("name", "options", "grid"),
    [
        ("vitrel_vit_n8_none", dict(reg_tokens=3, depth=2), (4, 6)),
        ("vitrel_swin_n", {}, (4, 6)),
        ("vit_tiny_patch16_224", dict(depth=2, embed_dim=24, num_heads=2, reg_tokens=2), (2, 3)),
        ("test_convnext", {}, (1, 1)),
    ],
)
def test_models_of_timm_and_vitrel(name, options, grid):
    model = timm.create_model(name, **options).train()
    size = (32, 48)
    rows = measure_features(model, images(6), size, layers=(0, -1), sizes=[(64, 96)])
    assert [row.layer for row in rows] == [0, -1] and rows[1].grid == grid and rows[0].model.startswith(name[:8])
    assert all(-1 <= row.agreement[(64, 96)] <= 1.0001 for row in rows)
    assert math.isnan(rows[1].equivariance) == (grid != (4, 6))  # no room for shifts
    assert all(module.training for module in model.modules())


def test_prefix_tokens_are_left_out():
    """The last layer of a ViT with a class token and three registers, against its own tokens."""
    model = timm.create_model("vitrel_vit_n8_table", reg_tokens=3).eval()
    x = images(2, (40, 24))
    with torch.no_grad():
        tokens = model.forward_features(x)[:, 4:]
    (maps,) = patch_features(model, x)
    torch.testing.assert_close(maps, tokens.mT.unflatten(2, (5, 3)))


def test_an_embedding_is_a_leak_and_no_position_is_none():
    """On images of one color, where content tells nothing."""
    torch.manual_seed(0)
    kept, none = (timm.create_model(f"vitrel_vit_n8_{position}") for position in ("sincos", "none"))
    leaks = [measure_features(model, images(8), (64, 96))[0].leak_of_colors for model in (kept, none)]
    assert min(leaks[0]) > 0.9 and max(leaks[1]) < 0.01


def test_a_layer_that_is_not_there_and_features_that_are_no_map():
    with pytest.raises(ValueError, match="there is no layer 4: vitrel_vit_n8_none has layers 0 to 3"):
        patch_features(timm.create_model("vitrel_vit_n8_none"), images(2, (32, 32)), (4, -1))
    model = Maps()
    model.forward_features = lambda image: image.mean((2, 3))
    with pytest.raises(ValueError, match=r"the features of Maps are \[8, 3\], no map of tokens"):
        patch_features(model, images())


def test_a_row_as_columns():
    (row,) = measure_features(Maps(), images(), sizes=[64])
    columns = row.to_dict()
    assert columns["size"] == "32x48" and columns["grid"] == "8x12" and columns["agreement_64x64"] == row.agreement[(64, 64)]
    assert columns["leak_row_of_colors"] == row.leak_of_colors.row


@each(
    ("how", "message"),
    [
        (dict(images=torch.randn(3, 3, 32, 48)), r"with at least 4 images, not \[3, 3, 32, 48\]"),
        (dict(images=torch.randn(8, 32, 48)), r"not \[8, 32, 48\]"),
        (dict(layers=(2,)), "only layer -1 of forward_features is possible"),
        (dict(size=(34, 48)), "a token of the 8x12 grid is no whole number of pixels at 34x48: choose another size"),
    ],
)
def test_what_cannot_be_measured(how, message):
    with pytest.raises(ValueError, match=message):
        measure_features(Maps(), **({"images": images()} | how))
