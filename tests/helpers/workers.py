"""A replacement of the benchmark's Worker that runs in the test's process."""

import importlib

from tools.benchmark.samples import read_rows
from tools.benchmark.worker import WorkerFailed


class Here:
    """Builds and runs a contender in this process; its errors are raised as WorkerFailed.

    wrong: {name of a contender (see `named`): factor of its outputs}. failing: {name: error}.
    """

    wrong, failing, started = {}, {}, []

    def __init__(self, build, args, threads=1, env=None, device="cpu", patience=600.0):
        module, _, function = build.partition(":")
        self.build, self.args = getattr(importlib.import_module(module), function), args
        self.name = self.named(args)

    @staticmethod
    def named(args):
        """Return a contender's name in `wrong` and `failing`, from its arguments."""
        return args.get("method") or f"{args.get('library')}, {args.get('how')}"

    def start(self):
        Here.started.append(self.name)
        if self.name in self.failing:
            raise WorkerFailed(self.failing[self.name])
        self.call = self._attempt(lambda: self.build(**self.args))
        self.kept = self._attempt(self.call)
        return {"first_call_s": 0.5, "before_bytes": 10, "compiles": 0}

    def set(self, **args):
        self._attempt(lambda: self.call.set(**args))

    def outcome(self):
        tensors = self._attempt(lambda: getattr(self.call, "checked", dict)(self.kept))
        return {name: value * self.wrong.get(self.name, 1.0) for name, value in tensors.items()}

    def run(self, calls):
        for _ in range(calls):
            self.kept = self._attempt(self.call)
        return [(2.0, 3.0)] * calls

    def memory(self):
        return {"peak_bytes": 100, "call_bytes": 3_000_000, "reserved_bytes": None}

    def about(self):
        return self.call.about() if hasattr(self.call, "about") else {}

    def compiles(self):
        return 5 if "compiled" in self.name else 0

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _attempt(self, work):
        try:
            return work()
        except Exception as error:
            raise WorkerFailed(f"{type(error).__name__}: {error}") from error


def by_contender(engine, kind, case=None):
    """Return {contender: row} of the rows of a kind that an engine has written, or only those of a case."""
    rows = (row for row in read_rows(engine.samples.path) if row["kind"] == kind)
    return {row["contender"]: row for row in rows if case is None or row["case"] == case.name}
