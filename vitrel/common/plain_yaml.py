"""YAML read as plain values; a key that is given twice is an error."""

from pathlib import Path
from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """PyYAML's SafeLoader, but a key that is given twice is an error; PyYAML itself takes the last value."""

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
    """Return the plain values of a YAML file; ValueError with the file and the reason, OSError if it cannot be read."""
    return load_yaml(Path(path).read_text("utf-8", errors="replace"), f"{path}: ")


def read_mapping(text: str) -> dict[str, Any]:
    """Return a YAML mapping written as text, such as model arguments; ValueError with an example for anything else."""
    value = load_yaml(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping such as '{{reg_tokens: 4}}', got {text!r}")
    return value


def load_yaml(text: str, where: str = "") -> Any:
    """Return the plain values of YAML text; ValueError, whose message begins with `where`, for text that is no plain YAML."""
    try:
        return yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError for a date that does not exist
        reason = getattr(error, "problem", None) or str(error)
        raise ValueError(f"{where}this is not plain YAML: {reason}{_line(error)}") from error


def _line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" in line {mark.line + 1}" if mark else ""
