"""`vitrel.tune.tune` measures which attention backend is right and fastest on a device; backend "auto" follows its profile."""

from vitrel.tune.measure import report, tune

__all__ = ["report", "tune"]
