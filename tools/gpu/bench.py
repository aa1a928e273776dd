"""Models, eager and compiled, in inference and training: vitrel's, timm's and those without position; then attention alone.

Graphs and kernels are compiled first, in parallel processes that share a cache. Then one process takes what is to be compared,
in turns.
Inference is in bfloat16 weights, training in float32 weights with autocast to bfloat16: forward, cross entropy, backward and
fused AdamW, drop path 0. A result further than engine.HALF_LIMIT from timm's with the same weights is a row "wrong".
"""

import gc
import os
import time
from functools import partial
from typing import Any, NamedTuple

import torch

from tools.benchmark.engine import relative_errors, too_large
from tools.benchmark.models import ModelCall, model_call
from tools.benchmark.samples import Samples
from tools.benchmark.tables import Row, by_case, markdown, three, times
from tools.benchmark.worker import Repeats, most_bytes, take_turns
from tools.gpu import attention
from tools.gpu.parts import CODE, Job, Setting, known, measuring, run, run_again, share, sync

MEASURED = (*CODE, "tools/gpu/bench.py", "tools/gpu/attention.py", "tools/benchmark/models.py")
MODES = ("inference", "training")
_BATCH = 128
_REPEATS = Repeats(3, 5, 0.15, 50)  # blocks of calls that take so many seconds
_ENV = {True: {"TORCHDYNAMO_DISABLE": "1"}, False: {}}  # compiling for a CPU takes minutes: the small form does not
_COMPILED = 0.6  # share of the time for compilation, at most


class Contender(NamedTuple):
    """One of the models that are compared. library: "ours", "timm" or "none", ours without position."""

    model: str
    library: str

    def __str__(self) -> str:
        return f"{self.model}: {self.library}"


class Case(NamedTuple):
    """Models to compare, run one way in one mode."""

    name: str
    how: str  # "compiled" or "eager"
    mode: str
    contenders: tuple[Contender, ...]

    def key(self, contender: Contender) -> dict[str, str]:
        """Return the columns that identify a row."""
        return {"case": f"{self.name}, {self.how}", "mode": self.mode, "contender": str(contender)}


def _of(model: str, *libraries: str) -> tuple[Contender, ...]:
    return tuple(Contender(model, library) for library in libraries)


_ALL = ("ours", "timm", "none")
GROUPS = {  # the most important first
    "Swin-T": _of("Swin-T", *_ALL),
    "ViT-B": (*_of("ViT-B table", *_ALL), *_of("ViT-B rope", *_ALL)),
    "SwinV2-T": _of("SwinV2-T", *_ALL),
}


def cases(small: bool) -> list[Case]:
    """Return what is compared, in order."""
    if small:
        eager = [Case("Swin nano", "eager", mode, _of("Swin nano", *_ALL)) for mode in MODES]
        return [Case("Swin nano", "compiled", "inference", _of("Swin nano", "ours", "timm")), *eager]
    return [Case(name, how, mode, GROUPS[name]) for how in ("compiled", "eager") for name in GROUPS for mode in MODES]


def run_part(setting: Setting) -> None:
    """Compile in parallel, then measure."""
    samples = setting.samples(MEASURED)
    start, count = time.time(), max(1, min(16, (os.cpu_count() or 1) - 1))
    jobs = [
        Job(f"compile-{i}-{count}", env={"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "2"}) for i in range(count)
    ]
    if _missing(setting, samples):
        end = start + _COMPILED * (setting.until - start)
        run(setting, [job._replace(seconds=end - start, env=job.env | _ENV[setting.small]) for job in jobs], at_once=count)
    run_again(setting, Job("measure", env=_ENV[setting.small]), setting.samples(MEASURED))


def _missing(setting: Setting, samples: Samples) -> list[tuple[Case, Contender]]:
    """Return the compiled models that have no row."""
    compiled = [(case, one) for case in cases(setting.small) if case.how == "compiled" for one in case.contenders]
    return [(case, one) for case, one in compiled if not known(samples, "time", **case.key(one))]


def work(setting: Setting, name: str) -> None:
    """Compile the share of a job, or measure what has no row."""
    samples = setting.samples(MEASURED)
    if name != "measure":
        for case, contender in share(_missing(setting, samples), name):
            if not setting.late():
                start = time.perf_counter()
                built(case, contender, setting)()
                sync(setting.device)
                print(case.key(contender), f"{time.perf_counter() - start:.0f} s", flush=True)
                torch._dynamo.reset()
        if setting.device.type == "cuda":
            for shape in share([one for one in attention.SHAPES if "triton" in attention.contenders(one)], name):
                attention.call(shape, "triton", True, setting.device, torch.bfloat16)()
        return
    compiled, eager = ([case for case in cases(setting.small) if case.how == how] for how in ("compiled", "eager"))
    for case in compiled:
        compare(case, setting, samples)
    measure_attention(setting, samples)
    for case in eager:
        compare(case, setting, samples)


def built(case: Case, contender: Contender, setting: Setting) -> ModelCall:
    """Return the call of a contender, of which none was made yet."""
    side, batch = (56, 2) if setting.small else (256 if "V2" in contender.model else 224, _BATCH)
    dtype, how = "amp" if case.mode == "training" else "bfloat16", {"side": side, "batch": batch, "mode": case.mode}
    return model_call(contender.library, contender.model, case.how, side, dtype, setting.device.type, **how)


def block(call: ModelCall, device: torch.device, calls: int) -> list[float]:
    """Return milliseconds of a call, the mean of so many, which a GPU gets without waiting for each."""
    sync(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    sync(device)
    return [(time.perf_counter() - start) / calls * 1e3]


def compare(case: Case, setting: Setting, samples: Samples) -> None:
    """Measure the contenders of a case in turns, those again that have rows, so that all have the same rounds."""
    if all(known(samples, "time", **case.key(one)) for one in case.contenders) or setting.late(10):
        return
    turns, rows, truths = {}, {}, {}
    for one in sorted(case.contenders, key=lambda one: one.library != "timm"):  # timm's result is the truth
        with measuring(samples, **case.key(one)):
            start = time.perf_counter()
            call = built(case, one, setting)
            found = {name: x for name, x in call().items() if name in ("output", "loss")}
            sync(setting.device)
            row: dict[str, Any] = {"first_call_s": round(time.perf_counter() - start, 2), "error": None}
            if one.library == "timm":
                truths[one.model] = found
            elif one.library == "ours" and one.model in truths:
                errors = relative_errors(found, truths[one.model])
                row["error"] = max(errors.values())
                if text := too_large(errors, half=True):
                    samples.add("wrong", **case.key(one), text=text)
                    continue
            row |= {"batch": call.batch, "call_bytes": most_bytes(call, setting.device)}
            turns[one], rows[one] = partial(block, call, setting.device), row
        if setting.late():
            return
    times, failed = take_turns(turns, _REPEATS)
    for one, error in failed.items():
        samples.add("failed", **case.key(one), text=str(error))
    for one, measured in times.items():
        samples.add("time", **case.key(one), **rows[one], rounds=measured)
    turns.clear()
    torch._dynamo.reset()
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


def measure_attention(setting: Setting, samples: Samples) -> None:
    """Measure attention alone: a row per shape, mode and contender, and one of the speed of a copy."""
    key = dict(case="copy", mode="", contender="copy")
    if not known(samples, "copy", **key):
        x = torch.empty(2**20 if setting.small else 2**30, dtype=torch.int8, device=setting.device)
        y = torch.empty_like(x)
        found = attention.measure(lambda: y.copy_(x), setting.device)
        samples.add("copy", **key, terabytes_s=2 * x.numel() / found["gpu_us"] / 1e6)
        del x, y
    for shape in attention.SMALL if setting.small else attention.SHAPES:
        dtype = shape.dtype(setting.device)
        for mode in attention.MODES:
            for contender in attention.contenders(shape):
                key = dict(case=shape.name, mode=mode, contender=contender)
                if setting.late(2) or known(samples, "attention", **key):
                    continue
                with measuring(samples, **key):
                    call = attention.call(shape, contender, mode == "training", setting.device, dtype)
                    moved = shape.moved(mode == "training", dtype.itemsize)
                    samples.add("attention", **key, **attention.measure(call, setting.device), moved_bytes=moved)


def table(setting: Setting) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether something is wrong."""
    rows = setting.samples(MEASURED).current()
    bad = [row for row in rows if row["kind"] in ("failed", "wrong")]
    lines = [f"- {row['case']}, {row['mode']}, {row['contender']}: {row['kind']}, {row['text'][:200]}" for row in bad]
    return [*times(rows), "", *attention_table(rows), "", *lines], bool(bad)


def _speed(rows: list[Row]) -> float | None:
    """Return the terabytes/s of a copy, if it was measured."""
    return next((row["terabytes_s"] for row in reversed(rows) if row["kind"] == "copy"), None)


def attention_table(rows: list[Row]) -> list[str]:
    """Return the table of attention alone: microseconds of kernels and of the host, megabytes."""
    speed = _speed(rows)
    names = ("triton", "augmented_qk", "sdpa", attention.FLOOR)
    body = []
    for (case, mode), of in by_case(rows, "attention").items():
        cells = [
            f"{of[name]['gpu_us']:,.0f}; {of[name]['host_us']:,.0f} ({of[name]['mb']:,.0f})" if name in of else ""
            for name in names
        ]
        moved = next(iter(of.values()))["moved_bytes"] / speed / 1e6 if speed else 0.0
        body.append((case, mode, *cells, three(moved)))
    head = ("µs of kernels; of the host (MB)", "", *names, "its bytes, µs")
    return markdown(head, "|---|---|" + "---|" * len(names) + "---:|", body)
