"""Which backend serves what: the reasons, and how one is chosen by name."""

import importlib.util

import pytest
import timm
import torch

from vitrel import Grid, Terms
from vitrel.ops import BACKENDS, attention, dispatch, use_backend, why

IMAGE = torch.randn(1, 3, 64, 64)


def small(key="shaw"):
    return timm.create_model(f"vitrel_vit_n8_{key}", num_classes=2, depth=2).eval()


def test_why_names_the_backend_and_what_the_others_say():
    text = why(small(), IMAGE)
    first, *others = text.splitlines()
    what = "2 x attention, 8x8 + 1 tokens, 65 queries, 3 heads of 32, float32 on cpu, training"
    assert first == f"{what}: reference (auto)"
    assert others.pop(0).startswith("    auto: calls that sdpa refuses: ")
    assert len(others) == len(BACKENDS) - 1
    assert "    sdpa: scaled_dot_product_attention cannot add position-dependent values (Table.value) to its output" in others


@pytest.mark.slow
def test_why_of_an_entry_a_swin_and_a_compiled_model():
    q = torch.randn(3, 1, 2, 6, 8)
    with torch.no_grad():
        text = why(attention, *q, Terms(), Grid(2, 3), backend="reference")
    assert text.startswith(
        "1 x attention, 2x3 tokens, 6 queries, 2 heads of 8, float32 on cpu, inference: reference (given by name)"
    )
    text = why(torch.compile(timm.create_model("vitrel_swin_n", num_classes=2)), IMAGE)
    assert text.count("tokens in windows of 4x4") == 3 and "windows of 4x4, 1024 queries, " in text
    assert ": sdpa (auto)" in text
    assert why(torch.nn.Identity(), IMAGE) == "no attention of vitrel was called"


def test_what_is_asked_for_serves_or_says_why_not():
    model = small("table")
    with use_backend("reference"):
        assert "reference (given by name)" in why(model, IMAGE)
        plain = model(IMAGE)
    assert "sdpa (auto)" in why(model, IMAGE)
    torch.testing.assert_close(plain, model(IMAGE))
    with use_backend("sdpa"), pytest.raises(ValueError, match=r"backend 'sdpa' refuses: .*Table\.value"):
        small()(IMAGE)
    assert "sdpa (auto)" in why(model, IMAGE)  # the error has left nothing behind
    with (
        pytest.raises(ValueError, match="unknown backend 'cuda'; choose auto, triton, augmented_qk"),
        use_backend("cuda"),
    ):
        pass


def test_a_layers_own_backend_comes_first():
    model = small("table")
    model.blocks[0].attn.backend = "sdpa"
    with use_backend("reference"):
        text = why(model, IMAGE)
    assert "sdpa (given by name)" in text
    assert "reference (given by name)" in text


@pytest.mark.slow
def test_a_compiled_model_follows():
    model, called = small("table"), []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=lambda graph, inputs: called.append(str(graph.graph)) or graph.forward)
    with torch.no_grad():
        compiled(IMAGE)
        with use_backend("reference"):
            compiled(IMAGE)
    assert ["scaled_dot_product_attention" in text for text in called] == [True, False]


def test_the_environment_asks_too(monkeypatch):
    """It is read when the module is; an unknown name is refused at the first call."""
    monkeypatch.setenv("VITREL_BACKEND", "fast")
    again = importlib.util.module_from_spec(importlib.util.find_spec("vitrel.ops.dispatch"))
    again.__spec__.loader.exec_module(again)
    with pytest.raises(ValueError, match="unknown backend 'fast'; choose auto, triton, augmented_qk"):
        again.attention(*torch.zeros(3, 1, 1, 4, 8), Terms(), Grid(2, 2))
    assert dispatch.chosen["auto"] == "auto"
