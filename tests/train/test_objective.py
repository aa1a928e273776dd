import random

import numpy as np
import pytest
import torch
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy
from torch.nn import functional as F

from helpers import each
from helpers.small_runs import Tensors, fit, small
from vitrel.data import Augmentation
from vitrel.train.objective import Erasing, Mixing, Objective

LOGITS = torch.tensor([[2.0, 0.5, -1.0, 0.0], [0.1, -0.3, 1.2, 0.4]])
LABELS = torch.tensor([0, 3])


def targets(recipe, monkeypatch, epochs):
    """What the loss is given, step by step."""
    seen, original = [], recipe.learning.loss

    def loss(logits, target):
        seen.append(target)
        return original(logits, target)

    monkeypatch.setattr(recipe.learning, "loss", loss)
    fit(recipe, Tensors(batches=2), max_epochs=epochs)
    return seen


def test_cross_entropy_smooths_labels_and_leaves_targets():
    loss = Objective().build(0.1)
    torch.testing.assert_close(loss(LOGITS, LABELS), LabelSmoothingCrossEntropy(0.1)(LOGITS, LABELS))
    mixed = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.25, 0.75]])
    torch.testing.assert_close(loss(LOGITS, mixed), F.cross_entropy(LOGITS, mixed))


@each("thresh", [None, 0.2])
def test_binary_cross_entropy_is_timms(thresh):
    loss = Objective("bce", bce_target_thresh=thresh).build(0.1)
    torch.testing.assert_close(loss(LOGITS, LABELS), BinaryCrossEntropy(0.1, thresh)(LOGITS, LABELS))
    mixed = torch.tensor([[0.7, 0.3, 0, 0], [0, 0, 0.1, 0.9]])
    target = mixed if thresh is None else (mixed > thresh).float()
    each = F.binary_cross_entropy_with_logits(LOGITS, target, reduction="none")
    torch.testing.assert_close(loss(LOGITS, mixed), each.mean())


@each(
    ("build", "text"),
    [
        (lambda: Objective("ce", bce_target_thresh=0.2), "bce_target_thresh needs model.objective.loss: bce"),
        (lambda: Objective("bce", bce_target_thresh=1.0), "bce_target_thresh must satisfy 0 <= value < 1, not 1.0"),
        (lambda: Objective().build(1.0), "label_smoothing must satisfy .* not 1.0"),
        (lambda: Mixing(mixup=-1.0), r"mixing.mixup \(-1.0\) .* at least 0"),
    ],
)
def test_settings_are_checked(build, text):
    with pytest.raises(ValueError, match=text):
        build()


def test_what_is_not_set_has_its_default_and_one_that_is_set_stands_alone():
    assert (Mixing().mixup, Mixing().cutmix) == (0.8, 1.0)
    assert (Mixing(mixup=0.2).mixup, Mixing(mixup=0.2).cutmix) == (0.2, 0.0)
    assert Mixing(cutmix=0.5).mixup == 0.0


def test_mixing_smooths_labels_once_and_the_loss_those_of_evaluation(monkeypatch):
    recipe = small(mixing=Mixing(mixup=1.0), label_smoothing=0.1)
    seen = targets(recipe, monkeypatch, epochs=1)
    assert [target.ndim for target in seen] == [2, 2]
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(4))
    assert float(seen[0].min()) == pytest.approx(0.025)  # smoothed, once
    torch.testing.assert_close(recipe.learning.loss(LOGITS, LABELS), LabelSmoothingCrossEntropy(0.1)(LOGITS, LABELS))
    other = small(objective=Objective("bce"), label_smoothing=0.1)
    torch.testing.assert_close(other.learning.loss(LOGITS, LABELS), BinaryCrossEntropy(0.1)(LOGITS, LABELS))


def erased(mode="const", share=1.0, device="cpu"):
    """20 white images [20, 3, 64, 64] after erasing, and what the generators of the CPU draw next."""
    random.seed(0), torch.manual_seed(0), np.random.seed(0)  # noqa: NPY002
    images = torch.ones(20, 3, 64, 64, device=device)
    Erasing(Augmentation(erase=share, erase_mode=mode))(images)
    return images, (random.random(), torch.rand(()).item(), np.random.rand())  # noqa: NPY002


@each("mode", ["const", "rand", "pixel"])
def test_erasing(mode):
    images, _ = erased(mode)
    gone = (images != 1).all(1)  # [20, 64, 64]
    shares = gone.float().mean((1, 2))
    assert shares.min() > 0.01 and 2 * shares.min() < shares.max() < 0.36
    for image, place in zip(images, gone, strict=True):
        colors = image[:, place]
        if mode == "const":
            assert (colors == 0).all()  # the mean color
        elif mode == "rand":
            assert (colors == colors[:, :1]).all() and len(colors[:, 0].unique()) == 3
        else:
            assert len(colors.unique()) > 0.9 * colors.numel()


def test_a_share_of_the_images_is_erased():
    assert 5 <= sum(bool((image != 1).any()) for image in erased(share=0.5)[0]) <= 15


@each("mode", ["const", "rand", "pixel"])
def test_erasing_and_mixing_draw_on_the_cpu_for_every_device(mode):
    """On the meta device, which has no generator of its own and refuses to be read."""
    images, after = erased(mode)
    assert erased(mode, device="meta")[1] == after
    mixup, drawn = Mixing().build(4, 0.1), []
    for pixels in (images, images.to("meta")):
        np.random.seed(0)  # noqa: NPY002
        mixup(pixels, torch.arange(20, device=pixels.device) % 4)
        drawn.append(np.random.rand())  # noqa: NPY002
    assert drawn[0] == drawn[1]
