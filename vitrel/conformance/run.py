"""`check`: find position errors in anyone's model, from outside; `assert_position_conforms`: raise them in a test."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from vitrel.common.names import did_you_mean
from vitrel.common.sizes import Size, format_size
from vitrel.conformance.checks import OF_SURVEYS, Examined, NotApplicableError
from vitrel.conformance.identify import identify, summary
from vitrel.conformance.reference import like as as_reference
from vitrel.conformance.report import Finding, Report
from vitrel.conformance.runs import OF_RUNS
from vitrel.conformance.subject import REFUSALS, Subject, one_line, sizes_of
from vitrel.conformance.survey import survey
from vitrel.inspect.any_model import checked_size, trained_size

CHECKS: dict[str, Callable[[Examined], Iterator[Finding]]] = {**OF_SURVEYS, **OF_RUNS, "like": as_reference}
MOST_TOKENS = 1024  # patches of the native size up to which it is examined: the logits of all pairs are stored
_SMALLER = ((1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (3, 4))  # grids tried for the smallest input, in patches
_SECONDS = 5.0  # a survey that takes longer is not repeated on smaller grids


def check(
    model: str | nn.Module,
    sizes: Sequence[int | Size] | None = None,
    like: str | nn.Module | None = None,
    expect: str | None = None,
    checks: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Report:
    """Identify position in a model and test it, from its operators alone: no class of any library is known.

    The model runs in float32 on the CPU, as a copy; it is not changed. A check that says nothing about it is "not applicable",
    with the reason.

    Args:
        model: any module that takes images [B, C, height, width], a name of timm.create_model, or a Python import path
            ("package.module:function") of a module or of what returns one.
        sizes: of images in pixels, ints or (height, width): two with height and width exchanged, then others; a single one that
            is not square is examined exchanged too. Default: 6 x 8 and 8 x 6 patches, and the native size up to 1,024 patches.
        like: a reference model whose position must be the same; for a port, with the same weights.
        expect: the kind that must be identified, for example "rope_axial"; the report then has a check "expect".
        checks: names of checks to run; default all ("like" only with a reference).
        progress: called before each step with its name.
        options: arguments of timm.create_model, or of the function, for a name; those of `like` too, if that is a name.

    Raises:
        ValueError: a name is unknown, a size is not positive whole numbers, or the model takes no size that can be tried.
        TypeError: options are given with a model, or are not those of the named one.
    """
    start, say = time.monotonic(), progress or (lambda step: None)
    for name in checks or ():
        if name not in CHECKS:
            raise ValueError(f"there is no check {name!r}{did_you_mean(name, CHECKS)}; checks: {', '.join(CHECKS)}")
    subject = Subject(model, **options)
    examined = _examine(subject, _sizes(subject, sizes), say)
    if like is not None:
        reference = Subject(like, **({} if isinstance(like, nn.Module) else options))
        examined.reference = _examine(reference, examined.sizes, say)
    found = identify(examined.surveys, subject.model, examined.embeddings)
    report = Report(subject.name, examined.sizes, summary(found))
    for name in checks or CHECKS:
        if name == "like" and like is None:
            continue
        say(name)
        findings, held, reason = _results(name, examined)
        if findings and name in OF_SURVEYS:
            findings = _smallest(name, findings, examined)
        report.findings += [_resolved(finding) for finding in findings]
        report.results[name] = "FINDING" if findings else reason or "passed"
        if report.results[name] == "passed" and held:
            size = format_size(examined.sizes[0])
            report.held[name] = _resolved(next((one for one in held if size in one.input), held[0]))
    kinds = {one.kind for one in found}
    if expect is not None and expect not in kinds:
        text, about = f"identified: {', '.join(sorted(kinds)) or 'none'}", f"image of {format_size(examined.sizes[0])} px"
        definition = "The encoding is the expected one."
        report.findings.append(Finding("expect", subject.name, expect, text, about, definition=definition))
    if expect is not None:
        report.results["expect"] = "passed" if expect in kinds else "FINDING"
    report.seconds = time.monotonic() - start
    return report


def assert_position_conforms(model: str | nn.Module, sizes: Sequence[int | Size] | None = None, **options: Any) -> None:
    """Raise AssertionError, with the report, if `check` finds anything in the model.

    Args:
        model: as for `check`.
        sizes: as for `check`.
        options: other arguments of `check`.
    """
    report = check(model, sizes, **options)
    assert report.ok, str(report)


def _sizes(subject: Subject, given: Sequence[int | Size] | None) -> tuple[Size, ...]:
    """Return the sizes to examine: those given (a single one also with height and width exchanged), or the default ones.

    By default 6 x 8 and 8 x 6 patches (`sizes_of`), then the native size up to MOST_TOKENS patches; the native one alone if the
    model refuses the two. ValueError if it takes none of these, or not a given size.
    """
    if given is not None:
        found = tuple(dict.fromkeys(checked_size(size) for size in given))
        for size in found:
            if reason := subject.refusal(size):
                raise ValueError(f"{subject.name} does not take images of {format_size(size)} px: {reason}")
        return found if len(found) > 1 else (*found, found[0][::-1]) if found[0] != found[0][::-1] else found
    native = trained_size(subject.model)
    fits = native[0] * native[1] // subject.unit() ** 2 <= MOST_TOKENS and not subject.refusal(native)
    try:
        two = sizes_of(subject)
    except ValueError:
        if not fits:
            raise
        return (native,)
    return tuple(dict.fromkeys((*two, native))) if fits else two


def _examine(subject: Subject, sizes: tuple[Size, ...], say: Callable[[str], None]) -> Examined:
    """Survey the model at each size, the native one first, and return them as `Examined`; `say` gets a text before each."""
    native, surveys = trained_size(subject.model), {}
    for size in sorted(sizes, key=lambda size: size != native):  # the native one first
        say(f"{subject.name} at {format_size(size)} px")
        surveys[size] = survey(subject.at(size), size)
    return Examined(subject, sizes, surveys, native if native in surveys else None)


def _results(name: str, examined: Examined) -> tuple[list[Finding], list[Finding], str]:
    """Run a check of CHECKS; return deviations (merged), findings that hold and have `vectors`, and why not applicable, or "".

    An error of the model makes a check not applicable only where the check itself runs the model, and is raised elsewhere.
    """
    found, held, reason = list[Finding](), list[Finding](), ""
    try:
        for one in CHECKS[name](examined):
            (found if one.found else held).append(one)  # what was found before a reason stays
    except NotApplicableError as error:
        reason = str(error)
    except REFUSALS as error:
        if name in OF_SURVEYS:
            raise
        reason = f"the model refuses it: {one_line(error)}"
    held = [_named(one, examined.subject.name) for one in held if one.vectors is not None]
    return _merged(found, examined.subject.name), held, reason


def _resolved(finding: Finding) -> Finding:
    """Return the finding with the `Vectors` themselves in place of the function that makes them."""
    return finding._replace(vectors=finding.vectors and finding.vectors())


def _named(finding: Finding, model: str) -> Finding:
    """Return the finding with the first paragraph of its check's docstring as `definition`; "" for `where` becomes `model`."""
    definition = (CHECKS[finding.check].__doc__ or "").partition("\n\n")[0]
    return finding._replace(where=finding.where or model, definition=definition)


def _merged(findings: Any, model: str) -> list[Finding]:
    """Return the first finding of each (check, expected), `_named`; its `where` also tells how many other layers have it."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.check, finding.expected), []).append(_named(finding, model))
    merged = []
    for same in found.values():
        layers = dict.fromkeys(finding.where for finding in same)
        more = f" and {len(layers) - 1} other layers" if len(layers) > 1 else ""
        merged.append(same[0]._replace(where=same[0].where + more))
    return merged


def _smallest(name: str, findings: list[Finding], examined: Examined) -> list[Finding]:
    """Return the findings of the check `name`, the first with the input, text and vectors of a smaller grid that shows it.

    The grids of _SMALLER are tried in order, within _SECONDS, if the model is not changed for a size; none may show it.
    """
    subject, unit = examined.subject, examined.subject.unit()
    start = time.monotonic()
    for grid in _SMALLER:
        size = grid[0] * unit, grid[1] * unit
        if time.monotonic() - start > _SECONDS or not examined.one_module:
            break
        try:
            pair = {size: survey(subject.at(size), size)}
            if examined.native is not None:
                pair[examined.native] = examined.surveys[examined.native]
            again = [f for f in CHECKS[name](Examined(subject, (size, size), pair, examined.native))
                     if f.found and f.expected == findings[0].expected and format_size(size) in f.input]  # fmt: skip
        except (NotApplicableError, *REFUSALS):
            continue
        if again:
            smallest = {name: getattr(again[0], name) for name in ("input", "found", "vectors")}
            return [findings[0]._replace(**smallest), *findings[1:]]
    return findings
