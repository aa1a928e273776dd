"""The page of an evaluation, and the pictures in it."""

import base64
import csv
import gzip
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import torch

from helpers import ROOT, command
from helpers.predictions import predicted
from vitrel.evaluate.predictions import write_predictions
from vitrel.evaluate.report.html import (
    QUERIES,
    REACH,
    collect_pictures,
    contents,
    curve_name,
    encode_lattice,
    encode_map,
    write_html,
)
from vitrel.evaluate.results import TRANSLATION, aggregate, curves, line_key, read_csv
from vitrel.evaluate.settings import Sweep
from vitrel.files import guarded
from vitrel.grid import Grid
from vitrel.inspect.attention import Layer, offset_mean, record

QUICKSTART = ROOT / "results" / "quickstart" / "results.csv"

EVIL = "</script><script>alert(1)</script>"


@pytest.fixture
def folder(tmp_path):
    shutil.copy(QUICKSTART, tmp_path / "results.csv")
    return tmp_path


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def edit(folder, change):
    frame = pd.read_csv(folder / "results.csv", keep_default_na=False)
    change(frame).to_csv(folder / "results.csv", index=False)


def lines(folder, name, columns, label="vitrel_swin_n", policy="none", size="64x64", **values):
    about = {
        "label": label,
        "seed": 0,
        "img_size": size,
        "protocol": "scale",
        "policy": policy,
        "crop_pct": 1.0,
        "data": "shapes",
    }
    frame = pd.DataFrame([about | dict(zip(values, one, strict=True)) for one in zip(*values.values(), strict=True)])
    path = folder / f"{name}.csv"
    before = [pd.read_csv(path, keep_default_na=False)] if path.exists() else []
    pd.concat([*before, frame[list(columns)]]).to_csv(path, index=False)


def test_the_page_is_whole_and_asks_for_nothing(folder):
    path = write_html(folder, "a title")
    page = path.read_text("utf-8")
    assert path == folder / "report.html"
    own = page.replace(re.search(r"<script>\n/\*\*\n\* plotly.*?</script>", page, re.S)[0], "")
    assert not re.search(r"https?://|src=|@import|url\(|\{\{\w+\}\}", own)
    assert "<title>a title</title>" in page and "plotly.js v" in page
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "results.csv"]


def test_numbers_are_those_of_the_results(folder):
    data, table = data_of(write_html(folder).read_text("utf-8")), aggregate(read_csv(folder / "results.csv"))
    assert [row["top1"] for row in data["rows"]] == table["top1"].tolist()
    assert [row["intervals"]["top1"] for row in data["rows"]] == table[["low", "high"]].values.tolist()
    expected = {
        curve_name(label, policy): rows["top1"].tolist() for label, policy, rows in curves(table.reset_index(drop=True))
    }
    assert {c["name"]: [data["rows"][i]["top1"] for i in c["rows"]] for c in data["curves"]} == expected
    assert data["title"] == folder.name and data["protocols"] == ["scale", "canvas"]
    assert [size["name"] for size in data["sizes"]] == ["48x48", "64x64", "64x96", "96x96", "128x128"]
    assert dict((key, value) for key, _, value in data["common"])["data"] == "shapes"
    assert "device" not in [column["key"] for column in data["columns"]]


def test_other_metrics_have_intervals_over_seeds(folder):
    def second_seed(frame):
        return pd.concat([frame, frame.assign(seed=1, nll=frame["nll"] + 0.2)])

    edit(folder, second_seed)
    rows = read_csv(folder / "results.csv")
    data = contents(rows, folder, "")
    low, high = data["rows"][0]["intervals"]["nll"]
    # two values 0.2 apart: the mean, and Student's 12.706 times half their distance
    assert (low + high) / 2 == pytest.approx(data["rows"][0]["nll"], abs=1e-5)
    assert (high - low) / 2 == pytest.approx(12.7062 * 0.1, rel=1e-3)
    assert data["rows"][0]["seeds"] == 2
    alone = contents([row for row in rows if row["seed"] == 0], folder, "")
    assert list(alone["rows"][0]["intervals"]) == ["top1"]


def test_metrics_without_values_are_not_offered(folder):
    edit(folder, lambda frame: frame.drop(columns="ece"))  # as in files of before
    keys = [metric["key"] for metric in contents(read_csv(folder / "results.csv"), folder, "")["metrics"]]
    assert "top1" in keys and "retention" in keys and "ece" not in keys
    edit(folder, lambda frame: frame.assign(ece=1.5))
    assert "ece" in [metric["key"] for metric in contents(read_csv(folder / "results.csv"), folder, "")["metrics"]]


def test_unknown_columns_are_no_matter(folder):
    edit(folder, lambda frame: frame.assign(something_new="x"))
    assert write_html(folder).exists()


def test_names_from_files_are_text(folder):
    edit(folder, lambda frame: frame.assign(label=frame["label"].replace("vitrel_swin_n", EVIL)))
    row = next(row for row in read_csv(folder / "results.csv") if row["label"] == EVIL)
    write_predictions({line_key(row): predicted([EVIL], [1], 2)}, folder)
    page = write_html(folder, f"<b>{EVIL}").read_text("utf-8")
    assert EVIL not in page and "<b>" not in re.search(r"<title>(.*?)</title>", page)[1]
    assert page.count("</script>") == 4
    data = data_of(page)
    assert EVIL in {row["label"] for row in data["rows"]} and data["classes"]["names"] == [EVIL]


def test_classes_add_up_over_seeds(folder):
    edit(folder, lambda frame: pd.concat([frame, frame.assign(seed=1)]))
    rows = [row for row in read_csv(folder / "results.csv") if (row["label"], row["protocol"]) == ("vitrel_swin_n", "scale")]
    places = [(row["img_size"], row["seed"]) for row in rows]
    hits = {("64x64", 0): [9, 1], ("64x64", 1): [8, 2], ("96x96", 0): [4, 0]}
    keys = {place: line_key(rows[places.index(place)]) for place in hits}
    write_predictions({keys[place]: predicted(["a", "nan"], hits[place]) for place in hits}, folder)
    found = contents(rows, folder, "")["classes"]
    assert found["names"] == ["a", "nan"]
    assert [(row["img_size"], row["n"], row["hits"]) for row in found["rows"]] == [
        ("64x64", [20, 20], [17, 3]),
        ("96x96", [10, 10], [4, 0]),
    ]


def test_translation_is_averaged_over_seeds(folder):
    for top1 in (80.0, 90.0):
        lines(folder, "translation", TRANSLATION, translation=[4], n=[100], top1=[top1], top1_low=[0.0], top1_high=[0.0])
    (found,) = contents(read_csv(folder / "results.csv"), folder, "")["translation"]
    assert (found["translation"], found["top1"], found["seeds"], found["n"]) == (4, 85.0, 2, 100)
    assert found["low"] == pytest.approx(85 - 12.7062 * 5, abs=0.01) and found["high"] == 100.0


def test_pictures_are_taken_in_as_they_are(folder):
    content = gzip.compress(b'{"models": []}')
    (folder / "pictures.json.gz").write_bytes(content)
    page = write_html(folder).read_text("utf-8")
    text = re.search(r'id="pictures">(.*?)</script>', page, re.S)[1]
    assert base64.b64decode(text) == content


def test_folders_without_results_are_refused(tmp_path, folder, capsys):
    with pytest.raises(FileNotFoundError, match=r"no results\.csv in .*give the folder of an evaluation"):
        write_html(tmp_path / "none")
    edit(folder, lambda frame: frame[:0])
    with pytest.raises(ValueError, match=r"results\.csv holds no rows: evaluate first"):
        write_html(folder)
    with pytest.raises(SystemExit, match=r"error: .*holds no rows"):
        command("report").main([str(folder)])


def test_the_tool_writes_the_page(folder, capsys):
    command("report").main([str(folder), "--title", "mine"])
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert "<h1>mine</h1>" in (folder / "report.html").read_text("utf-8")


def test_claims_stand_on_the_page_with_their_verdicts(folder):
    assert contents(read_csv(folder / "results.csv"), folder, "t")["claims"] == []
    first = "- **It is <b>better</b>.** This holds (1 of 1 pairs; 64x64 scale).\n  Ahead: a +2.0 ±1.0.\n"
    (folder / "claims.md").write_text(first + "- **And so.** This is not shown.\n", "utf-8")
    assert data_of(write_html(folder).read_text("utf-8"))["claims"] == [
        {"claim": "It is <b>better</b>.", "verdict": "This holds (1 of 1 pairs; 64x64 scale). Ahead: a +2.0 ±1.0."},
        {"claim": "And so.", "verdict": "This is not shown."},
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script of the page")
def test_downloads_hold_no_formulas():
    cells = ["=1+1", "+a", "@a", "\t=a", "'=a", "-0.5 0.5", "-1.5", "a=b", "'a'", 'say "no"', -1.5, None, True]
    page = """
        globalThis.document = { getElementById: () => ({ textContent: '{"sizes": [], "rows": []}' }) };
        eval(require("fs").readFileSync(process.argv[1], "utf-8") + "; globalThis.text = csvText");
        process.stdout.write(text(JSON.parse(process.argv[2])));
    """
    script_of_page = ROOT / "vitrel" / "evaluate" / "report" / "page" / "base.js"
    command = ["node", "-e", page, str(script_of_page), json.dumps([[cell, "end"] for cell in cells])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = list(csv.reader(io.StringIO(done.stdout, newline="")))
    assert [line[0] for line in found] == [str({None: "", True: "true"}.get(cell, guarded(cell))) for cell in cells]


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def unpacked(text, kind, shape):
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), kind).reshape(shape).astype("float32"))


def lattice(item):
    steps = unpacked(item["values"], np.int8, item["shape"])
    values = steps / 127 * torch.tensor(item["scale"])[:, None, None]
    return values.masked_fill(steps == -128, float("nan"))


def weights(item, which="weights"):
    scale = torch.tensor(item["scale"]).reshape(item["shape"][:2])
    return unpacked(item[which], np.uint8, item["shape"]) / 255 * scale[..., None]


def layer_of(h, w, prefix=0, heads=2):
    n = prefix + h * w
    logits = torch.randn(2, 1, heads, n, n, generator=torch.Generator().manual_seed(0))
    return Layer(
        "attn", Grid(h, w, prefix), None, (0, 0), torch.arange(n)[None], logits.softmax(-1), logits.mul(2).softmax(-1), logits
    )


def test_lattices_come_back():
    values = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 1.0, 50.0])[:, None, None]
    values[0, 2, 3] = float("nan")
    found = lattice(encode_lattice(values))
    assert found[0, 2, 3].isnan() and found.isnan().sum() == 1
    error = (found - values).abs().nan_to_num().amax((1, 2)) / values.nan_to_num().abs().amax((1, 2))
    assert error.max() < 0.51 / 127


def test_large_lattices_are_cut_in_the_middle():
    values = torch.zeros(1, 2 * REACH + 7, 9)
    values[0, REACH + 3, 4] = 1.0
    item = encode_lattice(values)
    assert item["shape"] == [1, 2 * REACH + 1, 9] and item["full"] == [2 * REACH + 7, 9]
    assert lattice(item)[0, REACH, 4] == 1.0  # offset 0 stays in the middle


def test_maps_come_back():
    layer = layer_of(3, 5, prefix=1)
    item = encode_map(layer, 1)
    assert item["queries"] == list(range(16)) and item["tokens"] is None and item["step"] == 1
    for which, true in (("weights", layer.weights), ("content", layer.content)):
        assert (weights(item, which) - true[1, 0].transpose(0, 1)).abs().max() < 0.51 / 255
    mean = encode_map(layer, 1, mean=True)
    assert mean["shape"] == [16, 1, 16]
    assert (weights(mean)[:, 0] - layer.weights[1, 0].mean(0)).abs().max() < 0.51 / 255


def test_maps_of_many_patches_keep_some_queries():
    layer = layer_of(20, 30, prefix=1, heads=1)
    item = encode_map(layer, 0)
    step, queries = item["step"], torch.tensor(item["queries"])
    assert step == 2 and queries[0] == 0 and len(queries) == 1 + 10 * 15 <= QUERIES
    assert ((queries[1:] - 1) // 30 % 2).eq(1).all() and ((queries[1:] - 1) % 30 % 2).eq(1).all()
    assert (weights(item)[5, 0] - layer.weights[0, 0, 0, queries[5]]).abs().max() < 0.51 / 255


def test_windows_say_where_their_tokens_lie(trained):
    model = trained("vitrel_swin_n", img_size=(64, 64)).model
    layer = record(model, torch.randn(1, 3, 26, 36))[1]
    item = encode_map(layer, 0)
    assert sorted(item["queries"]) == list(range(layer.grid.h * layer.grid.w))
    assert any(-1 in tokens for tokens in item["tokens"])
    for row in (0, 7, len(item["queries"]) - 1):
        tokens = item["tokens"][item["windows"][row]]
        slot = tokens.index(item["queries"][row])
        true = layer.weights[0, item["windows"][row], :, slot]
        assert (weights(item)[row] - true).abs().max() < 0.51 / 255


def test_a_sweep_is_collected(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_table", seed=1), trained("vitrel_vit_n8_rope_axial")]
    with torch.no_grad():
        models[0].model.blocks[0].position.relative_position_bias_table.normal_()
    sweep = Sweep("noise", ((32, 32), (32, 48)), n=4)
    path = collect_pictures(models, sweep, tmp_path)
    found = read(path)
    assert path == tmp_path / "pictures.json.gz" and found["left_out"] == []
    table, rope = found["models"]
    assert (table["label"], table["seed"], rope["label"]) == ("vitrel_vit_n8_table", 0, "vitrel_vit_n8_rope_axial")
    assert table["layers"] == [f"blocks.{i}.attn" for i in range(len(models[0].model.blocks))]
    places = {(item["size"], item["policy"]) for item in table["lattices"]}
    assert places == {("32x32", "none"), *(("32x48", policy) for policy in ("geometric", "clip", "bicubic"))}
    assert len(table["maps"]) == 2 * 2 * len(table["layers"]) and table["images"] == ["left", "above"]
    first = next(item for item in table["lattices"] if item["layer"] == 0 and item["size"] == "32x32")
    layer = record(models[0].model, torch.zeros(1, 3, 32, 32))[0]
    assert torch.allclose(lattice(first), offset_mean(layer, layer.position), atol=0.05, equal_nan=True)
    assert all(found["pictures"][key].startswith("data:image/png;base64,") for key in table["maps"][0]["pictures"])


def test_the_budget_holds_and_what_is_left_out_is_named(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table")]
    path = collect_pictures(models, Sweep("noise", ((32, 32), (64, 64)), n=4), tmp_path, budget=40_000)
    found = read(path)
    assert path.stat().st_size < 44_000
    assert any("vitrel_vit_n8_table at 64x64: attention of" in text for text in found["left_out"])
    assert found["models"][0]["lattices"]


def test_models_without_attention_have_the_reason(trained, noise, tmp_path):
    import timm

    net = timm.create_model("resnet10t", num_classes=3).eval()
    models = [trained("vitrel_vit_n8_none", model_args={}), trained("vitrel_vit_n8_none", label="net")]
    object.__setattr__(models[1], "model", net)
    found = read(collect_pictures(models, Sweep("noise", ((32, 32),), n=4), tmp_path))["models"]
    assert found[0]["error"] is None and "no attention that can be seen in resnet10t" in found[1]["error"]


@pytest.mark.parametrize("protocols", [("scale", "canvas"), ("canvas",)])
def test_one_protocol_is_shown(trained, noise, tmp_path, protocols):
    collect_pictures([trained("vitrel_vit_n8_none")], Sweep("noise", ((32, 32),), protocols, n=4), tmp_path)
    assert {asked["protocol"] for asked in noise.asked} == {protocols[0]}
