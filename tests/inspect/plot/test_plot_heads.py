"""Where the arrows of heads end."""

import pytest
import torch

from helpers.variants import make, perturbed, small_model
from vitrel.grid import Grid
from vitrel.inspect.attention import record
from vitrel.inspect.plot import directions, lattices
from vitrel.inspect.plot.heads import attended_offset, bias_mean_offset

TINY = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=2)


def vit(key, **options):
    return small_model("vitrel_vit_n8_none", **TINY, position=key, **options)


def ends(axes):
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "o" and len(line.get_xydata())]
    assert [text.xy for text in axes.texts if text.arrow_patch] == points  # and the arrows end there
    return points


def test_a_head_that_asks_only_the_row_above():
    encoding = make("table", (3, 5), heads=2)
    with torch.no_grad():
        encoding.relative_position_bias_table.zero_()
        encoding.relative_position_bias_table[(1 + 2) * 9 + 0 + 4, 0] = 60.0
    torch.testing.assert_close(bias_mean_offset(lattices(encoding)[0]), torch.tensor([[1.0, 0], [0, 0]]).double())
    (panel,) = directions(encoding).axes
    assert ends(panel)[0] == pytest.approx((0, 1)) and ends(panel)[1] == pytest.approx((0, 0))
    assert panel.get_ylim()[0] > panel.get_ylim()[1] and panel.get_xlim()[0] < panel.get_xlim()[1]  # as in the maps


def test_hidden_offsets_count_for_nothing():
    mean = bias_mean_offset(lattices(make("lookhere", (3, 4), heads=6, fov=180))[0])
    assert (mean[0, 0] > 0.3) and (mean[1, 0] < -0.3) and (mean[2, 1] > 0.3) and (mean[3, 1] < -0.3)
    torch.testing.assert_close(mean[4:], torch.zeros(2, 2).double())


def test_attention_against_plain_loops():
    layer = record(vit("table", reg_tokens=1), torch.randn(2, 3, 24, 40))[1]
    total, n = torch.zeros(2, 2).double(), 0
    for image in range(2):
        for i in range(15):
            weights = layer.weights[image, 0, :, 2 + i, 2:].double()
            weights = weights / weights.sum(-1, keepdim=True)
            n += 1
            for j in range(15):
                offset = torch.tensor([i // 5 - j // 5, i % 5 - j % 5]).double()
                total += weights[:, j, None] * offset
    torch.testing.assert_close(attended_offset(layer), total / n)


def test_windows_and_padding():
    """Attention that is even within every padded window has no direction: each pair of patches counts both ways."""
    layer = record(small_model("vitrel_swin_n"), torch.randn(1, 3, 22, 30))[1]
    seen = layer.visible.float()
    even = layer._replace(weights=seen / seen.sum(-1, keepdim=True).clamp(min=1))
    torch.testing.assert_close(attended_offset(even), torch.zeros(1, 2).double(), atol=1e-6, rtol=0)
    assert not attended_offset(layer).isnan().any()


def test_images_or_recorded_layers():
    model, images = vit("rope_mixed"), torch.randn(2, 3, 32, 24)
    layers = record(model, images)
    first, second = directions(model, images=images, layers=[1]), directions(layers, layers=[1])
    (panel,), (other,) = first.axes, second.axes
    assert ends(panel) == ends(other) and panel.get_title() == "blocks.1.attn"
    assert ends(panel)[1] == pytest.approx(tuple(attended_offset(layers[1])[1].tolist()[::-1]))
    assert "weighted by attention" in first.get_suptitle().replace("\n", " ")


def test_what_has_no_direction():
    with pytest.raises(ValueError, match="rope_axial has no bias apart from content: give images"):
        directions(make("rope_axial", Grid(3, 4)))
    with pytest.raises(ValueError, match="have a size of their own: leave size out"):
        directions(perturbed(vit("table")), size=32, images=torch.randn(1, 3, 32, 32))
