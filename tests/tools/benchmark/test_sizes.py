"""Cost against size: every outcome is a row, memory is what a call takes, and the table says how it grows."""

import time

import pytest
import torch

from tools.benchmark import sizes
from tools.benchmark.cases import make_problem
from tools.benchmark.contenders import FLOOR, GATHERED
from tools.benchmark.gates import Gate
from tools.benchmark.processes import WorkerFailed
from tools.benchmark.samples import Samples, machine, read_rows, stamp
from tools.benchmark.size_table import growth, plot_sizes, size_section
from tools.benchmark.sizes import TURN, Known, Sized, SizeRun, Turn, lineup, memory_limit, run_sizes, sized_call, sized_case

CPU = torch.device("cpu")
SMALL = (4, 6)


class Here:
    """A worker in this process."""

    def __init__(self, make, fails=""):
        self.make, self.fails = make, fails

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self):
        if self.fails:
            raise WorkerFailed(self.fails)
        self.call = self.make()
        self.found = self.call()
        return {"first_call_s": 0.25, "before_bytes": 0, "compiles": 0}

    def outcome(self):
        return self.found

    def run(self, calls):
        self.call()
        return [2.0] * calls

    def set(self, **args):
        self.call.set(**args)

    def memory(self):
        return {"call_bytes": 3_000_000}

    def compiles(self):
        return 5


def size_run(folder, worker=None):
    found = machine(CPU)
    samples = Samples(folder / "samples.jsonl", stamp(found))
    samples.add("machine", **found, how="process time")
    run = SizeRun(samples, CPU)
    if worker is not None:
        run.worker = worker
    return run


def here(build, **args):
    args.pop("limit", None)
    make = {"sized_call": sized_call, "Turn": Turn}[build.partition(":")[2]]
    return Here(lambda: make(**args, limit=2**40) if make is sized_call else make(**args))


@pytest.fixture
def unlimited(monkeypatch):
    monkeypatch.setattr(sizes.resource, "setrlimit", lambda *of: None)


def last(run):
    return read_rows(run.samples.path)[-1]


@pytest.mark.parametrize("encoding", ["table", "factorised", "rope"])
def test_the_truth_is_the_definition(encoding, monkeypatch):
    """Of all queries with their gradients, and of the last ones alone."""
    problem = make_problem(sized_case(encoding, SMALL), torch.float32, CPU)
    held = Gate(problem, training=True)
    found = sizes._truth(problem, True)
    assert set(found) == set(held.truth) and len(found) == 4 + len(problem.leaves)
    for name, true in held.truth.items():
        torch.testing.assert_close(found[name], true)
    monkeypatch.setattr(sizes, "_WHOLE", 10)
    monkeypatch.setattr(sizes, "_ROWS", 5)
    found = sizes._truth(problem, True)
    assert set(found) == {"output"}
    torch.testing.assert_close(found["output"], held.truth["output"][:, :, -5:])


@pytest.mark.usefixtures("unlimited")
def test_a_row_of_every_contender(tmp_path):
    run = size_run(tmp_path, here)
    for one in lineup(gpu=False, quick=False):
        if "compiled" not in one.name:
            for mode in ("forward", "training"):
                run.measure(one, SMALL, mode)
                row = last(run)
                assert (row["kind"], row["contender"], row["mode"]) == ("size", one.label, mode)
                assert row["ms"] == [2.0] * 15 and row["call_bytes"] == 3_000_000 and row["tokens"] == 24
                assert row["kept_bytes"] == (8 * 24**2 if one.name in ("softmax", GATHERED) else 0)
                assert set(row["errors"]) == set() if one.name == FLOOR else 0 < row["errors"]["output"] < 2e-6
    count = len(read_rows(run.samples.path))
    run.measure(Sized("auto"), SMALL, "training")
    assert len(read_rows(run.samples.path)) == count


@pytest.mark.usefixtures("unlimited")
def test_of_many_tokens_the_last_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "_WHOLE", 10)
    monkeypatch.setattr(sizes, "_ROWS", 5)
    run = size_run(tmp_path, here)
    run.measure(Sized("auto", "factorised"), SMALL, "training")
    row = last(run)
    assert row["kind"] == "size" and list(row["errors"]) == ["output"] and 0 < row["errors"]["output"] < 2e-6


@pytest.mark.usefixtures("unlimited")
def test_what_is_wrong_gets_no_time(tmp_path):
    def off_by_one_class(build, **args):
        worker = here(build, **args)
        call = worker.make()
        call.args[0].leaves["bias_hw"] = call.args[0].leaves["bias_hw"].roll(1, -1)
        worker.make = lambda: call
        return worker

    run = size_run(tmp_path, off_by_one_class)
    run.measure(Sized("auto"), SMALL, "training")
    row = last(run)
    assert row["kind"] == "wrong" and "error of output" in row["text"] and "ms" not in row


def test_what_fails_is_a_row_and_larger_sizes_are_not_tried(tmp_path):
    said = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 6 bytes"
    run = size_run(tmp_path, lambda build, **args: Here(None, fails=said))
    run.measure(Sized("softmax"), (28, 28), "forward")
    assert (last(run)["kind"], last(run)["text"]) == ("failed", said)
    run.worker = None  # is not called
    for size in ((56, 56), (64, 64)):
        run.measure(Sized("softmax"), size, "forward")
        assert last(run)["text"] == f"not tried: at 28x28, {said}" and last(run)["case"] == f"size {size[0]}x{size[1]}"
    run.worker = lambda build, **args: Here(None, fails="ValueError: backend 'rows' refuses: no table; use backend='auto'")
    run.measure(Sized("bias_by_row", "rope"), (28, 28), "forward")
    assert last(run)["kind"] == "refused"
    run.measure(Sized("softmax"), SMALL, "forward")  # smaller: tried
    assert last(run)["text"].startswith("ValueError")


@pytest.mark.usefixtures("unlimited")
def test_one_process_meets_all_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes.torch, "compile", lambda function, **how: function)
    run = size_run(tmp_path, here)
    run.turn(Sized("auto"), (SMALL, (3, 3), (5, 2)))
    row = last(run)
    assert row["case"] == TURN and row["contender"] == "auto compiled" and row["sizes"] == [[4, 6], [3, 3], [5, 2]]
    assert row["seconds"][0] == 0.25 and 0 < row["seconds"][2] < 5 and row["compiles"] == [0, 5, 0]
    call = Turn("auto", "table", SMALL, "cpu")
    assert call()["output"].shape == (1, 6, 24, 64)
    call.set((3, 3))
    assert call()["output"].shape == (1, 6, 9, 64)
    assert call.problem.case.name == TURN  # a name of its own would cost a graph of its own


def test_a_run_of_all_sizes(tmp_path, monkeypatch):
    """In order, and none starts when time is up."""
    done, turns, after = [], [], []
    monkeypatch.setattr(SizeRun, "precision", lambda self: done.append("precision"))
    monkeypatch.setattr(SizeRun, "measure", lambda self, *of: done.append(of))
    monkeypatch.setattr(SizeRun, "turn", lambda self, one, of: turns.append((one.name, of)))
    samples = size_run(tmp_path).samples
    assert run_sizes(samples, CPU, time.time() + 60, True, "", lambda: after.append(1))
    assert done[0] == "precision" and done[1:3] == [(Sized("auto"), SMALL, "forward"), (Sized(GATHERED), SMALL, "forward")]
    assert len(done) == 1 + 2 * 2 * 2 and len(after) == 4 and not turns
    done.clear()
    assert run_sizes(samples, CPU, time.time() + 60, False, "size 24x72", lambda: None)
    assert {size for _, size, _ in done[1:]} == {(24, 72)} and not turns
    assert run_sizes(samples, CPU, time.time() + 60, False, "in turn", lambda: None)
    assert [name for name, _ in turns] == ["auto", GATHERED, "flex"]
    assert not run_sizes(samples, CPU, 0.0, False, "", lambda: None)
    names = [one.label for one in lineup(gpu=True, quick=False)]
    assert "flex" in names and "bias_by_row" not in names and len(set(names)) == len(names)


def test_memory_limit():
    assert 2**28 < memory_limit() <= 16 * 2**30


def rows_of(who, power, mb, of="ours", mode="forward"):
    found = []
    for h, w in sizes.SIZES:
        n = h * w
        row = {"kind": "size", "case": f"size {h}x{w}", "mode": mode, "contender": who, "of": of, "tokens": n, "compiles": 1}
        row |= {"ms": [n**2 / 1e5] * 3, "call_bytes": mb * 1e6 * (n / 196) ** power, "kept_bytes": 0, "first_call_s": 7.0}
        found.append(row)
    return found


def test_growth():
    assert growth(rows_of("a", 1.25, 1.0), lambda row: row["call_bytes"]) == pytest.approx(1.25)
    assert growth(rows_of("a", 1.25, 1.0)[:4], lambda row: row["call_bytes"]) is None  # two sizes from 1000 tokens on


def test_the_section_and_the_plots(tmp_path):
    stamped = machine(CPU)
    stamped["how"] = "process time"
    rows = [{"kind": "machine"}, *rows_of("auto", 1.0, 1.5), *rows_of("softmax", 2.0, 10.0, "peer")[:5]]
    for row in rows[-5:]:
        row["kept_bytes"] = row["call_bytes"]
    text = {"mode": "forward", "contender": "softmax"}
    rows.append({"kind": "failed", "case": "size 96x96", **text, "text": "RuntimeError: can't allocate memory"})
    rows.append({"kind": "wrong", "case": "size 128x128", **text, "text": "error of output"})
    rows.append({"kind": "precision", "asked": [10**6], "found": [1_020_000], "mode": "forward"})
    rows.append(
        {"kind": "turn", "contender": "auto compiled", "sizes": [[14, 14], [28, 28]], "seconds": [5.0, 0.5], "compiles": [1, 2]}
    )
    rows = [stamped | row for row in rows]
    other = [row | {"contender": "older", "code": "other"} for row in rows_of("older", 1, 1)]
    lines = size_section([*other, *rows]).splitlines()
    for line in (
        "Of a call whose memory is known this measures 1.02 of 1.00 MB.",
        "| N | auto | softmax |",
        "| 196 (14x14) | 0.38, 1.50 | 0.38, 20.0 |",
        "| 9216 (96x96) | 849, 70.5 | out of memory |",
        "| 16384 (128x128) | 2684, 125 | wrong |",
        "| grows as | N^2.00, N^1.00 | N^2.00, N^2.00 |",
        "| 196 (14x14) | 7.00 (1) | 7.00 (1) |",
        "| | 14x14 | 28x28 | graphs |",
        "| auto compiled | 5.00 (1) | 0.50 (2) | 3 |",
    ):
        assert line in lines, line
    assert not any("older" in line for line in lines) and "### Inference: ms, MB" in lines
    assert size_section([stamped | {"kind": "machine"}]) == ""
    assert [path.name for path in plot_sizes(rows, tmp_path)] == ["sizes_forward.png"]
    assert (tmp_path / "sizes_forward.png").read_bytes().startswith(b"\x89PNG")
    assert plot_sizes([], tmp_path) == []


@pytest.mark.slow
def test_real_processes(tmp_path):
    """Memory is measured to a tenth of a megabyte, and a process that would take too much is a row."""
    run = size_run(tmp_path)
    run.precision()
    for asked, found in zip(last(run)["asked"], last(run)["found"], strict=True):
        assert abs(found - asked) < 4e5
    run.measure(Sized(GATHERED), (28, 28), "forward")
    assert last(run)["kind"] == "size" and last(run)["call_bytes"] > 6 * 4 * 784**2
    run.limit = 2**26
    run.measure(Sized("softmax"), (28, 28), "forward")
    assert last(run)["kind"] == "failed" and "memory" in last(run)["text"]
    assert Known(5)()["output"].numel() == 1
