"""tools/gpu on a CPU: parts end in time and go on where they stopped, a wrong result is found, data wait is measured."""

import argparse
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tools.gpu import attention, bench, check, pack, parts, study, train
from tools.gpu.parts import Job, Setting, run, run_again
from vitrel.data.readers.decode import IGNORED
from vitrel.grid import Grid

CPU = torch.device("cpu")
NARROW = {"depth": 1, "embed_dim": 48, "num_heads": 3}


@pytest.fixture
def setting(tmp_path):
    """Returns the small form of a part, without a GPU, that ends in so many seconds."""

    def made(part, seconds=600.0, data=None):
        return Setting(part, tmp_path, time.time() + seconds, True, data, "abc")

    return made


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Jobs are a shell script, whose text this sets, instead of Python; $4 is the name of a job."""

    def write(text):
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr(parts.sys, "executable", str(script))

    return write


def test_jobs_end_in_time_with_what_they_have_started(setting, scripted, tmp_path):
    scripted(f"case $4 in fast) echo $TIER;; slow) sleep 60 & echo $! > {tmp_path}/pid; wait;; *) exit 3;; esac")
    start = time.time()
    jobs = [Job("fast", env={"TIER": "one"}), Job("slow"), Job("wrong")]
    assert run(setting("check", 1.0), jobs, at_once=2) == {"fast": 0, "slow": None, "wrong": 3}
    assert (tmp_path / "check-fast.log").read_text() == "one\n"
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    while status.exists() and "zombie" not in status.read_text() and time.time() - start < 30:
        time.sleep(0.01)  # a killed process ends when its turn comes
    assert time.time() - start < 30
    assert run(setting("check", -1.0), [Job("fast")]) == {"fast": None}


def test_a_row_that_ends_its_process_is_one_and_the_others_follow(setting, scripted, tmp_path):
    (tmp_path / "key").write_text('{"case": "a", "mode": "m", "contender": "c"}')
    scripted(f"cd {tmp_path}; [ -e second ] && exit 0; touch second; cp key bench-small.now; kill -SEGV $$")
    known = setting("bench").samples()
    run_again(setting("bench"), Job("measure"), known)
    [row] = setting("bench").samples().current()
    assert (row["kind"], row["case"], row["commit"]) == ("failed", "a", "abc") and "status -11" in row["text"]
    assert not (tmp_path / "bench-small.now").exists()


def test_numerics_find_a_wrong_gradient(setting, monkeypatch):
    """Half of the gradient of one block's table, on the backend and not in the definition, which comes first."""
    found, calls = check.results, []

    def wrong(model, images, cast=None):
        given = found(model, images, cast)
        calls.append(images.dtype)
        if images.dtype == torch.float32 and calls.count(torch.float32) % 2 == 0:
            given["blocks.1.position.relative_position_bias_table"] *= 0.5
        return given

    monkeypatch.setattr(check, "results", wrong)
    monkeypatch.setattr(check, "_BACKENDS", ("auto",))
    compared = setting("check")
    check.compare("vitrel_vit_n8_table", compared, compared.samples(check.TESTED))
    rows = compared.samples(check.TESTED).rows
    assert [(row["mode"], row["share"] > 1) for row in rows] == [("float32", True), ("bfloat16", True)]
    assert {row["worst"] for row in rows} == {"blocks.1.position.relative_position_bias_table"}
    lines, bad = check.table(compared)
    assert bad and "vitrel_vit_n8_table, auto, float32: blocks.1.position.relative_position_bias_table: " in lines[-2]
    with pytest.raises(ArithmeticError, match="the gradient of head"):
        check.errors({"": torch.ones(1)}, {"": torch.ones(1), "head.bias": torch.ones(1)})


@pytest.mark.slow
def test_numerics_of_right_backends(setting):
    compared = setting("check")
    samples = compared.samples(check.TESTED)
    check.compare("vitrel_swin_n", compared, samples)
    count = len(samples.rows)
    assert all(row["kind"] == "refused" or row["share"] < 0.7 for row in samples.rows) and count == 2 * len(check._BACKENDS)
    check.compare("vitrel_swin_n", compared, samples)
    assert len(samples.rows) == count and not check.table(compared)[1]


@pytest.mark.parametrize("shape", attention.SMALL, ids=lambda shape: shape.name)
def test_attention_that_is_timed_is_attention_with_all_gradients(shape):
    ours, definition = (attention.call(shape, name, True, CPU, torch.float32)() for name in ("sdpa", "reference"))
    assert len(ours) == (1 if shape.window else 3) + (2 if shape.encoding == "decomposed" else 1)
    for one, other in zip(ours, definition, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.norm() > 0
    bare = attention.call(shape, attention.FLOOR, False, CPU, torch.float32)()
    assert not torch.allclose(bare, attention.call(shape, "sdpa", False, CPU, torch.float32)(), atol=1e-2)


def test_bytes_that_have_to_be_moved():
    """q, k, v and the output of 128 images of 56x56 tokens with 96 channels in bfloat16, as worked out by hand."""
    shape = attention.SHAPES[0]
    assert shape.grid == Grid(56, 56) and shape.moved(False, 2) == 128 * 56 * 56 * 96 * 2 * 4
    assert shape.moved(True, 2) == 3 * shape.moved(False, 2)


@pytest.mark.slow
def test_models_and_attention_are_measured_once(setting, monkeypatch):
    monkeypatch.setattr(bench, "_REPEATS", bench.Repeats(1, 2, 0.0, 1))
    monkeypatch.setattr(attention, "_WARM", 1)
    monkeypatch.setattr(attention, "_CALLS", 1)
    monkeypatch.setattr(torch, "compile", lambda net, **how: net)
    part = setting("bench")
    assert {one.library for _, one in bench._missing(part, part.samples(bench.MEASURED))} == {"ours", "timm"}
    bench.work(part, "compile-0-1")
    bench.work(part, "measure")
    rows = part.samples(bench.MEASURED).current()
    assert not bench._missing(part, part.samples(bench.MEASURED)) and not bench.table(part)[1]
    errors = [row["error"] for row in rows if row["contender"] == "Swin nano: ours"]
    assert len(errors) == 3 and all(error < 0.1 for error in errors)
    lines = bench.times(rows)
    assert len(lines) == 2 + 8 and sum("x (" in line for line in lines) == 7  # all but timm's where nothing lacks position
    assert all(name in "\n".join(bench.attention_table(rows)) for name in ("windows 7x7", "decomposed"))
    bench.work(part, "measure")
    assert len(part.samples(bench.MEASURED).rows) == len(rows)


def test_a_model_that_differs_from_timms_gets_no_time(setting, monkeypatch):
    monkeypatch.setattr(bench, "_REPEATS", bench.Repeats(1, 2, 0.0, 1))

    class Call:
        batch = 1

        def __init__(self, case, one, setting):
            self.value = 1.0 if one.library == "timm" else 2.0

        def __call__(self):
            return {"output": torch.full((3,), self.value)}

    monkeypatch.setattr(bench, "built", Call)
    part, case = setting("bench"), bench.cases(small=True)[0]
    bench.compare(case, part, part.samples(bench.MEASURED))
    rows = part.samples(bench.MEASURED).rows
    assert [(row["kind"], row["contender"]) for row in rows] == [("wrong", "Swin nano: ours"), ("time", "Swin nano: timm")]
    assert bench.table(part)[1]


def test_waiting_for_data_is_measured():
    class Call:
        images = targets = None

        def __call__(self):
            time.sleep(0.01)

    def slow(count):
        for _ in range(count):
            time.sleep(0.03)
            yield torch.zeros(4, 3, 2, 2), torch.zeros(4)

    found = train.rate(Call(), slow(8), CPU)
    assert found["updates"] == 7 and 0.55 < found["data_wait"] < 0.9 and 60 < found["images_per_s"] < 101


def picture(path, size=(32, 24), value=None):
    """Of random colors, or a mask of one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    w, h = size
    colors = np.random.default_rng(0).integers(0, 255, (h, w, 3), dtype=np.uint8)
    Image.fromarray(colors if value is None else np.full((h, w), value, np.uint8)).save(path)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder as `pack` makes it, of few images and drawn weights."""
    folder = tmp_path_factory.mktemp("packed")
    source = folder / "source"
    for split, count in (("train", 17), ("val", 2)):
        for i in range(count):
            picture(source / "camvid" / "images" / split / f"{i}.jpg", (480, 360))
            picture(source / "camvid" / "masks" / split / f"{i}.png", (480, 360), i % 3 if i else IGNORED)
            picture(source / "photographs" / split / f"class{i % 2}" / f"{i}.jpg")
    torch.save(timm.create_model("vit_tiny_patch16_224", **NARROW).state_dict(), source / "weights.pth")
    args = argparse.Namespace(
        folder=folder / "packed", camvid=source / "camvid", weights=source / "weights.pth", images=source / "photographs"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack.subprocess, "run", lambda command, check: None)  # pip, which needs a network
        pack.main(argparse.ArgumentParser(), args)
    return args.folder


@pytest.mark.slow
def test_training_is_measured_from_a_packed_folder(setting, packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda net, **how: net)
    monkeypatch.setattr(train, "absent", lambda *modules: ["lightning"])
    monkeypatch.setattr(train, "SCRATCH", tmp_path / "scratch")
    part = setting("train", data=packed)
    train.work(part, "train")
    rows = {row["contender"]: row for row in part.samples(train.TRAINED).current()}
    assert {name: row["updates"] for name, row in rows.items()} == {train.DEVICE: 3, train.TIMM: 4}
    assert "lightning are not installed" in capsys.readouterr().out
    [folder] = (tmp_path / "scratch").iterdir()
    assert len(list(folder.glob("train/*/*.jpg"))) == 20 and len(list(folder.glob("val/*/*.jpg"))) == 2
    lines, bad = train.table(part)
    assert not bad and len(lines) == 2 + 2 + 1 and lines[0].startswith("| Swin nano, 56 px, batch 4 |")


@pytest.mark.slow(seconds=3)
def test_the_study_trains_evaluates_and_goes_on(setting, packed, monkeypatch, capsys):
    build, seen = timm.create_model, []
    monkeypatch.setattr("vitrel.weights.fit.STEPS", 3)
    monkeypatch.setattr(study.timm, "create_model", lambda name, **how: build(name, **NARROW | how))
    monkeypatch.setattr(study, "trained", lambda *given, own=study.trained: seen.append(given[2]) or own(*given))
    part = setting("study", data=packed)
    study.work(part, "study")
    rows = part.samples(("tools/gpu/study.py",), study.STAMP).current()
    assert {(row["case"], row["mode"]) for row in rows} == {
        (position, size) for position in ("absolute", "rope_mixed") for size in ("90x120", "180x240")
    }
    assert all(row["kind"] == "miou" and 0 <= row["miou"] <= 100 and row["loss"] > 0 for row in rows)
    assert "rope_mixed fitted to 16 images" in capsys.readouterr().out
    assert "| absolute | 1 |" in "\n".join(study.table(part)[0])
    study.work(part, "study")
    assert seen == [0, 0]


def test_views_of_images_and_masks_show_the_same_places():
    """A mask of the bright pixels is where the view is bright."""
    pixels = torch.zeros(4, 3, 60, 80, dtype=torch.uint8)
    pixels[:, :, 10:40, 30:60] = 255
    masks = (pixels[:, 0] > 0).byte()
    generator = torch.Generator().manual_seed(0)
    views = [study.augmented(study.Images(pixels, masks), torch.arange(4), generator) for _ in range(8)]
    images, labels = (torch.cat(part) for part in zip(*views, strict=True))
    assert set(labels.unique().tolist()) == {0, 1, IGNORED} and labels.dtype == torch.int64
    bright = images[:, 0] > images[:, 0].flatten(1).mean(1)[:, None, None]
    inside = labels != IGNORED
    assert ((bright == (labels == 1)) | ~inside).float().mean() > 0.97
    shares = (labels == 1).flatten(1).float().mean(1) / ((30 * 30) / (60 * 80))
    assert 0.5 < shares.min() < 0.75 and 1.6 < shares.max() < 2.3  # zoomed from 0.75 to 1.5 times


def test_miou_of_predictions_at_another_size():
    """A model that tells dark from bright, on images whose left half is bright and counts as class 1; class 2 never occurs."""

    class Threshold(torch.nn.Module):
        def forward(self, image):
            bright = image.mean(1)
            return torch.stack([-bright, bright, *[torch.full_like(bright, -9.0)] * (study.CLASSES - 2)], 1)

    pixels = torch.zeros(3, 3, 24, 32, dtype=torch.uint8)
    pixels[..., :16] = 255
    masks = (pixels[:, 0] > 0).byte()
    for size in ((24, 32), (48, 64)):
        assert study.evaluated(Threshold(), study.Images(pixels, masks), size) == {"miou": 100.0, "pixel_accuracy": 100.0}
    masks[:, :12] = 0  # 192 of 768 pixels are wrong: IoU 384 / 576 and 192 / 384
    masks[:, 0] = IGNORED  # 16 of each kind less
    found = study.evaluated(Threshold(), study.Images(pixels, masks), (24, 32))
    right, wrong, bright = 384 - 16, 192 - 16, 192
    expected = 100 * (right / (right + wrong) + bright / (bright + wrong)) / 2
    assert found == {
        "miou": pytest.approx(expected, abs=1e-3),
        "pixel_accuracy": pytest.approx(100 * (right + bright) / 736, abs=1e-3),
    }


def test_every_parameter_is_in_one_group_and_encodings_learn_faster():
    model = study.Segmenter(timm.create_model("vitrel_vit_n8_table", img_size=64), 11)
    found = study.groups(model)
    assert sorted(id(p) for group in found for p in group["params"]) == sorted(map(id, model.parameters()))
    scales = {id(p): group["lr_scale"] for group in found for p in group["params"]}
    assert scales[id(model.head.weight)] == 1 and scales[id(model.backbone.patch_embed.proj.weight)] < 0.75
    assert scales[id(model.backbone.blocks[0].position.relative_position_bias_table)] == 10
