"""Shares of a step by kind of work: every operator under its own name, forward and backward."""

import functools
import time

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.profiler_util import FunctionEvent

from helpers.variants import small_model
from helpers.workers import Here
from tools.benchmark import shares
from tools.benchmark.engine import Engine
from tools.benchmark.samples import Samples, machine
from tools.benchmark.shares import DISPATCH, KINDS, RESIDUAL, profile_step
from tools.benchmark.tables import share_page, write
from vitrel.cpu.optimize import optimize
from vitrel.ops import sdpa, use_backend
from vitrel.ops.dispatch import chosen

CPU = torch.device("cpu")
SWIN = dict(img_size=32, patch_size=2, embed_dim=24, depths=(2, 1), num_heads=(1, 2), window_size=4, num_classes=3)
VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3)


class Long(nn.Module):
    """What `inner` computes, after 150 operators."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.in_features = inner, getattr(inner, "in_features", None)

    def forward(self, x, *rest):
        y = x.flatten()[0]
        for _ in range(150):
            y = y.cos()
        return self.inner(x, *rest) + 0 * y


def swin():
    return small_model("vitrel_swin_n", **SWIN)


@pytest.fixture
def counted(monkeypatch):
    """Every operator takes a microsecond: what is found does not depend on the machine."""
    monkeypatch.setattr(FunctionEvent, "self_cpu_time_total", property(lambda event: 1.0))


def made(model, training=False, size=32):
    """Microseconds of every kind in one step, after one to warm up."""
    model.train(training)
    image, target = torch.randn(2, 3, size, size), torch.zeros(2, dtype=torch.long)

    def step():
        with torch.set_grad_enabled(training):
            loss = F.cross_entropy(model(image), target)
        if training:
            loss.backward()

    step()
    model.zero_grad()
    return {kind: round(ms * 1e3) for kind, ms in profile_step(step, model, CPU).items()}


@functools.cache
def unchanged_swin():
    return made(swin(), training=True)


def more(found, before):
    """The kinds of which there is more, but for what every operator costs beside its work."""
    return {kind: found[kind] - before[kind] for kind in KINDS if kind != DISPATCH and found[kind] != before[kind]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("patch_embed.norm", "patch embedding"), ("layers.0.blocks.1.norm2", "norm"), ("layers.0.blocks.0.attn.qkv", "qkv"),
        ("layers.1.blocks.0.attn.proj", "proj"), ("layers.0.blocks.1.drop_path1", "residual"),
        ("layers.0.blocks.0.mlp.fc1", "fc1"), ("layers.0.blocks.0.mlp.act", "GELU"), ("layers.1.blocks.0.mlp.fc2", "fc2"),
        ("layers.1.downsample", "merging"), ("layers.1.downsample.norm", "merging"), ("norm", "norm"), ("head.fc", "head"),
    ],
)  # fmt: skip
def test_work_is_found_in_its_module(counted, name, kind):
    """That of the forward pass, and its gradient."""
    model, before = swin(), unchanged_swin()
    model.set_submodule(name, Long(model.get_submodule(name)))
    found = more(made(model, training=True), before)
    assert found.pop(kind) >= 2 * 150
    assert set(found) <= {RESIDUAL} and found.get(RESIDUAL, 0) < 5  # the gradients of x meet


@pytest.mark.parametrize("training", [False, True])
def test_inside_attention_the_operators_tell(counted, monkeypatch, training):
    """The same operator is bias where it looks up a table, layout where it moves tokens."""
    gather, select = sdpa.gather_bias, torch.Tensor.index_select

    def long_gather(bias, index):
        out = gather(bias, index)  # [H, N, N]
        for _ in range(10):
            out = out.index_select(0, torch.arange(len(out)))
        return out

    def long_select(x, dim, index):
        for _ in range(10 if x.dim() >= 4 else 0):  # q, k, v or the output; here the windows cut the grid without padding
            x = select(x, dim, index)
        return select(x, dim, index)

    monkeypatch.setitem(chosen, "auto", "sdpa")  # the same in evaluation and in training
    before = made(swin(), training)
    with monkeypatch.context() as patch:
        patch.setattr(sdpa, "gather_bias", long_gather)
        found = more(made(swin(), training), before)
        assert list(found) == ["bias"] and found["bias"] >= 3 * 10 * (2 + training)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", long_select)
        found = more(made(swin(), training), before)
        assert list(found) == ["layout"] and found["layout"] >= 2 * 3 * 10 * (1 + training)
    with monkeypatch.context() as patch:  # a view costs dispatch, its gradient may be a copy
        patch.setattr(torch.Tensor, "index_select", lambda x, dim, index: select(x[None].squeeze(0), dim, index))
        found = more(made(swin(), training), before)
        assert set(found) <= {"layout"} and found.get("layout", 0) >= 2 * 3 * 2 * training


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_everything_has_its_place(counted, training):
    """In our models and timm's: nothing is left over, and no hook stays."""
    theirs = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)
    for model in (swin(), small_model("vitrel_vit_n8_table", **VIT), theirs):
        found = made(model, training)
        assert list(found) == list(KINDS) and found["unattributed"] < 0.03 * sum(found.values())
        absent = {kind for kind, count in found.items() if count == 0} - {"unattributed"}
        assert absent == (set() if hasattr(model, "layers") else {"merging"})
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("training", [False, True])
def test_long_attention_by_rows(counted, training):
    """An autograd.Function is no operator: what runs in it is bias or attention, in its gradient too."""
    model = small_model("vitrel_vit_n8_table", **VIT)
    with use_backend("bias_by_row"):
        found = made(model, training)
    plain = made(model, training)
    assert found["attention"] > plain["attention"] > 0 and found["bias"] > 2 * 4 * (1 + training)  # a copy for each row
    assert found["unattributed"] < 0.03 * sum(found.values())


@pytest.mark.parametrize("name", ["vitrel_swin_n", "vitrel_vit_n8_table"])
def test_optimized_models(counted, name):
    """oneDNN's products are counted where PyTorch's were."""
    args = SWIN if "swin" in name else VIT
    model = small_model(name, **args)
    plain, found = made(model), made(optimize(model, linears="onednn"))
    assert all(found[kind] > 0 for kind in ("qkv", "proj", "fc1", "fc2", "attention", "norm", "residual", "GELU"))
    assert found["unattributed"] == plain["unattributed"] and found["bias"] > 0


@pytest.mark.slow
def test_the_sum_is_the_step():
    model, took = swin().eval(), []

    def step():
        start = time.perf_counter()
        with torch.inference_mode():
            model(torch.randn(8, 3, 64, 64))
        took.append((time.perf_counter() - start) * 1e3)

    step()
    assert sum(profile_step(step, model, CPU).values()) == pytest.approx(took[-1], rel=0.1)


def test_rows_and_table(tmp_path):
    ours = "vitrel_swin_n", SWIN | {"depths": (1, 1)}
    profiled = shares._QUICK_PROFILED[0]._replace(ours=ours, peer=("no_model", {}))
    found = machine(CPU, "abc")
    engine = Engine(Samples(tmp_path / "samples.jsonl", found), CPU, Here)
    engine.samples.add("machine", **found)
    for mode in shares.MODES:
        engine.measure(shares.share_case(profiled, mode, quick=True))
    rows = engine.samples.rows
    done = [row for row in rows if row["kind"] == "shares"]
    failed = {(row["contender"], row["mode"]) for row in rows if row["kind"] == "failed"}
    assert {("timm, eager", "inference"), ("timm, eager", "training")} == failed and len(done) == 3
    assert {len(times) for row in done for times in (*row["ms"].values(), row["not_profiled_ms"])} == {2}
    write(share_page, "Where the time goes", rows, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| % of a step | Swin-N 64, batch 2: ours, eager |" in text and "- commit: abc" in text
    assert "timm, eager: RuntimeError: Unknown model (no_model)" in text
    lines = [line.split("|")[2:-1] for line in text.split("## Training")[1].splitlines() if line.startswith("| ")][2:-2]
    assert len(lines) == len(KINDS) and sum(float(line[0]) for line in lines) == pytest.approx(100, abs=1)
    count = len(rows)
    engine.measure(shares.share_case(profiled, "training", quick=True))
    assert len(engine.samples.rows) == count


def test_every_profile_has_a_case():
    names = [case.name for case in shares.share_cases(False, False)]
    assert len(names) == 6 and len(set(names)) == 3 and "Swin-T 224, batch 8" in names
