"""Pretrained weights without the network: those in the cache are used, and others are refused at once, with what to do."""

import pytest
import timm
from huggingface_hub import constants
from safetensors.torch import save_file

import vitrel
from helpers.timm_peers import write_to_cache

NAME = "test_vit"


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_weights_in_the_cache_are_used(tmp_path):
    theirs = timm.create_model(NAME)
    write_to_cache(tmp_path, NAME, theirs.state_dict())
    found = vitrel.create_model(NAME, pretrained=True, cache_dir=tmp_path).state_dict()
    assert all((found[name] == value).all() for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("build", [vitrel.create_model, vitrel.from_timm])
def test_others_are_refused_in_one_sentence(build, tmp_path):
    with pytest.raises(ConnectionError, match=f"the weights of {NAME} are not in the cache .* HF_HUB_OFFLINE") as refused:
        build(NAME, pretrained=True, cache_dir=tmp_path)
    assert "--weights FILE" in str(refused.value) and "\n" not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__  # no traceback of the library


def test_a_name_without_weights_is_refused():
    with pytest.raises(ValueError, match="there are no pretrained weights for vitrel_vit_n8_table"):
        vitrel.create_model("vitrel_vit_n8_table", pretrained=True)


def test_a_file_of_weights_needs_no_network(tmp_path):
    for name in (NAME, "vitrel_vit_n8_table"):
        theirs = timm.create_model(name)
        save_file(theirs.state_dict(), tmp_path / "a.safetensors")
        overlay = dict(file=str(tmp_path / "a.safetensors"))
        assert vitrel.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay).head.weight.equal(theirs.head.weight)
