"""This machine, as files and reports record it: its processor, the cores that may be used, versions of packages."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version


def processor_name() -> str:
    """Return the name of the processor, from /proc/cpuinfo or else from `platform`, which may give the architecture only."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of logical CPUs that this process may use; on systems that do not tell it, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_version(package: str) -> str:
    """Return the version of an installed package, "" for one that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
