"""tools/benchmark: usage errors name the fix, suites write samples with the machine in every row."""

import functools
import time

import pytest
import torch

from helpers.workers import Here
from tools.benchmark import __main__ as benchmark
from tools.benchmark import attention, methods, model_cases
from tools.benchmark.samples import read_rows


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """main(*arguments), with results in tmp_path; and what the engine was given."""
    given = {}

    class Fake:
        def __init__(self, samples, device):
            self.samples = samples
            given.update(device=device, threads=torch.get_num_threads())

        def run(self, cases, only, until, after):
            given.update(cases=cases, only=only, until=until)
            self.samples.add("failed", case="a", mode="b", contender="c", text="no reason")
            after()
            return False

    monkeypatch.setattr(benchmark, "Engine", Fake)
    return lambda *args: benchmark.main([*args, "--out", str(tmp_path)]), given


def test_suite(tool, tmp_path, capsys):
    main, given = tool
    main("--suite", "cpu", "--only", "Swin", "--seconds", "100", "--commit", "abc")
    assert given["only"] == "Swin" and given["device"].type == "cpu" and given["threads"] == 1
    assert given["cases"][0].name == "Swin-T, 224, batch 8, fp32"
    assert abs(given["until"] - time.time() - 100) < 20
    (folder,) = tmp_path.iterdir()
    rows = read_rows(folder / "cpu" / "samples.jsonl")
    assert [row["kind"] for row in rows] == ["machine", "failed"]
    wanted = ("device", "cpu", "threads", "torch", "timm", "python", "code")
    assert all(row[name] for row in rows for name in wanted) and {row["commit"] for row in rows} == {"abc"}
    assert "fused AdamW; processor time of the process" in rows[0]["how"]
    out, table = capsys.readouterr().out, (folder / "cpu" / "table.md").read_text()
    assert "time is up: run it again for the rest" in out and out.endswith(table)
    assert "| c | a, b | failed: no reason |" in table
    (folder / "cpu" / "table.md").unlink()
    given.clear()
    main("--suite", "cpu", "--table")
    assert not given and (folder / "cpu" / "table.md").read_text() == table


@pytest.mark.parametrize("suite", ["cpu", "kernels", "ops", "sizes", "profile"])
def test_quick_runs_have_a_folder_of_their_own(tool, tmp_path, suite):
    main, given = tool
    main("--suite", suite, "--quick")
    assert len(given["cases"]) < 20 and all((folder / f"{suite}-quick").exists() for folder in tmp_path.iterdir())


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


@pytest.mark.slow(seconds=15)
def test_quick_models(tmp_path, capsys, monkeypatch):
    """Processes and times, for real; of timm's model and of ours. All, and gates, are in test_benchmark_models.py."""
    every = model_cases._of_model

    def two(*given):
        return [one._replace(before=None) for one in every(*given) if one.name in ("timm", "ours, optimized")]

    monkeypatch.setattr(model_cases, "_of_model", two)
    benchmark.main(["--suite", "cpu", "--quick", "--only", "ViT nano table, 96", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/cpu-quick/samples.jsonl")
    rows = [row for row in read_rows(path) if row["kind"] == "time"]
    assert {row["contender"] for row in rows} == {"timm", "ours, optimized"}
    for row in rows:
        assert 1e5 < row["call_bytes"] < 1e8 < row["peak_bytes"] and min(map(min, row["rounds"])) > 0 and row["compiles"] == 0
    assert "### ViT nano table, 96, batch 2, fp32, inference" in (path.parent / "table.md").read_text()


def test_quick_kernels(tmp_path, monkeypatch, here):
    """One case of a backend that serves it and of one that refuses. All contenders are in test_benchmark_attention.py."""

    def two(*given):
        return [one for one in methods.methods(*given) if one.name in ("sdpa", "augmented_qk")]

    monkeypatch.setattr(attention, "methods", two)
    monkeypatch.setattr(benchmark, "Engine", functools.partial(benchmark.Engine, worker=Here))
    benchmark.main(["--suite", "kernels", "--quick", "--only", "quick windows", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/kernels-quick/samples.jsonl")
    ended = {row["contender"]: row["kind"] for row in read_rows(path) if row["kind"] != "machine"}
    assert ended == {"sdpa": "time", "augmented_qk": "refused"} and read_rows(path)[0]["kind"] == "machine"
    assert "- quick windows, forward: " in (path.parent / "table.md").read_text()
