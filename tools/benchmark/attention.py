"""The suites of attention alone: every backend against its peers, SDPA's kernels with a bias, and cost against size.

Cost against size is time and memory of global attention from 196 to 16384 tokens. Memory is the peak of one call minus the
memory held before it, outputs and gradients included; the index [N, N] that some peers cache is added to it. A process that
needs more than `memory_limit` fails, which is a row of the results.
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
SDPA_MODES = ("inference", "training without bias gradient", "training")  # the last one computes a gradient of the bias
_PARTS = 8  # of a batch, computed one by one in the definition, which holds all scores in float64
_WHOLE = 2000  # up to so many tokens all outputs and gradients are checked, else the outputs of the last _ROWS queries
_ROWS = 64
_RATE = 5e10  # assumed operations per second of one core, to choose the number of repeats
_STATM = Path("/proc/self/statm")  # its first number is the size of the address space in pages
_QUICK_PLAN = Repeats(2, 3, 0.0, 1)


def ops_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases of the suite "ops": backends against peers in shapes for the device, then cost against size."""
    shapes = QUICK_SHAPES if quick else SHAPES if gpu else CPU_SHAPES
    return [*_backends(shapes, gpu, quick), *size_cases(gpu, quick)]


def kernel_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases of the suite "kernels": backends against peers in shapes of a GPU, and SDPA's kernels with a bias."""
    plan = _QUICK_PLAN if quick else Repeats()
    sdpa = [sdpa_case(shape, mode, plan) for shape in sdpa_shapes(gpu) for mode in SDPA_MODES]
    first = [case for case in sdpa if case.dtype == _dtype(gpu)]
    return [*first, *_backends(QUICK_SHAPES if quick else SHAPES, gpu, quick), *sdpa[len(first) :]]


def _backends(shapes: Sequence[Shape], gpu: bool, quick: bool) -> list[Case]:
    return [backend_case(shape, mode, gpu, quick) for shape in shapes for mode in MODES]


def backend_case(shape: Shape, mode: str, gpu: bool, quick: bool = False) -> Case:
    """Return the case of all methods for a shape, which are also checked on small, hard problems.

    Hard problems are in float32 and half precision. To save compilations, compiled peers are checked at full size only, and
    kernels with other warps in half precision only.
    """
    training, dtype = mode == "training", _dtype(gpu)
    hard = ("float32", "bfloat16" if gpu else "float16")
    common = dict(shape=shape, training=training, dtype=dtype)
    contenders = []
    for method in methods(shape, gpu):
        hard_dtypes = () if method.compiled or method.kind == "floor" else hard[1:] if method.warps else hard
        truth = None if method.kind == "floor" else common | dict(method=DEFINITION, hard=hard)
        contenders.append(
            Contender(
                method.name, method.kind, common | dict(method=method.name, hard=hard_dtypes), truth, method.kind == "ours"
            )
        )
    row = shape._asdict() | {"grid": list(shape.grid), "tokens": shape.tokens, "flops": shape.flops(training)}
    del row["name"], row["compiled"]
    plan = _QUICK_PLAN if quick else Repeats() if gpu else cpu_repeats(shape, training)
    build = f"{__name__}:attention_call"
    return Case(shape.name, build, tuple(contenders), (Visit(mode),), dtype, plan, row=row, largest=True, patience=300.0)


def cpu_repeats(shape: Shape, training: bool) -> Repeats:
    """Return the repeats on a CPU: 20 calls of warm-up for a shape that takes milliseconds, 2 for one that takes seconds."""
    seconds = shape.flops(training) / _RATE
    return Repeats(warmup=max(2, min(20, int(2 / seconds))), seconds=0.1)


class Sized(NamedTuple):
    """A line of the plot of cost against size: a method by its name, with an encoding."""

    name: str
    encoding: str = "table"

    @property
    def label(self) -> str:
        """Its name in rows and tables."""
        return self.name if self.encoding == "table" else f"{self.name}, {self.encoding}"

    @property
    def keeps(self) -> bool:
        """Whether the method caches the int64 index [N, N]."""
        return self.name.startswith(("softmax", GATHERED))


def size_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases of cost against size, by size, and at last one of compiled calls at changing sizes."""
    if not gpu and not _STATM.exists():  # the memory of a process is read from /proc
        return []
    sizes = QUICK_TOKENS if quick else TOKENS
    cases = [] if gpu else [_precision()]
    for mode in MODES:
        for number, size in enumerate(sizes):
            smaller = tuple(sized_shape("table", other).name for other in sizes[:number])
            cases.append(sized_case(lineup(gpu, quick), size, mode, gpu, smaller))
    return cases if quick else [*cases, turn_case(gpu, sizes[:5])]


def lineup(gpu: bool, quick: bool) -> list[Sized]:
    """Return the methods measured against size, vitrel's first."""
    if quick:
        return [Sized("auto"), Sized(GATHERED)]
    ours = [name for name in ("triton" if gpu else "bias_by_row",) if name in BACKENDS]
    peers = ["sdpa", GATHERED, f"{GATHERED} compiled", "flex" if gpu else "flex compiled", "softmax", FLOOR]
    return [Sized("auto"), *map(Sized, ours), Sized("auto", "factorized"), Sized("auto", "rope"), *map(Sized, peers)]


def sized_shape(encoding: str, size: tuple[int, int]) -> Shape:
    """Return the shape of ViT-S on one image of h x w tokens, without prefix tokens."""
    h, w = size
    return Shape(f"size {h}x{w}", encoding, Grid(h, w), 1, 6, 64)


def sized_case(
    lines: Sequence[Sized], size: tuple[int, int], mode: str, gpu: bool = False, smaller: tuple[str, ...] = ()
) -> Case:
    """Return the case of one size, in `memory_limit`. smaller: a line that failed in one of these cases is skipped."""
    dtype, contenders, kinds = _dtype(gpu), [], {}
    for line in lines:
        shape = sized_shape(line.encoding, size)
        kinds = kinds or {method.name: method.kind for method in methods(shape, gpu)}
        rows = _ROWS if shape.tokens > _WHOLE else 0
        common = dict(shape=shape, training=mode == "training", dtype=dtype, rows=rows)
        args = common | dict(method=line.name, keep=line.keeps, limit=memory_limit())
        truth = None if line.name == FLOOR else common | dict(method=DEFINITION)
        exact = dtype == "float32" and (line.name == "auto" or line.name in BACKENDS)
        row = {"tokens": shape.tokens, "kept_bytes": 8 * shape.tokens**2 if line.keeps else 0}
        env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of processes
        contenders.append(Contender(line.label, kinds[line.name], args, truth, exact, row, env))
    plan = Repeats(1, 1, 1.5, 15)
    build, name = f"{__name__}:attention_call", f"size {size[0]}x{size[1]}"
    return Case(name, build, tuple(contenders), (Visit(mode),), dtype, plan, kind="size", together=False, after=smaller)


def turn_case(gpu: bool, sizes: Sequence[tuple[int, int]]) -> Case:
    """Return the case of compiled calls at one size after another in a process: seconds of the first call, and graphs."""
    shapes = [sized_shape("table", size)._replace(name=TURN) for size in sizes]  # one name, since dynamo recompiles for another
    visits = [
        Visit(f"forward, {h}x{w}", {"shape": shape}, {"size": [h, w]}) for (h, w), shape in zip(sizes, shapes, strict=True)
    ]
    contenders = []
    for line in (Sized("auto"), Sized(GATHERED), Sized("flex")):
        common = dict(shape=shapes[0], training=False, dtype=_dtype(gpu), rows=_ROWS)
        args = common | dict(method=line.name, keep=line.keeps, compiled=True)
        truth = common | dict(method=DEFINITION)
        contenders.append(Contender(f"{line.label} compiled", "ours" if line.name == "auto" else "peer", args, truth))
    build = f"{__name__}:attention_call"
    return Case(TURN, build, tuple(contenders), tuple(visits), _dtype(gpu), kind="turn", together=False)


def memory_limit() -> int:
    """Return how many bytes a process may allocate: 16 GiB, or 0.7 of the free memory if that is less."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return min([16 * 2**30, *(7 * count // 10 for count in free)])


class AttentionCall:
    """A method's call on random numbers of a shape. Gates also check `hard` problems, or only the last `rows` queries."""

    isolated = True

    def __init__(self, function: Callable, training: bool, dtype: str, device: str, hard: Sequence[str], rows: int, keep: bool):
        self.function, self.training, self.dtype, self.device = function, training, dtype, device
        self.hard, self.rows, self.keep = hard, rows, keep

    def set(self, shape: Shape) -> None:
        """Use this shape from the next call on."""
        self.problem = _problem(shape, self.dtype, self.device, keep=self.keep)

    def __call__(self) -> dict[str, Tensor]:
        return outcome(self.problem, self.function, self.training)

    def checked(self, returned: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for the gate; those of hard problems are named "hard DTYPE: ..."."""
        if self.rows:
            return {"output": returned["output"][:, :, -self.rows :]}
        for dtype, problem in _hard_problems(self.problem.shape, self.hard, self.device):
            hard_outcome = outcome(problem, self.function, self.training)
            returned = returned | {f"hard {dtype}: {name}": x for name, x in hard_outcome.items()}
        return returned


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
    """Return the call of a worker: a method by its name, or the definition in float64, on random numbers of a shape.

    hard: dtypes in which small, hard problems are checked too. rows: number of last queries whose output is checked; 0: all.
    keep: whether tensors that peers cache are made. compiled: by torch.compile, for any size. limit: bytes that the process
    may still allocate; 0: no limit.
    """
    if method == DEFINITION:
        return lambda: _truth(shape, training, dtype, device, hard, rows)
    if limit and device == "cpu":
        limit += int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    chosen = next(chosen for chosen in methods(shape, device == "cuda") if chosen.name == method)
    function = global_flex if compiled and method == "flex" else chosen.function
    if chosen.warps:
        force_warps(chosen.warps)
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
    tensors = whole_truth(problem, training)
    for name, hard_problem in _hard_problems(shape, hard, device):
        tensors |= {f"hard {name}: {key}": x for key, x in whole_truth(hard_problem, training).items()}
    return tensors


def whole_truth(problem: Problem, training: bool) -> dict[str, Tensor]:
    """Return the output of the definition in float64, and if `training` every gradient, computed a few images at a time."""
    size, parts = -(-problem.grad.shape[0] // _PARTS), []
    for first in range(0, problem.grad.shape[0], size):
        parts.append(outcome(problem.part(first, first + size).to(torch.float64), _definition, training))
    return {
        name: sum(part[name] for part in parts) if name in problem.leaves else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }


def _definition(shape: Shape, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    reference = BACKENDS["reference"]
    if shape.window:
        return reference.window_attention(inputs[0], terms, shape.grid, shape.window, shape.shift, shape.heads)
    return reference.attention(*inputs, terms, shape.grid)


def last_rows(problem: Problem, rows: int) -> dict[str, Tensor]:
    """Return the output of the definition in float64 for the last queries only, without a tensor of [N, N]."""
    problem = problem.to(torch.float64)
    (_, k, v), terms, grid = problem.inputs.values(), problem.terms(), problem.shape.grid
    q, rotated_k = rotated(problem.inputs["q"], k, terms)
    logits = q[:, :, -rows:] @ rotated_k.mT * k.shape[-1] ** -0.5
    y, x = grid.coordinates(k.device).unbind(-1)
    row, column = (coordinate[-rows:, None] - coordinate + n - 1 for coordinate, n in ((y, grid.h), (x, grid.w)))
    for table in terms.tables:
        logits = logits + table.bias[:, {"h": row, "w": column, "hw": row * (2 * grid.w - 1) + column}[table.axis]]
    return {"output": logits.softmax(-1) @ v}


def _precision() -> Case:
    """Return the case of calls that allocate a known number of bytes, to check the measurement of memory."""
    visits = tuple(Visit(f"{size} bytes", {"size": size}, {"asked": size}) for size in (10**6, 16 * 10**6, 256 * 10**6))
    known = Contender("bytes", "floor", {"size": visits[0].set["size"]}, None)
    return Case("a call of known memory", f"{__name__}:Known", (known,), visits, plan=Repeats(1, 1, 0.0, 1), kind="precision")


class Known:
    """A call that allocates `size` bytes."""

    def __init__(self, size: int, device: str = "cpu"):
        self.size, self.device = size, device

    def set(self, size: int) -> None:
        """Allocate `size` bytes from the next call on."""
        self.size = size

    def __call__(self) -> dict[str, Tensor]:
        return {"output": torch.ones(self.size, dtype=torch.uint8, device=self.device)[:1].clone()}


class Biased(NamedTuple):
    """Shape of q, k, v [B, H, N, D] and of a bias [1, H, N, N] in one dtype, for SDPA itself."""

    name: str
    batch: int
    heads: int
    tokens: int
    width: int
    dtype: str


def sdpa_shapes(gpu: bool) -> list[Biased]:
    """Return the shapes of ViT-B at 224, 448 and 1024 px, and of Swin-T's first stage with windows folded into heads."""
    if not gpu:
        return [Biased("N=12", 1, 2, 12, 16, "float32")]
    sizes = (
        ("N=197", 64, 12, 197, 64),
        ("N=785", 16, 12, 785, 64),
        ("N=4096", 2, 12, 4096, 64),
        ("64 windows, N=49", 256, 192, 49, 32),
    )
    return [Biased(*size, dtype) for dtype in ("bfloat16", "float16") for size in sizes]


def sdpa_case(shape: Biased, mode: str, plan: Repeats) -> Case:
    truth = dict(shape=shape, kernel=DEFINITION, mode=mode)
    contenders = [Contender(kernel, "peer", truth | dict(kernel=kernel), truth) for kernel in SDPA_KERNELS]
    name, build = f"SDPA, {shape.name}, {shape.dtype}", f"{__name__}:SdpaCall"
    return Case(name, build, tuple(contenders), (Visit(mode),), shape.dtype, plan, kind="sdpa", largest=True)


class SdpaCall:
    """scaled_dot_product_attention with an additive bias by one kernel, or its definition in float64.

    Gates check the first image only, and not the gradient of the bias, a sum over images, which the suites of backends check.
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
        """Run once; RuntimeError with torch's reason if the kernel does not support the shape."""
        with self._around():
            if self.served:
                return self._once()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    returned = self._once()
                except RuntimeError as error:
                    reasons = dict.fromkeys(str(w.message).partition(" (Triggered internally")[0] for w in caught)
                    raise RuntimeError(" ".join([str(error), *reasons])) from error
            self.served = True
            return returned

    def checked(self, returned: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the first image's tensors."""
        return {name: x[:1] for name, x in returned.items() if name != "bias"}

    def about(self) -> dict[str, Any]:
        """Return the operators of attention and the GPU's kernels, in order, or the profiler's error."""
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
        except Exception as error:  # the times are still worth measuring
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
        kernel = SDPA_KERNELS.get(self.kernel)
        return nullcontext() if kernel is None else sdpa_kernel([kernel])


def _dtype(gpu: bool) -> str:
    return "bfloat16" if gpu else "float32"
