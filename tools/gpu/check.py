"""Whether everything is right on a GPU: the tests that ask for one, and every encoding against float64 on a CPU.

As a plugin of pytest, this file writes a row for every test when it ends, and leaves out those that have passed before.
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch

import vitrel  # noqa: F401  # registers the models
from tools.benchmark.samples import ROOT, Samples
from tools.benchmark.tables import Row, markdown
from tools.gpu import SCRATCH
from tools.gpu.parts import CODE, Job, Setting, known, measuring, run, share
from vitrel.common.extras import EXTRAS, absent
from vitrel.ops import BACKENDS
from vitrel.ops.why import use_backend

TESTED = (*CODE, "tests/ops/*.py", "tests/ops/backends/*.py")  # code whose change makes rows obsolete
LIMITS = {  # of the norm of the error over the norm: of the output, and of the gradient of every parameter
    "float32": (2e-5, 1e-3),
    "bfloat16": (6e-2, 1e-1),
    "float16": (1e-2, 3e-2),
}
_SMALLEST = 1e-3  # a parameter's gradient counts with at least this share of the norm of all
_OVER = 3.0  # in half precision gradients that nearly cancel are far off: this many times the definition's error is allowed
_TESTS, _NUMERICS = 8, 6  # processes
_BACKENDS = ("auto", *(name for name in BACKENDS if name != "reference"))
_KERNELS = ("tests/ops", "tests/models")  # tests that concern kernels
_PASSED = "VITREL_GPU_PASSED"  # environment variable: file of the tests that have passed


def run_part(setting: Setting) -> None:
    """Run tests and numerics side by side."""
    count = 1 if setting.small else _NUMERICS
    env = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    jobs = [Job("tests", env=env), *(Job(f"numerics-{i}-{count}", env=env) for i in range(count))]
    run(setting, jobs, at_once=len(jobs))


def work(setting: Setting, name: str) -> None:
    """Run one of these jobs."""
    samples = setting.samples(TESTED)
    if name == "tests":
        run_tests(setting, samples)
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    models = [*timm.list_models("vitrel_vit_n8_*"), *timm.list_models("vitrel_swin_n*"), "vitrel_swinv2_n"]
    models = ["vitrel_vit_n8_table", "vitrel_swin_n"] if setting.small else models
    for model in share(models, name):
        compare(model, setting, samples)


def compare(name: str, setting: Setting, samples: Samples) -> None:
    """Compare a model's output and gradients with float64 on a CPU, on every backend in every precision: a row each."""
    modes = [
        dict(case=name, mode=precision, contender=backend)
        for precision in (list(LIMITS)[: 2 if setting.small else None])
        for backend in _BACKENDS
    ]
    if setting.late(5) or all(known(samples, "numerics", **key) for key in modes):
        return
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, img_size=64, drop_path_rate=0.0)
    position = model.position_parameters()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key in position:
                value.add_(torch.randn_like(value) * 0.3)
            elif value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
            else:
                value.add_(torch.randn_like(value) * value[0].numel() ** -0.5)
    images = torch.randn(2, 3, 72, 104)
    with use_backend("reference"):
        truth = results(model.double(), images.double())
    model, images = model.float().to(setting.device), images.to(setting.device)
    of_definition: dict[str, dict[str, float]] = {}  # errors by precision
    for key in modes:
        precision, backend = key["mode"], key["contender"]
        if setting.late() or known(samples, "numerics", **key):
            continue
        with measuring(samples, **key):
            cast = torch.autocast(setting.device.type, getattr(torch, precision), enabled=precision != "float32")
            if precision not in of_definition:
                with use_backend("reference"):
                    of_definition[precision] = errors(results(model, images, cast), truth)
            with use_backend(backend):
                far = errors(results(model, images, cast), truth)
            limits = {name: LIMITS[precision][bool(name)] for name in far}
            allowed = {name: max(limits[name], _OVER * of_definition[precision][name]) for name in far}
            worst = max(far, key=lambda name: far[name] / allowed[name])
            gradient = max(error for name, error in far.items() if name)
            row = dict(error=far[""], gradient=gradient, worst=worst or "output", share=far[worst] / allowed[worst])
            samples.add("numerics", **key, **row)


def results(model: Any, images: torch.Tensor, cast: Any = None) -> dict[str, torch.Tensor]:
    """Return a model's output and the gradient of every parameter, of the sum of the output's squares."""
    model.zero_grad()
    with cast or contextlib.nullcontext():
        out = model(images)
    out.double().square().sum().backward()
    return {"": out.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the error of the output (named "") and of every gradient, a norm over a norm.

    Raises:
        ArithmeticError: one is missing, or holds NaN or infinity.
    """
    norms = {name: x.norm().item() for name, x in truth.items()}
    least = _SMALLEST * sum(norm**2 for name, norm in norms.items() if name) ** 0.5
    far = {}
    for name, expected in truth.items():
        if name not in found or not found[name].isfinite().all():
            raise ArithmeticError(f"the gradient of {name or 'the output'} is missing or not finite")
        far[name] = (found[name].double().cpu() - expected).norm().item() / max(norms[name], least if name else 0.0)
    return far


def gpu_tests() -> list[Path]:
    """Return the files of tests that ask for a GPU, or make tensors as if there were one; without extras, those of kernels."""
    folders = _KERNELS if absent(*EXTRAS["train"], *EXTRAS["evaluate"]) else ("tests",)
    paths = (path for folder in folders for path in (ROOT / folder).rglob("test_*.py"))
    found = [path for path in paths if re.search(r"""["']cuda\b""", path.read_text("utf-8"))]
    return sorted(found, key=lambda path: path.stat().st_size)


def run_tests(setting: Setting, samples: Samples) -> None:
    """Run the tests that ask for a GPU, with pytest where it is installed."""
    if find_spec("pytest") is None:
        print("no pytest: give --data, a folder that `python -m tools.gpu pack` has made")
        return
    passed = samples.path.with_suffix(".passed")
    passed.write_text("\n".join(row["case"] for row in samples.rows if row["kind"] == "test" and row["mode"] == "passed"))
    files = gpu_tests()[:1] if setting.small else gpu_tests()
    parallel = ["-n", str(_TESTS), "--dist", "worksteal"] if find_spec("xdist") and not setting.small else []
    timeout = ["-o", "timeout=100"] if find_spec("pytest_timeout") else []
    plugins = [word for name in ("tools.gpu.check", "no:cacheprovider", "no:logging") for word in ("-p", name)]
    options = ["-o", "addopts=", "-q", "--tb=short", "--continue-on-collection-errors", "-x" if setting.small else "-v"]
    paths = os.pathsep.join([str(ROOT), str(SCRATCH / "site"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {_PASSED: str(passed), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", *plugins, *options, *parallel, *timeout, *map(str, files)]
    subprocess.run(command, cwd=ROOT, env=env, check=False)


class _Rows:
    """Hooks of pytest that write rows."""

    def __init__(self, path: Path):
        self.samples = Setting("check", path.parent, 0.0, path.stem.endswith("-small")).samples(TESTED)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome == "passed" else str(report.longrepr)[-800:]
            self.samples.add("test", case=report.nodeid, mode=report.outcome, contender="", text=text, seconds=report.duration)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.samples.add("test", case=report.nodeid, mode="not collected", contender="", text=str(report.longrepr)[-800:])


def pytest_configure(config: Any) -> None:
    """Write rows in the process that gathers the reports."""
    if _PASSED in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Rows(Path(os.environ[_PASSED])))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out the tests that have passed, and slow ones that concern no kernel."""
    if _PASSED in os.environ:
        passed = set(Path(os.environ[_PASSED]).read_text("utf-8").splitlines())
        wanted = [item for item in items if item.nodeid.startswith(_KERNELS) or not item.get_closest_marker("slow")]
        items[:] = [item for item in wanted if item.nodeid not in passed]


def table(setting: Setting) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether something is wrong."""
    rows = setting.samples(TESTED).current()
    bad = [f"- {row['case']}: {_last_line(row['text'])}" for row in _tests(rows) if row["mode"] in ("failed", "not collected")]
    wrong = [row for row in rows if row["kind"] == "failed" or row.get("share", 0) > 1]
    bad += [f"- {row['case']}, {row['contender']}, {row['mode']}: {_what(row)}" for row in wrong]
    return [*check_table(rows), "", *bad], bool(bad)


def check_table(rows: list[Row]) -> list[str]:
    """Return the number of tests by outcome, and a table of numerics by backend and precision."""
    counts = Counter(row["mode"] for row in _tests(rows))
    said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "not run (check-tests.log says why)"
    numerics = {(row["contender"], row["mode"], row["case"]): row for row in rows if row["kind"] != "test"}
    body = []
    for backend, precision in itertools.product(_BACKENDS, LIMITS):
        if found := [row for key, row in numerics.items() if key[:2] == (backend, precision)]:
            body.append((backend, precision, *_counts(found)))
    head = ("backend", "precision", "models", "refused", "wrong", "error of output", "of gradient", "largest share of allowed")
    return [f"Tests: {said}.", "", *markdown(head, "|---|---|---:|---:|---:|---:|---:|---|", body)]


def _tests(rows: list[Row]) -> list[Row]:
    """Return the last row of every test."""
    return [*{row["case"]: row for row in rows if row["kind"] == "test"}.values()]


def _counts(rows: list[Row]) -> list[str]:
    compared = [row for row in rows if row["kind"] == "numerics"]
    wrong = sum(row["kind"] == "failed" or row.get("share", 0) > 1 for row in rows)
    counts = [str(len(compared)), str(sum(row["kind"] == "refused" for row in rows)), str(wrong)]
    if not compared:
        return [*counts, "", "", ""]
    worst = max(compared, key=lambda row: row["share"])
    most = [f"{max(row[name] for row in compared):.1e}" for name in ("error", "gradient")]
    return [*counts, *most, f"{worst['share']:.2f} ({worst['case'].removeprefix('vitrel_')}, {worst['worst']})"]


def _what(row: Row) -> str:
    return row["text"] if row["kind"] == "failed" else f"{row['worst']}: {row['share']:.1f} times the error that is allowed"


def _last_line(text: str) -> str:
    return next((line.removeprefix("E").strip() for line in reversed(text.splitlines()) if line.startswith("E ")), text[-200:])
