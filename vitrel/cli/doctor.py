"""Print information for a bug report: versions, devices, attention backends and why others are not used, missing extras.

    vitrel doctor
    vitrel doctor --json doctor.json

Attention backends are those for the bias table of a ViT-S/16 at 224 px, global and in windows, for inference and for training,
in float32 on a CPU and in bfloat16 on a GPU.
"""

import argparse
import os
import platform
from typing import Any

from vitrel.cli.options import add_json, check_folders, write_json
from vitrel.common.extras import EXTRAS, absent, install_command
from vitrel.common.machine import installed_version, processor_name

PACKAGES = (
    "vitrel", "torch", "torchvision", "timm", "numpy", "triton", "safetensors", "huggingface_hub", "pillow", "lightning",
    "jsonargparse", "torchmetrics", "albumentations", "opencv-python-headless", "pandas", "matplotlib", "jinja2",
    "onnx", "onnxruntime", "onnxscript", "transformers",
)  # fmt: skip
GRID, WINDOW, HEADS, DIM = (14, 14), 7, 6, 64  # of ViT-S/16 at 224 px, in Swin's windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel doctor` to its parser."""
    add_json(parser, "write the information")


def run(args: argparse.Namespace) -> None:
    """Print the result of `examine`, and write it as JSON to --json; with --json - only the JSON is printed."""
    check_folders(args.json)
    information = examine()
    if args.json:
        write_json(args.json, information)
    if args.json != "-":
        print(as_text(information))


def examine() -> dict[str, Any]:
    """Return {section: {name: value}}; sections: "system", "versions", "devices", "extras", "attention" (its backends).

    Values are text or numbers; those of "attention", by device and mode ("cpu, training"), are lists of lines.
    """
    import torch

    devices = {"cpu": f"{processor_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor}"
    if torch.backends.mps.is_available():
        devices["mps"] = platform.machine()
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(("VITREL_", "TRITON_", "OMP_NUM"))
    }
    return {
        "system": {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()} | variables,
        "versions": {name: installed for name in PACKAGES if (installed := installed_version(name))}
        | {"cuda of torch": torch.version.cuda or "none"},
        "devices": devices,
        "extras": {
            extra: f"lacks {', '.join(missing)}: {install_command(extra)}" if (missing := absent(*modules)) else "complete"
            for extra, modules in EXTRAS.items()
        },
        "attention": {f"{device}, {mode}": _serves(device, mode) for device in devices for mode in ("inference", "training")},
    }


def _serves(device: str, mode: str) -> list[str]:
    """Return the lines of `vitrel.ops.why`: which backend on a device serves global, then window attention with a bias table.

    `mode` is "inference" or "training".
    """
    import torch

    from vitrel.grid import Grid
    from vitrel.ops import attention, window_attention
    from vitrel.ops.why import why
    from vitrel.position import create_position

    grid, window = Grid(*GRID), Grid(WINDOW, WINDOW)
    grad = mode == "training"
    how: dict = {"device": device, "dtype": torch.bfloat16 if "cuda" in device else torch.float32, "requires_grad": grad}
    q, k, v = (torch.randn(1, HEADS, grid.tokens, DIM, **how) for _ in range(3))
    qkv = torch.randn(1, *GRID, 3 * HEADS * DIM, **how)
    with torch.set_grad_enabled(grad):
        global_terms, window_terms = (create_position("table", size, HEADS, DIM).to(device)(size) for size in (grid, window))
        of_global = why(attention, q, k, v, global_terms, grid)
        of_windows = why(window_attention, qkv, window_terms, grid, (WINDOW, WINDOW), (WINDOW // 2, WINDOW // 2), HEADS)
    return [*of_global.splitlines(), *of_windows.splitlines()]


def as_text(information: dict[str, Any]) -> str:
    """Return the result of `examine` as indented text, for a terminal or an issue."""
    lines = []
    for section, values in information.items():
        lines.append(f"{section}:")
        for name, value in values.items():
            if isinstance(value, list):
                lines += [f"  {name}:", *(f"    {line}" for line in value)]
            else:
                lines.append(f"  {name}: {value}")
    return "\n".join(lines)
