"""A strip of tiles with memory against the whole strip under the same mask, block by block from the model's own parts.

Also the attention over segments against the oracle of the paper.
"""

import functools

import pytest
import torch

import oracles
import vitrel  # noqa: F401  registers the models with timm
from helpers import each
from helpers.variants import KEYS, make, perturbed
from oracles.streams import PAIRS
from vitrel.grid import Grid
from vitrel.inputs import forward_memory
from vitrel.inputs.memory import segment_attention, with_past
from vitrel.models.vit import ViT

TILES = (3, 1, 2, 2)  # rows of patches of each tile
WIDTH, PATCH = 3, 4
SEGMENTS, W, HEADS, DIM = (2, 1, 3), 4, 2, 8  # rows of the segments of one layer's attention, and their width
WHOLE = Grid(sum(SEGMENTS), W)
OFFSETS_ONLY = [  # encodings that read nothing but offsets: the size of the grid does not matter
    ("t5", {"bidirectional": False}), ("alibi", {}), ("shaw", {}), ("deberta", {}), ("transformer_xl", {}), ("rope_axial", {}),
    ("rope_mixed", {}), ("none", {}), ("table", {"policy": "clip"}),
]  # fmt: skip


def model_of(position, options=None, prefix=1, **how):
    torch.manual_seed(0)
    heads = 12 if position == "lookhere" else 4
    sizes = dict(img_size=(8, 12), patch_size=PATCH, embed_dim=heads * 8, depth=3, num_heads=heads, num_classes=5)
    how = dict(class_token=prefix > 0, reg_tokens=max(0, prefix - 1), global_pool="token" if prefix else "avg") | how
    return perturbed(ViT(**sizes, position=position, position_args=options, **how).double().eval(), 0.4)


def strip(tiles=TILES, batch=2):
    return torch.randn(batch, 3, sum(tiles) * PATCH, WIDTH * PATCH, dtype=torch.float64)


def in_tiles(model, image, tiles=TILES, **how):
    """Tokens of every tile, each run with the memory of those above."""
    found, memory = [], None
    for tile in image.split([rows * PATCH for rows in tiles], 2):
        tokens, memory = forward_memory(model, tile, memory, **how)
        found.append(tokens)
    return found, memory


@functools.cache
def visible(tiles, prefix, length):
    """[S*P + N, S*P + N] by a double loop: the prefix tokens of each tile first, then all patches."""
    owner = [s for s in range(len(tiles)) for _ in range(prefix)]
    owner += [s for s, rows in enumerate(tiles) for _ in range(rows * WIDTH)]
    first = prefix * len(tiles)
    mask = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for i, own in enumerate(owner):
        for j, other in enumerate(owner):
            mask[i, j] = own == other if j < first else own - length <= other <= own
    return mask


def whole(model, image, tiles=TILES, length=1):
    """The whole strip at once, with prefix tokens for every tile, under the mask; the tokens of every tile."""
    p, n = model.num_prefix_tokens, len(tiles)
    x = model.embed_patches(image)
    grid = Grid(x.shape[1], x.shape[2], p * n)
    prefix = [t.expand(x.shape[0], -1, -1) for t in (model.cls_token, model.reg_token) if t is not None]
    x = torch.cat((*prefix * n, x.flatten(1, 2)), 1)
    if model.pos_embed is not None:
        tokens = model.pos_embed(Grid(*grid[:2], p)).tokens
        x = x + torch.cat((*[tokens[:p]] * n, tokens[p:]))
    mask = visible(tiles, p, length)
    for block in model.blocks:
        terms = (model.shared_position or block.position)(grid)
        x = x + block.ls1(block.attn(block.norm1(x), terms, grid, mask))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    x = model.norm(x)
    patches = x[:, p * n :].split([rows * WIDTH for rows in tiles], 1)
    return [torch.cat((x[:, s * p : (s + 1) * p], own), 1) for s, own in enumerate(patches)]


def assert_same(found, wanted, atol=1e-9):
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=atol)


@pytest.mark.slow
@each(("key", "prefix"), [*((key, n % 2 * 2) for n, key in enumerate(KEYS)), ("absolute", 0), ("table", 2)])
def test_a_strip_of_known_height_equals_the_whole(key, prefix):
    model, image = model_of(key, prefix=prefix), strip()
    found, _ = in_tiles(model, image, length=2, height=image.shape[2])
    assert_same(found, whole(model, image, length=2), 1e-7 if key == "xpos" else 1e-9)


@each(("key", "options", "length"), [(*case, (0, 1, 3)[i % 3]) for i, case in enumerate(OFFSETS_ONLY)])
def test_encodings_that_read_offsets_need_no_height(key, options, length):
    model, image = model_of(key, options, prefix=0 if key.startswith("rope") else 1), strip()
    found, memory = in_tiles(model, image, length=length)
    atol = 1e-4 if key == "rope_axial" else 1e-9  # its angles are float32
    assert_same(found, whole(model, image, length=length), atol)
    kept = TILES[-length:] if length else ()
    assert memory.heights == kept
    assert memory.below == sum(TILES)
    assert {k.shape for layer in memory.layers for k in layer} == {(2, 4, sum(kept) * WIDTH, 8)}


def test_encodings_that_read_the_grid_do():
    """What makes the test above one: resampled tables and coordinates relative to the grid differ without the height."""
    cases = ("table", {"policy": "bicubic"}), ("rope_normalized", {}), ("alibi", {"policy": "renormalize"}), ("rope_axial", {})
    for key, options in cases:  # the last because of its class token, which is not rotated
        model, image = model_of(key, options), strip()
        found, _ = in_tiles(model, image)
        assert (found[-1] - whole(model, image)[-1]).abs().max() > 1e-2, key


def test_gradients_flow_through_memory_where_asked():
    image = strip()
    gradients = {}
    for name in ("whole", "kept", "detached"):
        model = model_of("table", {"policy": "clip"})
        if name == "whole":
            tokens = whole(model, image, length=2)
        else:
            tokens, _ = in_tiles(model, image, length=2, detach=name == "detached")
        tokens[-1].square().sum().backward()
        gradients[name] = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert gradients["whole"].keys() == gradients["kept"].keys()
    for key, value in gradients["whole"].items():
        torch.testing.assert_close(gradients["kept"][key], value, rtol=1e-8, atol=1e-8 * float(value.abs().max()))
    key = "blocks.0.attn.qkv.weight"
    assert (gradients["detached"][key] - gradients["whole"][key]).norm() > 1e-2 * gradients["whole"][key].norm()


def test_checkpointing_and_shared_encodings_and_layer_scale():
    image = strip()
    model = model_of("table", {"policy": "clip"}, share_position=True, block_args=dict(init_values=0.5))
    wanted = whole(model, image)
    model.train()
    model.set_grad_checkpointing()
    found, _ = in_tiles(model, image, detach=False)
    assert_same(found, wanted)
    found[-1].sum().backward()
    stored = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    model.set_grad_checkpointing(False)
    in_tiles(model, image, detach=False)[0][-1].sum().backward()
    for key, value in stored.items():
        torch.testing.assert_close(model.get_parameter(key).grad, value)


def test_logits_of_every_tile():
    model, image = model_of("rope_axial"), strip()
    tokens, _ = forward_memory(model, image)
    torch.testing.assert_close(model.forward_head(tokens), model(image))


@each("key", ["absolute", "sincos"])
def test_absolute_positions_need_the_height(key):
    with pytest.raises(ValueError, match="pass height, in pixels of the whole strip"):
        forward_memory(model_of(key), strip())


def test_refusals():
    model, image = model_of("rope_axial"), strip()
    _, memory = forward_memory(model, image)
    with pytest.raises(ValueError, match="a batch of 2 tiles 2 patches wide cannot continue a strip of 2 tiles 3 patches"):
        forward_memory(model, image[..., : 2 * PATCH], memory)
    with pytest.raises(ValueError, match="a batch of 1 tiles 3 patches wide"):
        forward_memory(model, image[:1], memory)
    with pytest.raises(ValueError, match="length is the number of cached tiles, at least 0, not -1"):
        forward_memory(model, image, length=-1)
    with pytest.raises(ValueError, match="the tile ends at row 16 of patches, but the strip has 8"):
        forward_memory(model, image, memory, height=8 * PATCH)
    other = ViT(img_size=8, patch_size=PATCH, embed_dim=32, depth=1, num_heads=4, position="rope_axial").double()
    with pytest.raises(ValueError, match="memory has 3 blocks, the model 1: it is from another model"):
        forward_memory(other, image, memory)
    heads = ViT(img_size=8, patch_size=PATCH, embed_dim=32, depth=3, num_heads=2, position="rope_axial").double()
    with pytest.raises(ValueError, match="memory has 4 heads of width 8, the model 2 of width 16"):
        forward_memory(heads, image, memory)
    windowed = model_of("table", prefix=0, block_args=dict(window=2))
    with pytest.raises(ValueError, match="memory needs global attention in all blocks"):
        forward_memory(windowed, image)


def test_only_the_last_tile_may_end_inside_a_patch():
    model, image = model_of("rope_axial"), strip()[:, :, : (3 + 1) * PATCH + 2]  # padded to five rows
    first, rest = image[:, :, : 3 * PATCH], image[:, :, 3 * PATCH :]
    for tile, height in ((rest, None), (rest, 8 * PATCH)):
        with pytest.raises(ValueError, match="a tile of height 6 is not divisible into patches of 4"):
            forward_memory(model, tile, height=height)
    found, memory = forward_memory(model, first, height=image.shape[2])
    assert_same([found, forward_memory(model, rest, memory, height=image.shape[2])[0]], whole(model, image, (3, 2)))


@each(("key", "prefix"), [("absolute", 0), ("table", 2), ("absolute+rope_mixed", 2)])
def test_the_last_tile_may_be_shorter_than_a_patch(key, prefix):
    """As the whole strip, whose last patch is filled with zeros; also where it is all that later tiles could remember."""
    for pixels in (1, PATCH - 1):
        model, image = model_of(key, prefix=prefix), strip()[:, :, : (3 + 1) * PATCH + pixels]
        found, memory = [], None
        for tile in image.split([3 * PATCH, PATCH, pixels], 2):
            tokens, memory = forward_memory(model, tile, memory, length=2, height=image.shape[2])
            found.append(tokens)
        assert_same(found, whole(model, image, (3, 1, 1), length=2))
        assert memory.below == 5 and memory.heights == (1, 1)
        padded = torch.nn.functional.pad(image, (0, 0, 0, PATCH - pixels))
        assert_same(found, in_tiles(model, padded, (3, 1, 1), length=2, height=padded.shape[2])[0])


def test_a_short_tile_inside_a_strip_is_refused():
    model, image = model_of("rope_axial"), strip()
    _, memory = forward_memory(model, image[:, :, :PATCH], height=8 * PATCH)
    for height in (8 * PATCH, None):
        with pytest.raises(ValueError, match="a tile of height 1 is not divisible into patches of 4"):
            forward_memory(model, image[:, :, :1], memory, height=height)
    with pytest.raises(ValueError, match="image of 1x12 pixels is smaller than one patch of 4x4"):  # as model(image) says
        forward_memory(model, image[:, :, :1], height=1)
    with pytest.raises(ValueError, match="image of 0x12 pixels is smaller than one patch of 4x4"):
        forward_memory(model, image[:, :, :0], memory, height=8 * PATCH)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def in_segments(encoding, q, k, v, length):
    """q, k, v [1, H, N, D] of the whole strip, run one segment after the other."""
    found, past, above, start = [], None, (), 0
    for rows in SEGMENTS:
        own = slice(start * W, (start + rows) * W)
        keys = Grid(sum(above) + rows, W)
        both = with_past((k[:, :, own], v[:, :, own]), past, 0)
        found.append(segment_attention(q[:, :, own], *both, encoding(keys), keys, backend="reference"))
        above = (*above, rows)[-length:] if length else ()
        past, start = tuple(t[:, :, t.shape[2] - sum(above) * W :] for t in both), start + rows
    return torch.cat(found, 2)


@each("length", [0, 1, 2])
@each("key", list(PAIRS))
def test_segments_equal_the_recurrence_of_the_paper(key, length):
    encoding = perturbed(make(key, WHOLE, HEADS, DIM, dtype=torch.float64, **({"policy": "clip"} if key == "table" else {})))
    q, k, v = draw(3, 1, HEADS, WHOLE.tokens, DIM)
    learned = {name: value.detach().numpy() for name, value in encoding.named_parameters()}
    wanted = oracles.recurrent(key, *(x[0].numpy() for x in (q, k, v)), SEGMENTS, W, length, **learned)
    if key == "table":  # built for the whole, so smaller key grids read its exact center
        assert not encoding.resampled(Grid(3, W))
    torch.testing.assert_close(in_segments(encoding, q, k, v, length)[0], torch.from_numpy(wanted), rtol=0, atol=1e-6)
