"""tools/benchmark/kernels.py: what is wrong gets no time, what fails is a row, what is done stays done, ratios are fair."""

import collections
import contextlib
import json
import sys
import time
import types
from statistics import median

import pytest
import torch

from tools.benchmark import contenders as field
from tools.benchmark import kernels as kernels_tool
from tools.benchmark import runner as running
from tools.benchmark.cases import CASES, QUICK, Problem, family, hard_case, make_problem
from tools.benchmark.contenders import Contender, contenders, forced_warps, global_softmax, window_flex, window_softmax
from tools.benchmark.gates import Gate, outcome
from tools.benchmark.kernel_table import advice, milliseconds, ratio, write_table
from tools.benchmark.runner import DeviceLost, Measurement
from tools.benchmark.samples import Samples, machine, read_rows, stamp
from tools.benchmark.supervise import LOST, supervise
from tools.benchmark.timing import Repeats, Stopwatch, peak_bytes, warm_up
from vitrel.grid import Grid

CPU = torch.device("cpu")
WINDOWS, TABLE, DECOMPOSED = QUICK
BRIEF = Repeats(1, 3, 0.0, 1)
SDPA = contenders(TABLE, gpu=False)[0]


def gate(case, dtype=torch.float32, training=True):
    return Gate(make_problem(case, dtype, CPU, seed=1), training)


def small(case):
    """The hard case, smaller."""
    hard = hard_case(case)
    return hard if case.window else hard._replace(grid=Grid(3, 5, case.grid.prefix))


def measurement(folder, plan=BRIEF, until=None, code="now"):
    samples = Samples(folder / "samples.jsonl", stamp(machine(CPU)) | {"code": code})
    return Measurement(samples, CPU, plan, time.time() + 600 if until is None else until, folder / "running.json")


def by_contender(rows, kind):
    return {row["contender"]: row for row in rows if row["kind"] == kind}


def changed(**changes):
    """SDPA, with the tables of its terms changed."""

    def run(case, inputs, terms, fixed):
        tables = tuple(table._replace(**{k: f(getattr(table, k)) for k, f in changes.items()}) for table in terms.tables)
        return SDPA.function(case, inputs, terms._replace(tables=tables), fixed)

    return Contender("ours", run, "ours")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_wrong_table_does_not_pass(case, dtype):
    """By one class, or one that is not there."""
    which = "query" if case is DECOMPOSED else "bias"
    dim = -2 if case is DECOMPOSED else -1
    for training in (False, True):
        held = gate(small(case), dtype, training)
        assert held.check(SDPA._replace(kind="ours")).text == ""
        shifted = held.check(changed(**{which: lambda x: x.roll(1, dim)}))
        assert "error of output" in shifted.text and shifted.errors["output"] > 0.05
        assert "error of output" in held.check(changed(**{which: lambda x: 0 * x})).text


def test_a_wrong_gradient_does_not_pass():
    held = gate(small(TABLE))
    text = held.check(changed(bias=lambda x: x.detach() + 0.5 * (x - x.detach()))).text
    assert text.startswith("error of bias_hw") and "output" not in text
    assert "bias_hw inf" in held.check(changed(bias=lambda x: x.detach())).text


def test_nan_and_small_errors_do_not_pass():
    held = gate(small(TABLE), training=False)

    def worse(by):
        return Contender("ours", lambda *of: SDPA.function(*of) * (1 + by), "ours")

    assert "nan" in held.check(worse(float("nan"))).text
    assert held.check(worse(1e-5)).text and not held.check(worse(0.0)).text
    assert not held.check(worse(1e-5)._replace(kind="peer")).text  # may be less exact
    assert held.check(worse(1e-3)._replace(kind="peer")).text

    def elsewhere(*of):  # one number of one token
        out = SDPA.function(*of)
        out[1, 2, 3, 4] += 1e-3
        return out

    assert "largest of output" in held.check(Contender("softmax", elsewhere, "peer")).text


@pytest.mark.parametrize("encoding", ["table", "rope"])
@pytest.mark.parametrize("grid", [Grid(6, 9), Grid(7, 5), Grid(2, 8), Grid(2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_peers_in_windows_are_right(encoding, grid):
    case = WINDOWS._replace(encoding=encoding, grid=grid, batch=2)
    for shift in (WINDOWS.shift, (0, 0)):
        peer = Contender("softmax", window_softmax, "ours")
        assert gate(case._replace(shift=shift)).check(peer).text == ""
    assert gate(case, training=False).check(Contender("flex", window_flex, "ours")).text == ""


@pytest.mark.parametrize("encoding", ["table", "rope", "factorised"])
def test_global_peer_is_right(encoding):
    assert gate(TABLE._replace(encoding=encoding)).check(Contender("softmax", global_softmax, "ours")).text == ""


def test_cases():
    """Names are unique, floors can cut their windows, gates are hard, and problems have the tables the terms need."""
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        hard = hard_case(case)
        assert family(hard) == family(case) and hard.grid.h != hard.grid.w
        if case.window:
            assert case.tokens % (case.window[0] * case.window[1]) == 0
            assert all(n % m and n > m and s for n, m, s in zip(hard.grid[:2], hard.window, hard.shift, strict=True))
    problem = make_problem(TABLE, torch.float16, CPU)
    assert problem.leaves["bias_hw"].dtype == torch.float32 and abs(problem.leaves["bias_hw"].std() - 0.5) < 0.1
    assert isinstance(problem.to(torch.float64), Problem) and CASES[0].flops(True) == 3.5 * CASES[0].flops(False)
    out = outcome(problem, SDPA.function, True)
    assert set(out) == {"output", "q", "k", "v", "bias_hw"}


def test_every_contender_ends_as_a_row(tmp_path):
    """Refused, or gated, checked and timed in all rounds."""
    one = measurement(tmp_path)
    one.measure(DECOMPOSED, "training")
    rows = read_rows(tmp_path / "samples.jsonl")
    names = {c.name for c in contenders(DECOMPOSED, gpu=False)}
    timed, refused = by_contender(rows, "time"), by_contender(rows, "refused")
    assert set(timed) | set(refused) == names and {"sdpa", "augmented_qk", "softmax", "sdpa without bias"} <= set(timed)
    assert "no backward on a CPU" in refused["flex"]["text"]
    assert all(len(row["rounds"]) == 3 and min(map(min, row["rounds"])) > 0 for row in timed.values())
    gates = by_contender(rows, "gate")
    assert set(gates["sdpa"]["errors"]) == {"float32", "float16"} and "query_h" in gates["sdpa"]["errors"]["float16"]
    assert all(row["code"] == "now" for row in rows)


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "contenders", lambda case, gpu: [SDPA, Contender("softmax", global_softmax, "peer")])
    path = tmp_path / "samples.jsonl"
    measurement(tmp_path).measure(TABLE, "forward")
    first = path.read_text()
    measurement(tmp_path).measure(TABLE, "forward")
    assert path.read_text() == first
    lines = [line for line in first.splitlines() if json.loads(line)["kind"] != "time"]
    path.write_text("\n".join(lines) + '\n{"kind": "time", "case": "quick ta')  # killed while it wrote
    measurement(tmp_path).measure(TABLE, "forward")
    again = read_rows(path)
    kinds = [collections.Counter(row["kind"] for row in rows) for rows in (map(json.loads, first.splitlines()), again)]
    assert kinds[0]["time"] == kinds[1]["time"] and kinds[0]["gate"] == kinds[1]["gate"]
    assert kinds[1]["check"] == 2 * kinds[0]["check"]  # the part of a row did not spoil the next one
    measurement(tmp_path, code="other").measure(TABLE, "forward")
    assert sum(row["kind"] == "time" for row in read_rows(path)) == 2 * kinds[0]["time"]


def failing(at):
    """A contender that runs out of memory at its `at`-th call."""
    calls = []

    def run(*of):
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return SDPA.function(*of)

    return Contender("hungry", run, "ours")


@pytest.mark.parametrize("at", [1, 3, 4, 6])  # at the gate, the check, warming up, and while it is timed
def test_a_failure_is_a_row(tmp_path, monkeypatch, at):
    monkeypatch.setattr(running, "contenders", lambda case, gpu: [SDPA, failing(at)])
    measurement(tmp_path).measure(TABLE, "forward")
    rows = read_rows(tmp_path / "samples.jsonl")
    assert set(by_contender(rows, "time")) == {"sdpa"}
    failures = [row for row in rows if row["kind"] == "failed" and row["case"] == TABLE.name]
    assert [row["contender"] for row in failures] == ["hungry"] and "OutOfMemoryError: CUDA out" in failures[0]["text"]
    before = len(rows)
    measurement(tmp_path).measure(TABLE, "forward")
    assert len(read_rows(tmp_path / "samples.jsonl")) == before


def test_rounds_are_interleaved(tmp_path, monkeypatch):
    said = []

    def saying(name):
        return Contender(name, lambda *of: said.append(name) or SDPA.function(*of), "peer")

    monkeypatch.setattr(running, "contenders", lambda case, gpu: [saying("a"), saying("b")])
    measurement(tmp_path).measure(TABLE, "training")
    assert said[-6:] == ["a", "b"] * 3 and len(said) == 2 * (2 + 1 + 1 + 3)  # gate, check, warm up, rounds


def test_a_wrong_backend_gets_no_time(tmp_path, monkeypatch):
    wrong = changed(bias=lambda x: x.roll(1, -1))
    monkeypatch.setattr(running, "contenders", lambda case, gpu: [SDPA, wrong])
    measurement(tmp_path).measure(TABLE, "training")
    rows = read_rows(tmp_path / "samples.jsonl")
    assert set(by_contender(rows, "time")) == {"sdpa"}
    assert "at the gate: float32: error of output" in by_contender(rows, "wrong")["ours"]["text"]
    late = [Contender("ours", lambda case, *of: SDPA.function(case, *of) * (2 if case.batch == 1 else 1), "ours")]
    monkeypatch.setattr(running, "contenders", lambda case, gpu: [SDPA, *late])
    (tmp_path / "late").mkdir()
    measurement(tmp_path / "late").measure(TABLE, "training")  # right where it is gated, wrong where it is timed
    rows = read_rows(tmp_path / "late" / "samples.jsonl")
    assert "at full size, error of output" in by_contender(rows, "wrong")["ours"]["text"]
    assert set(by_contender(rows, "time")) == {"sdpa"}


def test_no_case_starts_when_time_is_up(tmp_path):
    assert not measurement(tmp_path, until=0.0).run(QUICK, lambda: None)
    assert not (tmp_path / "samples.jsonl").exists()


def test_a_device_that_is_lost_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "free", lambda: (_ for _ in ()).throw(RuntimeError("illegal access")))
    monkeypatch.setattr(running, "contenders", lambda case, gpu: [SDPA, failing(1)])
    with pytest.raises(DeviceLost, match="illegal access"):
        measurement(tmp_path).measure(TABLE, "forward")
    assert by_contender(read_rows(tmp_path / "samples.jsonl"), "failed")["hungry"]


class Event:
    """Of a device that is 3 ms later each time it is looked at."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 3.0
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_gpu_is_kept_busy_flushed_and_asked_for_its_own_time(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append(cycles))
    watch = Stopwatch(CPU)
    watch.gpu, watch.buffer = True, torch.ones(8, dtype=torch.int8)
    ms, host = watch(lambda: said.append("run"), busy=2.0)
    assert ms == 3.0 and 0 < host < 100
    assert said == ["synchronize", 4_000_001, "run", "synchronize"] and not watch.buffer.any()
    calls, busy = warm_up(lambda: time.sleep(0.01), contextlib.nullcontext, watch, Repeats(4, 7, 0.0301, 20))
    assert calls == 10 and busy > 15  # 30 ms hold ten calls of 3; the host takes 10 to queue one


def test_peak_memory_is_that_of_the_call(monkeypatch):
    for name, value in (("memory_allocated", 100), ("max_memory_allocated", 250)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    assert peak_bytes(lambda: 1, contextlib.nullcontext, torch.device("cuda")) == 150
    assert peak_bytes(lambda: 1, contextlib.nullcontext, CPU) is None


def test_warps_are_forced_for_a_while(monkeypatch):
    Tile = collections.namedtuple("Tile", "rows keys warps stages")
    kernels = types.ModuleType("vitrel.ops.made_up")
    kernels.window_tile, kernels._table_tile, kernels.other = lambda n: Tile(n, n, 2, 1), lambda: (64, 2, 3), lambda: (1, 2, 3)
    kernels._key_tile = object()  # a kernel's own function is no Python function
    monkeypatch.setitem(sys.modules, "vitrel.ops.made_up", kernels)
    monkeypatch.setattr(field, "_KERNELS", ("made_up",))
    with forced_warps(8):
        assert kernels.window_tile(16) == Tile(16, 16, 8, 1) and kernels.window_tile(16).warps == 8
        assert kernels._table_tile() == (64, 8, 3) and kernels.other() == (1, 2, 3)
    assert kernels.window_tile(16).warps == 2
    monkeypatch.setattr(field, "_KERNELS", ("window",))
    with pytest.raises(RuntimeError, match="no function that chooses a tile"), forced_warps(4):
        pass


def timed(name, rounds, of="peer", **more):
    row = {"kind": "time", "case": "a case", "mode": "forward", "contender": name, "of": of, "rounds": rounds, "host": rounds}
    return row | {"peak_bytes": 2_000_000, "tokens": 1000, "flops": 1e9} | more


DRIFT = [1.0, 1.0, 3.0, 3.0, 9.0]  # a machine that gets slower


def test_ratios_are_taken_within_rounds():
    """Medians of a drifting machine would say anything; the ratio within a round does not."""
    slow = timed("sdpa", [[2 * d, 2 * d, 40 * d] for d in DRIFT])
    fast = timed("triton", [[1 * d, 1 * d, 1 * d] for d in DRIFT[:4]] + [[9.9]], "ours")
    found = ratio(slow, fast)
    assert found.middle == 2 and found.high == 2 and found.low == pytest.approx(18 / 9.9)
    assert str(found) == "2.00x (1.82 to 2.00)"
    assert milliseconds(slow) == median([2, 2, 6, 6, 18])


def test_auto_never_takes_what_was_slower_once():
    sdpa, fast = timed("sdpa", [[2.0]] * 7), timed("triton", [[1.5]] * 7, "ours")
    rows = {"sdpa": sdpa, "triton": fast, "softmax": timed("softmax", [[0.1]] * 7)}  # no backend: not a choice
    assert advice(rows) == "triton 1.33x (1.33 to 1.33) over sdpa"
    rows["triton"] = timed("triton", [[1.5]] * 6 + [[2.1]], "ours")
    assert advice(rows) == "sdpa; over it triton 1.33x (0.95 to 1.33)"
    rows["augmented_qk"] = timed("augmented_qk", [[1.9]] * 7, "ours")
    rows["triton, 8 warps"] = timed("triton, 8 warps", [[1.0]] * 7, "ours")
    text = "augmented_qk 1.05x (1.05 to 1.05) over sdpa; triton, 8 warps: 1.50x (1.50 to 2.10) over the kernels' own choice"
    assert advice(rows) == text
    assert advice({"triton": fast}).startswith("sdpa was not measured")


def test_the_table():
    stamped = {"device": "GPU X", "torch": "2", "triton": "3", "interpreter": "", "code": "abc"}
    rows = [{"kind": "machine", "driver": "580.1", "commit": "c0ffee", "how": "events", **stamped}]
    rows += [timed("sdpa", [[2.0]] * 7), timed("softmax", [[4.0]] * 7), timed("triton", [[1.0]] * 7, "ours")]
    rows += [timed("sdpa without bias", [[0.5]] * 7, "floor"), timed("triton", [[7.0]] * 7, "ours", code="older")]
    rows.append({"kind": "failed", "case": "a case", "mode": "forward", "contender": "flex", "text": "out of\nmemory | 9"})
    rows.append({"kind": "sdpa", "case": "N=12", "mode": "training", "contender": "default", "rounds": [[1.0]],
                 "peak_bytes": 5e6, "errors": {"output": 1e-3}, "ran": ["aten::_efficient", "fmha_kernel"]})  # fmt: skip
    text = write_table([stamped | row for row in rows])
    for line in (
        "- device: GPU X", "- driver: 580.1", "- commit: c0ffee", "How: events",
        "- a case, forward: triton 2.00x (2.00 to 2.00) over sdpa",
        "| triton | 1.0000 | 1.0000 to 1.0000 | 1.000 | 2.00x (2.00 to 2.00) | 2.0 | 1.00 | 1.00 |",
        "| sdpa without bias (the floor, not comparable) | 0.5000 | 0.5000 to 0.5000 | 0.500 "
        "| 4.00x (4.00 to 4.00) | 2.0 | 2.00 | 2.00 |",
        "| flex | a case, forward | failed: out of memory / 9 |",
        "| N=12 | training | default | 1.0000 | 5.0 | 1.0e-03 | _efficient, fmha_kernel |",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert "over sdpa, the best peer" in text and "7.0000" not in text
    assert write_table([]) == "Nothing was measured.\n"


DIES = """
import json, os, pathlib, sys, time
at, done = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
if not done.exists():
    done.write_text("")
    at.write_text(json.dumps({"case": "a", "mode": "forward", "contender": "triton"}))
    print("illegal instruction", file=sys.stderr, flush=True)
    %s
"""


@pytest.mark.parametrize(
    ("death", "text"),
    [("os.kill(os.getpid(), 11)", "status -11: illegal instruction"), ("time.sleep(60)", "no end within 1 s: illegal")],
)
def test_a_worker_that_dies_or_hangs_is_started_again(tmp_path, death, text):
    samples, at = Samples(tmp_path / "samples.jsonl", {}), tmp_path / "running.json"
    command = [sys.executable, "-c", DIES % death, str(at), str(tmp_path / "done")]
    assert supervise(command, samples, at, time.time() + 60, patience=1.0) == 0
    (row,) = read_rows(samples.path)
    assert (row["kind"], row["case"], row["contender"]) == ("failed", "a", "triton") and text in row["text"]


def test_a_worker_that_lost_its_device_is_started_again_without_a_row(tmp_path):
    samples, at = Samples(tmp_path / "samples.jsonl", {}), tmp_path / "running.json"
    command = [sys.executable, "-c", DIES % f"os._exit({LOST})", str(at), str(tmp_path / "done")]
    assert supervise(command, samples, at, time.time() + 60) == 0
    assert read_rows(samples.path) == []


def test_a_worker_that_never_starts_is_not_tried_for_ever(tmp_path, capfd):
    samples = Samples(tmp_path / "samples.jsonl", {})
    assert supervise([sys.executable, "-c", "import nowhere"], samples, tmp_path / "at", time.time() + 60) == 1
    assert "No module named 'nowhere'" in capfd.readouterr().err


def test_the_tool_quickly(tmp_path, monkeypatch):
    """All of it in this process, then the table alone."""
    tool = kernels_tool
    monkeypatch.setattr(tool, "QUICK", QUICK[1:2])
    tool.main(["--worker", str(time.time() + 600), "--quick", "--out", str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    table = (folder / "table.md").read_text()
    rows = read_rows(folder / "samples.jsonl")
    assert "- quick table, forward: " in table and "| softmax |" in table
    assert {"machine", "sdpa", "gate", "check", "refused", "time"} <= {row["kind"] for row in rows}
    assert {row["contender"] for row in rows if row["kind"] == "sdpa"} >= {"default", "math"}
    (folder / "table.md").unlink()
    with pytest.raises(SystemExit) as ended:
        tool.main(["--table", "--out", str(tmp_path)])
    assert not ended.value.code and (folder / "table.md").read_text() == table
    with pytest.raises(SystemExit, match="measure first"):
        tool.main(["--table", "--out", str(tmp_path / "empty")])


@pytest.mark.slow
def test_the_tool_as_it_is_called(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        kernels_tool.main(["--quick", "--only", "windows", "--out", str(tmp_path)])
    assert not ended.value.code
    assert "- quick windows, training: " in capfd.readouterr().out
    assert not list(tmp_path.glob("*/.running.json"))
