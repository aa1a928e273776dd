"""`vitrel diagnose`: the table, its JSON, the picture, and messages instead of traces."""

import json
import warnings

import pytest
import timm
import torch
from PIL import Image

import vitrel
from helpers import ROOT, command, each

tool = command("diagnose")
SWIN = dict(embed_dim=12, num_heads=(1, 1), depths=(2, 2), num_classes=2)


@pytest.mark.slow
def test_table_json_and_picture(tmp_path, capsys, monkeypatch):
    small = timm.create_model("swin_tiny_patch4_window7_224", dynamic_img_size=True, **SWIN)
    diagnose = vitrel.diagnose
    monkeypatch.setattr("vitrel.models.create.check_model_name", lambda name, allow_sources: None)
    monkeypatch.setattr(
        "vitrel.inspect.diagnose.diagnose", lambda name, *args, **kw: diagnose(small if "tiny" in name else name, *args, **kw)
    )
    files = tmp_path / "leak.json", tmp_path / "leak.png"
    tool.main(["swin_tiny", "vitrel_swin_n", "--size", "64", "60x48", "--json", str(files[0]), "--plot", str(files[1])])
    text = capsys.readouterr().out
    assert "64x64" in text and "60x48" in text and "tokens see across opposite borders at 2 of 2 sizes" in text
    assert "no token sees across a border" in text
    theirs, ours = json.loads(files[0].read_text())
    assert theirs["findings"].keys() == {"borders", "padding"} and ours["findings"] == {}
    with Image.open(files[1]) as picture:
        assert picture.format == "PNG" and picture.height > picture.width  # a row for each model


@each(
    ("arguments", "message"),
    [
        (["test_vitt", "--size", "96"], "unknown model 'test_vitt'; nearest: test_vit"),
        ([str(ROOT / "configs")], "configs is a file or folder, and a model's name is expected"),
        (["test_vit", "--size", "96", "--model-args", "{dynamic: true}"], "--model-args: VisionTransformer"),
        (["test_vit", "--size", "96", "--json", "no/such/folder.json"], "no folder no/such for folder.json"),
        (["test_vit", "--size", "96", "--plot", "leak.png"], "nothing to draw: no windows were seen in test_vit"),
    ],
)
def test_bad_input_ends_with_a_message(arguments, message):
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert str(stop.value.code).startswith("error: ") and message in str(stop.value.code)


@pytest.mark.slow
def test_the_command_and_python_say_the_same(capsys):
    """For the name, and for the model built with the same weights; at the default sizes, without warnings."""
    tool.main(["test_convnext", "--size", "96"])
    assert "the model has no attention" in capsys.readouterr().out
    tool.main(["test_vit"])
    printed = capsys.readouterr()
    assert "pos_embed bicubic" in printed.out
    torch.manual_seed(0)
    model = timm.create_model("test_vit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert printed.out.strip() == str(vitrel.diagnose(model)).strip()
    assert "Warning" not in printed.err
