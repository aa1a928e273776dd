"""`vitrel list`: what a user chooses a model by."""

import json

import pytest

from helpers import command


def rows(capsys, *arguments):
    command("list").main([*arguments, "--json", "-"])
    return {row["model"]: row for row in json.loads(capsys.readouterr().out)}


def test_models_and_their_shapes(capsys):
    found = rows(capsys, "vitrel_vit_n8_rope_m*", "vitrel_swinv2_t")
    assert [*found] == ["vitrel_vit_n8_rope_mixed", "vitrel_vit_n8_rope_mixed_table", "vitrel_swinv2_t"]
    assert found["vitrel_vit_n8_rope_mixed_table"] == {
        "model": "vitrel_vit_n8_rope_mixed_table", "pixels": "64x64", "patch": 8, "width": 96, "depth": 4, "heads": 3,
        "position": "rope_mixed+table", "weights": "",
    }  # fmt: skip
    assert found["vitrel_swinv2_t"] | {"model": ""} == {
        "model": "", "pixels": "256x256", "patch": 4, "width": 96, "depth": 12, "heads": "3,6,12,24", "position": "cpb",
        "weights": "timm/swinv2_tiny_window8_256.ms_in1k",
    }  # fmt: skip
    assert [*rows(capsys, "vitrel_vit_ti16_*e", "--weights-only")] == ["vitrel_vit_ti16_absolute"]


def test_the_page_says_that_it_is_a_part(capsys):
    tool = command("list")
    tool.main([])
    shown, _, rest = capsys.readouterr().out.strip().rpartition("\n\n")
    count, whole = rest.split(" models")[0].split(" of ")
    assert len(shown.splitlines()) == 1 + int(count) and "all: vitrel list 'vitrel*'" in rest
    tool.main(["vitrel*"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + int(whole) > 1 + int(count)
    for pattern, hint in (("vitrel_vti*", "did you mean vitrel_"), ("deit3*", r"timm.list_models\('deit3\*'\)")):
        with pytest.raises(SystemExit, match=f"vitrel has no model .*{hint}"):
            tool.main([pattern])
