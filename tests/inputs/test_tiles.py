"""Features tile by tile: equal to those of the whole image, with no more overlap than the model needs."""

from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch

from helpers import each
from helpers.variants import perturbed
from vitrel.inputs.tiles import _Axis, tile_margins, tiled_features

SWIN = dict(patch_size=2, embed_dim=8, depths=(2, 2, 2), num_heads=(1, 2, 2), num_classes=0)
VIT = dict(patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=0, class_token=False, global_pool="avg")
MODELS = {
    "v1": ("vitrel_swin_n", SWIN | dict(window_size=4)),
    "v1 deep": ("vitrel_swin_n", SWIN | dict(window_size=2, depths=(2, 6, 2))),
    "v1 odd depths": ("vitrel_swin_n", SWIN | dict(window_size=3, depths=(1, 3, 2))),
    "v1 one stage": ("vitrel_swin_n", SWIN | dict(window_size=4, depths=(2,), num_heads=(2,))),
    "v1 non-square": ("vitrel_swin_n", SWIN | dict(window_size=(3, 4), position="rope_mixed")),
    "v1 on tokens": ("vitrel_swin_n", SWIN | dict(window_size=(4, 2), position="absolute+table")),
    "v2": ("vitrel_swinv2_n", SWIN | dict(window_size=(3, 2))),
    "v2 on tokens": ("vitrel_swinv2_n", SWIN | dict(window_size=2, position="sincos+cpb", depths=(2, 4))),
    "vit": ("vitrel_vit_n8_none", VIT | dict(position="table", block_args=dict(window=(3, 4)))),
    "vit on tokens": ("vitrel_vit_n8_none", VIT | dict(position="absolute+decomposed", block_args=dict(window=4))),
}
MODELS["v2 on tokens"][1]["num_heads"] = (1, 2)


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    entry, options = MODELS[name]
    return perturbed(timm.create_model(entry, img_size=32, dtype=dtype, **options).eval(), 0.3)


def picture(model, size, dtype=torch.float64):
    return torch.randn(1, model.in_chans, *size, dtype=dtype)


def of_whole(model, image):
    """(features, maps): what forward_intermediates gives, of a ViT for the last block."""
    return model.forward_intermediates(image, indices=1 if "ViT" in type(model).__name__ else None)


def grids_seen(model):
    """Filled with (h, w) in tokens of what the blocks meet, once the model runs."""
    seen = []
    for block in model.modules():
        if type(block).__name__ == "Block":
            block.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[1][:2])))
    return seen


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.slow
@each(
    ("name", "extra"),
    [*((name, (13, 29)) for name in MODELS), *(("v1", extra) for extra in ((0, 0), (1, 2)))],
)
def test_equal_to_the_whole(name, extra):
    """Sizes: whole steps beyond a tile, one or two pixels more (a last tile of less than a window), anything."""
    model = build(name)
    margins, patch = tile_margins(model), model.patch_embed.patch_size
    tile = margins.smallest[0] + 1, margins.smallest[1] + 2 * patch[1]
    image = picture(model, (margins.smallest[0] + margins.alignment[0] + extra[0], 2 * margins.smallest[1] + extra[1]))
    with torch.no_grad():
        features, maps = of_whole(model, image)
        seen = grids_seen(model)
        found, pyramid = tiled_features(model, image, tile, pyramid=True)
    close(found, features)
    assert len(pyramid) == len(maps)
    for own, wanted in zip(pyramid, maps, strict=True):
        close(own, wanted)
        assert own.is_contiguous()
    largest = [t // p for t, p in zip(tile, patch, strict=True)]
    assert len(seen) >= 4 * sum(type(m).__name__ == "Block" for m in model.modules())
    assert all(h <= largest[0] and w <= largest[1] for h, w in seen)


@each("size", [(31, 300), (250, 7), (100, 100), (120, 121)])
def test_an_axis_that_fits_is_not_cut(size):
    model = build("v1")
    image = picture(model, size)
    with torch.no_grad():
        close(tiled_features(model, image, 120), model.forward_features(image))


def test_single_precision_and_another_tile():
    model = build("v1", torch.float32)
    image = picture(model, (140, 190), torch.float32).expand(2, -1, -1, -1) * torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)
    with torch.no_grad():
        wanted = model.forward_features(image)
        for tile in (120, (140, 157), 1000):
            torch.testing.assert_close(tiled_features(model, image, tile), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@each("name", ["v1", "v1 deep", "v1 odd depths", "v1 non-square", "v2", "vit"])
def test_no_less_overlap_will_do(name):
    """A tile cut out of the image and run as an image of its own is exact up to its margins, and not one token farther."""
    model = build(name)
    margins, patch = tile_margins(model), model.patch_embed.patch_size
    start, length = margins.alignment, margins.smallest
    stride = [p * s for p, s in zip(patch, _Axis.of(model, 0).strides[-1:] * 2, strict=True)]
    size = [s + n + 2 * a for s, n, a in zip(start, length, margins.alignment, strict=True)]
    image = picture(model, size)

    def run(y, x, h, w):
        features = model.forward_features(image[:, :, y : y + h, x : x + w])
        return features if features.dim() == 4 else features.unflatten(1, (-(-h // patch[0]), -(-w // patch[1])))

    def differs(found, wanted):
        """[h, w] bool: tokens that are not those of the whole."""
        return ((found - wanted).abs().amax((0, 3)) > 1e-8).numpy()

    with torch.no_grad():
        whole, found = run(0, 0, *size), run(*start, *length)
        y, x = (s // t for s, t in zip(start, stride, strict=True))
        wrong = differs(found, whole[:, y : y + found.shape[1], x : x + found.shape[2]])
        top, left = (m // s for m, s in zip(margins.before, stride, strict=True))
        bottom, right = ((n - m) // s for n, m, s in zip(length, margins.after, stride, strict=True))
        inside = wrong[top:bottom, left:right]
        assert inside.size and not inside.any()
        if name != "vit":  # whose tiles need no overlap
            assert wrong[top - 1, left:right].any() and wrong[top:bottom, left - 1].any()
            assert wrong[bottom, left:right].any() and wrong[top:bottom, right].any()
        # A patch less below, or right, and the last row, or column, of exact features is lost.
        for h, w, line in ((patch[0], 0, np.s_[bottom - 1, left:right]), (0, patch[1], np.s_[top:bottom, right - 1])):
            found = run(*start, length[0] - h, length[1] - w)
            if found.shape[1] < bottom or found.shape[2] < right:
                continue  # without overlap the row is not even there
            assert differs(found[:, :bottom, :right], whole[:, y : y + bottom, x : x + right])[line].any()
        # A tile whose windows are not those of the whole.
        for dy, dx in ((stride[0], 0), (0, stride[1])):
            found = run(start[0] + dy, start[1] + dx, *length)[:, top:bottom, left:right]
            wanted = whole[:, y + dy // stride[0] + top :, x + dx // stride[1] + left :][:, : found.shape[1], : found.shape[2]]
            assert differs(found, wanted).any()


@each("name", ["v1", "v2"])
def test_what_a_crop_knows_exactly(name):
    """Every crop of a small image, those of less than a window too, which lose the shift that the whole has."""
    model = build(name)
    axis, n = _Axis.of(model, 0), 55
    image = picture(model, (2 * n, 12))
    lost = 0
    with torch.no_grad():
        whole = model.forward_features(image)
        for start in range(0, n, axis.alignment):
            for stop in (*range(start + 1, n, 9), n):
                crop, first = model.forward_features(image[:, :, 2 * start : 2 * stop]), start // axis.strides[-1]
                same = (crop - whole[:, first : first + crop.shape[1]]).abs().amax((0, 2, 3)) < 1e-9
                lo, hi = axis.exact(start, stop, n)[-1]
                assert same.nonzero().flatten().add(first).tolist() == list(range(lo, hi)), (start, stop)
                lost += stop == n and start > 0 and lo >= hi
    assert lost  # the last crop is one whose windows are all others


@each("depths", [(1,), (2, 2, 2), (1, 2), (2, 6, 2), (2, 0, 1)])
@each("window", [1, 3, 4])
def test_every_token_is_written_once_and_exact(depths, window):
    """For every length of the axis the tiles follow each other, at every stage, within what they know exactly."""
    blocks = [tuple((window, window // 2 * (j % 2)) for j in range(depth)) for depth in depths]
    axis = _Axis(tuple((2 if i else 1, b) for i, b in enumerate(blocks)))
    smallest, step = axis.smallest(), axis.alignment
    for longest in (smallest, smallest + step // 2 + 1):
        for n in (*range(1, 4), *range(max(1, longest - 1), longest + 2 * step + 2, max(1, step // 7)), 4 * smallest + 1):
            spans = axis.spans(n, longest)
            assert (len(spans) == 1) == (n <= longest)
            for k, stride in enumerate(axis.strides):
                tokens = [i for s in spans for i in range(s.kept[k].whole.start, s.kept[k].whole.stop)]
                assert tokens == list(range(-(-n // stride)))
                for s in spans:
                    lo, hi = axis.exact(s.start, s.stop, n)[k]
                    assert lo <= s.kept[k].whole.start and s.kept[k].whole.stop <= hi
                    assert s.start % step == 0 and s.stop - s.start <= longest
                    assert axis.exact(s.start, s.stop - 1, n)[-1][1] < s.kept[-1].whole.stop  # and none longer than it need be
    with pytest.raises(StopIteration):
        axis.spans(20 * smallest, smallest - 1)


def test_margins():
    """By hand, windows of 4 shifted by 2: a cut at 0 spoils tokens 0..2, merged 0..1, 0..4, 0..6, merged 0..3, 0..4, 0..6 of 8
    pixels. To end at token 2 of the last stage takes 4, 8 of the stage before, 10, 12, 24 of the first, 26, 28 of 2 pixels.
    """
    margins = tile_margins(build("v1"))
    assert margins.alignment == (32, 32) and margins.before == (48, 48) and margins.after == (40, 40)
    assert margins.smallest == (120, 120)
    assert tile_margins(build("vit")) == ((12, 16), (0, 0), (0, 0), (12, 16))


def test_images_of_other_kinds(tmp_path):
    model = build("v1", torch.float32)
    image = picture(model, (140, 190), torch.float32)
    stored = np.memmap(tmp_path / "image", dtype=np.float64, mode="w+", shape=tuple(image.shape))
    stored[:] = image.numpy()
    stored.flush()
    taken = []

    class DataSet(SimpleNamespace):
        """As h5py's: a shape, and slices that are arrays."""

        def __getitem__(self, at):
            taken.append(stored[at].shape[2:])
            return stored[at]

    with torch.no_grad():
        wanted = model.forward_features(image)
        opened = np.memmap(tmp_path / "image", dtype=np.float64, mode="r", shape=stored.shape)
        for kind in (image.numpy(), opened, image.double(), DataSet(shape=stored.shape)):
            found = tiled_features(model, kind, 120)
            assert found.dtype == torch.float32 and found.device.type == "cpu"
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        assert len(taken) == 8 and all(h <= 120 and w <= 120 for h, w in taken)
        assert tiled_features(model, opened, 120, device="meta").device.type == "meta"
    with pytest.raises(TypeError, match=r"the image has dtype torch.uint8: pass floats, normalized as the model expects"):
        tiled_features(build("v1"), image.numpy().astype(np.uint8), 120)


def test_gradients():
    model = build("v1 on tokens")
    image = picture(model, (90, 70)).requires_grad_()
    weight, gradients = None, []
    for run in (model.forward_features, lambda x: tiled_features(model, x, tile_margins(model).smallest)):
        out = run(image)
        weight = torch.randn_like(out) if weight is None else weight
        gradients.append(torch.autograd.grad((out * weight).sum(), [image, *model.parameters()]))
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-8, rtol=1e-8)


@each("name", ["v1", "vit"])
def test_gradient_checkpointing_and_autocast(name):
    model = build(name, torch.float32)
    image = picture(model, (150, 130), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model.forward_features(image)
        model.set_grad_checkpointing()
        found = tiled_features(model, image, 120)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_smaller_model():
    model = build("v1")
    model.prune_intermediate_layers(1)
    image = picture(model, (100, 150))
    with torch.no_grad():
        close(tiled_features(model, image, tile_margins(model).smallest), model.forward_features(image))


def test_errors():
    model = build("v1")
    image = picture(model, (140, 190))
    with pytest.raises(ValueError, match=r"in training mode .* would differ between tiles: call model.eval\(\)"):
        tiled_features(build("v1").train(), image, 120)
    with pytest.raises(ValueError, match=r"expected images \[B, C, height, width\], got shape \(3, 140, 190\); add a batch"):
        tiled_features(model, image[0], 120)
    with pytest.raises(ValueError, match=r"expected 3 channels, got 2"):
        tiled_features(model, image[:, :2], 120)
    message = (
        r"tile width 119 is too small: Swin needs tiles of at least 120x120 pixels, overlap 48 and 40 along width with steps "
        r"of 32, or as large as the image of 140x190"
    )
    with pytest.raises(ValueError, match=message):
        tiled_features(model, image, (140, 119))
    plain = timm.create_model("vitrel_vit_n8_none", **VIT, block_args=dict(window=3, global_blocks=(1,))).eval()
    with pytest.raises(ValueError, match=r"block 1 attends globally, .* block_args=dict\(window"):
        tiled_features(plain, image.float(), 64)
    with pytest.raises(ValueError, match="tiles need a Swin or ViT of vitrel, not Linear"):
        tiled_features(torch.nn.Linear(2, 2), image, 120)
    with pytest.raises(ValueError, match="not Linear"):
        tile_margins(torch.nn.Linear(2, 2))
