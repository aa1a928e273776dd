"""Tables of models: goals by the right rows, images per second and memory as measured, failures kept."""

import pytest

from tools.benchmark.model_table import CPU_GOALS, GPU_GOALS, by_case, fastest, goal_lines, images_per_second, write_models
from tools.benchmark.resolution_table import write_resolutions
from tools.benchmark.samples import footer, last_run, machine_lines

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
    write_models(ROWS, tmp_path)
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
    write_resolutions(rows, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| ours, compiled | 3 | 3 | 183.0 | missed |" in text
    assert "| 96x96 | 3.47 (2.04), 100 MB, 61.0 s, 1 |  |" in text and (tmp_path / "swin_t.png").exists()
