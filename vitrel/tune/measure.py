"""`tune`: time the backends on the device at hand, and write what is right and fast to a profile.

A backend is right if its output and gradients are those of the first one, which the tests hold to the definition. Backends take
turns, so that a machine that changes speed affects all alike, and their medians are compared.
"""

import statistics
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.modules import evaluating
from vitrel.common.processes import checked_device
from vitrel.common.progress import progress
from vitrel.common.sizes import Size, format_size
from vitrel.models.create import create_model
from vitrel.ops.capability import TABLE, refusal
from vitrel.ops.dispatch import attention, by_rule, recording, window_attention
from vitrel.ops.profile import Case, Profile, check_identity, describe, forget, identity, path_for, path_in, read
from vitrel.ops.reference import Call
from vitrel.position.terms import Terms

LIMITS = {torch.float64: 1e-10, torch.float32: 6e-5, torch.float16: 4e-2, torch.bfloat16: 2e-1}  # of |a - b| / |b|
SLOW = 3.0  # times the fastest: one call is its time
ROUNDS = 7
SECONDS = 75.0  # after which `tune` starts no case, by default
_ROUND = 10.0  # milliseconds of a turn, if a call takes less

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

    Cases that the profile has already are not measured again, so a stopped run goes on. `report` lists all.

    Args:
        model: measure the calls of this model, in inference and training; without one, those of small models of usual shapes.
        sizes: image sizes in pixels, a side or (h, w); by default that of the model's pretrained_cfg, or USUAL_SIZES.
        device: "cpu", "cuda", "cuda:1"; by default that of the model, or else a GPU where there is one.
        out: file of the profile, or a folder for it; by default the place where vitrel.ops.profile looks for it.
        batch_size: images in a call of the model.
        fresh: measure all cases again.
        seconds: no case is started after so many seconds.

    Raises:
        ValueError: a device other than a CPU or a GPU, or than the model's; a model that does not say its size, or without
            attention of vitrel; a file that is no profile of this device (unless `fresh`).
    """
    own = next((x.device for x in model.parameters()), None) if model is not None else None
    device = checked_device(str(device or own or "auto"))
    if device.type not in ("cpu", "cuda") or (own is not None and own.type != device.type):
        raise ValueError(f"{device} cannot be measured: choose a CPU or a GPU of CUDA, and move the model there first")
    path = path_for(device)
    path = path_in(out or "", device) if out or path is None else path
    profile = Profile(path, identity(device), {})
    if path.exists() and not fresh:
        try:
            profile = read(path)
            check_identity(profile, device)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; `fresh` replaces it") from error
    models, sizes = (USUAL, sizes or USUAL_SIZES) if model is None else ((model,), sizes)
    calls = [call for each in models for call in calls_of(each, sizes, batch_size, device)]
    missing = {about: call for call in calls if (about := describe(call)) not in profile.cases}
    until = time.monotonic() + seconds
    with progress(len(missing), "cases") as advance:
        for about, call in missing.items():
            if time.monotonic() > until:
                break
            profile.add(call, measure(call))
            advance(1.0, about)
    forget()
    return profile


def calls_of(model: nn.Module | str, sizes: Sequence[int | Size], batch_size: int, device: torch.device) -> list[Call]:
    """Return the attention calls of a model at image sizes, in inference and training, where backends differ.

    On a GPU each is measured in the model's dtype and in float16 and bfloat16, as under autocast, eager and compiled.

    Args:
        model: a model or the name of one; two blocks of each stage are enough.
    """
    if isinstance(model, str):
        model = create_model(model, **({"depths": (2, 2, 2, 2)} if "swin" in model else {"depth": 1}))
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if not sizes and not size:
        raise ValueError("the model does not say its image size (pretrained_cfg): give sizes")
    pairs = [to_2tuple(size) for size in sizes or [tuple(size[1:])]]
    calls = [call for pair in pairs for call in _recorded(model, pair, batch_size) if not call.dropout_p]
    if not calls:
        names = ", ".join(map(format_size, pairs))
        raise ValueError(f"no attention of vitrel was called at {names}: the model has other layers")
    gpu = device.type == "cuda"
    ways = [
        call._replace(device=device, compiled=compiled) for call in calls for compiled in ((False, True) if gpu else (False,))
    ]
    half = (torch.float16, torch.bfloat16) if gpu else ()
    ways = [call._replace(dtype=dtype) for call in ways for dtype in dict.fromkeys((call.dtype, *half))]
    return [*{describe(call): call for call in ways if len(candidates(call)) > 1}.values()]


USUAL = (
    "vitrel_swin_t", "vitrel_vit_s16_table", "vitrel_vit_s16_factorized", "vitrel_vit_s16_decomposed",
    "vitrel_vit_s16_rope_axial", "vitrel_vit_s16_shaw", "vitrel_vit_s16_alibi", "vitrel_vit_s16_deberta",
)  # fmt: skip
USUAL_SIZES = (224, 448)  # side in pixels


def candidates(call: Call) -> list[str]:
    """Return the backends to measure for a call, that of the rule first.

    The reference is slower than sdpa, and is one only where sdpa refuses. On a CPU Triton's interpreter and flex_attention,
    which runs uncompiled there, are for tests.
    """
    names = [name for name in TABLE if not refusal(name, call)]
    out = {"triton", "flex"} if call.device.type == "cpu" else set()
    out |= {"reference"} if "sdpa" in names else set()
    return sorted((name for name in names if name not in out), key=lambda name: name != by_rule(call))


def measure(call: Call) -> Case:
    """Compare all backends of a call, time those that are right, and return the case.

    Errors of a backend, also for lack of memory, become text in the case.
    """
    out: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    compute = problem(call)
    right: Values = {}
    runs = {name: _compiled(compute, name) if call.compiled else _bound(compute, name) for name in candidates(call)}
    for name, run in runs.items():
        try:
            values = run()
            right = right or values
            if text := compare(values, right, LIMITS[call.dtype]):
                out[name] = text
            else:
                times[name] = [_milliseconds(run, 1, call.device)]
        except (Exception, torch.OutOfMemoryError) as error:  # a backend may raise anything
            out[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    fastest = min((took[0] for took in times.values()), default=0.0)
    active = [name for name, took in times.items() if took[0] <= SLOW * fastest]
    for _ in range(ROUNDS if len(active) > 1 else 0):
        for name in active:
            times[name].append(_milliseconds(runs[name], max(1, int(_ROUND / times[name][0])), call.device))
    ms = {name: round(statistics.median(took[1:] or took), 5) for name, took in times.items()}
    return {"ms": dict(sorted(ms.items(), key=lambda item: item[1])), "rule": by_rule(call), "out": out}


def compare(values: Values, right: Values, limit: float) -> str:
    """Return what is wrong with the tensors of a backend, "" if nothing is.

    Args:
        limit: of the error of each tensor.
    """
    texts = []
    for name, x in right.items():
        norm = x.double().norm().clamp(min=torch.finfo(torch.float32).tiny)
        error = ((values[name].double() - x.double()).norm() / norm).item()
        if not error <= limit:
            texts.append(f"error of {name} {error:.1e} (limit {limit:.1e})")
    return ", ".join(texts[:4])


def problem(call: Call) -> Callable[..., Values]:
    """Draw random tensors in the shapes of a call; return compute(backend), its output and in training gradients, by name.

    compute(backend, function) has the output from function(backend, *inputs) instead.
    """
    generator = torch.Generator(call.device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=call.device)

    def drawn(x: Any) -> Any:
        """Tensors of standard deviation 0.5 for those of the terms: with values near zero, wrong indices would not show."""
        if isinstance(x, Tensor):
            return (normal(*x.shape) * 0.5).to(x.dtype).requires_grad_(call.grad and x.requires_grad)
        parts = [drawn(part) if isinstance(part, Tensor | tuple) else part for part in x]
        return x._make(parts) if hasattr(x, "_make") else tuple(parts)

    b, heads, width, grid, window = call.batch, call.heads, call.width, call.grid, call.window
    fixed = None if call.terms.temperature is None else call.terms.temperature.detach().to(call.device)
    terms: Terms = drawn(call.terms._replace(tokens=None, temperature=None))._replace(temperature=fixed)
    if window is None:  # as a linear layer leaves them: [B, N, 3, H, D], seen as [B, H, N, D]
        q, k, v = normal(b, grid.tokens, 3, heads, width).to(call.dtype).permute(2, 0, 3, 1, 4)
        inputs = {"q": q[:, :, -call.queries :], "k": k, "v": v}
    else:
        inputs = {"qkv": normal(b, grid.h, grid.w, 3 * heads * width).to(call.dtype)}
    inputs = {name: x.detach().requires_grad_(call.grad) for name, x in inputs.items()}
    leaves = inputs | {f"term {i}": x for i, x in enumerate(terms.in_attention) if x is not None and x.requires_grad}

    def output(backend: str, *inputs: Tensor) -> Tensor:
        if window is None:
            q, k, v = inputs
            return attention(q, k, v, terms, grid, call.mask, 0.0, backend)
        return window_attention(inputs[0], terms, grid, window, call.shift, heads, 0.0, backend)

    def compute(backend: str, function: Callable[..., Tensor] = output) -> Values:
        with torch.set_grad_enabled(call.grad):
            out = function(backend, *inputs.values())
        if not call.grad:
            return {"output": out}
        given = torch.autograd.grad(out, [*leaves.values()], torch.ones_like(out).cumsum(-1) / width, allow_unused=True)
        pairs = zip(leaves.items(), given, strict=True)
        return {"output": out.detach()} | {f"gradient of {n}": torch.zeros_like(x) if g is None else g for (n, x), g in pairs}

    compute.output = output  # for `_compiled`
    return compute


def report(profile: Profile) -> str:
    """Return a text of all cases: the fastest backend and its gain, the times of the others, and what was wrong or failed."""
    lines = [f"profile of {profile.identity['device']}: {len(profile.cases)} cases"]
    for about, case in profile.cases.items():
        (best, least), *others = [*case["ms"].items()] or [("none", 0.0)]
        gain = case["ms"].get(case["rule"], 0.0) / least if least else 0.0
        faster = f", {gain:.2f} times as fast as {case['rule']}, which auto takes without a profile" if gain > 1 else ""
        lines.append(f"{about}: {best} {least:.3g} ms{faster}")
        lines += [f"    {name} {ms / least:.2f} times as long" for name, ms in others]
        lines += [f"    {name} left out: {text}" for name, text in case["out"].items()]
    return "\n".join(lines)


def _recorded(model: nn.Module, size: Size, batch: int) -> list[Call]:
    """The attention calls of a model for `batch` images of `size` (h, w) pixels, without and with gradients."""
    parameter, shape = next(model.parameters()), (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3,))
    channels = getattr(model, "in_chans", None) or shape[0]
    images = torch.zeros(batch, channels, *size, dtype=parameter.dtype, device=parameter.device)
    calls: list[Call] = []
    with recording(lambda backend, call, name: calls.append(call)), evaluating(model):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                model(images)
    return calls


def _milliseconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Milliseconds of a call, the mean of several; with one thread those of the processor."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max((clock() - begin) / calls * 1e3, 1e-6)


def _bound(compute: Callable[..., Values], backend: str) -> Callable[[], Values]:
    return lambda: compute(backend)


def _compiled(compute: Any, backend: str) -> Callable[[], Values]:
    """Return a problem compiled. The function is a copy of the code, since graphs of the same code count as recompilations."""
    output = compute.output

    def of_tensors(*inputs: Tensor) -> Tensor:
        return output(backend, *inputs)

    code = of_tensors.__code__.replace(co_name=f"{backend}_attention")
    function = types.FunctionType(code, globals(), code.co_name, None, of_tensors.__closure__)
    graph = torch.compile(function, dynamic=False, fullgraph=True)
    return lambda: compute(backend, lambda _, *inputs: graph(*inputs))
