"""Trained models as an evaluation takes them: checkpoints of the trainer, timm's names with weights, classes and outputs."""

import argparse
import math
from dataclasses import replace

import pytest
import timm
import torch
from timm.models import save_for_hf

import vitrel
from helpers import each
from vitrel.evaluate.checkpoint import _label_of, load_checkpoint, load_model, read_class_indices, trained_model
from vitrel.evaluate.classes import class_outputs


def test_a_checkpoint_becomes_its_model_again(checkpoint):
    path = checkpoint()
    trained = load_checkpoint(path)
    assert (trained.name, trained.label, trained.encoding) == ("vitrel_vit_n8_table", "vitrel_vit_n8_table", "table")
    assert (trained.img_size, trained.seed, trained.classes) == ((32, 48), 7, ("left", "right", "above"))
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(value, stored[f"model.{name}"]) for name, value in trained.model.state_dict().items())
    assert not trained.model.training
    assert load_checkpoint(path, label="mine", seed=3).label == "mine"


def test_a_tuned_model_has_the_name_of_its_run(tmp_path):
    assert _label_of("vitrel_vit_s16_cpb", tmp_path / "mine" / "checkpoints" / "last.ckpt") == "vitrel_vit_s16_cpb"
    assert _label_of("vitrel_vit", tmp_path / "flowers" / "checkpoints" / "last.ckpt") == "flowers"
    assert _label_of("vitrel_swin", tmp_path / "mine.ckpt") == "mine"


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
    with pytest.raises(ValueError, match=r"is not a checkpoint of vitrel train.* it holds optimizer, state_dict"):
        load_checkpoint(tmp_path / "other.ckpt")
    torch.save({"state_dict": {}, "vitrel": "model"}, tmp_path / "text.ckpt")
    with pytest.raises(ValueError, match=r"is not a checkpoint of vitrel train"):
        load_checkpoint(tmp_path / "text.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="it holds list"):
        load_checkpoint(tmp_path / "list.ckpt")


def test_weights_that_do_not_fit_are_listed(checkpoint):
    def shrink(stored):
        stored["state_dict"]["model.head.weight"] = torch.zeros(2, 96)
        stored["state_dict"]["model.extra"] = torch.zeros(1)
        del stored["state_dict"]["model.cls_token"]

    with pytest.raises(ValueError, match="does not fit its model") as caught:
        load_checkpoint(checkpoint(edit=shrink))
    text = str(caught.value)
    assert "of another shape: head.weight: (2, 96) in the file, (3, 96) in the model" in text
    assert "not in the file: cls_token." in text and "not in the model: extra." in text

    def grow(stored):
        stored["state_dict"]["model.blocks.0.position.relative_position_bias_table"] = torch.zeros(15 * 15 + 3, 3)

    with pytest.raises(ValueError, match=r"does not fit its model: blocks\.0\.position\..* is of another grid \(8x8 -> 4x6"):
        load_checkpoint(checkpoint(edit=grow))


def test_models_that_cannot_be_asked_or_built_are_refused(checkpoint):
    with pytest.raises(ValueError, match=r"last\.ckpt does not fit its model: .*not in the file: pos_embed") as caught:
        load_checkpoint(checkpoint(model="vit_tiny_patch16_224"))
    assert len(str(caught.value)) < 2000
    with pytest.raises(ValueError, match=r"is of a model 'vitrel_vit_n9', which cannot be built"):
        load_checkpoint(checkpoint(model="vitrel_vit_n9"))
    with pytest.raises(ValueError, match=r"is of a model vitrel_vit_n8_table with .*'depht': 2.* cannot be built: .*depht"):
        load_checkpoint(checkpoint(model_args={"depht": 2}))


@each("given", [{"std": (0.2, 0.0, 0.2)}, {"mean": (0.5,)}, {"std": (0.2, math.nan, 0.2)}])
def test_mean_and_std_that_cannot_be_are_refused(checkpoint, given):
    with pytest.raises(ValueError, match="has three numbers, those of std above 0"):
        load_checkpoint(checkpoint(), preprocessing=given)


def test_a_crop_is_a_share_of_the_image():
    for crop in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"crop_pct takes shares of the image, above 0 and at most 1, got {crop}"):
            trained_model(timm.create_model("vitrel_vit_n8_none", depth=1), preprocessing={"crop_pct": crop})


def test_classes_that_the_model_knows_are_matched_by_name(trained):
    model = trained("vitrel_vit_n8_none")
    for names, outputs in [
        (["left", "right", "above"], (0, 1, 2)),
        (["above", "left"], (2, 0)),
        (["right", "left", "above"], (1, 0, 2)),
    ]:
        assert class_outputs(model, names, "here") == outputs
    with pytest.raises(ValueError, match=r"last\.ckpt was trained on 3 classes \(left, .*lack 1 of the 2 .* here: below\."):
        class_outputs(model, ["left", "below"], "here")
    ambiguous = replace(model, classes=("left", "right", "left"))
    assert class_outputs(ambiguous, ["left", "right", "left"], "here") == (0, 1, 2)
    with pytest.raises(ValueError, match="several outputs named left"):
        class_outputs(ambiguous, ["right"], "here")


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


SMALL = dict(embed_dim=48, depth=1, num_heads=3, img_size=32, patch_size=8)  # of timm's ViT, to be quick


@pytest.fixture
def weights(tmp_path):
    """weights(file, change=None): a small timm ViT of 3 classes, saved as `file`; `change` edits what is stored."""

    def write(file, change=None):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL)
        stored, path = model.state_dict(), tmp_path / file
        stored = change(stored) if change else stored
        torch.save(stored, path)
        return model.eval(), path

    return write


def test_the_averaged_weights_of_timms_trainer_are_read(weights):
    """Other files that timm and trainers save: tests/weights."""
    model, path = weights(
        "last.pth.tar",
        lambda state: {
            "arch": "vit_tiny_patch16_224", "epoch": 3, "args": argparse.Namespace(lr=0.1), "state_dict_ema": state,
            "state_dict": {name: value + 1 for name, value in state.items()},
        },
    )  # fmt: skip
    trained = load_model("vit_tiny_patch16_224", path, SMALL, preprocessing={"crop_pct": 1.0})
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(trained.model(images), model(images)) and not trained.model.training
    assert (trained.img_size, trained.encoding, trained.crop_pct, trained.mean) == ((32, 32), "timm", 1.0, (0.5,) * 3)
    assert trained.model.num_classes == 3 and trained.path == path


def test_a_local_folder_brings_its_own_weights(tmp_path):
    model = timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=32)
    save_for_hf(model, tmp_path, model_args={"img_size": 32})
    trained = load_model(f"local-dir:{tmp_path}", label="folder")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in trained.model.state_dict().items())
    assert (trained.img_size, trained.encoding, trained.label, trained.path) == ((32, 32), "table", "folder", tmp_path)
    with pytest.raises(FileNotFoundError, match="none"):
        load_model(f"local-dir:{tmp_path / 'none'}")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    torch.save(model, tmp_path / "pytorch_model.bin")  # the module itself, which loading would run
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .* was refused"):
        load_model(f"local-dir:{tmp_path}")


def test_what_cannot_be_loaded_says_why(weights):
    _, path = weights("a.pth")
    with pytest.raises(ValueError, match="unknown model 'vit_tini_patch16_224'; nearest: vit_tiny_patch16_224"):
        load_model("vit_tini_patch16_224", path)
    with pytest.raises(ValueError, match="unknown model 'hf-hub:some/one'; nearest"):
        load_model("hf-hub:some/one", path)
    with pytest.raises(ValueError, match=r"vit_tiny_patch16_224 has no weights: give a file .*, or --pretrained"):
        load_model("vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"a\.pth does not fit resnet10t\. The first names in the file are .*Missing key"):
        load_model("resnet10t", path)
    _, path = weights("b.pth", lambda state: state | {"head.bias": state["head.bias"] * float("nan")})
    with pytest.raises(ValueError, match=r"the weights of vit_tiny_patch16_224 hold NaN or infinity in head\.bias"):
        load_model("vit_tiny_patch16_224", path, SMALL)
    _, path = weights(
        "c.pth", lambda state: {f"model.{name}": value for name, value in state.items()} | {"scale": torch.ones(1)}
    )
    with pytest.raises(ValueError, match=r"c\.pth does not fit vit_tiny_patch16_224\..* in the file are model\.cls_token"):
        load_model("vit_tiny_patch16_224", path, SMALL)
    with pytest.raises(ValueError, match="predicts no classes: its num_classes"):
        trained_model(timm.create_model("vitrel_vit_n8_none", num_classes=0))


def test_class_indices_are_read_with_a_heading_and_further_columns(tmp_path):
    path = tmp_path / "index.tsv"
    path.write_text("wnid\timagenet1k_index\tname\nn01440764\t0\ttench\n\nn02102040 217 English_springer\n")
    assert read_class_indices(path) == {"n01440764": 0, "n02102040": 217}
    path.write_text("\ufeffgreat white shark\t2\ntench\t0", "utf-8")
    assert read_class_indices(path) == {"great white shark": 2, "tench": 0}
    for text, message in [
        ("great white shark\n", r"line 1: 'great white shark' is not a class, a tab and the index"),
        ("great white shark 2\n", r"line 1: 'great white shark 2' is not a class, a tab"),
        ("a 0\nb\n", r"index\.tsv, line 2: 'b' is not a class, a tab and the index of its output, such as 'n01440764\\t0'"),
        ("a 0\nb x\n", "line 2: 'b x' is not"),
        ("a 0\na 1\n", "line 2: 'a 1' is not"),
        ("a -1\nb 2\n", "line 1: 'a -1' is not"),
        ("", "contains no class"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_class_indices(path)


def test_outputs_of_the_classes_of_the_data():
    model = trained_model(timm.create_model("resnet10t", num_classes=4), "small")
    assert class_outputs(model, ["a", "b", "c", "d"], "here") == (0, 1, 2, 3)
    with pytest.raises(ValueError, match=r"small has 4 outputs, but here has 2 classes: .*--class-indices FILE"):
        class_outputs(model, ["a", "b"], "here")
    model = replace(model, outputs={"a": 3, "b": 1, "z": 9})
    assert class_outputs(model, ["a", "b"], "here") == (3, 1)
    with pytest.raises(ValueError, match="the class indices of small lack c, classes of here"):
        class_outputs(model, ["a", "c"], "here")
    with pytest.raises(ValueError, match="small has outputs 0 to 3, but its class indices map z to output 9"):
        class_outputs(model, ["z"], "here")
    with pytest.warns(
        UserWarning, match=r"small has no class names, .*of 12, .*class 2 is '2'; as text, .*'10'; --class-indices FILE"
    ):
        class_outputs(
            replace(model, outputs=None, model=timm.create_model("resnet10t", num_classes=12)), [*map(str, range(12))], "12"
        )
    imagenet = trained_model(timm.create_model("resnet10t"))
    assert class_outputs(imagenet, ["n01440764", "n02102040"], "here") == (0, 217)  # by WordNet's numbers


def test_a_column_tells_the_accuracy_among_the_classes_of_the_data(noise, rows_of):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=9, **SMALL).eval()
    model.head.bias.data[8] = 100  # no class of the data
    outputs = {"left": 5, "right": 0, "above": 7}
    images = torch.stack([noise((32, 32))[i][0] for i in range(12)])
    with torch.no_grad():
        logits = model(images)
    [row] = rows_of([trained_model(model, outputs=outputs)], [32])
    hits = (logits[:, [5, 0, 7]].argmax(1) == torch.arange(12) % 3).double().mean()
    assert row["top1"] == 0 and row["top1_among"] == pytest.approx(100 * hits.item(), abs=1e-3) and hits > 0


def test_rows_of_a_timm_model_tell_what_timm_changed(rows_of):
    torch.manual_seed(0)
    models = [
        trained_model(timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL).eval(), "fixed"),
        trained_model(
            timm.create_model("vit_tiny_patch16_224", num_classes=3, dynamic_img_size=True, **SMALL).eval(), "dynamic"
        ),
    ]
    before = {name: value.clone() for name, value in models[0].model.state_dict().items()}
    rows = {(row["model"], row["img_size"]): row for row in rows_of(models, ["48x64"], attention_n=2)}
    for name in ("fixed", "dynamic"):
        at, new = rows[name, "32x32"], rows[name, "48x64"]
        assert (at["resampled"], at["policy"]) == ("nothing", "none")
        assert (new["resampled"], new["resampled_values"], new["tokens"]) == ("pos_embed bicubic", 16 * 48, 48)
        assert new["attention_entropy"] > 0 and new["unseen"] is None
    assert all(torch.equal(value, before[name]) for name, value in models[0].model.state_dict().items())


def test_a_file_that_save_wrote_brings_its_classes_and_preprocessing(checkpoint, tmp_path):
    path = checkpoint()
    trained = load_checkpoint(path)
    vitrel.save(vitrel.load(path), tmp_path / "kept.safetensors")
    again = load_checkpoint(tmp_path / "kept.safetensors")
    for name in ("encoding", "img_size", "classes", "mean", "std", "crop_pct", "crop_mode", "interpolation"):
        assert getattr(again, name) == getattr(trained, name), name
    assert again.label == "kept" and not again.model.training
    image = torch.randn(1, 3, 40, 56)
    assert torch.equal(again.model(image), trained.model(image))
