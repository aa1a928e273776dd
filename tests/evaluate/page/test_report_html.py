"""The page of an evaluation, and the numbers of its figures."""

import base64
import csv
import gzip
import io
import json
import re
import shutil
import subprocess

import pandas as pd
import pytest

from helpers import ROOT
from helpers.predictions import predicted
from vitrel.evaluate.page import class_words, contents, curve_name, write_html
from vitrel.evaluate.page.charts import library
from vitrel.evaluate.page.pictures import FORMAT
from vitrel.evaluate.results.aggregate import aggregate, curves
from vitrel.evaluate.results.statistics import estimate_of_means
from vitrel.evaluate.results.table import line_key, read_csv, translation_columns, write_predictions

QUICKSTART = ROOT / "results" / "shapes_classified" / "results.csv"

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
        "task": "classification",
        "label": label,
        "seed": 0,
        "img_size": size,
        "protocol": "scale",
        "budget": "",
        "policy": policy,
        "crop_pct": 1.0,
        "data": "shapes",
    }
    frame = pd.DataFrame([about | dict(zip(values, one, strict=True)) for one in zip(*values.values(), strict=True)])
    path = folder / f"{name}.csv"
    before = [pd.read_csv(path, keep_default_na=False)] if path.exists() else []
    pd.concat([*before, frame[list(columns)]]).to_csv(path, index=False)


@pytest.mark.slow
def test_the_page_is_whole_and_asks_for_nothing(folder):
    path = write_html(folder, "a title")
    page = path.read_text("utf-8")
    assert path == folder / "report.html"
    own = page.replace(library(), "")
    assert len(own) < len(page) - 500_000 and not re.search(r"https?://|src=|@import|url\((?!\$)|\{\{ \w+", own)
    assert "<title>a title</title>" in page and len(page) < 3_000_000
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "report.json", "results.csv"]


@pytest.mark.slow
def test_numbers_are_those_of_the_results(folder):
    rows = read_csv(folder / "results.csv")
    data, table = contents(rows, folder, "t"), aggregate(rows)
    assert [row["top1"] for row in data["rows"]] == [row["top1"] for row in table]
    assert [row["intervals"]["top1"] for row in data["rows"]] == [[row["low"], row["high"]] for row in table]
    several = {label for label, policy, _ in curves(table) if policy in ("clip", "geometric")}
    expected = {curve_name(label, policy if label in several else "none"): part for label, policy, part in curves(table)}
    drawn = data_of(write_html(folder).read_text("utf-8"))["points"]
    for name, part in expected.items():
        assert [point["top1"] for point in drawn if point["curve"] == name] == [row["top1"] for row in part]
    assert "vitrel_swin_n" in expected and data["protocols"] == ["scale", "canvas"]  # nothing is resampled: no policy is named
    assert data["sizes"] == ["48x48", "64x64", "64x96", "96x96", "128x128"]
    assert dict((key, value) for key, value, _ in data["common"])["data"] == "shapes"
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
    edit(folder, lambda frame: frame.assign(ece=float("nan")))
    keys = contents(read_csv(folder / "results.csv"), folder, "")["metrics"]
    assert "top1" in keys and "retention" in keys and "ece" not in keys
    edit(folder, lambda frame: frame.assign(ece=1.5))
    assert "ece" in contents(read_csv(folder / "results.csv"), folder, "")["metrics"]


@pytest.mark.slow
def test_names_from_files_are_text(folder):
    edit(folder, lambda frame: frame.assign(label=frame["label"].replace("vitrel_swin_n", EVIL)))
    row = next(row for row in read_csv(folder / "results.csv") if row["label"] == EVIL)
    write_predictions({line_key(row): predicted([EVIL], [1], 2)}, folder)
    page = write_html(folder, f"<b>{EVIL}").read_text("utf-8")
    assert EVIL not in page and "<b>" not in re.search(r"<title>(.*?)</title>", page)[1]
    assert page.count("</script>") == 5
    data = data_of(page)
    assert EVIL in {curve["label"] for curve in data["curves"]} and data["classes"]["names"] == [EVIL]


def test_classes_add_up_over_seeds(folder):
    edit(folder, lambda frame: pd.concat([frame, frame.assign(seed=1)]))
    rows = [row for row in read_csv(folder / "results.csv") if (row["label"], row["protocol"]) == ("vitrel_swin_n", "scale")]
    places = [(row["img_size"], row["seed"]) for row in rows]
    hits = {("64x64", 0): [9, 1], ("64x64", 1): [8, 2], ("96x96", 0): [4, 0]}
    keys = {place: line_key(rows[places.index(place)]) for place in hits}
    write_predictions({keys[place]: predicted(["a", "nan"], hits[place]) for place in hits}, folder)
    found = contents(rows, folder, "")["figures"]["classes"]
    assert found["names"] == ["a", "nan"]
    assert [(row["img_size"], row["n"], row["hits"]) for row in found["rows"]] == [
        ("64x64", [20, 20], [17, 3]),
        ("96x96", [10, 10], [4, 0]),
    ]


def test_translation_is_averaged_over_seeds(folder):
    for seed, top1 in enumerate((80.0, 90.0)):
        given = {"seed": [seed], "translation": [4], "n": [100], "top1": [top1], "top1_low": [0.0], "top1_high": [0.0]}
        lines(folder, "translation", translation_columns("classification"), **given)
    (found,) = contents(read_csv(folder / "results.csv"), folder, "")["figures"]["translation"]
    assert (found["translation"], found["top1"], found["seeds"], found["n"]) == (4, 85.0, 2, 100)
    low, high = estimate_of_means([[80.0, 90.0]], [], 100).of_share()
    assert (found["low"], found["high"]) == pytest.approx((low, high)) and low < 50


@pytest.mark.slow
def test_pictures_lie_in_the_page_with_images_or_without(folder):
    lattice = {"values": "abc", "size": "64x64", "policy": "none"}
    model = {"maps": [{"pictures": ["0"], "size": "64x64"}], "lattices": [lattice], "similar": []}
    seen = {"picture": "0", "size": "64x64", "protocol": "scale", "shape": [64, 64], "class": "a", "label": "m"}
    model |= {"error": None, "left_out": [], "label": "m"}
    stored = {"format": FORMAT, "models": [model], "seen": [seen], "thumbnails": {"a.jpg": "data:image/webp;base64,AA"}}
    stored |= {"scenes": [], "legend": [], "left_out": []}
    stored |= {"words": {}, "blobs": {"0": "data:image/webp;base64,AA", "abc": "BB"}}
    (folder / "pictures.json.gz").write_bytes(gzip.compress(json.dumps(stored).encode()))

    def inside(page):
        return json.loads(gzip.decompress(base64.b64decode(re.search(r'id="pictures">(.*?)</script>', page, re.S)[1])))

    assert inside(write_html(folder).read_text("utf-8")) == stored
    bare = inside(write_html(folder, images=False).read_text("utf-8"))
    assert bare["blobs"] == {"abc": "BB"} and bare["models"][0]["lattices"] == [lattice]
    assert "data:image" not in json.dumps(bare) and bare["models"][0]["maps"][0]["pictures"] == bare["seen"] == []


@pytest.mark.slow
def test_pictures_of_another_version_are_left_out(folder):
    (folder / "pictures.json.gz").write_bytes(gzip.compress(b'{"format": 1, "models": []}'))
    assert 'id="pictures"></script>' in write_html(folder).read_text("utf-8")


@pytest.mark.slow
def test_the_numbers_of_the_figures_are_written_beside_the_page(folder):
    home = next(row for row in read_csv(folder / "results.csv") if row["img_size"] == row["train_size"])
    write_predictions({line_key(home): predicted(["a", "b"], [9, 2])}, folder)
    write_html(folder)
    found = json.loads((folder / "report.json").read_text("utf-8"))
    assert found == contents(read_csv(folder / "results.csv"), folder, "")["figures"]
    swin = [one for one in found["points"] if one["curve"] == "vitrel_swin_n" and one["protocol"] == "scale"]
    rows = [
        row
        for row in aggregate(read_csv(folder / "results.csv"))
        if (row["label"], row["protocol"]) == ("vitrel_swin_n", "scale")
    ]
    assert [one["top1"] for one in swin] == [row["top1"] for row in rows]
    assert [one["top1_low"] for one in swin] == pytest.approx([row["low"] for row in rows])
    assert (found["classes"]["rows"][0]["n"], found["classes"]["rows"][0]["hits"]) == ([10, 10], [9, 2])


def test_speed_has_an_interval_over_batches(folder):
    edit(folder, lambda frame: frame.assign(infer_samples_per_sec=100.0, infer_samples_per_sec_half=7.0))
    data = contents(read_csv(folder / "results.csv"), folder, "")
    assert data["rows"][0]["intervals"]["infer_samples_per_sec"] == [93.0, 107.0]
    assert {(one["infer_samples_per_sec_low"], one["infer_samples_per_sec_high"]) for one in data["figures"]["points"]} == {
        (93, 107)
    }


def test_shares_are_percentages(folder):
    rows = read_csv(folder / "results.csv")
    data, table = contents(rows, folder, "t"), aggregate(rows)
    for key in ("retention", "unseen"):
        assert [row[key] for row in data["rows"]] == pytest.approx([100 * row[key] for row in table])
    names = {column["key"]: column["name"] for column in data["columns"]}
    assert names["retention"] == "retention %" and names["ece"] == "ECE %"
    edit(folder, lambda frame: frame.assign(pad_fraction="0 0.125"))
    assert contents(read_csv(folder / "results.csv"), folder, "t")["rows"][0]["pad_fraction"] == "0 12.5"


def test_classes_are_named_in_words():
    named = class_words(["011_snapdragon", "n01440764", "wall_flower", "7", "1_rose", "2_rose", "n99999999"], {"7": "tulip, a"})
    assert named == {"011_snapdragon": "snapdragon", "n01440764": "tench", "wall_flower": "wall flower", "7": "tulip"}


def test_folders_without_results_are_refused(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"no results\.csv in .*give the folder of an evaluation"):
        write_html(tmp_path / "none")
    edit(folder, lambda frame: frame[:0])
    with pytest.raises(ValueError, match=r"results\.csv has no rows: evaluate first"):
        write_html(folder)


@pytest.mark.slow
def test_the_page_has_the_title(folder):
    assert "<h1>mine</h1>" in write_html(folder, "mine").read_text("utf-8")


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script of the page")
def test_downloads_are_read_as_csv():
    cells = ["=1+1", "two\nlines", "a,b", "-0.5 0.5", "-1.5", "a=b", "'a'", 'say "no"', -1.5, None, True]
    page = """
        const source = require("fs").readFileSync(process.argv[1], "utf-8");
        eval(/function csvText[^]*?\\n}\\n/.exec(source)[0] + "; globalThis.text = csvText");
        process.stdout.write(text(JSON.parse(process.argv[2])));
    """
    script_of_page = ROOT / "vitrel" / "evaluate" / "page" / "page.js"
    command = ["node", "-e", page, str(script_of_page), json.dumps([[cell, "end"] for cell in cells])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = list(csv.reader(io.StringIO(done.stdout, newline="")))
    assert [line[0] for line in found] == [str({None: "", True: "true"}.get(cell, cell)) for cell in cells]
