import copy

import pytest
import timm
import torch
from torch.nn import functional as F

from helpers import each
from helpers.small_runs import SMALL, Tensors, fit, small
from vitrel import save
from vitrel.train import Classifier, Optimization
from vitrel.train.distill import Distillation, Outputs, Teacher
from vitrel.train.ema import Ema
from vitrel.train.objective import Mixing, Objective
from vitrel.train.tuning import Tuning

pytestmark = pytest.mark.slow
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A vitrel teacher's file and a ResNet's, of 4 classes."""
    folder = tmp_path_factory.mktemp("teachers")
    torch.manual_seed(5)
    save(timm.create_model("vitrel_vit_n8_table", num_classes=4, img_size=48, depth=1), folder / "vit.safetensors")
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), folder / "resnet.pt")
    return folder


def resnet(weights, **how):
    return Distillation("resnet10t", checkpoint=str(weights / "resnet.pt"), **how)


def teacher_of(settings):
    teacher = Teacher(settings, 4)
    teacher.set_normalization(MEAN, STD)
    return teacher


def classifier(distillation, **how):
    return small(objective=Objective(distillation=distillation), **how)


@each("size", [None, (48, 64)])
def test_the_teacher_sees_its_own_preprocessing(weights, size):
    teacher = teacher_of(resnet(weights, img_size=size))
    assert teacher.size == (size or timm.get_pretrained_cfg("resnet10t").input_size[-2:])
    pixels = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    cfg = timm.get_pretrained_cfg("resnet10t")
    own_mean, own_std = (torch.tensor(v)[:, None, None] for v in (cfg.mean, cfg.std))
    plain = timm.create_model("resnet10t", num_classes=4).eval()
    plain.load_state_dict(torch.load(weights / "resnet.pt", weights_only=True))
    images = F.interpolate((pixels - own_mean) / own_std, teacher.size, mode="bicubic", antialias=True)
    with torch.no_grad():
        torch.testing.assert_close(teacher((pixels - mean) / std), plain(images), atol=2e-5, rtol=1e-4)


def test_the_hard_loss(weights):
    """The soft one: with a distillation token, in test_distill_features.py."""
    images, student, labels = torch.randn(3, 3, 32, 32), torch.randn(3, 4), torch.tensor([0, 1, 2])
    hard = teacher_of(resnet(weights, kind="hard", alpha=0.3, img_size=32))
    given, answers = F.cross_entropy(student, labels), hard(images)
    want = 0.7 * given + 0.3 * F.cross_entropy(student, answers.argmax(-1))
    torch.testing.assert_close(hard.loss(Outputs(student, student), Outputs(answers, answers), given), want)


def test_the_teacher_is_neither_trained_nor_saved_nor_averaged(weights, tmp_path):
    recipe = classifier(resnet(weights, img_size=32), ema=Ema(decay=0.5), mixing=Mixing(mixup=0.2))
    before = {n: v.clone() for n, v in recipe.teacher.model.state_dict().items()}
    trainer = fit(recipe)
    assert all(torch.equal(before[n], v) for n, v in recipe.teacher.model.state_dict().items())  # BatchNorm's statistics too
    assert not any(module.training for module in recipe.teacher.model.modules())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    plain = {f"model.{n}" for n in timm.create_model("vitrel_vit_n8_none", num_classes=4, img_size=32, **SMALL).state_dict()}
    assert set(checkpoint["state_dict"]) == set(checkpoint["current_model_state"]) == plain
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in recipe.parameters()} and len(optimized) == len(plain)
    assert copy.deepcopy(recipe).teacher is recipe.teacher
    assert checkpoint["hyper_parameters"]["objective"]["distillation"]["teacher"] == "resnet10t"


def test_a_checkpoint_of_a_run_tells_how_the_teacher_was_built(tmp_path):
    torch.manual_seed(2)
    first = small("vitrel_vit_n8_table")
    fit(first, max_epochs=1).save_checkpoint(tmp_path / "teacher.ckpt")
    stored = torch.load(tmp_path / "teacher.ckpt", weights_only=True)
    stored["vitrel"]["model_args"]["checkpoint_path"] = str(tmp_path / "none.pth")  # where others came from: not looked at
    torch.save(stored, tmp_path / "teacher.ckpt")
    recipe = classifier(Distillation("vitrel_vit_n8_table", checkpoint=str(tmp_path / "teacher.ckpt")))
    assert recipe.teacher.size == (32, 32) and recipe.teacher.classes == ["c0", "c1", "c2", "c3"]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(recipe.teacher(images), first.eval()(images))
    other = Tensors()
    other.classes = ["c1", "c0", "c2", "c3"]
    with pytest.raises(ValueError, match=r"distillation.checkpoint was trained on classes other .* or in another order: use a"):
        fit(recipe, other)


def test_the_order_of_a_teachers_outputs_is_told_where_timm_has_another(weights):
    data = Tensors()
    data.classes = ["2", "3", "10", "11"]
    with pytest.warns(UserWarning, match=r"teacher resnet10t has no class names, .* class 0 is '2'; as text, it would be '10'"):
        fit(classifier(resnet(weights, img_size=32)), data, max_epochs=1)


def test_teachers_that_do_not_fit_are_refused(weights, monkeypatch):
    for how, text in (
        ({"pretrained": True}, "give resnet10t either a checkpoint, or pretrained: true"),
        ({"alpha": 2.0}, r"distillation.alpha \(2.0\) is within 0..1"),
        ({"tau": 0.0}, r"distillation.tau \(0.0\) positive"),
    ):
        with pytest.raises(ValueError, match=text):
            Distillation("resnet10t", checkpoint="x", **how)
    with pytest.raises(ValueError, match=r"distillation teacher resnet10t cannot load .*resnet.pt: .*size mismatch for fc"):
        Teacher(resnet(weights), 5)
    state = torch.load(weights / "resnet.pt", weights_only=True)
    torch.save({f"model.{name}": value for name, value in state.items()} | {"loss.scale": torch.ones(1)}, weights / "more.pt")
    with pytest.raises(ValueError, match=r"cannot load .*more.pt: .*loss\.scale"):
        Teacher(Distillation("resnet10t", str(weights / "more.pt")), 4)
    with pytest.raises(ValueError, match=r"unknown model 'resnet10'; nearest: .*resnet1"):
        Teacher(Distillation("resnet10", str(weights / "resnet.pt")), 4)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at nowhere.pt"):
        Teacher(Distillation("resnet10t", "nowhere.pt"), 4)
    requested = []

    def create_model(name, pretrained, **how):
        requested.append((name, pretrained, how))
        return original(name, **how)

    original = timm.create_model
    monkeypatch.setattr(timm, "create_model", create_model)
    with pytest.raises(ValueError, match="resnet10t has 1000 classes, the student 4: use a teacher of the same classes"):
        Teacher(Distillation("resnet10t", pretrained=True), 4)
    assert requested == [("resnet10t", True, {})]  # with num_classes timm would have put an untrained head on


def test_without_labels_the_student_takes_the_teachers_classes_and_answers(tmp_path):
    torch.manual_seed(3)
    save(timm.create_model("vitrel_vit_n8_table", num_classes=7, img_size=32, depth=1), tmp_path / "teacher.safetensors")
    how = {"checkpoint": str(tmp_path / "teacher.safetensors"), "teacher_args": {"depth": 1, "num_classes": 7}, "img_size": 32}
    data = Tensors()  # of 4 classes, whose labels are not used
    recipe = classifier(Distillation("vitrel_vit_n8_table", alpha=1.0, labels=False, **how))
    assert recipe.num_classes == recipe.model.num_classes == 7 and data.num_classes == 4
    trainer = fit(recipe, data, max_epochs=1)
    with torch.no_grad():
        agree = recipe.eval()(data.images[:6]).argmax(-1) == recipe.teacher(data.images[:6]).argmax(-1)
    assert trainer.callback_metrics["val/top1"] == agree.float().mean()
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    stored = torch.load(tmp_path / "run.ckpt", weights_only=True)["vitrel"]
    assert stored["classes"] == [str(i) for i in range(7)]
    mixed = classifier(Distillation("vitrel_vit_n8_table", labels=False, **how), mixing=Mixing(mixup=0.5))
    fit(mixed, Tensors(num_classes=9), max_epochs=1)  # labels above the number of the teacher's classes


def test_a_teacher_of_imagenet_names_its_classes_by_wordnet_ids(tmp_path):
    save(timm.create_model("vitrel_vit_n8_none", img_size=32, depth=1), tmp_path / "teacher.safetensors")
    settings = Distillation(
        "vitrel_vit_n8_none", str(tmp_path / "teacher.safetensors"), labels=False, img_size=32, teacher_args={"depth": 1}
    )
    names = Teacher(settings, 3).class_names()
    assert len(names) == 1000 and names[0] == "n01440764" and names[491] == "n03000684"


def test_the_student_sees_its_own_sizes_and_the_teacher_the_images_as_loaded(weights):
    settings = resnet(weights, alpha=1.0, img_size=32, sizes=[16, (24, 40)])
    recipe, seen = classifier(settings), []
    recipe.model.register_forward_pre_hook(lambda model, args: seen.append((model.training, tuple(args[0].shape[2:]))))
    recipe.teacher.model.model.register_forward_pre_hook(lambda model, args: seen.append(tuple(args[0].shape[2:])))
    fit(recipe, max_epochs=1)
    assert seen[:4] == [(32, 32), (True, (16, 16)), (32, 32), (True, (24, 40))]
    assert [*recipe.train_sizes] == [(16, 16), (24, 40)]
    assert {shape for entry in seen if len(entry) == 2 and entry[0] is False for shape in [entry[1]]} == {(32, 32)}
    images = torch.randn(2, 3, 32, 32)
    small = F.interpolate(images, (24, 40), mode="bicubic", antialias=True)
    torch.testing.assert_close(settings.student_view(images, 3), small)
    with pytest.raises(ValueError, match=r"distillation.sizes takes sides"):
        resnet(weights, sizes=[0])


def test_without_a_teacher_the_student_learns_what_it_did_before_its_encoding_changed(tmp_path):
    torch.manual_seed(4)
    model = timm.create_model("vitrel_vit_n8_absolute", num_classes=7, img_size=32, **SMALL)
    torch.nn.init.normal_(model.pos_embed.pos_embed)  # one that matters
    save(model.eval(), tmp_path / "start.safetensors")
    tuning = Tuning(init_from=str(tmp_path / "start.safetensors"), position="rope_mixed", absolute="drop", fit=0)
    how = {"objective": Objective(distillation=Distillation(alpha=1.0, labels=False)), "tuning": tuning}
    recipe = Classifier("vitrel_vit_n8_absolute", 4, (32, 32), **how, optim=Optimization(lr=1e-2, warmup_epochs=0))
    assert recipe.num_classes == 7 and recipe.model.pos_embed is None
    images = Tensors().images
    with torch.no_grad():
        torch.testing.assert_close(recipe.teacher(images), model(images))

        def distance():
            return float((recipe.eval()(images) - model(images)).square().mean())

        before = distance()
        with torch.enable_grad():
            fit(recipe.train(), max_epochs=8)
        assert distance() < 0.5 * before
    with pytest.raises(ValueError, match="random weights"):
        classifier(Distillation(labels=False))
    with pytest.raises(ValueError, match="belong to a teacher"):
        Distillation(checkpoint="x")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model with an absolute embedding that matters, and its file."""
    torch.manual_seed(4)
    model = timm.create_model("vitrel_vit_n8_absolute", num_classes=4, img_size=32, **SMALL)
    torch.nn.init.normal_(model.pos_embed.pos_embed, std=0.5)
    path = tmp_path_factory.mktemp("start") / "start.safetensors"
    save(model.eval(), path)
    return model, str(path)


STILL = Optimization(lr=1e-9, warmup_epochs=0)


def fitted_to(path, name="vitrel_vit_n8_absolute", **how):
    return Classifier(name, 4, (32, 32), tuning=Tuning(init_from=path, position="table", **how), optim=STILL)


def test_pretrained_weights_are_fitted_by_default(start, capsys):
    """The embedding is dropped, and the table has values from the start."""
    recipe = fitted_to(start[1])
    fit(recipe, max_epochs=1)
    assert "the absolute embedding: drop" in (printed := capsys.readouterr().out) and "table fitted to 24 images" in printed
    tables = [block.position.relative_position_bias_table for block in recipe.model.blocks]
    assert recipe.model.pos_embed is None and min(table.std() for table in tables) > 0.01
    for how in ({"fit": 0}, {"absolute": "keep"}):
        kept = fitted_to(start[1], **how)
        assert "is not fitted to the weights:" in capsys.readouterr().out and kept.model.pos_embed is not None


def test_weights_whose_position_cannot_be_fitted_are_said(tmp_path, capsys):
    path = str(tmp_path / "start.safetensors")
    save(timm.create_model("vitrel_vit_n8_none", num_classes=4, img_size=32, **SMALL), path)
    fit(fitted_to(path, "vitrel_vit_n8_none"), max_epochs=1)
    printed = capsys.readouterr().out
    assert "not fitted to the weights, since the model has no absolute embedding to convert: it is learned" in printed
    with pytest.raises(ValueError, match="no absolute embedding to convert"):
        fit(fitted_to(path, "vitrel_vit_n8_none", fit=8), max_epochs=1)


def test_an_encoding_is_fitted_before_training_and_not_again(start, tmp_path, capsys):
    """Beside an embedding that fades; one that is dropped: a test above, and how closely it is followed: tests/weights."""
    (model, path), data, found = start, Tensors(), {}
    for fit_to in (0, 16):
        recipe = fitted_to(path, absolute="fade", fit=fit_to)
        trainer = fit(recipe, data, max_epochs=1)
        fitted = copy.deepcopy(recipe.model)
        with torch.no_grad():
            fitted.pos_embed = fitted.absolute_fade = None  # as it will be after the fade
            found[fit_to] = (fitted.eval()(data.images) - model(data.images)).square().mean()
    assert "table fitted to 16 images" in capsys.readouterr().out
    assert found[16] < found[0]
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    fit(fitted_to(path, absolute="fade", fit=16), data, max_epochs=1, ckpt_path=tmp_path / "run.ckpt")
    assert "fitted" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"model.tuning.fit .* absolute: drop"):
        Tuning(fit=16)
