"""`tune`: check and time the backends on the device at hand, and write what is right and fast to a profile.

A backend is timed only if it is right (vitrel.tune.check), and at the measured size within twice CAPS of the first that was.

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
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.modules import evaluating
from vitrel.common.progress import progress
from vitrel.common.sizes import Size, format_size
from vitrel.models.create import create_model
from vitrel.ops.capability import TABLE, refusal
from vitrel.ops.dispatch import by_rule, recording
from vitrel.ops.profile import Case, Profile, describe, forget, identity, path_for, path_in, read, traits, traits_of
from vitrel.ops.reference import Call
from vitrel.tune.check import CAPS, Gate, Problem, Values, candidates, compare

SLOW = 1.5  # times the fastest: not timed on
SECONDS = 75.0  # after which `tune` starts no case, by default
_ROUND = 0.01  # seconds of a turn, if a call takes less
_MOST = 50  # calls in a turn
_LONG = 0.1  # seconds of a call whose first time is taken at its word
_ROUNDS = 3, 9  # fewest and most


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
    calls = usual_calls(device) if model is None and not sizes else calls_of(model, sizes, batch_size, device)
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
    pairs = [to_2tuple(size) for size in sizes or [tuple(shape[1:])]]
    calls = [call for pair in pairs for call in _recorded(model, pair, batch_size)]
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


def usual_calls(device: torch.device) -> list[Call]:
    """Return the attention calls of the models of USUAL, in inference and training, small ones first.

    Those of a CPU take less than two minutes.
    """
    gpu = device.type == "cuda"
    calls = []
    for name, options, shapes in USUAL:
        model = create_model(name, device="meta", **options)
        calls += [call for size, *batches in shapes for call in _recorded(model, (size, size), batches[gpu])]
    calls.sort(key=lambda call: call.batch * call.grid.tokens)  # a run that ends early has measured something of each kind
    kinds = [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)] if gpu else []
    return _with_a_choice(
        call._replace(dtype=dtype, compiled=compiled, device=device)
        for dtype, compiled in (*kinds, (torch.float32, False))
        for call in calls
    )


USUAL: tuple[tuple[str, dict[str, Any], tuple[tuple[int, int, int], ...]], ...] = (
    # name, options, (side in pixels, images on a CPU, images on a GPU)
    ("vitrel_swin_t", {"depths": (2, 2, 2, 2)}, ((224, 1, 128), (224, 4, 2))),
    ("vitrel_swin_t", {"depths": (2, 2, 2, 2), "window_size": 12}, ((384, 1, 16),)),
    ("vitrel_vit_s16_table", {"depth": 1}, ((224, 8, 64), (320, 2, 2), (448, 1, 16), (576, 1, 8), (1024, 1, 2))),
    ("vitrel_vit_s16_factorized", {"depth": 1}, ((224, 8, 64), (448, 1, 16), (1024, 1, 2))),
    ("vitrel_vit_s16_decomposed", {"depth": 1}, ((224, 8, 64), (448, 1, 16), (576, 1, 8))),
    ("vitrel_vit_s16_rope_axial", {"depth": 1}, ((224, 8, 64),)),
    ("vitrel_vit_s16_shaw", {"depth": 1}, ((224, 8, 64), (448, 1, 16))),
    ("vitrel_vit_s16_alibi", {"depth": 1}, ((224, 8, 64), (448, 1, 16))),
    ("vitrel_vit_s16_deberta", {"depth": 1}, ((224, 8, 64), (448, 1, 16))),
)


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
