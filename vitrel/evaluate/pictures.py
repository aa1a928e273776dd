"""Pictures of single images and layers for the report."""

from dataclasses import dataclass, field


@dataclass
class Pictures:
    sections: list = field(default_factory=list)
    left_out: list = field(default_factory=list)
