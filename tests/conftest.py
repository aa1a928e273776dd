"""Fixtures every test may use. The real images and weights beside the checkout are optional: tests that want them skip."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def golden(key: str) -> dict:
    """The golden file of an encoding; a clear failure where it has none."""
    path = GOLDEN / f"{key}.json"
    assert path.is_file(), f"encoding {key!r} has no golden file: add its oracle and run tests/golden/make.py"
    return json.loads(path.read_text())


def shared(name: str) -> Path:
    """A folder of real data or weights beside the checkout; skips the test where it is missing."""
    path = ROOT.parent / "shared" / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not there: this test needs real data")
    return path
