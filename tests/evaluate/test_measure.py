"""Columns and lines beside accuracy: crops, classes, shifted content, attention, cost, windows, what it ran on."""

import math
import subprocess
from functools import partial

import pytest
import timm
import torch

from vitrel.cpu.optimize import FastBlock
from vitrel.evaluate.columns import COLUMNS, PER_CLASS, TRANSLATION
from vitrel.evaluate.fitting import gflops, static_columns
from vitrel.evaluate.folder import read_folder, read_lines, write_folder
from vitrel.evaluate.measure import shift_content
from vitrel.evaluate.plan import plan
from vitrel.evaluate.rows import evaluate_rows, line_key
from vitrel.evaluate.settings import Sweep
from vitrel.files import commit
from vitrel.inspect.attention import attention_statistics_of

ONE = dict(sizes=((32, 32),), protocols=("scale",))


def sweep(**given):
    return Sweep(**{"data": "noise", "sizes": ((32, 32),), "batch_size": 5, "device": "cpu", "attention_n": 0} | given)


def test_content_is_shifted_down_and_right_and_its_edges_repeated():
    image = torch.arange(12.0).view(1, 1, 3, 4)
    shifted = shift_content(image, 2)[0, 0]
    assert shifted.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1]]
    assert shift_content(image, 1)[0, 0, 1].tolist() == [0, 0, 1, 2]
    assert torch.equal(shift_content(image, 0), image)


def test_lines_of_shifts_are_those_of_a_plain_model_on_shifted_images(trained, noise):
    model = trained("vitrel_vit_n8_rope_mixed")
    done = list(evaluate_rows([model], sweep(sizes=((32, 32), (48, 48)), shifts=(0, 3))))
    assert [len(one.translation) for one in done] == [2, 0, 0, 0]  # at the training size, in the first protocol
    pixels = torch.stack([noise((32, 32))[i][0] for i in range(12)])
    for line, shift in zip(done[0].translation, (0, 3), strict=True):
        moved = torch.nn.functional.pad(pixels, (shift, 0, shift, 0), mode="replicate")[..., :32, :32]
        with torch.no_grad():
            hits = (model.model(moved).argmax(1) == torch.arange(12) % 3).sum().item()
        assert line["top1"] == pytest.approx(100 * hits / 12, abs=1e-3) and (line["shift"], line["n"]) == (shift, 12)
    assert done[0].translation[0]["top1"] == done[0].row["top1"]


def test_classes_add_up_to_the_row(trained, noise):
    model = trained("vitrel_vit_n8_rope_mixed")
    [one] = evaluate_rows([model], sweep(**ONE, n=11))
    with torch.no_grad():
        guess = model.model(torch.stack([noise((32, 32))[i][0] for i in range(11)])).argmax(1)
    hits = [sum(int(guess[i] == label) for i in range(11) if i % 3 == label) for label in range(3)]
    assert [(line["class"], line["n"], line["hits"]) for line in one.per_class] == list(
        zip(("left", "right", "above"), (4, 4, 3), hits, strict=True)
    )
    assert {line_key(line) for line in one.per_class} == {line_key(one.row)}
    assert one.row["top1"] == pytest.approx(100 * sum(hits) / 11, abs=1e-3)


def test_files_come_back_with_the_lines_of_every_row(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none", label="1", seed=None)]
    done = list(evaluate_rows(models, sweep(sizes=((32, 48),), shifts=(0, 2), crop_pct=(1.0, 0.5))))
    write_folder(done, tmp_path)
    back = read_folder(tmp_path)
    assert [line_key(one.row) for one in back] == [line_key(one.row) for one in done]
    for one, other in zip(back, done, strict=True):
        assert [(line["class"], line["hits"]) for line in one.per_class] == [
            (line["class"], line["hits"]) for line in other.per_class
        ]
        assert [(line["shift"], line["top1"]) for line in one.translation] == [
            (line["shift"], line["top1"]) for line in other.translation
        ]
    assert tuple(read_lines(tmp_path, "per_class")[0]) == PER_CLASS
    assert tuple(read_lines(tmp_path, "translation")[0]) == TRANSLATION
    before = noise.decoded
    again = list(evaluate_rows(models, sweep(sizes=((32, 48),), shifts=(0, 2), crop_pct=(1.0, 0.5)), back))
    assert noise.decoded == before and len(again) == len(done)
    (tmp_path / "per_class.csv").write_text("label,n\na,1\n")
    with pytest.raises(ValueError, match=r"per_class\.csv has no column 'seed': move it away and run again"):
        read_folder(tmp_path)


def test_every_crop_is_evaluated_and_refers_to_its_own_training_size(trained, noise):
    model = trained("vitrel_vit_n8_none", crop_pct=0.8)
    asked = [(task.size, task.crop_pct) for task in plan([model], sweep(sizes=((48, 48),), protocols=("scale",)))]
    assert asked == [((32, 32), 0.8), ((48, 48), 0.8)]  # the model's own
    rows = [one.row for one in evaluate_rows([model], sweep(sizes=((48, 48),), crop_pct=(1, 0.5)))]
    assert [row["crop_pct"] for row in rows] == [1.0, 0.5] * 4
    assert {(asked["crop_pct"], asked["size"]) for asked in noise.asked} == {(c, (s, s)) for c in (1.0, 0.5) for s in (32, 48)}
    assert all(row["retention"] == 1 for row in rows[:4])


def test_attention_is_that_of_the_first_images(trained, noise):
    model = trained("vitrel_swin_n", (32, 32))
    [one] = evaluate_rows([model], sweep(**ONE, attention_n=3))
    images = torch.stack([noise((32, 32))[i][0] for i in range(3)])
    found = attention_statistics_of(model.model, images)
    for name, value in found.items():
        assert one.row[name] == pytest.approx(value, rel=1e-3), name
    assert one.row["attention_span"] == pytest.approx(math.exp(one.row["attention_entropy"]), rel=1e-3)
    [none] = evaluate_rows([model], sweep(**ONE))
    assert math.isnan(none.row["attention_entropy"]) and none.row["attention_n"] == 0


def test_a_model_whose_attention_cannot_be_seen_leaves_it_empty(trained, noise):
    model = trained("vitrel_vit_n8_none", model=timm.create_model("resnet10t", num_classes=3).eval())
    [one] = evaluate_rows([model], sweep(**ONE, attention_n=2))
    assert math.isnan(one.row["attention_distance"]) and one.row["gflops"] > 0 and set(one.row) == set(COLUMNS)
    assert (one.row["window"], one.row["backend"], one.row["resized"]) == ("", "", "nothing")


def test_gflops_are_timms_gmacs():
    """4.6 for ViT-S/16 and 4.5 for Swin-T at 224 px (the papers; timm's result tables), however position enters."""
    for name, expected in (("vitrel_vit_s16_absolute", 4.60), ("vitrel_swin_t", 4.49), ("resnet18", 1.81)):
        assert gflops(timm.create_model(name), (224, 224)) == pytest.approx(expected, abs=0.01), name
    model = timm.create_model("vitrel_vit_n8_none", img_size=64)
    n, d, mlp = 65, 96, 4 * 96
    blocks = 4 * (n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * mlp)
    assert gflops(model, (64, 64)) == pytest.approx((64 * 3 * 64 * d + blocks + d * 1000) / 1e9)


def test_windows_padding_and_backend_are_told():
    swin = timm.create_model("vitrel_swin_n")
    columns = static_columns(swin, (80, 72), "keep")
    assert columns["window"] == "4x4 4x4 4x4" and columns["pad_fraction"] == "0 0.1 0.38"  # 18 of 20, 10 and 9 of 12
    columns = static_columns(swin, (80, 72), "divisor")
    assert (columns["window"], columns["pad_fraction"]) == ("4x4 4x3 2x3", "0 0 0")
    columns = static_columns(swin, (128, 128), "rescale+bicubic")
    assert (columns["window"], columns["resized"], columns["tokens"]) == ("8x8 8x8 8x8", "table bicubic", 64 * 64)
    vit = timm.create_model("vitrel_vit_n8_shaw")
    assert static_columns(vit, (64, 96), "none")["window"] == "global"
    large = timm.create_model("vitrel_vit_n8_factorised")
    chosen = [static_columns(large, (side, side), "none")["backend"] for side in (128, 256)]
    assert chosen == ["sdpa", "bias_by_row"]  # as vitrel.ops chooses by the number of tokens


def test_attention_across_borders_is_found():
    """timm's Swin rolls before it pads: with a window of 4, 4 of 9 rows leak. Ours does not, whatever the policy."""
    how = dict(img_size=32, patch_size=2, embed_dim=32, depths=(2,), num_heads=(1,), window_size=4)
    peer = timm.create_model("swin_tiny_patch4_window7_224", strict_img_size=False, **how)
    assert static_columns(peer, (32, 32), "none", leak=True)["border_leak"] == 0
    assert static_columns(peer, (18, 18), "none", leak=True)["border_leak"] == pytest.approx(1 - (5 / 9) ** 2, abs=1e-4)
    ours = timm.create_model("vitrel_swin_n", **how)
    for policy in ("keep", "divisor", "rescale"):
        assert static_columns(ours, (18, 26), policy, leak=True)["border_leak"] == 0
    assert math.isnan(static_columns(ours, (18, 26), "keep")["border_leak"])
    assert math.isnan(static_columns(timm.create_model("vitrel_vit_n8_none"), (64, 64), "none", leak=True)["border_leak"])


def test_the_backend_is_the_one_that_serves():
    def backend(**how):
        return static_columns(timm.create_model("vitrel_vit_n8_none", **how), (64, 64), "none")["backend"]

    assert backend(position="table") == "sdpa" and backend(position="xpos") == "reference"


def test_a_compiled_model_gives_the_same_row_from_batches_of_one_size(trained, noise, monkeypatch):
    model, graphs = trained("vitrel_vit_n8_rope_axial"), []
    [plain] = evaluate_rows([model], sweep(**ONE))

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    [compiled] = evaluate_rows([model], sweep(**ONE, compile=True))  # 5, 5 and 2 images
    assert len(graphs) == 1 and compiled.row["compile"] is True
    assert (compiled.row["top1"], compiled.row["n"], compiled.row["unchanged"]) == (plain.row["top1"], 12, True)
    assert compiled.row["nll"] == pytest.approx(plain.row["nll"], abs=1e-5)


@pytest.mark.parametrize("name", ["vitrel_vit_n8_table", "vitrel_swin_n"])
def test_an_optimized_model_gives_the_same_row_and_is_plain_afterwards(name, trained, noise, monkeypatch):
    model, seen = trained(name), []
    kinds = [type(module) for module in model.model.modules()]
    [plain] = evaluate_rows([model], sweep(**ONE))
    forward = FastBlock.forward
    monkeypatch.setattr(FastBlock, "forward", lambda self, *args: seen.append(self) or forward(self, *args))
    [optimized] = evaluate_rows([model], sweep(**ONE, optimize=True))
    assert seen and optimized.row["optimize"] is True and plain.row["optimize"] is False
    for column in ("top1", "n", "unchanged", "state_hash_after"):
        assert optimized.row[column] == plain.row[column]
    assert optimized.row["nll"] == pytest.approx(plain.row["nll"], abs=1e-5)
    assert [type(module) for module in model.model.modules()] == kinds
    with pytest.raises(ValueError, match="optimize is for models on a CPU"):
        sweep(**ONE, optimize=True, compile=True)


def test_the_commit_is_that_of_the_checkout(tmp_path):
    assert commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert commit(tmp_path) == head[:12]
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{head[:12]}-dirty"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"crop_pct": (0.0,)}, "crop_pct takes shares of the image, above 0 and at most 1, got 0.0"),
        ({"crop_pct": 1.5}, "crop_pct takes shares of the image, above 0 and at most 1, got 1.5"),
        ({"shifts": [4, -1]}, "shifts takes whole numbers of pixels, 0 or more, got -1"),
        ({"shifts": [0.5]}, "shifts takes whole numbers of pixels, 0 or more, got 0.5"),
        ({"attention_n": -1}, "attention_n must be at least 0, got -1"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        sweep(**given)
    assert sweep(crop_pct=1, shifts=4) == sweep(crop_pct=[1.0], shifts=[4, 4])
