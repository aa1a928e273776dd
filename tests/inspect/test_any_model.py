"""at_size: timm's models brought to a size as timm does it, every replaced value counted, and the given model left alone."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from helpers import each
from vitrel.evaluate.policies import at_size_with
from vitrel.inspect.any_model import StageWindows, at_size, trace
from vitrel.ops.window import windows
from vitrel.weights.record import state_hash

SWIN = "swin_tiny_patch4_window7_224"
NARROW = dict(embed_dim=12, num_heads=(1, 2, 2, 4), num_classes=2)
HEADS = 2 * 1 + 2 * 2 + 6 * 2 + 2 * 4  # of all blocks of a narrow tiny Swin


def vit(name="vit_tiny_patch16_224", **keywords):
    return timm.create_model(name, **(dict(depth=2, embed_dim=24, num_heads=2, num_classes=3) | keywords)).eval()


def runs(model, size):
    with torch.no_grad():
        return model(torch.randn(1, 3, *size)).isfinite().all()


class ResizedInPlace(nn.Module):
    """Its `set_input_size` writes into the parameters that it has."""

    def __init__(self):
        super().__init__()
        self.conv, self.pos_embed, self.scale = (
            nn.Conv2d(3, 8, 8, 8),
            nn.Parameter(torch.randn(8, 4, 4)),
            nn.Parameter(torch.ones(1)),
        )
        self.img_size = (32, 32)

    def set_input_size(self, img_size):
        grid = [n // 8 for n in img_size]
        self.pos_embed.data = F.interpolate(self.pos_embed[None], grid, mode="bicubic")[0].detach()
        with torch.no_grad():
            self.scale.mul_(2)

    def forward(self, image):
        x = (self.conv(image) + self.pos_embed).flatten(2).mT
        return (x @ x.mT * self.scale).softmax(-1) @ x


def test_a_model_that_resizes_its_parameters_in_place_stays_as_it_was():
    model = ResizedInPlace()
    before, parameter = state_hash(model), model.pos_embed
    found = at_size(model, (48, 32))
    assert found.resampled == {"pos_embed bicubic": 8 * 4 * 4, "scale resampled": 1}
    assert found.model.pos_embed.shape == (8, 6, 4) and runs(found.model, (48, 32))
    assert model.pos_embed is parameter and state_hash(model) == before and runs(model, (32, 32))
    assert found.model.conv.weight is model.conv.weight  # no copy of what is large


@each("name", ["vitrel_vit_n8_table", "vitrel_swin_n"])
def test_ours_stay_as_they_are(name):
    model = timm.create_model(name)
    found = at_size(model, (72, 40))
    assert found.model is model and found.resampled == model.resampled((72, 40))
    assert found.windows == at_size_with(model, (72, 40), "none").stages  # which are found without a trace


@each(
    ("name", "size"),  # patches of 2, windows of 4
    [("vitrel_swin_n", (2, 2)), ("vitrel_swin_n", (31, 90)), ("vitrel_swin_n", (50, 18)), ("vitrel_swinv2_n", (9, 130))],
)
def test_windows_of_ours_are_those_of_a_run(name, size):
    """Grids by hooks on the blocks, padding and shift by the layout that attention uses."""
    model, grids = timm.create_model(name, num_classes=2).eval(), []
    for stage in model.layers:
        for block in stage.blocks:
            block.register_forward_pre_hook(lambda _, args: grids.append(tuple(args[0].shape[1:3])))
    assert runs(model, size)
    found, grids = at_size_with(model, size, "none").stages, iter(grids)
    for stage, line in zip(model.layers, found, strict=True):
        assert line.blocks == len(stage.blocks) and {next(grids) for _ in stage.blocks} == {line.grid}
        h, w = line.grid
        for block in stage.blocks:
            layout = windows(h, w, block.attn.window, block.attn.shift)
            count = len(layout.slot)
            filled = torch.zeros(count, dtype=torch.bool).index_fill(0, layout.inverse, True)
            assert count == (h + line.padding[0]) * (w + line.padding[1])
            assert line.padded_share == pytest.approx((~filled).double().mean().item())
        # one axis at a time, in the shifted block, the last: where token 0 lies tells the shift
        for axis, length in enumerate((h, w)):
            m, s = block.attn.window[axis], block.attn.shift[axis]
            alone = windows(length, 1, (m, 1), (s, 0))
            assert len(alone.slot) == length + line.padding[axis]
            assert -alone.inverse[0] % len(alone.slot) == line.shift[axis]
    assert next(grids, None) is None


def test_a_global_trunk_is_one_stage_without_windows():
    model = timm.create_model("vitrel_vit_n8_table", num_classes=2, reg_tokens=2)
    [stage] = at_size(model, (50, 70)).windows
    assert (stage.grid, stage.blocks, stage.window) == ((7, 9), len(model.blocks), None)
    assert (stage.padding, stage.padded_share, stage.shift) == ((0, 0), 0.0, (0, 0))


@each(("keywords", "prefix"), [({}, 1), (dict(class_token=False, global_pool="avg"), 0)])
def test_an_embedding_is_resampled_without_its_class_token(keywords, prefix):
    model = vit(**keywords)
    before, old = state_hash(model), model.pos_embed
    found = at_size(model, (160, 256))
    assert found.resampled == {"pos_embed bicubic": 14 * 14 * 24} and old.numel() == (14 * 14 + prefix) * 24
    assert found.model is not model and runs(found.model, (160, 256))
    assert state_hash(model) == before and model.pos_embed is old and runs(model, (224, 224))
    assert found.windows == (StageWindows(2, (10, 16), None, (0, 0), (0, 0)),)


def test_nothing_at_its_own_size():
    for model in (vit(), timm.create_model(SWIN, **NARROW)):
        found = at_size(model, 224)
        assert found.model is model and found.resampled == {}


def test_resampling_inside_forward_is_counted():
    """The very model comes back."""
    model = vit(dynamic_img_size=True)
    found = at_size(model, (160, 256))
    assert found.model is model and found.resampled == {"pos_embed bicubic": 14 * 14 * 24} and runs(model, (160, 256))
    assert at_size(model, 224).resampled == {}
    sam = vit("samvit_base_patch16", img_size=128, window_size=3, global_attn_indexes=(1,))
    rows = 2 * 8 - 1
    embedding = {"pos_embed bicubic": 8 * 8 * 24}
    assert at_size(sam, 128).resampled == {}
    assert at_size(sam, (160, 192)).resampled == embedding | {"rel_pos_h linear": rows * 12, "rel_pos_w linear": rows * 12}
    assert at_size(sam, (160, 128)).resampled == embedding | {"rel_pos_h linear": rows * 12}  # as wide as trained
    windows = [(line.grid, line.window, line.padding) for line in at_size(sam, (160, 192)).windows]
    assert windows == [((10, 12), (3, 3), (2, 0)), ((10, 12), None, (0, 0))]


def test_interpolation_of_the_image_is_not_counted():
    class Enlarging(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pos_embed = nn.Conv2d(3, 4, 3), nn.Parameter(torch.zeros(1, 4, 7, 7))

        def forward(self, image):
            x = F.interpolate(self.conv(image), scale_factor=2, mode="bilinear")
            return x + F.interpolate(self.pos_embed * 2, x.shape[2:], mode="bicubic")

    assert at_size(Enlarging(), 32).resampled == {"pos_embed bicubic": 4 * 7 * 7}


def test_swin_windows_follow_the_image():
    model = timm.create_model(SWIN, **NARROW)
    found = at_size(model, (288, 352))
    assert found.resampled == {"relative_position_bias_table geometric": 13 * 13 * HEADS}
    assert [line[1:5] for line in found.windows] == [
        ((72, 88), (9, 11), (4, 5), (0, 0)),
        ((36, 44), (9, 11), (4, 5), (0, 0)),
        ((18, 22), (9, 11), (4, 5), (0, 0)),
        ((9, 11), (9, 11), (0, 0), (0, 0)),
    ]
    assert runs(found.model, (288, 352)) and [line.blocks for line in found.windows] == [2, 2, 6, 2]


def test_windows_kept_by_a_dynamic_swin():
    model = timm.create_model(SWIN, dynamic_img_size=True, **NARROW)
    found = at_size(model, (320, 288))
    assert found.model is model and found.resampled == {}
    last = found.windows[-1]
    assert last == StageWindows(2, (10, 9), (7, 7), (0, 0), (4, 5)) and last.padded_share == pytest.approx(1 - 90 / 196)


def test_a_bias_table_is_resampled_without_its_rows_for_the_class_token():
    model = vit("beit_base_patch16_224")
    assert at_size(model, (160, 256)).resampled == {"relative_position_bias_table geometric": 2 * 27 * 27 * 2}
    assert model.blocks[0].attn.relative_position_bias_table.shape == (27 * 27 + 3, 2)


def test_evaluated_positions_are_not_counted():
    for name in ("vit_small_patch16_rope_224", "vit_relpos_small_patch16_224"):
        found = at_size(vit(name), (160, 256))
        assert found.resampled == {} and runs(found.model, (160, 256))


def test_layouts_and_strided_windows():
    """MaxViT: convolutions [B, C, h, w] around attention [B, h, w, C], every second one over the whole grid."""
    found = at_size(timm.create_model("test_maxvit"), 320)
    assert [(*line[1:3], line.strided) for line in found.windows[:2]] == [((80, 80), (10, 10), s) for s in (False, True)]
    assert {line.grid for line in found.windows} == {(80, 80), (40, 40), (20, 20), (10, 10)}


@each(
    ("make", "size", "text"),
    [
        (
            lambda: timm.create_model("cait_xxs24_224", depth=1),
            288,
            r"(?s)cait_xxs24_224 does not take 288x288 .*try .*img_size=\(288, 288\)",
        ),
        (lambda: vit(dynamic_img_size=True), (230, 224), "224x224 or 240x240"),
        (lambda: timm.create_model("test_maxvit"), 200, "test_maxvit does not take 200x200 pixels: .*divisible by window"),
    ],
)
def test_refusals(make, size, text):
    model = make()
    model.train()
    with pytest.raises(ValueError, match=text):
        at_size(model, size)
    assert all(module.training for module in model.modules()) and not any(m._forward_pre_hooks for m in model.modules())


def test_a_trace_leaves_the_model_as_it_was():
    model = timm.create_model(SWIN, **NARROW).train()
    model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    calls = trace(model, (224, 224)).calls
    expected = ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"]
    assert [call.name for call in calls][:3] == expected
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not any(parameter.is_meta for parameter in model.parameters())
