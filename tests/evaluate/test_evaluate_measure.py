"""The trials of a sweep, and what their rows say: accuracy, classes, translation, attention, memory, the model as it was."""

import math
from functools import partial

import pytest
import timm
import torch
from torch import nn

from vitrel.common.resources import out_of_memory
from vitrel.common.sizes import format_size
from vitrel.evaluate import measure, prepare
from vitrel.evaluate.predict import Runner, peak_mb, reset_peak, translate
from vitrel.evaluate.results.table import columns_of
from vitrel.evaluate.run import evaluate_rows
from vitrel.evaluate.sweep import Sweep
from vitrel.evaluate.tasks.classification import TASK
from vitrel.evaluate.trials import trials_of
from vitrel.inspect.attention import attention_statistics_of, position_shares

pytestmark = pytest.mark.usefixtures("brief_evaluations")
SIZES = ((32, 32), (64, 64), (32, 48))


def sweep(**given):
    return Sweep(**{"data": "noise", "sizes": SIZES, "batch_size": 5, "device": "cpu", "attention_n": 0} | given)


ONE = dict(sizes=((32, 32),), protocols=("scale",))


def test_plan_starts_at_the_training_sizes_and_shares_images_between_models(trained):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none", (64, 64))]
    trials = [
        (format_size(t.size), t.protocol, t.trained.name[14:], t.policy) for t in trials_of(models, sweep(sizes=((32, 48),)))
    ]
    assert trials[:4] == [
        ("32x32", "scale", "table", "none"),
        ("32x32", "canvas", "table", "none"),
        ("64x64", "scale", "none", "none"),
        ("64x64", "canvas", "none", "none"),
    ]
    assert [trial[2:] for trial in trials[4:8]] == [("table", p) for p in models[0].model.policies] + [("none", "none")]
    assert len(trials) == 12
    with pytest.raises(ValueError, match="no model has the policy 'nearest'; the policies of these models are: bicubic, c"):
        trials_of(models, sweep(policies=("nearest",)))
    with pytest.raises(ValueError, match="these models are: none"):
        trials_of(models[1:], sweep(policies=("clip",)))


def test_rows_say_what_was_done_to_the_model(trained, noise, rows_of):
    models = [trained(f"vitrel_vit_n8_{key}") for key in ("absolute", "table")]
    rows = rows_of(models, sweep())
    assert all(set(row) == set(columns_of("classification")) for row in rows)
    found = {(row["encoding"], row["img_size"], row["policy"], row["protocol"]): row for row in rows}
    assert len(found) == len(rows) == 2 * (3 + 1 + 2 * 3)
    big = found["absolute", "64x64", "bicubic", "canvas"]
    assert (big["resampled"], big["tokens"]) == ("absolute bicubic", 64)
    assert big["resampled_values"] == models[0].model.resampled((64, 64))["absolute bicubic"] > 0
    clip = found["table", "64x64", "clip", "scale"]
    assert (clip["resampled"], clip["resampled_values"]) == ("table clip", 0)
    # 7x7 offsets trained of 15x15
    assert clip["unseen"] == clip["saturated"] == pytest.approx(1 - 49 / 225, abs=1e-4)
    assert found["table", "64x64", "bicubic", "scale"]["saturated"] == 0
    assert found["table", "64x64", "geometric", "scale"]["resampled_values"] == 4 * 3 * 49
    assert found["table", "32x32", "none", "scale"]["resampled"] == "nothing"
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
    larger = [f"{first}+{second}" for first in ("geometric", "clip", "bicubic") for second in ("keep", "renormalize")]
    assert [*found] == [("32x32", "none"), *(("64x64", p) for p in larger), ("24x24", "keep"), ("24x24", "renormalize")]
    assert len({row["nll"] for row in rows}) == len(rows)  # each combination was another model
    assert found["64x64", "clip+keep"]["resampled"] == "table clip"
    assert found["64x64", "bicubic+renormalize"]["resampled"] == "table bicubic + cpb renormalize"
    assert found["24x24", "renormalize"]["resampled"] == "cpb renormalize"
    assert all(row["unchanged"] for row in rows)
    assert {part.policy for part in parts} == {"geometric", "keep"}  # as they were


def test_accuracy_is_that_of_the_plain_model(trained, noise, rows_of):
    model = trained("vitrel_vit_n8_rope_mixed")
    [row] = rows_of([model], sweep(sizes=((32, 32),), protocols=("scale",)))
    with torch.no_grad():
        logits = model.model(torch.stack([noise((32, 32))[i][0] for i in range(12)]))
    labels = torch.arange(12) % 3
    assert row["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item(), abs=1e-4)
    assert row["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-5)


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


def test_memory_for_content_that_is_translated_halves_the_batch(trained, noise, monkeypatch):
    whole, one = measure.translate, dict(sizes=((32, 32),), protocols=("scale",), translations=(3,))
    [alone] = evaluate_rows([trained("vitrel_vit_n8_none")], sweep(**one))

    def fail(pixels, by):
        if len(pixels) > 2:
            raise MemoryError
        return whole(pixels, by)

    monkeypatch.setattr(measure, "translate", fail)
    [found] = evaluate_rows([trained("vitrel_vit_n8_none")], sweep(**one))
    assert found.translation == alone.translation


def test_attention_that_lacks_memory_for_its_images_is_left_empty(trained, noise, monkeypatch, rows_of):

    def lacking(*_):
        raise MemoryError
        yield

    monkeypatch.setattr(prepare.Images, "first", lacking)
    [row] = rows_of([trained("vitrel_vit_n8_none")], sweep(sizes=((32, 32),), protocols=("scale",), attention_n=2))
    assert math.isnan(row["attention_entropy"]) and row["n"] == 12


def test_what_stops_an_evaluation_names_model_and_size(trained, noise, rows_of):
    model = trained("vitrel_vit_n8_none")
    model.model.head.bias.data.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"vitrel_vit_n8_none at 32x32 \(scale\): the logits hold NaN"):
        rows_of([model], sweep())
    other = trained("vitrel_vit_n8_none", classes=("left", "right"))
    with pytest.raises(ValueError, match=r"trained on 2 classes .* lack 1 of the 3 classes of noise: above"):
        rows_of([other], sweep())


def test_content_is_translated_down_and_right_and_its_edges_repeated():
    image = torch.arange(12.0).view(1, 1, 3, 4)
    translated = translate(image, 2)[0, 0]
    assert translated.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1]]
    assert translate(image, 1)[0, 0, 1].tolist() == [0, 0, 1, 2]
    assert torch.equal(translate(image, 0), image)


def test_lines_of_translations_are_those_of_a_plain_model_on_translated_images(trained, noise):
    model = trained("vitrel_vit_n8_rope_mixed")
    done = list(evaluate_rows([model], sweep(sizes=((32, 32), (48, 48)), policies=("keep",), translations=(0, 3))))
    assert [len(one.translation) for one in done] == [2, 0, 0, 0]  # at the training size, in the first protocol
    pixels = torch.stack([noise((32, 32))[i][0] for i in range(12)])
    for line, by in zip(done[0].translation, (0, 3), strict=True):
        moved = torch.nn.functional.pad(pixels, (by, 0, by, 0), mode="replicate")[..., :32, :32]
        with torch.no_grad():
            hits = (model.model(moved).argmax(1) == torch.arange(12) % 3).sum().item()
        assert line["top1"] == pytest.approx(100 * hits / 12, abs=1e-3) and (line["translation"], line["n"]) == (by, 12)
    assert done[0].translation[0]["top1"] == done[0].row["top1"]


def test_classes_add_up_to_the_row(trained, noise):
    model = trained("vitrel_vit_n8_rope_mixed")
    [one] = evaluate_rows([model], sweep(**ONE, n=11))
    with torch.no_grad():
        guess = model.model(torch.stack([noise((32, 32))[i][0] for i in range(11)])).argmax(1)
    hits = [sum(int(guess[i] == label) for i in range(11) if i % 3 == label) for label in range(3)]
    assert one.predicted.arrays["predicted"].tolist() == guess.tolist()
    assert one.predicted.images.classes == ["left", "right", "above"]
    assert [counts.tolist() for counts in TASK.by_class(one.predicted)] == [[4, 4, 3], hits]
    assert one.row["top1"] == pytest.approx(100 * sum(hits) / 11, abs=1e-3)


def test_every_crop_is_evaluated_and_refers_to_its_own_training_size(trained, noise):
    model = trained("vitrel_vit_n8_none", crop_pct=0.8)
    requested = [(trial.size, trial.crop_pct) for trial in trials_of([model], sweep(sizes=((48, 48),), protocols=("scale",)))]
    assert requested == [((32, 32), 0.8), ((48, 48), 0.8)]  # the model's own
    rows = [one.row for one in evaluate_rows([model], sweep(sizes=((48, 48),), crop_pct=(1, 0.5)))]
    assert [row["crop_pct"] for row in rows] == [1.0, 0.5] * 4
    assert {(requested["crop_pct"], requested["size"]) for requested in noise.requested} == {
        (c, (s, s)) for c in (1.0, 0.5) for s in (32, 48)
    }
    assert all(row["retention"] == 1 for row in rows[:4])


def test_attention_is_that_of_the_first_images(trained, noise):
    model = trained("vitrel_swin_n", (32, 32))
    [one] = evaluate_rows([model], sweep(**ONE, attention_n=3))
    images = torch.stack([noise((32, 32))[i][0] for i in range(3)])
    found = attention_statistics_of(model.model, images)
    for name, value in found.items():
        assert one.row[name] == pytest.approx(value, rel=1e-3), name
    assert one.row["attention_span"] == pytest.approx(math.exp(one.row["attention_entropy"]), rel=1e-3)
    assert one.row["position_share"] == pytest.approx(max(position_shares(model.model, images[:1]).values()), abs=1e-4)
    [none] = evaluate_rows([model], sweep(**ONE))
    assert math.isnan(none.row["position_share"])
    assert math.isnan(none.row["attention_entropy"]) and none.row["attention_n"] == 0


def test_a_model_whose_attention_cannot_be_seen_leaves_it_empty(trained, noise):
    model = trained("vitrel_vit_n8_none", model=timm.create_model("resnet10t", num_classes=3).eval())
    [one] = evaluate_rows([model], sweep(**ONE, attention_n=2))
    assert math.isnan(one.row["attention_distance"]) and one.row["gflops"] > 0
    assert set(one.row) == set(columns_of("classification"))
    assert (one.row["window"], one.row["backend"], one.row["resampled"]) == ("", "", "nothing")


@pytest.mark.slow
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


CPU = torch.device("cpu")


class Limited(nn.Module):
    """Fails as if memory ran out above `limit` images."""

    def __init__(self, limit: int, error: BaseException) -> None:
        super().__init__()
        self.limit, self.error, self.batches = limit, error, []

    def forward(self, pixels):
        self.batches.append(len(pixels))
        if len(pixels) > self.limit:
            raise self.error
        return pixels.flatten(1)[:, :3]


ERRORS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_runner_halves_the_batch_until_it_fits_and_keeps_it(error):
    model = Limited(5, error)
    runner = Runner(model, CPU, batch_size=16)
    pixels = torch.arange(40 * 3.0).view(40, 3, 1, 1)
    assert torch.equal(runner(pixels), pixels.flatten(1))
    assert (runner.batch_size, runner.oom, runner.seen) == (4, 2, 40)
    runner(pixels[:8])
    assert runner.oom == 2 and model.batches[-2:] == [4, 4]
    assert runner.seconds > 0


def test_runner_names_the_way_out_when_one_image_does_not_fit():
    with pytest.raises(MemoryError, match="one image does not fit in memory: use a smaller size"):
        Runner(Limited(0, MemoryError()), CPU, batch_size=8)(torch.zeros(8, 3, 1, 1))


def test_runner_passes_other_errors_on():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Runner(Limited(0, RuntimeError("mat1 and mat2 shapes cannot be multiplied")), CPU, batch_size=8)(
            torch.zeros(8, 3, 1, 1)
        )


def test_a_real_failed_allocation_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.float32)
    assert out_of_memory(caught.value)
    assert not out_of_memory(ValueError("out of memory"))


def test_peak_memory_sees_what_was_allocated():
    reset_peak(CPU)
    before, kind = peak_mb(CPU)
    held = torch.ones(64 * 2**18)
    after, _ = peak_mb(CPU)
    assert after >= before and kind.startswith("process resident")
    if kind == "process resident":
        assert after - before > 32 < held.numel() / 2**18
