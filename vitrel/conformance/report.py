"""The result of a check: findings with place, expectation and smallest input; it prints as a table and becomes plain values."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import timm
import torch

from vitrel.common.sizes import Size, format_size
from vitrel.common.tables import aligned


class Finding(NamedTuple):
    """One comparison of a model with a definition: a deviation, or with an empty `found` none.

    Args:
        check: name of the check.
        where: module, and layers with the same finding.
        expected: what the definition gives, in words.
        found: what the model does instead, in words; "" where it does what is expected.
        input: the input that shows it, in words; in a report, of some checks, a smaller one if that shows it too.
        vectors: the `Vectors` that were compared; in a check a function that returns them, which is called for what a report
            holds. None where there are none.
        definition: the formula that the check tests.
    """

    check: str
    where: str
    expected: str
    found: str
    input: str = ""
    vectors: Any = None
    definition: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return {field: value} for JSON, of a finding in a report: tensors of `vectors` as {"dtype", "shape", "data"}."""
        return self._asdict() | {"vectors": self.vectors and self.vectors.to_dict()}


@dataclass
class Report:
    """The result of `check`: the encodings of a model and the result of every check; `print` shows a table.

    Attributes:
        model: name of the model.
        sizes: (height, width) in pixels of the images.
        encodings: the kinds of position that were identified, with the number of layers that have them.
        findings: the deviations.
        results: {check: "FINDING", "passed", or why it is not applicable}.
        held: {check that passed: one of its comparisons}, of those that have `vectors`.
        seconds: duration.
    """

    model: str
    sizes: tuple[Size, ...]
    encodings: list[str]
    findings: list[Finding] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    held: dict[str, Finding] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> list[str]:
        """Names of the checks that are applicable and have no finding."""
        return [name for name, result in self.results.items() if result == "passed"]

    @property
    def skipped(self) -> dict[str, str]:
        """{check that is not applicable: why}."""
        return {name: result for name, result in self.results.items() if result not in ("FINDING", "passed")}

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, with the versions of torch and timm.

        "passed" is {check: what `held` has, else {}}, "not_applicable" is `skipped`; other keys are names of fields.
        """
        about = {"model": self.model, "sizes": [list(size) for size in self.sizes], "encodings": self.encodings}
        findings = [finding.to_dict() for finding in self.findings]
        passed = {name: self.held[name].to_dict() if name in self.held else {} for name in self.passed}
        versions = {"timm": timm.__version__, "torch": torch.__version__}
        results = {"findings": findings, "passed": passed, "not_applicable": self.skipped}
        return about | results | {"seconds": round(self.seconds, 1), "versions": versions}

    def __str__(self) -> str:
        sizes = ", ".join(format_size(size) for size in self.sizes)
        lines = [f"{self.model} at {sizes} px (timm {timm.__version__}, torch {torch.__version__}, {self.seconds:.0f} s)"]
        lines += [f"  encoding: {text}" for text in self.encodings]
        firsts = {finding.check: finding.found for finding in reversed(self.findings)}
        rows = [["check", "result", ""]]
        for name, result in self.results.items():
            known = result in ("FINDING", "passed")
            rows.append([name, result if known else "not applicable", firsts.get(name, "") if known else result])
        lines += [f"  {line}" for line in aligned(rows)]
        for finding in self.findings:
            lines += ["", f"{finding.check}: {finding.found}"]
            lines += [f"  {name:10} {getattr(finding, name)}" for name in ("where", "expected", "input", "definition")]
        if self.ok:
            lines += ["", f"no finding; checks: {len(self.passed)}"]
        return "\n".join(lines)
