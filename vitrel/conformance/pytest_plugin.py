"""A pytest plugin with the fixture `assert_position_conforms`: `pytest_plugins = ["vitrel.conformance.pytest_plugin"]`.

    def test_position(assert_position_conforms):
        assert_position_conforms(build_model(), sizes=[(96, 128), (128, 96)])

It is loaded where it is named, not wherever vitrel is installed, because it imports torch.
"""

from collections.abc import Callable

import pytest

from vitrel.conformance import assert_position_conforms as conforms


@pytest.fixture
def assert_position_conforms() -> Callable[..., None]:
    """`vitrel.assert_position_conforms` as a fixture."""
    return conforms
