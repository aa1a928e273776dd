import difflib
import random

import pytest
import timm

import vitrel
from helpers import each
from vitrel.common.names import nearest
from vitrel.evaluate.checkpoint import load_model
from vitrel.train.tuning import check_registered

ROPES = [f"vitrel_vit_s16_rope_{kind}" for kind in ("axial", "mixed", "normalized")]


@each(
    ("name", "expected"),
    [
        ("rope", ["rope_axial", "rope_mixed", "rope_normalized"]),
        ("log", ["log_decay"]),
        ("mixed", ["rope_mixed"]),
        ("tabel", ["table"]),
        ("sin_cos", ["sincos"]),
        ("Shaw", ["shaw"]),
        ("look_here", ["lookhere"]),
        ("quadtree", []),
        ("", []),
    ],
)
def test_encodings(name, expected):
    assert nearest(name, vitrel.POSITIONS) == expected


@each(
    "ask",
    [vitrel.create_model, check_registered, load_model],
    ids=["create_model", "train", "evaluate"],
)
def test_a_model_with_half_its_encoding_named(ask):
    with pytest.raises(ValueError, match=rf"unknown model 'vitrel_vit_s16_rope'.* {', '.join(ROPES)}"):
        ask("vitrel_vit_s16_rope")


def test_the_last_word_counts_where_the_others_are_missing():
    known = ["model.optim.lr_base_size", "model.optim.schedule.warmup_lr", "model.optim.lr", "trainer.max_epochs", "data.data"]
    assert nearest("lr", known, 1) == nearest("optim.lr", known, 1) == nearest("trainer.lr", known, 1) == ["model.optim.lr"]
    assert nearest("vitrel_swin_rope", timm.list_models("vitrel*"), 1) == ["vitrel_swin_b_rope_axial"]


@pytest.mark.slow
def test_slips_are_found_at_least_as_often_as_by_spelling_alone():
    draw, known, found = random.Random(0), timm.list_models(), {nearest: 0, difflib.get_close_matches: 0}
    for name in draw.sample(known, 50):
        place = draw.randrange(len(name))
        other = {"left out": "", "another": draw.choice("aeint1248_"), "doubled": 2 * name[place]}
        slip = name[:place] + draw.choice([*other.values()]) + name[place + 1 :]
        for way in found:
            found[way] += name in way(slip, known, 3)
    assert found[nearest] >= max(48, found[difflib.get_close_matches])


def test_few_are_named_and_the_cutoff_holds():
    known = ["alpha", "beta", "gamma"]
    assert nearest("zzz", known) == [] and len(nearest("zzz", known, 2, cutoff=0.0)) == 2
    assert nearest("a", ["ab", "abc", "abcd"], 2) == ["ab", "abc"]
