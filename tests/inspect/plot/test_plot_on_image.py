"""What is drawn on the image: the recorded weights, each at its patch."""

import numpy as np
import pytest
import timm
import torch

from helpers import each
from helpers.variants import perturbed, small_model
from vitrel.grid import Grid
from vitrel.inspect.attention import record
from vitrel.inspect.plot import attention
from vitrel.models.vit import ViT

TINY = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=2)


def vit(key="table", **options):
    torch.manual_seed(0)
    return perturbed(ViT(**TINY, position=key, **options).eval(), 0.3)


def maps(figure):
    """[[with, without, difference] of every row], NaN where nothing is drawn."""
    found = [axes for axes in figure.axes if len(axes.images) == 2]
    values = [np.ma.filled(axes.images[1].get_array().astype(float), np.nan) for axes in found]
    return [values[i : i + 3] for i in range(0, len(values), 3)]


@each("heads", [None, [1, 0]])
def test_weights_of_one_query(heads):
    model, image = vit(reg_tokens=1), torch.randn(3, 24, 40)
    layer = record(model, image[None])[1]
    figure, slot = attention(model, image, (2, 1), layer=1, heads=heads), 2 + 2 * 5 + 1
    both = [what[0, 0, :, slot] for what in (layer.weights, layer.content)]
    rows = [[row.mean(0)] if heads is None else row[heads] for row in both]
    assert len(maps(figure)) == len(rows[0])
    for weights, content, (shown, alone, difference) in zip(*rows, maps(figure), strict=True):
        for y, x in np.ndindex(3, 5):
            assert shown[y, x] == pytest.approx(float(weights[2 + y * 5 + x]), abs=1e-6)
            assert alone[y, x] == pytest.approx(float(content[2 + y * 5 + x]), abs=1e-6)
        np.testing.assert_allclose(difference, shown - alone, atol=1e-6)
    picture, first = figure.axes[:2]
    assert tuple(first.images[1].get_extent()) == (0, 40, 24, 0) and picture.get_ylim() == (24, 0)
    assert picture.patches[1].get_bbox().bounds == (8, 16, 8, 8)  # x, y of the query's frame
    assert first.get_title() == f"with position\n{100 * float(rows[0][0][:2].sum()):.0f} % on prefix tokens"
    assert picture.get_ylabel() == ("mean of 2 heads" if heads is None else "head 1")


def test_only_the_window_of_the_query_in_its_place():
    """Shifted windows over a padded grid: what stands there are the patches that the query sees, no others."""
    model, image = small_model("vitrel_swin_n"), torch.randn(3, 22, 31)
    layer = record(model, image[None])[1]
    assert layer.shift == (2, 2) and layer.grid == Grid(11, 16)
    for query in ((0, 0), (10, 15), (5, 7)):
        ((shown, alone, _),) = maps(attention(model, image, query, layer=1))
        expected = np.full((11, 16), np.nan)
        region = [(n - 2) // 4 if n >= 2 else -1 for n in query]  # borders at 2, 6, 10, ...
        for y in range(11):
            for x in range(16):
                if [(n - 2) // 4 if n >= 2 else -1 for n in (y, x)] == region:
                    expected[y, x] = 1
        assert np.array_equal(~np.isnan(shown), ~np.isnan(expected)) and np.array_equal(np.isnan(shown), np.isnan(alone))
        assert np.nansum(shown) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_the_image_is_shown_as_it_was():
    model, shown = timm.create_model("vitrel_vit_n8_table", **TINY), torch.rand(3, 32, 24)
    image = (shown - 0.5) / 0.5
    for figure in (attention(model, image, (0, 0)), attention(model, image * 9, (0, 0), shown=shown)):
        np.testing.assert_allclose(figure.axes[0].images[0].get_array(), shown.permute(1, 2, 0), atol=1e-6)
    stretched = attention(record(model, image[None]), image, (0, 0)).axes[0].images[0].get_array()
    assert stretched.min() == 0 and stretched.max() == 1


def test_models_of_timm():
    model, image = timm.create_model("test_vit", img_size=64, depth=1).eval(), torch.randn(3, 64, 64)
    layer = record(model, image[None])[0]
    ((shown, _, _),) = maps(attention(model, image, (1, 3), layer=0, heads=[0]))
    _, w, prefix = layer.grid
    np.testing.assert_allclose(shown.ravel(), layer.weights[0, 0, 0, prefix + w + 3, prefix:], atol=1e-6)


def test_a_patch_that_is_not_there():
    with pytest.raises(ValueError, match=r"query \(0, 4\) is outside the 4x4 patches of blocks.1.attn"):
        attention(vit(), torch.randn(3, 32, 32), (0, 4))


def test_other_channels_need_a_picture():
    model, image = vit(in_chans=4), torch.randn(4, 32, 32)
    with pytest.raises(ValueError, match=r"an image of 4 channels .*: pass shown, \[3, height, width\] from 0 to 1"):
        attention(model, image, (0, 0))
    assert attention(model, image, (0, 0), shown=torch.rand(3, 32, 32)).axes


def test_weights_that_are_no_numbers_are_not_drawn():
    model = vit()
    with torch.no_grad():
        model.blocks[0].position.relative_position_bias_table[0] = torch.nan
    with pytest.raises(ValueError, match=r"blocks\.0\.attn holds NaN"):
        attention(model, torch.randn(3, 32, 32), (0, 0), layer=0)


def test_layers_without_content():
    layers = [layer._replace(content=None, position=None) for layer in record(vit(), torch.randn(1, 3, 32, 32))]
    with pytest.raises(ValueError, match=r"use vitrel\.inspect\.attention\.record"):
        attention(layers, torch.randn(3, 32, 32), (0, 0))


def test_a_difference_that_is_negligible_is_gray():
    model, image = vit(), torch.randn(3, 32, 32)
    for factor, title in ((1.0, "difference"), (1e-4, "difference: negligible")):
        with torch.no_grad():
            model.blocks[1].position.relative_position_bias_table.mul_(factor)
        panel = attention(model, image, (0, 0)).axes[3]
        assert panel.get_title() == title and (len(panel.images[1].get_cmap().colors) == 1 if factor < 1 else True)
