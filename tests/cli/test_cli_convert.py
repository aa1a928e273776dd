"""`vitrel convert`: the file written is the model, refusals leave nothing behind."""

import pytest
import timm
import torch

import vitrel
from helpers import command
from helpers.pictures import write_classes
from vitrel.weights.read import read_file

tool = command("convert")
SMALL = dict(depths=(2, 2), num_heads=(2, 4), embed_dim=32, window_size=4, img_size=64)
INDEX = "layers.0.blocks.0.attn.relative_position_index"


@pytest.fixture
def timms_swin(tmp_path):
    """A Swin of timm, and its file, in which older versions kept buffers."""
    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=7, **SMALL).eval()
    torch.save(model.state_dict() | {INDEX: torch.zeros(16, 16)}, tmp_path / "swin.pth")
    return model, tmp_path / "swin.pth"


def bare_vit(path):
    """A ViT of two blocks, as a timm model's state dict; the path."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3
    )
    torch.save(model.state_dict(), path)
    return path


ARGS = "{depths: [2, 2], num_heads: [2, 4], embed_dim: 32, window_size: 4, img_size: 64}"


def test_a_file_is_converted(timms_swin, tmp_path, capsys):
    """As the vitrel model named, in other windows too, and as timm's."""
    theirs, path = timms_swin
    out, wide, named = (tmp_path / f"{name}.safetensors" for name in ("out", "wide", "named"))
    tool.main(["vitrel_swin_t", "--weights", str(path), "--model-args", ARGS, "--out", str(out)])
    ours = timm.create_model("vitrel_swin_t", num_classes=7, **SMALL).eval()  # as many classes as the file
    vitrel.load_pretrained(ours, out)
    image = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(ours(image), theirs(image), atol=2e-5, rtol=0)
    assert f"written to {out}" in capsys.readouterr().out
    wider = ARGS.replace("window_size: 4", "window_size: [4, 6]")
    tool.main(["vitrel_swin_t", "--weights", str(path), "--model-args", wider, "--out", str(wide)])
    assert read_file(wide)["vitrel"]["position"]["layers.0.blocks.0.position"]["grid"] == [4, 6, 0]
    tool.main(["swin_tiny_patch4_window7_224", "--weights", str(path), "--model-args", ARGS, "--out", str(named)])
    assert torch.equal(vitrel.load(named)(image), ours(image))


def test_refusals_write_nothing(timms_swin, tmp_path, capsys):
    _, path = timms_swin
    out = tmp_path / "out.safetensors"

    def error(*arguments):
        with pytest.raises(SystemExit) as caught:
            tool.main([*map(str, arguments)])
        assert not out.exists()
        assert not list(tmp_path.glob(".*"))
        return f"{caught.value.code}{capsys.readouterr().err}"

    assert "unknown model 'swin_t'" in error("swin_t", "--weights", path, "--out", out)
    assert "holds weights without their model's name" in error(bare_vit(tmp_path / "vit.pth"), "--out", out)
    assert "--weights and --pretrained are for a model given by name" in error(path, "--weights", path, "--out", out)
    assert "vitrel_swin_t has no weights: give a file" in error("vitrel_swin_t", "--out", out)
    assert "--data needs an encoding to add" in error("vitrel_swin_t", "--weights", path, "--data", tmp_path, "--out", out)
    assert "no checkpoint at" in error("vitrel_swin_t", "--weights", tmp_path / "none.pth", "--out", out)
    gone = error("vitrel_swin_t", "--weights", path, "--position", "table", "--data", tmp_path / "gone", "--out", out)
    assert f"no folder {tmp_path / 'gone'}" in gone
    assert "not in the file: layers.0.blocks.0.position" in error(
        "vitrel_swin_t_rope_mixed", "--weights", path, "--model-args", ARGS, "--out", out
    )
    no_mapping = error("vitrel_swin_t", "--weights", path, "--model-args", "4", "--out", out)
    assert "expected a mapping such as '{reg_tokens: 4}'" in no_mapping
    assert "--out must be a .safetensors file, got out.pth" in error(
        "vitrel_swin_t", "--weights", path, "--model-args", ARGS, "--out", tmp_path / "out.pth"
    )
    taken = tmp_path / "taken.safetensors"
    taken.write_bytes(b"precious")
    assert "exists; give another file, or --overwrite" in error("vitrel_swin_t", "--weights", path, "--out", taken)
    assert taken.read_bytes() == b"precious"


LIKE = "{patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}"


@pytest.mark.slow
def test_bare_weights_and_relative_position(tmp_path, capsys):
    """A file of a plain ViT: as it is, with an encoding that starts at zero, and with one fitted to images."""
    path, same, added, fitted = bare_vit(tmp_path / "vit.pth"), *(tmp_path / f"{name} 1.safetensors" for name in "abc")
    tool.main(["vit_tiny_patch16_224", "--weights", path, "--model-args", LIKE, "--out", same])
    said = capsys.readouterr().out
    assert "position absolute, trained at 4x4 tokens, 3 classes" in said and f"vitrel.load('{same}')" in said
    tool.main([same, "--position", "rope_mixed+table", "--absolute", "drop", "--out", added])
    model, relative, image = vitrel.load(same), vitrel.load(added), torch.randn(1, 3, 32, 32)
    assert relative.arguments["position"] == "rope_mixed+table" and relative(torch.randn(1, 3, 24, 56)).shape == (1, 3)
    write_classes(tmp_path / "flat", ["deep"], [f"{i}.png" for i in range(5)])
    write_classes(tmp_path / "flat", [".thumbs", "deep/@eaDir"], ["0.png"])  # hidden
    tool.main([same, "--position", "table", "--data", tmp_path / "flat", "--n", 4, "--size", "32x40", "--out", fitted])
    printed = capsys.readouterr().out
    assert "table fitted to 4 images of 4x5 patches" in printed and "trained at 4x5 tokens" in printed
    assert vitrel.load(fitted).pos_embed is None and (vitrel.load(fitted)(image) - model(image)).abs().max() > 0
    with pytest.raises(SystemExit, match="holds 5 images, and --n is 64"):
        tool.main([same, "--position", "table", "--data", tmp_path / "flat", "--n", 64, "--out", tmp_path / "d.safetensors"])
