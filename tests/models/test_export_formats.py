"""Models outside of eager PyTorch: ONNX at any size, nothing made on the CPU, files of a hub."""

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import each
from helpers.variants import MODELS
from helpers.variants import small_model as build
from vitrel.export import export_model
from vitrel.ops import use_backend

# Down to two tokens in the last stage; non-square, and divisible neither by the patch nor by the window.
SIZES = [(2, (72, 112)), (1, (56, 40)), (3, (100, 53)), (2, (9, 17))]


def shallow(name, depth=2, **keywords):
    """As `build`, with few blocks, for what takes long; a Swin always has a stage of two and one of one.

    Pooled over all tokens: the class token of a single block would never meet the tables of offsets.
    """
    few = {"depth": depth} if "_vit_" in name else {"depths": (2, 1), "num_heads": (1, 2)}
    return build(name, **({"global_pool": "avg"} | few | keywords))


def check_onnx(model, folder, size, sizes):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_model(model, folder / "model.onnx", "onnx", size=size, dynamic_size=True)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    for batch, size in sizes:
        image = torch.randn(batch, 3, *size)
        (logits,) = session.run(None, {"image": image.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(image), atol=1e-4, rtol=1e-4)


@pytest.mark.slow(seconds=16)
def test_onnx_of_a_swin(tmp_path):
    """Shifted windows and cosine attention. Traced with one window, as the last stage at 224 px has, it serves several."""
    check_onnx(shallow("vitrel_swinv2_n", depths=(2,), num_heads=(1,)), tmp_path, (8, 8), SIZES)


@pytest.mark.slow(seconds=26)
def test_onnx_of_each_kind_of_encoding(tmp_path):
    """All in one model: added to tokens, biases, rows for queries, keys and values, gates, angles; cpb is in the Swin above."""
    options = dict(position="absolute+sincos+table+t5+shaw+pape+rope_mixed", position_args={"temperature": "log_n"})
    check_onnx(shallow("vitrel_vit_n8_none", depth=1, **options), tmp_path, (64, 48), SIZES[:2])


class MadeOnTheCPU(TorchDispatchMode):
    """Operators that returned a tensor on the CPU: with a model and images elsewhere, each is a copy in every forward pass,
    and one of them in a graph keeps CUDA graphs from being used at all."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in tree_leaves(out)):
            self.found.add(str(operator))
        return out


@pytest.mark.slow
@each("name", MODELS)
def test_forward_makes_nothing_on_the_cpu(name):
    few = {"depth": 1} if "_vit_" in name else {"depths": (2, 1), "num_heads": (1, 2)}
    model, image = timm.create_model(name, device="meta", **few), torch.empty(2, 3, 50, 72, device="meta")
    for training in (False, True) if "swin" in name else (False,):  # stochastic depth draws, which in a ViT is off
        model.train(training)
        with MadeOnTheCPU() as made:
            model(image)
        assert made.found == set()


def test_what_is_made_on_the_cpu_is_found():
    with MadeOnTheCPU() as made:
        torch.empty(3, device="meta") * torch.tensor(2.0)
    assert made.found
    with MadeOnTheCPU() as made:
        torch.arange(3)
    assert made.found == {"aten.arange.default"}


HUB = {
    "vit": ("vitrel_vit_n8_none", dict(position="absolute+rope_mixed", position_args=dict(base=50.0, policy="ntk"))),
    "swin": ("vitrel_swin_n", dict(window_size=(4, 6), position="t5", position_args=dict(mode="sum"))),
}


@pytest.fixture(params=HUB)
def hub(request, tmp_path):
    """A model with options of its own and a folder with it."""
    name, keywords = HUB[request.param]
    model = build(name, **keywords)
    model.set_input_size((96, 80))  # a size in use is not one to be built at
    save_for_hf(model, tmp_path, safe_serialization=True)
    return model, f"local-dir:{tmp_path}"


@pytest.mark.slow
def test_hub_other_head_and_channels(hub):
    (model, source), image = hub, torch.randn(2, 3, 72, 88)
    other = timm.create_model(source, pretrained=True, num_classes=3).eval()
    assert other(image).shape == (2, 3) and torch.equal(other.forward_features(image), model.forward_features(image))
    bare = timm.create_model(source, pretrained=True, num_classes=0).eval()
    assert torch.equal(bare(image), model.forward_head(model.forward_features(image), pre_logits=True))
    gray = timm.create_model(source, pretrained=True, in_chans=1).eval()
    torch.testing.assert_close(gray(image[:, :1]), model(image[:, :1].expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)


def test_hub_backbone(hub):
    (model, source), image = hub, torch.randn(1, 3, 72, 88)
    backbone = timm.create_model(source, pretrained=True, features_only=True, out_indices=(0, 2)).eval()
    expected = model.forward_intermediates(image, indices=[0, 2], intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(backbone(image), expected, strict=True))


@pytest.mark.slow
def test_exports_hold_pytorchs_own_operators_whatever_is_asked_for(tmp_path, monkeypatch):
    """Also where kernels are chosen by name, which an exported program would need wherever it is loaded."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that they would serve it
    model = timm.create_model("vitrel_vit_n8_table", num_classes=3, depth=1).eval()
    with use_backend("triton"):
        export_model(model, tmp_path / "model.pt2", "exported")
    program = torch.export.load(tmp_path / "model.pt2")
    assert "scaled_dot_product_attention" in str(program.graph)
    assert "vitrel" not in str(program.graph)
    with use_backend("triton"), pytest.raises(Exception, match="an exported program may contain PyTorch's operators only"):
        torch.export.export(model, (torch.randn(1, 3, 64, 64),))
