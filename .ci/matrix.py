#!/usr/bin/env python3
"""The tests with other versions of torch and on other processors: an environment each, one table.

    .ci/matrix.py                       the fast tests with the lowest versions that pyproject.toml allows, and with the newest
    .ci/matrix.py lowest 2.14.1 newest  with these versions of torch
    .ci/matrix.py -- -m slow            what stands behind the -- goes to pytest; this runs the slow tests

Every version comes with the torchvision that was made for it; "lowest" takes the lower bound of every package that has one.
On a processor with AVX-512 each environment runs twice, the second time without it: environment variables keep PyTorch and
oneDNN from using it. The exit code is 1 if a test failed or an environment could not be made.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
QUIET = {"NO_ALBUMENTATIONS_UPDATE": "1", "HF_HUB_OFFLINE": "1"}
COLUMNS = ("torch", "torchvision", "timm", "processor", "passed", "failed", "skipped", "seconds")
VERSIONS = f"from importlib.metadata import version; print(*map(version, {COLUMNS[:3]}))"


def main() -> int:
    args = sys.argv[1:]
    own, to_pytest = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=["lowest", "newest"], help="lowest, newest, or a version of torch")
    parser.add_argument("--venvs", type=Path, help="folder that keeps the environments (default: a temporary one)")
    requested = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (requested.venvs or Path(scratch)).resolve()
        rows = [
            row for version in requested.versions for row in run_version(version, folder / version, Path(scratch), to_pytest)
        ]
    print("", *table(rows), sep="\n")
    return int(any(row["failed"] != "0" for row in rows))


def run_version(version: str, folder: Path, scratch: Path, to_pytest: list[str]) -> list[dict[str, str]]:
    """A row of the table for every processor."""
    unknown = dict.fromkeys(COLUMNS, "-") | {"torch": version}
    try:
        python = environment(version, folder)
        found = subprocess.run([python, "-c", VERSIONS], check=True, text=True, stdout=subprocess.PIPE, cwd=scratch).stdout
    except subprocess.CalledProcessError as error:
        print(f"no environment for {version}: {error}", flush=True)
        return [unknown | {"failed": "no environment"}]
    names = dict(zip(COLUMNS, found.split(), strict=False))
    return [unknown | names | tests(python, name, own, scratch, to_pytest) for name, own in processors()]


def environment(version: str, folder: Path) -> Path:
    """The interpreter of the environment in `folder`, which is made unless it is there and complete."""
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        print(f"== environment with torch {version}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[dev]", *pins(version)], check=True)
        complete.touch()
    return python


def pins(version: str) -> list[str]:
    """What pip installs beside the package; torchvision names the torch that it was made for."""
    if version == "newest":
        return []
    if version != "lowest":
        return [f"torch=={version}"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    bounds = re.findall(r"^([\w-]+)(?:\[.*\])?>=([\d.]+)", "\n".join(needed), re.MULTILINE)
    return [f"{name}=={bound}" for name, bound in bounds]


def processors() -> list[tuple[str, dict[str, str]]]:
    """This processor, and without AVX-512 where it has that: a name and what the environment adds."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.+)", info)
    name = name[1] if name else platform.processor() or platform.machine()
    if "avx512f" not in info:
        return [(f"{name}, AVX2" if "avx2" in info else name, {})]
    return [(f"{name}, AVX-512", {}), (f"{name}, AVX-512 off", WITHOUT_AVX512)]


def tests(python: Path, processor: str, added: dict[str, str], scratch: Path, to_pytest: list[str]) -> dict[str, str]:
    """Runs the suite; part of a row."""
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    own = QUIET | {"PYTHONPATH": str(ROOT), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    print(f"== {python.parent.parent.name}, {processor}", flush=True)
    start = time.monotonic()
    command = [python, "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider", *to_pytest]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | own | added).returncode
    row = {"processor": processor, "seconds": f"{time.monotonic() - start:.0f}"}
    if not report.exists():
        return row | {"failed": f"pytest ended with {code}"}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    all_, skipped, *bad = (int(suite.get(name)) for name in ("tests", "skipped", "failures", "errors"))
    failed = str(sum(bad)) if sum(bad) or not code else f"pytest ended with {code}"
    return row | {"passed": str(all_ - skipped - sum(bad)), "failed": failed, "skipped": str(skipped)}


def table(rows: list[dict[str, str]]) -> list[str]:
    lines = [COLUMNS, *(tuple(row[name] for name in COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


if __name__ == "__main__":
    sys.exit(main())
