"""Settings, the trials of an evaluation, and what its rows say."""

import math
from dataclasses import replace

import pytest
import timm
import torch

from helpers import each
from helpers.checkpoints import write_checkpoint
from vitrel.common.processes import local_device
from vitrel.common.sizes import Budget, format_size
from vitrel.evaluate import run
from vitrel.evaluate.checkpoint import load_checkpoint, trained_model
from vitrel.evaluate.folder import columns_of
from vitrel.evaluate.run import at_sizes, dry_run
from vitrel.evaluate.sweep import Settings, default_protocols, default_sizes, trials

pytestmark = pytest.mark.usefixtures("brief_evaluations")
OUTPUTS = (0, 1, 2)


def plan(models, sizes=(), **settings):
    """(size, protocol, label, policy) of every trial."""
    found = trials(models, [OUTPUTS] * len(models), Settings(sizes=sizes, device="cpu", **settings))
    return [
        (format_size(one.size), one.protocol, one.trained.label.removeprefix("vitrel_vit_n8_"), one.policy) for one in found
    ]


@each(
    ("given", "message"),
    [
        ({"protocols": ("scale", "zoom")}, "unknown protocol 'zoom': choose from scale, canvas, native, sliding"),
        ({"dtype": "float16"}, "dtype is float32 or bfloat16, got 'float16'"),
        ({"dtype": "bfloat16"}, "bfloat16 evaluation needs a GPU"),
        ({"device": "gpu"}, "device is auto, cpu, cuda, cuda:1, ..., got 'gpu'"),
        ({"device": "cuda:99"}, "there is no device cuda:99 .*GPUs .*: [0-9]+.*use auto or cpu"),
        ({"device": "meta"}, r"there is no device meta .*\(.+\); use auto or cpu"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"translations": [0.5]}, "translations takes whole numbers of pixels, 0 or more, got 0.5"),
        ({"translations": [4, -1]}, "translations takes whole numbers of pixels, 0 or more, got -1"),
        ({"sizes": ["64*96"]}, r"'64\*96' is not an image size"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"device": "cpu"} | given)
    assert Settings(translations=4, sizes=[96, "64x32", "9t"]) == Settings(
        translations=[4, 4], sizes=((96, 96), (64, 32), Budget(9))
    )


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == local_device("auto") == torch.device("cuda", 3)
    assert local_device("cuda:1") == torch.device("cuda", 1) and local_device("cpu") == torch.device("cpu")


def test_without_settings_it_is_scale_at_four_sizes_with_the_models_own_policy(trained):
    assert plan([trained("vitrel_vit_n8_table")]) == [
        ("32x32", "scale", "table", "none"),
        ("16x16", "scale", "table", "none"),
        ("48x48", "scale", "table", "geometric"),
        ("64x64", "scale", "table", "geometric"),
    ]
    assert [policy for *_, policy in plan([trained("vitrel_swin_n", (64, 64))], ((80, 80),))] == ["none", "fixed"]
    # whole patches
    assert default_sizes(trained("vitrel_vit_n8_none", (32, 48))) == ((16, 24), (32, 48), (48, 72), (64, 96))
    assert default_sizes(trained_model(timm.create_model("resnet10t", num_classes=3))) == tuple(
        (n, n) for n in (88, 176, 264, 352)
    )


def test_the_plan_starts_at_the_training_sizes_and_shares_images_between_models(trained):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none", (64, 64))]
    found = plan(models, ((32, 48),), protocols=("scale", "canvas"), policies="all")
    assert sorted(found[:4]) == [
        ("32x32", "canvas", "table", "none"),
        ("32x32", "scale", "table", "none"),
        ("64x64", "canvas", "none", "none"),
        ("64x64", "scale", "none", "none"),
    ]
    assert [trial[2:] for trial in found[4:8]] == [("table", p) for p in models[0].model.policies] + [("none", "none")]
    assert len(found) == 12
    assert plan(models[:1], ((48, 48),), skip=("32x32 scale",)) == [("48x48", "scale", "table", "geometric")]


def test_keys_name_a_row_alone(trained):
    models = [trained("vitrel_vit_n8_table", seed=seed, crop_pct=crop) for seed, crop in ((0, 1.0), (1, 0.5))]
    settings = Settings(
        sizes=("9t", 32, 48),
        protocols=("scale", "native"),
        policies="all",
        translations=(0, 3),
        device="cpu",
    )
    found = [one.key for one in trials(models, [OUTPUTS] * 2, settings)]
    assert len({*found}) == len(found)
    assert {
        "vitrel_vit_n8_table|1|32x32|scale|none|0.5",
        "vitrel_vit_n8_table|0|24x24|native,9t|none|1",
        "vitrel_vit_n8_table|0|32x32|scale, moved 3 px|none|1",
        "vitrel_vit_n8_table|0|48x48|scale|bicubic|1",
    } < {*found}


@pytest.mark.slow
def test_rows_say_what_was_done_to_the_model(trained, rows_of):
    models = [trained(f"vitrel_vit_n8_{key}") for key in ("absolute", "table")]
    rows = rows_of(models, (32, 64), policies="all")
    assert all([*row] == columns_of("classification") for row in rows)
    found = {(row["encoding"], row["img_size"], row["policy"]): row for row in rows}
    assert len(found) == len(rows) == 2 + 1 + 3
    big = found["absolute", "64x64", "bicubic"]
    assert (big["resampled"], big["tokens"]) == ("absolute bicubic", 64)
    assert big["resampled_values"] == models[0].model.resampled((64, 64))["absolute bicubic"] > 0
    clip = found["table", "64x64", "clip"]
    assert (clip["resampled"], clip["resampled_values"]) == ("table clip", 0)
    # 7x7 offsets trained of 15x15
    assert clip["unseen"] == clip["saturated"] == pytest.approx(1 - 49 / 225, abs=1e-4)
    assert found["table", "64x64", "bicubic"]["saturated"] == 0
    assert found["table", "64x64", "geometric"]["resampled_values"] == 2 * 3 * 49
    assert found["table", "32x32", "none"]["resampled"] == "nothing"
    for row in rows:
        assert row["n"] == 12 and row["top1_low"] <= row["top1"] <= row["top1_high"]
        assert row["infer_samples_per_sec"] > 0 and row["batch_size"] == 5
        start = found[row["encoding"], "32x32", "none"]["top1"]
        assert row["retention"] == (pytest.approx(row["top1"] / start, abs=1e-4) if start else None)


def test_what_stops_an_evaluation_names_model_and_size(trained, rows_of, tmp_path, capsys):
    model = trained("vitrel_vit_n8_none")
    model.model.head.bias.data.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"the logits hold NaN.*\n.*vitrel_vit_n8_none at 32x32 \(scale\)"):
        rows_of([model], [32])
    capsys.readouterr()
    other = trained("vitrel_vit_n8_none", classes=("left", "right"))
    with pytest.raises(ValueError, match=r"trained on 2 classes .* lack 1 of the 3 classes of noise: above"):
        rows_of([other], [32], out=tmp_path / "out")
    assert capsys.readouterr().out == "" and not (tmp_path / "out").exists()  # no plan of what is refused


def test_translated_content_is_that_of_a_plain_model_on_translated_images(trained, noise, rows_of):
    model = trained("vitrel_vit_n8_rope_mixed")
    rows = rows_of([model], (32, 48), protocols=("scale", "canvas"), policies="keep", translations=(0, 3))
    # at the training size, in the first protocol
    assert [(row["img_size"], row["protocol"], row["translation"]) for row in rows[:3]] == [
        ("32x32", "scale", 0), ("32x32", "scale", 3), ("32x32", "canvas", 0),
    ]  # fmt: skip
    assert {row["translation"] for row in rows[3:]} == {0}
    pixels = torch.stack([noise((32, 32))[i][0] for i in range(12)])
    moved = torch.nn.functional.pad(pixels, (3, 0, 3, 0), mode="replicate")[..., :32, :32]
    with torch.no_grad():
        hits = (model.model(moved).argmax(1) == torch.arange(12) % 3).sum().item()
    assert rows[1]["top1"] == pytest.approx(100 * hits / 12, abs=1e-3)


def test_a_model_whose_attention_cannot_be_seen_leaves_it_empty(trained, rows_of):
    model = trained("vitrel_vit_n8_none", model=timm.create_model("resnet10t", num_classes=3).eval())
    [row] = rows_of([model], [32], attention_n=2)
    assert row["attention_distance"] is None and row["gflops"] > 0
    assert (row["window"], row["resampled"]) == ("", "nothing")


SEVERAL = ("24x24", "48x48", "32x64")


def saved(path, train_sizes, img_size=(32, 32)):
    model = timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=img_size, depth=1)
    sizes = {} if train_sizes is None else {"train_sizes": [*train_sizes]}
    return load_checkpoint(write_checkpoint(path, model, model_args={"depth": 1}, img_size=[*img_size], **sizes))


def test_a_checkpoint_knows_its_training_sizes(tmp_path):
    plain, several = saved(tmp_path / "a.ckpt", None), saved(tmp_path / "b.ckpt", SEVERAL)
    assert plain.train_sizes == plain.train_pixels == ((32, 32),) and not plain.is_native
    # the model is built for 32x32, which it never saw: 24x24 is nearest in area, by ratio
    assert several.train_sizes == ((24, 24), (48, 48), (32, 64)) and several.img_size == (24, 24)
    native = saved(tmp_path / "d.ckpt", ("9t", "30t"), img_size=(224, 224))
    assert native.is_native and native.train_sizes == (Budget(9), Budget(30))
    assert native.img_size == (40, 40) and native.train_pixels == ((40, 40), (24, 24))
    assert default_protocols([plain, several]) == ("scale",) and default_protocols([native]) == ("native",)
    assert default_protocols([plain, native]) == ("scale", "native")
    assert default_sizes(native) == tuple(map(Budget, (2, 9, 20, 36)))


def test_training_sizes_are_evaluated_first_and_are_the_references(tmp_path, rows_of):
    several = saved(tmp_path / "b.ckpt", SEVERAL)
    rows = rows_of([several], (32, 64), policies="clip")
    assert [row["img_size"] for row in rows] == ["24x24", "48x48", "32x64", "32x32", "64x64"]
    assert {row["train_size"] for row in rows} == {"24x24 48x48 32x64"}
    assert [row["retention"] for row in rows[:3]] == [1.0] * 3
    by_size = {row["img_size"]: row for row in rows}
    assert by_size["32x32"]["retention"] == pytest.approx(by_size["32x32"]["top1"] / by_size["24x24"]["top1"], abs=1e-4)
    assert by_size["64x64"]["retention"] == pytest.approx(by_size["64x64"]["top1"] / by_size["48x48"]["top1"], abs=1e-4)
    # offsets of all training sizes were seen, also those beyond the grid of 4x4 that the model is built for
    assert [by_size[size]["unseen"] for size in (*SEVERAL, "32x32")] == [0.0] * 4
    assert by_size["64x64"]["unseen"] == pytest.approx(1 - 11 * 11 / 15**2, abs=1e-4)


def test_a_model_in_memory_comes_back_as_it_was(trained, tmp_path, monkeypatch):
    """And nothing is written without a folder."""
    monkeypatch.chdir(tmp_path)
    model = trained("vitrel_vit_n8_table").model.train()
    frame = at_sizes(model, Blank(torch.uint8), [32, "32x48"], device="cpu", attention_n=0)
    assert frame["img_size"].tolist() == ["32x32", "32x48"] and model.training and frame["n"].tolist() == [6, 6]
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match=r"images of torch\.float32: give uint8"):
        at_sizes(model, Blank(torch.float32), [32], device="cpu")


class Blank(torch.utils.data.Dataset):
    """Six images of one color."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((3, 40, 40), index, dtype=self.dtype), index % 3


def test_a_dry_run_tells_rows_and_minutes_and_measures_nothing(trained, noise, tmp_path, monkeypatch):
    models = [trained("vitrel_vit_n8_table"), replace(trained("vitrel_vit_n8_none"), label="other")]
    monkeypatch.setattr(run, "_share", lambda *given: pytest.fail("measured"))
    text = dry_run(models, "noise", Settings(sizes=(48,), device="cpu", policies="all"), tmp_path / "out")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 + 4 and "rows: 6, of 12 images each; in" in text
    assert "the others take about 1 min on this machine" in text and not (tmp_path / "out").exists()
    assert "| table clip" in text and math.isfinite(len(text))
    settings = Settings(sizes=(48,), device="cpu", policies="all")
    keys = [{"key": one.key} for one in run.opened(models, "noise", settings)[1]]
    monkeypatch.setattr(run, "read_rows", lambda out: (keys, None))
    assert dry_run(models, "noise", settings, tmp_path).startswith("All rows are in ")
