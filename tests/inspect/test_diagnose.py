"""vitrel.diagnose: on timm's Swin what is known to be wrong there, at exactly the sizes where it is; on ours nothing."""

import json

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import vitrel
from vitrel.evaluate.predict import state_hash
from vitrel.inspect.any_model import at_size
from vitrel.inspect.footprint import border_leak
from vitrel.inspect.position_changes import own_bias_changes, timm_bias_changes

SIZES = [160, 192, 224, 256]
SMALL = dict(embed_dim=12, num_heads=(1, 2, 2, 4), depths=(2, 2, 2, 2), num_classes=2)


def swin(name="swin_tiny_patch4_window7_224", **keywords):
    return timm.create_model(name, **(SMALL | keywords)).eval()


def only(diagnosis):
    (way,) = diagnosis.ways
    return way


@pytest.fixture(scope="module")
def dynamic():
    """A small timm Swin whose windows stay 7 at every size."""
    return vitrel.diagnose(swin(dynamic_img_size=True), SIZES)


@pytest.mark.slow
def test_borders_meet_at_the_known_sizes(dynamic):
    """Rolling before padding: on 8, 9, 11, 12 and 13 rows modulo 7, so at every size but those that windows divide."""
    leaking = [line.size[0] for line in only(dynamic).sizes if any(stage.leaking for stage in line.stages)]
    assert leaking == [160, 192, 256]
    for line in only(dynamic).sizes:
        for stage in line.stages[:3]:
            n = stage.windows.grid[0]
            rows = n % 7 in (1, 2, 4, 5, 6) and n > 7
            assert bool(stage.rows) == rows and stage.columns == stage.rows
            assert stage.leaking == pytest.approx(1 - (1 - len(stage.rows) / n) ** 2)
    stage = next(stage for line in only(dynamic).sizes for stage in line.stages if stage.windows.grid == (12, 12))
    assert stage.rows == (0, 1, 10, 11) and stage.block.endswith("blocks.1")


def test_padding_is_attended_to_as_known(dynamic):
    shares = {stage.windows.grid[0]: stage.padded for line in only(dynamic).sizes for stage in line.stages}
    assert shares[20] == pytest.approx(0.51)
    plain = {n: 1 - (n // 7 * 7 / n) ** 2 for n in (20, 24, 32, 40, 48, 64)}
    assert {n: shares[n] for n in plain} == pytest.approx(plain)
    assert plain[24] == pytest.approx(0.234, abs=1e-3) and shares[14] == shares[28] == shares[56] == 0


def test_frozen_shifts_are_found(dynamic):
    """Its last stage holds one window where it was built, and never shifts at the sizes where it holds several."""
    frozen = {line.size[0]: [stage.frozen for stage in line.stages] for line in only(dynamic).sizes}
    assert frozen == {size: [False, False, False, size > 224] for size in SIZES}
    assert set(dynamic.findings["as built"]) == {"borders", "padding", "frozen"}


def test_set_input_size_resamples_and_changes_the_bias():
    model = swin()
    before = state_hash(model)
    found = vitrel.diagnose(model, [224, (160, 288)])
    way = only(found)
    assert way.way == "set_input_size()" and set(found.findings[way.way]) == {"interpolated", "bias"}
    assert [sum(line.resampled.values()) for line in way.sizes] == [0, 169 * 2 * (1 + 2 + 2 + 4)]
    assert [bool(line.changes) for line in way.sizes] == [False, True]
    assert [stage.windows.window for stage in way.sizes[1].stages] == [(5, 9)] * 4
    assert state_hash(model) == before


@pytest.mark.slow
def test_the_bias_of_swin_v2_changes_silently():
    """Against its formula: coordinates are divided by the window, so that an offset of 1 means less in a larger one."""
    model = swin("swinv2_tiny_window8_256")
    found = at_size(model, 512)
    attention = model.layers[0].blocks[0].attn

    def bias(window):
        at = torch.arange(-7.0, 8.0) / (window - 1) * 8
        at = at.sign() * (at.abs() + 1).log2() / 3
        return 16 * attention.cpb_mlp(torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)).sigmoid()

    with torch.no_grad():
        first = float((bias(8) - bias(16)).abs().max() / bias(8).std(correction=0))
    (change,) = timm_bias_changes(model, found.model, (64, 64), (128, 128), tables=True)
    assert change.what == "bias" and change.layers == 8 and change.largest >= first - 1e-4 > 0.1
    assert found.resampled == {"relative_coords_table re-created": 8 * 15 * 15 * 2}
    kept = swin("swinv2_tiny_window8_256", pretrained_window_sizes=(8, 8, 8, 8))
    assert timm_bias_changes(kept, at_size(kept, 512).model, (64, 64), (128, 128), tables=True) == ()
    assert vitrel.diagnose(model, 320).findings["set_input_size()"].keys() == {"interpolated", "bias"}


@pytest.mark.parametrize("name", ["vitrel_swin_n", "vitrel_swinv2_n"])
def test_nothing_on_ours(name):
    model = timm.create_model(name, num_heads=(1, 1, 2), embed_dim=8)
    found = vitrel.diagnose(model, [(16, 74), (52, 54), (70, 46)])
    assert found.findings == {} and "no token sees across a border or attends to padding" in str(found)
    assert all(stage.examined for line in only(found).sizes for stage in line.stages)
    shifts = {stage.windows.grid: stage.windows.shift for line in only(found).sizes for stage in line.stages}
    assert all(shift == tuple(2 * (n > 4) for n in grid) for grid, shift in shifts.items())


@pytest.mark.slow
def test_all_ways_of_a_real_model():
    found = vitrel.diagnose("swin_tiny_patch4_window7_224", (96, 160))
    kinds = {way: set(reported) for way, reported in found.findings.items()}
    assert kinds.pop("dynamic_img_size=True") >= {"borders", "padding"}
    assert kinds.pop("set_input_size()") == {"interpolated", "bias"}
    assert kinds.pop("img_size=") >= {"borders", "padding", "interpolated"} and not kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "kinds", "words"),
    [
        ("cait_xxs24_224", (192, 320), {"refused", "interpolated"}, ""),
        ("coatnet_nano_rw_224", (192, 320), {"interpolated", "bias"}, ""),
        ("convit_tiny", [256, (192, 320)], {"refused", "interpolated"}, ""),  # interpolated where it is square alone
        ("davit_tiny", (192, 320), {"padding"}, ""),
        ("edgenext_xx_small", 192, {"position"}, "in stages.1.blocks.1.pos_embd"),
        ("levit_128s", (192, 320), {"refused", "interpolated"}, ""),
        ("mobilevit_xxs", (192, 320), set(), ""),
        ("pvt_v2_b0", 256, set(), "global"),
        ("test_convnext", [160, 96], set(), "the model has no attention"),
        ("test_maxvit", [160, 192], {"interpolated", "bias"}, "not examined: strided windows"),
        ("test_vit", [160, (160, 224)], {"interpolated"}, "global"),
        ("tiny_vit_5m_224", 256, {"padding"}, "attend to padding at 256x256"),
        ("twins_svt_small", (192, 320), {"padding"}, ""),
        ("vit_pe_core_tiny_patch16_384", (192, 320), {"interpolated", "bias"}, ""),
        ("vit_small_patch16_dinov3", 320, {"bias"}, "another rotation"),
    ],
)
def test_families_are_examined(name, sizes, kinds, words):
    """All that meets the image in them is placed on the grid: nothing is missed, no weight or mask told."""
    found = vitrel.diagnose(name, sizes)
    assert {kind for reported in found.findings.values() for kind in reported} == kinds and found.unexamined == {}
    assert words in str(found) and ("found nothing" in str(found)) == (not kinds)
    assert "try timm.create_model" not in str(found)  # which was tried as a way of its own


@pytest.mark.slow
def test_borders_meet_at_the_known_larger_sizes():
    found = vitrel.diagnose(swin(dynamic_img_size=True), [288, 448])
    assert [line.size[0] for line in only(found).sizes if any(stage.leaking for stage in line.stages)] == [288]
    assert only(found).sizes[1].stages[0].padded == 0 and all(line.stages[3].frozen for line in only(found).sizes)


@pytest.mark.parametrize("position", ["table", "rope_normalized", "clipped", "rope_mixed", "pape", "shaw", "decomposed"])
def test_bias_of_ours_at_another_grid(position):
    model = timm.create_model(f"vitrel_vit_n8_{position}", depth=1, embed_dim=24, num_heads=2)
    changes = own_bias_changes(model.encodings((96, 128)))
    expected = {"table": "bias", "decomposed": "bias", "rope_normalized": "rotation"}
    assert [change.what for change in changes] == ([expected[position]] if position in expected else [])
    assert own_bias_changes(model.encodings((64, 64))) == ()


def test_the_size_of_a_change():
    """`clip` reads the trained table at the offsets both grids have; halved angles turn neighbors half as far."""
    model = timm.create_model("vitrel_vit_n8_table", depth=1)
    model.set_position_options(policy="clip")
    assert own_bias_changes(model.encodings((96, 128))) == ()
    eva = timm.create_model("eva02_tiny_patch14_224", depth=1, embed_dim=24, num_heads=2)
    (change,) = only(vitrel.diagnose(eva, 448)).sizes[0].changes
    assert change.what == "rotation" and change.largest == pytest.approx(0.5)  # the fastest of its frequencies is 1


class Tokens(nn.Module):
    """Patches of 16 pixels, a position added to them or to the logits of every pair of them, and their mean."""

    def __init__(self, position):
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, 8, 16, 16), position
        torch.nn.init.normal_(self.patches.weight)

    def forward(self, image):
        x = self.patches(image)
        h, w = x.shape[2:]
        position = self.position(*torch.meshgrid(*(torch.arange(n, device=x.device) + 0.5 for n in (h, w)), indexing="ij"))
        x = x.flatten(2).mT
        if position.shape[0] == position.shape[1] == h * w:
            return ((x @ x.mT + position).softmax(-1) @ x).mean(1)
        return (x + position).mean(1)


def waves(y, x):
    return torch.cat([(at.reshape(-1, 1) * torch.tensor([0.1, 1.0], device=y.device)).sin() for at in (y, x, x, x)], 1)


def distances(y, x):
    y, x = y.reshape(-1), x.reshape(-1)
    return -((y[:, None] - y).abs() + (x[:, None] - x).abs()).sqrt()


class Perceptron(nn.Module):
    """A position from coordinates by a layer, in the range 0 to 1 where `share`."""

    def __init__(self, share):
        super().__init__()
        self.layer, self.share = nn.Linear(2, 8), share

    def forward(self, y, x):
        at = torch.stack((y, x), -1).flatten(0, 1)
        return self.layer(at / at.amax(0) if self.share else at)


def resampled(y, x):
    base = torch.meshgrid(*[torch.arange(14.0, device=y.device)] * 2, indexing="ij")
    return F.interpolate(waves(*base).mT.unflatten(1, (14, 14))[None], y.shape, mode="bilinear")[0].flatten(1).mT


FORMS = {
    "place": waves,
    "middle": lambda y, x: waves(y - y.mean(), x - x.mean()),
    "share": lambda y, x: waves(y / y.max(), x / x.max()),
    "resampled": resampled,
    "pairs": distances,
    "pairs by share": lambda y, x: distances(y / y.max(), x / x.max()),
    "layer": Perceptron(share=False),
    "layer by share": Perceptron(share=True),
    "none": lambda y, x: torch.zeros_like(y).reshape(-1, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_positions_of_any_model(form):
    """Made in forward, by no layer that is known: 224x224 against more and fewer tokens, and as many on another grid."""
    found = vitrel.diagnose(Tokens(FORMS[form]), [192, (256, 320), (32, 1568), 224])
    changing = form in ("share", "resampled", "pairs by share", "layer by share")
    assert set(found.findings.get("as built", ())) == ({"position"} if changing else set())
    assert [bool(line.positions) for line in only(found).sizes] == [changing] * 3 + [False] and found.unexamined == {}
    assert ("found nothing" in str(found)) != changing


def test_the_size_of_a_change_of_position():
    """XCiT divides the coordinates by the grid. Against its module on both grids."""
    model = timm.create_model("xcit_nano_12_p16_224", depth=1, cls_attn_layers=1).eval()
    before = state_hash(model)
    found = vitrel.diagnose(model, [192, (224, 288)])
    with torch.no_grad():
        trained = model.pos_embed(1, 14, 14)
        others = [model.pos_embed(1, *grid)[..., :14, :14] for grid in ((12, 12), (14, 18))]
    for line, other in zip(only(found).sizes, others, strict=True):
        (change,) = line.positions
        largest = float((trained[..., : other.shape[2], : other.shape[3]] - other).abs().max())
        assert change.name == "pos_embed" and change.largest == pytest.approx(largest, rel=1e-3) and largest > 0.1
        assert change.of == pytest.approx(float(trained.abs().max()))
    text = found.findings["as built"]["position"]
    assert "at 2 of 2 sizes" in text and "in pos_embed" in text and "found nothing" not in str(found)
    assert found.findings["as built"].keys() == {"position"} and found.unexamined == {}
    assert json.loads(json.dumps(found.to_dict()))["ways"][0]["sizes"][0]["positions"][0]["name"] == "pos_embed"
    assert state_hash(model) == before and not any(module._forward_hooks for module in model.modules())
    assert "position" in vitrel.diagnose(model.bfloat16(), 192).findings["as built"]


class Thrice(nn.Module):
    """Three values for every token on one axis, which no grid explains."""

    def forward(self, image):
        h, w = image.shape[2] // 16, image.shape[3] // 16
        return image.mean() + torch.linspace(0, 1, 3 * h * w, device=image.device)


class Overwriting(nn.Module):
    """Writes the image into a canvas, whose values then come from both."""

    def forward(self, image):
        canvas = image.new_zeros(image.shape)
        canvas[:, 0] = image[:, 0]
        return canvas.mean()


@pytest.mark.parametrize(("inner", "name"), [(Thrice(), "0"), (Overwriting(), "forward")])
def test_what_cannot_be_examined_is_told(inner, name):
    found = vitrel.diagnose(nn.Sequential(inner), [192, 224])
    assert found.findings == {} and found.unexamined.keys() == {"as built"}
    assert f"at 1 of 2 sizes: {name}" in found.unexamined["as built"]
    assert "not examined" in str(found) and "found nothing" not in str(found)
    assert found.to_dict()["unexamined"] == found.unexamined


def test_a_table_that_is_too_short():
    """MViT V2 reads its tables at other rows on a smaller grid, and beyond their end on a larger one."""
    model = timm.create_model("mvitv2_tiny").eval()
    with pytest.raises(IndexError):
        model(torch.zeros(1, 3, 256, 256))
    found = vitrel.diagnose(model, [192, 256]).findings["as built"]
    assert found.keys() == {"refused", "position"} and "at 1 of 2 sizes" in found["refused"] and "256x256" in found["refused"]
    assert "rel_pos" in found["position"]


def test_a_vit_in_all_its_ways():
    model = dict(depth=1, embed_dim=24, num_heads=2)
    timm_vit = timm.create_model("vit_tiny_patch16_224", **model)
    found = vitrel.diagnose(timm_vit, [(230, 224), 320])
    assert (
        found.findings["set_input_size()"]["unread"]
        == "pixels that no patch contains at 1 of 2 sizes: 6 rows and 0 columns of 230x224"
    )
    found = vitrel.diagnose(timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **model), [(230, 224), 320])
    assert "refused at 1 of 2 sizes: vit_tiny_patch16_224 does not take 230x224 pixels" in found.findings["as built"]["refused"]


class Pooled(nn.Module):
    """Attention, by one function or step by step, over tokens of pooled pixels, whose grid no module shows; or none."""

    num_classes = 3

    def __init__(self, attend):
        super().__init__()
        self.embed, self.attend = nn.Conv2d(3, 8, 4, 4), attend

    def forward(self, image):
        x = nn.functional.avg_pool2d(self.embed(image), 2).flatten(2).mT
        return self.attend(x, x, x).mean(1) if self.attend else x.mean(1)


def by_hand(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, by_hand, None])
def test_attention_on_an_unknown_grid_is_no_missing_attention(attend):
    found = str(vitrel.diagnose(Pooled(attend), [32, 64]))
    assert ("the model has no attention" in found) == (attend is None)
    assert ("not examined: attention on tokens whose grid is unknown" in found) == (attend is not None)


def test_another_way_to_build_a_model_is_told_where_it_was_not_tried():
    """Of a module, which has one way; of a name the other ways are in the diagnosis."""
    model = timm.create_model("cait_xxs24_224", depth=1, depth_token_only=1, embed_dim=24, num_heads=2)
    assert "try timm.create_model('cait_xxs24_224', img_size=(32, 32))" in str(vitrel.diagnose(model, 32))


def test_ways_that_agree_are_told_once():
    found = vitrel.diagnose("test_vit", 192)
    assert [way.way for way in found.ways] == ["as built or img_size="]


def test_plain_values(dynamic):
    plain = json.loads(json.dumps(dynamic.to_dict()))
    line = plain["ways"][0]["sizes"][0]
    assert line["size"] == [160, 160] and line["stages"][0]["rows"] == [0, 1, 38, 39] and line["stages"][0]["row_pairs"] == 8
    assert line["stages"][1]["windows"]["padded_share"] == pytest.approx(1 - 400 / 441)
    assert plain["findings"] == dynamic.findings and "map" not in line["stages"][0]
    text = str(dynamic)
    assert "made for 224x224 px" in text and timm.__version__ in text
    assert "tokens see across opposite borders at 3 of 4 sizes: up to " in text and "windows that never shift" in text


def test_a_leak_is_one_number():
    model = swin(dynamic_img_size=True)
    with torch.inference_mode():
        assert border_leak(model, (320, 224)) == pytest.approx(4 / 20)
    assert border_leak(model, (224, 224)) == 0.0 == border_leak(timm.create_model("vitrel_swin_n"), (60, 44))
    assert border_leak(timm.create_model("test_convnext"), (64, 64)) is None


@pytest.mark.parametrize(
    ("model", "size", "text"),
    [
        ("swin_tiny_patch4_window7_22", 224, "unknown model .*swin_tiny_patch4_window7_224"),
        ("test_vit", 0, "size is a positive whole number of pixels or"),
        ("test_vit", [(160, 160, 3)], r"not \(160, 160, 3\)"),
        ("vitrel_swin_n", [1], "refused at 1x1"),
    ],
)
def test_bad_input(model, size, text):
    if text.startswith("refused"):
        assert text in str(vitrel.diagnose(model, size))
        return
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


def test_progress_is_told_before_every_step():
    lines = []
    vitrel.diagnose("test_vit", [160, (160, 224)], progress=lines.append)
    assert lines[0] == "test_vit: building" and "test_vit at 160x160, as built: windows" in lines
    forward = [line for line in lines if line.endswith(": forward")]
    assert forward == [
        "test_vit at 160x160, as built: forward",
        "test_vit at 160x224, as built: forward",
        "test_vit at 160x160, img_size=: forward",
        "test_vit at 160x224, img_size=: forward",
    ]
    lines.clear()
    vitrel.diagnose(swin(), 224, progress=lines.append)
    assert lines == [f"swin_tiny_patch4_window7_224 at 224x224, set_input_size(): {step}" for step in ("forward", "windows")]


@pytest.mark.parametrize("step", ["forward", "windows", "torch.compile"])
def test_an_error_in_progress_is_no_finding(step):
    def stop(line):
        if line.endswith(step):
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        vitrel.diagnose("test_vit", 256, compile=True, progress=stop)


@pytest.mark.slow
def test_graphs_of_the_compiler():
    sizes = [64, (48, 80), 96]
    lines = []
    model = timm.create_model("vitrel_vit_n8_table", depth=1).train()
    ours = vitrel.diagnose(model, sizes, compile=True, progress=lines.append)
    assert all(part.training for part in model.modules())  # as it was
    assert lines[-1] == "vitrel_vit_n8_table at 96x96, as built: torch.compile"
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=24, num_heads=2)
    theirs = vitrel.diagnose(theirs, sizes, compile=True)
    assert only(ours).graphs <= 2 and only(theirs).graphs == 3
    assert "torch.compile makes 3 graphs of 3 sizes" in str(theirs)
