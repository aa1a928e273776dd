"""Print what a bug report needs: versions, devices, which attention backends serve and why others do not, missing extras.

    vitrel doctor
    vitrel doctor --json doctor.json

Attention is asked for with the bias table of a ViT-S/16 at 224 px, global and in windows, for inference and for training.
"""

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vitrel.cli.options import write_json
from vitrel.extras import EXTRAS, absent

PACKAGES = (
    "vitrel", "torch", "torchvision", "timm", "numpy", "triton", "safetensors", "huggingface_hub", "pillow", "lightning",
    "jsonargparse", "torchmetrics", "albumentations", "opencv-python-headless", "webdataset", "pandas", "matplotlib", "plotly",
    "onnx", "onnxruntime", "onnxscript", "transformers",
)  # fmt: skip
GRID, WINDOW, HEADS, DIM = (14, 14), 7, 6, 64  # of ViT-S/16 at 224 px, in Swin's windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel doctor`."""
    parser.add_argument("--json", metavar="FILE", help='write all of it as JSON; "-" prints that alone')


def run(args: argparse.Namespace) -> None:
    """Prints or writes what was found."""
    found = examine()
    if args.json:
        write_json(args.json, found)
    if args.json != "-":
        print(as_text(found))


def examine() -> dict[str, Any]:
    """{section: {name: value}}: system, versions, devices, extras, and what serves attention on each device."""
    import torch

    devices = {"cpu": f"{processor_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    for i in range(torch.cuda.device_count()):
        what = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{what.name}, {what.total_memory / 2**30:.0f} GiB, compute {what.major}.{what.minor}"
    if torch.backends.mps.is_available():
        devices["mps"] = platform.machine()
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(("VITREL_", "TRITON_", "OMP_NUM"))
    }
    return {
        "system": {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()} | variables,
        "versions": {name: found for name in PACKAGES if (found := installed_version(name))}
        | {"cuda of torch": torch.version.cuda or "none"},
        "devices": devices,
        "extras": {extra: f"lacks {', '.join(lacking)}" if (lacking := absent(extra)) else "complete" for extra in EXTRAS},
        "attention": {f"{device}, {mode}": _serves(device, mode) for device in devices for mode in ("inference", "training")},
    }


def _serves(device: str, mode: str) -> list[str]:
    """`vitrel.ops.why` of a global and a window call with a bias table, in `mode`."""
    import torch

    from vitrel.grid import Grid
    from vitrel.ops import attention, window_attention
    from vitrel.ops.why import why
    from vitrel.position import create_position

    grid, window = Grid(*GRID), Grid(WINDOW, WINDOW)
    grad = mode == "training"
    q, k, v = (torch.randn(1, HEADS, grid.tokens, DIM, device=device, requires_grad=grad) for _ in range(3))
    qkv = torch.randn(1, *GRID, 3 * HEADS * DIM, device=device, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        over_all, in_windows = (create_position("table", size, HEADS, DIM).to(device)(size) for size in (grid, window))
        globally = why(attention, q, k, v, over_all, grid)
        windows = why(window_attention, qkv, in_windows, grid, (WINDOW, WINDOW), (WINDOW // 2, WINDOW // 2), HEADS)
    return [*globally.splitlines(), *windows.splitlines()]


def as_text(found: dict[str, Any]) -> str:
    """What `examine` found, as text for a terminal or an issue."""
    lines = []
    for section, values in found.items():
        lines.append(f"{section}:")
        for name, value in values.items():
            if isinstance(value, list):
                lines += [f"  {name}:", *(f"    {line}" for line in value)]
            else:
                lines.append(f"  {name}: {value}")
    missing = [f"pip install 'vitrel[{extra}]'" for extra, state in found["extras"].items() if state != "complete"]
    return "\n".join([*lines, *(["missing extras are installed by: " + ", ".join(missing)] if missing else [])])


def installed_version(package: str) -> str:
    """The version of an installed package, "" where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def processor_name() -> str:
    """The name of the processor, as Linux gives it, or else as Python does."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
