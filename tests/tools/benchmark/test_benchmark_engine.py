"""The engine: what is wrong gets no time, every outcome is a row, what is done stays done, rounds are in turns."""

import collections
import json
import time

import pytest
import torch

from helpers.workers import Here, by_contender
from tools.benchmark.engine import Case, Contender, Engine, Visit, check
from tools.benchmark.samples import Samples, machine, read_rows
from tools.benchmark.worker import Repeats

CPU = torch.device("cpu")
BRIEF = Repeats(1, 3, 0.0, 1)
SAID = []


class Call:
    """Returns 1 to 4 in the place of `n` numbers, off by a factor of 1 + off; fails, with a text, at its `at`-th call."""

    def __init__(self, method, device, off=0.0, at=0, text="", n=4):
        self.method, self.off, self.at, self.text, self.count, self.n = method, off, at, text, 0, n

    def set(self, n):
        self.n = n

    def __call__(self):
        self.count += 1
        SAID.append(self.method)
        if self.count == self.at:
            raise (ValueError if "refuses" in self.text else MemoryError)(self.text)
        return {"output": torch.arange(1.0, self.n + 1) * (1 + self.off)}


def one(name, of="peer", before=None, skips=(), **args):
    truth = dict(method="the definition") | ({"n": args["n"]} if "n" in args else {})
    return Contender(name, of, dict(method=name, **args), truth, of == "ours", before=before, skips=skips)


def case(*known, name="a case", visits=(Visit("forward"),), plan=BRIEF, **more):
    return Case(name, f"{__name__}:Call", known, visits, plan=plan, row={"batch": 1}, **more)


@pytest.fixture
def engine(tmp_path, here):
    SAID.clear()
    return made(tmp_path)


def made(folder, code="now"):
    samples = Samples(folder / "samples.jsonl", machine(CPU, "abc") | {"code": code})
    return Engine(samples, CPU, Here)


def test_every_contender_ends_as_a_row(engine):
    """Refused, wrong, failed or timed in all rounds; rows say what was measured."""
    refusing = one("flex", at=1, text="backend 'flex' refuses: no backward on a CPU")
    absent = one("other", at=1, text="no room")
    engine.measure(case(one("timm"), one("ours", "ours"), one("off", "ours", off=1e-4), refusing, absent))
    timed = by_contender(engine, "time")
    assert set(timed) == {"timm", "ours"}
    row = timed["ours"]
    assert len(row["rounds"]) == 3 and row["rounds"][0] == [2.0] and row["host"][0] == [3.0]
    assert (row["of"], row["batch"], row["dtype"], row["commit"], row["code"]) == ("ours", 1, "float32", "abc", "now")
    assert (row["peak_bytes"], row["call_bytes"], row["first_call_s"], row["compiles"]) == (100, 3_000_000, 0.5, 0)
    assert row["errors"] == {"output": 0.0}
    assert by_contender(engine, "wrong")["off"]["text"].startswith("error of output 1.0e-04")
    assert by_contender(engine, "refused")["flex"]["text"].startswith("backend 'flex' refuses")
    assert by_contender(engine, "failed")["other"]["text"] == "MemoryError: no room"
    Here.failing = {"gone": "ModuleNotFoundError: No module named 'gone'"}
    engine.measure(case(one("gone"), name="another"))
    assert by_contender(engine, "failed")["gone"]["text"].startswith("not installed: ModuleNotFoundError")


def test_what_is_done_is_not_done_again(engine, tmp_path):
    same = case(one("a"), one("b", at=2, text="late"), one("c"))
    engine.measure(same)
    first = engine.samples.path.read_text()
    made(tmp_path).measure(same)
    assert engine.samples.path.read_text() == first
    lines = [line for line in first.splitlines() if '"contender": "c"' not in line]
    engine.samples.path.write_text("\n".join(lines) + '\n{"kind": "time", "case": "a ca')  # killed while it wrote
    made(tmp_path).measure(same)
    again = collections.Counter((row["kind"], row["contender"]) for row in read_rows(engine.samples.path))
    # both are timed together again; the part of a row did not spoil the next one, and what failed is not tried again
    assert again == {("time", "a"): 2, ("failed", "b"): 1, ("time", "c"): 1}
    made(tmp_path, code="other").measure(same)
    assert sum(row["kind"] == "time" for row in read_rows(engine.samples.path)) == 5


@pytest.mark.parametrize("at", [1, 2, 3, 5])  # at the first call, warming up, and while it is timed
def test_a_failure_is_a_row(engine, tmp_path, at):
    engine.measure(case(one("a"), one("hungry", at=at, text="out of memory")))
    assert set(by_contender(engine, "time")) == {"a"} and "out of memory" in by_contender(engine, "failed")["hungry"]["text"]


def test_rounds_are_interleaved(engine):
    engine.measure(case(one("a"), one("b")))
    assert ["the definition", "a", "b", *("a", "b") * 4] == SAID  # first calls, warming up, rounds
    SAID.clear()
    engine.measure(case(one("a"), one("b"), name="alone", together=False))
    assert ["the definition", *["a"] * 5, *["b"] * 5] == SAID


def test_a_definition_that_fails_is_said_for_everyone(engine):
    Here.failing = {"the definition": "MemoryError"}
    engine.measure(case(one("a"), one("b"), Contender("floor", "floor", {"method": "floor"}, None)))
    assert {row["text"] for row in by_contender(engine, "failed").values()} == {"the definition failed: MemoryError"}
    assert set(by_contender(engine, "time")) == {"floor"}  # which is not compared


def test_a_gate_before(engine):
    """It is passed once; who does not pass it is not timed."""
    gate = case(one("plain", "ours"), one("fast", "ours", off=1e-3), name="hard", plan=None, kind="gate")
    engine.measure(case(one("timm"), one("ours", "ours", (gate, "plain")), one("ours, fast", "ours", (gate, "fast"))))
    assert set(by_contender(engine, "time")) == {"timm", "ours"} and set(by_contender(engine, "gate")) == {"plain"}
    assert by_contender(engine, "wrong")["ours, fast"]["text"].startswith("at the gate: error of output 1.0e-03")
    count = SAID.count("plain")
    engine.measure(case(one("ours", "ours", (gate, "plain")), name="next"))
    assert SAID.count("plain") == count


def test_larger_cases_are_not_tried_after_a_failure(engine):
    known = one("softmax", at=1, text="tried to allocate 6 bytes"), one("auto", "ours")
    engine.measure(case(*known, name="small"))
    for name in ("middle", "large"):
        engine.measure(case(one("softmax"), one("auto", "ours"), name=name, after=("small", "middle")[: 1 + (name == "large")]))
        assert (
            by_contender(engine, "failed")["softmax"]["text"] == "not tried: at small, MemoryError: tried to allocate 6 bytes"
        )
        assert by_contender(engine, "time")["auto"]["case"] == name
    assert SAID.count("softmax") == 1


def test_visits(engine):
    """A row for each size, in one process; who is wrong is out from there on, and peers are held to the first alone."""
    visits = tuple(Visit(f"of {n}", {"n": n}, {"size": n}, n != 4) for n in (4, 3, 5))
    engine.measure(case(one("timm", n=4), one("ours compiled", "ours", n=4), one("few", n=4, skips=("of 3",)), visits=visits))
    found = [(row["contender"], row["size"]) for row in read_rows(engine.samples.path) if row["kind"] == "time"]
    assert found == [("timm", 4), ("ours compiled", 4), ("few", 4), ("timm", 3), ("ours compiled", 3), ("timm", 5),
                     ("ours compiled", 5), ("few", 5)]  # fmt: skip
    compiles = [row["new_compiles"] for row in read_rows(engine.samples.path) if row["contender"] == "ours compiled"]
    assert compiles == [5, 0, 0]
    assert SAID.count("the definition") == 3
    late = Contender("late", "ours", dict(method="late", at=9, text="no", n=4), dict(method="the definition"), True)
    engine.measure(case(late, one("timm", n=4), name="another", visits=visits))
    failed = by_contender(engine, "failed")["late"]
    assert failed["mode"] == "of 3"
    assert len([row for row in read_rows(engine.samples.path) if row["contender"] == "late" and row["kind"] == "time"]) == 1


def test_a_run(engine):
    """In order, of what matches; nothing starts when time is up."""
    cases, after = [case(one("a"), name=name) for name in ("one", "two", "three")], []
    assert engine.run(cases, "t", time.time() + 60, lambda: after.append(1))
    assert [row["case"] for row in read_rows(engine.samples.path)] == ["two", "three"] and len(after) == 2
    assert not engine.run(cases, "", 0.0, lambda: None)
    assert not engine.measure(case(one("a"), name="four", together=False), 0.0)
    assert json.loads(engine.samples.path.read_text().splitlines()[-1])["case"] == "three"


def test_check():
    """Exact ones by rounding or twice the yardstick; the others by what may be less exact but not something else."""
    truth = {"output": torch.arange(1.0, 5.0).double(), "q": torch.ones(4).double()}
    same = {name: x.float() for name, x in truth.items()}
    held = case(one("a"), largest=True)

    def text(yardstick=None, exact=True, of=held, **found):
        return check(same | found, truth, of, exact, yardstick).text

    assert not text() and "nan" in text(output=same["output"] * float("nan"))
    worse = same["output"] * (1 + 1e-5)
    assert text(output=worse).startswith("error of output 1.0e-05 (limit 2.0e-06)") and not text(exact=False, output=worse)
    assert not text({"output": 6e-6, "q": 0.0}, output=worse) and text({"output": 4e-6, "q": 0.0}, output=worse)
    assert text(exact=False, output=same["output"] * (1 + 1e-3))
    gradient = same["q"] * (1 + 1e-5)
    assert not text(q=gradient) and "q 1.0e-05" in text({"output": 0.0, "q": 0.0}, q=gradient)
    assert "q inf" in check({"output": same["output"]}, truth, held).text
    assert "q inf" in text(q=torch.ones(3))
    many = {"output": torch.ones(10_000).double()}
    single = torch.ones(10_000)
    single[7] += 2e-4  # one number of one token
    assert check({"output": single}, many, held, False).text.startswith("error of largest of output 2.0e-04")
    assert not check({"output": single}, many, case(one("a")), False).text
    half = case(one("a"), dtype="amp", gradient_cap=0.99)
    assert not text(of=half, q=1.9 * same["q"]) and "q 1.0e+00" in text(of=half, q=0 * same["q"])
    assert text(of=half, output=same["output"] * 1.01)


def test_check_of_hard_problems():
    """A contender may leave out all of a type, but not a part."""
    truth = {"output": torch.ones(4).double()}
    truth |= {f"hard {dtype}: {name}": torch.ones(4).double() for dtype in ("float32", "float16") for name in ("output", "q")}
    found = {name: x.float() for name, x in truth.items()}
    held = case(one("a"))
    assert not check(found, truth, held).text
    assert not check({name: x for name, x in found.items() if "float32" not in name}, truth, held).text
    assert "hard float32: q inf" in check({name: x for name, x in found.items() if name != "hard float32: q"}, truth, held).text
    assert not check(found | {"hard float16: output": found["output"] * (1 + 1e-4)}, truth, held).text
    assert "limit 2.0e-06" in check(found | {"hard float32: output": found["output"] * (1 + 1e-5)}, truth, held).text
