"""The kernels as operators of PyTorch: behind the entries, in models, compiled, checkpointed, under autocast and DDP.

Run in Triton's interpreter, in a process of its own (see test_triton_window.py), natively where there is a GPU.
"""

import os
from functools import partial

import pytest
import timm
import torch

from helpers import each
from helpers.variants import IN_ATTENTION, VARIANTS, make, perturbed, refusal, spread
from vitrel import Grid, Table, Terms
from vitrel.ops import attention, auto, sdpa_faults, use_backend, why, window_attention
from vitrel.ops.backends import triton_backend

pytest.importorskip("triton")

from vitrel.ops.backends import triton_global, triton_window

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: run in the interpreter by test_triton_window.py"
)
HALF = torch.float16 if INTERPRETED else torch.bfloat16
SERVED = {  # keys that the kernels take under global attention; the others have content tables or no bias
    "table", "levit", "factorized", "clipped", "t5", "cpb", "alibi", "log_decay", "fire", "lookhere",
}  # fmt: skip
MODELS = {
    "swin table": ("vitrel_swin_n", dict(depths=(2, 1), num_heads=(1, 2))),
    "swin rope_mixed": ("vitrel_swin_n_rope_mixed", dict(depths=(2,), num_heads=(1,))),
    "swin v2": ("vitrel_swinv2_n", dict(depths=(2,), num_heads=(1,))),
    "vit table": ("vitrel_vit_n8_table", dict(depth=1)),
    "vit rope_mixed+table": ("vitrel_vit_n8_rope_mixed_table", dict(depth=1)),
}
WAYS = {"table", "factorized", "lookhere"}  # to call the kernels: one bias, a sum of two, one that hides keys
ANOTHER_CALL = {"per_head", "learnable"}  # options that change which tensors are given to the kernels


def heads_of(key):
    return 4 if key == "lookhere" else 2  # one for each of its directions


def terms_of(key, grid, **options):
    return perturbed(make(key, Grid(3, 4, grid.prefix), heads=4, dim=16, dtype=torch.float32, **options).to(DEVICE))(grid)


def check(run, leaves):
    """Compare the kernels' output run(backend), and the gradients of the leaves, with those of the reference."""
    found = []
    for backend in ("triton", "reference"):
        out = run(backend)
        weight = torch.cos(torch.arange(out.numel(), device=DEVICE)).view(out.shape)
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@runs
@each(("key", "options", "prefix"), spread([v for v in VARIANTS if v[0] in IN_ATTENTION], [0, 2]))
def test_every_encoding_is_right_or_refused(key, options, prefix):
    grid, heads = Grid(3, 5, prefix) if INTERPRETED else Grid(4, 5, prefix), heads_of(key)
    encoding = perturbed(make(key, Grid(3, 4, prefix), heads, dim=16, **options).to(DEVICE))
    reason = refusal("triton", encoding(grid), grid, heads, 16, dtype=torch.float32, device=torch.device(DEVICE))
    assert bool(reason) == (key not in SERVED), reason
    if reason or (INTERPRETED and (key not in WAYS or (options and not options.keys() & ANOTHER_CALL))):
        return
    queries = 2 * grid.w if prefix else grid.tokens  # all of them, or the last rows of a grid with prefix tokens
    q, k, v = (torch.randn(1, heads, grid.tokens, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    check(
        lambda backend: attention(q[:, :, -queries:], k, v, encoding(grid), grid, backend=backend),
        [q, k, v, *encoding.parameters()],
    )


@runs
@each("key", ["table", "rope_mixed"] + ["factorized", "levit", "lookhere"] * (not INTERPRETED))
def test_windows(key):
    heads, batch = heads_of(key), 2 if key == "table" else 1
    encoding = perturbed(make(key, Grid(3, 4), heads, dim=16).to(DEVICE))
    qkv = torch.randn(batch, 5, 7, 3 * heads * 16, device=DEVICE, requires_grad=True)
    check(
        lambda backend: window_attention(qkv, encoding(Grid(3, 4)), Grid(5, 7), (3, 4), (1, 2), heads, backend=backend),
        [qkv, *encoding.parameters()],
    )


@runs
@each("entry", ["attention", "window_attention"])
def test_scales_and_temperatures(entry):
    """A number, and a 0-d tensor with a gradient."""
    grid = Grid(3, 4)
    temperature = torch.tensor(0.7, device=DEVICE, requires_grad=True)
    for scale, leaves in (({"scale": 0.7}, []), ({"temperature": temperature}, [temperature])):
        terms = Terms(**scale, tables=(Table("w", bias=torch.randn(4, 7, device=DEVICE)),))
        x = torch.randn(1, 3, 4, 3 * 64, device=DEVICE, requires_grad=True)
        q, k, v = x.view(1, 12, 3, 4, 16).permute(2, 0, 3, 1, 4)

        def run(backend, terms=terms, x=x, q=q, k=k, v=v):
            if entry == "attention":
                return attention(q, k, v, terms, grid, backend=backend)
            return window_attention(x, terms, grid, (3, 4), (0, 0), 4, backend=backend)

        check(run, [x, *leaves])


@runs
def test_operators_are_registered_as_pytorch_wants():
    from vitrel.ops.backends import triton_ops

    bias = (torch.randn(1, 15, device=DEVICE) * 0.5).requires_grad_()
    angle = torch.randn(1, 6, 8, device=DEVICE)
    qkv = torch.randn(1, 2, 5, 3 * 16, device=DEVICE, requires_grad=True)
    turn = angle.cos().requires_grad_(), angle.sin().requires_grad_()
    checks = "test_schema", "test_autograd_registration", "test_faketensor"  # a compiled model is tested below
    torch.library.opcheck(triton_ops.window_op, (qkv, bias, *turn, (2, 3), (0, 1), 1, 0.25, True), test_utils=checks)
    table = (torch.randn(1, 255, device=DEVICE) * 0.5).requires_grad_()
    saving = qkv, table, None, None, (9, 8), (0, 0), 1, 0.25, True  # statistics
    torch.library.opcheck(triton_ops.window_op, saving, test_utils="test_faketensor")
    q, k, v = (torch.randn(1, 1, 6, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    torch.library.opcheck(triton_ops.biased_op, (q, k, v, bias, 2, 3, 0, 0.25))


@runs
def test_shared_keys():
    """Of one image for all, or of one head: expanded, never read beyond their end."""
    grid, bias = Grid(3, 5), torch.randn(2, 45, device=DEVICE)
    q, k, v = (torch.randn(2, 2, 15, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    terms = Terms(tables=(Table(bias=bias),))
    for x in ((q, k[:1], v[:1]), (q[:1], k, v), (q, k[:, :1], v[:, :1])):
        check(lambda backend, x=x: attention(*x, terms, grid, backend=backend), [q, k, v])


class Broken:
    """A kernel that Triton does not compile."""

    def __getitem__(self, grid):
        raise RuntimeError("PassManager::run failed")


@runs
@each(
    ("module", "kernel", "training_only"),
    [(triton_window, "_whole", True), (triton_window, "_forward", False), (triton_global, "_keys", True)],
)
def test_what_fails_to_run_is_not_chosen(module, kernel, training_only, monkeypatch):
    """Attention and its gradients come from another backend, with a warning; by name the kernels' error is raised."""
    rows = [row._replace(device="any", tokens=0) for row in auto.ROWS if row.backend in ("triton", "sdpa")]
    monkeypatch.setattr(auto, "ROWS", rows)
    monkeypatch.setattr(triton_backend, "_failures", {})
    monkeypatch.setattr(triton_backend, "_told", set())
    monkeypatch.setattr(module, kernel, Broken())
    terms = Terms(tables=(Table(bias=torch.randn(1, 35, device=DEVICE, requires_grad=True)),))
    if module is triton_window:
        x = torch.randn(1, 3, 4, 48, device=DEVICE, requires_grad=True)
        call = partial(window_attention, x, terms, Grid(3, 4), (3, 4), (0, 0), 1)
    else:
        x = torch.randn(1, 1, 12, 16, device=DEVICE, requires_grad=True)
        call = partial(attention, x, x, x, terms, Grid(3, 4))
    leaves = [x, terms.tables[0].bias]
    with pytest.warns(RuntimeWarning, match=r"3x4.* in float32: Triton .* fails to run its kernels: RuntimeError: PassManager"):
        check(lambda backend: call(backend={"triton": "auto"}.get(backend, backend)), leaves)
    with torch.no_grad():
        assert (": triton (auto)" in why(call)) == training_only
    with pytest.raises(RuntimeError, match="PassManager::run failed"):
        torch.autograd.grad(call(backend="triton").sum(), leaves)


@runs
def test_other_derivatives_are_refused():
    """A second derivative, and torch.func, where a forward derivative would be zero without a word."""
    terms = Terms(tables=(Table(bias=torch.randn(2, 35, device=DEVICE)),))
    q = torch.randn(1, 2, 12, 16, device=DEVICE, requires_grad=True)
    qkv = torch.randn(1, 3, 4, 96, device=DEVICE, requires_grad=True)
    for run, x in (
        (lambda x: attention(x, x, x, terms, Grid(3, 4), backend="triton"), q),
        (lambda x: window_attention(x, terms, Grid(3, 4), (3, 4), (0, 0), 2, backend="triton"), qkv),
    ):
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"no autograd formula|differentiate twice"):
            first.sum().backward()
        for transformed in (
            lambda run=run, x=x: torch.func.jvp(run, (x,), (x,)),
            lambda run=run, x=x: torch.func.grad(lambda x: run(x).sum())(x),
        ):
            with pytest.raises(ValueError, match="no transforms of torch"):
                transformed()


def run_model(model, image):
    model.zero_grad()
    out = model(image)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(first, second, tolerance=1e-4):
    for a, b in zip(first, second, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6


def small(name, **how):
    """A model in training and an image: 3x5 tokens of a ViT; 5x7 and then 3x4 of a Swin, in windows of 4x4."""
    torch.manual_seed(0)
    model, options = MODELS[name]
    model = timm.create_model(model, num_classes=3, img_size=64, drop_path_rate=0.0, **options | how)
    size = (24, 40) if "vit" in name else (10, 14)
    return perturbed(model, 0.1).to(DEVICE).train(), torch.randn(1, 3, *size, device=DEVICE)


@runs
@each("name", ["swin v2", "vit rope_mixed+table"] if INTERPRETED else MODELS)
def test_models_train_through_them(name):
    model, image = small(name)
    plain = run_model(model, image)
    with use_backend("triton"):
        assert_close(run_model(model, image), plain)
        if name == "vit rope_mixed+table":  # statistics are saved when the forward pass is repeated
            model.set_grad_checkpointing()
            assert_close(run_model(model, image), plain)
        text = why(model, image)
    assert ": triton (given by name)" in text
    assert "reference (" not in text


@runs
def test_a_compiled_model_has_no_graph_break():
    model, image = small("swin table", num_heads=(1,), depths=(1 if INTERPRETED else 2,))
    plain = run_model(model, image)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with use_backend("triton"):
        assert_close(run_model(compiled, image), plain)


@runs
@each("name", ["vit table"] + ["swin table"] * (not INTERPRETED))
def test_autocast(name):
    model, image = small(name)
    plain = run_model(model, image)
    with use_backend("triton"), torch.autocast(DEVICE, HALF):
        assert "float16" in why(model, image)
        assert_close(run_model(model, image), plain, 0.05)


@runs
def test_a_fixed_bias_costs_no_gradient(monkeypatch):
    """ALiBi's rows are not learned: the kernel gets no tables in which it would add up their gradient."""
    from vitrel.ops.backends import triton_global

    added, run = [], triton_global._query_gradients
    monkeypatch.setattr(triton_global, "_query_gradients", lambda *given: added.append(run(*given)) or added[-1])
    for key, learned in (("alibi", False), ("table", True)):
        q, k, v = (torch.randn(1, 4, 12, 16, device=DEVICE, requires_grad=True) for _ in range(3))
        attention(q, k, v, terms_of(key, Grid(3, 4)), Grid(3, 4), backend="triton").sum().backward()
        assert (added[-1][1] is not None) == learned


@runs
def test_frozen_inputs_have_no_gradient():
    """A table trained alone, and qkv alone."""
    bias, qkv = torch.randn(2, 35, device=DEVICE), torch.randn(1, 3, 4, 96, device=DEVICE)
    for trained in (bias, qkv):
        trained.requires_grad_()
        window_attention(
            qkv, Terms(tables=(Table(bias=bias),)), Grid(3, 4), (3, 4), (0, 0), 2, backend="triton"
        ).sum().backward()
        assert trained.grad is not None
        assert (bias.grad is None) == (trained is qkv)
        trained.requires_grad_(False)
        trained.grad = None


def test_it_says_why_it_does_not_serve(monkeypatch):
    grid, on_cpu = Grid(3, 4), dict(dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "run on a GPU, not on cpu" in refusal("triton", Terms(), grid, **on_cpu)
    on_cpu["device"] = torch.device("cuda")
    bias = Terms(tables=(Table(bias=torch.zeros(1, 35)),))
    assert refusal("triton", bias, grid, width=16, **on_cpu) == ""
    for how, reason in (
        (dict(mask=torch.ones(12, 12)), "have no mask"),
        (dict(dropout_p=0.1), "use attn_drop_rate=0"),
        (dict(width=24), "head widths"),
        (dict(dtype=torch.float64), "not torch.float64"),
        (dict(queries=5), "nor its last whole rows of 4"),
        (dict(terms=Terms(tables=(Table("h", query=torch.zeros(1, 5, 16)),))), "no content tables"),
        (dict(terms=bias._replace(query_bias=torch.zeros(2, 16))), "bias tables only, no content tables and no query_bias"),
        (dict(terms=Terms()), "there is no bias table: plain scaled_dot_product_attention"),
    ):
        assert reason in refusal("triton", **dict(terms=bias, grid=grid, width=16) | on_cpu | how)
    assert refusal("triton", Terms(), grid, width=16, window=(3, 4), **on_cpu) == ""
    turing = sdpa_faults.Stack((7, 5), 0, torch.__version__)
    monkeypatch.setattr(sdpa_faults, "stack", lambda index: turing)
    assert "compute capability 8.0" in refusal("triton", bias, grid, width=16, **on_cpu)
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "a GPU of NVIDIA's" in refusal("triton", bias, grid, width=16, **on_cpu)
    monkeypatch.setattr(triton_backend, "_INSTALLED", False)
    assert refusal("triton", Terms(), grid, **on_cpu) == "Triton is not installed"
