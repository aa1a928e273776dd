import re
import socket

import pytest
import timm
import torch

from vitrel.evaluate.checkpoint import class_outputs, encoding_of, load_checkpoint


def test_a_checkpoint_becomes_its_model_again(checkpoint):
    path = checkpoint()
    trained = load_checkpoint(path)
    assert (trained.name, trained.label, trained.encoding) == ("vitrel_vit_n8_table", "vitrel_vit_n8_table", "table")
    assert (trained.img_size, trained.seed, trained.classes) == ((32, 48), 7, ("left", "right", "above"))
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(value, stored[f"model.{name}"]) for name, value in trained.model.state_dict().items())
    assert not trained.model.training
    assert load_checkpoint(path, label="mine", seed=3).label == "mine"


def test_model_arguments_are_used():
    model = timm.create_model("vitrel_vit_n8_none", position="absolute+rope_mixed")
    assert encoding_of(model) == "absolute+rope_mixed"
    assert encoding_of(timm.create_model("vitrel_vit_n8_none")) == "none"


def test_position_of_a_checkpoint_is_that_of_its_arguments(checkpoint):
    def as_rope(stored):
        model = timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=(32, 48), position="rope_axial")
        stored["state_dict"] = {f"model.{key}": value for key, value in model.state_dict().items()}

    assert load_checkpoint(checkpoint(edit=as_rope, model_args={"position": "rope_axial"})).encoding == "rope_axial"


def test_missing_empty_and_cut_off_files_are_named_with_their_size(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none\.ckpt$"):
        load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(FileNotFoundError, match="it is a folder"):
        load_checkpoint(tmp_path)
    empty = tmp_path / "empty.ckpt"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty\.ckpt \(0 bytes\) is no readable checkpoint: it is empty, the disk"):
        load_checkpoint(empty)
    whole = checkpoint().read_bytes()
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=rf"cut\.ckpt \({len(whole) // 2:,} bytes\) is no .* checkpoint: .*; train or copy it again"
    ):
        load_checkpoint(cut)


def test_files_that_hold_something_else_are_refused(tmp_path):
    torch.save({"state_dict": {}, "optimizer": 1}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"is not a checkpoint of tools/train\.py.* it holds optimizer, state_dict"):
        load_checkpoint(tmp_path / "other.ckpt")
    torch.save({"state_dict": {}, "vitrel": "model"}, tmp_path / "text.ckpt")
    with pytest.raises(ValueError, match=r"is not a checkpoint of tools/train\.py"):
        load_checkpoint(tmp_path / "text.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="it holds list"):
        load_checkpoint(tmp_path / "list.ckpt")
    torch.save({"vitrel": re.compile("x")}, tmp_path / "object.ckpt")
    with pytest.raises(ValueError, match="was refused: it holds more than tensors and plain values"):
        load_checkpoint(tmp_path / "object.ckpt")


def test_damage_inside_a_tensor_is_noticed(checkpoint):
    path = checkpoint()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.ckpt \([\d,]+ bytes\) is damaged: its record 'last/data/\d+'"):
        load_checkpoint(path)


def test_weights_that_do_not_fit_are_listed(checkpoint):
    def shrink(stored):
        stored["state_dict"]["model.head.weight"] = torch.zeros(2, 96)
        stored["state_dict"]["model.extra"] = torch.zeros(1)
        del stored["state_dict"]["model.cls_token"]

    with pytest.raises(ValueError, match="does not fit its model") as caught:
        load_checkpoint(checkpoint(edit=shrink))
    text = str(caught.value)
    assert "of another shape: head.weight: (2, 96) in the file, (3, 96) in the model" in text and "number of classes" in text
    assert "not in the file: cls_token." in text and "not in the model: extra." in text

    def grow(stored):
        stored["state_dict"]["model.blocks.0.position.relative_position_bias_table"] = torch.zeros(15 * 15 + 3, 3)

    with pytest.raises(ValueError, match=r"does not fit its model: blocks\.0\.position\..* is of another grid \(8x8 -> 4x6"):
        load_checkpoint(checkpoint(edit=grow))


def test_not_a_number_in_the_weights_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"hold NaN or infinity in head\.bias"):
        load_checkpoint(checkpoint(edit=lambda stored: stored["state_dict"]["model.head.bias"].fill_(float("nan"))))


def test_models_that_cannot_be_asked_or_built_are_refused(checkpoint):
    with pytest.raises(ValueError, match=r"last\.ckpt does not fit its model: .*\n.*Missing key") as caught:
        load_checkpoint(checkpoint(model="vit_tiny_patch16_224"))
    assert len(str(caught.value)) < 1000
    with pytest.raises(ValueError, match=r"asks for 'vitrel_vit_n9', which cannot be built: it is no model of"):
        load_checkpoint(checkpoint(model="vitrel_vit_n9"))
    with pytest.raises(ValueError, match=r"asks for vitrel_vit_n8_table with .*'depht': 2.* which cannot be built: .*depht"):
        load_checkpoint(checkpoint(model_args={"depht": 2}))


@pytest.fixture
def nothing_else_read(monkeypatch):
    """Fails where the network is asked, or a second file is read for a model."""

    def fail(*args, **how):
        raise AssertionError(f"asked for {args[-1]!r}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    for name in ("load_checkpoint", "load_model_config_from_path", "load_model_config_from_hf"):
        monkeypatch.setattr(f"timm.models._factory.{name}", fail)


@pytest.mark.parametrize("name", ["hf-hub:any/model", "hf_hub:any/model", "local-dir:/tmp", "hf-hub:any/vitrel_vit_n8_table"])
def test_a_checkpoint_names_a_model_and_no_place(checkpoint, nothing_else_read, name):
    with pytest.raises(ValueError, match=f"last.ckpt asks for '{name}', which cannot be built: it is no model of"):
        load_checkpoint(checkpoint(model=name))


@pytest.mark.parametrize(
    "args",
    [
        {"checkpoint_path": "other.pth"},
        {"pretrained": True, "pretrained_cfg": {"url": "file:other.pth"}},
        {"pretrained": True, "pretrained_cfg_overlay": {"hf_hub_id": "any/model"}, "cache_dir": "here"},
        {"pretrained": True, "pretrained_cfg_overlay": {"file": "other.pth"}},
    ],
)
def test_a_checkpoint_has_no_other_weights_loaded(checkpoint, nothing_else_read, args):
    path = checkpoint(model_args=args)
    stored = torch.load(path, weights_only=True)["state_dict"]
    trained = load_checkpoint(path)
    assert all(torch.equal(value, stored[f"model.{name}"]) for name, value in trained.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 3),
        ("model_args", [1]),
        ("classes", "abc"),
        ("classes", None),
        ("img_size", 32),
        ("img_size", ["32", "48"]),
        ("mean", None),
        ("std", "abc"),
        ("crop_pct", "1"),
        ("interpolation", None),
    ],
)
def test_a_damaged_entry_is_named(checkpoint, name, value):
    with pytest.raises(ValueError, match=rf"last.ckpt is damaged: {name} in its 'vitrel' is .*; train or copy it again"):
        load_checkpoint(checkpoint(**{name: value}))


@pytest.mark.parametrize("record", [[1], {"blocks.0.position": 3}, {"blocks.0.position": {"x": 1}}])
def test_a_damaged_record_of_positions_is_named(checkpoint, record):
    with pytest.raises(ValueError, match=r"last.ckpt is damaged: its weights or its record of positions"):
        load_checkpoint(checkpoint(position=record))


def test_classes_must_be_those_of_training(trained):
    model = trained("vitrel_vit_n8_none")
    class_outputs(model, ["left", "right", "above"], "here")
    with pytest.raises(ValueError, match=r"trained on 3 classes, but here has 2: it lacks right\. Evaluate on data"):
        class_outputs(model, ["left", "above"], "here")
    with pytest.raises(ValueError, match="lacks above and adds below"):
        class_outputs(model, ["left", "right", "below"], "here")
    with pytest.raises(ValueError, match="lists them in another order"):
        class_outputs(model, ["right", "left", "above"], "here")


def test_a_model_of_timm_that_our_trainer_trained_is_read(checkpoint):
    how = dict(embed_dim=48, depth=1, num_heads=3, patch_size=8)
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=(32, 48), **how)

    def put(stored, factor=1.0):
        stored["state_dict"] = {f"model.{name}": factor * value for name, value in model.state_dict().items()}

    trained = load_checkpoint(checkpoint("vit_tiny_patch16_224", put, model_args=how))
    assert (trained.encoding, trained.img_size, trained.classes) == ("timm", (32, 48), ("left", "right", "above"))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in trained.model.state_dict().items())
    with pytest.raises(ValueError, match="does not fit its model: the weights hold NaN or infinity in cls_token"):
        load_checkpoint(checkpoint("vit_tiny_patch16_224", lambda stored: put(stored, float("nan")), model_args=how))
