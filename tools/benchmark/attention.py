"""The suites of attention alone: every backend beside its peers, SDPA's own kernels with a bias, and cost against size.

Cost against size is time and memory of global attention from 196 to 16384 tokens. Memory is what one call takes at its peak
beyond what is held before it, outputs and gradients included; to it comes the index [N, N] that some peers keep. There no
process may take more than `memory_limit`: what needs more is a row, not a machine that stalls.
"""

import resource
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmark.engine import DEFINITION, Case, Contender, Visit
from tools.benchmark.methods import FLOOR, GATHERED, force_warps, global_flex, methods, outcome
from tools.benchmark.shapes import CPU_SHAPES, QUICK_SHAPES, SHAPES, Problem, Shape, hard_shape, make_problem
from tools.benchmark.worker import Repeats
from vitrel.grid import Grid
from vitrel.ops import BACKENDS
from vitrel.ops.reference import rotated
from vitrel.position.terms import Terms

MODES = ("forward", "training")
TOKENS = ((14, 14), (28, 28), (24, 72), (56, 56), (64, 64), (96, 96), (128, 128))
QUICK_TOKENS = ((4, 6), (8, 8))
TURN = "sizes in turn"
SDPA_KERNELS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SDPA_MODES = ("inference", "training without bias gradient", "training")  # in the last the bias requires its gradient
_PARTS = 8  # of a batch, for each of which the definition is computed alone: it holds every score in float64
_WHOLE = 2000  # tokens up to which outputs and gradients are checked, beyond them the outputs of the last _ROWS
_ROWS = 64
_RATE = 5e10  # operations a second of one core, for the number of repeats alone
_STATM = Path("/proc/self/statm")  # its first number are the pages of the address space
_QUICK_PLAN = Repeats(2, 3, 0.0, 1)


def ops_cases(gpu: bool, quick: bool) -> list[Case]:
    """Every backend beside its peers in shapes that the device can take; then cost against size."""
    shapes = QUICK_SHAPES if quick else SHAPES if gpu else CPU_SHAPES
    return [*_backends(shapes, gpu, quick), *size_cases(gpu, quick)]


def kernel_cases(gpu: bool, quick: bool) -> list[Case]:
    """Every backend beside its peers in the shapes of a GPU, and which kernel of SDPA serves a bias."""
    plan = _QUICK_PLAN if quick else Repeats()
    sdpa = [sdpa_case(shape, mode, plan) for shape in sdpa_shapes(gpu) for mode in SDPA_MODES]
    first = [case for case in sdpa if case.dtype == _dtype(gpu)]
    return [*first, *_backends(QUICK_SHAPES if quick else SHAPES, gpu, quick), *sdpa[len(first) :]]


def _backends(shapes: Sequence[Shape], gpu: bool, quick: bool) -> list[Case]:
    return [backend_case(shape, mode, gpu, quick) for shape in shapes for mode in MODES]


def backend_case(shape: Shape, mode: str, gpu: bool, quick: bool = False) -> Case:
    """All methods for a shape. Hard, small problems are checked too, in float32 and half precision.

    What takes long to compile is spared a part: compiled peers are checked at full size only, kernels with other warps not in
    float32.
    """
    training, dtype = mode == "training", _dtype(gpu)
    hard = ("float32", "bfloat16" if gpu else "float16")
    common = dict(shape=shape, training=training, dtype=dtype)
    found = []
    for one in methods(shape, gpu):
        own = () if one.compiled or one.kind == "floor" else hard[1:] if one.warps else hard
        truth = None if one.kind == "floor" else common | dict(method=DEFINITION, hard=hard)
        found.append(Contender(one.name, one.kind, common | dict(method=one.name, hard=own), truth, one.kind == "ours"))
    row = shape._asdict() | {"grid": list(shape.grid), "tokens": shape.tokens, "flops": shape.flops(training)}
    del row["name"], row["compiled"]
    plan = _QUICK_PLAN if quick else Repeats() if gpu else cpu_repeats(shape, training)
    build = f"{__name__}:attention_call"
    return Case(shape.name, build, tuple(found), (Visit(mode),), dtype, plan, row=row, largest=True, patience=300.0)


def cpu_repeats(shape: Shape, training: bool) -> Repeats:
    """20 calls to warm up for what takes milliseconds; for what takes seconds 2, and one call a round."""
    seconds = shape.flops(training) / _RATE
    return Repeats(warmup=max(2, min(20, int(2 / seconds))), seconds=0.1)


class Sized(NamedTuple):
    """One line of the plot of cost against size: the method of that name with an encoding."""

    name: str
    encoding: str = "table"

    @property
    def label(self) -> str:
        """How rows and tables call it."""
        return self.name if self.encoding == "table" else f"{self.name}, {self.encoding}"

    @property
    def keeps(self) -> bool:
        """Whether it keeps the index [N, N] of int64."""
        return self.name.startswith(("softmax", GATHERED))


def size_cases(gpu: bool, quick: bool) -> list[Case]:
    """Cost against size: one contender after the other, size after size; then compiled calls in turn."""
    if not gpu and not _STATM.exists():  # the memory of a process is read from /proc
        return []
    sizes = QUICK_TOKENS if quick else TOKENS
    found = [] if gpu else [_precision()]
    for mode in MODES:
        for number, size in enumerate(sizes):
            smaller = tuple(sized_shape("table", one).name for one in sizes[:number])
            found.append(sized_case(lineup(gpu, quick), size, mode, gpu, smaller))
    return found if quick else [*found, turn_case(gpu, sizes[:5])]


def lineup(gpu: bool, quick: bool) -> list[Sized]:
    """Who is measured, ours first."""
    if quick:
        return [Sized("auto"), Sized(GATHERED)]
    ours = [name for name in ("triton" if gpu else "bias_by_row",) if name in BACKENDS]
    peers = ["sdpa", GATHERED, f"{GATHERED} compiled", "flex" if gpu else "flex compiled", "softmax", FLOOR]
    return [Sized("auto"), *map(Sized, ours), Sized("auto", "factorised"), Sized("auto", "rope"), *map(Sized, peers)]


def sized_shape(encoding: str, size: tuple[int, int]) -> Shape:
    """One image of ViT-S, h x w tokens without prefix."""
    h, w = size
    return Shape(f"size {h}x{w}", encoding, Grid(h, w), 1, 6, 64)


def sized_case(
    known: Sequence[Sized], size: tuple[int, int], mode: str, gpu: bool = False, smaller: tuple[str, ...] = ()
) -> Case:
    """One size. In float32 our output is held to rounding. A process ends where it takes more than `memory_limit`."""
    dtype, found, kinds = _dtype(gpu), [], {}
    for one in known:
        shape = sized_shape(one.encoding, size)
        kinds = kinds or {method.name: method.kind for method in methods(shape, gpu)}
        rows = _ROWS if shape.tokens > _WHOLE else 0
        common = dict(shape=shape, training=mode == "training", dtype=dtype, rows=rows)
        args = common | dict(method=one.name, keep=one.keeps, limit=memory_limit())
        truth = None if one.name == FLOOR else common | dict(method=DEFINITION)
        exact = dtype == "float32" and (one.name == "auto" or one.name in BACKENDS)
        row = {"tokens": shape.tokens, "kept_bytes": 8 * shape.tokens**2 if one.keeps else 0}
        env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of processes
        found.append(Contender(one.label, kinds[one.name], args, truth, exact, row, env))
    plan = Repeats(1, 1, 1.5, 15)
    build, name = f"{__name__}:attention_call", f"size {size[0]}x{size[1]}"
    return Case(name, build, tuple(found), (Visit(mode),), dtype, plan, kind="size", together=False, after=smaller)


def turn_case(gpu: bool, sizes: Sequence[tuple[int, int]]) -> Case:
    """Compiled calls in processes that meet one size after the other: seconds of the first call of each, and graphs."""
    shapes = [sized_shape("table", size)._replace(name=TURN) for size in sizes]  # one name: dynamo would compile for another
    visits = [
        Visit(f"forward, {h}x{w}", {"shape": shape}, {"size": [h, w]}) for (h, w), shape in zip(sizes, shapes, strict=True)
    ]
    found = []
    for one in (Sized("auto"), Sized(GATHERED), Sized("flex")):
        common = dict(shape=shapes[0], training=False, dtype=_dtype(gpu), rows=_ROWS)
        args = common | dict(method=one.name, keep=one.keeps, compiled=True)
        truth = common | dict(method=DEFINITION)
        found.append(Contender(f"{one.label} compiled", "ours" if one.name == "auto" else "peer", args, truth))
    build = f"{__name__}:attention_call"
    return Case(TURN, build, tuple(found), tuple(visits), _dtype(gpu), kind="turn", together=False)


def memory_limit() -> int:
    """Bytes that one process may take beyond what it begins with: 16 GiB, or 0.7 of what is free."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return min([16 * 2**30, *(7 * one // 10 for one in free)])


class AttentionCall:
    """A method's call on the numbers of a shape; what gates see of it are `hard` problems too, or its last `rows` alone."""

    isolated = True

    def __init__(self, function: Callable, training: bool, dtype: str, device: str, hard: Sequence[str], rows: int, keep: bool):
        self.function, self.training, self.dtype, self.device = function, training, dtype, device
        self.hard, self.rows, self.keep = hard, rows, keep

    def set(self, shape: Shape) -> None:
        """The next calls are of that shape."""
        self.problem = _problem(shape, self.dtype, self.device, keep=self.keep)

    def __call__(self) -> dict[str, Tensor]:
        return outcome(self.problem, self.function, self.training)

    def checked(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the outcomes of hard problems, whose names say their type."""
        if self.rows:
            return {"output": found["output"][:, :, -self.rows :]}
        for dtype, problem in _hard_problems(self.problem.shape, self.hard, self.device):
            of_hard = outcome(problem, self.function, self.training)
            found = found | {f"hard {dtype}: {name}": x for name, x in of_hard.items()}
        return found


def attention_call(
    shape: Shape,
    method: str,
    training: bool,
    dtype: str,
    device: str,
    hard: Sequence[str] = (),
    rows: int = 0,
    keep: bool = True,
    compiled: bool = False,
    limit: int = 0,
) -> Callable[[], dict[str, Tensor]]:
    """What a worker builds: a method of that name, or the definition in float64, on the numbers of a shape.

    hard: types in which hard, small problems are checked too. rows: the last queries, whose output alone is checked; 0: all.
    keep: whether what peers keep is made. compiled: by torch.compile, for any size. limit: bytes that the process may take
    beyond what it has; 0: as many as there are.
    """
    if method == DEFINITION:
        return lambda: _truth(shape, training, dtype, device, hard, rows)
    if limit and device == "cpu":
        limit += int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    one = next(one for one in methods(shape, device == "cuda") if one.name == method)
    function = global_flex if compiled and method == "flex" else one.function
    if one.warps:
        force_warps(one.warps)
    call = AttentionCall(torch.compile(function) if compiled else function, training, dtype, device, hard, rows, keep)
    call.set(shape)
    return call


def _problem(shape: Shape, dtype: str, device: str, seed: int = 0, keep: bool = True) -> Problem:
    return make_problem(shape, getattr(torch, dtype), torch.device(device), seed, keep)


def _hard_problems(shape: Shape, dtypes: Sequence[str], device: str) -> list[tuple[str, Problem]]:
    return [(dtype, _problem(hard_shape(shape), dtype, device, seed=1)) for dtype in dtypes]


def _truth(shape: Shape, training: bool, dtype: str, device: str, hard: Sequence[str] = (), rows: int = 0) -> dict[str, Tensor]:
    problem = _problem(shape, dtype, device, keep=False)
    if rows:
        return last_rows(problem, rows)
    found = whole_truth(problem, training)
    for name, one in _hard_problems(shape, hard, device):
        found |= {f"hard {name}: {key}": x for key, x in whole_truth(one, training).items()}
    return found


def whole_truth(problem: Problem, training: bool) -> dict[str, Tensor]:
    """The definition in float64, a few images at a time: output, and where `training` every gradient."""
    size, found = -(-problem.grad.shape[0] // _PARTS), []
    for first in range(0, problem.grad.shape[0], size):
        found.append(outcome(problem.part(first, first + size).to(torch.float64), _definition, training))
    return {
        name: sum(part[name] for part in found) if name in problem.leaves else torch.cat([part[name] for part in found])
        for name in found[0]
    }


def _definition(shape: Shape, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    reference = BACKENDS["reference"]
    if shape.window:
        return reference.window_attention(inputs[0], terms, shape.grid, shape.window, shape.shift, shape.heads)
    return reference.attention(*inputs, terms, shape.grid)


def last_rows(problem: Problem, rows: int) -> dict[str, Tensor]:
    """The output of the definition in float64 for the last queries alone: nothing of [N, N] has to be made then."""
    problem = problem.to(torch.float64)
    (_, k, v), terms, grid = problem.inputs.values(), problem.terms(), problem.shape.grid
    q, turned_k = rotated(problem.inputs["q"], k, terms)
    logits = q[:, :, -rows:] @ turned_k.mT * k.shape[-1] ** -0.5
    y, x = grid.coordinates(k.device).unbind(-1)
    row, column = (at[-rows:, None] - at + n - 1 for at, n in ((y, grid.h), (x, grid.w)))
    for table in terms.tables:
        logits = logits + table.bias[:, {"h": row, "w": column, "hw": row * (2 * grid.w - 1) + column}[table.axis]]
    return {"output": logits.softmax(-1) @ v}


def _precision() -> Case:
    """What is measured of calls whose memory is known, by which the measurement of memory is measured itself."""
    visits = tuple(Visit(f"{size} bytes", {"size": size}, {"asked": size}) for size in (10**6, 16 * 10**6, 256 * 10**6))
    known = Contender("bytes", "floor", {"size": visits[0].set["size"]}, None)
    return Case("a call of known memory", f"{__name__}:Known", (known,), visits, plan=Repeats(1, 1, 0.0, 1), kind="precision")


class Known:
    """A call that holds so many bytes."""

    def __init__(self, size: int, device: str = "cpu"):
        self.size, self.device = size, device

    def set(self, size: int) -> None:
        """The next calls hold so many."""
        self.size = size

    def __call__(self) -> dict[str, Tensor]:
        return {"output": torch.ones(self.size, dtype=torch.uint8, device=self.device)[:1].clone()}


class Biased(NamedTuple):
    """q, k, v [B, H, N, D] and a bias [1, H, N, N] of one type, for SDPA itself."""

    name: str
    batch: int
    heads: int
    tokens: int
    width: int
    dtype: str


def sdpa_shapes(gpu: bool) -> list[Biased]:
    """ViT-B at 224, 448 and 1024 px in half precision, and Swin-T's first stage with windows folded into heads."""
    if not gpu:
        return [Biased("N=12", 1, 2, 12, 16, "float32")]
    sizes = (
        ("N=197", 64, 12, 197, 64),
        ("N=785", 16, 12, 785, 64),
        ("N=4096", 2, 12, 4096, 64),
        ("64 windows, N=49", 256, 192, 49, 32),
    )
    return [Biased(*one, dtype) for dtype in ("bfloat16", "float16") for one in sizes]


def sdpa_case(shape: Biased, mode: str, plan: Repeats) -> Case:
    truth = dict(shape=shape, kernel=DEFINITION, mode=mode)
    found = [Contender(kernel, "peer", truth | dict(kernel=kernel), truth) for kernel in SDPA_KERNELS]
    name, build = f"SDPA, {shape.name}, {shape.dtype}", f"{__name__}:SdpaCall"
    return Case(name, build, tuple(found), (Visit(mode),), shape.dtype, plan, kind="sdpa", largest=True)


class SdpaCall:
    """scaled_dot_product_attention with an additive bias by one kernel, or its definition in float64.

    Gates see the first image alone, and no gradient of the bias, which is a sum over images: suites of backends check it.
    """

    isolated = True

    def __init__(self, shape: Biased, kernel: str, mode: str, device: str):
        generator = torch.Generator(device).manual_seed(0)
        b, h, n, d = shape.batch, shape.heads, shape.tokens, shape.width
        draws = (torch.randn(s, generator=generator, device=device) for s in (*((b, h, n, d),) * 4, (1, h, n, n)))
        dtype = getattr(torch, shape.dtype)
        *inputs, grad, bias = (x.to(dtype) for x in draws)
        self.kernel, self.device, self.served = kernel, device, False
        if kernel == DEFINITION:
            inputs, grad, bias = [x[:1].double() for x in inputs], grad[:1].double(), bias.double()
        self.grad, self.inputs = grad, dict(zip("qkv", inputs, strict=True)) | {"bias": bias}
        names = {"inference": "", "training without bias gradient": "qkv", "training": (*"qkv", "bias")}[mode]
        self.leaves = {name: self.inputs[name].requires_grad_() for name in names}

    def __call__(self) -> dict[str, Tensor]:
        """RuntimeError, with what torch says of the reason, where the kernel does not serve the shape."""
        with self._around():
            if self.served:
                return self._once()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    found = self._once()
                except RuntimeError as error:
                    reasons = dict.fromkeys(str(w.message).partition(" (Triggered internally")[0] for w in said)
                    raise RuntimeError(" ".join([str(error), *reasons])) from error
            self.served = True
            return found

    def checked(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the first image."""
        return {name: x[:1] for name, x in found.items() if name != "bias"}

    def about(self) -> dict[str, Any]:
        """Operators of attention and kernels of the device, in order; the reason, where the profiler gives none."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            with torch.profiler.profile(activities=activities) as profile:
                self()
                if self.device == "cuda":
                    torch.cuda.synchronize()
            names = [
                event.name
                for event in profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA or event.name.startswith("aten::_scaled_dot_product")
            ]
        except Exception as error:  # a profiler that does not work here is no reason to measure nothing
            names = [f"profiler: {error}"]
        return {"ran": list(dict.fromkeys(names))}

    def _once(self) -> dict[str, Tensor]:
        q, k, v, bias = self.inputs.values()
        with torch.set_grad_enabled(bool(self.leaves)):
            if self.kernel == DEFINITION:
                out = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v
            else:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        gradients = torch.autograd.grad(out, list(self.leaves.values()), self.grad) if self.leaves else ()
        return {"output": out.detach()} | dict(zip(self.leaves, gradients, strict=True))

    def _around(self) -> AbstractContextManager:
        one = SDPA_KERNELS.get(self.kernel)
        return nullcontext() if one is None else sdpa_kernel([one])


def _dtype(gpu: bool) -> str:
    return "bfloat16" if gpu else "float32"
