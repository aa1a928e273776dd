"""The numbers behind the maps by offset: what the definition of attention gives, at the offset drawn."""

import math

import numpy as np
import pytest
import timm
import torch
from torch import nn

import vitrel
from helpers import each
from helpers.variants import IN_ATTENTION, make, perturbed, small_model
from vitrel.grid import Grid
from vitrel.inspect.attention import record
from vitrel.inspect.plot import lattices, offset_maps
from vitrel.ops.reference import masked_logits

GRID = Grid(3, 4, 1)
ROTARY = ["rope_axial", "rope_mixed", "rope_normalized", "xpos"]
TINY = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=2)


def vit(key, **options):
    return small_model("vitrel_vit_n8_none", **TINY, position=key, **options)


def drawn(figure):
    """The pictures of a figure, from left to right and down."""
    return [np.ma.filled(axes.images[0].get_array(), np.nan) for axes in panels(figure)]


def panels(figure):
    return [axes for axes in figure.axes if axes.images and axes.get_xlabel()]


def spread(lattice, grid):
    """[H, 2h-1, 2w-1] -> [H, h*w, h*w], one value for each pair of patches."""
    index = Grid(*grid[:2]).index()
    return lattice.flatten(1)[:, index]


def test_an_offset_stands_where_its_axes_say():
    """A table that is 1 at dy = +1, dx = 0 alone: the logit of a query below its key, and one cell of the picture."""
    grid, encoding = Grid(3, 5), make("table", (3, 5), heads=1)
    with torch.no_grad():
        encoding.relative_position_bias_table.zero_()[(1 + 2) * 9 + 0 + 4] = 1.0
    logits = masked_logits(*torch.zeros(2, 1, 15, 8), encoding(grid), grid)[0]
    assert logits[7, 2] == 1 and logits[2, 7] == 0  # row 1 asks row 0 of the same column
    (panel,) = panels(offset_maps(encoding))
    (picture,), (left, right, bottom, top) = drawn(panel.figure), panel.images[0].get_extent()
    ((row, column),) = np.argwhere(picture == 1)
    assert (picture == 0).sum() == 44
    assert top + (row + 0.5) * (bottom - top) / 5 == 1 and left + (column + 0.5) * (right - left) / 9 == 0
    assert panel.get_ylim() == (2.5, -2.5) and panel.get_xlim() == (-4.5, 4.5)
    assert panel.get_ylabel().startswith("dy (patches)") and panel.get_xlabel() == "dx (patches)"
    assert "query minus key: dy > 0, key above" in panel.figure.get_suptitle()


@each("size", [None, (5, 3)])
@each("key", [key for key in IN_ATTENTION if key not in ("none", *ROTARY)])
def test_bias_is_the_logit_of_a_zero_query_and_key(key, size):
    encoding = perturbed(make(key, GRID))
    grid = GRID if size is None else Grid(*size, 1)
    logits = masked_logits(*torch.zeros(2, 2, grid.tokens, 8), encoding(grid), grid)[:, 1:, 1:].detach()
    if key in ("shaw", "decomposed", "deberta"):
        with pytest.raises(ValueError, match="measures what depends on content"):
            lattices(encoding, size)
        assert not logits.any()
        return
    found = [one for one in lattices(encoding, size) if "bias" in one.what]
    assert found[0].unit == "logits" and ("query 0" in found[0].what) == (key in ("pape", "transformer_xl"))
    torch.testing.assert_close(spread(found[0].values, grid), logits)


@each("size", [None, (5, 3)])
@each("key", ROTARY)
def test_rotation_is_q_k_for_equal_energy_in_every_frequency(key, size):
    encoding = make(key, GRID, heads=4)
    grid = GRID if size is None else Grid(*size, 1)
    turn = torch.rand(4) * 2 * torch.pi  # any direction within each of the D/2 pairs
    q = torch.cat((turn.cos(), turn.sin())).mul(1 / 2).expand(4, grid.tokens, 8)
    logits = masked_logits(q, q, encoding(grid), grid)[:, 1:, 1:].detach() * math.sqrt(8)
    (found,) = lattices(encoding, size)
    assert found.what == f"{key} rotation" and "cos" in found.unit
    torch.testing.assert_close(spread(found.values, grid).expand(4, -1, -1), logits)


def test_training_extent_is_outlined_where_the_grid_is_larger():
    encoding = make("alibi", (3, 4))
    (first, *_) = panels(offset_maps(encoding, (5, 4)))
    (outline,) = first.patches
    assert outline.get_bbox().bounds == (-3.5, -2.5, 7, 5)
    assert not any(panel.patches for panel in panels(offset_maps(encoding, (2, 4))))
    swin = timm.create_model("vitrel_swin_n", num_classes=2)
    assert not any(panel.patches for panel in panels(offset_maps(swin, 128)))  # the window stays
    assert any(panel.patches for panel in panels(offset_maps(vit("table"), 48)))


def test_windows_of_every_stage_and_heads_that_only_some_have():
    swin = small_model("vitrel_swin_n")
    shown = panels(offset_maps(swin))
    assert len(shown) == 2 * (1 + 2 + 4) and {picture.shape for picture in drawn(shown[0].figure)} == {(7, 7)}
    third = offset_maps(swin.layers[2].blocks[1].position, heads=[3, 9])
    table = swin.layers[2].blocks[1].position.relative_position_bias_table[:, 3].detach()
    np.testing.assert_allclose(drawn(third)[0], table.view(7, 7), atol=1e-6)
    assert panels(third)[0].get_title() == "head 3" and any("layers.2.blocks.1" in panel.get_ylabel() for panel in shown)
    with pytest.raises(ValueError, match=r"no layer has heads \[4\]: the most is 4"):
        offset_maps(swin.layers[2].blocks[1].position, heads=[4])


def test_hidden_offsets_have_a_color_of_their_own():
    figure = offset_maps(make("lookhere", (3, 4), heads=6, fov=180))
    assert np.isnan(drawn(figure)[0][:2]).all() and not np.isnan(drawn(figure)[0][2:]).any()  # head 0 looks up
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["hidden, or no pair has it"]


def test_compositions_are_drawn_part_by_part():
    found = lattices(vit("absolute+rope_mixed+table"))
    assert [one.what for one in found] == ["rope_mixed rotation", "table bias"] * 2
    assert [one.layer for one in found] == ["blocks.0"] * 2 + ["blocks.1"] * 2
    assert {one.trained for one in found} == {(4, 4)}
    (shared,) = lattices(vit("table", share_position=True))
    assert shared.layer == "all blocks"


def test_our_layers_inside_another_model():
    model = nn.ModuleDict({"mine": vitrel.RelativeAttention(16, 2, position="table+alibi", grid=(3, 4))})
    assert [(one.layer, one.what, tuple(one.values.shape)) for one in lattices(model)] == [
        ("mine", "table bias", (2, 5, 7)),
        ("mine", "alibi bias", (2, 5, 7)),
    ]
    with pytest.raises(ValueError, match="on their own grids: leave size out"):
        lattices(model, 32)


def test_recorded_layers_show_the_mean_over_images():
    model = vit("table")
    layers = record(model, torch.randn(2, 3, 24, 40))
    for measured, read in zip(lattices(layers), lattices(model, (24, 40)), strict=True):
        torch.testing.assert_close(measured.values, read.values, atol=1e-5, rtol=1e-5)
    assert len(drawn(offset_maps(layers[1:2], heads=[0]))) == 1


def test_training_is_neither_seen_nor_touched():
    encoding = vitrel.create_position("rope_axial", (3, 4), 1, 8, jitter_coords=2.0, rescale_coords=2.0).train()
    first, second = (lattices(encoding)[0].values for _ in range(2))
    assert torch.equal(first, second) and encoding.training
    assert first[0, 2, 3] == pytest.approx(1)


@each(
    ("source", "message"),
    [
        (lambda: make("none", (3, 4)), "none has nothing to draw by offset"),
        (lambda: vit("absolute"), "`similarity` draws embeddings of tokens"),
        (lambda: make("sincos", (3, 4)), "sincos has nothing to draw"),
        (lambda: timm.create_model("test_vit"), r"test_vit has nothing to draw .*record\(model, images\)"),
        (lambda: record(vit("absolute"), torch.randn(1, 3, 32, 32)), "recorded attention has nothing to draw by offset"),
        (lambda: record(vit("none"), torch.randn(1, 3, 32, 32))[0]._replace(position=None), "was recorded without position"),
    ],
)
def test_nothing_to_draw_says_why(source, message):
    source = source()
    with pytest.raises(ValueError, match=message):
        offset_maps(source if isinstance(source, nn.Module | list) else [source])


@each(("key", "entries"), [("table", slice(None)), ("table", 0), ("rope_mixed", 0)])
def test_what_is_no_number_is_not_drawn(key, entries):
    model = vit(key)
    with torch.no_grad():
        next(model.blocks[1].position.parameters())[entries] = torch.nan
    with pytest.raises(ValueError, match=r"blocks\.1 holds NaN"):
        lattices(model)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn holds NaN"):
        lattices(record(model, torch.randn(1, 3, 32, 32)))
