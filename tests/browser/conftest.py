"""Fixtures of the explorer's tests; those of the report are its own."""

import pytest

from helpers.explorer_page import driven, look
from tools.explorer.make import write_explorer


@pytest.fixture(scope="session")
def browser():
    with driven() as driver:
        yield driver


@pytest.fixture(scope="session")
def explorer_path(tmp_path_factory):
    return write_explorer(tmp_path_factory.mktemp("explorer") / "explorer.html")


@pytest.fixture
def explorer(browser, explorer_path):
    """explorer(name=value, ...) opens the page on a laptop with these settings; afterwards the console has to be empty."""
    browser.get_log("browser")
    yield lambda **set_to: look(browser, explorer_path, **set_to)
    assert browser.get_log("browser") == []
