"""The suites of models: who takes part, gates that see what is wrong, rows for every outcome. Workers live in this process."""

import pytest
import torch

from helpers.workers import Here, by_contender
from tools.benchmark.engine import check
from tools.benchmark.model_cases import (
    CPU_TASKS,
    GPU_TASKS,
    HARD,
    QUICK_RESOLUTIONS,
    QUICK_TASKS,
    RESOLUTIONS,
    model_case,
    model_cases,
    resolution_case,
)
from tools.benchmark.models import MODELS, model_call, our_model, peer_model
from tools.benchmark.samples import read_rows

CPU = torch.device("cpu")
SWIN, SWIN_TRAINING, VIT, BOTH = (model_case(task, False, True) for task in QUICK_TASKS)


def call(args, **more):
    """What a worker of these arguments shows to a gate."""
    made = model_call(**args | more)
    return made.checked(made())


@pytest.mark.parametrize(("tasks", "gpu"), [(CPU_TASKS, False), (GPU_TASKS, True), (QUICK_TASKS, False), (QUICK_TASKS, True)])
def test_cases(tasks, gpu):
    """Names are unique, models are known, and every case has its yardstick first, ours, and a peer."""
    assert len({(task.name, task.mode) for task in tasks}) == len(tasks)
    for task in tasks:
        found = model_case(task, gpu).contenders
        assert len({one.name for one in found}) == len(found)
        for model in task.models:
            own = [one for one in found if one.args["model"] == model]
            assert (own[0].args["library"], own[0].args["how"]) == ("timm", "eager")
            assert own[0].env == {"TIMM_FUSED_ATTN": "1"} and MODELS[model].ours and MODELS[model].small in ("", *MODELS)
            assert {"ours", "peer"} <= {one.of for one in own}
            assert any(one.args["how"] == "optimized" for one in own) is (not gpu and task.mode == "inference")
            assert all((one.before is not None) is (one.of == "ours") and one.exact is (one.of != "peer") for one in own)
    quick = model_case(tasks[0], gpu, quick=True).contenders
    assert quick and not any(one.args["how"].startswith("compiled") for one in quick)
    assert [case.name for case in model_cases(gpu, False)] == [task.name for task in (GPU_TASKS if gpu else CPU_TASKS)]


def test_swin_meets_every_peer_at_its_best():
    names = {one.name: one for one in model_case(CPU_TASKS[0], gpu=False).contenders}
    for name in ("timm, compiled, max-autotune", "torchvision, compiled", "transformers, compiled"):
        assert names[name].of == "peer"
    assert names["timm, compiled, fused attention"].env == {"TIMM_FUSED_ATTN": "2"}
    assert names["timm, compiled"].env == {"TIMM_FUSED_ATTN": "1"}
    assert names["timm, optimized, fused attention"].of == "both"
    gate, name = names["ours, compiled"].before
    assert (gate.name, name, gate.kind, gate.plan) == ("Swin nano, 200x232", "ours, compiled", "gate", None)
    assert (HARD[0] // 4) % 7 and (HARD[1] // 4) % 7


@pytest.mark.parametrize("model", [name for name in MODELS if "nano" in name])
def test_our_model_is_the_peers(model):
    """With tables of standard deviation 0.5 that count."""
    size = (112, 112)
    ours, theirs = our_model("timm", model, size).eval(), peer_model("timm", model, size).eval()
    image = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = theirs(image)
        torch.testing.assert_close(ours(image), expected, atol=1e-5, rtol=0)
        tables = [p for name, p in ours.named_parameters() if "bias_table" in name]
        assert all(abs(p.std() - 0.5) < 0.1 for p in tables) and bool(tables) is ("Swin" in model or "table" in model)
        for table in tables:
            table.copy_(table.roll(1, 0))
        if tables:
            assert (ours(image) - expected).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "transformers"])
def test_weights_of_other_libraries(library):
    if library == "transformers":
        pytest.importorskip(library)
    theirs = model_call(library, "Swin-T", "eager", (224, 224), 1)()["output"]
    ours = model_call(f"ours/{library}", "Swin-T", "eager", (224, 224), 1)()["output"]
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match=f"{library} has no ViT-S rope"):
        peer_model(library, "ViT-S rope", (224, 224))


def test_definition_is_computed_in_parts(monkeypatch):
    """The loss and gradients of three images are those of one batch."""
    truth = SWIN_TRAINING.contenders[0].truth | dict(batch=3)
    expected = call(truth, library="ours", how="eager")
    monkeypatch.setattr("tools.benchmark.models._PART", 2 * 112 * 112)
    found = call(truth)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-7)


@pytest.mark.slow
def test_gate_of_half_precision():
    """Gradients that cancel may be as far off as the peer's, but not absent; the loss has to be there."""
    case = model_case(QUICK_TASKS[1]._replace(dtype="amp"), False, True)
    timm, _, ours, *_ = case.contenders
    truth = call(timm.truth)
    first = check(call(timm.args), truth, case, timm.exact)
    found = call(ours.args)

    def text(**changes):
        return check(found | changes, truth, case, True, first.errors).text

    assert first.text == text() == ""
    assert "norm.bias 1.0e+00" in text(**{"norm.bias": 0 * found["norm.bias"]})
    assert text(loss=found["loss"] * 1.01).startswith("error of loss")


def test_gate_of_training():
    """Every gradient of timm's model, under our names; one table that is wrong does not pass."""
    timm, _, ours, *_ = SWIN_TRAINING.contenders
    truth, theirs = call(timm.truth), call(timm.args)
    assert ours.truth == timm.truth and set(theirs) == set(truth)
    yardstick = check(theirs, truth, SWIN_TRAINING, timm.exact)
    found = call(ours.args)

    def verdict(of, exact=True):
        return check(of, truth, SWIN_TRAINING, exact, yardstick.errors)

    assert yardstick.text == "" and verdict(found).text == "" and "loss" in verdict(found).worst
    assert len(verdict(found).worst) <= 5
    name = "layers.1.blocks.1.position.relative_position_bias_table"
    off = found | {name: found[name] * (1 + 2e-5)}
    assert verdict(off).text.startswith(f"error of {name} 2.0e-05") and verdict(off, exact=False).text == ""
    assert name in verdict({n: x for n, x in found.items() if n != name}, exact=False).text


def test_every_contender_ends_as_a_row(engine):
    """Gates come first, at a hard size too, and rows say what was measured."""
    engine.measure(SWIN)
    timed = by_contender(engine, "time", SWIN)
    assert set(timed) == {one.name for one in SWIN.contenders}
    row = timed["ours, optimized"]
    assert (row["of"], row["model"], row["how"]) == ("ours", "Swin nano", "optimized") and len(row["rounds"]) == 2
    assert (row["size"], row["batch"], row["dtype"]) == ([112, 112], 2, "float32") and row["errors"]["output"] < 2e-6
    gates = [row for row in engine.samples.rows if row["kind"] == "gate"]
    assert {row["contender"] for row in gates} == {"ours, eager", "ours, optimized"}
    assert all(row["case"] == "Swin nano, 200x232" and row["errors"]["output"] < 2e-6 for row in gates)
    before = len(Here.started)
    engine.measure(SWIN)  # nothing is done again
    assert len(Here.started) == before


def test_resolutions(engine):
    """A row for every contender and size, ours right at each of them; a new size costs nothing where nothing is compiled."""
    case = resolution_case("Swin nano", gpu=False, quick=True)
    engine.measure(case)
    rows = [row for row in read_rows(engine.samples.path) if row["kind"] == "time"]
    assert len(rows) == 3 * len(QUICK_RESOLUTIONS) and {tuple(row["size"]) for row in rows} == set(QUICK_RESOLUTIONS)
    assert all(row["errors"] for row in rows if row["of"] == "ours") and {row["new_compiles"] for row in rows} == {0}
    assert [row["mode"] for row in rows if row["of"] == "peer" and row["errors"]] == ["inference, 112x112"]
    Here.wrong = {"ours, optimized": 1.001}
    engine.measure(resolution_case("ViT nano table", gpu=False, quick=True))
    rows = [row for row in read_rows(engine.samples.path) if "ViT nano table" in row["case"]]
    assert [row["mode"] for row in rows if row["kind"] == "wrong"] == ["inference, 112x112"]
    assert {row["contender"] for row in rows if row["kind"] == "time"} == {"timm", "ours"}


def test_who_meets_which_resolution():
    full = resolution_case("Swin-T", gpu=False)
    peer = next(one for one in full.contenders if one.name == "timm, compiled")
    assert len(full.visits) == 8 > len(full.keys(peer)) > 2 and any(h != w for h, w in RESOLUTIONS)
    assert all(not one.skips for one in resolution_case("Swin-T", gpu=True).contenders)
