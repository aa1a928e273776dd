"""relativize: nothing but position changes, at any size, and what it adds is what the definition says."""

import copy

import pytest
import torch
from torch import nn

from helpers.relativize_models import MODELS, build, image, position_parameters, randomise
from vitrel.convert.relativize import relativize
from vitrel.position import POSITIONS

ROPE = ("eva02", "cat", "mixed", "dinov3", "attention_rope")
SILENT = ("table", "factorised", "clipped", "t5", "shaw", "decomposed", "transformer_xl")


def bias_matrix(table, h, w, prefix):
    """[H, N, N] from the definition: rows of [(2h-1)(2w-1) + 3, H] by offset, then cls to token, token to cls, cls to cls."""
    n, last = prefix + h * w, (2 * h - 1) * (2 * w - 1)
    out = torch.zeros(table.shape[1], n, n)
    for i in range(n):
        for j in range(n):
            if i < prefix or j < prefix:
                row = last + (2 if i < prefix and j < prefix else 0 if i < prefix else 1)
            else:
                (yi, xi), (yj, xj) = divmod(i - prefix, w), divmod(j - prefix, w)
                row = (yi - yj + h - 1) * (2 * w - 1) + xi - xj + w - 1
            out[:, i, j] = table[row]
    return out


@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_but_position(name):
    model, x = build(name), image()
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    assert relativize(model) is model
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in state.items())
    assert set(after) - set(state) == set(position_parameters(model)) != set()
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) == set(position_parameters(model))


@pytest.mark.parametrize("position", SILENT)
@pytest.mark.parametrize("name", ["vit", "mixed"])
def test_learned_rows_start_at_zero(name, position):
    model, x = build(name), image()
    before = model(x)
    torch.testing.assert_close(relativize(model, position)(x), before, atol=1e-5, rtol=1e-5)
    model = relativize(build(name), position, zero_init=False)
    assert all(parameter.any() for parameter in position_parameters(model).values())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vitrel"])
def test_table_is_a_mask_of_the_original(name):
    """A random table on a non-square grid, next to the model's own rope, against timm's attention with the bias as its mask."""
    options = dict(img_size=(24, 40), dynamic_img_size=True) if name != "deit" else dict(img_size=(24, 40))
    original = build(name, **options)
    model, x = randomise(relativize(copy.deepcopy(original))), image(24, 40)
    for block in model.blocks:
        block.attn.position = model.blocks[0].attn.position
    table = model.blocks[0].attn.position.relative_position_bias_table.detach()
    mask = bias_matrix(table, 3, 5, original.num_prefix_tokens)
    torch.testing.assert_close(model(x), original(x, attn_mask=mask), atol=1e-5, rtol=1e-5)
    assert (model(x) - original(x)).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["reg", "vitrel"])
def test_attention_against_a_double_loop(name):
    model = randomise(relativize(build(name, img_size=(24, 40), qkv_bias=True)))
    seen, attn = {}, model.blocks[1].attn
    attn.register_forward_hook(lambda module, args, out: seen.update(x=args[0][0], out=out[0]))
    with torch.no_grad():
        model(image(24, 40))
        position = model.blocks[1].position if name == "vitrel" else attn.position
        bias = bias_matrix(position.relative_position_bias_table, 3, 5, model.num_prefix_tokens)
        n, width = seen["x"].shape[0], 16
        q, k, v = (t.view(n, 2, width) for t in attn.qkv(seen["x"]).chunk(3, -1))
        if name == "reg":
            q, k = attn.q_norm(q), attn.k_norm(k)
        rows = []
        for i in range(n):
            heads = []
            for head in range(2):
                logits = torch.stack([q[i, head] @ k[j, head] / width**0.5 + bias[head, i, j] for j in range(n)])
                heads.append(logits.softmax(0) @ v[:, head])
            rows.append(torch.cat(heads))
        torch.testing.assert_close(seen["out"], attn.proj(torch.stack(rows)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ROPE)
def test_rope_is_kept_dropped_or_replaced(name):
    x = image()
    kept, dropped, replaced = (build(name) for _ in range(3))
    relativize(dropped, rope="drop")
    relativize(replaced, "rope_axial+table")
    assert dropped.rope is None and replaced.rope is None
    assert not any(key.startswith("rope.") for key in replaced.state_dict())
    without = build(name)
    without.rope = None
    torch.testing.assert_close(dropped(x), without(x), atol=1e-5, rtol=1e-5)
    assert (replaced(x) - kept(x)).abs().max() > 1e-5 < (replaced(x) - dropped(x)).abs().max()
    assert relativize(kept)(image(16, 56)).shape == replaced(image(20, 50)).shape == (2, 5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("absolute", ["keep", "drop"])
def test_any_size(name, absolute):
    model = randomise(relativize(build(name), absolute=absolute))
    if name not in ("vitrel", "deit", "dinov3"):
        peer = build(name, dynamic_img_size=True, dynamic_img_pad=True)
        if absolute == "drop":
            peer.pos_embed = None
        for parameter in position_parameters(silent := copy.deepcopy(model)).values():
            nn.init.zeros_(parameter)
        torch.testing.assert_close(silent(image(40, 20)), peer(image(40, 20)), atol=1e-5, rtol=1e-5)
    state = copy.deepcopy(model.state_dict())
    for size in [(8, 8), (64, 24), (37, 50), (32, 32)]:
        assert model(image(*size)).isfinite().all()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert (model.pos_embed is None) == (absolute == "drop" or name in ("no_absolute", "dinov3"))


def test_permuting_patches_matters_only_through_position():
    model = relativize(build("no_class"), absolute="drop")
    patches = image().unfold(2, 8, 8).unfold(3, 8, 8)  # [B, 3, 4, 4, 8, 8]
    mixed = patches.flatten(2, 3)[:, :, torch.randperm(16)].unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    torch.testing.assert_close(model(mixed), model(image()), atol=1e-5, rtol=1e-5)
    randomise(model)
    assert (model(mixed) - model(image())).abs().max() > 1e-3


@pytest.mark.parametrize("position", [k for k, v in POSITIONS.items() if v.site == "attention" and k != "none"])
def test_gradient_reaches_every_parameter(position):
    """With rows drawn at random (at zero, Transformer-XL's v has none) and pooled patches (prefix queries may have no term)."""
    model = relativize(build("reg", global_pool="avg"), position, zero_init=False).train()
    model(image(24, 16)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    missing = [name for name, p in position_parameters(model).items() if not p.grad.any()]
    assert missing == []


def test_masks():
    model, original = relativize(build("vit")), build("vit")
    mask = torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) > 0.4
    mask.fill_diagonal_(True)
    for options in (dict(attn_mask=mask), dict(attn_mask=mask[None, None].float().log()), dict(is_causal=True)):
        torch.testing.assert_close(model(image(), **options), original(image(), **options), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="attn_mask and is_causal exclude each other"):
        model(image(), attn_mask=mask, is_causal=True)
