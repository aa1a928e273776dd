"""The result of a check: findings with place, expectation and smallest input; a table for people, a dictionary for programs."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch

from vitrel.common.sizes import Size, format_size
from vitrel.common.tables import aligned

DEFINITIONS = {  # {check: (definition, file and name of its code)}
    "order": ("token i lies in row i // w and column i % w; an offset or a step has one value on the whole grid",
              "grid.py:_index"),
    "rotation": ("the norm of each pair of channels is the same at all positions", "ops/reference.py:rotate"),
    "sign": ("query i and key j are rotated by the angles of their positions with the same sign", "ops/reference.py:rotated"),
    "prefix": ("prefix tokens are not rotated; their bias and embedding are the same on any grid", "position/terms.py:Terms"),
    "axes": ("position tells rows and columns apart", "grid.py:_coordinates"),
    "exchange": ("frequencies of y on h x w are those of x on w x h; a window has one bias per offset",
                 "position/rope.py:_axial_rotation"),
    "resampling": ("an embedding at h x w is the native one resampled to h rows and w columns",
                   "position/resample.py:resample_embedding"),
    "half_pixel": ("patch centers lie at (i + 1/2) / n of the image on every grid", "position/resample.py:_linear"),
    "window": ("two tokens see each other in a window only at the offset of their slots, not across borders",
               "ops/window.py:_windows"),
    "padding": ("no token of the image attends to padding", "ops/window.py:window_mask"),
    "mask": ("tokens of one window at the offset of their slots see each other", "ops/window.py:window_mask"),
    "shift": ("windows are not shifted along an axis that one window holds", "ops/window.py:axis_shift"),
    "cache": ("the output at h x w does not depend on sizes that ran before", "geometry.py:cached_geometry"),
    "state": ("the output at the native size is the same after another size ran, and no weight has changed",
              "geometry.py:cached_geometry"),
    "batch": ("an image gives the same output alone and in a batch", "ops/reference.py:attention"),
    "dtype": ("positions are computed in float32 or better, in any dtype of the model", "position/terms.py:upcast"),
    "device": ("constants are on the device of the model", "geometry.py:cached_geometry"),
    "compile": ("a compiled model gives the outputs of the eager one", "ops/dispatch.py:attention"),
    "export": ("an exported program gives the outputs of the model", "ops/dispatch.py:attention"),
    "like": ("position is that of the reference model", "position/terms.py:Terms"),
    "expect": ("the encoding is the expected one", "position/terms.py:Terms"),
}  # fmt: skip


class Finding(NamedTuple):
    """A deviation from the definition of one check."""

    check: str  # key of DEFINITIONS
    where: str  # module, and layers with the same finding
    expected: str
    found: str
    input: str = ""  # the smallest input that shows it

    def to_dict(self) -> dict[str, str]:
        """The fields, and the definition with the line of its code in vitrel."""
        definition, place = DEFINITIONS[self.check]
        return self._asdict() | {"definition": definition, "code": line_of(place)}


def line_of(place: str) -> str:
    """The line that defines a function or class: "vitrel/grid.py:83" for "grid.py:_index"."""
    file, _, name = place.partition(":")
    source = (Path(__file__).parents[1] / file).read_text("utf-8").splitlines()
    line = next(n for n, text in enumerate(source, 1) if re.match(rf"(def|class) {name}\b", text))
    return f"vitrel/{file}:{line}"


@dataclass
class Report:
    """The encodings of a model and the result of every check; `print` shows a table."""

    model: str
    sizes: tuple[Size, ...]
    encodings: list[str]
    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)  # names of checks
    skipped: dict[str, str] = field(default_factory=dict)  # {check: why it is not applicable}
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """All fields as numbers, strings, lists and dictionaries, with the versions of torch and timm."""
        about = {"model": self.model, "sizes": [list(size) for size in self.sizes], "encodings": self.encodings}
        findings = [finding.to_dict() for finding in self.findings]
        versions = {"timm": timm.__version__, "torch": torch.__version__}
        results = {"findings": findings, "passed": self.passed, "not_applicable": self.skipped}
        return about | results | {"seconds": round(self.seconds, 1), "versions": versions}

    def __str__(self) -> str:
        sizes = ", ".join(format_size(size) for size in self.sizes)
        lines = [f"{self.model} at {sizes} px (timm {timm.__version__}, torch {torch.__version__}, {self.seconds:.0f} s)"]
        lines += [f"  encoding: {text}" for text in self.encodings]
        found = {finding.check: "FINDING" for finding in self.findings}
        rows = [["check", "result", ""]]
        for name in DEFINITIONS:
            if name in found:
                rows.append([name, "FINDING", next(f.found for f in self.findings if f.check == name)])
            elif name in self.passed:
                rows.append([name, "passed", ""])
            elif name in self.skipped:
                rows.append([name, "not applicable", self.skipped[name]])
        lines += [f"  {line}" for line in aligned(rows)]
        for finding in self.findings:
            about = finding.to_dict()
            lines += ["", f"{finding.check}: {finding.found}"]
            labels = ("where", "expected", "input", "definition")
            lines += [f"  {name:10} {about[name]}" for name in labels if about[name]]
            lines[-1] += f" ({about['code']})"
        if self.ok:
            lines += ["", f"no finding in {len(self.passed)} checks"]
        return "\n".join(lines)
