"""The similarities of an embedding are the cosines of its rows."""

import numpy as np
import pytest
import timm
import torch

from helpers.variants import make, perturbed
from vitrel.inspect.plot import similarity
from vitrel.models.vit import ViT


def test_similarity_is_the_cosine_to_one_patch():
    tiny = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=2)
    model = perturbed(ViT(**tiny, position="absolute").eval(), 0.3)
    rows = model.pos_embed.pos_embed[0, 1:].detach()
    axes = similarity(model).axes[0]
    shown, here = axes.images[0].get_array(), rows[10]  # of 4 x 4
    for i, row in enumerate(rows):
        assert shown[divmod(i, 4)] == pytest.approx(float(row @ here / row.norm() / here.norm()), abs=1e-5)
    assert axes.patches[0].get_bbox().bounds == (1.5, 1.5, 1, 1)
    assert "6x5 patches, trained on 4x4" in similarity(model, (48, 40)).get_suptitle()
    timms = timm.create_model("test_vit")
    h, w = timms.patch_embed.grid_size
    expected = torch.cosine_similarity(timms.pos_embed[0, -h * w :], timms.pos_embed[0, -h * w :][[w * (h // 2) + w // 2]], -1)
    np.testing.assert_allclose(similarity(timms).axes[0].images[0].get_array().ravel(), expected.detach(), atol=1e-5)


def test_similarity_of_what_is_not_there():
    with pytest.raises(ValueError, match=r"adds no embedding to tokens: vitrel\.inspect\.plot\.offset_maps"):
        similarity(make("table", (3, 4)))
    broken = make("absolute", (3, 4))
    with torch.no_grad():
        next(broken.parameters()).view(-1)[-1] = torch.nan
    with pytest.raises(ValueError, match="absolute holds NaN"):
        similarity(broken)
