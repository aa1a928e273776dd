"""YAML read as plain values; a key that is given twice is an error."""

from pathlib import Path
from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """PyYAML's SafeLoader, but ValueError for a key that is given twice in a mapping; PyYAML itself takes the last value."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    again = f" and in line {line}" if line != lines[name] else ""
                    raise ValueError(f"the key {key.value} is given twice, in line {lines[name]}{again}")
                lines[name] = line
        return node


def read_yaml(path: str | Path) -> Any:
    """Return the plain values of a YAML file; ValueError with file and reason if it is no YAML, OSError if it is unreadable."""
    return load_yaml(Path(path).read_text("utf-8", errors="replace"), f"{path}: ")


def read_mapping(text: str) -> dict[str, Any]:
    """Return a dictionary from the text of a YAML mapping, as "{depth: 4}"; ValueError with an example for anything else."""
    value = load_yaml(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping such as '{{reg_tokens: 4}}', got {text!r}")
    return value


def load_yaml(text: str, where: str = "") -> Any:
    """Return the plain values (dictionaries, lists, numbers, text, dates, None) of YAML text.

    ValueError, whose message begins with `where`, for text that is no YAML, asks for Python objects or repeats a key.
    """
    try:
        return yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError for a date that does not exist
        reason = getattr(error, "problem", None) or str(error)
        raise ValueError(f"{where}this is not plain YAML: {reason}{_line(error)}") from error


def _line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" in line {mark.line + 1}" if mark else ""
