"""Linear layers of encodings that adapters, pruning or quantization replaced are called, and learn."""

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import prune

import vitrel

ENCODINGS = ("cpb", "fourier", "fire")


class LowRank(nn.Module):
    """A linear layer that is frozen, and a product of two matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return base(x) + up(down(x))."""
        return self.base(x) + self.up(self.down(x))


def model_with(key: str) -> nn.Module:
    """A small ViT with an encoding."""
    torch.manual_seed(0)
    return timm.create_model(f"vitrel_vit_n8_{key}", depth=2, img_size=32, num_classes=4, global_pool="avg").eval()


def position_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside encodings, by name."""
    within = ("cpb_mlp", "token_projection", ".mlp.0", ".mlp.2")
    encodings = [name for name, module in model.named_modules() if isinstance(module, vitrel.position.PositionEncoding)]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name.startswith(one) for one in encodings) and any(w in name for w in within)
    }


@pytest.mark.parametrize("key", ENCODINGS)
def test_adapters_act_and_learn(key: str) -> None:
    model, images = model_with(key), torch.randn(2, 3, 48, 32)
    before = model(images)
    linears = position_linears(model)
    assert linears
    for name, linear in linears.items():
        model.set_submodule(name, LowRank(linear))
    after = model(images)
    assert not torch.allclose(after, before, atol=1e-6)
    after.square().sum().backward()
    for name in linears:
        adapter = model.get_submodule(name)
        assert adapter.up.weight.grad.abs().max() > 0, name
        assert adapter.base.weight.grad is None


@pytest.mark.parametrize("key", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pruning_acts(key: str, dtype: torch.dtype) -> None:
    """A pruned layer computes its weight in a hook, so the parameter itself is not pruned."""
    model = model_with(key).to(dtype)
    images = torch.randn(2, 3, 48, 32).to(dtype)
    expected = model_with(key).to(dtype)
    for name, linear in position_linears(expected).items():
        half = linear.weight.shape[1] // 2
        with torch.no_grad():
            linear.weight[:, half:] = 0
        mask = torch.ones_like(linear.weight)
        mask[:, half:] = 0
        prune.custom_from_mask(model.get_submodule(name), "weight", mask)
    assert torch.equal(model(images), expected(images))


@pytest.mark.parametrize("key", ENCODINGS)
def test_quantized_layers_act(key: str) -> None:
    model, images = model_with(key), torch.randn(2, 3, 48, 32)
    quantized = torch.ao.quantization.quantize_dynamic(model_with(key), {nn.Linear}, dtype=torch.qint8)
    assert not position_linears(quantized)
    expected, got = model(images), quantized(images)
    assert torch.nn.functional.cosine_similarity(got, expected).min() > 0.98


def test_half_precision_compiles_to_one_graph() -> None:
    model = model_with("fire").bfloat16()
    encoding, grid = model.blocks[0].position, model.token_grid((32, 32))
    graph = torch.compile(encoding, backend="eager", fullgraph=True)
    assert torch.equal(graph(grid).tables[0].bias, encoding(grid).tables[0].bias)
