"""tools/benchmark: usage errors say the way out, suites get their samples with the machine in every row."""

import importlib
import time

import pytest
import torch

from tools.benchmark import __main__ as benchmark
from tools.benchmark.samples import read_rows


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """main(*arguments), with results in tmp_path; and what the suite of models was given."""
    module, given = benchmark, {}

    def run(samples, device, until, quick, only, folder):
        given.update(device=device, until=until, quick=quick, only=only, folder=folder, threads=torch.get_num_threads())
        samples.add("time", case="a", mode="b", contender="c")
        return False

    def write(rows, folder):
        given["rows"] = rows
        (folder / "table.md").write_text("the table\n")

    for name in ("run_models", "write_models"):
        monkeypatch.setattr(f"tools.benchmark.model_suite.{name}", {"run_models": run, "write_models": write}[name])
    return lambda *args: module.main([*args, "--out", str(tmp_path)]), given


def test_suite(tool, tmp_path, capsys):
    main, given = tool
    main("--suite", "cpu", "--only", "Swin", "--seconds", "100", "--commit", "abc")
    assert given["only"] == "Swin" and not given["quick"] and given["device"].type == "cpu" and given["threads"] == 1
    assert abs(given["until"] - time.time() - 100) < 20
    (folder,) = tmp_path.iterdir()
    assert given["folder"] == folder / "cpu"
    rows = read_rows(folder / "cpu" / "samples.jsonl")
    assert [row["kind"] for row in rows] == ["machine", "time"] == [row["kind"] for row in given["rows"]]
    wanted = ("device", "cpu", "threads", "torch", "timm", "python", "code")
    assert all(row[name] for row in rows for name in wanted) and {row["commit"] for row in rows} == {"abc"}
    assert "fused AdamW; processor time of the process" in rows[0]["how"]
    out = capsys.readouterr().out
    assert "time is up: run it again for the rest" in out and out.endswith("the table\n")
    given.clear()
    main("--suite", "cpu", "--table")
    assert list(given) == ["rows"] and len(given["rows"]) == 2


def test_quick_runs_have_a_folder_of_their_own(tool, tmp_path):
    main, given = tool
    main("--suite", "cpu", "--quick")
    assert given["quick"] and given["folder"].name == "cpu-quick"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "--suite"),
        (("--suite", "all"), "invalid choice: 'all'"),
        (("--suite", "cpu", "--only", "("), "'(' is no regular expression"),
        (("--suite", "cpu", "--table"), "samples.jsonl is not there: measure first"),
        (("--suite", "gpu"), "--suite gpu needs a GPU, and PyTorch sees none here; --suite cpu measures"),
    ],
)
def test_bad_usage(tool, args, text, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        tool[0](*args)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_every_suite_is_there():
    for suite in benchmark.SUITES.values():
        module = importlib.import_module(f"tools.benchmark.{suite.module}")
        assert all(callable(getattr(module, f"{verb}_{suite.name}")) for verb in ("run", "write"))


@pytest.mark.slow
def test_quick_models(tmp_path, capsys):
    """Processes, gates and times, for real."""
    benchmark.main(["--suite", "cpu", "--quick", "--only", "ViT nano table, 96", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/cpu-quick/samples.jsonl")
    rows = [row for row in read_rows(path) if row["kind"] == "time"]
    assert {row["contender"] for row in rows} == {"timm", "timm, optimized", "ours", "ours, optimized"}
    for row in rows:
        assert 1e5 < row["call_bytes"] < 1e8 < row["peak_bytes"] and min(map(min, row["rounds"])) > 0 and row["compiles"] == 0
    assert "### ViT nano table, 96, batch 2, fp32, inference" in (path.parent / "table.md").read_text()
