"""k-NN and linear probe of frozen features: planted classes, votes by hand, and rows of a model on photographs of colors."""

import math

import pytest
import torch
from PIL import Image

from helpers import each
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.frozen import frozen_rows, knn, linear_probe
from vitrel.evaluate.statistics import estimate
from vitrel.models.vit import ViT


def test_votes_by_hand():
    """Two near neighbors of class 1 against one nearer of class 0: the temperature decides."""
    bank = torch.tensor([[1.0, 0.05], [1.0, 0.3], [1.0, 0.3], [-1.0, 0.0]])
    known, query = torch.tensor([0, 1, 1, 0]), torch.tensor([[2.0, 0.0]])
    near, far = 1 / math.hypot(1, 0.05), 1 / math.hypot(1, 0.3)
    for temperature in (0.01, 0.07, 1.0):
        expected = int(2 * math.exp(far / temperature) > math.exp(near / temperature))
        assert knn(bank, known, query, 2, k=3, temperature=temperature).argmax(1).tolist() == [expected]
    assert knn(bank, known, query, 2, k=1).argmax(1).tolist() == [0]
    assert knn(bank, known, query, 2, k=50, temperature=1.0).shape == (1, 2)  # more neighbors than images


@each("predict", [knn, linear_probe])
def test_classes_that_features_tell_apart(predict):
    labels = torch.arange(200) % 4
    features = torch.nn.functional.one_hot(labels, 6).float() * 3 + 0.2 * torch.randn(200, 6)
    known = labels[:100].clone()
    if predict is linear_probe:
        known[::7] = -100  # without a class
    assert torch.equal(predict(features[:100], known, features[100:], 4).argmax(1), labels[100:])


def test_the_linear_probe_looks_where_a_vote_does_not():
    """One informative channel among many of larger noise."""
    labels = torch.arange(400) % 2
    features = 3 * torch.randn(400, 40)
    features[:, 7] = 0.02 * (2.0 * labels - 1) + 0.002 * torch.randn(400)
    right = [
        (f(features[:300], labels[:300], features[300:], 2).argmax(1) == labels[300:]).double().mean()
        for f in (knn, linear_probe)
    ]
    assert right[1] > 0.9 > right[0] + 0.1


def test_rows_at_several_sizes(tmp_path):
    for split, n in (("train", 8), ("val", 4)):
        for name, color in (("dark", 40), ("light", 200)):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(n):
                Image.new("RGB", (40, 60), (color + number,) * 3).save(tmp_path / split / name / f"{number}.png")
    model = ViT(32, 8, num_classes=2, embed_dim=16, depth=1, num_heads=2, position="table")
    trained = trained_model(model, "any", img_size=(32, 32))
    rows = list(frozen_rows(trained, str(tmp_path), [(32, 32), (24, 48)], train_images=12, val_images=6, batch_size=4))
    assert [(row["size"], row["method"]) for row in rows] == [(s, m) for s in ("32x32", "24x48") for m in ("k-NN", "linear")]
    expected = estimate([torch.ones(1, 6).numpy()])
    for row in rows:
        assert (row["top1"], row["images"], row["train_images"]) == (100.0, 6, 12)
        assert row["low"] == pytest.approx(expected.low(), abs=0.01) and row["high"] == pytest.approx(100.0)
    assert rows[0]["label"] == trained.label
    row = next(frozen_rows(trained, str(tmp_path), [(32, 32)], train_images=1000, val_images=500))  # more than there are
    assert (row["images"], row["train_images"]) == (8, 16)
