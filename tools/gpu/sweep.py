"""Variants of the kernels in half precision: registers, shared memory and instructions by the compiler, and times on a GPU.

All are compiled first, in parallel processes, which needs no GPU; then one process runs them one after the other. The table
names the fastest of each kernel, as the row that it would be in vitrel.ops.backends.triton_tiles.HALF.
"""

import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from tools.benchmark.kernels import Compiled, compiling, cuobjdump
from tools.benchmark.tables import markdown
from tools.gpu import attention
from tools.gpu.attention import Shape, everywhere, windows
from tools.gpu.parts import CODE, Job, Setting, known, measuring, run, run_again, share
from vitrel.ops.backends import triton_backend, triton_tiles, triton_window
from vitrel.ops.backends.triton_tiles import HALF, Tile, generation

MEASURED = (*CODE, "tools/gpu/sweep.py", "tools/gpu/attention.py")
ARCHITECTURES = (80, 90, 100)  # for which variants are compiled where there is no GPU
_COMPILED = 0.6  # share of the time for compilation, at most, where there is a GPU
_TOLERANCE = 2e-2  # of the largest value, to the result of the row in the code


class Case(NamedTuple):
    """A kernel, the call that is measured, and its variants. launched: name of the kernel's function."""

    kernel: str
    launched: str
    shape: Shape
    training: bool
    variants: tuple[Tile, ...]


def tiles(
    rows: tuple[int, ...], keys: tuple[int, ...], stages: tuple[int, ...], holds: tuple[bool, ...] = (True,)
) -> tuple[Tile, ...]:
    """Return the combinations, with four and eight warps."""
    return tuple(Tile(*sizes) for sizes in itertools.product(rows, keys, (4, 8), stages, holds))


_WINDOWS, _LARGE, _GLOBAL = windows(56, 128, 3, 7), windows(48, 64, 3, 12), everywhere(64, 8)
CASES = (  # the most important first
    Case("whole", "_whole", _WINDOWS, True, tiles((64,), (64,), (1, 2, 3), (True, False))),
    Case("forward", "_forward", _GLOBAL, False, tiles((64, 128), (64, 128), (2, 3))),
    Case("queries", "_queries", _GLOBAL, True, (*tiles((64,), (64,), (1, 2, 3)), *tiles((32,), (32,), (2, 3)))),
    Case("keys", "_keys", _GLOBAL, True, tiles((32, 64), (64, 128), (1, 2, 3))),
    Case("tiles", "_tiles", _LARGE, True, tiles((16, 32, 64), (64,), (1, 2))),
)
SMALL = (Case("whole", "_whole", windows(10, 1, 2, 7), True, (Tile(64, 64, 8, 1), Tile(64, 64, 4, 1, hold=False))),)


@contextmanager
def using(kernel: str, tile: Tile) -> Iterator[None]:
    """Context in which a kernel has this tile on every architecture."""
    plans = triton_window.forward_plan, triton_window.backward_plan
    try:
        with mock.patch.dict(HALF, {kernel: {80: tile}}):
            for plan in plans:
                plan.cache_clear()
            yield
    finally:
        for plan in plans:
            plan.cache_clear()


def loop_instructions(cubin: bytes) -> int:
    """Return the instructions of the longest loop of a kernel that contains no other loop; 0: there is no loop."""
    code = cuobjdump(cubin, "-sass")
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/\s.*\bBRA(?:\.U)?\s.*?(0x[0-9a-f]+)", code)
    loops = [(int(to, 16), int(at, 16)) for at, to in branches if int(to, 16) < int(at, 16)]  # (first, last) address
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return max(((last - first) // 16 + 1 for first, last in inner), default=0)


def compile_variant(case: Case, tile: Tile, arch: int) -> Compiled:
    """Return the kernel of a variant; it is in Triton's cache afterwards."""
    shape = case.shape._replace(batch=min(case.shape.batch, 16))  # of another divisor, the launch would compile it again
    with using(case.kernel, tile), compiling(arch) as found, mock.patch.object(triton_backend, "refuses", return_value=""):
        attention.call(shape, "triton", case.training, torch.device("cpu"), torch.bfloat16)()
    [kernel] = [kernel for kernel in found if kernel.name == case.launched]
    return kernel


def run_part(setting: Setting) -> None:
    """Compile all variants in parallel, then time them if there is a GPU."""
    cores, gpu = os.cpu_count() or 1, setting.device.type == "cuda"
    seconds = (_COMPILED if gpu else 1.0) * (setting.until - time.time())
    run(setting, [Job(f"compile-{i}-{cores}", seconds) for i in range(cores)], at_once=cores)
    if gpu:
        run_again(setting, Job("time"), setting.samples(MEASURED))


def work(setting: Setting, job: str) -> None:
    """Do a job of `run_part`."""
    cases = SMALL if setting.small and setting.device.type == "cuda" else CASES
    jobs = [(case, tile) for case in cases for tile in case.variants]
    if job == "time":
        _time(setting, jobs)
    else:
        for arch in _architectures(setting):
            _compile(setting, share(jobs, job), arch)


def _architectures(setting: Setting) -> tuple[int, ...]:
    return (triton_tiles.architecture(setting.device),) if setting.device.type == "cuda" else ARCHITECTURES


def _key(case: Case, tile: Tile, arch: int) -> dict[str, str]:
    return {"case": case.kernel, "mode": f"sm_{arch}", "contender": str(tuple(tile))}


def _compile(setting: Setting, jobs: list[tuple[Case, Tile]], arch: int) -> None:
    samples = setting.samples(MEASURED)
    for case, tile in jobs:
        key = _key(case, tile, arch)
        if setting.late() or known(samples, "compiled", **key):
            continue
        try:
            kernel = compile_variant(case, tile, arch)
        except Exception as error:  # the compiler's, of many types: a variant that does not compile is a row
            samples.add("refused", **key, text=f"{type(error).__name__}: {error}"[:300])
            continue
        sizes: dict[str, Any] = {name: getattr(kernel, name) for name in ("registers", "stack", "shared")}
        samples.add("compiled", **key, **sizes, loop=loop_instructions(kernel.assembly["cubin"]))


def _time(setting: Setting, jobs: list[tuple[Case, Tile]]) -> None:
    samples, (arch,) = setting.samples(MEASURED), _architectures(setting)
    expected: dict[str, list[torch.Tensor]] = {}
    for case, tile in jobs:
        key = _key(case, tile, arch)
        if setting.late(5) or known(samples, "time", **key) or not samples.has("compiled", **key):
            continue
        with measuring(samples, **key):
            call = attention.call(case.shape, "triton", case.training, setting.device, torch.bfloat16)
            if case.kernel not in expected:
                expected[case.kernel] = _results(call())
            with using(case.kernel, tile):
                found = _results(call())
                error = max(_distance(a, b) for a, b in zip(found, expected[case.kernel], strict=True))
                if not error <= _TOLERANCE:
                    samples.add("wrong", **key, text=f"differs by {error:.1e} of the largest value")
                    continue
                us = attention.kernel_us(call, setting.device)
            samples.add("time", **key, us=us[case.launched], call_us=sum(us.values()))


def _results(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30))


def table(setting: Setting) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether a variant is wrong."""
    rows = setting.samples(MEASURED).current()
    body, best = [], []
    of = {(row["case"], row["mode"], row["contender"], row["kind"]): row for row in rows}
    keys = dict.fromkeys(key[:3] for key in of)
    for case, mode in dict.fromkeys(key[:2] for key in keys):
        times = [(of[key]["us"], key[2]) for key in of if key[:2] == (case, mode) and key[3] == "time"]
        if times:
            us, tile = min(times)
            best.append(f'- HALF["{case}"][{generation(int(mode[3:]))}] = Tile{tile}, {us:.0f} us')
    for key in sorted(keys, key=lambda key: (key[0], key[1], of.get((*key, "time"), {}).get("us", 0.0))):
        compiled, timed = of.get((*key, "compiled"), {}), of.get((*key, "time"), {})
        ending = next((row["text"][:60] for kind in ("refused", "wrong", "failed") if (row := of.get((*key, kind)))), "")
        sizes = [str(compiled.get(name, "")) for name in ("registers", "stack", "shared", "loop")]
        body.append((*key, *sizes, f"{timed['us']:.0f}" if timed else ending, f"{timed['call_us']:.0f}" if timed else ""))
    head = ("kernel", "", "rows, keys, warps, stages, hold", "registers", "spilled", "shared", "loop", "us", "of the call")
    lines = markdown(head, "|---|---|---|---:|---:|---:|---:|---:|---:|", body)
    return [*lines, "", *best], any(row["kind"] in ("wrong", "failed") for row in rows)
