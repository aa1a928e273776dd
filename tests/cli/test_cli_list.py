"""`vitrel list`: what a user chooses a model by."""

import json

import pytest
import timm

from helpers import command


def rows(capsys, *arguments):
    command("list").main([*arguments, "--json", "-"])
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.slow
def test_models_of_ours_and_of_timm(capsys):
    found = rows(capsys, "vitrel_vit_n8_rope_m*", "vitrel_swin_n", "deit_tiny_patch16_224", "resnet18")
    assert {"vitrel_vit_n8_rope_mixed", "vitrel_vit_n8_rope_mixed_table", "vitrel_swin_n"} < found.keys()
    ours, deit = found["vitrel_vit_n8_rope_mixed"], found["deit_tiny_patch16_224"]
    assert ours["parameters"] == sum(p.numel() for p in timm.create_model("vitrel_vit_n8_rope_mixed").parameters())
    assert (ours["size"], ours["position"], ours["elsewhere"]) == (
        "64x64", "rope_mixed", "nothing resampled, unseen offsets",
    )  # fmt: skip
    assert found["vitrel_vit_n8_rope_mixed_table"]["elsewhere"] == "table geometric"
    assert found["vitrel_swin_n"]["elsewhere"] == "nothing resampled"
    assert (deit["position"], deit["weights"]) == ("absolute", "timm/deit_tiny_patch16_224.fb_in1k")
    # 12 blocks of 12 C^2 N + 2 C N^2, the patch embedding and the head, for 197 tokens of 192 channels
    blocks = 12 * (12 * 192**2 * 197 + 2 * 192 * 197**2)
    assert deit["multiply_adds"] == pytest.approx(blocks + 196 * 192 * 768 + 192 * 1000, rel=0.01)
    assert (found["resnet18"]["position"], found["resnet18"]["elsewhere"]) == ("none", "nothing")


def test_at_sizes_and_with_weights_only(capsys):
    found = rows(capsys, "vitrel_vit_ti16_*e", "--size", "224", "320x160", "--weights-only")
    assert [*found] == ["vitrel_vit_ti16_absolute"]
    assert found["vitrel_vit_ti16_absolute"]["elsewhere"] == "224x224: nothing resampled; 320x160: absolute bicubic"
    command("list").main(["vitrel_vit_n8_none"])
    assert "vitrel_vit_n8_none" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="unknown model"):
        command("list").main(["vitrel_vti*"])
