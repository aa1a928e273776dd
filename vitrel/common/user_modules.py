"""Modules of a user's own, which register encodings or models and are imported by name before a command runs."""

import importlib
import os
import sys
from collections.abc import Sequence

VARIABLE = "VITREL_IMPORT"  # names joined by commas, so that the processes that a command starts import the modules too


def import_modules(names: Sequence[str] = ()) -> None:
    """Import the modules `names` and those of the environment variable VITREL_IMPORT, from the working folder or installed.

    Afterwards the variable holds all of these names, so that processes that are started later import the modules too, and
    sys.path the working folder; without names nothing happens. Raises ValueError for a name that is found in neither place.
    """
    given = dict.fromkeys([*imported_modules(), *names])
    if not given:
        return
    search_working_folder()
    for name in given:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"--import {name}: there is no module {error.name} in {os.getcwd()} or installed") from None
    os.environ[VARIABLE] = ",".join(given)


def search_working_folder() -> None:
    """Append the working folder to sys.path unless it is there, so that imports find modules in it, as under `python -m`."""
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())


def imported_modules() -> list[str]:
    """Return the names in VITREL_IMPORT: what `import_modules` has imported or, before its first call, will import."""
    return [*filter(None, os.environ.get(VARIABLE, "").split(","))]
