"""The numbers of buckets are the rows that the encodings read; similarities are cosines of their rows."""

import numpy as np
import pytest
import timm
import torch

from helpers.variants import make, perturbed
from vitrel.grid import Grid
from vitrel.inspect.plot import bucket_map, similarity
from vitrel.inspect.plot.rows import axis_buckets
from vitrel.models.vit import ViT

T5 = [*range(8), *[8] * 4, *[9] * 4, *[10] * 7, *[11] * 9, *[12] * 14, *[13] * 18, *[14] * 27, *[15] * 9]  # of 0 to 99


def cells(figure):
    return {text.get_position(): text.get_text() for text in figure.axes[0].texts}


def test_the_published_buckets_of_32_to_128():
    found = axis_buckets(make("t5", (100, 100), num_buckets=32, max_distance=128), "w", Grid(100, 100))
    assert found.number[99:].tolist() == T5
    assert found.number[:99].tolist() == [16 + bucket for bucket in T5[:0:-1]]
    assert found.ring.tolist() == T5[:0:-1] + T5 and found.exact == (-7, 7)


@pytest.mark.parametrize(
    ("key", "name", "options"),
    [
        ("t5", "relative_attention_bias", {}),
        ("t5", "relative_attention_bias", {"num_buckets": 8, "max_distance": 4}),
        ("t5", "relative_attention_bias", {"bidirectional": False}),
        ("clipped", "relative_position_bias_table", {"radius": (1, 2)}),
    ],
)
@pytest.mark.parametrize("size", [(4, 6), (3, 2), (5, 8)])
def test_cells_name_the_row_of_the_table(key, name, options, size):
    encoding, grid = perturbed(make(key, (4, 6), **options)), Grid(*size)
    shown, table = cells(bucket_map(encoding, size)), getattr(encoding, name)
    assert len(shown) == grid.offset_classes()
    for offset, value in zip(grid.offsets().tolist(), encoding(grid).tables[0].bias.T, strict=True):
        torch.testing.assert_close(table[int(shown[tuple(offset[::-1])])], value)  # text at (dx, dy)


def test_two_tables_have_two_numbers():
    encoding = perturbed(make("t5", (4, 6), mode="sum"))
    grid = Grid(4, 6)
    rows, columns = encoding.bucket("h", grid).tolist(), encoding.bucket("w", grid).tolist()
    for (dx, dy), text in cells(bucket_map(encoding)).items():
        assert text == f"{rows[dy + 3]},{columns[dx + 5]}"
    assert cells(bucket_map(make("shaw", (4, 6), radius=1)))[(-5, 3)] == "2,0"


def test_the_boundary_between_exact_and_shared_rows():
    (outline,) = bucket_map(make("t5", (9, 9), num_buckets=8, max_distance=8)).axes[0].patches
    assert outline.get_bbox().bounds == (-1.5, -1.5, 3, 3)  # 0 and 1 exact, then 2 to 3, 4 to 7
    (outline,) = bucket_map(make("t5", (9, 9), bidirectional=False, num_buckets=4, max_distance=8)).axes[0].patches
    assert outline.get_bbox().bounds == (-0.5, -0.5, 2, 2)
    figure = bucket_map(make("clipped", (4, 6), radius=2), (8, 2))
    (outline,) = figure.axes[0].patches
    assert outline.get_bbox().bounds == (-1.5, -2.5, 3, 5)  # cut off where the grid ends
    assert figure.legends[0].get_texts()[0].get_text() == "beyond this, the edge rows"


def test_an_encoding_without_buckets():
    with pytest.raises(ValueError, match="alibi has no buckets: t5 and encodings that clip offsets"):
        bucket_map(make("alibi", (4, 6)))


def test_similarity_is_the_cosine_to_one_patch():
    tiny = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=2)
    model = perturbed(ViT(**tiny, position="absolute").eval(), 0.3)
    rows = model.pos_embed.pos_embed[0, 1:].detach()
    figure = similarity(model, patches=[(0, 0), (1, 3)])
    for axes, at in zip(figure.axes, (0, 7), strict=False):
        shown, here = axes.images[0].get_array(), rows[at]
        for i, row in enumerate(rows):
            assert shown[divmod(i, 4)] == pytest.approx(float(row @ here / row.norm() / here.norm()), abs=1e-5)
    assert figure.axes[1].patches[0].get_bbox().bounds == (2.5, 0.5, 1, 1)
    assert "6x5 patches, trained on 4x4" in similarity(model, (48, 40)).get_suptitle()
    timms = timm.create_model("test_vit")
    h, w = timms.patch_embed.grid_size
    expected = torch.cosine_similarity(timms.pos_embed[0, -h * w :], timms.pos_embed[0, -h * w :][[w * (h // 2) + w // 2]], -1)
    np.testing.assert_allclose(similarity(timms).axes[0].images[0].get_array().ravel(), expected.detach(), atol=1e-5)


def test_similarity_of_what_is_not_there():
    with pytest.raises(ValueError, match=r"adds no embedding to tokens: vitrel\.inspect\.plot\.offset_maps"):
        similarity(make("table", (3, 4)))
    with pytest.raises(ValueError, match=r"patch \(3, 0\) is outside the 3x4 patches of sincos"):
        similarity(make("sincos", (3, 4)), patches=[(3, 0)])
    encoding = make("absolute", (3, 4))
    with torch.no_grad():
        encoding.pos_embed.fill_(torch.nan)
    with pytest.raises(ValueError, match="absolute holds NaN"):
        similarity(encoding)
