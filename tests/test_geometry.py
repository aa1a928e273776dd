"""Constants are made once, bounded, shared safely, and become what each kind of graph needs."""

import copy
import os
import pickle
import threading
import weakref

import pytest
import timm
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import get_static_address_type
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config

from helpers import each
from vitrel import Grid, Table, Terms, create_position, geometry
from vitrel.geometry import cached_geometry
from vitrel.ops import attention, window_attention
from vitrel.ops.window import windows

MADE = []
SEVERAL = [(9, 13), (8, 16), (6, 10)]
# Not divisible by the window, one window along an axis, one window in all, divisible.
GRIDS = [(9, 13), (3, 14), (4, 3), (8, 12)]


@cached_geometry
def counted(n: int, pair: tuple[int, int], name: str, share: float, flag: bool, device: torch.device) -> Tensor:
    MADE.append((n, pair, name, share, flag))
    return torch.arange(n, device=device) * share + pair[0] - pair[1]


def make(n=3, pair=(1, 2), name="a", share=0.5, flag=True, device="cpu"):
    return counted(n, pair, name, share, flag, device=device)


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    geometry.clear()
    MADE.clear()
    yield
    geometry.clear()


def held():
    """Bytes of all cached geometry, including what compiled and captured graphs read."""
    kept = [*geometry._cache.values(), *geometry._captured.values()]
    tensors = [t for value in kept for t in value] + list(vars(geometry._graphs).values())
    return sum({t.data_ptr(): geometry._bytes(t) for t in tensors}.values())


def test_made_once_and_told_apart():
    first = make()
    assert make() is first and len(MADE) == 1
    assert torch.equal(first, torch.tensor([-1, -0.5, 0]))
    for other in ({"n": 4}, {"pair": (2, 1)}, {"name": "b"}, {"share": 0.25}, {"flag": False}):
        assert make(**other) is not first
    assert len(MADE) == 6 and make() is first
    assert held() == sum(4 * key[0] for key in MADE)


def test_bounded_in_bytes_with_the_oldest_dropped(monkeypatch):
    monkeypatch.setattr(geometry, "limit", 3 * 400)
    for n in (100, 101, 99):
        make(n)
    make(100)  # used again, so 101 is the oldest now
    make(98)
    assert held() <= 1200
    MADE.clear()
    make(100), make(99), make(98)
    assert not MADE
    make(101)
    assert len(MADE) == 1
    assert make(1000) is make(1000)  # larger than the bound alone: kept until the next
    make(2)
    assert held() == 8


def test_the_first_caller_may_be_in_any_mode():
    """Training follows inference, whoever made the constant."""
    weight = torch.ones(3, requires_grad=True)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        made = make()
    assert not made.is_inference() and made.dtype == torch.float32
    (weight * make()).sum().backward()
    assert torch.equal(weight.grad, made)


def test_not_kept_where_tensors_are_no_values():
    with FakeTensorMode():
        assert type(make()).__name__ == "FakeTensor"
    assert make(device="meta").is_meta
    torch.func.vmap(lambda x: x * make())(torch.ones(2, 3))
    torch.func.grad(lambda x: (x * make()).sum())(torch.ones(3))
    traced = torch.jit.trace(lambda x: x + make(x.shape[0]), torch.ones(3), check_trace=False)
    assert "aten::arange" in str(traced.graph)
    assert held() == 0
    assert type(make()) is Tensor and make() is make()


def test_threads_make_one():
    found, start = [], threading.Barrier(8)

    def run():
        start.wait()
        found.append(make(1000))

    threads = [threading.Thread(target=run) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert all(value is found[0] for value in found)


def test_a_fork_while_another_thread_makes_one():
    holding, done = threading.Event(), threading.Event()

    def hold():
        with geometry._lock:
            holding.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(make(), torch.tensor([-1, -0.5, 0])) else 1)
    done.set(), thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_nothing_of_them_in_a_model():
    model = timm.create_model("vitrel_swin_n", num_classes=2)
    names, size = [*model.state_dict()], len(pickle.dumps(model))
    buffers = [name for name, _ in model.named_buffers()]
    model(torch.zeros(1, 3, 200, 120))
    assert held() > 10_000
    for same in (model, copy.deepcopy(model)):
        assert [*same.state_dict()] == names and [name for name, _ in same.named_buffers()] == buffers
    assert len(pickle.dumps(model)) == size


@pytest.fixture
def capturing(monkeypatch):
    """A GPU whose constants lie on the CPU; [False] or [True]: whether a CUDA graph is being captured."""
    now, compute = [False], geometry._computed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    monkeypatch.setattr(geometry, "_computed", lambda name, key, device: compute(name, key, torch.device("cpu")))
    monkeypatch.setattr(geometry, "_captured", {})
    return now


def test_no_cuda_graph_is_captured_with_one_missing(capturing):
    first = make(device="cuda:0")
    capturing[0] = True
    assert make(device="cuda:0") is first
    with pytest.raises(RuntimeError, match=r"counted.* cannot be computed while a CUDA graph is captured: run the model once"):
        make(4, device="cuda:0")


def test_what_a_captured_graph_reads_stays(capturing, monkeypatch):
    """It reads an address, so that memory given to another tensor would be read in silence."""
    read, other = weakref.ref(make(100, device="cuda:0")), weakref.ref(make(99, device="cuda:0"))
    capturing[0] = True
    make(100, device="cuda:0")
    capturing[0] = False
    monkeypatch.setattr(geometry, "limit", 4)
    make(2, device="cuda:0")  # drops both from the cache
    assert read() is not None and other() is None
    assert held() == 4 * (100 + 2)
    geometry.clear()
    capturing[0] = False
    again = make(100, device="cuda:0")
    capturing[0] = True
    assert make(100, device="cuda:0") is again is not read() is not None  # of another graph


class Attend(torch.nn.Module):
    """Window attention with a table, over [B, h, w, 3 * 2 * 8]."""

    def __init__(self, window=(4, 3), shift=(2, 1)):
        super().__init__()
        self.window, self.shift = Grid(*window), shift
        self.table = torch.nn.Parameter(torch.randn(2, self.window.classes()) * 0.5)

    def forward(self, qkv):
        terms, grid = Terms(tables=(Table(bias=self.table),)), Grid(*qkv.shape[1:3])
        return window_attention(qkv, terms, grid, self.window[:2], self.shift, 2, backend="sdpa")


def dynamic_image(b, h, w, dims=(0, 1, 2), **keywords):
    """Images [B, h, w, C] of which `dims` may vary."""
    qkv = torch.randn(b, h, w, 3 * 2 * 8, **keywords)
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(qkv, dim)
    return qkv


@pytest.mark.slow(seconds=3)
def test_a_graph_for_any_size_holds_one_operator():
    torch._dynamo.reset()
    shift = (2, 1)
    counter = CompileCounterWithBackend("aot_eager")
    layout = torch.compile(lambda x: windows(*x.shape, (4, 3), shift, x.device), backend=counter, fullgraph=True, dynamic=True)
    for h, w in GRIDS:  # none has a side of 1, which is always a graph of its own
        for found, expected in zip(layout(torch.empty(h, w)), windows(h, w, (4, 3), shift), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count == 1
    called = {str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"}
    assert called == {"vitrel.cached_geometry.default", "<built-in function getitem>"}
    # What it computes first would lie in the memory of a CUDA graph, and be overwritten by the next replay.
    assert torch.Tag.cudagraph_unsafe in torch.ops.vitrel.cached_geometry.default.tags


@pytest.mark.slow(seconds=3)
@each(
    ("name", "key"),
    [
        ("vitrel.ops.window._windows", (9, 13, (4, 3), (2, 1), False)),
        ("vitrel.position.resample.table_taps", ((5, 4), (9, 13), 3, "geometric")),
    ],
)
def test_the_operators_fake_tensors_are_as_the_real_ones(name, key):
    """Of a key with a boolean, and of one with a word."""
    torch.library.opcheck(geometry._operator, (name, *geometry._flat(geometry._kinds[name], key), torch.device("cpu")))


def test_what_a_graph_writes_into_an_operators_result_stays_there():
    torch._dynamo.reset()
    model = torch.compile(lambda x: make(x.shape[0]).mul_(2) + x, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.zeros(3)
    assert torch.equal(model(x), model(x))


def test_a_graph_of_one_size_reads_them():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    def layout(x):
        return [t.clone() for t in windows(*x.shape, (4, 3), (2, 1), x.device)]

    compiled = torch.compile(layout, backend=counter, fullgraph=True, dynamic=False)
    for size in ((9, 13), (8, 13)):
        assert all(map(torch.equal, compiled(torch.empty(size)), layout(torch.empty(size))))
    called = {str(node.target) for graph in counter.graphs for node in graph.graph.nodes if "call" in node.op}
    assert called == {"clone"}
    read = list(vars(geometry._graphs).values())
    assert len(read) == 8 and all(get_static_address_type(t) for t in read)  # replays of CUDA graphs do not copy them
    geometry.clear()  # they are made, and the graph compiled, again
    for _ in range(2):
        assert all(map(torch.equal, compiled(torch.empty(9, 13)), layout(torch.empty(9, 13))))
    assert counter.frame_count == 3


def test_numbers_of_a_module_that_a_graph_takes_for_symbols():
    """Under dynamic=True, in windows, whose geometry is of one size."""
    torch._dynamo.reset()
    encoding = create_position("rope_axial", (4, 3), 1, 8, base=10.0)
    compiled = torch.compile(lambda x: x * encoding(Grid(4, 3)).rotary[0], backend="eager", fullgraph=True, dynamic=True)
    for n in (2, 3):
        x = torch.randn(n, 1, 12, 1)
        assert torch.equal(compiled(x), x * encoding(Grid(4, 3)).rotary[0])


@pytest.mark.slow(seconds=6)
def test_a_training_graph_at_any_size():
    """In training, with AOTAutograd, whose graphs inductor compiles; the forward pass is made of the same operators as in
    inference."""
    torch._dynamo.reset()
    model, counter = Attend(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for h, w in SEVERAL[:2]:
        qkv = dynamic_image(2, h, w, (1, 2), requires_grad=True)
        weight, found = torch.randn(2, h, w, 2 * 8), []
        for run in (compiled, model):
            out = run(qkv)
            found.append([out, *torch.autograd.grad((out * weight).sum(), [qkv, model.table])])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1
    assert "vitrel.cached_geometry" in counter.graphs[0].print_readable(print_output=False)


@pytest.mark.slow(seconds=7)
def test_inductor_at_any_size():
    """The code that inductor generates, around the operator, in inference."""
    torch._dynamo.reset()
    model, counter = Attend(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for h, w in SEVERAL[:2]:
            qkv = dynamic_image(2, h, w)
            torch.testing.assert_close(compiled(qkv), model(qkv), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


class Twice(torch.nn.Module):
    def forward(self, x):
        return *windows(*x.shape, (4, 3), (2, 1)), *windows(*x.shape, (4, 3), (2, 1)), *windows(*x.shape, (4, 3), (0, 0))


@pytest.mark.slow(seconds=3)
def test_exported_programs_compute_each_constant_once_with_pytorchs_own_operators():
    """The second export does not read what the first computed."""
    sizes = {i: torch.export.Dim.DYNAMIC for i in range(2)}
    for _ in range(2):
        program = torch.export.export(Twice(), (torch.empty(9, 13),), dynamic_shapes=(sizes,))
        assert "aten.arange" in str(program.graph) and "vitrel" not in str(program.graph)
        outputs = program.graph.output_node().args[0]
        n = len(outputs) // 3
        assert outputs[:n] == outputs[n : 2 * n] != outputs[2 * n :]
    for h, w in [*SEVERAL, (4, 7), (9, 3)]:  # in the last two, one window holds an axis exactly
        found = program.module()(torch.empty(h, w))
        for one, shift in ((found[n : 2 * n], (2, 1)), (found[2 * n :], (0, 0))):
            assert all(map(torch.equal, one, windows(h, w, (4, 3), shift)))


@pytest.mark.slow
@pytest.mark.parametrize(("global_attention", "strict"), [(False, True), (True, False)])
def test_exported_attention_takes_any_batch(global_attention, strict):
    """Its bias has a batch of 1, which the program must not compare with the images'."""

    class Whole(Attend):
        def forward(self, qkv):
            q, k, v = qkv.flatten(1, 2).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
            return attention(q, k, v, Terms(tables=(Table(bias=self.table),)), Grid(4, 3), backend="sdpa")

    model, sizes = (Whole if global_attention else Attend)().eval(), {0: torch.export.Dim.DYNAMIC}
    with fx_config.patch(backed_size_oblivious=True):
        image = (torch.randn(2, 4, 3, 48),)
        program = torch.export.export(model, image, dynamic_shapes=(sizes,), strict=strict)
    assert "sdpa_kernel" not in str(program.graph) and "scaled_dot_product_attention" in str(program.graph)
    for batch in (1, 2, 3):
        qkv = torch.randn(batch, 4, 3, 48)
        torch.testing.assert_close(program.module()(qkv), model(qkv), atol=1e-6, rtol=1e-5)


def test_exporting_is_not_compiling():
    class Says(torch.nn.Module):
        def forward(self, x):
            return x + (1 if geometry.is_exporting() else 0)

    x = torch.zeros(3)
    assert not Says()(x).any() and not torch.compile(Says(), backend="eager", fullgraph=True)(x).any()
    for strict in (False, True):
        assert torch.export.export(Says(), (x,), strict=strict).module()(x).all()
    assert not Says()(x).any()
