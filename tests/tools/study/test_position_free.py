"""The trial of position-free features: its links, models without class token, mIoU, and tables that are those of the rows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from helpers.pictures import write_classes
from tools.study import position_free
from tools.study.pages import ROOT
from vitrel import load, save
from vitrel.evaluate.checkpoint import trained_model
from vitrel.models.vit import ViT


def test_evaluation_folders_may_be_named_by_id_alone(tmp_path):
    for place in ("train/n01_tench", "train/n02_dog", "val/n01", "val/n02"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"{Path(place).parent}.jpg").touch()
    for _ in range(2):  # a second run finds the links
        linked = position_free.linked(tmp_path / "train", tmp_path / "val", tmp_path / "linked")
    found = [str(path.relative_to(linked)) for of_class in linked.glob("*/*") for path in of_class.iterdir()]
    assert sorted(found) == [
        "train/n01_tench/train.jpg", "train/n02_dog/train.jpg", "val/n01_tench/val.jpg", "val/n02_dog/val.jpg"
    ]  # fmt: skip


def rows_of(kinds, **columns):
    """Rows of (encoding, loss, seed), with other values than the file's in some columns."""
    rows = pd.read_csv(position_free.RESULTS, keep_default_na=False).iloc[[0] * len(kinds)]
    return rows.assign(**dict(zip(("encoding", "loss", "seed"), zip(*kinds, strict=True), strict=True)), **columns)


def lines_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_tables_have_a_line_for_each_model_in_order_with_means_over_seeds(tmp_path):
    kinds = [("none", "features", "0"), ("alibi", "features", "0"), ("alibi", "features", "1"), ("absolute", "teacher", "")]
    rows_of(kinds, share=[0.01, 0.02, 0.04, 0.5]).to_csv(tmp_path / "results.csv", index=False)
    (name, table), *_ = position_free.tables(tmp_path / "results.csv")
    assert name == "shares" and [line[:4] for line in lines_of(table)] == [
        ["`absolute`", "the teacher", "1", "50.00"],
        ["`alibi`", "and on features", "2", "3.00 ± 1.41"],
        ["`none`", "and on features", "1", "1.00"],
    ]


def test_gains_compare_students_of_one_seed_and_models_without_class_token_stand_apart(tmp_path):
    kinds = [("table", loss, seed) for seed in "01" for loss in ("logits", "features")]
    kinds += [("table", "logits", "2"), ("table_bare", "fitted", "")]  # of seed 2 the other is still to be trained
    rows_of(kinds, miou=[30.0, 33.0, 40.0, 45.0, 99.0, 20.0]).to_csv(tmp_path / "results.csv", index=False)
    found = dict(position_free.tables(tmp_path / "results.csv"))
    assert [(line[0], line[-1]) for line in lines_of(found["gains"])] == [("`table`", "4.00 ± 1.41")]
    assert [(*line[:3], line[-1]) for line in lines_of(found["bare"])] == [("`table`", "fitted, not trained", "1", "20.00")]
    assert len(lines_of(found["shares"])) == 2


@pytest.mark.parametrize("position", ["alibi", "table", "rope_mixed", "none"])
def test_without_the_class_token_patches_are_as_where_none_attends_to_it(position, tmp_path):
    whole = ViT(32, 8, num_classes=3, embed_dim=16, depth=2, num_heads=2, position=position).eval()
    with torch.no_grad():
        for name, value in whole.named_parameters():
            if "position" in name:
                value.normal_()
    save(whole, tmp_path / f"{position}.safetensors")
    bare = load(position_free.fitted(tmp_path, tmp_path, f"{position}_bare", tmp_path)).eval()
    mask = torch.ones(17, 17, dtype=torch.bool)
    mask[1:, 0] = False
    images = torch.randn(2, 3, 32, 32)
    masked = whole.forward_intermediates(images, [1], intermediates_only=True, attn_mask=mask)
    assert bare.cls_token is None and bare.global_pool == "avg"
    torch.testing.assert_close(bare.forward_intermediates(images, [1], intermediates_only=True), masked)


@pytest.fixture
def scenes(tmp_path):
    """Street scenes of two classes, told apart by color; a third of their pixels have none."""
    (tmp_path / "classes.txt").write_text("dark\nlight\n")
    for split, n in (("train", 10), ("val", 3)):
        for kind in ("images", "masks"):
            (tmp_path / kind / split).mkdir(parents=True)
        for number in range(n):
            light = np.zeros((160, 208), np.uint8)
            light[:, 16 * (3 + number % 8) :] = 1
            Image.fromarray(light * 150 + 50).convert("RGB").save(tmp_path / f"images/{split}/{number}.png")
            light[:48] = 255
            Image.fromarray(light).save(tmp_path / f"masks/{split}/{number}.png")
    return tmp_path


def test_a_row_has_the_columns_of_the_file_and_a_linear_head_finds_what_colors_tell(scenes, tmp_path, monkeypatch):
    for split, n in (("train", 8), ("val", 4)):
        write_classes(tmp_path / "data" / split, ("dark", "light"), [f"{number}.png" for number in range(n)])
    monkeypatch.setattr(position_free, "SCENES", None)
    monkeypatch.setattr(position_free, "IMAGES", 8)
    monkeypatch.setattr(position_free, "PROBED", (None, None))
    model = ViT(32, 16, num_classes=2, embed_dim=16, depth=1, num_heads=2, position="none").eval()
    found = position_free.measured(trained_model(model, "any", img_size=(160, 160)), tmp_path / "data", scenes)
    assert [*found] == [*pd.read_csv(position_free.RESULTS).columns[4:-4]]
    assert found["miou"] > 95  # the border between two patches is interpolated


def test_the_tables_of_the_page_are_those_of_the_rows():
    page = (ROOT / position_free.PAGE).read_text("utf-8")
    for name, table in position_free.tables(position_free.RESULTS):
        assert f"<!-- {name} -->\n\n{table}\n" in page
