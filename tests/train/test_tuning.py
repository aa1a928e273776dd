from fractions import Fraction

import pytest
import timm
import torch

import vitrel
from helpers import each
from helpers.small_runs import SMALL, Tensors, fit, small
from vitrel.train import Classifier, Optimization
from vitrel.train.ema import Ema
from vitrel.train.tuning import Tuning

pytestmark = pytest.mark.slow
ABSOLUTE = "vitrel_vit_n8_absolute"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's checkpoint, its average apart from its weights."""
    path = tmp_path_factory.mktemp("run") / "run.ckpt"
    torch.manual_seed(7)
    fit(small(ABSOLUTE, ema=Ema(0.9)), max_epochs=1).save_checkpoint(path)
    return path


def average(path):
    return {k.removeprefix("model."): v for k, v in torch.load(path, weights_only=True)["state_dict"].items()}


def test_training_starts_from_the_averaged_weights(run, capsys):
    module = small(ABSOLUTE, tuning=Tuning(str(run)))
    assert all(torch.equal(module.model.state_dict()[name], value) for name, value in average(run).items())
    assert capsys.readouterr().out == ""  # nothing was resampled


def test_another_size_is_resampled_and_said(run, capsys):
    how = {"optim": Optimization(warmup_epochs=0.5), "tuning": Tuning(str(run))}
    module = Classifier(ABSOLUTE, 4, (48, 64), SMALL, **how)
    printed = capsys.readouterr().out
    assert "run.ckpt: resampled to the model's grid: pos_embed" in printed and "blocks" not in printed
    (position,) = module.model.position_parameters()
    assert module.model.get_parameter(position).shape != average(run)[position].shape
    assert module(torch.zeros(1, 3, 48, 64)).shape == (1, 4)


def test_the_classifier_is_new_where_the_classes_differ(run, capsys):
    module = small(ABSOLUTE, 7, tuning=Tuning(str(run)))
    assert "run.ckpt: the classifier is new" in capsys.readouterr().out
    body = {n: v for n, v in average(run).items() if not n.startswith("head.")}
    assert all(torch.equal(module.model.state_dict()[n], v) for n, v in body.items())
    with pytest.raises(ValueError, match=r"run.ckpt: .*head.weight: \(4, 32\) .* set model.tuning.reset_head to null"):
        small(ABSOLUTE, 7, tuning=Tuning(str(run), reset_head=False))
    again = small(ABSOLUTE, tuning=Tuning(str(run), reset_head=True))
    assert not torch.equal(again.model.head.weight, average(run)["head.weight"])  # of as many, but not of these


def test_other_classes_of_the_same_number_get_a_new_classifier(run, capsys):
    other = Tensors()
    other.classes = ["c0", "c1", "c3", "c2"]
    with pytest.raises(ValueError, match=r"on classes other than those .* set model.tuning.reset_head to null or true"):
        fit(small(ABSOLUTE, tuning=Tuning(str(run), reset_head=False)), other)
    module = small(ABSOLUTE, tuning=Tuning(str(run), trainable=["norm"]))
    fit(module, other, max_epochs=1)
    assert "in another order: the classifier is new" in capsys.readouterr().out
    fit(small(ABSOLUTE, 3, tuning=Tuning(str(run), position="table", fit=0)), Tensors(3), max_epochs=1)
    assert capsys.readouterr().out.count("the classifier is new") == 1
    assert not module.model.head.weight.requires_grad  # `trainable` names what is trained, a new head too


TIMM = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=6)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A timm ViT and its weights in a file."""
    torch.manual_seed(3)
    model = timm.create_model("vit_tiny_patch16_224", **TIMM).eval()
    path = tmp_path_factory.mktemp("timm") / "model.safetensors"
    vitrel.save(vitrel.from_timm(model), path)
    return model, path


@pytest.mark.parametrize("absolute", ["drop", "fade"])
def test_a_timm_model_with_an_encoding_added(pretrained, absolute, tmp_path, capsys):
    theirs, path = pretrained
    how = {"tuning": Tuning(str(path), position="table", absolute=absolute), "optim": Optimization(warmup_epochs=0.5)}
    module = Classifier("vit_tiny_patch16_224", 4, (32, 32), {"drop_path_rate": 0.1}, **how)
    printed = capsys.readouterr().out
    assert "weights of 6 classes, data of 4: the classifier is new" in printed and "position: table is added" in printed
    features = module.model.eval().forward_features(x := torch.randn(2, 3, 32, 32))
    if absolute != "drop":
        torch.testing.assert_close(features, theirs.forward_features(x), atol=1e-5, rtol=1e-5)
    module.train()
    trainer = fit(module, accumulate_grad_batches=2)
    if absolute == "fade":  # over half of the 12 batches
        assert module.model.absolute_fade.fade_steps == 6 and vitrel.weights.absolute_scale(module.model) == 0
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = vitrel.load(tmp_path / "run.ckpt")
    assert torch.equal(again(x), module.model.eval()(x)) and again.arguments["drop_path_rate"] == 0.1
    assert again.pos_embed is None, "what has faded is gone"
    assert again.pretrained_cfg["label_names"] == ["c0", "c1", "c2", "c3"]
    resumed = Classifier("vit_tiny_patch16_224", 4, (32, 32), {"drop_path_rate": 0.1}, **how)
    fit(resumed, ckpt_path=tmp_path / "run.ckpt", max_epochs=3)
    vitrel.save(again, tmp_path / "file.safetensors")
    other = Classifier(str(tmp_path / "file.safetensors"), 4, (48, 40), tuning=Tuning(), optim=how["optim"])
    assert other(torch.randn(1, 3, 48, 40)).shape == (1, 4) and torch.equal(other.model.head.weight, again.head.weight)


def test_what_does_not_go_together_in_tuning(pretrained):
    for how, text in (
        (dict(pretrained=True, init_from="a.pth"), "exclude each other"),
        (dict(absolute="fade"), "need model.tuning.position"),
        (dict(reset_head=True), "model.tuning.reset_head needs model.tuning.init_from"),
    ):
        with pytest.raises(ValueError, match=text):
            Tuning(**how)
    for name, how, text in (
        ("vitrel_vit_n8_none", dict(trainable=["head", "fc_nrm"]), r"the model has no 'fc_nrm'; nearest: .*fc_norm"),
        ("vitrel_vit_n8_none", dict(trainable=["fc_norm"]), r"tuning.trainable: fc_norm has no parameters"),
        ("vitrel_vit_n8_none", dict(trainable=[]), r"tuning.trainable: an empty list has no parameters"),
        ("vitrel_vit_n8_none", dict(position="table", absolute="fade"), "absolute embedding"),
        ("vitrel_vit_n8_none", dict(position="absolute"), "adds to tokens"),
        ("local-dir:exported", {}, r"'local-dir:exported': .* model\.tuning\.init_from"),  # a folder
        (str(pretrained[1]), dict(init_from=str(pretrained[1])), "is a file that holds the weights"),
    ):
        with pytest.raises(ValueError, match=text):
            small(name, tuning=Tuning(**how))
    with pytest.raises(ValueError, match=r"resnet18 .* has no vitrel model"):
        Classifier("resnet18", 4, 32, tuning=Tuning(position="table"))


def test_any_file_of_weights(tmp_path):
    plain = timm.create_model("vitrel_vit_n8_none", num_classes=4, img_size=32, **SMALL)
    vitrel.save(plain, tmp_path / "plain.safetensors")
    module = small(tuning=Tuning(str(tmp_path / "plain.safetensors")))
    assert torch.equal(module.model.head.weight, plain.head.weight)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at nowhere.pt"):
        small(tuning=Tuning("nowhere.pt"))
    with pytest.raises(ValueError, match=r"init_from .*plain.safetensors: the weights do not fit the model.*blocks\.2"):
        Classifier("vitrel_vit_n8_none", 4, 32, SMALL | {"depth": 3}, tuning=Tuning(str(tmp_path / "plain.safetensors")))


def test_a_file_for_a_model_of_timm_is_read_as_others_are(tmp_path):
    """timm's own reader ends in a traceback for a file with code, and for one of another number of classes."""
    path = tmp_path / "resnet.pth"
    torch.save({"state_dict": {}, "x": Fraction(1, 2)}, path)  # of a class, which unpickling would import
    with pytest.raises(ValueError, match=r"resnet.pth \(.* bytes\) was refused: it holds more than tensors"):
        Classifier("resnet18", 4, 32, {"checkpoint_path": str(path)})
    plain = timm.create_model("resnet18", num_classes=7)
    torch.save(plain.state_dict(), path)
    module = Classifier("resnet18", 4, 32, {"checkpoint_path": str(path)})
    assert torch.equal(module.model.conv1.weight, plain.conv1.weight) and module.model.num_classes == 4
    with pytest.raises(ValueError, match=r"init_from .*resnet.pth: resnet18 \(ResNet\) has no vitrel model"):
        Classifier("resnet18", 4, 32, tuning=Tuning(str(path), position="table"))
    for name, how in (("vitrel_vit_n8_none", {}), ("vit_tiny_patch16_224", {"tuning": Tuning(position="table")})):
        with pytest.raises(ValueError, match=f"for timm's own models: use model.tuning.init_from: {path}"):
            Classifier(name, 4, 32, {"checkpoint_path": str(path)}, **how)
    with pytest.raises(ValueError, match=r"leave out model_args\.pretrained: vit_tiny.* from model\.tuning\.pretrained"):
        Classifier(name, 4, 32, {"pretrained": True}, **how)


@pytest.mark.filterwarnings("error:.*in eval mode.*")
def test_only_what_is_named_is_trained():
    torch.manual_seed(3)
    module = small("vitrel_vit_n8_table", tuning=Tuning(trainable=["norm", "fc_norm", "head"]))
    before = {n: p.detach().clone() for n, p in module.model.named_parameters()}
    modes = []
    module.register_forward_pre_hook(lambda m, _: modes.append({n: p.training for n, p in module.model.named_modules()}))
    trainer = fit(module)
    moved = {n for n, p in module.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.split(".")[0] in ("norm", "fc_norm", "head")} and moved
    assert {id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]} == {
        id(module.model.get_parameter(n)) for n in moved
    }
    training = [mode for mode in modes if mode["head"]]
    assert len(training) == 12  # after each evaluation too
    assert all(not on for mode in training for n, on in mode.items() if n.split(".")[0] not in ("norm", "fc_norm", "head"))


def test_names_are_whole_ones():
    module = small(tuning=Tuning(trainable=["blocks.1", "cls_token"]))
    trained = {n for n, p in module.model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in module.model.named_parameters() if n.startswith("blocks.1.") or n == "cls_token"}


@each(
    ("name", "position", "absolute", "result"),
    [
        ("vitrel_vit_n8_none", "table", "keep", "table"),
        ("vitrel_vit_n8_absolute", "rope_mixed", "fade", "absolute+rope_mixed"),
        ("vitrel_vit_n8_rope_mixed", "table", "keep", "rope_mixed+table"),
        ("vitrel_swin_n_cpb", "table", "keep", "table"),
    ],
)
def test_an_encoding_without_initial_weights(name, position, absolute, result):
    arguments = {"embed_dim": 32, "depths": (1, 1), "num_heads": (2, 4)} if "swin" in name else SMALL
    tuning = Tuning(position=position, absolute=absolute)
    module = Classifier(name, 4, 32, arguments, tuning=tuning, optim=Optimization(warmup_epochs=0))
    assert module.model.arguments["position"] == result
    before = {key: value.clone() for key, value in module.model.state_dict().items()}
    fit(module, max_steps=1)
    assert any(not torch.equal(before[key], value) for key, value in module.model.state_dict().items())
    stored, options = module.stored
    again = timm.create_model(stored, num_classes=4, img_size=(32, 32), **options)
    again.load_state_dict(module.model.state_dict())
