"""Half precision at 512 and 1024 px: no NaN, logits near float32, positions computed in float32; channels_last images."""

import copy

import pytest
import timm
import torch

from helpers import each

# Positions that grow with the grid, one learned by offset and one added to tokens; that terms are those of float32 is tested of
# every encoding in tests/position.
MODELS = [("vitrel_vit_ti16_none", key, size) for key, size in [("rope_mixed", 1024), ("alibi", 512), ("absolute", 512)]]
MODELS += [("vitrel_vit_ti16_none", key, 512) for key in ("transformer_xl", "fire", "pape")]
MODELS += [("vitrel_swin_t", key, 512) for key in ("cpb", "table")]
SMALL = {
    "vitrel_vit_ti16_none": dict(embed_dim=32, num_heads=2, depth=1),
    "vitrel_swin_t": dict(embed_dim=16, depths=(2, 2), num_heads=(2, 2)),
}
BOUNDS = {"autocast bfloat16": 0.1, "bfloat16": 0.1, "autocast float16": 0.012, "float16": 0.012}  # times the logits' spread


def build(name, key):
    torch.manual_seed(0)
    model = timm.create_model(name, position=key, num_classes=64, init_gain=1.0, **SMALL[name]).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "position" in part and parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def outputs(model, image):
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            yield f"autocast {dtype}".replace("torch.", ""), model(image)
        yield str(dtype).removeprefix("torch."), copy.deepcopy(model).to(dtype)(image.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key", "size"), MODELS)
def test_half_precision_at_any_size(name, key, size):
    """Trained at 224 px. The bounds are twice the largest error of models of two blocks (0.049 and 0.0059, on a CPU)."""
    model = build(name, key)
    image = torch.randn(1, 3, size, size)
    with torch.inference_mode():
        exact = model(image)
        for mode, out in outputs(model, image):
            assert out.isfinite().all(), mode
            error = (out.float() - exact).abs().max() / exact.std()
            assert error <= BOUNDS[mode], f"{mode}: {error:.4f}"


@each("name", ["vitrel_vit_ti16_none", "vitrel_swin_t"])
def test_channels_last_images(name):
    model, image = build(name, "table" if "swin" in name else "rope_mixed"), torch.randn(2, 3, 96, 160)
    torch.testing.assert_close(model(image.to(memory_format=torch.channels_last)), model(image), atol=1e-5, rtol=1e-5)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(image.to(memory_format=torch.channels_last)), model(image), atol=1e-5, rtol=1e-5)
