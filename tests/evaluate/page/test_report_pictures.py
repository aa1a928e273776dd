"""The pictures of a report, which are recorded by running the models."""

import base64
import gzip
import json

import numpy as np
import torch

from vitrel.evaluate.page.pictures import (
    QUERIES,
    REACH,
    collect_pictures,
    encode_lattice,
    encode_map,
    token_embedding,
)
from vitrel.evaluate.sweep import Sweep
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
    table, rope = found["models"]
    assert path == tmp_path / "pictures.json.gz" and table["left_out"] == rope["left_out"] == []
    assert (table["label"], table["seed"], rope["label"]) == ("vitrel_vit_n8_table", 0, "vitrel_vit_n8_rope_axial")
    assert table["layers"] == [f"blocks.{i}.attn" for i in range(len(models[0].model.blocks))]
    places = {(item["size"], item["policy"]) for item in table["lattices"]}
    assert places == {("32x32", "none"), *(("32x48", policy) for policy in ("geometric", "clip", "bicubic"))}
    assert len(table["maps"]) == 2 * 2 * len(table["layers"]) and table["images"] == ["left", "above"]
    first = next(item for item in table["lattices"] if item["layer"] == 0 and item["size"] == "32x32")
    layer = record(models[0].model, torch.zeros(1, 3, 32, 32))[0]
    assert torch.allclose(
        lattice(first | {"values": found["blobs"][first["values"]]}),
        offset_mean(layer, layer.position),
        atol=0.05,
        equal_nan=True,
    )
    assert all(found["blobs"][key].startswith("data:image/webp;base64,") for key in table["maps"][0]["pictures"])
    seen = [(item["size"], item["protocol"], item["shape"]) for item in found["seen"]]
    both = ("scale", "canvas")
    assert seen == [("32x32", name, [32, 32]) for name in both] + [("32x48", name, [32, 48]) for name in both]
    assert {requested["protocol"] for requested in noise.requested} == {*both}


def test_the_first_model_need_not_have_every_policy(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_absolute"), trained("vitrel_vit_n8_table")]
    found = read(collect_pictures(models, Sweep("noise", ((48, 48),), n=4, policies=("bicubic", "clip")), tmp_path))
    assert {item["policy"] for item in found["models"][1]["lattices"]} == {"none", "bicubic", "clip"}
    assert {(item["label"], item["size"]) for item in found["seen"]} == {
        ("vitrel_vit_n8_absolute", s) for s in ("32x32", "48x48")
    }


def test_no_photograph_is_collected_where_none_is_wanted(trained, noise, tmp_path):
    found = read(
        collect_pictures([trained("vitrel_vit_n8_table")], Sweep("noise", ((32, 32),), n=4, photographs=False), tmp_path)
    )
    assert "data:image" not in json.dumps(found) and found["seen"] == []
    assert found["models"][0]["maps"] and all(item["pictures"] == [] for item in found["models"][0]["maps"])


def test_position_that_does_not_act_in_attention_is_told_apart(trained, noise, tmp_path):
    """Of an embedding added to tokens there is the similarity of patches, and no map without position."""
    model = trained("vitrel_vit_n8_absolute")
    found = read(collect_pictures([model], Sweep("noise", ((32, 32), (48, 48)), n=4), tmp_path))
    (one,) = found["models"]
    assert not one["acts"] and one["lattices"] == [] and {item["content"] for item in one["maps"]} == {None}
    (first, larger) = one["similar"]
    assert (first["size"], first["grid"], larger["grid"]) == ("32x32", [4, 4], [6, 6])
    rows = torch.nn.functional.normalize(model.model.pos_embed.pos_embed[0, 1:], dim=-1)
    cosines = unpacked(found["blobs"][first["values"]], np.int8, (16, 16)) / 127
    assert (cosines - rows @ rows.mT).abs().max() < 0.51 / 127


def test_embeddings_of_timm_are_taken_at_the_size_that_is_asked_for(trained):
    import timm

    how = dict(img_size=64, depth=1, embed_dim=16, num_heads=2, num_classes=3)
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **how)
    assert torch.equal(token_embedding(model, (64, 64)).flatten(0, 1), model.pos_embed[0, 1:].detach())
    assert token_embedding(model, (64, 96)).shape == (4, 6, 16)
    for name in ("vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224"):
        assert token_embedding(timm.create_model(name, **how | {"img_size": 56}), (56, 56)).shape == (4, 4, 16)
    assert token_embedding(timm.create_model("resnet10t"), (64, 64)) is None
    assert token_embedding(trained("vitrel_vit_n8_table").model, (32, 32)) is None


def test_offsets_that_are_the_same_at_every_size_are_stored_once(trained, noise, tmp_path):
    model = trained("vitrel_swin_n", img_size=(64, 64))
    found = read(collect_pictures([model], Sweep("noise", ((64, 64), (128, 128)), n=4, policies=("fixed",)), tmp_path))
    lattices = found["models"][0]["lattices"]
    assert len({item["size"] for item in lattices}) == 2 and len({item["values"] for item in lattices}) < len(lattices)


def test_the_budget_holds_and_what_is_left_out_is_named(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table")]
    path = collect_pictures(models, Sweep("noise", ((32, 32), (64, 64)), n=4), tmp_path, budget=40_000)
    found = read(path)
    assert path.stat().st_size < 44_000
    assert any("64x64" in text for text in found["models"][0]["left_out"])
    assert found["models"][0]["lattices"]


def test_models_without_attention_have_the_reason(trained, noise, tmp_path):
    import timm

    net = timm.create_model("resnet10t", num_classes=3).eval()
    models = [trained("vitrel_vit_n8_none", model_args={}), trained("vitrel_vit_n8_none", label="net")]
    object.__setattr__(models[1], "model", net)
    found = read(collect_pictures(models, Sweep("noise", ((32, 32),), n=4), tmp_path))["models"]
    assert found[0]["error"] is None and "no attention that can be seen in resnet10t" in found[1]["error"]
