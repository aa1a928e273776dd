"""Print information for a bug report: versions, devices, attention backends and why others are not used, missing extras.

    vitrel doctor
    vitrel doctor --json doctor.json
    vitrel doctor --gpu                 # test and measure vitrel on a GPU, at most 30 minutes; writes an archive to send to us

Attention backends are those for the bias table of a ViT-S/16 at 224 px, global and in windows, for inference and for training.

--gpu runs `vitrel tune`, the benchmarks of attention and models (in a clone of the repository), and trains the quickstart in
bf16 on the GPU and in float32 on the CPU. --quick runs a small form of each, also on a CPU.
"""

import argparse
import os
import platform
from pathlib import Path
from typing import Any

from vitrel.cli.options import add_json, check_folders, write_json
from vitrel.common.extras import EXTRAS, absent, install_command
from vitrel.common.files import shown
from vitrel.common.machine import installed_version, processor_name

PACKAGES = (
    "vitrel", "torch", "torchvision", "timm", "numpy", "triton", "safetensors", "huggingface_hub", "pillow", "lightning",
    "jsonargparse", "torchmetrics", "albumentations", "opencv-python-headless", "pandas", "matplotlib", "jinja2",
    "vl-convert-python", "onnx", "onnxruntime", "onnxscript", "transformers",
)  # fmt: skip
GRID, WINDOW, HEADS, DIM = (14, 14), 7, 6, 64  # of ViT-S/16 at 224 px, in Swin's windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel doctor`."""
    add_json(parser, "write the information")
    parser.add_argument("--gpu", action="store_true", help="tune, benchmark and train on a GPU, and pack the results")
    parser.add_argument("--quick", action="store_true", help="with --gpu, a small form of every step, also on a CPU")
    parser.add_argument("--device", help="with --gpu: cuda, cuda:1, or cpu with --quick; default the first GPU")
    parser.add_argument("--out", "-o", type=Path, help="with --gpu: folder of the results; default runs/gpu")


def run(args: argparse.Namespace) -> None:
    """Print the information or write it as JSON, or run the steps of --gpu."""
    if not args.gpu and (args.quick or args.device or args.out):
        args.usage_error("--quick, --device and --out belong to --gpu")
    if args.gpu:
        _check_gpu(args)
        return
    check_folders(args.json)
    information = examine()
    if args.json:
        write_json(args.json, information)
    if args.json != "-":
        print(as_text(information))


def _check_gpu(args: argparse.Namespace) -> None:
    import torch

    from vitrel.cli.gpu_check import check_gpu
    from vitrel.common.processes import checked_device

    device = args.device or ("cpu" if args.quick and not torch.cuda.is_available() else "cuda")
    if device == "cpu" and not args.quick:
        args.usage_error("--device cpu needs --quick: the full form measures a GPU")
    if device != "cpu":
        if not torch.cuda.is_available():
            raise ValueError(
                "PyTorch sees no GPU here (vitrel doctor says which build it is); --quick runs a small form on the CPU"
            )
        checked_device(device)  # an unknown device fails here, not in the third step
    archive, unfinished = check_gpu(args.out or Path("runs/gpu"), device, args.quick, examine())
    print(f"please attach {shown(archive)} to an issue; it has logs, tables and samples, and no weights")
    if unfinished:
        raise ValueError(f"{'; '.join(unfinished)} (the same command runs this again, all else is done)")


def examine() -> dict[str, Any]:
    """Return {section: {name: value}}: system, versions, devices, extras, and attention backends on each device."""
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
        "profiles": {device: _profile(device) for device in devices},
        "extras": {
            extra: f"lacks {', '.join(missing)}: {install_command(extra)}" if (missing := absent(*modules)) else "complete"
            for extra, modules in EXTRAS.items()
        },
        "attention": {f"{device}, {mode}": _serves(device, mode) for device in devices for mode in ("inference", "training")},
    }


def _profile(device: str) -> str:
    """Which profile attention on a device follows, or how to make one."""
    import torch

    from vitrel.ops.profile import path_for, profile_of

    path = path_for(torch.device(device))
    profile = profile_of(torch.device(device))
    if profile is not None:
        return f"{shown(profile.path)}, {len(profile.cases)} cases"
    return "off" if path is None else f"none that fits at {shown(path)}; vitrel tune makes one"


def _serves(device: str, mode: str) -> list[str]:
    """The lines of `vitrel.ops.why` for global and window attention with a bias table.

    Args:
        mode: "inference" or "training".
    """
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
        global_terms, window_terms = (create_position("table", size, HEADS, DIM).to(device)(size) for size in (grid, window))
        of_global = why(attention, q, k, v, global_terms, grid)
        of_windows = why(window_attention, qkv, window_terms, grid, (WINDOW, WINDOW), (WINDOW // 2, WINDOW // 2), HEADS)
    return [*of_global.splitlines(), *of_windows.splitlines()]


def as_text(information: dict[str, Any]) -> str:
    """Format the result of `examine` for a terminal or an issue."""
    lines = []
    for section, values in information.items():
        lines.append(f"{section}:")
        for name, value in values.items():
            if isinstance(value, list):
                lines += [f"  {name}:", *(f"    {line}" for line in value)]
            else:
                lines.append(f"  {name}: {value}")
    return "\n".join(lines)
