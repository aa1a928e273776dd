"""`vitrel plot`: the files it writes, what it says of the others, and messages instead of traces."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import ROOT, command
from helpers.variants import perturbed
from vitrel.cli import plot as plot_command
from vitrel.evaluate.checkpoint import trained_model
from vitrel.inspect.plot import gallery as sheets
from vitrel.models.vit import ViT

tool = command("plot")


@pytest.fixture
def small(monkeypatch):
    """In the place of any model by name: two blocks of two heads, 32 px."""

    def use(position):
        torch.manual_seed(0)
        model = ViT(32, 8, num_classes=2, embed_dim=16, depth=2, num_heads=2, position=position).eval()
        model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
        found = trained_model(perturbed(model, 0.3), "any", img_size=(32, 32))
        monkeypatch.setattr(plot_command, "open_models", lambda args, **how: [found])
        monkeypatch.setattr(plot_command, "SCENES", 2)

    return use


@pytest.mark.slow
def test_pictures_of_a_model(small, tmp_path, capsys):
    small("absolute+t5")
    Image.new("RGB", (90, 40), "red").save(tmp_path / "red.png")
    arguments = ["any", "--size", "32x48", "--layers", "1", "--query", "3,4", "--image", str(tmp_path / "red.png")]
    tool.main([*arguments, "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    names = ["offset_maps", "profiles", "bucket_map", "similarity", "attention", "overruled", "directions"]
    left_out = [name for name in names if f"no {name}.png: " in err]
    assert out.split() == [str(tmp_path / "out" / f"{name}.png") for name in names if name not in left_out]
    assert set(left_out) <= {"overruled"}
    for path in out.split():
        with Image.open(path) as picture:
            assert picture.format == "PNG" and min(picture.size) > 150


def test_scenes_and_what_a_model_does_not_have(small, tmp_path, capsys):
    small("none")
    tool.main(["any", "--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert out.split() == [str(tmp_path / "attention.png"), str(tmp_path / "directions.png")]
    assert "no offset_maps.png: nothing to draw by offset: ViT has no position in attention" in err
    assert "no overruled.png: content overrides no negative bias" in err


def test_images_as_the_model_takes_them(tmp_path):
    Image.new("RGB", (90, 40), (255, 0, 51)).save(tmp_path / "red.png")
    trained = SimpleNamespace(mean=(0.5,) * 3, std=(0.5,) * 3)
    images, shown = plot_command._images(trained, (16, 24), tmp_path / "red.png")
    assert shown.shape == (1, 3, 16, 24)
    torch.testing.assert_close(images[0, :, 3, 3], torch.tensor([1.0, -1.0, -0.6]))
    images, shown = plot_command._images(trained, (40, 64), None)
    assert shown.shape == (plot_command.SCENES, 3, 40, 64)
    torch.testing.assert_close(images, shown * 2 - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vitrel_vit_n8_tabel"], "unknown model 'vitrel_vit_n8_tabel'; nearest: "),
        (["vitrel_vit_n8_none", "--query", "9,0"], r"query (9, 0) is outside the 8x8 patches of blocks.3.attn"),
        (["vitrel_vit_n8_none", "--image", "no/such.png"], "no file no/such.png"),
        (["vitrel_vit_n8_none", "--layers", "1", "4"], "there is no layer 4: the layers that can be drawn are 0 to 3"),
        (["vitrel_vit_n8_none", "--heads", "0", "3"], "there is no head 3: the model has heads 0 to 2"),
        (["deit_tiny_patch16_224.nosuch"], "Invalid pretrained tag (nosuch)"),
        (["no/such.ckpt"], "no checkpoint at no/such.ckpt"),
        (["no/such.ckpt", "--gallery"], "no/such.ckpt"),
    ],
)
def test_bad_input_ends_with_a_message(arguments, message, tmp_path):
    with pytest.raises(SystemExit) as stop:
        tool.main([*arguments, "--out", str(tmp_path)])
    assert str(stop.value.code).startswith("error: ") and message in str(stop.value.code)


def test_images_of_16_bits_keep_their_gray(tmp_path):
    Image.fromarray(np.full((40, 60), 128 << 8, np.uint16)).save(tmp_path / "gray.png")
    _, shown = plot_command._images(SimpleNamespace(mean=(0.5,) * 3, std=(0.5,) * 3), (16, 24), tmp_path / "gray.png")
    torch.testing.assert_close(shown, torch.full((1, 3, 16, 24), 128 / 255))


def test_the_folder_of_a_run_stands_for_its_last_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit, match=r"error: no checkpoint at .*run/checkpoints/last\.ckpt"):
        tool.main([str(tmp_path / "run"), "--out", str(tmp_path)])


@pytest.mark.slow
def test_a_model_of_timm_is_brought_to_the_size_first(tmp_path, capsys):
    tool.main(["vit_tiny_patch16_224", "--size", "96x64", "--out", str(tmp_path)])
    assert str(tmp_path / "attention.png") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one MODEL, or --gallery; got 0"),
        (["m", "n"], "give one MODEL, or --gallery; got 2"),
        (["m", "--query", "3x4"], "'3x4' is not a patch: write row,column as 3,4"),
        (["m", "--size", "big"], "'big' is not an image size"),
    ],
)
def test_bad_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_the_gallery_is_made_by_one_command(tmp_path, capsys):
    tool.main(["--gallery", "--out", str(tmp_path)])
    path = tmp_path / "gallery.png"
    assert capsys.readouterr().out.split() == [str(path)] and path.stat().st_size < 400_000


@pytest.mark.slow
def test_a_sheet_of_trained_models(tmp_path):
    torch.manual_seed(0)
    model = perturbed(ViT(32, 8, num_classes=2, embed_dim=16, depth=2, num_heads=2, position="table").eval(), 0.5)
    images = torch.rand(2, 3, 32, 32)
    path = sheets.learned_gallery(tmp_path / "sheet.png", {"mine": model}, images, images)
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width > 1000


def test_committed_sheets_are_small():
    assert all((ROOT / "docs" / "images" / name).stat().st_size < 400_000 for name in ("gallery.png", "learned.png"))
