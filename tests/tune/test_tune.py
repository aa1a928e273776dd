"""Tuning: which backends are left out, what a profile says about a call, and that "auto" follows it."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from helpers import command
from vitrel import Grid, Table, Terms, create_model
from vitrel.ops import BACKENDS, attention, profile, reference, sdpa, why, window_attention
from vitrel.ops.capability import TABLE, Row
from vitrel.ops.dispatch import choose
from vitrel.ops.profile import Profile, describe, fastest
from vitrel.ops.reference import Call
from vitrel.tune import report, tune
from vitrel.tune.measure import calls_of, measure

CPU = torch.device("cpu")


def table_call(side=6, window=None, **how):
    """A call with a bias table on a small grid."""
    grid = Grid(side, side)
    size = Grid(*window) if window else grid
    terms = Terms(tables=(Table(bias=torch.randn(2, size.classes(), requires_grad=True)),))
    entry = "window_attention" if window else "attention"
    plain = dict(entry=entry, terms=terms, grid=grid, window=window, heads=2, width=8, queries=grid.tokens)
    return Call(**plain | dict(dtype=torch.float32, device=CPU, grad=False) | how)


def case(call, rule="sdpa", compiled=False, **ms):
    """{description: case} of a measured call, as in a profile; backends in the order of their times."""
    return {describe(call._replace(compiled=compiled)): {"ms": ms, "rule": rule, "out": {}}}


@pytest.fixture
def use(tmp_path, monkeypatch):
    """use(*cases): write a profile of this device, and let VITREL_PROFILE name it."""
    path = tmp_path / "profile.json"
    monkeypatch.setenv("VITREL_PROFILE", str(path))

    def written(*cases, **identity):
        made = Profile(path, profile.identity(CPU) | identity, {})
        for about in cases:
            made.cases.update(about)
        made.add(table_call(100), {"ms": {}, "rule": "sdpa", "out": {}})
        profile.forget()
        return made

    yield written
    monkeypatch.undo()
    profile.forget()


@pytest.fixture
def backend(monkeypatch):
    """backend(**functions): add a backend "added", which is the reference with other functions."""

    def added(**functions):
        usual = {name: getattr(reference, name) for name in ("attention", "window_attention")}
        monkeypatch.setitem(BACKENDS, "added", SimpleNamespace(**{**usual, **functions}))
        monkeypatch.setitem(TABLE, "added", Row())

    return added


def test_auto_takes_the_fastest_that_does_not_refuse(use):
    call = table_call()
    q, k, v = (torch.randn(1, 2, 36, 8) for _ in range(3))
    assert choose("auto", call) is sdpa
    use(case(call, reference=1.0, sdpa=2.0))
    assert choose("auto", call) is reference
    assert choose("auto", call._replace(grid=Grid(5, 7), queries=35)) is reference  # like it
    assert "fastest by the profile" not in why(attention, q.requires_grad_(), k, v, call.terms, call.grid)  # of another kind
    with torch.no_grad():
        text = why(attention, q, k, v, call.terms, call.grid)
    assert "reference (fastest by the profile)" in text and "sdpa: 2.00 times as slow" in text
    use(case(call, triton=1.0, flex=1.5, sdpa=2.0))
    assert choose("auto", call) is BACKENDS["flex"]  # triton refuses; this one is measured
    masked = call._replace(mask=torch.ones(36, 36, dtype=torch.bool))
    assert choose("auto", masked) is sdpa  # of another kind


def test_a_profile_speaks_of_calls_like_those_that_were_measured(use):
    small, large = table_call(8), table_call(32)
    use(case(small, sdpa=1.0, bias_by_row=2.0, flex=9.0), case(large, bias_by_row=10.0, sdpa=40.0, flex=90.0))
    said = {side: profile.relative(table_call(side)) for side in (3, 8, 9, 24, 30, 40, 100)}
    assert said[3] == said[24] == said[100] == {}  # of another power of 2
    assert said[8] == pytest.approx({"sdpa": 1.0, "bias_by_row": 2.0, "flex": 9.0}, rel=1e-3)
    assert said[9] == said[8] and min(said[30], key=said[30].get) == "bias_by_row"
    per_axis = Terms(tables=(Table("h", bias=torch.zeros(2, 15)),))
    others = [{"dtype": torch.bfloat16}, {"grad": True}, {"dropout_p": 0.1}, {"queries": 8}, {"terms": per_axis}]
    assert [fastest(table_call(8, **other)) for other in others] == [()] * len(others)
    windows = table_call(8, window=(4, 4))
    use(case(windows, window_kinds=1.0, sdpa=2.0))
    assert fastest(windows) and not fastest(windows._replace(shift=(2, 2))) and not fastest(table_call(6, window=(4, 4)))


def test_fake_tensors_and_traces_follow_the_rules(use):
    call = table_call()
    use(case(call, reference=1.0, sdpa=2.0))
    with torch._subclasses.FakeTensorMode():
        assert fastest(call) == ()
    assert fastest(call._replace(device=torch.device("meta"))) == ()


def test_a_profile_that_does_not_fit_is_named_once(use, monkeypatch):
    call = table_call()
    made = use(case(call, reference=1.0, sdpa=2.0), torch="1.0")
    with pytest.warns(UserWarning, match=r"measured with torch 1\.0, but here there is torch"):
        assert fastest(call) == ()
    made.path.write_text('{"identity": 1')
    profile.forget()
    with pytest.warns(UserWarning, match="cannot be read as a profile"):
        assert fastest(call) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", call) is sdpa  # said once
        made.path.unlink()
        profile.forget()
        assert fastest(call) == ()  # none is no fault
        use(case(call, reference=1.0, sdpa=2.0))
        monkeypatch.setenv("VITREL_PROFILE", "off")
        profile.forget()
        assert fastest(call) == ()


def test_profiles_lie_in_the_cache_or_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("VITREL_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile.path_for(CPU).parent == tmp_path / "vitrel" / "profiles"
    monkeypatch.setenv("VITREL_PROFILE", str(tmp_path))
    assert profile.path_for(CPU).parent == tmp_path and "threads" in profile.identity(CPU)


def test_a_backend_that_forgets_the_shift_is_left_out(backend):
    def forgets(qkv, terms, grid, window, shift, heads, dropout_p=0.0):
        return reference.window_attention(qkv, terms, grid, window, (0, 0), heads)

    backend(window_attention=forgets)
    found = measure(table_call(8, window=(4, 4), shift=(2, 2)))
    assert "error of output" in found["out"]["added"] and "added" not in found["ms"] and found["ms"]["sdpa"] > 0


def test_a_wrong_gradient_and_an_error_leave_a_backend_out(backend):
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, bias):
            return bias.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    def halves(q, k, v, terms, grid, mask=None, dropout_p=0.0):
        table = Table(bias=Halved.apply(terms.tables[0].bias))
        return reference.attention(q, k, v, Terms(tables=(table,)), grid)

    backend(attention=halves)
    found = measure(table_call(grad=True))
    assert "gradient of term" in found["out"]["added"] and "output" not in found["out"]["added"]
    assert "added" not in measure(table_call())["out"]  # outputs are right

    def fails(*args):
        raise torch.OutOfMemoryError("out of memory, says the test")

    backend(attention=fails)
    assert "says the test" in measure(table_call())["out"]["added"]


def test_a_slow_backend_is_listed_with_its_time(backend, tmp_path):
    def slow(*args):
        for _ in range(40):
            out = reference.attention(*args)
        return out

    backend(attention=slow)
    made = Profile(tmp_path / "p.json", profile.identity(CPU), {})
    made.add(table_call(12), measure(table_call(12)))
    [found] = made.cases.values()
    assert found["ms"]["added"] > found["ms"]["sdpa"] and not found["out"] and [*found["ms"]][-1] == "added"
    assert "added " in report(made) and f"{describe(table_call(12))}: " in report(made)


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    plans, done = [table_call(side) for side in (3, 5, 8)], []

    def stops(call):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(call.grid.h)
        return case(call, sdpa=1.0)[describe(call)]

    monkeypatch.setitem(tune.__globals__, "measure", stops)
    monkeypatch.setitem(tune.__globals__, "calls_of", lambda *_: plans)
    path = tmp_path / "p.json"
    with pytest.raises(KeyboardInterrupt):
        tune(device="cpu", out=path)
    assert len(json.loads(path.read_text())["cases"]) == 2
    done.clear()
    assert len(tune(device="cpu", out=path).cases) == 3 and done == [8]
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        tune(device="cpu", out=path, fresh=True)
    assert done == [3, 5]
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"p\.json: it cannot be read as a profile.*`fresh` replaces it"):
        tune(device="cpu", out=path)


def test_cases_of_a_model_are_its_own_calls():
    model = create_model("vitrel_swin_n", num_classes=2)
    calls = calls_of(model, [64, (48, 60)], 2, CPU)
    assert model.training and {call.batch for call in calls} == {2}
    assert {call.grad for call in calls} == {False, True} and {call.entry for call in calls} == {"window_attention"}
    assert len({describe(call) for call in calls}) == len(calls) and any(any(call.shift) for call in calls)
    with pytest.raises(ValueError, match="no attention of vitrel"):
        calls_of(torch.nn.Conv2d(3, 4, 3), [8], 1, CPU)
    assert {call.entry for call in calls_of("vitrel_vit_s16_table", [32], 1, CPU)} == {"attention"}
    with pytest.raises(ValueError, match="does not say its image size"):
        calls_of(torch.nn.Conv2d(3, 4, 3), [], 1, CPU)


def test_the_command_tunes_a_model(tmp_path, capsys, monkeypatch):
    path = tmp_path / "p.json"
    command("tune").main(
        ["vitrel_vit_n8_table", "--size", "32", "--out", path, "--device", "cpu", "--model-args", "{depth: 1}"]
    )
    said = capsys.readouterr()
    assert "tokens with a prefix" in said.out and "set VITREL_PROFILE to this path" in said.err
    monkeypatch.setenv("VITREL_PROFILE", str(path))
    profile.forget()
    command("doctor").main([])
    assert "2 cases" in capsys.readouterr().out
    profile.forget()


@pytest.mark.slow
def test_a_graph_follows_the_profile(use):
    """In one graph, also for a size that has no profile, and in as many graphs as without one over changing sizes."""
    grids = [Grid(6, 6), Grid(5, 7), Grid(7, 9), Grid(8, 3)]
    call = table_call(6)

    def graphs():
        torch._dynamo.reset()
        seen = []

        def keep(graph, inputs):
            seen.append(any("scaled_dot" in str(node.target) for node in graph.graph.nodes))
            return graph.forward

        def attend(q, k, v, bias, grid):
            return attention(q, k, v, Terms(tables=(Table(bias=bias),)), grid)

        compiled = torch.compile(attend, backend=keep, fullgraph=True)
        with torch.no_grad():
            for grid in grids:
                q, k, v = torch.randn(3, 1, 2, grid.tokens, 8)
                bias = torch.randn(2, grid.classes())
                torch.testing.assert_close(compiled(q, k, v, bias, grid), attend(q, k, v, bias, grid))
        return seen

    plain = graphs()
    use(case(call, compiled=True, reference=1.0, sdpa=2.0))
    followed = graphs()
    assert len(followed) == len(plain) and all(plain)
    assert followed[0] is False and all(followed[1:])  # the graph for any size follows the rules
    exported = torch.export.export(Layer(), (*torch.randn(3, 1, 2, 36, 8), torch.randn(2, Grid(6, 6).classes())))
    assert "scaled_dot" in str(exported.graph)


class Layer(torch.nn.Module):
    def forward(self, q, k, v, bias):
        return attention(q, k, v, Terms(tables=(Table(bias=bias),)), Grid(6, 6))


def test_windows_are_followed_too(use):
    call = table_call(8, window=(4, 4), shift=(1, 2), heads=2)
    use(case(call, reference=1.0, window_kinds=3.0))
    with torch.no_grad():
        text = why(window_attention, torch.randn(1, 8, 8, 48), call.terms, call.grid, (4, 4), (1, 2), 2)
    assert "reference (fastest by the profile)" in text and "window_kinds: 3.00 times as slow" in text
