import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from vitrel.evaluate import images, measure
from vitrel.evaluate.columns import COLUMNS
from vitrel.evaluate.folder import read_folder, write_folder
from vitrel.evaluate.plan import plan
from vitrel.evaluate.rows import evaluate_rows, line_key, row_key
from vitrel.evaluate.settings import Sweep
from vitrel.sizes import format_size, parse_size

SIZES = ((32, 32), (64, 64), (32, 48))


def sweep(**given):
    return Sweep(**{"data": "noise", "sizes": SIZES, "batch_size": 5, "device": "cpu", "attention_n": 0} | given)


@pytest.mark.parametrize(("text", "size"), [("96", (96, 96)), (96, (96, 96)), ("160x224", (160, 224)), ("32X48", (32, 48))])
def test_sizes_are_read_height_first(text, size):
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "0", "96x", "x96", "-96", "96x96x3", "96*128", "1e2", "9.5", True, "²"])
def test_bad_sizes_are_named_with_a_valid_example(text):
    with pytest.raises(ValueError, match="is not an image size: write pixels as 96, or height x width as 160x224") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protocols": ("scale", "zoom")}, "unknown protocol 'zoom': choose from scale, canvas"),
        ({"dtype": "float16"}, "dtype is float32 or bfloat16, got 'float16'"),
        ({"dtype": "bfloat16"}, "bfloat16 evaluation needs a GPU"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"protocols": ()}, "at least one protocol is needed: scale, canvas"),
        ({"device": "gpu"}, "device is auto, cpu, cuda, cuda:1, ..., got 'gpu'"),
        ({"device": "cuda:99"}, "there is no device cuda:99 here: [0-9]+ GPUs are seen; use auto or cpu"),
        ({"device": "meta"}, r"there is no device meta here \(.+\); use auto or cpu"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        sweep(**given)


def test_plan_starts_at_the_training_sizes_and_shares_images_between_models(trained):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none", (64, 64))]
    tasks = [(format_size(t.size), t.protocol, t.trained.name[14:], t.policy) for t in plan(models, sweep(sizes=((32, 48),)))]
    assert tasks[:4] == [
        ("32x32", "scale", "table", "none"),
        ("32x32", "canvas", "table", "none"),
        ("64x64", "scale", "none", "none"),
        ("64x64", "canvas", "none", "none"),
    ]
    assert [task[2:] for task in tasks[4:8]] == [("table", p) for p in models[0].model.resize_policies] + [("none", "none")]
    assert len(tasks) == 12
    with pytest.raises(ValueError, match="no model has the policy 'nearest'; the policies of these models are bicubic, c"):
        plan(models, sweep(policies=("nearest",)))
    with pytest.raises(ValueError, match="none: they resize nothing"):
        plan(models[1:], sweep(policies=("clip",)))


def test_models_are_compared_at_each_others_training_sizes(trained, noise, rows_of):
    models = [trained("vitrel_vit_n8_table", (64, 64), label="a"), trained("vitrel_vit_n8_none", label="b")]
    rows = rows_of(models, sweep(sizes=((32, 32), (64, 64)), policies=("clip",), protocols=("scale", "scale")))
    assert [(row["label"], row["img_size"]) for row in rows] == [
        ("a", "64x64"), ("b", "32x32"), ("a", "32x32"), ("b", "64x64")
    ]  # fmt: skip
    top1 = {(row["label"], row["img_size"]): row["top1"] for row in rows}
    assert rows[3]["retention"] == round(top1["b", "64x64"] / top1["b", "32x32"], 4)


def test_rows_say_what_was_done_to_the_model(trained, noise, rows_of):
    models = [trained(f"vitrel_vit_n8_{key}") for key in ("absolute", "table")]
    rows = rows_of(models, sweep())
    assert all(set(row) == set(COLUMNS) for row in rows)
    found = {(row["encoding"], row["img_size"], row["policy"], row["protocol"]): row for row in rows}
    assert len(found) == len(rows) == 2 * (3 + 1 + 2 * 3)
    big = found["absolute", "64x64", "bicubic", "canvas"]
    assert (big["resized"], big["tokens"]) == ("absolute bicubic", 64)
    assert big["resized_params"] == models[0].model.resized((64, 64))["absolute bicubic"] > 0
    clip = found["table", "64x64", "clip", "scale"]
    assert (clip["resized"], clip["resized_params"]) == ("table clip", 0)
    # 7x7 offsets trained of 15x15
    assert clip["unseen"] == clip["saturated"] == pytest.approx(1 - 49 / 225, abs=1e-4)
    assert found["table", "64x64", "bicubic", "scale"]["saturated"] == 0
    assert found["table", "64x64", "geometric", "scale"]["resized_params"] == 4 * 3 * 49
    assert found["table", "32x32", "none", "scale"]["resized"] == "nothing"
    for row in rows:
        assert row["unchanged"] is True and row["state_hash_before"] == row["state_hash_after"]
        assert row["n"] == 12 and row["top1_low"] <= row["top1"] <= row["top1_high"]
        assert row["params"] == sum(p.numel() for p in models[row["encoding"] == "table"].model.parameters())
        assert row["infer_samples_per_sec"] > 0 and (row["batch_size"], row["oom"]) == (5, 0)
        start = found[row["encoding"], "32x32", "none", row["protocol"]]["top1"]
        assert row["retention"] == (
            pytest.approx(row["top1"] / start, abs=1e-4) if start else pytest.approx(math.nan, nan_ok=True)
        )


def test_policies_of_two_kinds_are_swept_in_all_combinations(trained, noise, rows_of):
    model = trained("vitrel_vit_n8_none", model_args={"position": "table+cpb"})
    parts = [part for block in model.model.blocks for part in block.position.parts.values()]
    for part in parts:
        torch.nn.init.normal_(next(part.parameters()), std=2.0)
    for block in model.model.blocks:  # so that attention tells in the output
        torch.nn.init.normal_(block.attn.proj.weight, std=1.0)
    rows = rows_of([model], sweep(sizes=((64, 64), (24, 24)), protocols=("scale",)))
    found = {(row["img_size"], row["policy"]): row for row in rows}
    larger = [f"{first}+{second}" for first in ("geometric", "clip", "bicubic") for second in ("keep", "renormalise")]
    assert [*found] == [("32x32", "none"), *(("64x64", p) for p in larger), ("24x24", "keep"), ("24x24", "renormalise")]
    assert len({row["nll"] for row in rows}) == len(rows)  # each combination was another model
    assert found["64x64", "clip+keep"]["resized"] == "table clip"
    assert found["64x64", "bicubic+renormalise"]["resized"] == "table bicubic + cpb renormalise"
    assert found["24x24", "renormalise"]["resized"] == "cpb renormalise"
    assert all(row["unchanged"] for row in rows)
    assert {part.resize for part in parts} == {"geometric", "keep"}  # as they were


def test_accuracy_is_that_of_the_plain_model(trained, noise, rows_of):
    model = trained("vitrel_vit_n8_rope_mixed")
    [row] = rows_of([model], sweep(sizes=((32, 32),), protocols=("scale",)))
    with torch.no_grad():
        logits = model.model(torch.stack([noise((32, 32))[i][0] for i in range(12)]))
    labels = torch.arange(12) % 3
    assert row["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item(), abs=1e-4)
    assert row["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-5)


def test_images_are_decoded_once_for_all_models_and_policies(trained, noise, monkeypatch, rows_of):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none")]
    settings = sweep(sizes=((64, 64),), protocols=("canvas",))
    rows = rows_of(models, settings)
    assert len(rows) == 2 + 4 and noise.decoded == 2 * 12
    assert noise.asked[-1] == {
        "data": "noise", "split": "val", "size": (64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0,
        "interpolation": "bicubic", "protocol": "canvas", "base_size": (32, 32), "n": None, "seed": 0,
    }  # fmt: skip
    monkeypatch.setattr(images, "CACHE_BYTES", 0)
    again = rows_of(models, settings)
    assert noise.decoded == 2 * 12 + 6 * 12
    assert [row["nll"] for row in again] == [row["nll"] for row in rows]


def test_rows_of_the_same_weights_are_not_made_again(trained, noise, tmp_path):
    model = trained("vitrel_vit_n8_none")
    first = list(evaluate_rows([model], sweep()))
    write_folder(first, tmp_path)
    done, before = read_folder(tmp_path), noise.decoded
    shares = []
    again = list(evaluate_rows([model], sweep(), done, lambda task, share: shares.append(share)))
    assert noise.decoded == before and [row_key(one.row) for one in again] == [row_key(one.row) for one in done]
    assert [one.per_class for one in again] == [one.per_class for one in first]
    assert sum(shares) == len(again) == 6
    model.model.head.bias.data[0] += 1
    list(evaluate_rows([model], sweep(), done))
    assert noise.decoded == before + 6 * 12
    list(evaluate_rows([model], sweep(data_seed=1), done))
    assert noise.decoded == before + 12 * 12


def test_rows_are_told_apart_by_long_seeds_labels_that_are_numbers_and_the_training_size(trained, noise, tmp_path):
    """A column with an empty cell comes back from CSV as floats, one of digits alone as numbers."""
    seeds = (None, 20240101, 20240102)
    models, one = [trained("vitrel_vit_n8_none", label="007", seed=seed) for seed in seeds], dict(sizes=((32, 32),))
    write_folder(list(evaluate_rows(models, sweep(**one))), tmp_path)
    done, before = read_folder(tmp_path), noise.decoded
    again = [row_key(found.row) for found in evaluate_rows(models, sweep(**one), done)]
    assert noise.decoded == before and len(set(again)) == 6
    assert len({line_key(found.row) for found in done}) == 6 and all(len(found.per_class) == 3 for found in done)
    # the same weights said to be trained at another size: objects are then shown in another size
    list(evaluate_rows([replace(model, img_size=(64, 64)) for model in models], sweep(**one), done))
    assert noise.decoded > before


@pytest.mark.parametrize("lacking", ["ece", "per_class", "shifts"])
def test_a_row_that_lacks_what_is_asked_for_now_is_made_again(trained, noise, lacking):
    """As a file of an earlier version has it, one whose lines were lost, or one whose content was not shifted as far."""
    models, one = [trained("vitrel_vit_n8_none")], dict(sizes=((32, 32),), protocols=("scale",))
    [done] = evaluate_rows(models, sweep(**one, shifts=(0, 4)))
    before = noise.decoded
    list(evaluate_rows(models, sweep(**one, shifts=(4,)), [done]))
    assert noise.decoded == before
    if lacking == "ece":
        done.row["ece"] = math.nan
    elif lacking == "per_class":
        done = done._replace(per_class=[])
    list(evaluate_rows(models, sweep(**one, shifts=(4, 8) if lacking == "shifts" else (4,)), [done]))
    assert noise.decoded > before


def test_progress_adds_up(trained, noise, rows_of):
    shares = []
    rows_of([trained("vitrel_vit_n8_none")], sweep(), advance=lambda task, share: shares.append(share))
    assert len(shares) == 6 * 3 and sum(shares) == pytest.approx(6)


@pytest.mark.parametrize("how", ["value", "object"])
def test_a_model_that_forward_touches_is_found_out(trained, noise, how, rows_of):
    model = trained("vitrel_vit_n8_none")

    def touch(head, inputs):
        if how == "value":
            head.bias.data[0] += 1e-3
        else:
            head.bias = torch.nn.Parameter(head.bias.data.clone())

    model.model.head.register_forward_pre_hook(touch)
    [row, *_] = rows_of([model], sweep())
    assert row["unchanged"] is False
    assert (row["state_hash_before"] == row["state_hash_after"]) == (how == "object")


def test_memory_that_runs_out_halves_the_batch_and_is_recorded(trained, noise, rows_of):
    model = trained("vitrel_vit_n8_none")

    def fail(module, inputs):
        if len(inputs[0]) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    model.model.register_forward_pre_hook(fail)
    [row] = rows_of([model], sweep(sizes=((32, 32),), protocols=("scale",)))
    assert (row["batch_size"], row["oom"], row["n"]) == (2, 1, 12)


def collated(monkeypatch, noise, most, error):
    """Makes more than `most` images in one batch raise `error` where they are collated."""
    sizes = []

    def batch(self, indices):
        sizes.append(len(indices))
        if len(indices) > most:
            raise error
        return [self[index] for index in indices]

    monkeypatch.setattr(noise, "__getitems__", batch, raising=False)
    return sizes


LACKS = [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_while_images_are_loaded_halves_the_batch(trained, noise, monkeypatch, rows_of, workers, error):
    models, one = [trained(f"vitrel_vit_n8_{key}") for key in ("none", "table")], dict(sizes=((32, 32),), protocols=("scale",))
    alone = rows_of(models, sweep(**one))
    collated(monkeypatch, noise, 2, error)
    rows = rows_of(models, sweep(**one, workers=workers))
    assert [(row["batch_size"], row["oom"], row["n"]) for row in rows] == [(2, 1, 12), (2, 0, 12)]
    assert [row["top1"] for row in rows] == [row["top1"] for row in alone]
    assert [row["nll"] for row in rows] == pytest.approx([row["nll"] for row in alone], abs=1e-5)
    # other images may fit again
    rows = rows_of(models[:1], sweep(sizes=((48, 48),), protocols=("scale",), batch_size=4))
    assert [(row["batch_size"], row["oom"]) for row in rows] == [(2, 1)] * 2


def test_memory_for_images_that_are_kept_is_given_back_first(trained, noise, monkeypatch, rows_of):
    sizes = collated(monkeypatch, noise, 2, MemoryError())
    rows_of([trained(f"vitrel_vit_n8_{key}") for key in ("none", "table")], sweep(sizes=((32, 32),), protocols=("scale",)))
    assert sizes == [5] + [2] * 6 + [2] * 6  # the second model's are loaded again


@pytest.mark.parametrize("workers", [0, 1])
def test_one_image_that_does_not_fit_is_told(trained, noise, monkeypatch, rows_of, workers):
    collated(monkeypatch, noise, 0, MemoryError())
    with pytest.raises(MemoryError, match=r"image 1 of 12 of vitrel_vit_n8_none at 32x32 .*--workers"):
        rows_of([trained("vitrel_vit_n8_none")], sweep(workers=workers))


def test_a_loader_process_that_the_system_kills_halves_the_batch(trained, noise, monkeypatch, rows_of):
    def batch(self, indices):
        if len(indices) > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return [self[index] for index in indices]

    monkeypatch.setattr(noise, "__getitems__", batch, raising=False)
    [row] = rows_of([trained("vitrel_vit_n8_none")], sweep(sizes=((32, 32),), protocols=("scale",), workers=1))
    assert (row["batch_size"], row["n"]) == (2, 12) and row["oom"] >= 1


def test_memory_for_content_that_is_shifted_halves_the_batch(trained, noise, monkeypatch):
    shifted, one = measure.shift_content, dict(sizes=((32, 32),), protocols=("scale",), shifts=(3,))
    [alone] = evaluate_rows([trained("vitrel_vit_n8_none")], sweep(**one))

    def fail(pixels, shift):
        if len(pixels) > 2:
            raise MemoryError
        return shifted(pixels, shift)

    monkeypatch.setattr(measure, "shift_content", fail)
    [found] = evaluate_rows([trained("vitrel_vit_n8_none")], sweep(**one))
    assert found.translation == alone.translation


def test_attention_that_lacks_memory_for_its_images_is_left_empty(trained, noise, monkeypatch, rows_of):
    monkeypatch.setattr(images.Images, "first", lambda *_: (_ for _ in ()).throw(MemoryError))
    [row] = rows_of([trained("vitrel_vit_n8_none")], sweep(sizes=((32, 32),), protocols=("scale",), attention_n=2))
    assert math.isnan(row["attention_entropy"]) and row["n"] == 12


def test_what_stops_an_evaluation_names_model_and_size(trained, noise, rows_of):
    model = trained("vitrel_vit_n8_none")
    model.model.head.bias.data.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"vitrel_vit_n8_none at 32x32 \(scale\): the logits hold NaN"):
        rows_of([model], sweep())
    other = trained("vitrel_vit_n8_none", classes=("left", "right"))
    with pytest.raises(ValueError, match="trained on 2 classes, but noise has 3: it adds above"):
        rows_of([other], sweep())
