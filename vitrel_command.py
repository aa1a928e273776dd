"""The `vitrel` command.

It stands beside the package, since `import vitrel` imports torch, timm and every model, which takes seconds. Help and errors of
usage need none of them, so here the package's `__init__` runs only when one of its names is used. importlib's LazyLoader would
run it as soon as a module of the package is imported.
"""

import importlib.util
import sys
from types import ModuleType


class _NotYetRun(ModuleType):
    """A package whose `__init__` runs when it is asked for a name that it lacks; its modules can be imported before."""

    def __getattr__(self, name: str) -> object:
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def main() -> None:
    """Run the command line of this process, as `vitrel.cli.main`."""
    if "vitrel" not in sys.modules:
        spec = importlib.util.find_spec("vitrel")
        sys.modules["vitrel"] = importlib.util.module_from_spec(spec)
        sys.modules["vitrel"].__class__ = _NotYetRun
    cli = importlib.import_module("vitrel.cli")
    cli.main()


if __name__ == "__main__":
    main()
