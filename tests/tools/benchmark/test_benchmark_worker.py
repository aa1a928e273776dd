"""Workers: a contender in a process of its own answers, fails, dies and hangs in ways that the parent can tell apart.

And times: a GPU is kept busy, and workers take turns.
"""

import os
import time
from pathlib import Path

import pytest
import torch

from tools.benchmark.worker import Repeats, Stopwatch, Worker, WorkerFailed, extra_bytes, host_peak_bytes, take_turns

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


def adder(step=1.0):
    """Counts its calls, and says what it finds in the environment."""
    state = {"calls": 0}

    def call():
        state["calls"] += 1
        where = [float(os.environ["VITREL_TEST"]), torch.get_num_threads(), float(len(os.listdir(_cache())))]
        return {"calls": torch.tensor(step * state["calls"]), "where": torch.tensor(where)}

    return call


class Telling:
    """A call that has more than an outcome."""

    def set(self, x):
        self.x = x

    def __call__(self):
        return {"x": torch.ones(getattr(self, "x", 1))}

    def checked(self, found):
        return {"twice": 2 * found["x"]}

    def about(self):
        return {"ran": ["that"]}


def _cache():
    path = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.makedirs(path, exist_ok=True)
    return path


def glutton(mb):
    def call():
        return {"sum": torch.ones(mb * 2**20 // 4).sum()}

    return call


def compiled():
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    sizes = iter((2, 3, 3, 4))
    return lambda: {"x": double(torch.ones(next(sizes)))}


def raising():
    raise ValueError("no such thing")


def later(what):
    """Fine once, then `what`."""
    calls = []

    def call():
        calls.append(1)
        if len(calls) > 1:
            {"die": lambda: os._exit(9), "hang": lambda: time.sleep(60), "raise": lambda: 1 / 0}[what]()
        return {"x": torch.ones(1)}

    return call


def order(build, args):
    return f"{Path(__file__).stem}:{build}", args


def worker(build, **args):
    return Worker(*order(build, args), 1, HERE | {"VITREL_TEST": "7"}, patience=60.0)


def started(worker, build, **args):
    """Starts another contender in the same process, which spares the seconds of its imports."""
    return worker._ask("start", *order(build, args), 1, "cpu")


@pytest.mark.slow
def test_worker_answers_until_it_dies_or_hangs():
    """Two at once, in turn; outcomes are of the last call, peaks do not begin at the parent's."""
    kept = torch.ones(300 * 2**18)
    with worker("adder", step=0.5) as one, worker("glutton", mb=200) as other:
        first = one.start()
        assert first["first_call_s"] > 0 and first["compiles"] == one.compiles() == 0
        assert first["before_bytes"] > 50e6
        assert one.outcome()["calls"] == 0.5 and one.outcome()["where"].tolist() == [7, 1, 0]
        before = other.start()["before_bytes"]
        times = one.run(3)
        assert len(times) == 3 and all(0 <= ms < 1000 and host > 0 for ms, host in times)
        assert one.outcome()["calls"] == 2.0
        peak = other.memory()["peak_bytes"]
        assert before + 190e6 < peak < before + 300e6
        memory = other.memory()
        assert abs(memory["call_bytes"] - 200 * 2**20) < 8e6 and memory["reserved_bytes"] is None
        assert memory["peak_bytes"] >= peak and other.memory()["peak_bytes"] >= peak  # measuring a call does not forget it
        assert one.memory()["call_bytes"] < 4e6
        assert before < host_peak_bytes() - kept.nbytes / 3

        started(one, "Telling")
        assert one.outcome()["twice"].tolist() == [2.0] and one.about() == {"ran": ["that"]}
        one.set(x=2)
        one.run(1)
        assert one.outcome()["twice"].tolist() == [2.0, 2.0]
        started(one, "glutton", mb=1)
        assert one.about() == {} and set(one.outcome()) == {"sum"}

        assert started(one, "compiled")["compiles"] == 1
        one.run(2)
        assert one.compiles() == 2
        one.run(1)
        assert one.compiles() == 3

        with pytest.raises(WorkerFailed, match="ValueError: no such thing"):
            started(one, "raising")
        started(one, "later", what="raise")
        with pytest.raises(WorkerFailed, match="ZeroDivisionError: division by zero"):
            one.run(1)

        started(one, "later", what="die")
        with pytest.raises(WorkerFailed, match="the process ended with status 9"):
            one.run(1)
        started(other, "later", what="hang")
        other.patience, start = 0.3, time.time()
        with pytest.raises(WorkerFailed, match="did not end within 0 s"):
            other.run(1)
    assert time.time() - start < 10 and other._process.returncode == -9


@pytest.mark.slow
def test_extra_bytes_forget_what_is_given_back():
    """Small blocks stay with the process after use; they count again when they are used again."""
    torch.ones(2**22).sum()
    for _ in range(2):
        with extra_bytes(torch.device("cpu")) as extra:
            torch.ones(20 * 2**18).sum()
        assert abs(extra[0] - 20 * 2**20) < 2e6


def test_take_turns():
    """One that fails on its way leaves the others their rounds."""

    class Fake:
        def __init__(self, ms, last=99):
            self.ms, self.left = ms, last

        def run(self, calls):
            self.left -= 1
            if self.left < 0:
                raise WorkerFailed("gone")
            return [(self.ms, 7.0)] * calls

    times, failed = take_turns({"slow": Fake(600.0), "fast": Fake(100.0), "bad": Fake(1.0, 2)}, Repeats(2, 3, 0.5, 4))
    assert {name: found["rounds"] for name, found in times.items()} == {"slow": [[600.0]] * 3, "fast": [[100.0] * 4] * 3}
    assert times["fast"]["host"] == [[7.0] * 4] * 3 and str(failed["bad"]) == "gone"


class Event:
    """Of a device that is 3 ms later each time it is looked at."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 3.0
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_gpu_is_kept_busy_flushed_and_asked_for_its_own_time(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append(cycles))
    watch = Stopwatch(torch.device("cpu"))
    watch.gpu, watch.buffer = True, torch.ones(8, dtype=torch.int8)
    ms, host = watch(lambda: said.append("run"), busy=2.0)
    assert ms == 3.0 and 0 < host < 100
    assert said == ["synchronize", 4_000_001, "run", "synchronize"] and not watch.buffer.any()
