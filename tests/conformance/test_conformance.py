"""`vitrel.check` against closed forms and loops, faults that it must name, right models that must pass, and its errors."""

import json
import subprocess
import sys
from contextlib import suppress

import pytest
import timm
import torch
from conformance.faults import (
    FAULTS,
    RIGHT,
    Noise,
    Rope,
    Table,
    Tiny,
    swin,
    swin_without_mask,
)
from timm.models.twins import LocallyGroupedAttn

import vitrel
from helpers import ROOT, command, each
from vitrel.conformance import measure
from vitrel.conformance.run import CHECKS
from vitrel.conformance.subject import Subject
from vitrel.conformance.survey import survey
from vitrel.conformance.vectors import pseudo_random

QUICK = [name for name in CHECKS if name not in ("compile", "export")]
tool = command("check")


def examined(model, size=(48, 64)):
    return survey(model.eval(), size)


def test_rotations_are_those_of_the_closed_form():
    turn = measure.rotation(examined(Rope()).attentions[0])
    frequency = torch.tensor([100 ** (-t / 4) for t in range(4)], dtype=torch.float64)
    expected = torch.zeros(2, 8, dtype=torch.float64)
    expected[0, :4], expected[1, 4:] = frequency, frequency
    assert turn.pairs == "half" and torch.allclose(turn.steps[0, 0], expected, atol=1e-6)
    assert turn.prefix < 1e-6 and turn.spread.max() < 1e-6


def test_biases_are_those_of_the_table():
    model = Table()
    found = measure.bias(examined(model).attentions[0])
    for dy, dx in ((0, 0), (-5, 7), (3, -2)):  # query minus key
        row = model.table[(dy + 15) * 31 + dx + 15]
        assert torch.allclose(found.by_offset[:, dy + 5, dx + 7].float(), row, atol=1e-5)
    assert found.spread < 1e-6 and found.window == (6, 8)


def test_tokens_lie_where_a_loop_over_windows_puts_them():
    found = examined(swin((28, 56), window_size=3, always_partition=False), (28, 56)).attentions[1]  # 7 x 14 tokens
    assert found.grid == (7, 14)
    seen = sorted(found.tokens[found.tokens >= 0].tolist())
    assert seen == list(range(98))


def test_windows_of_a_shifted_block():
    found = examined(swin(), (56, 112)).attentions[1]  # 14 x 28 tokens, windows of 7, shifted by 3
    expected = []
    for top in range(2):
        for left in range(4):
            at = [((top * 7 + y + 3) % 14) * 28 + (left * 7 + x + 3) % 28 for y in range(7) for x in range(7)]
            expected.append(at)
    assert found.tokens.tolist() == expected and found.heads == 2
    for window, tokens in enumerate(expected[:: len(expected) - 1]):
        which = window * (len(expected) - 1)
        for i, a in enumerate(tokens):
            for j, b in enumerate(tokens):
                (ya, xa), (yb, xb) = divmod(a, 28), divmod(b, 28)
                inside = ya - yb == i // 7 - j // 7 and xa - xb == i % 7 - j % 7
                assert bool(found.visible[which, i, j]) == inside


@pytest.mark.slow(seconds=10)
@each("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_every_fault_is_named(fault):
    # every eighth by all checks, of which the others find nothing; by all a right model passes below
    every = FAULTS.index(fault) % 8 == 0
    names = sorted({fault.check, *fault.also, *(QUICK if every else ())} - {"expect"}) or ["order"]
    found = vitrel.check(fault.build(), like=fault.right and fault.right(), expect=fault.expect, checks=names)
    assert fault.check in {f.check for f in found.findings}
    assert {f.check for f in found.findings} <= {fault.check, *fault.also}
    [finding, *_] = [f for f in found.findings if f.check == fault.check]
    numbers = finding.vectors
    assert all(finding._replace(vectors=True)) and (numbers or fault.check in ("expect", "device"))
    if numbers and numbers.expected is not None and numbers.seen is not None:
        assert not torch.equal(numbers.expected, numbers.seen)


@pytest.mark.slow(seconds=3)
@each("build", RIGHT)
def test_right_models_pass_every_check(build):
    """In graphs the first and the last: one that takes every size, and one that is built for one."""
    found = vitrel.check(build(), checks=None if build in (RIGHT[0], RIGHT[-1]) else QUICK)
    assert found.ok, found
    assert not {"compile", "export"} & set(found.skipped)


NARROW = {"depth": 2, "embed_dim": 64, "num_heads": 2, "img_size": 96}


@pytest.mark.slow(seconds=3)
@each(
    ("name", "options", "kind"),
    [
        ("test_vit", {"depth": 2}, "absolute, resampled bicubic, antialias"),
        ("vit_small_patch16_dinov3", NARROW, "rope_normalized, pairs half, first y, base 100.0, unit height and width"),
        ("vit_small_patch16_rope_224", NARROW, "rope_axial, pairs interleaved, first x, base 100.0, unit patches"),
        ("vit_small_patch16_rope_mixed_224", NARROW, "rope_mixed, pairs interleaved"),
        ("beit_base_patch16_224", NARROW, "table, sign query - key"),
        ("swin_tiny_patch4_window7_224", {"depths": (2, 2), "embed_dim": 24, "num_heads": (1, 2)}, "table, window 7x7"),
        ("vitrel_vit_n8_alibi", {"depth": 1}, "alibi (euclidean)"),
        ("vitrel_vit_n8_sincos", {"depth": 1}, "sincos"),
        ("vitrel_vit_n8_decomposed", {"depth": 1}, "decomposed"),
    ],
)
def test_models_of_timm_and_vitrel_raise_no_alarm(name, options, kind):
    found = vitrel.check(name, checks=[n for n in QUICK if n not in ("dtype", "device", "state")], **options)
    assert found.ok, found
    assert any(text.startswith(kind) for text in found.encodings), found.encodings
    assert (found.results["sign"] == "passed") == ("rope" in kind), found.results


def test_the_function_for_tests_of_others():
    faulty = next(fault for fault in FAULTS if fault.check == "half_pixel")
    vitrel.assert_position_conforms(Tiny(), sizes=[(48, 64), (64, 48), 48], checks=["half_pixel", "order"])
    with pytest.raises(AssertionError, match=r"half_pixel: bi.* with align_corners"):
        vitrel.assert_position_conforms(faulty.build(), checks=["half_pixel"])


def test_the_model_is_not_changed_and_zero_tables_are_seen():
    model = Table()
    with torch.no_grad():
        model.table.zero_()
    model.train()
    found = vitrel.check(model, checks=["order"])
    assert found.encodings[0].startswith("table") and not model.table.any() and model.training


def test_none_is_said_only_of_equal_tokens():
    class Added(Rope):  # without rotation: an embedding is added to the map of patches, or multiplied with it
        def rotated(self, q, k, h, w):
            return q, k

    class Product(Added):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.rand(1, 32, 6, 6) + 1)
            self.patch.register_forward_hook(lambda _, args, out: self.change(out))

        def change(self, out):
            return out * torch.nn.functional.interpolate(self.factor, out.shape[2:], mode="bicubic")

    class Sum(Product):
        def change(self, out):
            return out + torch.nn.functional.interpolate(self.factor, out.shape[2:], mode="bicubic")

    assert vitrel.check(Added(), checks=["order"]).encodings == ["none"]
    assert vitrel.check(Product(), checks=["order"]).encodings == ["not identified"]
    assert vitrel.check(Sum(), checks=["order"]).encodings == ["absolute, resampled bicubic"]


def test_linear_layers_are_seen_in_any_layout_of_tokens():
    """Twins' windows: padded, transposed and not made contiguous, so that PyTorch computes a product with expanded weights."""

    class Windows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.attention = torch.nn.Conv2d(3, 32, 8, 8), LocallyGroupedAttn(32, 2, ws=4)

        def forward(self, image):
            x = self.patch(image)
            return self.attention(x.flatten(2).mT, x.shape[-2:]).mean(1)

    found = vitrel.check(Windows(), checks=["rotation", "order", "padding"])
    (padding,) = found.findings
    assert padding.check == "padding" and padding.found == "2 of 2 tokens attend to padding"
    assert found.encodings == ["none, window 4x4"]


def test_an_embedding_of_no_known_rule_and_one_that_is_missing_at_one_size_are_findings():
    found = vitrel.check(Noise(), checks=["resampling", "half_pixel"])
    assert [f.check for f in found.findings] == ["resampling"] and "no rule that is known" in found.findings[0].found
    assert set(found.skipped) == {"half_pixel"}

    class NotUpright(Tiny):
        def embedding(self, h, w):
            return super().embedding(h, w) if h < w else torch.zeros(1)

    (found,) = vitrel.check(NotUpright(), like=Tiny(), checks=["like"]).findings
    assert found.found == "embedding: 0, not 1" and found.input == "image of 64x48 px"


@pytest.mark.slow
def test_the_native_size_is_examined_first():
    model = swin_without_mask().model  # at other sizes timm makes the mask anew
    found = vitrel.check(model, checks=["mask"]).findings
    assert found and "56x112 px" in found[0].input


def test_findings_made_before_a_reason_stay():
    class Both(Tiny):
        def resized(self, master, h, w):
            if h < w:
                return torch.nn.functional.interpolate(master, (h, w), mode="bicubic", align_corners=True).flatten(2).mT
            return Noise.resized(self, master, h, w)

    found = vitrel.check(Both(), checks=["half_pixel"])
    assert [f.check for f in found.findings] == ["half_pixel"] and not found.skipped and not found.passed


def test_an_error_of_a_check_that_runs_no_model_is_raised(monkeypatch):
    monkeypatch.setitem(CHECKS, "order", lambda examined: iter([][0]))
    with pytest.raises(IndexError):
        vitrel.check(Tiny(), checks=["order"])


def test_a_check_that_says_nothing_gives_its_reason():
    found = vitrel.check(timm.create_model("test_convnext"), sizes=[(64, 96)], checks=["order", "window", "like", "prefix"])
    assert found.ok and found.skipped["window"] == "no attention was seen" and not found.passed
    assert found.encodings == ["not identified"]
    # timm builds another module for another size
    one = vitrel.check(swin((28, 28)), sizes=[(28, 56), (56, 28)], checks=["cache"]).skipped
    assert one == {"cache": "the model is built for one size; another one is another module"}


@each(
    ("arguments", "message"),
    [
        (["test_vitt"], "unknown model 'test_vitt'; nearest: test_vit"),
        (["test_vit", "--checks", "ordr"], "there is no check 'ordr': did you mean order?"),
        (["nowhere.module:build"], "neither a name of timm.list_models() nor an import path"),
        (["test_vit", "--model-args", "{dynamic: true}"], "unexpected keyword argument 'dynamic'"),
        (["test_vit", "--size", "97"], "does not take images of 97x97 px"),
        (["test_vit", "--json", "no/such/folder.json"], "no folder no/such for folder.json: create it first"),
    ],
)
def test_bad_usage_has_exit_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_command_prints_a_table_writes_json_and_returns_1_for_findings(tmp_path, capsys):
    path = tmp_path / "check.json"
    with pytest.raises(SystemExit) as stop:
        tool.main(["conformance.faults:Corners", "--checks", "half_pixel", "order", "--json", str(path)])
    assert stop.value.code == 1
    text = capsys.readouterr().out
    assert "half_pixel  FINDING" in text and "definition Patch centers stay at" in text
    found = json.loads(path.read_text())
    assert [f["check"] for f in found["findings"]] == ["half_pixel"] and found["versions"]["timm"] == timm.__version__
    tool.main(["conformance.faults:Tiny", "--checks", "half_pixel"])
    assert "no finding; checks: 1" in capsys.readouterr().out


@each(
    ("model", "lines"),  # the check, whether it is a finding, whether plain Python expects the same, whether the model has it
    [
        ("Corners", ["half_pixel True True False"]),
        ("Bilinear", ["resampling False True True", "half_pixel False True True"]),
        ("RopeExchanged", ["order True True False"]),
        ("Table", ["order False True True"]),
    ],
)
def test_the_numbers_of_a_report_are_recomputed_in_plain_python(model, lines, tmp_path):
    path = tmp_path / "check.json"
    with suppress(SystemExit):
        tool.main([f"conformance.faults:{model}", "--checks", "order", "resampling", "half_pixel", "batch", "--json", path])
    script = ROOT / "tests" / "conformance" / "plain_check.py"
    done = subprocess.run([sys.executable, "-I", "-S", script, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *found, images = done.stdout.splitlines()
    assert found == lines
    about = json.loads(path.read_text())["passed"]["batch"]["vectors"]["inputs"]["images"]
    assert about == {"shape": [2, 3, 48, 64], "seed": 1}
    torch.testing.assert_close(pseudo_random(tuple(about["shape"]), 1).flatten()[:4].tolist(), json.loads(images))


def test_models_on_the_meta_device_are_refused():
    with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
        Subject(torch.nn.Linear(2, 2))
