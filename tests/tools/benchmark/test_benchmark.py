"""tools/benchmark: what is wrong gets no time, every outcome is a row, rounds are in turns, tables come out of the samples."""

import collections
import importlib
from pathlib import Path

import pytest
import torch

from tools.benchmark import __main__ as benchmark
from tools.benchmark.engine import Case, Contender, Engine, Visit, relative_errors, too_large
from tools.benchmark.models import model_call, model_cases
from tools.benchmark.page import PAGE, tables
from tools.benchmark.samples import ROOT, Samples, machine, read_rows
from tools.benchmark.scale import DENSE, scale_cases
from tools.benchmark.worker import Repeats, Worker, WorkerFailed, most_bytes

CPU = torch.device("cpu")
BRIEF = Repeats(1, 3, 0.0, 1)
SAID = []


class Here:
    """A worker that builds and runs a contender in the test's process; its errors are raised as WorkerFailed."""

    def __init__(self, build, args, threads=1, env=None, patience=600.0):
        module, _, function = build.partition(":")
        self.build, self.args = getattr(importlib.import_module(module), function), args

    def start(self):
        self.call = self._attempt(lambda: self.build(**self.args))
        self.kept = self._attempt(self.call)
        return {"first_call_s": 0.5}

    def set(self, first=True, **args):
        self._attempt(lambda: self.call.set(**args))
        if first:
            self.kept = self._attempt(self.call)
        return {"first_call_s": 0.5} if first else {}

    def outcome(self):
        return self._attempt(lambda: getattr(self.call, "checked", dict)(self.kept))

    def run(self, calls):
        for _ in range(calls):
            self.kept = self._attempt(self.call)
        return [2.0] * calls

    def memory(self):
        self.kept = self._attempt(self.call)
        return {"call_bytes": 3_000_000, "call_ms": 2.0, "launches": None}

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _attempt(self, work):
        try:
            return work()
        except Exception as error:
            raise WorkerFailed(f"{type(error).__name__}: {error}") from error


def made(folder, code="now"):
    return Engine(Samples(folder / "samples.jsonl", machine(CPU, "abc") | {"code": code}), Here)


@pytest.fixture
def engine(tmp_path):
    SAID.clear()
    return made(tmp_path)


def ended(engine, kind):
    """{contender: row} of the rows of a kind."""
    return {row["contender"]: row for row in read_rows(engine.samples.path) if row["kind"] == kind}


class Call:
    """Returns 1 to 4 in the place of `n` numbers, off by a factor of 1 + off; fails, with a text, at its `at`-th call."""

    def __init__(self, method, off=0.0, at=0, text="", n=4):
        self.method, self.off, self.at, self.text, self.count, self.n = method, off, at, text, 0, n

    def set(self, n):
        self.n = n

    def __call__(self):
        self.count += 1
        SAID.append(self.method)
        if self.count == self.at:
            raise MemoryError(self.text)
        return {"output": torch.arange(1.0, self.n + 1) * (1 + self.off)}


def one(name, of="peer", skips=(), **args):
    truth = dict(method="the definition") | ({"n": args["n"]} if "n" in args else {})
    return Contender(name, of, dict(method=name, **args), truth, skips=skips)


def case(*known, name="a case", visits=(Visit("forward", row={"batch": 1}),), **more):
    return Case(name, f"{__name__}:Call", known, visits, BRIEF, **more)


def test_every_contender_ends_as_a_row(engine, tmp_path):
    """Wrong, failed at any call, or timed in all rounds; what is done is not done again."""
    failing = [one(f"fails at {at}", at=at, text="no room") for at in (1, 2, 3, 5)]  # first call, warming up, while timed
    whole = case(one("timm"), one("ours", "ours"), one("off", "ours", off=1e-4), *failing)
    engine.measure(whole)
    timed = ended(engine, "time")
    assert set(timed) == {"timm", "ours"}
    row = timed["ours"]
    assert [len(row["rounds"]), row["rounds"][0]] == [3, [2.0]] and row["errors"] == {"output": 0.0}
    assert (row["of"], row["batch"], row["commit"], row["code"]) == ("ours", 1, "abc", "now")
    assert (row["call_bytes"], row["first_call_s"]) == (3_000_000, 0.5)
    assert ended(engine, "wrong")["off"]["text"] == "error of output 1.0e-04 (limit 3.0e-05)"
    assert {name: row["text"] for name, row in ended(engine, "failed").items()} == {
        known.name: "MemoryError: no room" for known in failing
    }
    first = engine.samples.path.read_text()
    made(tmp_path).measure(whole)
    assert engine.samples.path.read_text() == first
    lines = [line for line in first.splitlines() if '"contender": "timm"' not in line]
    engine.samples.path.write_text("\n".join(lines) + '\n{"kind": "time", "case": "a ca')  # killed while it wrote
    made(tmp_path).measure(whole)
    again = collections.Counter((row["kind"], row["contender"]) for row in read_rows(engine.samples.path))
    assert again["time", "timm"] == 1 and again["time", "ours"] == 2 and again["wrong", "off"] == 1  # timed together again
    made(tmp_path, code="other").measure(whole)
    assert sum(row["kind"] == "time" for row in read_rows(engine.samples.path)) == 5


def test_rounds_are_interleaved(engine):
    engine.measure(case(one("a"), one("b")))
    assert ["the definition", "a", "b", *("a", "b") * 5] == SAID  # first calls, warming up, rounds, memory


def test_visits(engine):
    """A row for each size, in one process; what fails is out from there on, and peers are held to the first alone."""
    visits = tuple(Visit(f"of {n}", {"n": n}, {"size": n}, ("ours", "peer") if n == 4 else ("ours",)) for n in (4, 3, 5))
    late = one("late", "ours", n=4, at=9, text="no")
    engine.measure(case(one("timm", n=4), one("ours", "ours", n=4), one("few", n=4, skips=("of 3",)), late, visits=visits))
    found = [(row["contender"], row["size"]) for row in read_rows(engine.samples.path) if row["kind"] == "time"]
    assert found == [("timm", 4), ("ours", 4), ("few", 4), ("late", 4), ("timm", 3), ("ours", 3), ("timm", 5), ("ours", 5),
                     ("few", 5)]  # fmt: skip
    assert ended(engine, "failed")["late"]["mode"] == "of 3" and SAID.count("the definition") == 3
    errors = [bool(row["errors"]) for row in read_rows(engine.samples.path) if row["contender"] == "timm"]
    assert errors == [True, False, False]


def test_errors():
    truth = {"output": torch.arange(1.0, 5.0).double(), "q": torch.ones(4).double()}
    same = {name: x.float() for name, x in truth.items()}

    def text(half=False, **found):
        return too_large(relative_errors(same | found, truth), half)

    assert not text() and "nan" in text(output=same["output"] * float("nan"))
    assert text(output=same["output"] * 1.001) == "error of output 1.0e-03 (limit 3.0e-05)"
    assert "q inf" in text(q=None) and "q inf" in text(q=torch.ones(3)) and "q" in text(q=same["q"] * 1.001)
    assert not text(True, q=1.9 * same["q"]) and "q 1.0e+00" in text(True, q=0 * same["q"])  # cancels, or is absent
    assert "output" in text(True, output=same["output"] * 1.2)


def test_rows_of_scale(engine, monkeypatch):
    """A row for every size, inference and training; an index that a peer keeps is counted."""
    monkeypatch.setattr("tools.benchmark.scale._STATM", Path("/absent"))  # a limit would hold for the tests too
    for known in scale_cases(True):
        engine.measure(known)
    found = [row for row in read_rows(engine.samples.path) if row["kind"] == "size"]
    assert {row["contender"] for row in found} == {"none", "table", DENSE} and len(found) == 3 * 4
    assert all(row["kept_bytes"] == (8 * row["tokens"] ** 2 if row["contender"] == DENSE else 0) for row in found)
    assert all(row["call_ms"] == 2.0 and row["rounds"] == [] for row in found)


def test_the_gate_of_training(monkeypatch):
    """Every gradient of timm's model, under our names; the definition is computed in parts; a wrong table does not pass."""
    known = next(c for c in model_cases(True) if c.name == "Swin nano")
    timm, ours = (next(c for c in known.contenders if c.name == f"Swin nano: {name}") for name in ("timm", "ours"))
    visit = next(visit for visit in known.visits if visit.set["mode"] == "training")

    def found(args):
        call = model_call(**args, **visit.set)
        return call.checked(call())

    monkeypatch.setattr("tools.benchmark.models._PART", 112 * 112)
    truth, theirs, mine = found(timm.truth), found(timm.args), found(ours.args)
    assert ours.truth == timm.truth and set(theirs) == set(truth) == set(mine) and "loss" in truth
    name = "layers.1.blocks.1.position.relative_position_bias_table"
    for returned in (theirs, mine):
        assert too_large(relative_errors(returned, truth)) == ""
        off = returned | {name: returned[name] * (1 + 1e-3)}
        assert too_large(relative_errors(off, truth)).startswith(f"error of {name} 1.0e-03")


# --- workers


CALLS = """
import os, torch

def glutton(mb):
    return lambda: {"sum": torch.ones(mb * 2**20 // 4).sum(), "threads": torch.tensor(torch.get_num_threads())}

def later(what):
    calls = []
    def call():
        calls.append(1)
        if len(calls) > 1:
            what == "die" and os._exit(9)
            1 / 0
        return {"x": torch.ones(1)}
    return call
"""


@pytest.mark.slow(seconds=4)
def test_a_worker_answers_until_it_dies(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)

    def started(build, **args):  # another contender in the same process, which spares the seconds of its imports
        return worker._ask("start", f"calls:{build}", args, 1)

    with Worker("calls:glutton", {"mb": 50}, 1, {"PYTHONPATH": str(tmp_path)}, patience=60.0) as worker:
        assert worker.start()["first_call_s"] > 0 and worker.outcome()["threads"] == 1
        times = worker.run(3)
        assert len(times) == 3 and all(0 <= ms < 2000 for ms in times)
        memory = worker.memory()
        assert 0 <= memory["call_bytes"] - 50 * 2**20 < 100
        assert memory["call_ms"] > 0 and memory["launches"] is None
        started("glutton", mb=1)
        assert 0 <= worker.memory()["call_bytes"] - 2**20 < 100
        started("later", what="raise")
        with pytest.raises(WorkerFailed, match="ZeroDivisionError: division by zero"):
            worker.run(1)
        started("later", what="die")
        with pytest.raises(WorkerFailed, match="the process ended with status 9"):
            worker.run(1)


@pytest.mark.slow
def test_most_bytes_are_those_of_live_tensors():
    """What is freed within the call does not add up, and what is held before and after does not count."""
    held = torch.ones(2**20)

    def call():
        for _ in range(3):
            torch.ones(2**18)
        return held.sum()

    assert most_bytes(call, CPU) == 2**20
    assert most_bytes(lambda: held.view(-1), CPU) == 0


# --- command line and tables


MACHINE = {"device": "Zen", "cpu": "Zen", "threads": "1", "torch": "2", "timm": "1", "triton": "none", "interpreter": ""}
MACHINE |= {"python": "3.12", "commit": "abc", "code": "now", "cuda": ""}
ABOUT = {"kind": "machine", **MACHINE}


def row(case, contender, ms, of="peer", mode="inference", call=100e6, **more):
    own = dict(rounds=[[ms, 2 * ms], [ms, ms]], batch=8, call_bytes=call)
    own |= dict(first_call_s=61.0, launches=193, how="eager")
    return {"kind": "time", "case": case, "mode": mode, "contender": contender, "of": of} | own | MACHINE | more


def scale_rows(who, power, mb, kept=0.0):
    for side in (14, 32, 48, 64, 128):
        n = side * side
        found = {"kind": "size", "case": f"scale {who}", "mode": f"inference, {n} tokens", "contender": who, "of": "ours"}
        found |= {"tokens": n, "rounds": [], "call_ms": n**2 / 1e5, "kept_bytes": kept * n**2}
        yield MACHINE | found | {"call_bytes": mb * 1e6 * (n / 196) ** power}


def test_tables_of_the_page():
    """Speeds are over the other library's; what failed because memory ran out is said."""
    mode = "inference, batch 1, 224 px"
    models = [ABOUT, row("a case", "Swin-T: timm", 900.0, mode=mode), row("a case", "Swin-T: ours", 400.0, "ours", mode)]
    models.append(row("a case", "Swin-T: ours", 400.0, "ours", mode.replace("1,", "8,"), call=7e8))
    dense = list(scale_rows(DENSE, 2.0, 1.5, 8.0))[:-1]
    failed = {
        "kind": "failed",
        "contender": DENSE,
        "mode": "inference, 16384 tokens",
        "text": "can't allocate memory",
    } | MACHINE
    found = dict(tables(models, [ABOUT, *dense, failed | {"case": "scale"}, *scale_rows("table", 1.0, 1.5)]))
    assert f"| Swin-T, {mode} | 2.25 (2.25 to 2.25) | " in found["speed"]
    assert "| `table` | 0.38, 1.50 | 168, 31.3 | 2684, 125 | 2.00, 1.00 |" in found["scale"]
    assert f"| {DENSE} | 0.38, 1.81 | 168, 789 | failed | 2.00, 2.00 |" in found["scale"]
    assert "| Swin-T, inference, batch 1, 224 px | 193 / 193 | 100 / 100 | 700 | 61.0 / 61.0 |" in found["resources"]


def test_the_page_is_of_the_committed_samples():
    (device,) = (ROOT / "results" / "benchmark").iterdir()
    text = (ROOT / PAGE).read_text("utf-8")
    for name, table in tables(*(read_rows(device / suite / "samples.jsonl") for suite in ("cpu", "scale"))):
        assert table in text, name


@pytest.mark.slow
def test_the_command_line(tmp_path, monkeypatch, capsys):
    """Of timm's model and of ours, in this process."""
    monkeypatch.setattr(benchmark, "Engine", lambda samples: Engine(samples, Here))
    keep = lambda case: Case(**vars(case) | {"contenders": case.contenders[:2], "visits": case.visits[:1]})  # noqa: E731
    suite = benchmark.SUITES["cpu"]
    monkeypatch.setitem(benchmark.SUITES, "cpu", suite._replace(cases=lambda *of: [keep(known) for known in suite.cases(*of)]))
    benchmark.main(["--suite", "cpu", "--quick", "--only", "Swin nano", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/cpu-quick/samples.jsonl")
    rows = [row for row in read_rows(path) if row["kind"] == "time"]
    assert {row["contender"] for row in rows} == {"Swin nano: timm", "Swin nano: ours"} and len(rows) == 2
    assert all(max(row["errors"].values()) < 3e-5 for row in rows)
    assert "| Swin nano: ours | 500 | 1.00x" in capsys.readouterr().out  # images a second, by the worker's 2 ms
