"""The suite of models: who takes part, gates that see what is wrong, rows for every outcome. Workers live in this process."""

import re
import time

import pytest
import torch

from tools.benchmark import model_suite, resolutions
from tools.benchmark.model_cases import (
    CPU_MODEL_CASES,
    GPU_MODEL_CASES,
    QUICK_MODEL_CASES,
    ModelContender,
    model_contenders,
)
from tools.benchmark.model_gates import HARD, ModelGate, in_our_names
from tools.benchmark.models import MODELS, model_call, our_model, peer_model
from tools.benchmark.processes import WorkerFailed, take_turns
from tools.benchmark.samples import Samples, machine, read_rows, stamp
from tools.benchmark.timing import Repeats

CPU = torch.device("cpu")
SWIN, SWIN_TRAINING, VIT, BOTH = QUICK_MODEL_CASES


class Here:
    """A worker without a process. wrong: {contender's name: what its output is multiplied with}; failing: {name: error}."""

    wrong, failing, started = {}, {}, []

    def __init__(self, one, case, device, threads, image=None):
        self.one, self.args, self.size = one, one.args(case) | dict(image=image), image or case.size

    def start(self):
        Here.started.append((self.one.name, self.one.how, self.size))
        if self.one.name in self.failing:
            raise WorkerFailed(self.failing[self.one.name])
        self.call = model_call(**self.args)
        self.kept = self.call()
        return {"first_call_s": 0.5, "before_bytes": 10, "compiles": 0}

    def set(self, size):
        self.call.set(size)

    def outcome(self):
        return {name: value * self.wrong.get(self.one.name, 1.0) for name, value in self.kept.items()}

    def run(self, calls):
        self.kept = self.call()
        return [2.0] * calls

    def memory(self):
        return {"peak_bytes": 100, "call_bytes": 50, "reserved_bytes": None}

    def compiles(self):
        return 1 if self.one.how == "compiled" else 0

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Few contenders, in this process."""
    for name in ("wrong", "failing"):
        monkeypatch.setattr(Here, name, {})
    monkeypatch.setattr(Here, "started", [])
    monkeypatch.setattr(model_suite, "model_worker", Here)
    monkeypatch.setattr(resolutions, "model_worker", Here)
    monkeypatch.setattr("tools.benchmark.model_gates.model_worker", Here)
    monkeypatch.setitem(model_suite._PLANS, "quick", Repeats(1, 3, 0.0, 2))
    found = stamp(machine(CPU)) | {"code": "now"}
    samples = Samples(tmp_path / "samples.jsonl", found, {"commit": "abc"})
    samples.add("machine", **(machine(CPU) | found), how="in this process")
    return model_suite.ModelSuite(samples, CPU, quick=True)


def by_contender(suite, kind, case):
    rows = [row for row in read_rows(suite.samples.path) if row["kind"] == kind]
    return {row["contender"]: row for row in rows if (row["case"], row["mode"]) == (case.name, case.mode)}


@pytest.mark.parametrize("cases", [CPU_MODEL_CASES, GPU_MODEL_CASES, QUICK_MODEL_CASES])
def test_cases(cases):
    """Names are unique, models are known, and every case has its yardstick first, ours, and a peer."""
    assert len({(case.name, case.mode) for case in cases}) == len(cases)
    for case in cases:
        for gpu in (False, True):
            found = model_contenders(case, gpu)
            assert len({one.name for one in found}) == len(found)
            for model in case.models:
                own = [one for one in found if one.model == model]
                assert MODELS[model].ours and (own[0].library, own[0].how, own[0].fused) == ("timm", "eager", False)
                assert {"ours", "peer"} <= {one.of for one in own}
                assert any(one.how == "optimized" for one in own) is not gpu
                assert MODELS[model].small in ("", *MODELS)
    quick = model_contenders(cases[0], gpu=False, quick=True)
    assert quick and not any(one.how.startswith("compiled") for one in quick)


def test_swin_meets_every_peer_at_its_best():
    names = {one.name: one for one in model_contenders(CPU_MODEL_CASES[0], gpu=False)}
    for name in ("timm, compiled, max-autotune", "torchvision, compiled", "transformers, compiled"):
        assert names[name].of == "peer"
    assert names["timm, compiled, fused attention"].env == {"TIMM_FUSED_ATTN": "2"}
    assert names["timm, compiled"].env == {"TIMM_FUSED_ATTN": "1"}
    assert names["timm, optimized, fused attention"].of == "both"


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


@pytest.mark.parametrize("library", ["torchvision", "transformers"])
def test_weights_of_other_libraries(library):
    if library == "transformers":
        pytest.importorskip(library)
    theirs = model_call(library, "Swin-T", "eager", (224, 224), 1)()["output"]
    ours = model_call(f"ours/{library}", "Swin-T", "eager", (224, 224), 1)()["output"]
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match=f"{library} has no ViT-S rope"):
        peer_model(library, "ViT-S rope", (224, 224))


def truth(case, weights="timm", **more):
    return model_call(f"ours/{weights}", case.models[0], "reference", case.size, case.batch, "float64", case.mode, **more)()


def test_definition_is_computed_in_parts(monkeypatch):
    """The loss and gradients of three images are those of one batch."""
    case = SWIN_TRAINING._replace(batch=3)
    expected = model_call("ours", "Swin nano", "eager", case.size, 3, "float64", "training")()
    monkeypatch.setattr("tools.benchmark.models._PART", 2 * 112 * 112)
    found = truth(case)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-7)


def test_gate_of_half_precision():
    """Gradients that cancel may be as far off as the peer's, but not absent; the loss has to be there."""
    case = SWIN_TRAINING._replace(dtype="amp")
    gate = ModelGate(truth(case), "amp")
    timm, _, ours, *_ = model_contenders(case, gpu=False, quick=True)
    assert gate.check(in_our_names(timm, case, model_call(**timm.args(case))()), False)[0] == ""
    found = model_call(**ours.args(case))()
    assert gate.check(found, True)[0] == ""
    assert "norm.bias 1.0e+00" in gate.check(found | {"norm.bias": 0 * found["norm.bias"]}, True)[0]
    assert gate.check(found | {"loss": found["loss"] * 1.01}, True)[0].startswith("error of loss")


def test_gate_of_training():
    """Every gradient of timm's model, under our names; one table that is wrong does not pass."""
    gate = ModelGate(truth(SWIN_TRAINING), "float32")
    timm, _, ours, *_ = model_contenders(SWIN_TRAINING, gpu=False, quick=True)
    theirs = in_our_names(timm, SWIN_TRAINING, model_call(**timm.args(SWIN_TRAINING))())
    assert set(theirs) == set(gate.truth) and gate.check(theirs, False)[0] == "" and gate.yardstick is not None
    found = model_call(**ours.args(SWIN_TRAINING))()
    text, errors = gate.check(found, True)
    assert text == "" and "loss" in errors and len(errors) <= 5
    name = "layers.1.blocks.1.position.relative_position_bias_table"
    assert gate.check(found | {name: found[name] * (1 + 2e-5)}, True)[0].startswith(f"error of {name} 2.0e-05")
    assert gate.check(found | {name: found[name] * (1 + 2e-5)}, False)[0] == ""  # a peer may be less exact
    assert name in gate.check({n: x for n, x in found.items() if n != name}, False)[0]


def test_every_contender_ends_as_a_row(suite):
    """Gates come first, at a hard size too, and rows say what was measured."""
    suite.measure(SWIN)
    timed = by_contender(suite, "time", SWIN)
    assert set(timed) == {one.name for one in model_contenders(SWIN, False, True)}
    row = timed["ours, optimized"]
    assert len(row["rounds"]) == 3 and row["rounds"][0] == [2.0] and row["of"] == "ours" and row["commit"] == "abc"
    assert (row["size"], row["batch"], row["dtype"]) == ([112, 112], 2, "float32")
    assert (row["peak_bytes"], row["call_bytes"], row["first_call_s"], row["compiles"]) == (100, 50, 0.5, 0)
    assert set(by_contender(suite, "check", SWIN)) == set(timed)
    gates = [row for row in suite.samples.rows if row["kind"] == "gate"]
    assert {row["contender"] for row in gates} == {"ours, eager", "ours, optimized"}
    assert all(row["case"] == "Swin nano, 200x232" and row["errors"]["output"] < 2e-6 for row in gates)
    before = len(Here.started)
    suite.measure(SWIN)  # nothing is done again
    assert len(Here.started) == before
    assert (HARD[0] // 4) % 7 and (HARD[1] // 4) % 7


def test_what_is_wrong_is_not_timed(suite):
    Here.wrong = {"ours": 1 + 1e-5, "timm, fused attention": 1.01}
    suite.measure(SWIN)
    wrong = by_contender(suite, "wrong", SWIN)
    assert set(wrong) == {"ours", "timm, fused attention"} and re.match(r"error of output 1\.0e-05", wrong["ours"]["text"])
    assert not set(by_contender(suite, "time", SWIN)) & set(wrong) and "timm" in by_contender(suite, "time", SWIN)


def test_what_is_wrong_at_a_hard_size_is_not_timed(suite):
    Here.wrong = {"ours, optimized": 1.001}
    suite.measure(VIT)
    text = by_contender(suite, "wrong", VIT)["ours, optimized"]["text"]
    assert text.startswith("at the gate: error of output 1.0e-03")
    assert "ours" in by_contender(suite, "time", VIT)


def test_failures_are_rows(suite):
    Here.failing = {"timm, fused attention": "ModuleNotFoundError: No module named 'timm'", "ours": "status -9"}
    suite.measure(SWIN)
    failed = by_contender(suite, "failed", SWIN)
    assert failed["timm, fused attention"]["text"].startswith("not installed: ModuleNotFoundError")
    assert failed["ours"]["text"] == "status -9"
    assert {"timm", "ours, optimized"} <= set(by_contender(suite, "time", SWIN))
    Here.failing = {"the definition": "MemoryError"}
    suite.measure(VIT)
    texts = {row["text"] for row in by_contender(suite, "failed", VIT).values()}
    assert "the definition of ViT nano table, weights of timm failed: MemoryError" in texts
    assert not by_contender(suite, "time", VIT)


def test_models_against_each_other(suite, tmp_path, capsys):
    """And the table of all that was measured."""
    assert model_suite.run_models(suite.samples, CPU, time.time() + 600, True, "against", tmp_path)
    assert {name.partition(":")[0] for name in by_contender(suite, "time", BOTH)} == set(BOTH.models)
    text = (tmp_path / "table.md").read_text()
    assert "### Swin nano against ViT nano absolute, 112, batch 2, fp32, inference" in text and "commit" in text
    assert not model_suite.run_models(suite.samples, CPU, time.time() - 1, True, "", tmp_path)


def test_take_turns():
    """One that fails on its way leaves the others their rounds."""

    class Fake:
        def __init__(self, ms, last=99):
            self.ms, self.left = ms, last

        def run(self, calls):
            self.left -= 1
            if self.left < 0:
                raise WorkerFailed("gone")
            return [self.ms] * calls

    rounds, failed = take_turns({"slow": Fake(600.0), "fast": Fake(100.0), "bad": Fake(1.0, 2)}, Repeats(2, 3, 0.5, 4))
    assert rounds == {"slow": [[600.0]] * 3, "fast": [[100.0] * 4] * 3} and str(failed["bad"]) == "gone"


def test_resolutions(suite, tmp_path):
    """A row for every contender and size, ours right at each of them; then nothing is done again."""
    sweep = resolutions.ResolutionSweep(suite.samples, CPU, quick=True)
    sweep.plan = Repeats(1, 2, 0.0, 1)
    sweep.measure("Swin nano")
    rows = [row for row in read_rows(suite.samples.path) if row["kind"] == "time"]
    assert len(rows) == 3 * len(sweep.sizes) and {tuple(row["size"]) for row in rows} == set(sweep.sizes)
    checks = [row for row in suite.samples.rows if row["kind"] == "check"]
    assert len([row for row in checks if row["contender"] != "timm"]) == 2 * len(sweep.sizes)
    assert len([row for row in checks if row["contender"] == "timm"]) == 1
    sweep.measure("Swin nano")
    assert len([row for row in read_rows(suite.samples.path) if row["kind"] == "time"]) == len(rows)
    resolutions.write_resolutions(suite.samples.rows, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| 96x144 |" in text and (tmp_path / "swin_nano.png").stat().st_size > 10_000


def test_resolutions_drop_what_is_wrong(suite):
    Here.wrong = {"ours, optimized": 1.001}
    sweep = resolutions.ResolutionSweep(suite.samples, CPU, quick=True)
    sweep.plan = Repeats(1, 2, 0.0, 1)
    sweep.measure("ViT nano table")
    rows = suite.samples.rows
    assert [row["mode"] for row in rows if row["kind"] == "wrong"] == ["inference, 112x112"]
    assert {row["contender"] for row in rows if row["kind"] == "time"} == {"timm", "ours"}
    full = resolutions.ResolutionSweep(suite.samples, CPU)
    peer = ModelContender("timm, compiled", "peer", "Swin-T", "timm", "compiled", True)
    assert len(full.sizes) == 8 > len(full.sizes_of(peer)) > 2 and any(h != w for h, w in full.sizes)
