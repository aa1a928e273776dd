"""push_to_hub: what it uploads loads as the model by timm and by vitrel, and the card has the scores of these weights."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import ModelCard, constants, hf_hub_download

import vitrel
from helpers import command
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.export import hub
from vitrel.models.segmenter import Segmenter
from vitrel.models.vit import ViT
from vitrel.weights.record import state_hash

tool = command("convert")
CLASSES = ["left", "right", "above"]
SMALL = dict(depth=1, embed_dim=48, num_heads=3, global_pool="avg")
IMAGES = torch.randn(2, 3, 40, 72)


QUICK = dict(attention_n=0, border_leak=False, report=False)


def other():
    """A model of the same classes."""
    model = timm.create_model("vitrel_vit_n8_none", num_classes=3, img_size=32, **SMALL).eval()
    model.pretrained_cfg["label_names"] = CLASSES
    return model


@pytest.fixture
def run(tmp_path):
    """The folder of a run, and its model, of which one option is not in the state dict."""
    torch.manual_seed(0)
    options = dict(num_classes=3, img_size=(32, 48), position_args={"policy": "clip"})
    model = timm.create_model("vitrel_vit_n8_table", **SMALL | options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    about = dict(model="vitrel_vit_n8_table", model_args=SMALL | {"position_args": {"policy": "clip"}}, img_size=[32, 48])
    about |= dict(classes=CLASSES, mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.1], crop_pct=0.875, crop_mode="border")
    about |= dict(interpolation="bilinear", train_sizes=["32x48"])
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": state, "vitrel": about}, tmp_path / "run" / "checkpoints" / "last.ckpt")
    return tmp_path / "run", model


@pytest.fixture
def uploads(tmp_path, monkeypatch):
    """The calls of huggingface_hub; an upload goes to its cache, where a download of the same name finds it offline."""
    calls = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def upload(repo_id, folder_path, **how):
        stored = tmp_path / "hub" / f"models--{repo_id.replace('/', '--')}"
        shutil.copytree(folder_path, stored / "snapshots" / "abc")
        (stored / "refs").mkdir()
        (stored / "refs" / "main").write_text("abc")

    def create(repo_id, **how):
        calls.append((repo_id, how))
        return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(hub, "create_repo", create)
    monkeypatch.setattr(hub, "upload_folder", upload)
    return calls


class Pictures(list):
    """Random images with labels."""

    classes = CLASSES

    def __init__(self):
        super().__init__((torch.randint(256, (3, 48, 64), dtype=torch.uint8), label % 3) for label in range(8))


def code_of(card):
    """The Python blocks of a card."""
    return [part.partition("```")[0] for part in card.split("```python\n")[1:]]


def loaded(block):
    exec(block, names := {})
    return names["model"]


@pytest.mark.slow
def test_a_run_is_uploaded_with_its_scores_and_loads_as_its_card_says(run, uploads, tmp_path, capsys, monkeypatch):
    folder, model = run
    path = folder / "checkpoints" / "last.ckpt"
    models = [path, load_checkpoint(path, "cropped", preprocessing={"crop_pct": 0.5}), other()]
    vitrel.evaluate.at_sizes(models, Pictures(), [(32, 48), 64], out=folder / "evaluation", **QUICK)
    capsys.readouterr()
    hashed = []
    monkeypatch.setattr(hub, "state_hash", lambda model: hashed.append(model) or state_hash(model))
    tool.main([folder, "--push", "me/tiny", "--private"])
    assert len(hashed) == 1
    assert "uploaded to https://huggingface.co/me/tiny: its card" in capsys.readouterr().out
    assert uploads == [("me/tiny", {"private": True, "exist_ok": True})]
    card = ModelCard.load(hf_hub_download("me/tiny", "README.md"))
    assert card.data.library_name == "timm" and card.data.pipeline_tag == "image-classification" and card.data.license is None
    assert "position encoding `table`" in card.text and "| 32x48" in card.text and "64" in card.text and "±" in card.text
    assert "vitrel_vit_n8_table" in card.text and "cropped" in card.text  # the same weights in two ways
    assert "vitrel_vit_n8_none" not in card.text  # evaluated beside it
    assert "Top-1 in percent" in card.text and "8 images" in card.text and str(tmp_path) not in card.text
    by_timm, by_vitrel = map(loaded, code_of(card.text))
    for again in (by_timm, by_vitrel):
        assert isinstance(again, ViT) and torch.equal(again(IMAGES), model(IMAGES))
        assert [*again.pretrained_cfg["label_names"]] == CLASSES and again.pretrained_cfg["crop_mode"] == "border"
    assert by_vitrel.train_sizes == ("32x48",)


def test_the_folder_alone_loads_by_timm_and_by_vitrel(run, tmp_path):
    _, model = run
    folder = hub.write_hub_folder(model, tmp_path / "folder", "me/tiny")
    assert {file.name for file in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    for again in (timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), vitrel.load(folder)):
        assert torch.equal(again(IMAGES), model(IMAGES))
    assert "Scores" not in (folder / "README.md").read_text()


def test_the_folder_names_no_license_and_no_scores_of_other_weights(run, uploads, capsys):
    folder, _ = run
    vitrel.evaluate.at_sizes(other(), Pictures(), [32], out=folder / "evaluation", **QUICK)
    tool.main([folder, "--push", "me/tiny"])
    assert "evaluation is of other weights than the uploaded ones, so the card has no scores" in capsys.readouterr().out
    assert "Scores" not in ModelCard.load(hf_hub_download("me/tiny", "README.md")).text
    config = json.loads(Path(hf_hub_download("me/tiny", "config.json")).read_text())
    assert config["pretrained_cfg"]["license"] is None  # not that of timm's weights of the architecture


def test_a_segmenter_loads_by_vitrel(run, uploads):
    model = Segmenter(run[1], 4).eval()
    vitrel.push_to_hub(model, "me/masks")
    assert uploads == [("me/masks", {"private": None, "exist_ok": True})]
    card = ModelCard.load(hf_hub_download("me/masks", "README.md"))
    [block] = code_of(card.text)
    assert card.data.pipeline_tag == "image-segmentation" and torch.equal(loaded(block)(IMAGES), model(IMAGES))


@pytest.mark.slow
def test_refusals(run, uploads, tmp_path, capsys):
    folder, model = run

    def error(*arguments):
        with pytest.raises(SystemExit) as stop:
            tool.main([*map(str, arguments)])
        return f"{stop.value.code}{capsys.readouterr().err}"

    assert "'tiny' is no repository of the hub: write OWNER/NAME" in error(folder, "--push", "tiny")
    assert "me/a b" in error(folder, "--push", "me/a b")
    assert "give a file to write (--out), or a repository" in error(folder)
    assert "--private is for the hub: give --push" in error(folder, "--private", "--out", tmp_path / "a.safetensors")
    (tmp_path / "empty").mkdir()
    assert "empty holds no model: neither a run's checkpoints/last.ckpt" in error(tmp_path / "empty", "--push", "me/tiny")
    assert "settings.json is missing" in error(folder, "--push", "me/tiny", "--evaluation", tmp_path / "empty")
    vitrel.evaluate.at_sizes(other(), Pictures(), [32], out=tmp_path / "other", **QUICK)
    assert "other evaluates other weights than these" in error(folder, "--push", "me/tiny", "--evaluation", tmp_path / "other")
    for training in (model.train(), Segmenter(model, 4)):
        with pytest.raises(ValueError, match="training mode"):
            vitrel.push_to_hub(training, "me/tiny")
    for alien in (timm.create_model("test_vit"), torch.nn.Linear(2, 2), torch.compile(model)):
        with pytest.raises(ValueError, match="only models of vitrel are uploaded"):
            vitrel.push_to_hub(alien, "me/tiny")
    assert not uploads and not Path(constants.HF_HUB_CACHE).exists()


def test_without_a_network_or_token_the_message_has_the_way_out(run, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        SystemExit, match=r"me/tiny was not uploaded: .*offline mode.* log in by `hf auth login` or set HF_TOKEN"
    ):
        tool.main([str(run[0]), "--push", "me/tiny"])
