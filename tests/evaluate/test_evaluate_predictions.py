"""Predictions of every row, image by image: the file, and two rows compared on the same images."""

import argparse
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from helpers import ROOT
from helpers.predictions import predicted
from vitrel.cli import report
from vitrel.evaluate.images import ImageList
from vitrel.evaluate.metrics import (
    LEFT_OUT,
    NO_CLASS,
    PREDICTIONS,
    Predicted,
    compare_pairs,
    mcnemar,
    paired_interval,
    read_predictions,
    t_interval,
    write_predictions,
)
from vitrel.evaluate.report import compare_folders, over_seeds
from vitrel.evaluate.results import line_key, read_csv, write_csv

LABELS = (0, 1, 1, LEFT_OUT)


def row(classes, labels=LABELS, confidence=0.5):
    n = len(classes)
    images = ImageList([f"a\n{i} é.jpg" for i in range(n)], ["left", "right"])
    answers = np.array(labels, np.int32), np.array(classes, np.int32), np.full(n, confidence, np.float32)
    return Predicted(images, *answers, np.arange(n) % 2 == 0)


def test_pairs_are_compared_among_the_classes_of_the_data_where_asked(tmp_path):
    a, b = row([0, NO_CLASS, NO_CLASS, LEFT_OUT]), row([0, 1, 0, LEFT_OUT])
    a = replace(a, among=np.array([True, True, True, True]))  # the last image could not be read
    write_predictions({("a",): a, ("b",): b}, tmp_path)
    rows = read_predictions(tmp_path).rows
    assert rows["a",].right_among.tolist() == [True, True, True, False]
    assert rows["b",].right_among.tolist() == rows["b",].right.tolist()  # it has no other classes
    found = [compare_pairs(rows["a",], rows["b",], among) for among in (False, True)]
    assert [(pair.only_a, pair.only_b, pair.n) for pair in found] == [(0, 1, 3), (1, 0, 3)]


def test_the_file_gives_back_what_was_written(tmp_path):
    assert read_predictions(tmp_path) is None
    rows = {("a", "0"): row([0, 1, NO_CLASS, LEFT_OUT]), ("b", ""): row([1, LEFT_OUT, 0, LEFT_OUT], (0, -1, 1, -1), 0.1)}
    write_predictions(rows, tmp_path)
    back = read_predictions(tmp_path)
    assert (back.names, back.classes, [*back.rows]) == (*rows["a", "0"].images, [*rows])
    assert back.labels.tolist() == [*LABELS]  # though the second row could not read one of them
    for key, one in rows.items():
        assert back.rows[key].predicted.tolist() == one.predicted.tolist()
        assert back.rows[key].confidence == pytest.approx(one.confidence, rel=1e-3)
        assert back.rows[key].top5.tolist() == one.top5.tolist()
    assert back.rows["a", "0"].right.tolist() == [True, True, False, False]
    assert [counts.tolist() for counts in back.rows["a", "0"].class_counts()] == [[1, 2], [1, 1]]
    assert [counts.tolist() for counts in back.rows["b", ""].class_counts()] == [[1, 1], [0, 0]]
    assert [path.name for path in tmp_path.iterdir()] == [PREDICTIONS]
    write_predictions({}, tmp_path)
    assert read_predictions(tmp_path) is None


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"no zip"])
def test_a_damaged_file_is_named(tmp_path, damage):
    write_predictions({("a",): row([0, 1, 0, 1])}, tmp_path)
    (tmp_path / PREDICTIONS).write_bytes(damage((tmp_path / PREDICTIONS).read_bytes()))
    with pytest.raises(ValueError, match=rf"{PREDICTIONS} is damaged: delete it"):
        read_predictions(tmp_path)


def test_many_classes_take_more_bytes(tmp_path):
    write_predictions({("a",): row([69_999], [69_999])}, tmp_path)
    assert read_predictions(tmp_path).rows["a",].right.all()


@pytest.mark.parametrize(
    ("counts", "low", "high", "p"),
    # R package contingencytables: Cavo et al. 2012 and Bentur et al. 2009, of Fagerland, Lydersen and Laake's chapter 8
    [((161, 6, 16), -12.40, -0.54, 0.052479), ((21, 1, 7), -51.7, -2.6, 0.0703)],
)
def test_paired_interval_and_test_agree_with_published_ones(counts, low, high, p):
    assert paired_interval(*counts) == pytest.approx((low, high), abs=0.05)
    assert mcnemar(*counts[1:]) == pytest.approx(p, abs=5e-5)


def test_paired_interval_at_the_ends():
    low, high = paired_interval(50, 0, 0)
    assert high == pytest.approx(-low) and high == pytest.approx(100 * 1.96**2 / (50 + 1.96**2), abs=0.01)
    assert paired_interval(20, 20, 0)[1] == 100 and paired_interval(20, 20, 0)[0] > 60
    assert paired_interval(90, 30, 12) == pytest.approx([-end for end in paired_interval(90, 12, 30)][::-1])
    assert mcnemar(0, 0) == mcnemar(7, 7) == 1 and mcnemar(0, 10) == pytest.approx(2 / 2**10)
    assert 0 < mcnemar(20_000, 20_400) < 0.05  # of as many images as ImageNet's, without an overflow
    with pytest.raises(ValueError, match="counts of at most n"):
        paired_interval(5, 3, 3)


def test_pairs_are_counted_on_the_images_that_both_saw_and_agree_with_a_bootstrap():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    flip = [np.where(rng.random(400) < share, 1 - labels, labels) for share in (0.2, 0.3)]
    a, b = (row(np.where(np.arange(400) == at, LEFT_OUT, guess), labels) for at, guess in zip((3, 7), flip, strict=True))
    pair = compare_pairs(a, b)
    seen = np.delete(np.arange(400), [3, 7])
    right = [(guess == labels)[seen] for guess in flip]
    assert (pair.n, pair.both, pair.neither) == (398, (right[0] & right[1]).sum(), (~right[0] & ~right[1]).sum())
    assert (pair.only_a, pair.only_b) == ((right[0] & ~right[1]).sum(), (right[1] & ~right[0]).sum())
    each = right[0].astype(float) - right[1]
    assert pair.difference == pytest.approx(100 * each.mean())
    drawn = 100 * each[rng.integers(0, 398, (4000, 398))].mean(1)
    assert (pair.low, pair.high) == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.6)
    assert compare_pairs(b, a).p == pair.p < 0.05


def test_an_interval_over_seeds_is_no_narrower_than_that_of_the_images_or_the_seeds():
    pairs = [compare_pairs(predicted("ab", hits), predicted("ab", (5, 5))) for hits in ((9, 8), (7, 6), (8, 8))]
    mean, low, high = over_seeds(pairs)
    assert mean == pytest.approx(100 * (7 + 3 + 6) / 3 / 20)
    of_images = [sum(getattr(pair, end) for pair in pairs) / 3 for end in ("low", "high")]
    of_seeds = t_interval([pair.difference for pair in pairs])
    assert low < min(of_images[0], of_seeds[0]) and high > max(of_images[1], of_seeds[1])
    assert over_seeds(pairs[:1]) == (pairs[0].difference, pairs[0].low, pairs[0].high)


def test_other_images_or_labels_are_refused_by_name():
    one = predicted("ab", (5, 5))
    for images, reported in (
        (
            ImageList([*one.images.names[:-1], "new.jpg"], one.images.classes),
            r"2 are only .*such as 'b/19\.jpg'",
        ),
        (ImageList(one.images.names[::-1], one.images.classes), "order differs"),
        (ImageList(one.images.names, ["a", "c"]), "classes differ"),
    ):
        with pytest.raises(ValueError, match=reported):
            compare_pairs(one, replace(one, images=images))
    labels = one.labels.copy()
    labels[2] = 1
    with pytest.raises(ValueError, match=r"labels of 1 images differ, such as 'a/2\.jpg' \(0 and 1\)"):
        compare_pairs(one, replace(one, labels=labels))


@pytest.fixture
def folders(tmp_path):
    """folders(name, rows, hits): a folder of an evaluation with these rows, of which each has hits[i] per class, of 10."""
    base = read_csv(ROOT / "results" / "quickstart" / "results.csv")[0]

    def make(name, changes, hits):
        (tmp_path / name).mkdir()
        rows = [base | {"label": "m", "img_size": "64x64", "protocol": "scale", "policy": "none"} | one for one in changes]
        rows = [one | {"top1": sum(own) / 20} for one, own in zip(rows, hits, strict=True)]
        write_csv(rows, tmp_path / name / "results.csv")
        write_predictions({line_key(one): predicted("ab", own) for one, own in zip(rows, hits, strict=True)}, tmp_path / name)
        return tmp_path / name

    return make


def test_rows_of_two_folders_are_matched_and_written(folders, tmp_path, capsys):
    sizes = [{"img_size": "64x64"}, {"img_size": "96x64"}]
    a = folders("a", [one | {"seed": seed} for one in sizes for seed in (0, 1)], [(9, 9), (8, 8), (7, 7), (6, 6)])
    seeds = [{"label": "other", "seed": seed} for seed in (1, 2, 0)]
    b = folders("b", [*seeds, {"label": "other", "img_size": "32x32"}], [(5, 5), (6, 6), (5, 6), (1, 1)])
    lines = compare_folders(a, b)
    assert [(line["img_size"], line["seed"], line["only_a"]) for line in lines] == [
        ("64x64", "0", 7), ("64x64", "1", 6), ("64x64", "mean of 2", None)
    ]  # fmt: skip
    assert lines[-1]["difference"] == pytest.approx((35 + 30) / 2) and lines[-1]["p"] is None
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    report.run(parser.parse_args([str(a), str(b), "--out", str(tmp_path / "out")]))
    text = (tmp_path / "out" / "compare.md").read_text("utf-8")
    assert text.strip() == capsys.readouterr().out.strip() and "+35.00" in text and "Tango" in text
    frame = pd.read_csv(tmp_path / "out" / "compare.csv")
    assert frame["only_a"].tolist()[:2] == [7, 6] and set(frame["a"]) == {"m"} and set(frame["b"]) == {"other"}
    assert sorted(path.name for path in a.iterdir()) == [PREDICTIONS, "results.csv"]
    with pytest.raises(ValueError, match="--out is for the comparison"):
        report.run(parser.parse_args([str(a), "--out", str(tmp_path)]))


def test_policies_that_differ_are_matched_by_the_best_and_labels_by_name(folders):
    a = folders("a", [{}, {"label": "n"}], [(5, 5), (9, 9)])
    b = folders("b", [{"policy": "clip"}, {"policy": "bicubic"}, {"label": "n"}], [(4, 4), (6, 6), (9, 8)])
    assert [(line["a"], line["b"], line["policy"], line["difference"]) for line in compare_folders(a, b)] == [
        ("m", "m", "best: none / bicubic", -10),
        ("n", "n", "none", 5),
    ]
    c = folders("c", [{"label": "x"}], [(5, 5)])
    with pytest.raises(ValueError, match="labels are m, n and x"):
        compare_folders(a, c)
    (c / PREDICTIONS).unlink()
    with pytest.raises(ValueError, match=r"c has no predictions\.npz"):
        compare_folders(a, c)
