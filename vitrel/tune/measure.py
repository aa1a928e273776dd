"""`tune`: check and time the backends on the device at hand, and write what is right and fast to a profile.

A backend is timed only if it agrees with the definition (vitrel.ops.reference) in float64: outputs, and in training the
gradients of all inputs and terms, on a small grid that is not square and that no window divides, with a shift. The error of a
tensor is the norm of the difference over the norm of the truth. Its limit is FLOORS (a rounding or two) or twice the error of
sdpa if that is more, and never more than CAPS; the largest difference over the largest element is held to CAPS. At the measured
size every backend is held to the first one that was right, within twice CAPS.

Backends take turns, so that a machine that changes speed affects all alike, and medians are compared. With one thread the time
is that of the processor, else that of the clock; on a GPU it is measured by events.
"""

import gc
import statistics
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.common.modules import evaluating
from vitrel.common.progress import progress
from vitrel.common.sizes import Size, format_size
from vitrel.grid import Grid
from vitrel.ops.capability import TABLE, refusal
from vitrel.ops.dispatch import attention, by_rule, recording, window_attention
from vitrel.ops.profile import Case, Profile, Traits, describe, forget, identity, path_for, path_in, read, traits, traits_of
from vitrel.ops.reference import Call
from vitrel.position import create_position
from vitrel.position.terms import Table, Terms

FLOORS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2.4e-3}
CAPS = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
STD = 0.5  # of drawn tables; with values near zero, wrong indices would not show
SLOW = 1.5  # times the fastest: not timed on
SECONDS = 75.0  # after which `tune` starts no case, by default
_ROUND = 0.01  # seconds of a turn, if a call takes less
_MOST = 50  # calls in a turn
_LONG = 0.1  # seconds of a call whose first time is taken at its word
_ROUNDS = 3, 9  # fewest and most

Values = dict[str, Tensor]


def tune(
    model: nn.Module | None = None,
    sizes: Sequence[int | Size] = (),
    device: torch.device | str | None = None,
    out: str | Path | None = None,
    *,
    batch_size: int = 1,
    fresh: bool = False,
    seconds: float = SECONDS,
) -> Profile:
    """Measure the backends on this device, and write the profile that backend "auto" follows from then on.

    Cases that the profile has already are not measured again, so a stopped run goes on. A backend that is wrong or raises is
    part of the profile, with the reason; `report` lists all.

    Args:
        model: measure the calls of this model, in inference and training; without one, a list of usual shapes.
        sizes: image sizes in pixels for the model, a side or (h, w); by default that of its pretrained_cfg.
        device: "cpu", "cuda", "cuda:1"; by default that of the model, or else a GPU where there is one.
        out: file of the profile, or a folder for it; by default the place where vitrel.ops.profile looks for it.
        batch_size: images in a call of the model.
        fresh: measure all cases again.
        seconds: no case is started after so many seconds.

    Raises:
        ValueError: a device other than a CPU or a GPU; sizes without a model, or a model without any; a model without
            attention of vitrel; a file that is no profile of this device (unless `fresh`).
    """
    device = _checked_device(device, model)
    path = path_in(out or "", device) if out or path_for(device) is None else path_for(device)
    profile = Profile(path, identity(device)) if fresh or not path.exists() else _read(path, device)
    calls = standard_calls(device) if model is None and not sizes else calls_of(model, sizes, batch_size, device)
    measure_all(profile, calls, seconds)
    forget()
    return profile


def measure_all(profile: Profile, calls: Sequence[Call], seconds: float = SECONDS) -> None:
    """Measure the calls that the profile does not have, with progress on stderr; each is written at once."""
    missing = {known: call for call in calls if not profile.has(known := traits(call))}
    until, gate = time.monotonic() + seconds, Gate()
    with progress(len(missing), "cases") as advance:
        for known, call in missing.items():
            if time.monotonic() > until:
                break
            advance(0.0, describe(known))
            profile.add(measure(call, gate))
            advance(1.0, describe(known))


def calls_of(model: nn.Module | None, sizes: Sequence[int | Size], batch_size: int, device: torch.device) -> list[Call]:
    """Return the attention calls of a model at image sizes, in inference and training.

    On a GPU each is measured in the model's dtype and in float16 and bfloat16, as under autocast, eager and compiled.
    """
    if model is None:
        raise ValueError("image sizes need a model; without one, usual shapes are measured")
    shape = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if not sizes and not shape:
        raise ValueError("the model does not say its image size (pretrained_cfg): give sizes")
    pairs = [(size, size) if isinstance(size, int) else size for size in sizes or [tuple(shape[1:])]]
    parameter, channels = next(model.parameters()), getattr(model, "in_chans", None) or (shape or (3,))[0]
    calls: list[Call] = []
    with recording(lambda backend, call, name: calls.append(call)), evaluating(model):
        for h, w in pairs:
            images = torch.zeros(batch_size, channels, h, w, dtype=parameter.dtype, device=parameter.device)
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    model(images)
    if not calls:
        raise ValueError(
            f"no attention of vitrel was called at {', '.join(map(format_size, pairs))}: the model has other layers"
        )
    gpu = device.type == "cuda"
    dtypes = (torch.float16, torch.bfloat16) if gpu else ()
    return _with_a_choice(
        call._replace(dtype=dtype, device=device, compiled=compiled)
        for compiled in ((False, True) if gpu else (False,))
        for call in calls
        for dtype in dict.fromkeys((call.dtype, *dtypes))
        if not call.dropout_p
    )


def measure(call: Call, gate: "Gate | None" = None, seconds: float | None = None) -> Case:
    """Check all backends of a call, time those that are right, and return the case. seconds: about so long, default by device.

    Errors of a backend, also for lack of memory, become text in the case.
    """
    gate = gate or Gate()
    case: Case = {"call": traits(call)._asdict(), "ms": {}, "rounds": 0, "wrong": {}, "failed": {}, "refused": {}}
    case["rule"] = by_rule(call)
    names = candidates(call)
    case["refused"] = {name: reason for name in TABLE if (reason := refusal(name, call))}
    runs: dict[str, Callable[[], object]] = {}
    first: dict[str, float] = {}
    right: Values = {}
    problem = Problem.draw(call)
    for name in names:
        try:
            if wrong := gate.check(call, name):
                case["wrong"][name] = wrong
                continue
            run = _compiled(problem, name) if call.compiled else problem.runner(name)
            values: Values = {}
            took = _elapsed(lambda: values.update(run()), 1, call.device)  # noqa: B023
            right = right or values
            if wrong := compare(values, right, 2 * CAPS[call.dtype]):
                case["wrong"][name] = wrong
                continue
            warm = took > _LONG and call.device.type == "cpu" and not call.compiled  # no kernel was compiled in this time
            first[name], runs[name] = took if warm else _elapsed(run, 1, call.device), run
        except (Exception, torch.OutOfMemoryError) as error:  # a backend may raise anything
            case["failed"][name] = _one_line(error)
            _free(call.device)
    right.clear()
    times, failed = take_turns(runs, first, call.device, seconds)
    case["failed"] |= failed
    case["rounds"] = max(map(len, times.values()), default=0)
    case["ms"] = {name: round(ms, 5) for name, ms in sorted(_medians(times).items(), key=lambda item: item[1])}
    _free(call.device)
    return case


def candidates(call: Call) -> list[str]:
    """Return the backends to measure for a call, sdpa first.

    The reference is slower than sdpa, and is one only where sdpa refuses. On a CPU Triton's interpreter and flex_attention,
    which runs uncompiled there, are for tests.
    """
    out = {"triton", "flex"} if call.device.type == "cpu" else set()
    names = [name for name in TABLE if name not in out and not refusal(name, call)]
    if "sdpa" in names:
        return ["sdpa", *(name for name in names if name not in ("sdpa", "reference"))]
    return sorted(names, key=lambda name: name != "reference")


def report(profile: Profile) -> str:
    """Return a text of all cases: the fastest backend and its gain, the times of the others, and what was wrong or failed."""
    lines = [f"profile of {profile.identity['device']}: {len(profile.cases)} cases"]
    wins: Counter[str] = Counter()
    served: Counter[str] = Counter()
    for case in profile.cases:
        if ms := case["ms"]:
            fastest = min(ms, key=lambda name: ms[name])
            wins[fastest] += 1
            served.update(ms.keys())
            rule = case["rule"]
            gain = ""
            if ms.get(rule, 0) > ms[fastest]:
                gain = f", {ms[rule] / ms[fastest]:.2f} times as fast as {rule}, which auto takes without a profile"
            others = ", ".join(f"{name} {ms[name] / ms[fastest]:.2f}" for name in ms if name != fastest)
            lines.append(f"{describe(traits_of(case))}: {fastest} {ms[fastest]:.3g} ms{gain}")
            lines.append(f"    times over it: {others or 'no other was right and serves it'}")
    lines.append("fastest: " + ", ".join(f"{name} in {wins[name]} of {served[name]}" for name in TABLE if served[name]))
    for what in ("wrong", "failed"):
        found = [f"    {name}: {text} ({describe(traits_of(c))})" for c in profile.cases for name, text in c[what].items()]
        lines += [f"{what}:", *found] if found else []
    return "\n".join(lines)


class Problem(NamedTuple):
    """Random tensors of a call. inputs: q, k and v, or qkv. leaves: all tensors that get gradients, by name."""

    call: Call
    inputs: tuple[Tensor, ...]
    leaves: Values
    grad: Tensor  # of the output

    @classmethod
    def draw(cls, call: Call, seed: int = 0) -> "Problem":
        """Draw inputs of standard deviation 1 and tables of STD, in the shapes of the call. Only terms that require gradients
        in the call do so here.
        """
        generator = torch.Generator(call.device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=call.device)

        b, heads, width, grid = call.batch, call.heads, call.width, call.grid
        inputs: tuple[Tensor, ...]
        if call.window is not None:
            inputs = (normal(b, grid.h, grid.w, 3 * heads * width).to(call.dtype),)
            grad = normal(b, grid.h, grid.w, heads * width).to(call.dtype)
        else:  # as a linear layer leaves them: [B, N, 3, H, D], seen as [B, H, N, D]
            q, k, v = normal(b, grid.tokens, 3, heads, width).to(call.dtype).permute(2, 0, 3, 1, 4)
            inputs = (q[:, :, -call.queries :], k, v)
            grad = normal(b, call.queries, heads, width).to(call.dtype).transpose(1, 2)
        call = call._replace(terms=_drawn(call, normal))
        return cls(call, inputs, {}, grad)._with_leaves()

    def double(self) -> "Problem":
        """Return the same numbers in float64."""
        terms = _mapped(self.call.terms, lambda x: x.detach().double().requires_grad_(x.requires_grad))
        inputs = tuple(x.detach().double() for x in self.inputs)
        call = self.call._replace(terms=terms, dtype=torch.float64)
        return Problem(call, inputs, {}, self.grad.double())._with_leaves()

    def output(self, backend: str) -> Tensor:
        """Compute the call by a backend."""
        call = self.call
        if call.window is None:
            q, k, v = self.inputs
            return attention(q, k, v, call.terms, call.grid, call.mask, 0.0, backend)
        return window_attention(self.inputs[0], call.terms, call.grid, call.window, call.shift, call.heads, 0.0, backend)

    def runner(self, backend: str, function: Callable[[str], Tensor] | None = None) -> Callable[[], Values]:
        """Return run(): the output of a backend and, in training, gradients by name."""
        function = self.output if function is None else function

        def run() -> Values:
            with torch.set_grad_enabled(self.call.grad):
                out = function(backend)
            if not self.call.grad:
                return {"output": out}
            given = torch.autograd.grad(out, list(self.leaves.values()), self.grad, allow_unused=True)
            pairs = zip(self.leaves.items(), given, strict=True)
            return {"output": out.detach()} | {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}

        return run

    def _with_leaves(self) -> "Problem":
        if not self.call.grad:
            return self
        inputs = tuple(x.requires_grad_() for x in (y.detach() for y in self.inputs))
        named: Values = {}
        _mapped(self.call.terms, lambda x: named.setdefault(f"term {len(named)}", x))
        names = ("qkv",) if self.call.window is not None else ("q", "k", "v")
        learned = {name: x for name, x in named.items() if x.requires_grad}
        return self._replace(inputs=inputs, leaves=dict(zip(names, inputs, strict=True)) | learned)


class Gate:
    """The check of backends on small, hard problems, which is made once for calls that differ in sizes only."""

    def __init__(self) -> None:
        self._found: dict[tuple[Traits, str], str] = {}
        self._problems: dict[Traits, tuple[Problem, Values, float]] = {}

    def check(self, call: Call, name: str) -> str:
        """Return what is wrong with a backend for calls like this one, "" if nothing is.

        Twice the error of sdpa, or where it does not serve the call, of the reference in this dtype, is allowed.
        """
        hard = hard_call(call)._replace(compiled=False)
        key = traits(hard)
        if (key, name) in self._found:
            return self._found[key, name]
        if refusal(name, hard):
            return ""
        if key not in self._problems:
            problem = Problem.draw(hard, seed=1)
            truth = problem.double().runner("reference")()
            yardstick = max(errors(problem.runner(candidates(hard)[0])(), truth).values())
            self._problems[key] = problem, truth, yardstick
        problem, truth, yardstick = self._problems[key]
        limit = min(CAPS[hard.dtype], max(FLOORS[hard.dtype], 2 * yardstick))
        text = compare(problem.runner(name)(), truth, limit, CAPS[hard.dtype])
        self._found[key, name] = f"on a grid of {hard.grid.h}x{hard.grid.w}: {text}" if text else ""
        return self._found[key, name]


def hard_call(call: Call) -> Call:
    """Return a small call for the same kernels: two images, not square, divided by no window, shifted."""
    heads = min(call.heads, 3)
    if call.window is None:
        grid = Grid(9, 21, call.grid.prefix)
        queries = grid.tokens if call.queries == call.grid.tokens else min(call.queries, grid.tokens - 1)
        return call._replace(grid=grid, batch=2, heads=heads, queries=queries, mask=None)
    h, w = call.window
    grid = Grid(2 * h + 3, w + 2)
    shift = min(h - 1, max(1, h // 2 - 1)), min(w - 1, max(1, w // 2))
    return call._replace(grid=grid, batch=2, heads=heads, queries=grid.tokens, shift=shift)


def errors(values: Values, truth: Values) -> dict[str, float]:
    """Return the error of each tensor: the norm of the difference over the norm of the truth."""
    smallest = torch.finfo(torch.float32).tiny
    return {
        name: ((values[name].double() - x.double()).norm() / x.double().norm().clamp(min=smallest)).item()
        for name, x in truth.items()
    }


def compare(values: Values, truth: Values, limit: float, cap: float | None = None) -> str:
    """Return what is wrong with the tensors of a backend, "" if nothing is.

    limit: of the error of each tensor. cap: of the largest difference over the largest element; None: `limit`.
    """
    wrong = []
    for name, error in errors(values, truth).items():
        difference, largest = (values[name].double() - truth[name].double()).abs().max(), truth[name].abs().max().double()
        what = name if name == "output" else f"gradient of {name}"
        if not error <= limit:
            wrong.append(f"error of {what} {error:.1e} (limit {limit:.1e})")
        elif not difference <= (limit if cap is None else cap) * largest.clamp(min=torch.finfo(torch.float32).tiny):
            wrong.append(f"largest error of {what} {difference / largest:.1e}")
    return ", ".join(wrong[:4])


def take_turns(
    runs: dict[str, Callable[[], object]], first: dict[str, float], device: torch.device, seconds: float | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time functions in turns, and return the milliseconds of a call in each round, and {name: error} of those that raised.

    first: seconds of one call of each. One that takes more than SLOW times the fastest is left out after a round, and before it
    if its first call took more than twice that; its time then is that of one call.
    """
    seconds = (0.3 if device.type == "cuda" else 0.2) if seconds is None else seconds
    failed: dict[str, str] = {}
    fastest = min(first.values(), default=0.0)
    active = [name for name in runs if first[name] <= max(2 * SLOW * fastest, _ROUND)]
    times = {name: [] if name in active else [first[name] * 1e3] for name in runs}
    calls = {name: max(1, min(_MOST, int(_ROUND / max(first[name], 1e-9)))) for name in active}
    start = time.monotonic()
    for turn in range(1, _ROUNDS[1] + 1):
        for name in list(active):
            try:
                times[name].append(_elapsed(runs[name], calls[name], device) * 1e3)
            except (Exception, torch.OutOfMemoryError) as error:
                failed[name] = _one_line(error)
                active.remove(name)
                del times[name]
                _free(device)
        medians = {name: statistics.median(times[name]) for name in active}
        active = [name for name in active if medians[name] <= SLOW * min(medians.values())]
        if len(active) < 2 or (turn >= _ROUNDS[0] and time.monotonic() - start > seconds):
            break
    return times, failed


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds by backend. Within rounds that all had, ratios to one of them are more exact than times."""
    base = max(times.values(), key=len, default=[])
    median = statistics.median(base) if base else 0.0
    return {
        name: median * statistics.median(a / b for a, b in zip(values, base, strict=False)) for name, values in times.items()
    }


def _elapsed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of a call, the mean of several."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3 / calls
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for _ in range(calls):
        run()
    return (clock() - begin) / calls


def _compiled(problem: Problem, backend: str) -> Callable[[], Values]:
    """Return a problem compiled. The function is a copy of the code, since graphs of the same code count as recompilations."""

    def of_tensors(*inputs: Tensor) -> Tensor:
        return problem._replace(inputs=inputs).output(backend)

    code = of_tensors.__code__.replace(co_name=f"{backend}_attention")
    function = types.FunctionType(code, globals(), code.co_name, None, of_tensors.__closure__)
    graph = torch.compile(function, dynamic=False, fullgraph=True)
    return problem.runner(backend, lambda _: graph(*problem.inputs))


def _with_a_choice(calls: Any) -> list[Call]:
    """Return each call once, without those that one backend alone serves."""
    return list({traits(call): call for call in calls if len(candidates(call)) > 1}.values())


def _drawn(call: Call, normal: Callable[..., Tensor]) -> Terms:
    """Random terms of the structure of a call's, on its grid, with its number of heads."""
    terms, grid = call.terms, call.grid if call.window is None else Grid(*call.window)

    def like(x: Tensor | None, *size: int, std: float = STD) -> Tensor | None:
        if x is None:
            return None
        heads = 1 if x.dim() == 3 and x.shape[0] == 1 else call.heads
        return (normal(heads, *size) * std).to(x.dtype).requires_grad_(call.grad and x.requires_grad)

    def rotations(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...] | None:
        if pair is None:
            return None
        angle = normal(1 if pair[0].shape[0] == 1 else call.heads, grid.tokens, call.width // 2)
        grad = call.grad and pair[0].requires_grad
        return tuple(f(angle).to(x.dtype).requires_grad_(grad) for f, x in zip((torch.cos, torch.sin), pair, strict=True))

    tables = []
    for table in terms.tables:
        rows, width = grid.classes(table.axis), call.width
        gated: Any = None
        if table.gated is not None:
            gates, weights = table.gated
            gated = like(gates, gates.shape[1], width), like(weights, rows, gates.shape[1])
        query, key, value = (like(part, rows, width) for part in (table.query, table.key, table.value))
        tables.append(Table(table.axis, like(table.bias, rows), query, key, value, gated))
    temperature = None if terms.temperature is None else terms.temperature.detach().to(call.device)
    return terms._replace(
        tokens=None, rotary=rotations(terms.rotary), key_rotary=rotations(terms.key_rotary), temperature=temperature,
        query_bias=like(terms.query_bias, call.width), tables=tuple(tables),
    )  # fmt: skip


def _mapped(terms: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The terms with a function applied to every tensor, in a fixed order."""
    if isinstance(terms, Tensor):
        return function(terms)
    if isinstance(terms, tuple):
        parts = [_mapped(part, function) for part in terms]
        return terms._make(parts) if hasattr(terms, "_make") else tuple(parts)
    return terms


def standard_calls(device: torch.device) -> list[Call]:
    """Return the usual calls of vision transformers: those of a CPU take less than two minutes."""
    gpu = device.type == "cuda"
    windows, grids = (_GPU_WINDOWS, _GPU_GLOBAL) if gpu else (_CPU_WINDOWS, _CPU_GLOBAL)
    calls = []
    for side, batch, heads, width, shift in windows:
        window = Grid(width, width)
        call = Call("window_attention", create_position("table", window, heads, 32)(window), Grid(side, side), (width, width),
                    heads, 32, side * side, torch.float32, device, False, batch=batch, shift=(shift, shift))  # fmt: skip
        calls.append(call)
    for key, shapes in grids.items():
        for side, batch, prefix in shapes:
            grid, heads = Grid(side, side, prefix), 12 if gpu else 6
            terms = create_position(key, grid, heads, 64)(grid)
            calls.append(
                Call("attention", terms, grid, None, heads, 64, grid.tokens, torch.float32, device, False, batch=batch)
            )
    if not gpu:
        calls.sort(key=lambda call: call.batch * call.grid.tokens)  # a run that ends early has measured something of each kind
    kinds = [(torch.bfloat16, False, 1), (torch.bfloat16, True, 2), (torch.float16, False, 2), (torch.float32, False, 2)]
    return _with_a_choice(
        call._replace(dtype=dtype, compiled=compiled, grad=grad)
        for dtype, compiled, step in (kinds if gpu else [(torch.float32, False, 1)])
        for call in calls[::step]  # compiling kernels takes most of the time
        for grad in (False, True)
    )


_CPU_GLOBAL = {  # {encoding: (side of the grid, batch, prefix tokens)}
    "table": ((14, 8, 1), (20, 2, 0), (28, 1, 1), (28, 2, 0), (36, 1, 0)),
    "decomposed": ((14, 8, 0), (28, 1, 0), (36, 1, 0)),
    "factorised": ((14, 8, 1), (28, 1, 0), (36, 1, 0)),
    "shaw": ((14, 8, 1), (28, 1, 0)),
    "alibi": ((14, 8, 1), (28, 1, 0)),
    "deberta": ((14, 8, 1), (28, 1, 0)),
}
_CPU_WINDOWS = (  # side of the grid, batch, heads, window, shift
    (56, 1, 3, 7, 3), (56, 1, 3, 7, 0), (56, 4, 3, 7, 3), (28, 8, 6, 7, 3), (14, 8, 12, 7, 0), (14, 8, 12, 7, 3),
    (24, 2, 8, 12, 6), (64, 1, 3, 16, 8),
)  # fmt: skip
_GPU_WINDOWS = (
    (56, 128, 3, 7, 3), (28, 128, 6, 7, 3), (14, 128, 12, 7, 3), (14, 128, 12, 7, 0), (7, 128, 24, 7, 0), (96, 16, 4, 12, 6),
    (24, 32, 16, 12, 6), (64, 32, 3, 8, 4), (64, 32, 3, 16, 8), (56, 2, 3, 7, 3),
)  # fmt: skip
_GPU_GLOBAL = {
    "table": ((14, 64, 1), (14, 2, 1), (28, 16, 1), (64, 2, 0)),
    "factorised": ((14, 64, 1), (28, 16, 1), (64, 2, 0)),
    "decomposed": ((14, 64, 0), (28, 16, 0), (64, 2, 0)),
    "rope_axial": ((14, 64, 1), (64, 2, 0)),
}


def _checked_device(device: torch.device | str | None, model: nn.Module | None) -> torch.device:
    own = None if model is None else next((x.device for x in model.parameters()), None)
    chosen = torch.device(device) if device is not None else own or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"PyTorch sees no GPU here, so {chosen} cannot be measured; `vitrel doctor` prints its version")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"only a CPU or a GPU of CUDA is measured, not {chosen}")
    if own is not None and own.type != chosen.type:
        raise ValueError(f"the model is on {own}, but {chosen} is to be measured: move the model there first")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _read(path: Path, device: torch.device) -> Profile:
    try:
        return read(path, device)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; `fresh` replaces it") from error


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
