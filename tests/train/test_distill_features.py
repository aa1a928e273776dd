"""Feature and token distillation: targets by plain loops, what shifting removes, gradients, resuming, and refusals."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from helpers import each
from helpers.small_runs import SMALL, Tensors, fit
from vitrel import save
from vitrel.train import Classifier, Optimization
from vitrel.train.distill import Distillation, Features, Teacher, outputs
from vitrel.train.objective import Objective
from vitrel.train.tuning import Tuning

pytestmark = pytest.mark.slow
ALONE = {"alpha": 1.0, "labels": False}


def teacher_of(model, features=None, size=(32, 48), classes=4, **how):
    teacher = Teacher(Distillation(features=features, **ALONE | how), classes, (model.eval(), None), size)
    teacher.set_normalization(*(model.pretrained_cfg[name] for name in ("mean", "std")))
    return teacher


def vit(name="vitrel_vit_n8_sincos", size=(32, 48), **how):
    torch.manual_seed(3)
    return timm.create_model(name, img_size=size, num_classes=4, **SMALL | how)


def normalized(token):
    return (token - token.mean()) / (token.var(correction=0) + 1e-5).sqrt()


@torch.no_grad()
@each("how", [{}, {"class_token": False, "global_pool": "avg", "reg_tokens": 2}])
def test_targets_are_means_over_views_of_the_tokens_that_saw_the_same_patch(how):
    """Patches are found by their pixels in what the model was given, and averaged by loops."""
    model, images, views = vit(**how), torch.randn(2, 3, 32, 48), []
    teacher = teacher_of(model, Features(blocks=(0, -1), views=3))
    hook = model.patch_embed.register_forward_pre_hook(lambda module, args: views.append(args[0].clone()))
    torch.manual_seed(0)
    found = teacher.targets(images)
    hook.remove()
    torch.manual_seed(0)  # of a batch: a resumed run sees the same views
    assert all(map(torch.equal, teacher.targets(images).patches, found.patches))
    assert len(views) == 4 and torch.equal(views[0], images) and not any(torch.equal(view, images) for view in views[1:])
    prefix = model.num_prefix_tokens
    for block, patches in zip((0, 1), found.patches, strict=True):
        assert patches.shape == (2, 4, 6, 32)
        seen = []
        for view in views[1:]:
            tokens, context = model.embed(view)
            for layer in model.blocks[: block + 1]:
                tokens = layer(tokens, context, None, None)
            seen.append(tokens)
        for image, y, x in ((b, i, j) for b in range(2) for i in range(4) for j in range(6)):
            total = 0
            for view, tokens in zip(views[1:], seen, strict=True):
                patch = images[image, :, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8]
                (place,) = [
                    6 * row + column
                    for row in range(4)
                    for column in range(6)
                    if torch.equal(view[image, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8], patch)
                ]
                total = total + normalized(tokens[image, prefix + place])
            torch.testing.assert_close(patches[image, y, x], total / 3, atol=1e-5, rtol=1e-4)
    assert len(found.class_tokens) == (0 if how else 2)
    torch.testing.assert_close(found.logits, model(images))  # of the image as it is


class Planted(nn.Module):
    """Tokens of 4 channels that normalization leaves as they are: the sign of a patch's mean, and a pattern of the place."""

    num_classes, img_size, pretrained_cfg = 2, (32, 48), {"mean": (0.5,) * 3, "std": (0.5,) * 3}

    def __init__(self, pattern):
        super().__init__()
        self.pattern = pattern

    def forward_intermediates(self, images):
        content = F.avg_pool2d(images, 8).mean(1).sign()
        place = self.pattern.expand_as(content)
        return images, [torch.stack((content, -content, place, -place), 1)]

    def forward_head(self, images):
        return images.mean((2, 3))[:, :2]


BORDER = torch.tensor([[1.0] * 6, [1, -1, -1, -1, -1, 1], [1, -1, -1, -1, -1, 1], [1] * 6])


@each("pattern", [BORDER, torch.tensor([[-1.0, -1, 1, 1]]).T.expand(4, 6)])
def test_a_pattern_of_place_alone_is_no_target(pattern):
    """It keeps its mean alone, with the variance of a mean of as many draws; the content stays as it is."""
    torch.manual_seed(0)
    images, views = torch.randn(1000, 3, 32, 48), 4
    plain, shifted = (teacher_of(Planted(pattern), Features(views=n), classes=2).targets(images) for n in (0, views))
    torch.testing.assert_close(plain.patches[0][..., 2], pattern.expand(1000, 4, 6), atol=1e-4, rtol=0)
    torch.testing.assert_close(shifted.patches[0][..., :2], plain.patches[0][..., :2])
    left, mean, variance = shifted.patches[0][..., 2], pattern.mean(), pattern.var(correction=0)
    assert (left.mean(0) - mean).abs().max() < 5 * (variance / views / 1000).sqrt()  # at every place, those of the border too
    assert left.var(0).sub(variance / views).abs().max() < 0.25 * variance / views


@each("loss", ["smooth_l1", "cosine"])
def test_loss_and_gradient_of_tokens(loss):
    """The loss is that of the formula; it is 0 for the teacher itself, and its gradient that of finite differences."""
    model, images = vit(), torch.randn(2, 3, 32, 48)
    teacher = teacher_of(model, Features(blocks=(0, 1), loss=loss, weight=3.0, views=0))
    targets, student = teacher.targets(images), vit("vitrel_vit_n8_none")
    seen = outputs(student, images, (0, 1))
    distances = []
    for ours, theirs in zip(seen.patches + seen.class_tokens, targets.patches + targets.class_tokens, strict=True):
        a, b = ours.flatten(0, -2), theirs.flatten(0, -2)
        off = (a - b).abs()
        by_channel = torch.where(off < 1, off**2 / 2, off - 0.5)
        cosine = (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)
        distances.append(by_channel.mean() if loss == "smooth_l1" else 1 - cosine.mean())
    p, q = (x.log_softmax(-1) for x in (targets.logits, seen.logits))
    want = 3 * sum(distances) / 4 + (p.exp() * (p - q)).sum(-1).mean()
    total = teacher.loss(seen, targets, torch.tensor(9.0))
    torch.testing.assert_close(total, want)
    assert teacher.loss(outputs(model, images, (0, 1)), targets, torch.tensor(9.0)).abs() < 1e-5
    total.backward()
    weight = student.blocks[0].mlp.fc1.weight
    direction = weight.grad / weight.grad.norm()
    with torch.no_grad():
        values = []
        for step in (1e-2, -1e-2):
            weight += step * direction
            values.append(teacher.loss(outputs(student, images, (0, 1)), targets, torch.tensor(9.0)))
            weight -= step * direction
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(weight.grad.norm()), rel=0.02)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Files of a model with 7 classes, and of one without a classifier."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(4)
    for name, classes in (("classes", 7), ("none", 0)):
        model = timm.create_model("vitrel_vit_n8_absolute", num_classes=classes, img_size=32, **SMALL)
        nn.init.normal_(model.pos_embed.pos_embed, std=0.3)  # one that matters
        save(model, folder / f"{name}.safetensors")
    return folder


def student(file, size=(32, 32), position="alibi", **how):
    tuning = Tuning(init_from=str(file), position=position, absolute="drop", fit=0)
    objective = Objective(distillation=Distillation(**ALONE | {"features": Features()} | how))
    optim = Optimization(lr=3e-3, warmup_epochs=0, final_lr=1.0)
    return Classifier("vitrel_vit_n8_absolute", 4, size, tuning=tuning, objective=objective, optim=optim)


def test_a_teacher_without_a_classifier_is_followed_in_features_alone(start):
    recipe = student(start / "none.safetensors")
    assert recipe.num_classes == 4 and not recipe.ignores_labels
    before, images = recipe.model.blocks[1].mlp.fc2.weight.detach().clone(), torch.randn(2, 3, 32, 32)
    assert "val/top1" in fit(recipe, max_epochs=1).callback_metrics  # against the labels of the data
    assert not torch.equal(before, recipe.model.blocks[1].mlp.fc2.weight)
    seen, targets = outputs(recipe.model, images, (-1,)), recipe.teacher.targets(images)
    assert targets.logits is None and torch.isfinite(recipe.teacher.loss(seen, targets, torch.tensor(9.0)))
    with pytest.raises(ValueError, match=r"has no classifier, so no logits: set distillation.features"):
        student(start / "none.safetensors", features=None)


@each("name", ["vitrel_vit_n8_table", "deit_tiny_distilled_patch16_224"])
def test_with_a_distillation_token_one_head_learns_the_labels_and_the_other_the_teacher(start, name):
    arguments = SMALL | ({"dist_token": True} if name.startswith("vitrel") else {})
    how = {"teacher": "vitrel_vit_n8_absolute", "checkpoint": str(start / "classes.safetensors"), "teacher_args": SMALL}
    settings = Distillation(**how, alpha=0.3, tau=2.0, tokens=True, img_size=32)
    recipe = Classifier(name, 7, (32, 32), arguments, objective=Objective(distillation=settings))
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([0, 6, 2])
    of_class, of_token = recipe.train().model(images)
    p, q = (F.softmax(x / 2, -1) for x in (recipe.teacher(images), of_token))
    want = 0.7 * F.cross_entropy(of_class, labels) + 0.3 * 4 * (p * (p / q).log()).sum(-1).mean()
    seen = outputs(recipe.model, images)
    found = recipe.teacher.loss(seen, recipe.teacher.targets(images), F.cross_entropy(seen.logits, labels))
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(recipe.eval().model(images), (of_class + of_token) / 2)
    fit(recipe.train(), Tensors(7), max_epochs=1)
    with pytest.raises(
        ValueError, match=r"distillation.tokens needs a student with a distillation token .*, which ViT has not"
    ):
        Classifier("vitrel_vit_n8_none", 7, 32, SMALL, objective=Objective(distillation=settings))


def test_what_does_not_fit_is_refused_by_name(start):
    file = start / "classes.safetensors"
    for how, said in (
        ({"weight": 0.0}, "a positive weight"),
        ({"blocks": ()}, "one block or more"),
        ({"views": -1}, "0 views or more"),
    ):
        with pytest.raises(ValueError, match=said):
            Features(**how)
    with pytest.raises(ValueError, match=r"distillation.sizes gives the student other patches than the teacher"):
        Distillation(features=Features(), sizes=[32])
    with pytest.raises(ValueError, match=r"features.blocks: there is no block 2: ViT has blocks 0 to 1"):
        student(file, features=Features(blocks=(2,)))
    with pytest.raises(ValueError, match=r"28x30 pixels are no whole number of its 4x4 patches"):
        student(file, (28, 30))
    with pytest.raises(ValueError, match=r"has 4x4 patches of 32 channels after block -1, the teacher .* 6x6 patches of 32"):
        student(file, img_size=48)
    how = {"teacher": "vitrel_vit_n8_absolute", "checkpoint": str(file), "img_size": 32}
    how["teacher_args"] = SMALL | {"num_classes": 7}
    wide = Objective(distillation=Distillation(**how, **ALONE, features=Features()))
    with pytest.raises(ValueError, match=r"4x4 patches of 48 channels .* teacher vitrel_vit_n8_absolute 4x4 patches of 32"):
        Classifier("vitrel_vit_n8_table", 7, 32, {"depth": 2, "embed_dim": 48, "num_heads": 2}, objective=wide)
    with pytest.raises(ValueError, match=r"the student has 1x1 patches of 512 channels"):
        Classifier("resnet10t", 7, (32, 32), {}, objective=wide)
    data = Tensors()
    data.trained_at = [(32, 32), (48, 48)]
    with pytest.raises(ValueError, match=r"tokens of images of 32x32 pixels: leave out data.train_sizes and data.protocol"):
        fit(student(file), data)
