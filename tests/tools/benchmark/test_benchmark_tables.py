"""Tables: those that are committed come out of their samples, ratios are fair, goals by the right rows, failures are kept."""

from pathlib import Path
from statistics import median

import pytest

from tools.benchmark.__main__ import SUITES
from tools.benchmark.attention import TOKENS
from tools.benchmark.samples import ROOT, footer, last_run, machine_lines, read_rows
from tools.benchmark.tables import (
    CPU_GOALS,
    GPU_GOALS,
    advice,
    attention_page,
    by_case,
    fastest,
    goal_lines,
    growth,
    images_per_second,
    milliseconds,
    model_page,
    ratio,
    resolution_page,
    shares,
    write,
)

MACHINE = {"device": "Zen", "cpu": "Zen", "threads": "1", "torch": "2", "timm": "1", "triton": "none", "interpreter": ""}
MACHINE |= {"python": "3.12", "commit": "abc", "code": "now", "cuda": ""}
SWIN = "Swin-T, 224, batch 8, fp32"
AGAINST = "Swin-T against ViT-S absolute, 224, batch 8, fp32"


def row(case, contender, ms, of="peer", mode="inference", call=100e6, **more):
    own = dict(rounds=[[ms, 2 * ms], [ms, ms]], batch=8, peak_bytes=900e6, call_bytes=call, reserved_bytes=None)
    own |= dict(first_call_s=61.0, compiles=1, how="compiled" if "compiled" in contender else "eager", size=[224, 224])
    return {"kind": "time", "case": case, "mode": mode, "contender": contender, "of": of} | own | MACHINE | more


ROWS = [
    {"kind": "machine", **MACHINE, "how": "by hand"},
    row(SWIN, "timm", 900.0),
    row(SWIN, "timm, compiled", 600.0, call=200e6),
    row(SWIN, "ours", 700.0, "ours"),
    row(SWIN, "ours, optimized", 250.0, "ours", call=120e6),
    row(SWIN, "timm, optimized", 200.0, "both"),
    row(AGAINST, "Swin-T: ours, optimized", 500.0, "ours"),
    row(AGAINST, "ViT-S absolute: ours, optimized", 400.0, "ours"),
    row(AGAINST, "ViT-S absolute: timm", 100.0),
    {"kind": "failed", "case": SWIN, "mode": "inference", "contender": "transformers", "text": "not installed: x"} | MACHINE,
    row(SWIN, "ours", 1.0, "ours", code="older"),
]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results" / "benchmark").glob("*/*/table.md")), ids=lambda path: path.parent.name
)
def test_committed_tables(path, tmp_path):
    """They come out of the committed samples, byte for byte."""
    suite = SUITES[path.parent.name]
    write(suite.page, suite.title, read_rows(path.with_name("samples.jsonl")), tmp_path)
    assert (tmp_path / "table.md").read_bytes() == Path(path).read_bytes()


def goals(lines):
    return {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in (line.split("|") for line in lines[2:])}


def test_goals():
    """Ours over the fastest peer, never our way on the peer's model; what was not measured says so."""
    found = goals(goal_lines(CPU_GOALS, by_case(ROWS[:-1])))
    assert found["Swin-T inference, batch 8, over the best peer"] == ["2.40x (2.40 to 2.40)", "≥ 2.2", "met"]
    assert found["Memory of a call, Swin-T, batch 8"] == ["0.60", "≤ 0.5", "missed"]
    assert found["Swin-T over ViT-S, images/s"] == ["0.80x (0.80 to 0.80)", "≥ 0.9", "missed"]
    assert found["Swin-T training over the best peer"] == ["", "≥ 1.6", "not measured"]
    rows = by_case([row("Swin-T, 224, batch 256, bf16", *of) for of in (("timm", 120.0), ("timm, compiled", 150.0))])
    rows["Swin-T, 224, batch 256, bf16", "inference"]["ours, compiled"] = row("", "ours, compiled", 100.0, "ours")
    found = goals(goal_lines(GPU_GOALS, rows))
    assert found["Swin-T inference over compiled peers"][::2] == ["1.50x (1.50 to 1.50)", "met"]
    assert found["Swin-T inference over eager peers"][::2] == ["1.20x (1.20 to 1.20)", "missed"]


def test_figures():
    p50, p90 = images_per_second(ROWS[1])
    assert p50 == pytest.approx(8 / 0.9) and p90 == pytest.approx(8 / (0.9 * 1.7))  # between the two slowest of four calls
    assert images_per_second(ROWS[1] | {"rounds": [[500.0]]}) == (16.0, 16.0)
    rows = by_case(ROWS[:-1])[SWIN, "inference"]
    assert fastest(rows, "peer")["contender"] == "timm, compiled"
    with pytest.raises(ValueError, match="empty"):
        fastest(rows, "peer", "torchvision")


def test_table(tmp_path):
    write(model_page, "Models", ROWS, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "How: by hand" in text and "Zen, 1 thread, torch 2, timm 1, python 3.12, commit abc" in text
    assert f"### {SWIN}, inference" in text and "| over timm, compiled |" in text
    line = next(line for line in text.splitlines() if line.startswith("| ours, optimized |"))
    assert line == "| ours, optimized | 32.00 | 18.82 | 2.40x (2.40 to 2.40) | 900 | 120 | 0.60 | 61.0 | 1 |"
    assert "| ours | 11.43 |" in text, "a row of older code was taken"
    assert f"| transformers | {SWIN}, inference | failed: not installed: x |" in text


def test_machine():
    found, rows = last_run([*ROWS, MACHINE | {"kind": "machine", "code": "newer"}])
    assert found["code"] == "newer" and len(rows) == 1
    assert footer(MACHINE | {"threads": "2", "commit": ""}) == "Zen, 2 threads, torch 2, timm 1, python 3.12"
    lines = machine_lines(ROWS[0])
    assert "- cpu: Zen" in lines and "- device: Zen" not in lines and lines[-1] == "How: by hand"
    with pytest.raises(ValueError, match="measure first"):
        last_run(ROWS[1:])


def test_resolutions_table(tmp_path):
    """Graphs over all sizes decide about ours; a size that a contender was not measured at stays empty."""
    rows = [ROWS[0]]
    for side, new in ((224, 1), (96, 1), (448, 1)):
        for name, of, graphs in (("ours, compiled", "ours", new), ("timm", "peer", 0)):
            if (side, name) != (96, "timm"):
                own = dict(size=[side, side], new_compiles=graphs, batch=1, mode=f"inference, {side}x{side}")
                rows.append(row("Swin-T over resolutions, batch 1", name, 3.0 * side, of, **own))
    write(resolution_page, "Models over resolutions", rows, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| ours, compiled | 3 | 3 | 183.0 | missed |" in text
    assert "| 96x96 | 3.47 (2.04), 100 MB, 61.0 s, 1 |  |" in text and (tmp_path / "swin_t.png").exists()


def timed(name, rounds, of="peer", **more):
    row = {"kind": "time", "case": "a case", "mode": "forward", "contender": name, "of": of, "rounds": rounds, "host": rounds}
    return row | {"call_bytes": 2_000_000, "tokens": 1000, "flops": 1e9} | more


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


def test_table_of_attention(tmp_path):
    stamped = {"device": "GPU X", "threads": "1", "torch": "2", "triton": "3", "interpreter": "", "code": "abc"}
    rows = [{"kind": "machine", "driver": "580.1", "commit": "c0ffee", "how": "events", **stamped}]
    rows += [timed("sdpa", [[2.0]] * 7), timed("softmax", [[4.0]] * 7), timed("triton", [[1.0]] * 7, "ours")]
    rows += [timed("sdpa without bias", [[0.5]] * 7, "floor"), timed("triton", [[7.0]] * 7, "ours", code="older")]
    rows.append({"kind": "failed", "case": "a case", "mode": "forward", "contender": "flex", "text": "out of\nmemory | 9"})
    rows.append({"kind": "sdpa", "case": "N=12", "mode": "training", "contender": "default", "rounds": [[1.0]],
                 "call_bytes": 5e6, "errors": {"output": 1e-3}, "ran": ["aten::_efficient", "fmha_kernel"]})  # fmt: skip
    write(attention_page, "Kernels", [stamped | row for row in rows], tmp_path)
    text = (tmp_path / "table.md").read_text()
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


def rows_of(who, power, mb, of="ours", mode="forward"):
    found = []
    for h, w in TOKENS:
        n = h * w
        row = {"kind": "size", "case": f"size {h}x{w}", "mode": mode, "contender": who, "of": of, "tokens": n, "compiles": 1}
        row |= {"rounds": [[n**2 / 1e5] * 3], "call_bytes": mb * 1e6 * (n / 196) ** power, "kept_bytes": 0, "first_call_s": 7.0}
        found.append(row)
    return found


def test_growth():
    assert growth(rows_of("a", 1.25, 1.0), lambda row: row["call_bytes"]) == pytest.approx(1.25)
    assert growth(rows_of("a", 1.25, 1.0)[:4], lambda row: row["call_bytes"]) is None  # two sizes from 1000 tokens on


def test_cost_against_size(tmp_path):
    rows = [ROWS[0], *rows_of("auto", 1.0, 1.5), *rows_of("softmax", 2.0, 10.0, "peer")[:5]]
    for row in rows[-5:]:
        row["kept_bytes"] = row["call_bytes"]
    text = {"mode": "forward", "contender": "softmax"}
    rows.append({"kind": "failed", "case": "size 96x96", **text, "text": "RuntimeError: can't allocate memory"})
    rows.append({"kind": "wrong", "case": "size 128x128", **text, "text": "error of output"})
    rows += [{"kind": "precision", "asked": n * 10**6, "call_bytes": n * 1_020_000, "mode": "forward"} for n in (1, 16)]
    for size, seconds, graphs in ((14, 5.0, 1), (28, 0.5, 2)):
        turn = {"kind": "turn", "contender": "auto compiled", "size": [size, size], "mode": f"forward, {size}x{size}"}
        rows.append(turn | {"first_call_s": seconds, "new_compiles": graphs, "case": "sizes in turn"})
    other = [row | {"contender": "older", "code": "other"} for row in rows_of("older", 1, 1)]
    write(attention_page, "Kernels", [MACHINE | row for row in [*other, *rows]], tmp_path)
    lines = (tmp_path / "table.md").read_text().splitlines()
    for line in (
        "Of a call whose memory is known this measures 1.02 of 1.00 MB, 16.32 of 16.00 MB.",
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
    assert [path.name for path in tmp_path.glob("*.png")] == ["sizes_forward.png"]
    assert (tmp_path / "sizes_forward.png").read_bytes().startswith(b"\x89PNG")


def test_shares_are_of_the_medians():
    found = shares({"qkv": [1.0, 3.0, 100.0], "norm": [9.0, 0.0, 1.0]})
    assert found == {"qkv": 75.0, "norm": 25.0}
