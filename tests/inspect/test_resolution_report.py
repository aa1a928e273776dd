"""The resolution report against what a forward pass does: hooks on the blocks, the layout of the windows, counted offsets."""

import itertools
import json
import re

import pytest
import timm
import torch

from vitrel import POSITIONS, Grid
from vitrel.inspect.resolution_report import ResolutionReport, resolution_report
from vitrel.ops.window import windows
from vitrel.position import split_position

SIZES = [(64, 64), (2, 2), (16, 45), (31, 90), (50, 18), (9, 130)]  # of the nano Swins: patches of 2, windows of 4


def run(model, size):
    """Shapes that pass through while an image of `size` is seen: {"patches": pixels, "blocks": grids}."""
    seen = {"patches": [], "blocks": []}
    for module in model.modules():
        if hasattr(module, "attn") and hasattr(module, "position"):
            module.register_forward_pre_hook(lambda _, args: seen["blocks"].append((tuple(args[0].shape), args[1])))
    model.patch_embed.proj.register_forward_pre_hook(lambda _, args: seen["patches"].append(tuple(args[0].shape[2:])))
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, *size))
    return seen


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", ["vitrel_swin_n", "vitrel_swinv2_n"])
def test_stages_are_those_of_a_run(name, size):
    model = timm.create_model(name, num_classes=2)
    reported, seen = resolution_report(model, size), run(model, size)
    assert seen["patches"] == [(size[0] + reported.image_padding[0], size[1] + reported.image_padding[1])]
    grids = iter(seen["blocks"])
    for stage, line in zip(model.layers, reported.stages, strict=True):
        assert line.blocks == len(stage.blocks)
        for block in stage.blocks:
            (_, h, w, _), _ = next(grids)
            assert (h, w) == line.grid
            layout = windows(h, w, block.attn.window, block.attn.shift)
            count, n = len(layout.slot), block.attn.window[0] * block.attn.window[1]
            filled = torch.zeros(count, dtype=torch.bool).index_fill(0, layout.inverse, True)
            assert count == line.window_count[0] * line.window_count[1] * n == (h + line.padding[0]) * (w + line.padding[1])
            assert line.padded_share == pytest.approx((~filled).double().mean().item())
        # one axis at a time, in the shifted block, the last: where token 0 lies tells the shift
        for axis, length in enumerate((h, w)):
            m, s = block.attn.window[axis], block.attn.shift[axis]
            alone = windows(length, 1, (m, 1), (s, 0))
            assert len(alone.slot) == line.window_count[axis] * m == length + line.padding[axis]
            assert -alone.inverse[0] % len(alone.slot) == line.shift[axis]
    assert next(grids, None) is None


def test_a_global_trunk_is_one_stage_without_windows():
    model = timm.create_model("vitrel_vit_n8_table", num_classes=2, reg_tokens=2)
    reported, seen = resolution_report(model, (50, 70)), run(model, (50, 70))
    [stage] = reported.stages
    assert seen["patches"] == [(56, 72)] and reported.image_padding == (6, 2)
    assert {(shape[1], grid) for shape, grid in seen["blocks"]} == {(3 + 7 * 9, Grid(7, 9, 3))}
    assert (stage.grid, stage.blocks, stage.window, stage.window_count) == ((7, 9), len(seen["blocks"]), None, (1, 1))
    assert (stage.padding, stage.padded_share, stage.shift) == ((0, 0), 0.0, (0, 0))
    assert (reported.grid, reported.prefix, reported.trained_grid, reported.trained_size) == ((7, 9), 3, (8, 8), (64, 64))


def offsets(grid):
    """Every offset of `grid`, by counting pairs."""
    cells = list(itertools.product(range(grid.h), range(grid.w)))
    return {(a - c, b - d) for (a, b), (c, d) in itertools.product(cells, cells)}


@pytest.mark.parametrize("size", [(32, 32), (16, 24), (24, 56), (64, 48)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize(
    ("position", "options"),
    [
        ("table", {"policy": "clip"}),
        ("clipped", {"radius": 3}),
        ("clipped", {"radius": (1, 5)}),
        ("t5", {}),
        ("t5", {"num_buckets": 8, "max_distance": 7}),
    ],
)
def test_unseen_and_saturated_are_counted_by_brute_force(position, options, size):
    """The table holds its own row numbers, so the bias tells which row an offset reads."""
    how = dict(position=position, position_args=options, img_size=(32, 40), class_token=False, global_pool="avg")
    model = timm.create_model("vitrel_vit_n8_none", num_classes=2, **how)
    encoding, trained, grid = model.blocks[0].position, Grid(4, 5), model.token_grid(size)
    with torch.no_grad():
        [table] = encoding.parameters()
        table.copy_(torch.arange(len(table))[:, None].expand_as(table))
        rows = {
            at: dict(zip(map(tuple, at.offsets().tolist()), encoding(at).tables[0].bias[0].round().tolist(), strict=True))
            for at in (trained, grid)
        }
    known = offsets(trained)
    new = offsets(grid) - known
    read = set(rows[trained].values())
    reported = resolution_report(model, size)
    assert reported.unseen == pytest.approx(len(new) / len(rows[grid]))
    assert reported.saturated == pytest.approx(sum(rows[grid][offset] in read for offset in new) / len(rows[grid]))
    assert reported.saturated == model.saturated(size) and reported.unseen == model.unseen(size)


@pytest.mark.parametrize("key", POSITIONS)
@pytest.mark.parametrize("trunk", ["vit_n8", "swin_n"])
def test_every_encoding_is_reported_without_a_run_on_the_meta_device(trunk, key):
    heads = {} if trunk == "swin_n" else {"num_heads": 4}
    with torch.device("meta"):
        model = timm.create_model(f"vitrel_{trunk}_none" if trunk == "vit_n8" else "vitrel_swin_n", position=key, **heads)
        reported = resolution_report(model, (96, 72))
    assert reported.resampled == model.resampled((96, 72)) and reported.resampled_values == sum(reported.resampled.values())
    assert sum(e.parameters for e in reported.encodings) == sum(
        parameter.numel() for name, parameter in model.named_parameters() if name in model.position_parameters()
    )
    line = next(e for e in reported.encodings if e.key == key)
    assert (line.site, line.at_larger_grid, line.policies) == (
        POSITIONS[key].site, POSITIONS[key].at_larger_grid, POSITIONS[key].policies
    )  # fmt: skip
    if trunk == "swin_n" and line.site == "attention":
        assert (line.layers, line.grid, line.trained, line.effect.split(",")[0]) == (
            6, (4, 4), (4, 4), "no position" if key == "none" else "as trained"
        )  # fmt: skip
        assert not line.resampled and reported.unseen == reported.saturated == 0
    plain = json.loads(json.dumps(reported.to_dict()))
    assert (
        plain["resampled_values"] == reported.resampled_values
        and plain["encodings"][0]["effect"] == reported.encodings[0].effect
    )
    assert f"\n{key} " in str(reported) and "96x72 px, built for 64x64" in str(reported)


def test_layers_that_are_alike_are_one_line_with_their_sum():
    model = timm.create_model("vitrel_vit_n8_none", position="absolute+rope_mixed+table", num_classes=2)
    reported = resolution_report(model, (96, 70))
    assert split_position("absolute+rope_mixed+table") == ("absolute", "rope_mixed+table")
    assert [(e.key, e.site, e.layers) for e in reported.encodings] == [
        ("absolute", "tokens", 1), ("rope_mixed", "attention", 4), ("table", "attention", 4)
    ]  # fmt: skip
    absolute, rope, table = reported.encodings
    assert absolute.resampled == {"absolute bicubic": 64 * 96} and absolute.policy == "bicubic"
    assert table.resampled == {"table geometric": 4 * 3 * 15**2}
    assert table.parameters == sum(block.position.parts["table"].relative_position_bias_table.numel() for block in model.blocks)
    assert reported.resampled == absolute.resampled | rope.resampled | table.resampled
    assert [e.effect for e in reported.encodings] == [
        "resampled by absolute bicubic", "evaluated, at unseen offsets", "resampled by table geometric"
    ]  # fmt: skip
    model.blocks[1].position.parts["table"].policy = "clip"
    reported = resolution_report(model, (96, 70))
    assert [(e.key, e.layers, e.policy) for e in reported.encodings[2:]] == [("table", 3, "geometric"), ("table", 1, "clip")]
    assert reported.resampled["table geometric"] == 3 * 3 * 15**2 and reported.resampled["table clip"] == 0


@pytest.mark.parametrize(
    ("position", "options", "effect"),
    [
        ("none", {}, "no position"),
        ("sincos", {}, "evaluated, at unseen offsets"),
        ("table", {"policy": "clip"}, "read by table clip, far offsets read a trained edge"),
        ("t5", {}, "nothing changes, far offsets read a trained edge"),
        ("alibi", {}, "nothing changes, at unseen offsets"),
        ("cpb", {"policy": "keep"}, "evaluated, at unseen offsets"),
        ("cpb", {"policy": "renormalize"}, "read by cpb renormalize"),
        ("rope_axial", {"policy": "ntk"}, "read by rope_axial ntk, at unseen offsets"),
    ],
)
def test_the_effect_is_told_in_words(position, options, effect):
    model = timm.create_model("vitrel_vit_n8_none", position=position, position_args=options, num_classes=2)
    assert [e.effect for e in resolution_report(model, 128).encodings] == [effect]
    native = "no position" if position == "none" else "as trained"
    assert [e.effect for e in resolution_report(model, 64).encodings] == [native]


def test_a_smaller_table_is_read_as_trained():
    reported = resolution_report(timm.create_model("vitrel_vit_n8_table", num_classes=2), (32, 64))
    assert reported.resampled == {} and reported.encodings[0].effect == "read as trained"


@pytest.mark.parametrize("position", ["table", "none", "rope_axial+alibi"])
def test_the_temperature_is_that_of_the_terms(position):
    how = dict(position=position, position_args={"temperature": "log_n"}, num_classes=2)
    model = timm.create_model("vitrel_vit_n8_none", **how)
    for size in ((64, 64), (96, 200), (8, 8)):
        reported = resolution_report(model, size)
        scale = float(model.blocks[0].position(model.token_grid(size)).temperature)
        assert [e.temperature for e in reported.encodings] == pytest.approx([scale] * len(reported.encodings))
        assert f"logits x {scale:.3f} (log_n)" in str(reported)
    swin = timm.create_model("vitrel_swin_n", **how)
    assert {e.temperature for e in resolution_report(swin, (96, 200)).encodings} == {1.0}
    assert "log_n" not in str(resolution_report(timm.create_model("vitrel_vit_n8_table"), 96))


def test_the_table_reads_well():
    model = timm.create_model("vitrel_swin_n", num_classes=2, position="absolute+table")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = str(resolution_report(model, (31, 90))).splitlines()
    assert [re.sub("  +", " | ", line) for line in lines] == [
        "image | 31x90 px, built for 64x64, padded by 1 below, 0 right to whole patches",
        "tokens | 16x45, trained on 32x32; patches of 2x2 px",
        f"values | 32,768 of {parameters:,} resampled (absolute bicubic)",
        "offsets | 0 % unseen, 0 % read a trained edge instead",
        "",
        "stage | blocks | tokens | window | windows | padding | shift",
        "1 | 2 | 16x45 | 4x4 | 4x12 | 0 below, 3 right | 6.25 % | 2x2",
        "2 | 2 | 8x23 | 4x4 | 2x6 | 0 below, 1 right | 4.17 % | 2x2",
        "3 | 2 | 4x12 | 4x4 | 1x3 | - | 0x2",
        "",
        "encoding | acts on | layers | grid | trained | policy [in use] | parameters | resampled | unseen | saturated | "
        "at this size",
        "absolute | tokens | 1 | 16x45 | 32x32 | bicubic | 32,768 | 32,768 | 0 % | 0 % | resampled by absolute bicubic",
        "table | attention | 6 | 4x4 | 4x4 | [geometric], clip, bicubic | 686 | 0 | 0 % | 0 % | as trained",
    ]
    for block in (lines[5:9], lines[10:]):
        last = {line.rindex("  ") for line in block}
        assert len(last) == 1, "the last column is aligned"


def test_the_training_size_is_that_of_construction_and_nothing_is_touched():
    model = timm.create_model("vitrel_vit_n8_absolute", num_classes=2)
    before = resolution_report(model, 96)
    model.set_input_size((48, 96))
    assert isinstance(before, ResolutionReport) and before == resolution_report(model, (96, 96))
    assert before.trained_size == (64, 64) and model.img_size == (48, 96)


def test_a_shortened_trunk_reports_what_is_left():
    model = timm.create_model("vitrel_swin_n", num_classes=2)
    model.prune_intermediate_layers([1])
    assert [stage.grid for stage in resolution_report(model, (30, 50)).stages] == [(15, 25), (8, 13)]


@pytest.mark.parametrize("size", [224.0, "224", (224,), (1, 2, 3), (224, 224.0), None, (0, 64), (-8, 64)])
def test_sizes_that_are_not_pixels_are_refused(size):
    model = timm.create_model("vitrel_vit_n8_none", num_classes=2)
    with pytest.raises(ValueError, match=r"positive whole number of pixels or two, \(height, width\), not ") as caught:
        resolution_report(model, size)
    assert repr(size) in str(caught.value)


@pytest.mark.parametrize("size", [7, (8, 7)])
def test_a_size_below_one_patch_is_refused(size):
    with pytest.raises(ValueError, match=r"size \S+ is smaller than one patch of 8x8 pixels; choose a larger one"):
        resolution_report(timm.create_model("vitrel_vit_n8_none", num_classes=2), size)
