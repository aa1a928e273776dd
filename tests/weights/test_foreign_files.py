"""A file describes its model and names no other source: nothing is fetched and no other file read, whatever it holds."""

import json
from contextlib import suppress

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import vitrel
from helpers.audit import asked
from helpers.small_runs import fit, small
from vitrel.cli import main
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.models.config import stored_arguments
from vitrel.train.distill import Distillation, Teacher

ADDRESS = "http://127.0.0.1:9/weights.pth"


def sources(other):
    """{name: arguments that make timm fetch an address or read the file `other`}."""
    return {
        "address": dict(pretrained=True, pretrained_cfg={"url": ADDRESS}),
        "address in an overlay": dict(pretrained=True, pretrained_cfg_overlay={"url": ADDRESS}),
        "hub": dict(pretrained=True, pretrained_cfg={"hf_hub_id": "any/model"}),
        "hub as a source": dict(pretrained=True, pretrained_cfg={"source": "hf-hub", "hf_hub_id": "any/model"}),
        "file": dict(pretrained=True, pretrained_cfg={"file": other}),
        "checkpoint": dict(checkpoint_path=other),
        "cache": dict(pretrained=True, cache_dir=other),
        "values": dict(pretrained=True, pretrained_cfg={"state_dict": {}}),
        "pretrained": dict(pretrained=True),
        "source of timm's": dict(pretrained_model_args={}, pretrained_strict=False),
    }


@pytest.fixture
def other(tmp_path):
    """A file of weights that no other file may have read."""
    model = timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=32)
    torch.save(model.state_dict(), tmp_path / "other.pth")
    return str(tmp_path / "other.pth")


def edited(path, change):
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["vitrel"])
    change(about["model"])
    save_file(load_file(path), path, metadata={"vitrel": json.dumps(about)})


def refuses(act, entries):
    """Whether an action ends in a sentence about the file, and nothing was asked for but that file."""
    with asked() as seen, pytest.raises(ValueError, match=r"model\.safetensors has a configuration that builds no model"):
        act()
    assert [entry for entry in seen if "model.safetensors" not in entry] == [], entries


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["address", "address in an overlay", "checkpoint"])
def test_the_metadata_of_a_safetensors_file(kind, other, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model = timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=32)
    vitrel.save(model, path := tmp_path / "model.safetensors")
    entries = sources(other)[kind]
    edited(path, lambda about: about["arguments"].update(entries))
    for act in (
        lambda: vitrel.load(path),
        lambda: vitrel.load(path, num_classes=2),
        lambda: vitrel.load(path, like="vitrel_vit_n8_table"),
        lambda: load_checkpoint(path),
    ):
        refuses(act, entries)
    with asked() as seen, pytest.raises(SystemExit, match="builds no model"):
        main(["convert", str(path), "--out", str(tmp_path / "new.safetensors")])
    assert [entry for entry in seen if "model.safetensors" not in entry] == []
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize("entry", [{"url": ADDRESS}, {"file": "other.pth"}, {"hf_hub_id": "any/model"}, {"custom_load": True}])
def test_its_preparation_is_about_images_only(entry, tmp_path):
    vitrel.save(timm.create_model("vitrel_vit_n8_table", num_classes=3), path := tmp_path / "model.safetensors")
    edited(path, lambda about: about["preparation"].update(entry))
    refuses(lambda: vitrel.load(path), entry)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vitrel_vit_x.hub", "hf-hub:a/vitrel_vit", "local-dir:vitrel_vit"])
def test_its_model_is_of_vitrel(name, tmp_path):
    vitrel.save(timm.create_model("vitrel_vit_n8_table", num_classes=3), path := tmp_path / "model.safetensors")
    edited(path, lambda about: about.update(architecture=name))
    refuses(lambda: vitrel.load(path), name)


@pytest.fixture(scope="module", params=["vitrel_vit_n8_table", "vit_tiny_patch16_224"])
def run(request, tmp_path_factory):
    """The model of a run, its name and its checkpoint."""
    classifier = small(request.param)
    fit(classifier, max_epochs=1).save_checkpoint(path := tmp_path_factory.mktemp("run") / "last.ckpt")
    return classifier.model, request.param, path


@pytest.mark.slow
def test_the_arguments_of_a_checkpoint(run, other, tmp_path):
    """A run may have started from such sources; the model of its file needs none."""
    trained, name, path = run
    loaded = torch.load(path, weights_only=True)
    cfg = {key: value for entries in sources(other).values() for key, value in entries.get("pretrained_cfg", {}).items()}
    for entries in sources(other).values():
        loaded["vitrel"]["model_args"] |= entries
    loaded["vitrel"]["model_args"] |= {"pretrained_cfg": cfg, "device": "meta"}
    torch.save(loaded, path := tmp_path / "last.ckpt")
    with asked() as seen:
        model = vitrel.load(path)
        teacher = Teacher(Distillation(teacher=name, checkpoint=str(path)), 4)
    assert {*seen} <= {str(path)}
    for again in (model, teacher.model.model):
        weights = again.state_dict()
        assert all(torch.equal(weights[key], value) for key, value in trained.state_dict().items())
        assert not {ADDRESS, other, "any/model"} & {*map(str, again.pretrained_cfg.values())}


def test_what_a_checkpoint_keeps_of_its_arguments():
    cfg = {"url": ADDRESS, "file": "a", "hf_hub_id": "b", "crop_pct": 0.5, "global_pool": "avg", "input_size": [3, 32, 32]}
    given = dict(depth=2, pretrained=True, checkpoint_path="a", cache_dir="b", pretrained_cfg_overlay=cfg, device="meta")
    rest = {"crop_pct": 0.5, "global_pool": "avg", "input_size": [3, 32, 32]}
    assert stored_arguments(given) == dict(depth=2, pretrained_cfg_overlay=rest)
    assert stored_arguments(dict(pretrained_cfg="augreg_in1k")) == dict(pretrained_cfg="augreg_in1k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kind"),
    [*(("pretrained_cfg", kind) for kind in ("address", "hub", "file", "values")),
     *(("model_args", kind) for kind in ("address in an overlay", "checkpoint", "cache"))],
)  # fmt: skip
def test_the_config_json_of_a_folder(place, kind, other, tmp_path):
    """Its own file of weights is read, or it is refused."""
    theirs = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=3)
    save_for_hf(theirs, folder := tmp_path / "folder", safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    entries = sources(other)[kind]
    if place == "pretrained_cfg":
        entries = entries.get("pretrained_cfg", entries.get("pretrained_cfg_overlay", entries))
    config.setdefault(place, {}).update(entries)
    (folder / "config.json").write_text(json.dumps(config))
    with asked() as seen, suppress(TypeError, ValueError):  # of timm, for arguments that no constructor has
        assert torch.equal(vitrel.load(folder).head.weight, theirs.head.weight)
    assert {*seen} <= {str(folder / "config.json")}
