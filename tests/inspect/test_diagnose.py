"""vitrel.diagnose: on timm's Swin what is known to be wrong there, at exactly the sizes where it is; on ours nothing."""

import json

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import vitrel
from helpers import each
from vitrel.inspect.any_model import at_size
from vitrel.inspect.leaks import border_leak
from vitrel.weights.record import state_hash

SIZES = [160, 192, 224, 256]
SMALL = dict(embed_dim=12, num_heads=(1, 2, 2, 4), depths=(2, 2, 2, 2), num_classes=2)


def swin(name="swin_tiny_patch4_window7_224", **keywords):
    return timm.create_model(name, **(SMALL | keywords)).eval()


@pytest.fixture(scope="module")
def dynamic():
    """A small timm Swin whose windows stay 7 at every size."""
    return vitrel.diagnose(swin(dynamic_img_size=True), SIZES)


@pytest.mark.slow
def test_borders_meet_at_the_known_sizes(dynamic):
    """Rolling before padding: on 8, 9, 11, 12 and 13 rows modulo 7, so at every size but those that windows divide."""
    leaking = [line.size[0] for line in dynamic.sizes if any(stage.leaking for stage in line.stages)]
    assert leaking == [160, 192, 256]
    for line in dynamic.sizes:
        for stage in line.stages[:3]:
            n = stage.windows.grid[0]
            rows = n % 7 in (1, 2, 4, 5, 6) and n > 7
            assert bool(stage.leaks.rows) == rows and stage.leaks.columns == stage.leaks.rows
            assert stage.leaking == pytest.approx(1 - (1 - len(stage.leaks.rows) / n) ** 2)
    stage = next(stage for line in dynamic.sizes for stage in line.stages if stage.windows.grid == (12, 12))
    assert stage.leaks.rows == (0, 1, 10, 11) and stage.layer.endswith("blocks.1.attn")


@pytest.mark.slow
def test_padding_is_attended_to_as_known(dynamic):
    shares = {stage.windows.grid[0]: stage.padded for line in dynamic.sizes for stage in line.stages}
    assert shares[20] == pytest.approx(0.51)
    plain = {n: 1 - (n // 7 * 7 / n) ** 2 for n in (20, 24, 32, 40, 48, 64)}
    assert {n: shares[n] for n in plain} == pytest.approx(plain)
    assert plain[24] == pytest.approx(0.234, abs=1e-3) and shares[14] == shares[28] == shares[56] == 0


def test_frozen_shifts_are_found(dynamic):
    """Its last stage holds one window where it was built, and never shifts at the sizes where it holds several."""
    frozen = {line.size[0]: [stage.frozen for stage in line.stages] for line in dynamic.sizes}
    assert frozen == {size: [False, False, False, size > 224] for size in SIZES}
    assert set(dynamic.findings) == {"borders", "padding", "frozen"}


def test_set_input_size_resamples_and_changes_the_bias():
    model = swin()
    before = state_hash(model)
    found = vitrel.diagnose(model, [224, (160, 288)])
    assert set(found.findings) == {"replaced", "bias"}
    assert [sum(line.resampled.values()) for line in found.sizes] == [0, 169 * 2 * (1 + 2 + 2 + 4)]
    assert [bool(line.changes) for line in found.sizes] == [False, True]
    assert [stage.windows.window for stage in found.sizes[1].stages] == [(5, 9)] * 4
    assert state_hash(model) == before


@pytest.mark.slow
def test_the_bias_of_swin_v2_changes_silently():
    """Against its formula: coordinates are divided by the window, so that an offset of 1 means less in a larger one."""
    two = dict(depths=(2, 2), num_heads=(1, 2))
    model = swin("swinv2_tiny_window8_256", **two)
    found = at_size(model, 512)
    attention = model.layers[0].blocks[0].attn

    def bias(window):
        at = torch.arange(-7.0, 8.0) / (window - 1) * 8
        at = at.sign() * (at.abs() + 1).log2() / 3
        return 16 * attention.cpb_mlp(torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)).sigmoid()

    with torch.no_grad():
        first = float((bias(8) - bias(16)).abs().max() / bias(8).std(correction=0))
    (change,) = vitrel.diagnose(model, 512).sizes[0].changes
    assert change.what == "bias" and change.layers == 4 and change.largest >= first - 1e-4 > 0.1
    assert found.resampled == {"relative_coords_table re-created": 4 * 15 * 15 * 2}
    kept = swin("swinv2_tiny_window8_256", pretrained_window_sizes=(8, 8), **two)
    assert vitrel.diagnose(kept, 512).sizes[0].changes == ()
    assert vitrel.diagnose(model, 320).findings.keys() == {"replaced", "bias"}


@pytest.mark.slow
@each("name", ["vitrel_swin_n", "vitrel_swinv2_n"])
def test_nothing_on_ours(name):
    model = timm.create_model(name, num_heads=(1, 1, 2), embed_dim=8)
    found = vitrel.diagnose(model, [(16, 74), (52, 54), (70, 46)])
    assert found.findings == {} and "no token sees across a border or attends to padding" in str(found)
    assert all(stage.leaks for line in found.sizes for stage in line.stages)
    shifts = {stage.windows.grid: stage.windows.shift for line in found.sizes for stage in line.stages}
    assert all(shift == tuple(2 * (n > 4) for n in grid) for grid, shift in shifts.items())


def test_options_of_a_name():
    small = dict(SMALL, depths=(2, 2), num_heads=(1, 2))
    found = vitrel.diagnose("swin_tiny_patch4_window7_224", (96, 160), dynamic_img_size=True, **small)
    assert found.findings.keys() == {"borders", "padding"}
    assert vitrel.diagnose("swin_tiny_patch4_window7_224", (96, 160), **small).findings.keys() == {"replaced", "bias"}
    with pytest.raises(TypeError, match="options dynamic_img_size are for a name"):
        vitrel.diagnose(swin(), 160, dynamic_img_size=True)


TINY = dict(depth=1, embed_dim=24, num_heads=2)


@pytest.mark.slow
@each(
    ("name", "options", "sizes", "kinds", "words"),
    [
        ("cait_xxs24_224", dict(depth=1), (192, 320), {"refused"}, "try timm.create_model"),
        ("mobilevit_xxs", {}, (192, 320), set(), ""),
        ("test_convnext", {}, [160, 96], set(), "the model has no attention"),
        ("test_maxvit", {}, 192, {"replaced", "bias"}, "not examined: strided windows"),
        ("test_vit", {}, [160, (160, 224)], {"replaced"}, "global"),
        ("tiny_vit_5m_224", dict(depths=(1, 1, 2, 1)), 256, {"padding"}, "attend to padding at 256x256"),
        ("vit_small_patch16_dinov3", TINY, 320, {"bias"}, "rotation by up to"),
    ],
)
def test_families_are_examined(name, options, sizes, kinds, words):
    found = vitrel.diagnose(name, sizes, **options)
    assert found.findings.keys() == kinds
    assert words in str(found) and ("found nothing" in str(found)) == (not kinds)
    assert words != "global" or "no token sees across" not in str(found)  # which is said of windows


@each(("position", "kinds"), [("table", ["bias"]), ("decomposed", ["bias"]), ("rope_normalized", ["rotation"]),
                              ("rope_mixed", []), ("shaw", [])])  # fmt: skip
def test_bias_of_ours_at_another_grid(position, kinds):
    model = timm.create_model(f"vitrel_vit_n8_{position}", **TINY)
    native, other = vitrel.diagnose(model, [64, (96, 128)]).sizes
    assert [change.what for change in other.changes] == kinds and native.changes == ()


@each(
    ("position", "unseen", "text"),
    [
        ("none", 0, ""),
        ("absolute", 0, ""),
        ("alibi", 1 - 15 * 15 / (23 * 31), "offsets that training did not have at 96x128: 68%"),
        ("t5", 1 - 15 * 15 / (23 * 31), "offsets that training did not have at 96x128: 68% (68% read a trained edge)"),
    ],
)
def test_offsets_that_training_did_not_have(position, unseen, text):
    model = timm.create_model("vitrel_vit_n8_none", position=position, depth=1)
    found = vitrel.diagnose(model, [64, (96, 128)])
    assert [line.unseen for line in found.sizes] == pytest.approx([0, unseen])
    assert [line.saturated for line in found.sizes] == pytest.approx([0, unseen if position == "t5" else 0])
    assert found.findings.get("unseen", "") == text and text in str(found)


def test_the_size_of_a_change():
    """`clip` reads the trained table at the offsets both grids have; halved angles turn neighbors half as far."""
    model = timm.create_model("vitrel_vit_n8_table", depth=1)
    model.set_position_options(policy="clip")
    assert vitrel.diagnose(model, (96, 128)).sizes[0].changes == ()
    eva = timm.create_model("eva02_tiny_patch14_224", **TINY)
    (line,) = vitrel.diagnose(eva, 448).sizes
    assert line.unseen is None  # it has no encoding of ours
    (change,) = line.changes
    assert change.what == "rotation" and change.largest == pytest.approx(0.5)  # the fastest of its frequencies is 1


def test_a_vit_built_in_two_ways():
    found = vitrel.diagnose("vit_tiny_patch16_224", [(230, 224), 320], **TINY)
    assert found.findings["unread"] == "pixels that no patch contains at 230x224: rows: 6, columns: 0"
    found = vitrel.diagnose("vit_tiny_patch16_224", [(230, 224), 320], dynamic_img_size=True, **TINY)
    assert "refused at 230x224: vit_tiny_patch16_224 does not take 230x224 pixels" in found.findings["refused"]


def test_sizes_by_default():
    found = vitrel.diagnose(timm.create_model("test_vit", depth=1))
    assert [line.size for line in found.sizes] == [(160, 160), (240, 240), (320, 320)]
    odd = timm.create_model("vit_tiny_patch16_224", patch_size=14, img_size=112, **TINY)
    assert all(not line.refusal for line in vitrel.diagnose(odd).sizes)  # whole patches


SMALL_HF = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=64, patch_size=16)
SWIN_HF = dict(image_size=56, embed_dim=12, depths=[2, 2], num_heads=[1, 2])


def test_tables_of_zeros_are_no_tables_without_a_change():
    """A built BEiT has tables of zeros, in which resampling would not show."""
    model = timm.create_model("beit_base_patch16_224", **TINY)
    assert not model.blocks[0].attn.relative_position_bias_table.any()
    assert {change.what for change in vitrel.diagnose(model, 288).sizes[0].changes} == {"bias"}
    assert not model.blocks[0].attn.relative_position_bias_table.any()


@pytest.mark.slow
@each(
    ("name", "options", "kinds"),
    [
        ("ViT", SMALL_HF, {"replaced"}),
        ("DINOv3ViT", SMALL_HF, {"bias"}),
        ("Swin", SWIN_HF, {"padding", "frozen"}),
    ],
)
def test_models_of_transformers(name, options, kinds):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"this transformers has no {name}Model")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).eval()
    found = vitrel.diagnose(model)
    assert found.trained == (options["image_size"],) * 2 and found.findings.keys() == kinds
    assert [line.stages[0].windows.grid for line in found.sizes] == [
        (n, n) for n in ((14, 21, 28) if name == "Swin" else (4, 6, 8))
    ]
    if name == "ViT":
        assert found.sizes[1].resampled == {"position_embeddings bicubic": 4 * 4 * 32}


class PlainGrids(nn.Module):
    """A model of its own that gives its grid to an encoding of vitrel as a tuple."""

    def __init__(self, position):
        super().__init__()
        self.patch_embed, self.qkv = nn.Conv2d(3, 32, 16, 16), nn.Linear(32, 96)
        self.position = vitrel.create_position(position, (4, 4), 2, 16)

    def forward(self, image):
        x = self.patch_embed(image)
        grid = tuple(x.shape[2:])
        q, k, v = self.qkv(x.flatten(2).mT).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return vitrel.ops.attention(q, k, v, self.position(grid), grid).mean(2).flatten(1)


@each("position", ["table", "rope_axial+cpb"])
def test_grids_of_encodings_may_be_plain_tuples(position):
    native, other = vitrel.diagnose(PlainGrids(position), [64, (64, 96)]).sizes
    assert native.unseen == 0 and other.unseen == pytest.approx(1 - 7 / 11)


class Pooled(nn.Module):
    """Attention, by one function or step by step, over tokens of pooled pixels, or over mixtures of them; or none."""

    num_classes = 3

    def __init__(self, attend, mixed=False):
        super().__init__()
        self.embed, self.attend = nn.Conv2d(3, 8, 4, 4), attend
        self.mix = nn.LazyLinear(16) if mixed else nn.Identity()

    def forward(self, image):
        x = self.mix(nn.functional.avg_pool2d(self.embed(image), 2).flatten(2)).mT
        return self.attend(x, x, x).mean(1) if self.attend else x.mean(1)


def by_hand(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@each("attend", [F.scaled_dot_product_attention, by_hand, None])
def test_attention_on_an_unknown_grid_is_no_missing_attention(attend):
    found = str(vitrel.diagnose(Pooled(attend), [32, 64]))
    assert ("the model has no attention" in found) == (attend is None)
    assert ("global" in found) == (attend is not None) and "not examined" not in found  # found by its operators
    mixed = Pooled(attend, mixed=True)
    mixed(torch.randn(1, 3, 32, 32))
    found = str(vitrel.diagnose(mixed, 32))
    assert ("not examined: attention on tokens whose grid is unknown" in found) == (attend is not None)


def test_plain_values(dynamic):
    plain = json.loads(json.dumps(dynamic.to_dict()))
    line = plain["sizes"][0]
    assert line["size"] == [160, 160] and line["stages"][0]["rows"] == [0, 1, 38, 39]
    assert line["stages"][1]["windows"]["padded_share"] == pytest.approx(1 - 400 / 441)
    assert plain["findings"] == dynamic.findings and plain["versions"]["timm"] == timm.__version__
    text = str(dynamic)
    assert "made for 224x224 px" in text and timm.__version__ in text
    assert "tokens see across opposite borders at 3 of 4 sizes, the last 256x256: 68% of stage 3" in text
    assert "windows that never shift at 256x256: stage 4" in text


@pytest.mark.slow
def test_a_leak_is_one_number():
    model = swin(dynamic_img_size=True)
    with torch.inference_mode():
        assert border_leak(model, (320, 224)) == pytest.approx(4 / 20)
    assert border_leak(model, (224, 224)) == 0.0 == border_leak(timm.create_model("vitrel_swin_n"), (60, 44))
    assert border_leak(timm.create_model("test_convnext"), (64, 64)) is None


@each(
    ("model", "size", "text"),
    [
        ("swin_tiny_patch4_window7_22", 224, "unknown model .*swin_tiny_patch4_window7_224"),
        ("test_vit", 0, "size is a positive whole number of pixels or"),
        ("test_vit", [(160, 160, 3)], r"not \(160, 160, 3\)"),
        ("test_vit", (0, 64), r"not \(0, 64\)"),
    ],
)
def test_bad_input(model, size, text):
    with pytest.raises(ValueError, match=text):
        vitrel.diagnose(model, size)


def test_a_model_without_values():
    with torch.device("meta"):
        model = timm.create_model("test_vit")
    with pytest.raises(ValueError, match="on the meta device"):
        vitrel.diagnose(model, 160)


def test_nothing_outside_is_touched():
    torch.manual_seed(5)
    state, model = torch.get_rng_state(), swin(dynamic_img_size=True).train()
    torch.set_rng_state(state)
    before = state_hash(model)
    vitrel.diagnose(model, 160)
    assert torch.equal(torch.get_rng_state(), state) and state_hash(model) == before
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


def test_progress_is_told_before_every_size():
    lines = []
    found = vitrel.diagnose("vitrel_swin_n", [1, (60, 44)], progress=lines.append)
    assert lines == ["vitrel_swin_n at 1x1", "vitrel_swin_n at 60x44"] and found.findings.keys() == {"refused"}
