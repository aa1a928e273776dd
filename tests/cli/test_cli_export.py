"""`vitrel export`: what it writes computes what the checkpoint does and carries its metadata; refusals leave nothing behind."""

import json

import pytest
import timm
import torch

import vitrel
from helpers import command
from helpers.checkpoints import CLASSES, write_checkpoint
from vitrel.common.extras import EXTRAS
from vitrel.export import export_model, write
from vitrel.models.vit import ViT
from vitrel.weights.read import read_file

tool = command("export")
# Pooled over all tokens: the class token of a single block never meets the tables of offsets.
SMALL = dict(depth=1, embed_dim=48, num_heads=3, reg_tokens=1, global_pool="avg")
SIZES = [(1, (32, 48)), (3, (32, 48)), (2, (57, 41)), (1, (16, 80))]


def small(name="vitrel_vit_n8_table", **keywords):
    """A model whose parameters are far from their initialization."""
    model = timm.create_model(name, **(dict(num_classes=3, img_size=(32, 48)) | SMALL | keywords)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture
def checkpoint(tmp_path):
    """The path of a file as `vitrel train` writes it, and its model."""
    model = small()
    about = dict(model_args=SMALL, mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.1], crop_pct=0.875, crop_mode="border")
    return write_checkpoint(tmp_path / "last.ckpt", model, interpolation="bilinear", **about), model


def assert_serves(run, model, sizes=SIZES):
    for batch, size in sizes:
        image = torch.randn(batch, 3, *size)
        torch.testing.assert_close(run(image), model(image), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_model_that_keeps_timms_trunk(tmp_path, capsys):
    """At any size, by its name in timm: from_timm is applied, and sides stay multiples of what its trunk needs."""
    name = "naflexvit_base_patch16_gap"
    model = timm.create_model(name, num_classes=3, depth=1, embed_dim=48, num_heads=3).eval()
    torch.save(model.state_dict(), tmp_path / "naflex.pth")
    options = ["--model-args", "{depth: 1, embed_dim: 48, num_heads: 3}", "--size", "64", "--format", "exported", "--dynamic"]
    tool.main([name, "--weights", str(tmp_path / "naflex.pth"), *options])
    run = torch.export.load(tmp_path / "naflex.pt2").module()
    assert_serves(run, vitrel.from_timm(model), [(1, (64, 96)), (3, (128, 64))])
    with pytest.raises((AssertionError, RuntimeError)):
        run(torch.randn(1, 3, 70, 64))
    assert "any image size of whole 16 pixels" in capsys.readouterr().out


@pytest.mark.slow
def test_a_program_of_one_size(checkpoint, tmp_path, capsys):
    """It takes any batch, refuses another size instead of a wrong answer, and holds what the checkpoint says of the model."""
    path, model = checkpoint
    tool.main([str(path), "--format", "exported", "--size", "40x24", "--out", str(tmp_path / "one.pt2")])
    files = {"vitrel.json": ""}
    run = torch.export.load(tmp_path / "one.pt2", extra_files=files).module()
    assert_serves(run, model, [(1, (40, 24)), (5, (40, 24))])
    with pytest.raises(AssertionError, match=r"size\(\)\[2\] == 40"):
        run(torch.randn(1, 3, 24, 40))
    printed = capsys.readouterr().out
    assert "only this image size" in printed and f"written to {tmp_path}/one.pt2" in printed
    about = json.loads(files["vitrel.json"])
    assert about["classes"] == CLASSES and about["mean"] == [0.4, 0.5, 0.6] and about["std"] == [0.2, 0.3, 0.1]
    assert (about["model"], about["encoding"]) == ("vitrel_vit_n8_table", "table")
    assert (about["img_size"], about["size"], about["dynamic_size"]) == ([32, 48], [40, 24], False)


@pytest.mark.slow
def test_onnx_of_one_size(checkpoint, tmp_path):
    """At any batch; that of any size is in tests/models/test_export_formats.py."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path, model = checkpoint
    tool.main([str(path), "--format", "onnx"])
    session = onnxruntime.InferenceSession(path.with_suffix(".onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, 32, 48] and session.get_inputs()[0].name == "image"
    assert [output.name for output in session.get_outputs()] == ["logits"]
    batches = [(1, (32, 48)), (5, (32, 48))]
    assert_serves(lambda image: torch.from_numpy(session.run(None, {"image": image.numpy()})[0]), model, batches)
    about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert about["classes"] == CLASSES and about["img_size"] == [32, 48] and about["crop_pct"] == 0.875
    assert about["crop_mode"] == "border"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["last.ckpt", "last.onnx"]


def test_a_folder_for_timm(checkpoint):
    path, model = checkpoint
    tool.main([str(path), "--format", "safetensors"])
    folder = path.with_suffix("")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    for batch, size in SIZES:
        image = torch.randn(batch, 3, *size)
        assert torch.equal(again(image), model(image))
    assert list(again.pretrained_cfg["label_names"]) == CLASSES
    expected = dict(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1), crop_pct=0.875, crop_mode="border", interpolation="bilinear")
    expected |= dict(input_size=(3, 32, 48))
    found = timm.data.resolve_model_data_config(again)
    assert {key: tuple(found[key]) if isinstance(found[key], list) else found[key] for key in expected} == expected
    grids = read_file(folder / "model.safetensors")["vitrel"]["position"]
    assert grids["blocks.0.position"]["grid"] == [4, 6, 2]  # which timm's own file would not tell


def test_an_output_is_replaced_only_when_asked(checkpoint, tmp_path):
    path, model = checkpoint
    command = [str(path), "--format", "safetensors", "--out"]
    taken = tmp_path / "taken"
    tool.main([*command, str(taken)])
    (taken / "config.json").write_text("precious")
    with pytest.raises(SystemExit, match="taken exists; choose another path or pass --overwrite"):
        tool.main([*command, str(taken)])
    assert (taken / "config.json").read_text() == "precious"
    tool.main([*command, str(taken), "--overwrite"])
    assert torch.equal(timm.create_model(f"local-dir:{taken}", pretrained=True).head.weight, model.head.weight)
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"contains notes.txt, which is not part of an export"):
        tool.main([*command, str(taken), "--overwrite"])
    with pytest.raises(SystemExit, match=r"last.ckpt is a file, which is not overwritten"):
        tool.main([*command, str(path), "--overwrite"])
    assert sorted(item.name for item in tmp_path.iterdir()) == ["last.ckpt", "taken"] and path.stat().st_size > 1000


@pytest.mark.slow
def test_what_differs_is_not_written(tmp_path, monkeypatch):
    model = small()
    model.blocks[0].position.policy = "clip"  # on the module, where no argument tells of it
    with pytest.raises(ValueError, match=r"cannot be saved, .* blocks.0.position is .*'clip'.* would be .*'geometric'"):
        export_model(model, tmp_path / "folder", "safetensors")
    (tmp_path / "kept.pt2").write_bytes(b"precious")
    program = torch.export.export(small(), (torch.randn(2, 3, 32, 48),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    monkeypatch.setattr(torch.export, "load", lambda path: program)
    monkeypatch.setattr(torch.export, "export", lambda *args, **options: program)
    with pytest.raises(RuntimeError, match=r"exported file differs from the model at batch 1, 32x48 pixels by"):
        export_model(model, tmp_path / "kept.pt2", "exported", overwrite=True)
    monkeypatch.setattr(write, "TOLERANCE", 1e9)
    with pytest.raises(RuntimeError, match=r"exported file fails at batch 1, 17x37 pixels: AssertionError: Guard failed"):
        export_model(model, tmp_path / "kept.pt2", "exported", dynamic_size=True, overwrite=True)
    assert [item.name for item in tmp_path.iterdir()] == ["kept.pt2"] and (tmp_path / "kept.pt2").read_bytes() == b"precious"


@pytest.mark.slow
def test_what_onnx_cannot_express_is_refused(tmp_path, monkeypatch):
    """With the reason at the bottom of the exporter's, which tells of many others first."""
    pytest.importorskip("onnxscript")

    def fail(*args, **kwargs):
        raise RuntimeError("a page of advice") from ValueError("no operator aten.frobnicate\nand more")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(RuntimeError, match=r"this model cannot be exported to ONNX: ValueError: no operator aten.frobnicate$"):
        export_model(small(), tmp_path / "x.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_asked(checkpoint, tmp_path, monkeypatch, capsys):
    path, model = checkpoint

    def error(*arguments):
        with pytest.raises(SystemExit) as caught:
            tool.main([*map(str, arguments)])
        assert [item.name for item in tmp_path.iterdir()] == ["last.ckpt"]
        return f"{caught.value.code}{capsys.readouterr().err}"

    assert "no checkpoint at" in error(tmp_path / "none.ckpt", "--format", "onnx")
    assert "writes a .pt2 file, not x.onnx" in error(path, "--format", "exported", "--out", tmp_path / "x.onnx")
    assert "is not a folder; create it first" in error(path, "--format", "exported", "--out", tmp_path / "no" / "x.pt2")
    assert "size 7x32 is smaller than one patch of 8x8" in error(path, "--format", "exported", "--size", "7x32")
    one = error(path, "--format", "exported", "--size", "8", "--dynamic-size")
    assert "size 8x8 leaves one token, from which other sizes cannot be traced: use more than 8 pixels" in one
    assert "unknown model 'swin_t'" in error("swin_t", "--weights", path, "--format", "onnx")
    assert "expected a mapping" in error("vitrel_swin_t", "--weights", path, "--format", "onnx", "--model-args", "4")
    monkeypatch.setitem(EXTRAS, "onnx", ("onnx", "onnxruntime_of_nobody"))
    assert "onnxruntime_of_nobody is not installed: pip install" in error(path, "--format", "onnx")

    around = torch.nn.Module()
    around.backbone = small()
    for given, words in [
        (torch.nn.Linear(2, 2), "only models of vitrel and of vitrel.from_timm can be exported, not Linear"),
        (around, "only models of vitrel and of vitrel.from_timm can be exported, not Module"),
        (ViT(depth=1), "this ViT has no configuration: build it by timm.create_model"),
        (small().train(), r"call model.eval\(\) first"),
        (small().double(), r"export needs float32 on the CPU, but cls_token is torch.float64 on cpu"),
    ]:
        with pytest.raises(ValueError, match=words):
            export_model(given, tmp_path / "x.pt2", "exported", size=32)
    with pytest.raises(ValueError, match=r"keeps timm's trunk and names: timm.models.save_for_hf"):
        export_model(vitrel.from_timm("test_vit4").eval(), tmp_path / "folder", "safetensors")
    with pytest.raises(ValueError, match="unknown format 'tflite'; choose exported, onnx, safetensors"):
        export_model(model, tmp_path / "x.tflite", "tflite")
