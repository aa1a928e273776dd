"""Numbers said of attention, against double loops written from their definitions."""

import math

import pytest
import timm
import torch

from helpers.variants import perturbed, small_model
from vitrel import Grid
from vitrel.inspect.attention import (
    Layer,
    attention_statistics,
    attention_statistics_of,
    for_each_layer,
    layer_statistics,
    offset_mean,
    record,
)
from vitrel.models.vit import ViT


def projected(name, model, x):
    """q and k of one layer [B, N, H, D] in numpy, from the output of its first linear map."""
    found = []
    hook = model.get_submodule(name).qkv.register_forward_hook(lambda _, given, out: found.append(out.detach()))
    with torch.no_grad():
        model(x)
    hook.remove()
    heads = model.get_submodule(name).num_heads
    q, k, _ = found[0].flatten(1, -2).unflatten(-1, (3, heads, -1)).double().unbind(2)
    return q.numpy(), k.numpy()


def softmax(scores):
    top = max(scores)
    e = [math.exp(s - top) for s in scores]
    return [x / sum(e) for x in e]


def looped(q, k, keys, score, place, patch, image, prefix):
    """The four statistics of one layer; keys(i): those query i sees; score(i, j): bias of a pair for each head."""
    entropies, distances, shares = [], [], []
    batch, tokens, heads, width = q.shape
    for b in range(batch):
        for head in range(heads):
            for i in range(prefix, tokens):
                seen = keys(i)
                p = softmax([q[b, i, head] @ k[b, j, head] / math.sqrt(width) + score(i, j)[head] for j in seen])
                entropies.append(-sum(x * math.log(x) for x in p))
                mass = sum(x for x, j in zip(p, seen, strict=True) if j >= prefix)
                d = [(place(i)[0] - place(j)[0], place(i)[1] - place(j)[1]) if j >= prefix else None for j in seen]
                distances.append(sum(x * math.hypot(*o) for x, o in zip(p, d, strict=True) if o) / mass)
                pixels = [math.hypot(o[0] * patch[0], o[1] * patch[1]) if o else 0.0 for o in d]
                shares.append(sum(x * o for x, o in zip(p, pixels, strict=True)) / mass / math.hypot(*image))
    mean = [sum(values) / len(values) for values in (entropies, distances, shares)]
    return dict(
        attention_entropy=mean[0],
        attention_span=math.exp(mean[0]),
        attention_distance=mean[1],
        attention_distance_share=mean[2],
    )


def test_statistics_of_global_attention():
    torch.manual_seed(1)
    shape = dict(img_size=32, patch_size=(8, 4), embed_dim=16, depth=2, num_heads=2, num_classes=5, reg_tokens=1)
    model = perturbed(ViT(**shape, position="none").eval(), 0.5)
    x = torch.randn(2, 3, 22, 15)  # 3 x 4 patches of 8 x 4 pixels, the last ones partial
    layers = record(model, x)
    found = []
    for layer in layers:
        q, k = projected(layer.name, model, x)
        found.append(
            looped(
                q,
                k,
                keys=lambda i: range(14),
                score=lambda i, j: (0, 0),
                place=lambda i: divmod(i - 2, 4),
                patch=(8, 4),
                image=(22, 15),
                prefix=2,
            )
        )
        assert layer_statistics(layer) == pytest.approx(found[-1], rel=1e-5)
    mean = {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}
    mean["attention_span"] = math.exp(mean["attention_entropy"])
    assert attention_statistics(layers) == pytest.approx(mean, rel=1e-5)
    assert found[0]["attention_entropy"] != pytest.approx(found[1]["attention_entropy"], rel=1e-3)


def test_statistics_in_shifted_windows():
    model = small_model("vitrel_swin_n_table")
    h, w, x = 5, 6, torch.randn(1, 3, 10, 12)
    layers = record(model, x)
    assert [(layer.grid[:2], layer.stride) for layer in layers[4:]] == [((2, 2), (8.0, 8.0))] * 2  # 5 x 6, 3 x 3, 2 x 2
    layer = layers[1]
    assert (layer.name, layer.grid, layer.shift) == ("layers.0.blocks.1.attn", Grid(h, w), (2, 2))
    block = model.get_submodule("layers.0.blocks.1")
    table = block.position(block.window).tables[0].bias.detach().double().numpy()

    def window(i):
        y, x = divmod(i, w)
        return (y - 2) // 4, (x - 2) // 4

    def score(i, j):
        (y, x), (v, u) = divmod(i, w), divmod(j, w)
        return table[:, (y - v + 3) * 7 + x - u + 3]

    q, k = projected(layer.name, model, x)
    expected = looped(
        q,
        k,
        keys=lambda i: [j for j in range(h * w) if window(j) == window(i)],
        score=score,
        place=lambda i: divmod(i, w),
        patch=(2, 2),
        image=(10, 12),
        prefix=0,
    )
    assert layer_statistics(layer) == pytest.approx(expected, rel=1e-5)


def test_known_values():
    """Uniform attention over four tokens in a row: every value is known by hand."""
    weights = torch.full((1, 1, 1, 4, 4), 0.25)
    layer = Layer("", Grid(1, 4), None, (0, 0), torch.arange(4)[None], weights, None, None, stride=(16.0, 16.0))
    mean = (1.5 + 1 + 1 + 1.5) / 4
    share = mean * 16 / math.hypot(16, 64)
    assert list(layer_statistics(layer).values()) == pytest.approx([math.log(4), 4, mean, share])
    one = layer._replace(weights=torch.eye(4)[None, None, None])
    assert list(layer_statistics(one).values()) == pytest.approx([0, 1, 0, 0])
    prefixed = layer._replace(grid=Grid(1, 3, 1))  # patches see patches at distances 0, 1, 2 | 1, 0, 1 | 2, 1, 0
    assert layer_statistics(prefixed)["attention_distance"] == pytest.approx((1 + 2 / 3 + 1) / 3)
    blind = prefixed._replace(weights=weights.clone().index_fill_(4, torch.arange(1, 4), 0.0))
    assert math.isnan(layer_statistics(blind)["attention_distance"])  # no query attends to a patch
    blind.weights[..., 3, :] = 0.25  # now the last one does
    assert layer_statistics(blind)["attention_distance"] == pytest.approx(1)


def test_layers_one_by_one():
    model, x = small_model("vitrel_swin_n_alibi"), torch.randn(2, 3, 40, 24)
    assert attention_statistics_of(model, x) == pytest.approx(attention_statistics(record(model, x)))
    seen = []
    for_each_layer(model, x, seen.append, position=False)
    assert len(seen) == 6 and all(layer.content is None and layer.position is None for layer in seen)


@pytest.mark.parametrize("name", ["vitrel_swin_n_rope_mixed", "vitrel_vit_n8_shaw", "vitrel_vit_n8_lookhere"])
def test_offset_mean(name):
    for layer in record(small_model(name), torch.randn(2, 3, 22, 18))[:2]:
        h, w = layer.window or layer.grid[:2]
        first = layer.weights.shape[-1] - h * w
        total, count = torch.zeros(2, layer.weights.shape[2], 2 * h - 1, 2 * w - 1).double().unbind(0)
        for i in range(h * w):
            for j in range(h * w):
                dy, dx = i // w - j // w, i % w - j % w
                for window, tokens in enumerate(layer.tokens):
                    if tokens[first + i] >= 0 and tokens[first + j] >= 0:
                        pair = layer.weights[:, window, :, first + i, first + j]
                        seen = (
                            torch.ones_like(pair)
                            if layer.visible is None
                            else layer.visible[:, window, :, first + i, first + j]
                        )
                        total[:, dy + h - 1, dx + w - 1] += (pair * seen).sum(0)
                        count[:, dy + h - 1, dx + w - 1] += seen.sum(0)
        torch.testing.assert_close(offset_mean(layer, layer.weights), (total / count).float(), equal_nan=True)


def test_refused_by_name():
    with pytest.raises(ValueError, match=r"no attention that can be seen in resnet10t: .*attention_timm lists"):
        record(timm.create_model("resnet10t"), torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="no attention that can be seen in Linear"):
        record(torch.nn.Linear(3, 3), torch.randn(1, 3, 32, 32))
