"""Weights from timm and Microsoft: same logits, on real images the same predictions; refusals by name."""

import re

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import create_transform
from timm.layers import resample_abs_pos_embed
from torchvision.datasets import ImageFolder

import vitrel
from helpers import shared

SHORT = dict(depths=(2, 2, 2, 2), embed_dim=48, num_classes=10)


def perturb(model):
    """Tables at standard deviation 0.5, everything else moved: a zero table or a unit norm hides bugs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias_table" in name or "pos_embed" in name or "cpb_mlp" in name or not parameter.any():
                parameter.normal_(std=0.5)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


SHORT_V2 = dict(img_size=64, window_size=4, depths=(2, 2), num_heads=(2, 4), embed_dim=32, num_classes=10)


def test_swin_v2():
    """Old files have tables of offsets, and a zero bias of keys; the part of a composition is found."""
    theirs = perturb(timm.create_model("swinv2_tiny_window8_256", **SHORT_V2))
    state = theirs.state_dict() | {
        "layers.0.blocks.1.attn.relative_coords_table": torch.zeros(1, 7, 7, 2),
        "layers.0.blocks.1.attn.k_bias": torch.zeros(32),
    }
    image = torch.randn(1, 3, 64, 64)
    for position in ("cpb", "rope_axial+cpb"):
        ours = timm.create_model("vitrel_swinv2_t", position=position, **SHORT_V2).eval()
        vitrel.load_pretrained(ours, {"model": state}, allow_unset=["*.rope_axial"])  # no parameters, but not trained with
        prefix = "position.parts.cpb." if "+" in position else "position."
        own = ours.state_dict()
        for name in (n for n in theirs.state_dict() if "cpb_mlp" in n):
            assert torch.equal(own[name.replace("attn.", prefix)], theirs.state_dict()[name])
        if position == "cpb":
            torch.testing.assert_close(ours(image), theirs(image), atol=2e-5, rtol=0)


@pytest.mark.slow
def test_through_timm_from_a_file(tmp_path, capsys):
    theirs = perturb(timm.create_model("swin_tiny_patch4_window7_224", **SHORT | {"num_classes": 1000}))
    torch.save(theirs.state_dict(), path := tmp_path / "weights.pth")
    overlay = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(path)), depths=(2, 2, 2, 2), embed_dim=48)
    image = torch.randn(1, 3, 224, 224)
    ours = timm.create_model("vitrel_swin_t", **overlay).eval()
    torch.testing.assert_close(ours(image), theirs(image), atol=2e-5, rtol=0)
    other = timm.create_model("vitrel_swin_t", num_classes=7, in_chans=1, **overlay).eval()
    assert other(torch.randn(1, 1, 96, 160)).shape == (1, 7) and not capsys.readouterr().err  # no warning
    torch.testing.assert_close(
        other.layers[0].blocks[0].attn.qkv.weight, theirs.layers[0].blocks[0].attn.qkv.weight, atol=0, rtol=0
    )


WRAPS = ["module.", "model.", "_orig_mod.", "module._orig_mod.", "model.module.", "_orig_mod.module.model.", "ema.module."]


def named(prefix, state):
    """The state dict of a module that holds the model as `prefix`."""
    return {f"{prefix}{name}": value for name, value in state.items()}


def other_than(state):
    """Weights of the same names and shapes that are not those of `state`."""
    return {name: value + 1 for name, value in state.items()}


@pytest.fixture
def pair():
    """A model whose weights are looked for, and one of the same kind that takes them."""
    return perturb(timm.create_model("vitrel_vit_n8_table", num_classes=3)), timm.create_model(
        "vitrel_vit_n8_table", num_classes=3
    )


def takes(model, again, source, **how):
    vitrel.load_pretrained(again, source, **how)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_of_wrappers_are_taken_off(wrap, pair):
    takes(*pair, {"state_dict": named(wrap, pair[0].state_dict())})


@pytest.mark.parametrize(
    "layout",
    [
        lambda ema, raw: {"arch": "vit", "state_dict": raw, "state_dict_ema": ema},  # timm's train.py
        lambda ema, raw: {"state_dict": raw, "state_dict_ema": named("module.", ema)},
        lambda ema, raw: {"model": raw, "model_ema": ema},
        lambda ema, raw: {"model": raw, "ema": ema, "teacher": None},
        lambda ema, raw: {"state_dict": raw, "ema": {"decay": 0.999, "module": ema}},
        lambda ema, raw: {"state_dict": raw, "ema_state_dict": ema},
        lambda ema, raw: {"model": {"state_dict": raw, "state_dict_ema": ema}, "epoch": 3},
        lambda ema, raw: {"student": raw, "teacher": ema},
        lambda ema, raw: {"model": raw, "teacher": ema},
        lambda ema, raw: {"state_dict": ema, "ema": None, "model_ema": {}},
        lambda ema, raw: {"state_dict": ema, "ema": {"decay": 0.999, "updates": torch.tensor(3)}},
        lambda ema, raw: {"n_averaged": torch.tensor(7)} | named("module.", ema),  # torch's AveragedModel
        lambda ema, raw: named("student.", ema),
    ],
)
def test_averaged_weights_go_before_others(layout, pair):
    state = pair[0].state_dict()
    takes(*pair, layout(state, other_than(state)))


def test_averaged_weights_that_cannot_be_read_are_no_reason_to_take_others(pair):
    state = pair[0].state_dict()
    with pytest.raises(ValueError, match=r"averaged weights under 'ema', but no dictionary of tensors by name"):
        vitrel.load_pretrained(pair[1], {"state_dict": state, "ema": {"decay": 0.9, "shadow_params": [*state.values()]}})
    short = {name: value for name, value in state.items() if name != "norm.bias"}
    with pytest.raises(RuntimeError, match=r"not in the file: norm\.bias\."):
        vitrel.load_pretrained(pair[1], {"student": state, "teacher": short})


def test_a_prefix_that_not_all_names_share_is_not_removed(pair):
    """Which of the parts is the model is not guessed: the names are told."""
    state = pair[0].state_dict()
    for beside in ({"criterion.weight": torch.ones(3)}, named("teacher.", state)):
        with pytest.raises(RuntimeError, match=r"The first others are (model|teacher|criterion)\."):
            vitrel.load_pretrained(pair[1], {"state_dict": named("model.", state) | beside})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("name", ["blocks.1.mlp.fc1.weight", "blocks.0.position.relative_position_bias_table"])
def test_quantized_weights_are_refused(dtype, name, pair):
    model, again = pair
    before = {key: value.clone() for key, value in again.state_dict().items()}
    for size in (64, 96):  # where the table is resampled too
        again = timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=size)
        with pytest.raises(ValueError, match=rf"{re.escape(name)} is {str(dtype)[6:]}, the model's .* float32"):
            vitrel.load_pretrained(again, model.state_dict() | {name: model.state_dict()[name].to(dtype)})
    again = pair[1]
    with pytest.raises(ValueError, match="int8"):
        vitrel.load_pretrained(again, {key: value.to(torch.int8) for key, value in model.state_dict().items()})
    assert all(torch.equal(value, before[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_cast(dtype, pair):
    state = {name: value.to(dtype) for name, value in pair[0].state_dict().items()}
    vitrel.load_pretrained(pair[1], state | {"steps": torch.tensor(3)}, allow_unused=["steps"])
    own = pair[1].state_dict()
    assert all(value.dtype == torch.float32 and torch.equal(value, state[name].float()) for name, value in own.items())


def test_loading_resamples_into_the_models_grid():
    theirs = perturb(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=4))
    ours = timm.create_model("vitrel_vit_ti16_absolute", depth=1, num_classes=4, img_size=(320, 256))
    vitrel.load_pretrained(ours, theirs.state_dict())
    expected = resample_abs_pos_embed(theirs.pos_embed, [20, 16], [14, 14])
    torch.testing.assert_close(ours.pos_embed.pos_embed, expected, atol=1e-6, rtol=0)
    theirs = perturb(timm.create_model("swin_tiny_patch4_window7_224", **SHORT))
    ours = vitrel.load_pretrained(timm.create_model("vitrel_swin_t", window_size=12, **SHORT), theirs.state_dict())
    assert ours.layers[0].blocks[0].position.relative_position_bias_table.shape == (529, 3)


def test_sources_of_a_grid_that_no_square_gives_are_refused():
    table = perturb(timm.create_model("vitrel_vit_n8_table", num_classes=4, img_size=(32, 128)))
    ours = timm.create_model("vitrel_vit_n8_table", num_classes=4)
    with pytest.raises(ValueError, match=r"has 220 rows, which no square grid gives: build the model with the img_size"):
        vitrel.load_pretrained(ours, table.state_dict())
    vitrel.load_pretrained(ours, table)  # a model knows its grid
    center = ours.blocks[0].position.relative_position_bias_table[7 * 15 + 7]
    assert torch.equal(center, table.blocks[0].position.relative_position_bias_table[3 * 31 + 15])


def test_weights_bring_a_model_from_the_meta_device_to_life():
    for name in ("vitrel_vit_n8_rope_axial", "vitrel_vit_n8_sincos", "vitrel_swin_n"):
        source = perturb(timm.create_model(name, num_classes=4))
        ours = timm.create_model(name, num_classes=4, device="meta").to_empty(device="cpu").eval()
        vitrel.load_pretrained(ours, source.state_dict())
        image = torch.randn(1, 3, 72, 64)
        assert torch.equal(ours(image), source(image))


def test_refusals(tmp_path):
    model = timm.create_model("vitrel_swin_n", num_classes=4)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"not in the model: extra.weight"):
        vitrel.load_pretrained(model, state | {"extra.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"not in the file: norm.bias"):
        vitrel.load_pretrained(model, {n: t for n, t in state.items() if n != "norm.bias"})
    with pytest.raises(RuntimeError, match=r"head.fc.weight: \(4, 128\) in the file, \(9, 128\) in the model.*reset_head=True"):
        vitrel.load_pretrained(timm.create_model("vitrel_swin_n", num_classes=9), state)
    vitrel.load_pretrained(timm.create_model("vitrel_swin_n", num_classes=9), state, reset_head=True)
    with pytest.raises(RuntimeError, match=r"NaN or infinity in norm.weight; nothing was loaded"):
        vitrel.load_pretrained(model, state | {"norm.weight": torch.full((128,), torch.nan)})
    with pytest.raises(RuntimeError, match=r"proj.weight: \(32, 3, 4, 4\) in the file, "):
        vitrel.load_pretrained(model, state | {"patch_embed.proj.weight": torch.zeros(32, 3, 4, 4)})
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        vitrel.load_pretrained(model, tmp_path / "missing.pth")
    for name, content in [("empty.pth", b""), ("broken.pth", b"PK\x03\x04 truncated"), ("empty.safetensors", b"")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} \({len(content)} bytes\) is no readable checkpoint"):
            vitrel.load_pretrained(model, tmp_path / name)
    torch.save({"code": print}, tmp_path / "code.pth")
    with pytest.raises(ValueError, match="was refused: it holds more than tensors"):
        vitrel.load_pretrained(model, tmp_path / "code.pth")
    with pytest.raises(ValueError, match="holds no state dict"):
        vitrel.load_pretrained(model, {"epoch": 3})


@pytest.mark.slow
def test_imagenet_weights_predict_as_in_timm():
    """ViT-Tiny on 10 ILSVRC validation images: timm's predictions, image by image; on all 500 they are right for 69.8 %."""
    images, index = shared("data/ilsvrc-val-nette224/val"), shared("data/ilsvrc-val-nette224/imagenet_index.tsv")
    path = shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.pth")
    overlay = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(path)))
    ours = timm.create_model("vitrel_vit_ti16_absolute", **overlay).eval()
    theirs = timm.create_model("vit_tiny_patch16_224", **overlay).eval()
    cfg = dict(input_size=224, crop_pct=1.0, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
    data = ImageFolder(images, create_transform(**cfg))
    samples = torch.utils.data.Subset(data, range(0, 500, 50))
    table = dict(line.split("\t")[:2] for line in index.read_text().splitlines() if line.startswith("n0"))
    classes = torch.tensor([int(table[name.split("_")[0]]) for name in data.classes])
    right = agree = 0
    with torch.inference_mode():
        for image, label in torch.utils.data.DataLoader(samples, batch_size=10):
            a, b = ours(image), theirs(image)
            torch.testing.assert_close(a, b, atol=2e-4, rtol=0)
            agree += (a.argmax(1) == b.argmax(1)).sum().item()
            right += (a.argmax(1) == classes[label]).sum().item()
    assert len(data) == 500 and agree == 10
    assert 5 <= right <= 9


@pytest.mark.slow
def test_timms_route_refuses_for_another_task_too(tmp_path):
    """With other classes, or as a backbone, timm loads what fits and only logs the rest."""
    scaled = timm.create_model("vitrel_vit_n8_absolute", block_args=dict(init_values=0.1))
    save_file(scaled.state_dict(), tmp_path / "scaled.safetensors")
    short = timm.create_model("vitrel_vit_n8_absolute", depth=3)
    save_file(short.state_dict(), tmp_path / "short.safetensors")
    for how in (dict(num_classes=10), dict(features_only=True), dict(in_chans=1)):
        for file, text in (("scaled", r"blocks\.0\.ls1\.gamma"), ("short", r"blocks\.3\.")):
            overlay = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / f"{file}.safetensors")))
            with pytest.raises(RuntimeError, match=text):
                timm.create_model("vitrel_vit_n8_absolute", **overlay, **how)
    overlay = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / "short.safetensors")))
    for how in (dict(num_classes=10), dict(features_only=True), dict(in_chans=1)):
        timm.create_model("vitrel_vit_n8_absolute", depth=3, **overlay, **how)


def test_one_name_and_other_slips():
    model = timm.create_model("vitrel_vit_n8_table", num_classes=3)
    with pytest.raises(RuntimeError, match=r"not in the file: patch_embed\.proj\.weight"):
        vitrel.load_pretrained(model, {"cls_token": model.cls_token.data}, allow_unset="*position*")
    vitrel.load_pretrained(model, {**model.state_dict(), "extra": torch.zeros(1)}, allow_unused="extra")
    flat = model.state_dict() | {"blocks.0.position.relative_position_bias_table": torch.zeros(228)}
    with pytest.raises(RuntimeError, match=r"relative_position_bias_table: \(228,\) in the file, \(228, 3\) in the model"):
        vitrel.load_pretrained(model, flat)
    flat = timm.create_model("vitrel_vit_n8_absolute").state_dict() | {"pos_embed.pos_embed": torch.zeros(65)}
    with pytest.raises(ValueError, match="a tensor of the file has a shape that no known layout has"):
        vitrel.load_pretrained(timm.create_model("vitrel_vit_n8_absolute"), flat)
