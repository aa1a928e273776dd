"""`tune`: check and time every backend on the device at hand, and write what is right and fast to a profile.

A backend is timed only if it agrees with the definition (vitrel.ops.reference) in float64 on the same numbers: outputs, and in
training the gradients of all inputs and terms. It is checked twice: on a small grid that is not square and that no window
divides, with a shift; and at the measured sizes, on the last queries of the last image. The error of a tensor is the norm of
the difference over the norm of the truth. The limit is FLOORS (a rounding or two) or twice the error of sdpa if that is more,
and never more than CAPS; the largest difference over the largest element is held to CAPS.

Backends take turns, so that a machine that changes speed affects all alike, and medians are compared. With one thread the time
is that of the processor, else that of the clock; on a GPU it is measured by events.
"""

import contextlib
import gc
import math
import statistics
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.common.progress import progress
from vitrel.common.sizes import Size, format_size
from vitrel.grid import Grid
from vitrel.ops.dispatch import BACKENDS, attention, by_rule, window_attention
from vitrel.ops.profile import (
    Case,
    Profile,
    Traits,
    describe,
    forget,
    identity,
    path_for,
    path_in,
    profile_of,
    read,
    traits,
    traits_of,
)
from vitrel.ops.reference import Call
from vitrel.ops.why import recording
from vitrel.position import create_position
from vitrel.position.terms import Table, Terms

FLOORS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2.4e-3}
CAPS = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
STD = 0.5  # of drawn tables; with values near zero, wrong indices would not show
SLOW = 1.5  # times the fastest: not timed on
_QUERIES = 64  # checked at the measured sizes
_ROUND = 0.01  # seconds of a turn, if a call takes less
_MOST = 50  # calls in a turn
_LONG = 0.5  # seconds of a call whose first time is taken at its word
_ROUNDS = 3, 15  # fewest and most
_CLOSE = 1.08  # times the fastest: measured longer


class Plan(NamedTuple):
    """A call to measure, with drawn terms and tensors of the shapes of `call`. compiled: under torch.compile."""

    call: Call
    compiled: bool = False

    @property
    def traits(self) -> Traits:
        """What a profile knows of it."""
        return traits(self.call, self.compiled)


def tune(
    model: nn.Module | None = None,
    sizes: Sequence[int | Size] = (),
    device: torch.device | str | None = None,
    out: str | Path | None = None,
    *,
    batch_size: int = 1,
    fresh: bool = False,
    seconds: float = math.inf,
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
    plans = standard_plans(device) if model is None and not sizes else plans_of(model, sizes, batch_size, device)
    measure_all(profile, plans, seconds)
    forget()
    return profile


def measure_all(profile: Profile, plans: Sequence[Plan], seconds: float = math.inf) -> None:
    """Measure the plans that the profile does not have, with progress on stderr; each is written at once."""
    missing = {plan.traits: plan for plan in plans if not profile.has(plan.traits)}
    until, gate = time.monotonic() + seconds, Gate()
    died = {traits_of(profile.trying): profile.trying["backend"]} if profile.trying else {}
    with progress(len(missing), "cases") as advance:
        for known, plan in missing.items():
            if time.monotonic() > until:
                break
            advance(0.0, describe(known))
            with _noting(profile, known) as note:
                case = measure(plan, gate, note=note, died=died.get(known, ""))
            profile.add(case)
            advance(1.0, describe(known))


@contextlib.contextmanager
def _noting(profile: Profile, known: Traits) -> Iterator[Callable[[str], None]]:
    """Context with note(backend), which writes into the profile's file what runs now; only the end of the process leaves it."""

    def note(backend: str) -> None:
        profile.trying = {"call": known._asdict(), "backend": backend}
        profile.write()

    try:
        yield note
    finally:
        if profile.trying:
            profile.trying = {}
            profile.write()


def standard_plans(device: torch.device) -> list[Plan]:
    """Return the usual calls of vision transformers: sizes that a CPU measures in minutes, or those of training on a GPU."""
    return _gpu_plans(device) if device.type == "cuda" else _cpu_plans(device)


def plans_of(model: nn.Module | None, sizes: Sequence[int | Size], batch_size: int, device: torch.device) -> list[Plan]:
    """Return the attention calls of a model at image sizes, in inference and training, as plans.

    On a GPU each is measured in the model's dtype and in float16 and bfloat16, as under autocast.
    """
    if model is None:
        raise ValueError("image sizes need a model; without one, usual shapes are measured")
    if not sizes:
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        if not size:
            raise ValueError("the model does not say its image size (pretrained_cfg): give sizes")
        sizes = [tuple(size[1:])]
    pairs = [(size, size) if isinstance(size, int) else size for size in sizes]
    parameter = next(model.parameters())
    channels = getattr(model, "in_chans", None) or (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3,))[0]
    calls: list[Call] = []
    with recording(lambda backend, call, name: calls.append(call)), _evaluating(model):
        for h, w in pairs:
            images = torch.zeros(batch_size, channels, h, w, dtype=parameter.dtype, device=parameter.device)
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    model(images)
    if not calls:
        raise ValueError(
            f"no attention of vitrel was called at {', '.join(map(format_size, pairs))}: the model has other layers"
        )
    dtypes = [torch.float16, torch.bfloat16] if device.type == "cuda" else []
    compiled = (False, True) if device.type == "cuda" else (False,)
    calls = [call._replace(dtype=dtype, device=device) for call in calls for dtype in dict.fromkeys((call.dtype, *dtypes))]
    plans = [Plan(call, how) for how in compiled for call in calls if not call.dropout_p]
    return _served(plans)


def measure(
    plan: Plan,
    gate: "Gate | None" = None,
    seconds: float | None = None,
    note: Callable[[str], None] = lambda backend: None,
    died: str = "",
) -> Case:
    """Check all backends of a plan, time those that are right, and return the case. seconds: about so long, default by device.

    Errors of a backend, also for lack of memory, become text in the case. note: called with each backend before it runs. died:
    a backend with which a process ended, which is not run again.
    """
    call, gate = plan.call, gate or Gate()
    case: Case = {"call": plan.traits._asdict(), "ms": {}, "rounds": 0, "errors": {}, "wrong": {}, "failed": {}, "refused": {}}
    with _as_if_compiling(plan.compiled):
        reasons = {name: _refusal(name, call) for name in BACKENDS}
        case["rule"] = next(name for name, module in BACKENDS.items() if module is by_rule("auto", call))
    case["refused"] = {name: reason for name, reason in reasons.items() if reason}
    runs: dict[str, Callable[[], object]] = {}
    try:
        problem = Problem.draw(call)
        truth = problem.tail_truth()
    except (RuntimeError, MemoryError) as error:  # nothing can be checked here
        case["failed"] = dict.fromkeys((name for name in reasons if not reasons[name]), _one_line(error))
        return case
    first: dict[str, float] = {}
    yardstick: dict[str, float] | None = None
    for name in sorted((name for name in reasons if not reasons[name]), key=_yardstick_first):
        if name == died:
            case["failed"][name] = "the process ended while it ran, maybe for lack of memory"
            continue
        note(name)
        try:
            run = _compiled(problem, name) if plan.compiled else problem.runner(name)
            wrong = "" if plan.compiled else gate.check(call, name)
            if not wrong:
                values: dict[str, Tensor] = {}
                took = _elapsed(lambda: values.update(problem.tail(run)), 1, call.device)  # noqa: B023
                wrong, errors = compare(values, truth, call.dtype, yardstick)
                yardstick = errors if yardstick is None and not wrong else yardstick
                case["errors"][name] = max(errors.values())
            if wrong:
                case["wrong"][name] = wrong
                continue
            warm = took > _LONG and call.device.type == "cpu" and not plan.compiled  # no kernel was compiled in this time
            first[name] = took if warm else _elapsed(run, 1, call.device)
            runs[name] = run
        except (Exception, torch.OutOfMemoryError) as error:  # a backend may raise anything
            case["failed"][name] = _one_line(error)
            _free(call.device)
    times, failed = take_turns(runs, first, call.device, seconds)
    case["failed"] |= failed
    case["rounds"] = max(map(len, times.values()), default=0)
    case["ms"] = {name: round(ms, 5) for name, ms in sorted(_medians(times).items(), key=lambda item: item[1])}
    _free(call.device)
    return case


def report(profile: Profile) -> str:
    """Return a text of all cases: the fastest backend and its gain, the times of the others, and what was wrong or failed."""
    lines = [f"profile of {profile.identity['device']}: {len(profile.cases)} cases"]
    wins: Counter[str] = Counter()
    served: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {"wrong": [], "failed": []}
    for case in profile.cases:
        known, ms = traits_of(case), case["ms"]
        for what, entries in wrong.items():
            entries += [f"{name}: {text} ({describe(known)})" for name, text in case[what].items()]
        if not ms:
            continue
        fastest = min(ms, key=lambda name: ms[name])
        wins[fastest] += 1
        served.update(ms.keys())
        others = ", ".join(f"{name} {ms[name] / ms[fastest]:.2f}" for name in ms if name != fastest)
        gains = [
            f"{ms[name] / ms[fastest]:.2f} times as fast as {name}" for name in ("sdpa",) if name in ms and name != fastest
        ]
        if case["rule"] in ms and case["rule"] not in (fastest, "sdpa"):
            gains.append(
                f"{ms[case['rule']] / ms[fastest]:.2f} times as fast as {case['rule']}, which auto takes without a profile"
            )
        lines.append(f"{describe(known)}: {fastest} {ms[fastest]:.3g} ms{''.join(f', {gain}' for gain in gains)}")
        lines.append(f"    times over it: {others or 'no other was right and serves it'}")
    lines.append("fastest: " + ", ".join(f"{name} in {wins[name]} of {served[name]}" for name in BACKENDS if served[name]))
    for what, entries in wrong.items():
        lines += [f"{what}:", *(f"    {entry}" for entry in entries)] if entries else []
    return "\n".join(lines)


class Checked(NamedTuple):
    """A call of `check`: the backends that "auto" takes, that it takes without a profile, and that is fastest.

    ratio, rule_ratio: the time of the first and of the second over that of the fastest.
    """

    call: str
    auto: str
    by_profile: bool
    rule: str
    best: str
    ratio: float
    rule_ratio: float


def check(device: torch.device | str | None = None, seconds: float = 2.0, plans: Sequence[Plan] = ()) -> Iterator[Checked]:
    """Measure calls that `tune` does not (by default `other_plans`), and yield how "auto" compares with the best backend.

    seconds: of timing per call. Every backend that serves the call takes turns, and "auto" is the one that it chooses.
    """
    device = _checked_device(device, None)
    profile = profile_of(device)
    for plan in plans or other_plans(device):
        case = measure(plan, seconds=seconds)
        names = [] if profile is None else [name for name in profile.relative(plan.traits) if name not in case["refused"]]
        auto, ms = (names or [case["rule"]])[0], case["ms"]
        best = min(ms, key=lambda name: ms[name], default=auto)
        ratio, rule_ratio = (ms[name] / ms[best] if name in ms else math.nan for name in (auto, case["rule"]))
        yield Checked(describe(plan.traits), auto, bool(names), case["rule"], best, ratio, rule_ratio)


class Problem(NamedTuple):
    """Random tensors of a call. inputs: q, k and v, or qkv. leaves: all tensors that get gradients, by name."""

    call: Call
    inputs: tuple[Tensor, ...]
    leaves: dict[str, Tensor]
    grad: Tensor  # of the output

    @classmethod
    def draw(cls, call: Call, seed: int = 0) -> "Problem":
        """Draw inputs of standard deviation 1 and tables of STD, in the shapes of the call. Only biases that require gradients
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
        names = ("qkv",) if call.window is not None else ("q", "k", "v")
        call = call._replace(terms=_drawn(call, normal))
        leaves = dict(zip(names, inputs, strict=True)) | _tensors(call.terms)
        if call.grad:
            leaves = {name: x for name, x in leaves.items() if name in names or x.requires_grad}
            inputs = tuple(x.detach().requires_grad_() for x in inputs)
            leaves |= dict(zip(names, inputs, strict=True))
        return cls(call, inputs, leaves if call.grad else {}, grad)

    def output(self, backend: str) -> Tensor:
        """Compute the call by a backend."""
        call = self.call
        if call.window is None:
            q, k, v = self.inputs
            return attention(q, k, v, call.terms, call.grid, call.mask, 0.0, backend)
        return window_attention(self.inputs[0], call.terms, call.grid, call.window, call.shift, call.heads, 0.0, backend)

    def runner(self, backend: str, function: Callable[[str], Tensor] | None = None) -> Callable[..., dict[str, Tensor]]:
        """Return run(grad=None): the output of a backend and, in training, gradients by name for that of the output."""
        function = self.output if function is None else function

        def run(grad: Tensor | None = None) -> dict[str, Tensor]:
            with torch.set_grad_enabled(self.call.grad):
                out = function(backend)
            if not self.call.grad:
                return {"output": out}
            leaves = list(self.leaves.values())
            given = torch.autograd.grad(out, leaves, self.grad if grad is None else grad, allow_unused=True)
            gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(given, leaves, strict=True)]
            return {"output": out.detach()} | dict(zip(self.leaves, gradients, strict=True))

        return run

    def double(self) -> "Problem":
        """Return the same numbers in float64."""
        terms = _mapped(self.call.terms, lambda x: x.detach().double().requires_grad_(x.requires_grad))
        inputs = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in self.inputs)
        leaves = dict(zip(list(self.leaves)[: len(inputs)], inputs, strict=False)) | _tensors(terms)
        leaves = {name: leaves[name] for name in self.leaves}
        return Problem(self.call._replace(terms=terms, dtype=torch.float64), inputs, leaves, self.grad.double())

    def truth(self) -> dict[str, Tensor]:
        """Return what the definition gives in float64."""
        return self.double().runner("reference")()

    def tail_truth(self) -> dict[str, Tensor]:
        """Return the definition in float64 of the last image: of its last queries, or of all windows.

        Gradients are those of a loss of these outputs alone.
        """
        call, m = self.call, min(_QUERIES, self.call.queries)
        part: tuple[Tensor, ...]
        if call.window is not None:
            part = (self.inputs[0][-1:],)
            grad = self.grad[-1:]
        else:
            part = (self.inputs[0][-1:, :, -m:], self.inputs[1][-1:], self.inputs[2][-1:])
            grad = self.grad[-1:, :, -m:]
            if call.mask is not None:
                mask = call.mask.expand(*(1,) * (4 - call.mask.dim()), *call.mask.shape) if call.mask.dim() < 4 else call.mask
                call = call._replace(mask=mask[-1:, :, -m:] if mask.shape[-2] > 1 else mask[-1:])
            call = call._replace(queries=m)
        part = tuple(x.detach().requires_grad_(x.requires_grad) for x in part)
        leaves = self.leaves | dict(zip(list(self.leaves)[: len(part)], part, strict=False))
        return Problem(call._replace(batch=1), part, leaves if call.grad else {}, grad).truth()

    def tail(self, run: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what a backend computes of `tail_truth`. Gradients of other images must be zero, and NaN if they are not."""
        m = min(_QUERIES, self.call.queries)
        last = (slice(-1, None),) if self.call.window is not None else (slice(-1, None), slice(None), slice(-m, None))
        only = torch.zeros_like(self.grad)
        only[last] = self.grad[last]
        values = run(only)
        parts = {"output": values["output"][last]}
        for name, value in values.items():
            if name in ("q", "k", "v", "qkv"):
                part = last if name in ("q", "qkv") else last[:1]
                others = value.count_nonzero() - value[part].count_nonzero()
                parts[name] = torch.full_like(value[part], math.nan) if others else value[part]
            elif name != "output":
                parts[name] = value
        return parts


class Gate:
    """The check of backends on small, hard problems, which is made once for calls that differ in sizes only."""

    def __init__(self) -> None:
        self._found: dict[tuple[Traits, str], str] = {}
        self._truths: dict[Traits, tuple[Problem, dict[str, Tensor]]] = {}
        self._yardsticks: dict[Traits, dict[str, float]] = {}

    def check(self, call: Call, name: str) -> str:
        """Return what is wrong with a backend for calls like this one, "" if nothing is. The first that is right, which should
        be sdpa or else the reference, is the yardstick of the others.
        """
        hard = hard_call(call)
        key = traits(hard)
        if (key, name) in self._found:
            return self._found[key, name]
        if _refusal(name, hard):
            return ""
        if key not in self._truths:
            problem = Problem.draw(hard, seed=1)
            self._truths[key] = problem, problem.truth()
        problem, truth = self._truths[key]
        text, errors = compare(problem.runner(name)(), truth, hard.dtype, self._yardsticks.get(key))
        if not text:
            self._yardsticks.setdefault(key, errors)
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


def compare(
    values: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype, yardstick: dict[str, float] | None
) -> tuple[str, dict[str, float]]:
    """Return what is wrong with the tensors of a backend ("" if nothing is), and their errors by name.

    yardstick: errors of sdpa, or where it does not serve the call, of the reference in this dtype; None for that one itself,
    which is held to CAPS.
    """
    floor, cap, wrong, errors = FLOORS[dtype], CAPS[dtype], [], {}
    for name, expected in truth.items():
        difference = values[name].double() - expected
        smallest = torch.finfo(torch.float32).tiny
        errors[name] = error = (difference.norm() / expected.norm().clamp(min=smallest)).item()
        largest = (difference.abs().max() / expected.abs().max().clamp(min=smallest)).item()
        limit = cap if yardstick is None else min(cap, max(floor, 2 * yardstick.get(name, cap)))
        what = name if name == "output" else f"gradient of {name}"
        if not error <= limit:
            wrong.append(f"error of {what} {error:.1e} (limit {limit:.1e})")
        elif not largest <= cap:
            wrong.append(f"largest error of {what} {largest:.1e} (limit {cap:.1e})")
    return ", ".join(wrong[:4]), errors


def take_turns(
    runs: dict[str, Callable[[], object]], first: dict[str, float], device: torch.device, seconds: float | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time functions in turns, and return the milliseconds of a call in each round, and {name: error} of those that raised.

    first: seconds of one call of each. One that takes more than SLOW times the fastest is left out after a round, and before it
    if its first call took more than twice that; its time then is that of one call.
    """
    seconds = (0.3 if device.type == "cuda" else 0.6) if seconds is None else seconds
    failed: dict[str, str] = {}
    fastest = min(first.values(), default=0.0)
    active = [name for name in runs if first[name] <= max(2 * SLOW * fastest, _ROUND)]
    times = {name: [] if name in active else [first[name] * 1e3] for name in runs}
    calls = {name: max(1, min(_MOST, int(_ROUND / max(first[name], 1e-9)))) for name in active}
    start = time.monotonic()
    for turn in range(_ROUNDS[1] + 1):  # the first one warms up
        for name in list(active):
            try:
                took = _elapsed(runs[name], calls[name] if turn or calls[name] > 1 else 0, device)
            except (Exception, torch.OutOfMemoryError) as error:
                failed[name] = _one_line(error)
                active.remove(name)
                del times[name]
                _free(device)
                continue
            if turn:
                times[name].append(took * 1e3)
        if not turn:
            continue
        medians = {name: statistics.median(times[name]) for name in active}
        active = [name for name in active if medians[name] <= SLOW * min(medians.values())]
        close = sum(median <= _CLOSE * min(medians.values()) for median in medians.values()) > 1
        least, limit = (_ROUNDS[0] + 2, 2 * seconds) if close else (_ROUNDS[0], seconds)
        if len(active) < 2 or (turn >= least and time.monotonic() - start > limit):
            break
    return times, failed


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds by backend. Within rounds that all had, ratios to one of them are more exact than times."""
    longest = max(map(len, times.values()), default=0)
    full = [name for name in times if len(times[name]) == longest]
    if not full:
        return {}
    base = times[full[0]]
    median = statistics.median(base)
    return {
        name: median * statistics.median(a / b for a, b in zip(values, base, strict=False)) for name, values in times.items()
    }


def _elapsed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of a call, the mean of several, 0 for none."""
    if not calls:
        return 0.0
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


def _compiled(problem: Problem, backend: str) -> Callable[..., dict[str, Tensor]]:
    """Return a problem compiled. The function is a copy of the code, since graphs of the same code count as recompilations."""

    def of_tensors(*inputs: Tensor) -> Tensor:
        return problem._replace(inputs=inputs).output(backend)

    code = of_tensors.__code__.replace(co_name=f"{backend}_attention")
    function = types.FunctionType(code, globals(), code.co_name, None, of_tensors.__closure__)
    graph = torch.compile(function, dynamic=False, fullgraph=True)
    return problem.runner(backend, lambda _: graph(*problem.inputs))


@contextlib.contextmanager
def _as_if_compiling(compiling: bool) -> Iterator[None]:
    """Context in which backends answer as in a graph of torch.compile."""
    before = torch.compiler.is_compiling
    if compiling:
        torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = before


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which no module is in training mode, so that buffers stay as they are."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _refusal(name: str, call: Call) -> str:
    """Why a backend is not measured for a call, "" if it is."""
    if name == "triton" and call.device.type == "cpu":
        return "Triton's interpreter is no device"
    return BACKENDS[name].refuses(call)


def _served(plans: Sequence[Plan]) -> list[Plan]:
    """Return each plan once, without those with nothing to choose: the reference is slower than sdpa, and counts only where
    sdpa refuses.
    """
    kept = {}
    for plan in plans:
        with _as_if_compiling(plan.compiled):
            names = [name for name in BACKENDS if not _refusal(name, plan.call)]
        if "sdpa" in names:
            names.remove("reference")
        if len(names) > 1:
            kept[plan.traits] = plan
    return list(kept.values())


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
        heads = 1 if pair[0].shape[0] == 1 else call.heads
        angle = normal(heads, grid.tokens, call.width // 2)
        grad = call.grad and pair[0].requires_grad
        return tuple(f(angle).to(x.dtype).requires_grad_(grad) for f, x in zip((torch.cos, torch.sin), pair, strict=True))

    tables = []
    for table in terms.tables:
        rows, width = grid.classes(table.axis), call.width
        gated = None
        if table.gated is not None:
            gates, weights = table.gated
            gated = like(gates, gates.shape[1], width), like(weights, rows, gates.shape[1])
        tables.append(
            Table(table.axis, like(table.bias, rows), like(table.query, rows, width), like(table.key, rows, width),
                  like(table.value, rows, width), gated)
        )  # fmt: skip
    temperature = None if terms.temperature is None else terms.temperature.detach().to(call.device)
    return terms._replace(
        tokens=None, rotary=rotations(terms.rotary), key_rotary=rotations(terms.key_rotary), temperature=temperature,
        query_bias=like(terms.query_bias, call.width), tables=tuple(tables),
    )  # fmt: skip


def _tensors(terms: Terms) -> dict[str, Tensor]:
    """All tensors of terms, by name."""
    named: dict[str, Tensor] = {}
    _mapped(terms, lambda x: named.setdefault(f"term {len(named)}", x))
    return named


def _mapped(terms: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The terms with a function applied to every tensor, in a fixed order."""
    if isinstance(terms, Tensor):
        return function(terms)
    if isinstance(terms, tuple):
        parts = [_mapped(part, function) for part in terms]
        return terms._make(parts) if hasattr(terms, "_make") else tuple(parts)
    return terms


def _yardstick_first(name: str) -> tuple[int, int]:
    return ("sdpa", "reference", name).index(name), list(BACKENDS).index(name)


def _call(key: str, grid: Grid, batch: int, heads: int, width: int, device: torch.device, **how: Any) -> Call:
    """The call of an encoding with its usual options."""
    window = how.get("window")
    terms = create_position(key, Grid(*window) if window else grid, heads, width)(Grid(*window) if window else grid)
    entry = "window_attention" if window else "attention"
    call = Call(entry, terms, grid, window, heads, width, grid.tokens, torch.float32, device, False, batch=batch)
    return call._replace(**how)


def _both(call: Call, compiled: bool = False) -> list[Plan]:
    return [Plan(call._replace(grad=grad), compiled) for grad in (False, True)]


def _cpu_plans(device: torch.device) -> list[Plan]:
    plans: list[Plan] = []
    for key, shapes in _CPU_GLOBAL.items():
        for side, batch, prefix in shapes:
            plans += _both(_call(key, Grid(side, side, prefix), batch, 6, 64, device))
    for side, batch, heads, window, shift in _CPU_WINDOWS:
        how = {"window": (window, window), "shift": (shift, shift)}
        plans += _both(_call("table", Grid(side, side), batch, heads, 32, device, **how))
    plans += [Plan(_call(key, Grid(28, 28), 1, 6, 64, device), True) for key in ("decomposed", "shaw")]
    return _served(plans)


def _gpu_plans(device: torch.device) -> list[Plan]:
    calls = []
    for side, batch, heads, window, shift in _GPU_WINDOWS:
        calls.append(_call("table", Grid(side, side), batch, heads, 32, device, window=(window,) * 2, shift=(shift,) * 2))
    for key, shapes in _GPU_GLOBAL.items():
        calls += [_call(key, Grid(side, side, prefix), batch, 12, 64, device) for side, batch, prefix in shapes]
    few = calls[::2]  # compiling kernels takes most of the time
    plans = [plan for call in calls for plan in _both(call._replace(dtype=torch.bfloat16))]
    for dtype, compiled in ((torch.bfloat16, True), (torch.float16, False), (torch.float32, False)):
        plans += [plan for call in few for plan in _both(call._replace(dtype=dtype), compiled)]
    return _served(plans)


# {encoding: (side of the grid, batch, prefix tokens)}
_CPU_GLOBAL = {
    "table": ((14, 8, 1), (14, 1, 0), (20, 2, 0), (28, 1, 1), (28, 4, 0), (36, 1, 0), (48, 1, 0)),
    "factorised": ((14, 8, 1), (20, 2, 0), (28, 1, 0), (28, 4, 0), (36, 1, 0), (48, 1, 0)),
    "decomposed": ((14, 8, 0), (20, 2, 0), (28, 1, 0), (28, 4, 0), (36, 1, 0), (48, 1, 0)),
    "rope_axial": ((14, 8, 1), (28, 1, 0), (36, 1, 0), (48, 1, 0)),
    "alibi": ((14, 8, 1), (28, 1, 0), (36, 1, 0), (48, 1, 0)),
    "shaw": ((14, 8, 1), (28, 1, 0)),
    "deberta": ((14, 8, 1), (28, 1, 0), (36, 1, 0)),
    "none": ((14, 8, 1), (28, 1, 0), (36, 1, 0)),
}
# side of the grid, batch, heads, window, shift
_CPU_WINDOWS = (
    (56, 1, 3, 7, 3), (56, 8, 3, 7, 0), (56, 8, 3, 7, 3), (28, 8, 6, 7, 3), (14, 8, 12, 7, 0), (14, 8, 12, 7, 3),
    (7, 8, 24, 7, 0), (14, 1, 12, 7, 3), (24, 4, 8, 12, 6), (24, 4, 8, 12, 0), (64, 1, 3, 16, 8),
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


def other_plans(device: torch.device) -> list[Plan]:
    """Return 20 calls that `standard_plans` does not have, between and beside its sizes, inference and training by turns."""
    batch = 8 if device.type == "cuda" else 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plans = []
    for i, (key, h, w, images, heads, width, prefix) in enumerate(_OTHER_GLOBAL):
        call = _call(key, Grid(h, w, prefix), images * batch, heads, width, device, dtype=dtype, grad=i % 2 == 1)
        plans.append(Plan(call))
    for i, (h, w, images, heads, window, shift) in enumerate(_OTHER_WINDOWS):
        how = {"window": (window, window), "shift": (shift, shift), "dtype": dtype, "grad": i % 2 == 1}
        plans.append(Plan(_call("table", Grid(h, w), images * batch, heads, 32, device, **how)))
    return plans


_OTHER_GLOBAL = (  # encoding, h, w, batch, heads, head width, prefix
    ("table", 16, 16, 4, 12, 64, 1), ("table", 16, 16, 4, 12, 64, 1), ("table", 24, 24, 1, 12, 64, 1),
    ("table", 24, 32, 2, 6, 64, 0), ("table", 32, 32, 1, 3, 64, 0), ("table", 32, 48, 1, 6, 64, 1),
    ("factorised", 18, 24, 2, 6, 64, 0), ("factorised", 32, 32, 1, 6, 64, 0), ("decomposed", 24, 24, 1, 12, 64, 0),
    ("decomposed", 50, 34, 1, 6, 64, 0), ("rope_axial", 24, 24, 2, 6, 64, 1), ("alibi", 32, 24, 1, 6, 64, 0),
    ("t5", 28, 20, 2, 6, 32, 0), ("cpb", 36, 36, 1, 6, 64, 0),
)  # fmt: skip
_OTHER_WINDOWS = (  # h, w, batch, heads, window, shift
    (56, 42, 2, 3, 7, 3), (28, 35, 4, 6, 7, 3), (60, 50, 1, 4, 7, 3), (14, 21, 2, 12, 7, 0), (32, 32, 2, 4, 8, 4),
    (36, 24, 1, 8, 12, 6),
)  # fmt: skip


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
