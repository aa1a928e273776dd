import pytest
import timm

import vitrel
from helpers import each
from vitrel.common.names import nearest

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


def test_a_model_with_half_its_encoding_named():
    with pytest.raises(ValueError, match=rf"unknown model 'vitrel_vit_s16_rope'.* {', '.join(ROPES)}"):
        vitrel.create_model("vitrel_vit_s16_rope")


def test_the_last_word_counts_where_the_others_are_missing():
    known = ["model.optim.lr_base_size", "model.optim.initial_lr", "model.optim.lr", "trainer.max_epochs", "data.data"]
    assert nearest("lr", known, 1) == nearest("optim.lr", known, 1) == nearest("trainer.lr", known, 1) == ["model.optim.lr"]
    assert nearest("vitrel_swin_rope", timm.list_models("vitrel*"), 1) == ["vitrel_swin_b_rope_axial"]
