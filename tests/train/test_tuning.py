import pytest
import timm
import torch

import vitrel
from helpers.small_runs import SMALL, Tensors, fit, small
from vitrel.train import Classifier, Optimisation
from vitrel.train.ema import Ema
from vitrel.train.tuning import Tuning

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
    how = {"optim": Optimisation(warmup_epochs=0.5), "tuning": Tuning(str(run))}
    module = Classifier(ABSOLUTE, 4, (48, 64), SMALL, **how)
    printed = capsys.readouterr().out
    assert "run.ckpt: resampled to the model's grid: pos_embed" in printed and "blocks" not in printed
    (position,) = module.model.position_parameters()
    assert module.model.get_parameter(position).shape != average(run)[position].shape
    assert module(torch.zeros(1, 3, 48, 64)).shape == (1, 4)


def test_a_folder_as_a_model_is_told_where_weights_go():
    with pytest.raises(ValueError, match=r"'local-dir:exported': .* model\.tuning\.init_from"):
        small("local-dir:exported")


def test_another_number_of_classes_needs_a_new_head(run):
    with pytest.raises(
        ValueError, match=r"init_from .*run.ckpt: .*head.weight: \(4, 32\) .* set model.tuning.reset_head: true"
    ):
        small(ABSOLUTE, 7, tuning=Tuning(str(run)))
    module = small(ABSOLUTE, 7, tuning=Tuning(str(run), reset_head=True))
    body = {n: v for n, v in average(run).items() if not n.startswith("head.")}
    assert all(torch.equal(module.model.state_dict()[n], v) for n, v in body.items())
    again = small(ABSOLUTE, tuning=Tuning(str(run), reset_head=True))
    assert not torch.equal(again.model.head.weight, average(run)["head.weight"])  # of as many, but not of these


def test_other_classes_of_the_same_number_are_refused(run):
    other = Tensors()
    other.classes = ["c0", "c1", "c3", "c2"]
    with pytest.raises(ValueError, match=r"tuning.init_from was trained on classes other .* set model.tuning.reset_head: true"):
        fit(small(ABSOLUTE, tuning=Tuning(str(run))), other)
    fit(small(ABSOLUTE, tuning=Tuning(str(run), reset_head=True)), other, max_epochs=1)


def test_any_file_of_weights(tmp_path):
    plain = timm.create_model("vitrel_vit_n8_none", num_classes=4, img_size=32, **SMALL)
    vitrel.save_pretrained(plain, tmp_path / "plain.safetensors")
    module = small(tuning=Tuning(str(tmp_path / "plain.safetensors")))
    assert torch.equal(module.model.head.weight, plain.head.weight)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at nowhere.pt"):
        small(tuning=Tuning("nowhere.pt"))
    with pytest.raises(ValueError, match=r"init_from .*plain.safetensors: the weights do not fit the model.*blocks\.2"):
        Classifier("vitrel_vit_n8_none", 4, 32, SMALL | {"depth": 3}, tuning=Tuning(str(tmp_path / "plain.safetensors")))


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


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        (["head", "fc_nrm"], r"tuning.trainable: the model has no 'fc_nrm'; nearest: .*fc_norm"),
        (["fc_norm"], r"tuning.trainable: nothing under fc_norm has parameters"),
        ([], r"tuning.trainable: nothing under an empty list has parameters"),
    ],
)
def test_names_that_train_nothing_are_refused(trainable, text):
    with pytest.raises(ValueError, match=text):
        small(tuning=Tuning(trainable=trainable))


def test_a_new_head_needs_a_file():
    with pytest.raises(ValueError, match=r"model.tuning.reset_head is of model.tuning.init_from"):
        Tuning(reset_head=True)
