"""Weights come in by one door: a file of anyone's, read as timm's model of a name reads it, becomes the vitrel model."""

import argparse
import zipfile
from pathlib import PosixPath

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import adapt_input_conv

import vitrel
from helpers.small_runs import Tensors, fit, small
from helpers.timm_peers import WINDOWS, apart, scattered
from vitrel.cli import main
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.export import export_model
from vitrel.models.segmenter import Segmenter
from vitrel.weights.read import read_file

VIT = "vit_tiny_patch16_224"
SHORT = dict(depth=2, embed_dim=48, num_heads=2)
NAMES = {  # a model of every layout: its options
    VIT: SHORT,
    "deit_tiny_distilled_patch16_224": SHORT,
    "deit3_small_patch16_224": SHORT,
    "beit_base_patch16_224": SHORT,
    "eva02_tiny_patch14_224": SHORT,
    "vit_small_patch16_dinov3": dict(depth=2),
    "vit_small_patch16_rope_mixed_224": SHORT,
    "vit_base_patch16_siglip_224": SHORT,
    "samvit_base_patch16_224": SHORT | dict(global_attn_indexes=(1,), window_size=7),
    "vit_relpos_medium_patch16_cls_224": SHORT,
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
    "maxvit_tiny_tf_224": dict(depths=(1, 1, 1, 1)),  # which keeps timm's trunk
    "resnet10t": {},
}


def build(name=VIT, **options):
    torch.manual_seed(0)
    return scattered(timm.create_model(name, **NAMES[name] | dict(num_classes=7) | options))


def stored(state, path, **beside):
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state | beside, path)
    return path


@torch.no_grad()
def same(ours, theirs, size=None, channels=3):
    image = torch.randn(1, channels, *(size or theirs.pretrained_cfg["input_size"][1:]))
    return apart(ours.eval()(image), theirs(image)) <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_family_with_as_many_classes_as_the_file(name, tmp_path):
    theirs = build(name)
    path = stored(theirs.state_dict(), tmp_path / "weights.safetensors")
    ours = vitrel.from_timm(name, checkpoint_path=path, **NAMES[name])
    assert ours.num_classes == 7 and same(ours, theirs)


def test_what_trainers_store_is_opened(tmp_path):
    """timm's train.py, whose options, paths and metric are no code; and the part of a larger model."""
    theirs, other = build().state_dict(), {name: value + 1 for name, value in build().state_dict().items()}
    args = argparse.Namespace(model=VIT, output=PosixPath("out"), seed=1)
    beside = dict(args=args, metric=np.float64(71.5), epoch=np.int64(3), arch=VIT)
    for content in (
        dict(state_dict=other, state_dict_ema=theirs) | beside,
        {"state_dict": {f"visual.trunk.{name}": value for name, value in theirs.items()}},
    ):
        torch.save(content, tmp_path / "run.pth.tar")
        ours = vitrel.from_timm(VIT, checkpoint_path=tmp_path / "run.pth.tar", **SHORT)
        assert torch.equal(ours.blocks[1].mlp.fc1.weight, theirs["blocks.1.mlp.fc1.weight"])
    assert read_file(tmp_path / "run.pth.tar")


@pytest.mark.parametrize("name", [VIT, "beit_base_patch16_224"])
def test_load_and_from_timm_read_a_file_alike(name, tmp_path):
    """The file decides the size that it was trained at; at another, vitrel resamples."""
    theirs = build(name, img_size=96)
    path = stored(theirs.state_dict(), tmp_path / "a.pth")
    ours = vitrel.from_timm(name, checkpoint_path=path, **SHORT)
    assert ours.img_size == (96, 96) and same(ours, theirs, (96, 96))
    larger = vitrel.from_timm(name, checkpoint_path=path, img_size=(64, 128), num_classes=3, **SHORT)
    again = vitrel.load(path, like=name, img_size=(64, 128), num_classes=3, **SHORT)
    vitrel.save(ours, tmp_path / "ours.safetensors")
    resampled = vitrel.load(tmp_path / "ours.safetensors", img_size=(64, 128))
    for model in (larger, again):
        assert model.img_size == model.arguments["img_size"] == (64, 128) and model.num_classes == 3
        body = {key: value for key, value in model.state_dict().items() if not key.startswith("head.")}
        assert all(torch.equal(value, resampled.state_dict()[key]) for key, value in body.items())


@pytest.mark.slow
def test_a_grid_that_is_not_square_is_that_of_img_size(tmp_path):
    theirs = build(img_size=(64, 112))
    path = stored(theirs.state_dict(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"pos_embed in the file has 29 rows, .* pass img_size=\(h, w\)"):
        vitrel.from_timm(VIT, checkpoint_path=path, **SHORT)
    assert same(vitrel.from_timm(VIT, checkpoint_path=path, img_size=(64, 112), **SHORT), theirs, (64, 112))


def test_windows_of_another_size_are_named(tmp_path):
    name = "swin_tiny_patch4_window7_224"
    path = stored(build(name, window_size=4, img_size=128).state_dict(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match="has 49 rows, the model's 169: pass the window_size"):
        vitrel.from_timm(name, checkpoint_path=path, **WINDOWS)
    assert vitrel.from_timm(name, checkpoint_path=path, window_size=4, img_size=128, **WINDOWS).window_size == (4, 4)


@pytest.mark.slow
def test_channels_are_adapted_as_by_timm(tmp_path):
    theirs, name, channels = build(), "vitrel_vit_ti16_absolute", 13
    path = stored(theirs.state_dict(), tmp_path / "a.pth")
    wanted = adapt_input_conv(channels, theirs.patch_embed.proj.weight)
    vitrel.save(vitrel.from_timm(theirs), own := tmp_path / "own.safetensors")
    for ours in (
        vitrel.from_timm(VIT, checkpoint_path=path, in_chans=channels, **SHORT),
        vitrel.load(path, like=VIT, in_chans=channels, **SHORT),
        vitrel.load(own, in_chans=channels),
        vitrel.load_pretrained(timm.create_model(name, in_chans=channels, num_classes=7, **SHORT), path),
    ):
        assert torch.equal(ours.patch_embed.proj.weight, wanted) and ours.in_chans == channels
    many = build(in_chans=channels)
    path = stored(many.state_dict(), tmp_path / "many.pth")
    ours = vitrel.from_timm(VIT, checkpoint_path=path, **SHORT)
    assert ours.in_chans == channels and same(ours, many, channels=channels)
    assert ours.pretrained_cfg["input_size"][0] == channels
    maxvit = build("maxvit_tiny_tf_224", in_chans=channels)
    stored(maxvit.state_dict(), path)
    assert same(vitrel.from_timm("maxvit_tiny_tf_224", checkpoint_path=path, depths=(1, 1, 1, 1)), maxvit, channels=channels)


TRANSFORMERS = {
    "DINOv3": "embeddings.cls_token embeddings.register_tokens layer.0.attention.q_proj.weight layer.0.mlp.up_proj.weight",
    "ViT": "embeddings.cls_token encoder.layer.0.attention.attention.query.weight encoder.layer.0.output.dense.bias",
}


@pytest.mark.slow
@pytest.mark.parametrize("project", TRANSFORMERS)
def test_others_names_are_told_and_not_diagnosed(project, tmp_path):
    names = TRANSFORMERS[project].split()
    state = {name: torch.zeros(4, 4) for name in names} | {"norm.weight": torch.zeros(4)}
    path = stored(state, tmp_path / "a.safetensors")
    for act in (
        lambda: vitrel.load(path),
        lambda: vitrel.load(path, like=VIT),
        lambda: vitrel.from_timm("vit_small_patch16_dinov3", checkpoint_path=path),
        lambda: vitrel.load_pretrained(timm.create_model("vitrel_vit_n8_rope_normalized"), path),
        lambda: vitrel.load_pretrained(timm.create_model("vitrel_vit_n8_absolute"), path),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            act()
        said = str(caught.value)
        assert sum(name in said for name in names) >= min(3, len(names)) and "known are vitrel's names and timm's" in said
        assert "RoPE-ViT" not in said and "EVA" not in said


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "model.safetensors",
            "a pointer of git-lfs",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "model.pth", "a pointer of git-lfs.*git lfs"),
        (b"<!DOCTYPE html><html>", "model.safetensors", "a web page.*download"),
        (b"\n <html>", "model.pth", "a web page"),
        (b"whatever", "model-00002-of-00003.safetensors", "shard 2 of 3: join"),
    ],
)
def test_what_is_no_file_of_weights_is_named(content, name, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} \([\d,]+ bytes\) is {words}"):
        vitrel.load(tmp_path / name)


def test_a_header_whose_length_looks_like_a_page_is_read(tmp_path):
    """A .safetensors file begins with the length of its header; 15,392 is a blank and a "<"."""
    value = {"a": torch.zeros(2)}
    for name, metadata in (("long", {"x": "y" * 20000}), ("model-00001-of-00001", {})):
        save_file(value, tmp_path / f"{name}.safetensors", metadata)
    length = int.from_bytes((tmp_path / "long.safetensors").read_bytes()[:8], "little")
    path = tmp_path / "page.safetensors"
    save_file(value, path, {"x": "y" * (20000 - length + 15392)})
    assert path.read_bytes()[:2] == b" <"
    for file in (path, tmp_path / "model-00001-of-00001.safetensors"):  # one shard of one is the whole
        assert read_file(file)["state_dict"].keys() == {"a"}


def test_an_archive_that_unpacks_to_more_is_refused_by_its_directory(tmp_path, monkeypatch):
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for record in plain.namelist():
            bomb.writestr(record, plain.read(record))
    monkeypatch.setattr(zipfile.ZipFile, "open", None)  # no record is unpacked
    with pytest.raises(ValueError, match=r"bomb\.pth .* would unpack to 4,19\d,\d{3} bytes"):
        read_file(tmp_path / "bomb.pth")


def test_features_only_is_refused_by_its_name(tmp_path):
    for given in ({}, dict(checkpoint_path="none.pth")):
        with pytest.raises(ValueError, match="features_only=True"):
            vitrel.from_timm(VIT, features_only=True, **given)
    vitrel.save(vitrel.from_timm(build()), path := tmp_path / "a.safetensors")
    with pytest.raises((TypeError, ValueError), match="features_only"):
        vitrel.load(path, features_only=True)


# ------------------------------------------------------------------------------------------------------------ segmenters


def segmenter(name="vitrel_vit_n8_absolute_rope_mixed", head="linear", **options):
    torch.manual_seed(0)
    model = Segmenter(timm.create_model(name, img_size=32, **options), 3, head).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return model


def equal(a, b, size=(40, 56)):
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        return torch.equal(a(image), b(image))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head"), [("vitrel_swin_n", "linear"), ("vitrel_vit_n8_absolute_rope_mixed", "fpn"), ("vitrel_swin_n", "upernet")]
)
def test_segmenters_are_saved_and_loaded(name, head, tmp_path):
    if head != "linear":
        pytest.importorskip("segmentation_models_pytorch")
    model = segmenter(name, head)
    vitrel.save(model, path := tmp_path / "a.safetensors")
    again = vitrel.load(path)
    assert isinstance(again, Segmenter) and not again.training and equal(again, model)
    other = vitrel.load(path, num_classes=5, img_size=48)
    assert other.num_classes == 5 and other.img_size == (48, 48) and other(torch.randn(1, 3, 32, 32)).shape == (1, 5, 32, 32)
    own, new = model.backbone.state_dict(), other.backbone.state_dict()
    assert all(torch.equal(value, new[key]) for key, value in own.items() if value.shape == new[key].shape)
    assert load_checkpoint(path).task == "segmentation"
    vitrel.save(again.half(), path)
    assert {value.dtype for value in vitrel.load(path).parameters()} == {torch.float16}


def test_segmenters_of_runs_and_of_timms_trunks_are_converted(tmp_path, capsys):
    run = small("vitrel_vit_n8_absolute", task="segmentation")
    data = Tensors()
    data.labels = torch.randint(4, (len(data.images), 32, 32))
    fit(run, data, max_epochs=1).save_checkpoint(path := tmp_path / "last.ckpt")
    main(["convert", str(path), "--out", str(tmp_path / "a.safetensors")])
    assert equal(vitrel.load(tmp_path / "a.safetensors"), run.model.eval())
    main(["convert", str(path), "--position", "table", "--out", str(tmp_path / "b.safetensors")])
    relative = vitrel.load(tmp_path / "b.safetensors")
    assert relative.backbone.arguments["position"] == "absolute+table" and equal(relative, run.model, (64, 64))
    theirs = Segmenter(build(img_size=64), 3).eval()
    ours, image = vitrel.from_timm(theirs), torch.randn(1, 3, 64, 64)
    assert apart(ours(image), theirs(image)) < 5e-6 and ours(torch.randn(1, 3, 40, 72)).shape == (1, 3, 40, 72)
    with pytest.raises(ValueError, match="Segmenter is no vitrel model: convert"):
        vitrel.save(theirs, tmp_path / "c.safetensors")


@pytest.mark.slow(seconds=4)
def test_segmenters_are_exported(tmp_path):
    """By torch.export, from which ONNX is made."""
    checks = export_model(segmenter(depth=1), path := tmp_path / "a.pt2", "exported", dynamic_size=True)
    assert path.exists() and len({check.size for check in checks}) > 2
    with pytest.raises(ValueError, match=r"write it with vitrel\.save"):
        export_model(segmenter(), tmp_path / "folder", "safetensors")


def test_the_sizes_of_a_run_stay_with_its_model(tmp_path):
    """A model of several training sizes is judged by all of them, saved again too."""
    fit(small("vitrel_vit_n8_table"), max_epochs=1).save_checkpoint(path := tmp_path / "last.ckpt")
    loaded = torch.load(path, weights_only=True)
    side = loaded["vitrel"]["img_size"][0]
    loaded["vitrel"]["train_sizes"] = [f"{side}x{side}", "96x64"]
    torch.save(loaded, path)
    model = vitrel.load(path)
    vitrel.save(model, tmp_path / "a.safetensors")
    vitrel.save(vitrel.load(tmp_path / "a.safetensors", num_classes=9), tmp_path / "b.safetensors")
    before = load_checkpoint(path)
    for name in ("a", "b"):
        after = load_checkpoint(tmp_path / f"{name}.safetensors")
        assert after.train_sizes == before.train_sizes == ((side, side), (96, 64)) and after.img_size == before.img_size
    vitrel.save(vitrel.load(path, img_size=48), tmp_path / "c.safetensors")
    assert load_checkpoint(tmp_path / "c.safetensors").train_sizes == ((48, 48),)
