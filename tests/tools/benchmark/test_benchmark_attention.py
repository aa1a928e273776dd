"""Suites of attention: peers compute what they are compared in, gates see what is wrong, every contender ends as a row."""

import collections
import sys
import types

import pytest
import torch

from helpers.workers import Here, by_contender
from tools.benchmark import attention
from tools.benchmark import methods as field
from tools.benchmark.attention import (
    SDPA_MODES,
    TURN,
    Known,
    Sized,
    attention_call,
    backend_case,
    cpu_repeats,
    kernel_cases,
    last_rows,
    lineup,
    memory_limit,
    ops_cases,
    sdpa_case,
    sdpa_shapes,
    sized_case,
    sized_shape,
    turn_case,
    whole_truth,
)
from tools.benchmark.engine import Case, Engine, check
from tools.benchmark.methods import (
    FLOOR,
    GATHERED,
    force_warps,
    gathered_sdpa,
    global_flex,
    global_softmax,
    methods,
    outcome,
    window_flex,
    window_softmax,
)
from tools.benchmark.samples import Samples, machine, read_rows
from tools.benchmark.shapes import CPU_SHAPES, QUICK_SHAPES, SHAPES, Problem, hard_shape, make_problem
from tools.benchmark.worker import Repeats, Worker
from vitrel.grid import Grid

CPU = torch.device("cpu")
WINDOWS, TABLE, DECOMPOSED = QUICK_SHAPES
SMALL = (4, 6)
BRIEF = Repeats(1, 2, 0.0, 1)
ENCODINGS = ("table", "factorized", "decomposed", "rope")
SDPA = methods(TABLE, gpu=False)[0]


def held(shape, dtype=torch.float32, training=True):
    """Return the gate for a shape: (function, exact, changed problem) -> text of the error, "" if it passes."""
    problem = make_problem(shape, dtype, CPU, seed=1)
    truth = whole_truth(problem, training)
    case = Case("held", "", (), (), str(dtype).removeprefix("torch."), largest=True)
    yardstick = check(outcome(problem, SDPA.function, training), truth, case, False).errors

    def text(function, exact=True, problem=problem):
        return check(outcome(problem, function, training), truth, case, exact, yardstick).text

    text.problem = problem
    return text


def small(shape):
    """The hard shape, smaller."""
    hard = hard_shape(shape)
    return hard if shape.window else hard._replace(grid=Grid(3, 5, shape.grid.prefix))


def changed(**changes):
    """SDPA, with the tables of its terms changed."""

    def run(shape, inputs, terms, fixed):
        tables = tuple(table._replace(**{k: f(getattr(table, k)) for k, f in changes.items()}) for table in terms.tables)
        return SDPA.function(shape, inputs, terms._replace(tables=tables), fixed)

    return run


@pytest.mark.parametrize("shape", QUICK_SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_wrong_table_does_not_pass(shape, dtype):
    """By one class, or one that is not there."""
    which = "query" if shape is DECOMPOSED else "bias"
    dim = -2 if shape is DECOMPOSED else -1
    for training in (False, True):
        text = held(small(shape), dtype, training)
        assert text(SDPA.function) == ""
        assert "output" in text(changed(**{which: lambda x: x.roll(1, dim)}), exact=False)
        assert "output" in text(changed(**{which: lambda x: 0 * x}), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["table", "rope"])
@pytest.mark.parametrize("grid", [Grid(6, 9), Grid(7, 5), Grid(2, 8), Grid(2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_peers_in_windows_are_right(encoding, grid):
    shape = WINDOWS._replace(encoding=encoding, grid=grid, batch=2)
    for shift in (WINDOWS.shift, (0, 0)):
        text = held(shape._replace(shift=shift))
        assert text(window_softmax) == text(gathered_sdpa) == ""
    assert held(shape, training=False)(window_flex) == ""


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("prefix", [0, 1])
def test_global_peers_are_right(encoding, prefix):
    if encoding == "decomposed" and prefix:
        pytest.skip("its peers have no prefix tokens")
    text = held(TABLE._replace(encoding=encoding, grid=Grid(4, 7, prefix), batch=2, heads=3))
    assert text(gathered_sdpa) == text(global_softmax) == ""


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["table", "factorized", "rope"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_global_flex_is_right(encoding, prefix):
    text = held(TABLE._replace(encoding=encoding, grid=Grid(4, 7, prefix), batch=2), training=False)
    assert text(global_flex) == ""


def test_peers_look_their_bias_up():
    """By the cached index: if it is wrong, so is their output."""
    text = held(TABLE, training=False)
    transposed = text.problem._replace(fixed=(text.problem.fixed[0].mT.contiguous(),))
    for function in (gathered_sdpa, global_softmax):
        assert "error of output" in text(function, False, transposed)
    assert make_problem(TABLE, torch.float32, CPU, keep=False).fixed == ()


def test_shapes():
    """Names are unique, floors can cut their windows, gates are hard, and problems have the tables the terms need."""
    for shapes in (SHAPES, CPU_SHAPES):
        assert len({shape.name for shape in shapes}) == len(shapes)
    for shape in (*SHAPES, *CPU_SHAPES):
        hard = hard_shape(shape)
        assert hard.grid.h != hard.grid.w
        assert all(getattr(hard, name) == getattr(shape, name) for name in ("encoding", "window", "width"))
        if shape.window:
            assert all(n % m and n > m and s for n, m, s in zip(hard.grid[:2], hard.window, hard.shift, strict=True))
    assert all(shape.tokens % (shape.window[0] * shape.window[1]) == 0 for shape in SHAPES if shape.window)
    assert all(shape.flops(True) < 2e11 for shape in CPU_SHAPES)  # a few seconds of one core
    problem = make_problem(TABLE, torch.float16, CPU)
    assert problem.leaves["bias_hw"].dtype == torch.float32 and abs(problem.leaves["bias_hw"].std() - 0.5) < 0.1
    assert isinstance(problem.to(torch.float64), Problem) and SHAPES[0].flops(True) == 3.5 * SHAPES[0].flops(False)
    assert set(outcome(problem, SDPA.function, True)) == {"output", "q", "k", "v", "bias_hw"}


def test_repeats_of_a_cpu():
    whole, padded = (next(shape for shape in CPU_SHAPES if size in shape.name) for size in ("56x56", "60x50"))
    names = {one.name for one in methods(padded, gpu=False)}
    assert FLOOR not in names and GATHERED in names  # the floor cuts no window that is not whole
    assert FLOOR in {one.name for one in methods(whole, gpu=False)}
    assert cpu_repeats(padded, False).warmup == 20 and cpu_repeats(padded, False).rounds == 7
    assert cpu_repeats(next(shape for shape in CPU_SHAPES if "64x64, table" in shape.name), True).warmup == 2


def test_who_is_measured(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    names = [one.name for one in methods(TABLE, gpu=False)]
    assert names[0] == "sdpa" and {"auto", "augmented_qk", "softmax", GATHERED} < set(names) and len(set(names)) == len(names)
    assert "triton" not in names and not any("compiled" in name for name in names)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "triton" in [one.name for one in methods(TABLE, gpu=False)]
    compiled = {one.name for one in methods(TABLE._replace(compiled=True), gpu=False) if one.compiled}
    assert compiled == {"sdpa compiled", "softmax compiled", f"{GATHERED} compiled", "flex compiled"}
    large = TABLE._replace(grid=Grid(40, 40))
    assert not {"flex", "reference"} & {one.name for one in methods(large, gpu=False)}


def test_suites_have_unique_cases():
    for cases in (ops_cases(False, False), ops_cases(True, False), kernel_cases(True, False), kernel_cases(False, True)):
        keys = [(case.name, case.visits[0].mode) for case in cases]
        assert len(set(keys)) == len(keys)
        assert all(len({one.name for one in case.contenders}) == len(case.contenders) for case in cases)
    kinds = [case.kind for case in ops_cases(False, False)]
    assert list(dict.fromkeys(kinds)) == ["time", "precision", "size", "turn"]
    assert [case.dtype for case in kernel_cases(True, False) if case.kind == "sdpa"][::12] == ["bfloat16", "float16"]


def test_every_backend_ends_as_a_row(engine):
    """Refused, or gated in hard problems too, and timed in all rounds."""
    case = backend_case(DECOMPOSED, "training", gpu=False, quick=True)
    engine.measure(case)
    timed, refused = by_contender(engine, "time"), by_contender(engine, "refused")
    assert set(timed) | set(refused) == {one.name for one in case.contenders}
    assert {"sdpa", "auto", "augmented_qk", GATHERED, "softmax", FLOOR} <= set(timed)
    assert "no backward on a CPU" in refused["flex"]["text"]
    assert all(len(row["rounds"]) == 3 for row in timed.values()) and timed["sdpa"]["tokens"] == 15
    call = attention_call(DECOMPOSED, "sdpa", True, "float32", "cpu", hard=("float32", "float16"))
    assert {"hard float16: query_h", "hard float32: output", "output", "q"} <= set(call.checked(call()))


def test_a_backend_that_is_wrong_at_a_hard_size_alone_gets_no_time(engine, monkeypatch):

    def wrong(shape, *of):
        return SDPA.function(shape, *of) * (1 if shape.batch == 1 else 2)

    monkeypatch.setattr(attention, "methods", lambda shape, gpu: [SDPA, field.Method("ours", wrong, "ours")])
    engine.measure(backend_case(TABLE, "forward", gpu=False, quick=True))
    assert by_contender(engine, "wrong")["ours"]["text"].startswith("error of hard float32: output")
    assert set(by_contender(engine, "time")) == {"sdpa"}


def test_sdpa_kernels(engine):
    """Which of them serves a bias, and what of it is not right."""
    for mode in SDPA_MODES:
        engine.measure(sdpa_case(sdpa_shapes(False)[0], mode, BRIEF))
        found = by_contender(engine, "sdpa")
        assert {"default", "math"} <= set(found) and found["math"]["mode"] == mode
        assert found["math"]["ran"] and 0 < max(found["math"]["errors"].values()) < 1e-5
        assert "output" in found["math"]["errors"]
    failed = by_contender(engine, "failed")
    assert "RuntimeError: No viable backend" in failed["cudnn"]["text"]


def test_warps_are_forced(monkeypatch):
    Tile = collections.namedtuple("Tile", "rows keys warps stages")
    kernels = types.ModuleType("vitrel.ops.backends.made_up")
    kernels.window_tile, kernels._table_tile, kernels.other = lambda n: Tile(n, n, 2, 1), lambda: (64, 2, 3), lambda: (1, 2, 3)
    kernels._key_tile = object()  # a kernel's own function is no Python function
    monkeypatch.setitem(sys.modules, "vitrel.ops.backends.made_up", kernels)
    monkeypatch.setattr(field, "_KERNELS", ("made_up",))
    force_warps(8)
    assert kernels.window_tile(16) == Tile(16, 16, 8, 1) and kernels.window_tile(16).warps == 8
    assert kernels._table_tile() == (64, 8, 3) and kernels.other() == (1, 2, 3)
    monkeypatch.setattr(field, "_KERNELS", ("bias_by_row",))
    with pytest.raises(RuntimeError, match="no function that chooses a tile"):
        force_warps(4)


@pytest.mark.parametrize("encoding", ["table", "factorized", "rope"])
def test_the_truth_of_the_last_rows(encoding):
    problem = make_problem(sized_shape(encoding, SMALL), torch.float32, CPU)
    found = last_rows(problem, 5)
    torch.testing.assert_close(found["output"], whole_truth(problem, False)["output"][:, :, -5:])


def test_a_row_of_every_size(engine):
    for mode in attention.MODES:
        known = [one for one in lineup(gpu=False, quick=False) if "compiled" not in one.name]
        engine.measure(sized_case(known, SMALL, mode))
        found = by_contender(engine, "size")
        assert set(found) == {one.label for one in known}
        for one in known:
            row = found[one.label]
            assert (row["mode"], row["tokens"], row["call_bytes"]) == (mode, 24, 3_000_000) and len(row["rounds"]) == 1
            assert row["kept_bytes"] == (8 * 24**2 if one.name in ("softmax", GATHERED) else 0)
            assert row["errors"] == {} if one.name == FLOOR else 0 < row["errors"]["output"] < 2e-6


def test_of_many_tokens_the_last_are_checked(engine, monkeypatch):
    monkeypatch.setattr(attention, "_WHOLE", 10)
    monkeypatch.setattr(attention, "_ROWS", 5)
    engine.measure(sized_case([Sized("auto", "factorized")], SMALL, "training"))
    errors = by_contender(engine, "size")["auto, factorized"]["errors"]
    assert list(errors) == ["output"] and 0 < errors["output"] < 2e-6
    Here.wrong = {"auto": 1 + 1e-5}
    engine.measure(sized_case([Sized("auto")], SMALL, "training"))
    assert by_contender(engine, "wrong")["auto"]["text"].startswith("error of output 1.0e-05")


def test_one_process_meets_all_sizes(engine, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    case = turn_case(False, (SMALL, (3, 3), (5, 2)))
    assert [one.name for one in case.contenders] == ["auto compiled", f"{GATHERED} compiled", "flex compiled"]
    assert {visit.set["shape"].name for visit in case.visits} == {TURN}  # a name of its own would cost a graph of its own
    engine.measure(Case(**vars(case) | {"contenders": case.contenders[:2]}))
    rows = [row for row in read_rows(engine.samples.path) if row["contender"] == "auto compiled"]
    assert [row["size"] for row in rows] == [[4, 6], [3, 3], [5, 2]]
    assert all(row["kind"] == "turn" and row["first_call_s"] > 0 for row in rows)


def test_order_of_sizes():
    """Larger ones know the smaller; processes are limited."""
    cases = [case for case in ops_cases(False, False) if case.kind == "size"]
    assert cases[0].after == () and cases[2].after == ("size 14x14", "size 28x28")
    assert {one.args["limit"] > 2**28 for one in cases[0].contenders} == {True} and memory_limit() <= 16 * 2**30
    names = [one.label for one in lineup(gpu=True, quick=False)]
    assert "flex" in names and "bias_by_row" not in names and len(set(names)) == len(names)


@pytest.mark.slow
def test_real_processes(tmp_path):
    """Memory is measured to a tenth of a megabyte, and a process that would take too much is a row."""
    engine = Engine(Samples(tmp_path / "samples.jsonl", machine(CPU)), CPU, Worker)
    engine.measure(next(case for case in ops_cases(False, True) if case.kind == "precision"))
    rows = read_rows(engine.samples.path)
    assert len(rows) == 3 and all(abs(row["call_bytes"] - row["asked"]) < 4e5 for row in rows)
    case = sized_case([Sized("softmax")], (28, 28), "forward")
    [limited] = case.contenders
    limited = limited._replace(args=limited.args | {"limit": 2**26}, truth=None)
    engine.measure(Case(**vars(case) | {"contenders": (limited,)}))
    assert "memory" in by_contender(engine, "failed")["softmax"]["text"]
    assert Known(5)()["output"].numel() == 1
