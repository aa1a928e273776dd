"""What backend "auto" takes, on tensors of a GPU that hold no values: by device and kind of call, compiled and exported."""

from importlib.metadata import version

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from helpers import each
from helpers.gpu import fake_gpu
from helpers.variants import make
from vitrel import Grid, RelativeAttention, Terms
from vitrel.ops import attention, auto, dispatch, why, window_attention
from vitrel.ops.backends import triton_backend

needs_triton = pytest.mark.skipif(not triton_backend._INSTALLED, reason="Triton is not installed")
HALF, FULL = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)


def chosen(key, grid, window=None, training=False, device="cuda", dtype=torch.bfloat16, **how):
    """The backend that computes attention with an encoding on fake tensors."""
    names, encoding = [], make(key, Grid(*(window or grid)), 2, 16, device="meta") if key != "none" else nn.Identity()
    recording = dispatch.recording(lambda *given: names.append(given[2]))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(training), recording:
        terms = Terms() if key == "none" else encoding.to_empty(device=device)(Grid(*(window or grid)))
        if window is None:
            q, k, v = (torch.zeros(1, 2, grid.tokens, 16, device=device, dtype=dtype, requires_grad=training) for _ in range(3))
            attention(q, k, v, terms, grid, **how)
        else:
            qkv = torch.zeros(1, *grid[:2], 96, device=device, dtype=dtype, requires_grad=training)
            window_attention(qkv, terms, grid, window, (1, 2), 2, **how)
    return names[0]


GPU = [  # encoding, side of the grid, window, training -> backend
    ("table", 30, (7, 7), False, "triton"),
    ("table", 30, (7, 7), True, "triton"),
    ("rope_mixed", 30, (8, 8), True, "triton"),
    ("none", 30, (7, 7), True, "triton"),
    ("table", 30, (12, 12), False, "triton"),
    ("table", 30, (12, 12), True, "triton"),
    ("deberta", 30, (7, 7), False, "sdpa"),  # the kernels refuse it
    ("table", 63, None, True, "sdpa"),
    ("table", 64, None, True, "triton"),
    ("factorized", 64, None, True, "triton"),
    ("table", 64, None, False, "sdpa"),
    ("table", 127, None, False, "sdpa"),
    ("table", 128, None, False, "triton"),
    ("alibi", 64, None, True, "sdpa"),  # is not learned
    ("alibi", 128, None, True, "triton"),
    ("decomposed", 14, None, True, "augmented_qk"),
    ("decomposed", 31, None, False, "sdpa"),
    ("decomposed", 32, None, False, "augmented_qk"),
    ("shaw", 14, None, True, "augmented_qk"),
    ("shaw", 14, None, False, "augmented_qk"),  # sdpa refuses it
    ("pape", 32, None, True, "sdpa"),  # augmented_qk refuses it in half precision
    ("rope_axial", 64, None, True, "sdpa"),
    ("none", 128, None, False, "sdpa"),
]


@pytest.mark.slow
@needs_triton
@each(("key", "side", "window", "training", "backend"), GPU)
def test_on_a_gpu_in_half_precision(key, side, window, training, backend):
    """In either type, of which one is taken for training and one for inference."""
    assert chosen(key, Grid(side, side), window, training, dtype=HALF[training]) == backend


@pytest.mark.slow
@each(("key", "side", "window", "training", "backend"), GPU)
def test_on_a_gpu_in_full_precision(key, side, window, training, backend):
    taken = chosen(key, Grid(side, side), window, training, dtype=FULL[training])
    assert taken == ("reference" if key == "shaw" else "sdpa")


@needs_triton
def test_what_a_kernel_lacks_goes_to_the_next_row():
    assert chosen("table", Grid(30, 30), (7, 7), True, dropout_p=0.1) == "sdpa"


@pytest.fixture
def untried(monkeypatch):
    """No kernel was tried before."""
    monkeypatch.setattr(triton_backend, "_failures", {})
    monkeypatch.setattr(triton_backend, "_told", set())


@needs_triton
def test_without_triton_one_warning_tells_of_it(monkeypatch, untried, recwarn):
    monkeypatch.setattr(triton_backend, "_INSTALLED", False)
    assert chosen("table", Grid(30, 30), (7, 7), True) == chosen("table", Grid(64, 64), None, True) == "sdpa"
    (warning,) = (str(w.message) for w in recwarn if w.category is RuntimeWarning)
    assert warning.startswith("windows of 7x7 with 2 heads of 16 in bfloat16: Triton is not installed beside torch")


def broken(*cases):
    """A double of `_try`: Triton fails for the kinds of calls for which one of the cases is true."""

    def run(kind):
        if any(case(kind) for case in cases):
            raise RuntimeError("PassManager::run failed\nand more lines")

    return run


@needs_triton
def test_a_shape_that_triton_does_not_compile_goes_to_the_next_row(monkeypatch, untried, recwarn):
    """With one warning for a shape; where only the backward pass fails, in training alone."""
    forward, backward = (lambda kind: kind.window == (12, 12)), (lambda kind: kind.window == (9, 9) and kind.grads)
    monkeypatch.setattr(triton_backend, "_try", broken(forward, backward, lambda kind: kind.grid == (64, 64, 0)))
    for _ in range(2):
        assert chosen("table", Grid(30, 30), (12, 12)) == chosen("table", Grid(30, 30), (12, 12), True) == "sdpa"
        assert chosen("table", Grid(30, 30), (9, 9)) == "triton" and chosen("table", Grid(30, 30), (9, 9), True) == "sdpa"
        assert chosen("table", Grid(64, 64), None, True) == "sdpa"
        assert chosen("table", Grid(30, 30), (7, 7), True) == "triton"
    told = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    shapes = ["windows of 12x12", "windows of 9x9", "attention over 64x64 tokens"]
    assert [text.partition(" with 2 heads of 16 in bfloat16: ")[0] for text in told] == shapes
    reason = f"Triton {version('triton')} (torch {torch.__version__}) fails to run its kernels: RuntimeError: PassManager"
    assert all(f"{reason}::run failed; another" in text for text in told)


@needs_triton
def test_memory_that_runs_out_is_no_fault_of_tritons(monkeypatch, untried):
    def run(kind):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(triton_backend, "_try", run)
    with pytest.raises(torch.OutOfMemoryError):
        chosen("table", Grid(30, 30), (7, 7))
    assert not triton_backend._failures


@needs_triton
def test_no_row_was_measured_on_gpus_of_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert chosen("table", Grid(30, 30), (7, 7)) == "sdpa"


CPU = [
    ("table", 64, None, False, "sdpa"),
    ("table", 30, (7, 7), False, "sdpa"),
    ("shaw", 13, None, False, "reference"),
    ("shaw", 14, None, True, "augmented_qk"),
    ("factorized", 64, None, True, "sdpa"),
    ("decomposed", 35, None, False, "sdpa"),
    ("decomposed", 36, None, False, "augmented_qk"),
    ("pape", 35, None, True, "sdpa"),
    ("pape", 36, None, True, "augmented_qk"),
]


@each(("key", "side", "window", "training", "backend"), CPU)
def test_on_a_cpu(key, side, window, training, backend):
    assert chosen(key, Grid(side, side), window, training, "cpu", torch.float32) == backend


def test_why_names_the_row_and_its_measurement():
    encoding, grid = make("decomposed", Grid(36, 36), 2, 8), Grid(36, 36)
    q, k, v = torch.zeros(3, 1, 2, grid.tokens, 8)
    with torch.no_grad():
        first, row, *others = why(attention, q, k, v, encoding(grid), grid).splitlines()
    assert first.endswith(": augmented_qk (auto)")
    (wanted,) = (row for row in auto.ROWS if row.device == "cpu" and row.kind == "content tables")
    assert row == f"    auto: {wanted.kind} from 1,296 tokens: {wanted.measured}"
    assert "    sdpa: serves it if given by name" in others


# --- in graphs, no row compares a size that is not known

SDPA, WINDOWS, GLOBAL = "scaled_dot_product_attention", "vitrel.window_attention", "vitrel.biased_attention"
COMPILED = [  # layer, training -> operators of the graph of the first size, and of the graph for any size
    (dict(position="table", window=7, shift=3), False, WINDOWS, WINDOWS),
    (dict(position="clipped"), True, GLOBAL, SDPA),
    (dict(position="shaw", position_args={"values": False}), False, SDPA, SDPA),  # of augmented_qk, which adds no mask
]


@needs_triton
@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(("options", "training", "first", "any_size"), COMPILED)
def test_all_sizes_compile_in_two_graphs_of_one_device(options, training, first, any_size):
    """Their constants are read there, so that nothing is copied in a forward pass, nor in a CUDA graph."""
    graphs, dtype = [], torch.bfloat16
    with fake_gpu(lambda: RelativeAttention(32, 2, **options), dtype) as layer, torch.set_grad_enabled(training):
        compiled = torch.compile(
            lambda x: layer(x.flatten(1, 2), (x.shape[1], x.shape[2])),
            backend=lambda graph, _: graphs.append(graph.graph) or graph.forward,
            fullgraph=True,
        )
        # From 225 rows and columns on, extra columns are too wide for flash attention: SDPA itself would need another graph.
        for h, w in ((64, 64), (8, 12), (9, 64), (96, 96)):
            assert compiled(torch.zeros(2, h, w, 32, device="cuda", dtype=dtype)).shape == (2, h * w, 32)
    assert len(graphs) == 2
    for graph, operator in zip(graphs, (first, any_size), strict=True):
        calls = [node for node in graph.nodes if any(known in str(node.target) for known in (SDPA, WINDOWS, GLOBAL))]
        assert calls and all(operator in str(node.target) for node in calls)
        if options["position"] == "shaw":
            assert all(node.kwargs["attn_mask"] is None for node in calls)
        values = [(node.name, leaf) for node in graph.nodes for leaf in tree_leaves(node.meta.get("example_value"))]
        assert [node for node, value in values if isinstance(value, torch.Tensor) and value.device.type != "cuda"] == []
    read = [node.name for node in graphs[0].nodes if node.op == "placeholder" and "_graphs_constant" in node.name]
    assert read or first == WINDOWS  # whose kernels need none


def test_traced_programs_do_not_either(monkeypatch):
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert chosen("table", Grid(30, 30), (7, 7)) == chosen("decomposed", Grid(64, 64)) == "sdpa"
    assert chosen("decomposed", Grid(64, 64), device="cpu", dtype=torch.float32) == "sdpa"
    with pytest.raises(ValueError, match="'triton' refuses: an exported program may contain PyTorch's operators only"):
        chosen("table", Grid(30, 30), (7, 7), backend="triton")
