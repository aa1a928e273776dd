"""Graphs of torch.compile contain the window kernels themselves, without Python of ours between them.

On fake tensors of the CPU, since autograd refuses those of a GPU that is not there.
"""

import os

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import each

triton = pytest.importorskip("triton")

from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table  # noqa: E402

from tools.benchmark.kernels import Driver  # noqa: E402
from vitrel.ops.backends import triton_ops  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no kernels to put there")


WRITES = {  # the rest, as qkv, is read only: what torch takes to be written may be copied before
    "_forward": {"OUT", "LSE"},
    "_whole": {"DQKV", "TABLE"},
    "_tiles": {"DELTA", "DQKV", "DQ", "TABLE"},
    "_by_offset": {"OUT"},
}


def kernels_in(graph):
    """Names of the kernels that a graph launches, of which torch knows what they write; there is no operator of ours."""
    names = []
    for node in graph.graph.nodes:
        assert "vitrel" not in str(node.target)
        if "triton_kernel_wrapper" in str(node.target):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            names.append(getattr(kernel, "fn", kernel).__name__)
            given = {name for name, value in node.kwargs["kwargs"].items() if isinstance(value, torch.fx.Node)}
            assert set(node.kwargs["tensors_to_clone"]) == WRITES[names[-1]] & given
    return names


@pytest.mark.slow(seconds=5)
@each(("window", "backward"), [(7, ["_whole", "_by_offset"]), (12, ["_tiles", "_by_offset"])])
def test_a_graph_contains_the_kernels(window, backward, monkeypatch):
    """One graph for all sizes, in training and in inference."""
    found = {"forward": [], "backward": [], "inference": []}

    def compiler(name):
        return lambda graph, inputs: found[name].append(kernels_in(graph)) or graph.forward

    def run(qkv, bias):
        grad = torch.is_grad_enabled()
        return triton_ops.windows(qkv, bias, None, None, (window, window), (3, 3), 3, 0.2, grad)

    ways = (("fw", "forward"), ("bw", "backward"), ("inference", "inference"))
    compilers = {f"{way}_compiler": compiler(name) for way, name in ways}
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(90))  # which torch asks for its target, for its analysis
    torch._dynamo.reset()
    compiled = torch.compile(run, backend=aot_autograd(**compilers), fullgraph=True)
    with FakeTensorMode():
        bias = torch.empty(3, (2 * window - 1) ** 2, device="cpu", requires_grad=True)
        for batch, h, w in ((2, 14, 16), (4, 30, 17)):
            qkv = torch.empty(batch, h, w, 288, device="cpu", dtype=torch.bfloat16, requires_grad=True)
            torch._dynamo.maybe_mark_dynamic(qkv, (0, 1, 2))
            out = compiled(qkv, bias)
            assert out.shape == (batch, h, w, 96) and out.dtype == torch.bfloat16
            grads = torch.autograd.grad(out, (qkv, bias), torch.empty_like(out))
            assert [x.shape for x in grads] == [qkv.shape, bias.shape]
            with torch.no_grad():
                assert compiled(qkv, bias).shape == out.shape
    assert found["forward"] == found["inference"] == [["_forward"]]
    assert found["backward"] == [backward]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: inductor compiles only for one that is there")
@pytest.mark.slow(seconds=30)
@each(("window", "rotary"), [(7, False), (7, True), (12, False), (12, True)])
def test_inductor_launches_the_kernels(window, rotary):
    """With the same bits as without torch.compile, for two sizes; the code that it writes calls no operator of ours."""

    def run(qkv, bias, *turn):
        turn = turn or (None, None)
        return triton_ops.windows(qkv, bias, *turn, (window, window), (3, 3), 3, 0.2, True)

    compiled = torch.compile(run, fullgraph=True)
    torch._dynamo.reset()
    for h, w in ((14, 14), (21, 30)):
        qkv = torch.randn(2, h, w, 288, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        bias = torch.randn(3, (2 * window - 1) ** 2, device="cuda", requires_grad=True)
        turn = [torch.randn(3, window**2, 16, device="cuda", requires_grad=True) for _ in range(2 * rotary)]
        leaves = qkv, bias, *turn
        grad = torch.randn(2, h, w, 96, device="cuda", dtype=torch.bfloat16)
        expected = run(*leaves)
        with torch.profiler.profile() as seen:
            out = compiled(*leaves)
            found = torch.autograd.grad(out, leaves, grad)
        assert torch.equal(out, expected)
        for a, b in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)
        assert not any(event.key.startswith("vitrel::") for event in seen.key_averages())
