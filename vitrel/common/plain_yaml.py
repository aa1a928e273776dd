"""Reading of YAML as plain values; text that would build objects, crash the parser or expand endlessly is refused before
parsing.
"""

from pathlib import Path
from typing import Any

import yaml

DEEPEST = 50  # nested sections; at tens of thousands the parser ends in a segmentation fault
MOST_VALUES = 100_000  # with aliases a few lines can expand to billions
MOST_BYTES = 1_000_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TOO_DEEP = f"nested too deeply: a configuration has at most {DEEPEST} nested sections"


def read_yaml(path: str | Path) -> Any:
    """Return the plain values of a YAML file; ValueError with the file and the reason, OSError if it cannot be read."""
    path = Path(path)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: a configuration has at most {MOST_BYTES:,}")
    try:
        return load_yaml(path.read_text("utf-8", errors="replace"), f"{path}: ")
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: this is not plain YAML: {error}") from error


def read_mapping(text: str) -> dict[str, Any]:
    """Return a YAML mapping written as text, such as model arguments; ValueError with an example for anything else."""
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML ({str(error).partition(chr(10))[0]}); write e.g. '{{reg_tokens: 4}}'") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping such as '{{reg_tokens: 4}}', got {text!r}")
    return value


def load_yaml(text: str, where: str = "") -> Any:
    """Return the plain values of YAML text; error messages begin with `where`.

    Raises:
        ValueError: more, deeper or larger values than a configuration needs, or tags that would build objects.
        yaml.YAMLError: text that is not YAML.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{where}{len(text):,} characters: a configuration has at most {MOST_BYTES:,}")
    try:
        _check_extent(text, where)
    except yaml.scanner.ScannerError as error:  # newer versions of libyaml have a limit of their own, of 1,000
        if "nesting depth" in str(error.problem):
            raise ValueError(where + _TOO_DEEP) from None
        raise
    try:
        return yaml.load(text, Loader=_LOADER)
    except yaml.constructor.ConstructorError as error:
        raise ValueError(
            f"{where}{error.problem}: this is not plain YAML, and a configuration holds plain values only"
        ) from error
    except ValueError as error:  # an invalid date
        raise yaml.YAMLError(str(error)) from error


def _check_extent(text: str, where: str) -> None:
    """ValueError for too many or too deeply nested values, counting aliases each time; reads the parser's events only."""
    values = 0
    opened: list[list[Any]] = []  # [anchor, values before, height]
    anchors: dict[str | None, tuple[int, int]] = {}  # anchor: (values, height)
    for event in yaml.parse(text, Loader=_LOADER):
        size, height = 1, 0
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append([event.anchor, values, 0])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before, below = opened.pop()
            size, height = 0, below + 1
            anchors[anchor] = (values - before, height)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, _, _ in opened]:
                raise ValueError(f"{where}&{event.anchor} is nested in itself")
            size, height = anchors.get(event.anchor, (1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            anchors[event.anchor] = (1, 0)
        else:
            continue
        values += size
        if opened:
            opened[-1][2] = max(opened[-1][2], height)
        if len(opened) + height > DEEPEST:
            raise ValueError(where + _TOO_DEEP)
        if values > MOST_VALUES:
            raise ValueError(f"{where}more than {MOST_VALUES:,} values, aliases counted each time: no configuration needs them")
