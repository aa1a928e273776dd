import base64
import gzip
import json

import numpy as np
import pytest
import torch

from vitrel.evaluate.pictures import QUERIES, REACH, collect_pictures, encode_lattice, encode_map
from vitrel.evaluate.settings import Sweep
from vitrel.grid import Grid
from vitrel.inspect.attention import Layer, offset_mean, record


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def unpacked(text, kind, shape):
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), kind).reshape(shape).astype("float32"))


def lattice(item):
    steps = unpacked(item["values"], np.int8, item["shape"])
    values = steps / 127 * torch.tensor(item["scale"])[:, None, None]
    return values.masked_fill(steps == -128, float("nan"))


def weights(item, which="weights"):
    scale = torch.tensor(item["scale"]).reshape(item["shape"][:2])
    return unpacked(item[which], np.uint8, item["shape"]) / 255 * scale[..., None]


def layer_of(h, w, prefix=0, heads=2):
    n = prefix + h * w
    logits = torch.randn(2, 1, heads, n, n, generator=torch.Generator().manual_seed(0))
    return Layer(
        "attn", Grid(h, w, prefix), None, (0, 0), torch.arange(n)[None], logits.softmax(-1), logits.mul(2).softmax(-1), logits
    )


def test_lattices_come_back():
    values = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 1.0, 50.0])[:, None, None]
    values[0, 2, 3] = float("nan")
    found = lattice(encode_lattice(values))
    assert found[0, 2, 3].isnan() and found.isnan().sum() == 1
    error = (found - values).abs().nan_to_num().amax((1, 2)) / values.nan_to_num().abs().amax((1, 2))
    assert error.max() < 0.51 / 127


def test_large_lattices_are_cut_in_the_middle():
    values = torch.zeros(1, 2 * REACH + 7, 9)
    values[0, REACH + 3, 4] = 1.0
    item = encode_lattice(values)
    assert item["shape"] == [1, 2 * REACH + 1, 9] and item["full"] == [2 * REACH + 7, 9]
    assert lattice(item)[0, REACH, 4] == 1.0  # offset 0 stays in the middle


def test_maps_come_back():
    layer = layer_of(3, 5, prefix=1)
    item = encode_map(layer, 1)
    assert item["queries"] == list(range(16)) and item["tokens"] is None and item["step"] == 1
    for which, true in (("weights", layer.weights), ("content", layer.content)):
        assert (weights(item, which) - true[1, 0].transpose(0, 1)).abs().max() < 0.51 / 255
    mean = encode_map(layer, 1, mean=True)
    assert mean["shape"] == [16, 1, 16]
    assert (weights(mean)[:, 0] - layer.weights[1, 0].mean(0)).abs().max() < 0.51 / 255


def test_maps_of_many_patches_keep_some_queries():
    layer = layer_of(20, 30, prefix=1, heads=1)
    item = encode_map(layer, 0)
    step, queries = item["step"], torch.tensor(item["queries"])
    assert step == 2 and queries[0] == 0 and len(queries) == 1 + 10 * 15 <= QUERIES
    assert ((queries[1:] - 1) // 30 % 2).eq(1).all() and ((queries[1:] - 1) % 30 % 2).eq(1).all()
    assert (weights(item)[5, 0] - layer.weights[0, 0, 0, queries[5]]).abs().max() < 0.51 / 255


def test_windows_say_where_their_tokens_lie(trained):
    model = trained("vitrel_swin_n", img_size=(64, 64)).model
    layer = record(model, torch.randn(1, 3, 26, 36))[1]
    item = encode_map(layer, 0)
    assert sorted(item["queries"]) == list(range(layer.grid.h * layer.grid.w))
    assert any(-1 in tokens for tokens in item["tokens"])
    for row in (0, 7, len(item["queries"]) - 1):
        tokens = item["tokens"][item["windows"][row]]
        slot = tokens.index(item["queries"][row])
        true = layer.weights[0, item["windows"][row], :, slot]
        assert (weights(item)[row] - true).abs().max() < 0.51 / 255


def test_a_sweep_is_collected(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_table", seed=1), trained("vitrel_vit_n8_rope_axial")]
    with torch.no_grad():
        models[0].model.blocks[0].position.relative_position_bias_table.normal_()
    sweep = Sweep("noise", ((32, 32), (32, 48)), n=4)
    path = collect_pictures(models, sweep, tmp_path)
    found = read(path)
    assert path == tmp_path / "pictures.json.gz" and found["left_out"] == []
    table, rope = found["models"]
    assert (table["label"], table["seed"], rope["label"]) == ("vitrel_vit_n8_table", 0, "vitrel_vit_n8_rope_axial")
    assert table["layers"] == [f"blocks.{i}.attn" for i in range(len(models[0].model.blocks))]
    places = {(item["size"], item["policy"]) for item in table["lattices"]}
    assert places == {("32x32", "none"), *(("32x48", policy) for policy in ("geometric", "clip", "bicubic"))}
    assert len(table["maps"]) == 2 * 2 * len(table["layers"]) and table["images"] == ["left", "above"]
    first = next(item for item in table["lattices"] if item["layer"] == 0 and item["size"] == "32x32")
    layer = record(models[0].model, torch.zeros(1, 3, 32, 32))[0]
    assert torch.allclose(lattice(first), offset_mean(layer, layer.position), atol=0.05, equal_nan=True)
    assert all(found["pictures"][key].startswith("data:image/png;base64,") for key in table["maps"][0]["pictures"])


def test_the_budget_holds_and_what_is_left_out_is_named(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table")]
    path = collect_pictures(models, Sweep("noise", ((32, 32), (64, 64)), n=4), tmp_path, budget=40_000)
    found = read(path)
    assert path.stat().st_size < 44_000
    assert any("vitrel_vit_n8_table at 64x64: attention of" in text for text in found["left_out"])
    assert found["models"][0]["lattices"]


def test_models_without_attention_have_the_reason(trained, noise, tmp_path):
    import timm

    net = timm.create_model("resnet10t", num_classes=3).eval()
    models = [trained("vitrel_vit_n8_none", model_args={}), trained("vitrel_vit_n8_none", label="net")]
    object.__setattr__(models[1], "model", net)
    found = read(collect_pictures(models, Sweep("noise", ((32, 32),), n=4), tmp_path))["models"]
    assert found[0]["error"] is None and "no attention that can be seen in resnet10t" in found[1]["error"]


@pytest.mark.parametrize("protocols", [("scale", "canvas"), ("canvas",)])
def test_one_protocol_is_shown(trained, noise, tmp_path, protocols):
    collect_pictures([trained("vitrel_vit_n8_none")], Sweep("noise", ((32, 32),), protocols, n=4), tmp_path)
    assert {asked["protocol"] for asked in noise.asked} == {protocols[0]}
