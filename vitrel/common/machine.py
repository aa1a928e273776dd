"""This machine as files and reports record it: names of its processor and GPUs, versions of its packages."""

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def hardware_name(device: "torch.device") -> str:
    """Return the name of a GPU, or that of the processor for any other device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """Return the name of the processor, from /proc/cpuinfo or else from `platform`."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or where the system does not say, the newest CUDA version that it serves."""
    import torch

    try:
        words = re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", _DRIVER.read_text("utf-8", "replace"))
    except OSError:
        words = []
    return words[0] if words else str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())


def installed_version(package: str) -> str:
    """Return the version of an installed package, "" for one that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
