"""The suite of operators: peers compute what they are compared in, cases fit their machine, and what is measured is a table."""

import time

import pytest
import torch

from tools.benchmark import op_suite
from tools.benchmark.cases import CPU_CASES, QUICK, family, hard_case, make_problem
from tools.benchmark.contenders import FLOOR, GATHERED, Contender, contenders, gathered_sdpa, global_flex, global_softmax
from tools.benchmark.gates import Gate
from tools.benchmark.op_suite import cpu_repeats, run_ops, write_ops
from tools.benchmark.samples import Samples, machine, read_rows, stamp
from vitrel.grid import Grid

CPU = torch.device("cpu")
WINDOWS, TABLE, DECOMPOSED = QUICK
ENCODINGS = ("table", "factorised", "decomposed", "rope")


def gate(case, training=True):
    return Gate(make_problem(case, torch.float32, CPU, seed=1), training)


def samples(folder):
    found = machine(CPU)
    kept = Samples(folder / "samples.jsonl", stamp(found))
    kept.add("machine", **found, how="process time")
    return kept


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("prefix", [0, 1])
def test_global_peers_are_right(encoding, prefix):
    if encoding == "decomposed" and prefix:
        pytest.skip("its peers have no prefix tokens")
    case = TABLE._replace(encoding=encoding, grid=Grid(4, 7, prefix), batch=2, heads=3)
    held = gate(case)
    for function in (gathered_sdpa, global_softmax):
        assert held.check(Contender("ours", function, "ours")).text == ""


@pytest.mark.parametrize("encoding", ["table", "factorised", "rope"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_global_flex_is_right(encoding, prefix):
    held = gate(TABLE._replace(encoding=encoding, grid=Grid(4, 7, prefix), batch=2), training=False)
    assert held.check(Contender("ours", global_flex, "ours")).text == ""


@pytest.mark.parametrize("encoding", ["table", "rope"])
@pytest.mark.parametrize("grid", [Grid(6, 9), Grid(7, 5), Grid(2, 8), Grid(2, 3)], ids=str)
def test_gathered_bias_in_windows_is_right(encoding, grid):
    for shift in (WINDOWS.shift, (0, 0)):
        case = WINDOWS._replace(encoding=encoding, grid=grid, batch=2, shift=shift)
        assert gate(case).check(Contender("ours", gathered_sdpa, "ours")).text == ""


def test_peers_look_their_bias_up():
    """By an index that they keep, with which they are wrong where it is wrong."""
    held = gate(TABLE, training=False)
    held.problem = held.problem._replace(fixed=(held.problem.fixed[0].mT.contiguous(),))
    for function in (gathered_sdpa, global_softmax):
        assert "error of output" in held.check(Contender("ours", function, "peer")).text
    assert make_problem(TABLE, torch.float32, CPU, keep=False).fixed == ()


def test_cases_of_a_cpu():
    assert len({case.name for case in CPU_CASES}) == len(CPU_CASES)
    for case in CPU_CASES:
        assert family(hard_case(case)) == family(case)
        assert case.flops(True) < 2e11  # a few seconds of one core
    whole, padded = (next(case for case in CPU_CASES if size in case.name) for size in ("56x56", "60x50"))
    names = {one.name for one in contenders(padded, gpu=False)}
    assert FLOOR not in names and GATHERED in names  # the floor cuts no window that is not whole
    assert FLOOR in {one.name for one in contenders(whole, gpu=False)}
    assert cpu_repeats(padded, False).warmup == 20 and cpu_repeats(padded, False).rounds == 7
    assert cpu_repeats(next(case for case in CPU_CASES if "64x64, table" in case.name), True).warmup == 2


def test_who_is_measured(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    names = [one.name for one in contenders(TABLE, gpu=False)]
    assert names[0] == "sdpa" and {"auto", "augmented_qk", "softmax", GATHERED} < set(names) and len(set(names)) == len(names)
    assert "triton" not in names and not any("compiled" in name for name in names)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "triton" in [one.name for one in contenders(TABLE, gpu=False)]
    compiled = {one.name for one in contenders(TABLE._replace(compiled=True), gpu=False) if one.compiled}
    assert compiled == {"sdpa compiled", "softmax compiled", f"{GATHERED} compiled", "flex compiled"}
    large = TABLE._replace(grid=Grid(40, 40))
    assert not {"flex", "reference"} & {one.name for one in contenders(large, gpu=False)}


def test_the_suite_quickly(tmp_path, monkeypatch):
    asked = []

    def sizes(samples, device, until, quick, only, after):
        asked.append((device, quick, only))
        return True

    monkeypatch.setattr(op_suite, "run_sizes", sizes)
    kept = samples(tmp_path)
    assert run_ops(kept, CPU, time.time() + 60, True, "decomposed", tmp_path)
    timed = [row for row in read_rows(kept.path) if row["kind"] == "time"]
    assert {row["case"] for row in timed} == {DECOMPOSED.name} and {row["mode"] for row in timed} == {"forward", "training"}
    assert {"sdpa", "auto", "augmented_qk", GATHERED, "softmax", FLOOR} <= {row["contender"] for row in timed}
    assert asked == [(CPU, True, "decomposed")] and not (tmp_path / ".running.json").exists()
    table = (tmp_path / "table.md").read_text()
    assert f"### {DECOMPOSED.name}, training" in table and f"| {GATHERED} |" in table
    assert "Cost against size" not in table
    assert not run_ops(kept, CPU, 0.0, True, "", tmp_path) and len(asked) == 1
    write_ops([], tmp_path)
    assert (tmp_path / "table.md").read_text().startswith("Nothing was measured.")
