"""Known faults of SDPA's kernels: when each concerns a call, and that torch then chooses among the others."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

from helpers import each
from helpers.gpu import autocast
from vitrel import Grid, Table, Terms
from vitrel.ops import attention, sdpa, sdpa_faults, window_attention
from vitrel.ops.sdpa_faults import Case, Stack, excluded

HOPPER = Stack((9, 0), 91900, TorchVersion("2.11.0"))
BLACKWELL = HOPPER._replace(capability=(10, 0))
TRAINED = Case(half=True, queries=576, keys=576, grad=True, mask_grad=False)
SINGLE = TRAINED._replace(queries=1, keys=128, grad=False)
TABLES_ONLY = TRAINED._replace(grad=False, mask_grad=True)
CUDNN, EFFICIENT = {"CUDNN_ATTENTION"}, {"EFFICIENT_ATTENTION"}


@each(
    ("stack", "case", "kernels"),
    [
        # pytorch 196678: 64 keys modulo 128
        (HOPPER, TRAINED, CUDNN),
        (HOPPER, TRAINED._replace(queries=64, keys=64), CUDNN),
        (HOPPER, TRAINED._replace(keys=None), CUDNN),
        (HOPPER, TRAINED._replace(keys=512), set()),
        (HOPPER, TRAINED._replace(grad=False), set()),
        (HOPPER, TRAINED._replace(half=False), set()),
        (HOPPER, TRAINED._replace(mask_grad=True), set()),  # cuDNN does not serve it
        (HOPPER._replace(capability=(8, 0)), TRAINED, set()),
        (HOPPER._replace(cudnn=92501), TRAINED, CUDNN),
        (HOPPER._replace(cudnn=92600), TRAINED, set()),
        (HOPPER._replace(cudnn=0), TRAINED, set()),
        (BLACKWELL, TRAINED, set()),
        # cudnn-frontend 1072 and pytorch 193893: one query
        (HOPPER._replace(cudnn=92600), SINGLE._replace(grad=True), CUDNN),
        (HOPPER._replace(cudnn=92600), SINGLE, set()),
        (BLACKWELL, SINGLE, CUDNN),
        (BLACKWELL, SINGLE._replace(queries=None), set()),  # a graph for several lengths does not serve 1
        (BLACKWELL._replace(cudnn=91501), SINGLE, set()),
        (BLACKWELL._replace(cudnn=92401), SINGLE, set()),
        (BLACKWELL._replace(cudnn=92501), SINGLE, set()),
        # pytorch 148476: only the mask needs a gradient
        (HOPPER, TABLES_ONLY, EFFICIENT),
        (HOPPER, TABLES_ONLY._replace(half=False), EFFICIENT),
        (HOPPER._replace(capability=(7, 5)), TABLES_ONLY, EFFICIENT),
        (HOPPER._replace(torch=TorchVersion("2.15.0+cu132")), TABLES_ONLY, set()),
        (HOPPER, TABLES_ONLY._replace(grad=True), set()),
    ],
)
def test_conditions(stack, case, kernels):
    assert excluded(stack, case) == kernels


def enabled():
    return set(torch.nn.attention._cur_sdpa_kernel_backends()) - {SDPBackend.OVERRIDEABLE}


ALL = enabled()


@pytest.fixture
def hopper(monkeypatch):
    """An H100 for fake tensors."""
    monkeypatch.setattr(sdpa_faults, "stack", lambda index: HOPPER)
    with FakeTensorMode():
        yield


@pytest.fixture
def calls(hopper, monkeypatch):
    """A list to which each call of SDPA adds the kernels it may choose, and the mask."""
    calls = []

    def recorded(q, k, v, attn_mask=None, **how):
        calls.append((enabled(), attn_mask))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    return calls


def qkv(side=8, **how):
    return [torch.zeros(2, 3, side * side, 16, device="cuda", **{"dtype": torch.bfloat16, **how}) for _ in range(3)]


def test_the_choice_reaches_torch(calls):
    alibi = Terms(tables=(Table(bias=torch.zeros(3, Grid(8, 8).classes(), device="cuda")),))
    learned = Terms(tables=(Table(bias=torch.zeros(3, Grid(8, 8).classes(), device="cuda", requires_grad=True)),))
    part = Terms(tables=tuple(Table(bias=torch.zeros(3, 15, device="cuda"), axis=axis) for axis in "hw"))
    image = torch.zeros(2, 12, 20, 144, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    others = ALL - {SDPBackend.CUDNN_ATTENTION}
    found = [
        (others, lambda: attention(*qkv(requires_grad=True), alibi, Grid(8, 8), backend="sdpa")),
        (others, lambda: attention(*qkv(requires_grad=True), part, Grid(8, 8), backend="augmented_qk")),
        (others, lambda: window_attention(image, Terms(), Grid(12, 20), (8, 8), (4, 4), 3, backend="sdpa")),
        (ALL, lambda: window_attention(image, Terms(), Grid(12, 20), (8, 6), (4, 4), 3, backend="sdpa")),
        (ALL, lambda: attention(*qkv(), alibi, Grid(8, 8), backend="sdpa")),
        (ALL, lambda: attention(*qkv(requires_grad=True), learned, Grid(8, 8), backend="sdpa")),
        (ALL - {SDPBackend.EFFICIENT_ATTENTION}, lambda: attention(*qkv(), learned, Grid(8, 8), backend="sdpa")),
    ]
    for kernels, call in found:
        call()
        assert calls.pop()[0] == kernels
    with torch.no_grad():
        found[0][1]()
    assert calls.pop()[0] == ALL
    with autocast(torch.float16):  # computed in half precision
        attention(*qkv(dtype=torch.float32, requires_grad=True), alibi, Grid(8, 8), backend="sdpa")
    assert calls.pop()[0] == others and enabled() == ALL


def test_a_restriction_of_the_callers_stays(calls):
    q, k, v = qkv(requires_grad=True)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        sdpa.fused(q, k, v, None, 0.0, 1.0)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # no other is left
        sdpa.fused(q, k, v, None, 0.0, 1.0)
    assert [kernels for kernels, _ in calls] == [{SDPBackend.MATH}, {SDPBackend.CUDNN_ATTENTION}]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_choice_in_a_compiled_graph(hopper, dynamic):
    """Of any length in a graph that serves several; without graph breaks and guards on the length."""
    graphs = []

    def capture(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes} | {str(node.args) for node in graph.graph.nodes})
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(sdpa.fused, backend=capture, fullgraph=True, dynamic=dynamic)
    for side in (8, 12):  # 64 and 144 keys
        compiled(*qkv(side, requires_grad=True), None, 0.0, 1.0)
    names = [{name for name in ("FLASH", "CUDNN") if f"('{name}_ATTENTION',)" in found} for found in graphs]
    # Entering names the kernels without cuDNN's, leaving all that were enabled before.
    assert names == ([{"FLASH", "CUDNN"}] if dynamic else [{"FLASH", "CUDNN"}, set()])
    assert enabled() == ALL


def test_masks_have_the_dtype_in_which_sdpa_computes(calls):
    """cuDNN read a float32 mask as half precision (pytorch 191612), and penalties of float32 are -inf in it."""
    penalty = torch.full((64, 64), torch.finfo(torch.float32).min, device="cuda")
    bias = Terms(tables=(Table(bias=torch.zeros(3, Grid(8, 8).classes(), device="cuda")),))
    image = torch.zeros(2, 12, 20, 144, device="cuda")
    for rounds, dtype in ((True, torch.float32), (False, torch.bfloat16), (True, torch.float16)):
        with autocast(torch.bfloat16) if rounds else contextlib.nullcontext():
            for terms in (Terms(), bias):
                for mask in (None, penalty, penalty[:1] > 0):
                    attention(*qkv(dtype=dtype), terms, Grid(8, 8), mask, backend="sdpa")
            window_attention(image.to(dtype), bias, Grid(12, 20), (8, 8), (4, 4), 3, backend="sdpa")
            window_attention(image.to(dtype), Terms(), Grid(12, 20), (8, 8), (4, 4), 3, backend="sdpa")
    masks = [mask for _, mask in calls if mask is not None]
    assert len(masks) == 3 * 7 and {mask.dtype for mask in masks} == {torch.bfloat16}
    assert {mask.stride(-1) for mask in masks} == {1}


def test_the_last_stride_of_a_mask_from_keys_alone(calls):
    """Another one leaves a GPU the slow kernel only."""
    terms = Terms(tables=(Table(key=torch.zeros(3, Grid(8, 8).classes(), 16, device="cuda")),))
    attention(*qkv(), terms, Grid(8, 8), backend="sdpa")
    assert calls[0][1].stride(-1) == 1


def test_no_gpu_no_fault(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sdpa_faults.stack.cache_clear()
    assert sdpa_faults.stack(0) is None and sdpa_faults.kernels(0, *TRAINED) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for hip, found in (("7.0", None), (None, Stack((9, 0), 91900, torch.__version__))):  # AMD's gfx90a also says (9, 0)
        monkeypatch.setattr(torch.version, "hip", hip)
        sdpa_faults.stack.cache_clear()
        assert sdpa_faults.stack(0) == found
    sdpa_faults.stack.cache_clear()
