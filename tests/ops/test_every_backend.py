"""What holds for every backend at both entries: which tensors get derivatives, biases out of range, batches of no image.

A backend agrees with the reference, or refuses. The Triton kernels are run by test_triton_window.py, in Triton's interpreter.
"""

import os

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import vmap

from helpers import each
from helpers.variants import IN_ATTENTION, make, perturbed, tensors
from vitrel import Grid, Table, Terms
from vitrel.ops import BACKENDS, attention, window_attention
from vitrel.ops.reference import needs_gradient

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if INTERPRETED else [name for name in BACKENDS if name != "triton"]
ENTRIES = ["attention", "window_attention"]
HALVES = [(torch.float16, False)] + [(torch.float16, True), (torch.bfloat16, False)] * (not INTERPRETED)  # with autocast?
GRID = Grid(3, 4)  # also the window
HEADS, D, IMAGE = (1, 16, Grid(4, 4)) if INTERPRETED else (2, 4, Grid(5, 7))

IN_TABLES = ["bias", "query", "key", "value", "gates", "gated rows"]
OUTSIDE = ["query_bias", "temperature", "cosines", "sines", "cosines of keys", "sines of keys"]


def served(run):
    """The result of run(), None if the backend refuses."""
    try:
        return run()
    except ValueError as error:
        if "refuses" not in str(error):
            raise
        return None


def prefixed(backend):
    return lambda text: f"{backend}: {text}"


def draw(*size):
    return torch.randn(size) * 0.5


def leaf_of(name, axis):
    """A value for the tensor `name` of Terms or Table."""
    rows = GRID.classes(axis)
    if name in OUTSIDE[2:]:
        return draw(HEADS, GRID.tokens, D // 2)
    sizes = {"bias": (HEADS, rows), "gates": (HEADS, 3, D), "gated rows": (HEADS, rows, 3), "query_bias": (HEADS, D)}
    return draw(*sizes.get(name, (HEADS, rows, D))) if name != "temperature" else torch.tensor(0.8)


def terms_with(name, axis, leaf):
    """Terms that contain `leaf`; those outside of tables come with a bias table, which some backends need."""
    if name in ("gates", "gated rows"):
        others = torch.ones(HEADS, GRID.classes(axis), 3), torch.ones(HEADS, 3, D)
        table = Table(axis, gated=(leaf, others[0]) if name == "gates" else (others[1], leaf))
        return Terms(tables=(table,))
    if name in IN_TABLES:
        return Terms(tables=(Table(axis, **{name: leaf}),))
    terms = Terms(tables=(Table(axis, bias=torch.linspace(-1, 1, HEADS * GRID.classes(axis)).view(HEADS, -1)),))
    if name in OUTSIDE[:2]:
        return terms._replace(**{name: leaf})
    other = torch.ones_like(leaf)
    pair = (leaf, other) if name.startswith("cos") else (other, leaf)
    plain = torch.ones_like(leaf), torch.zeros_like(leaf)
    return terms._replace(rotary=plain, key_rotary=pair) if name.endswith("keys") else terms._replace(rotary=pair)


def inputs_of(entry, batch=1 if INTERPRETED else 2, dtype=torch.float32):
    if entry == "attention":
        return {name: torch.randn(batch, HEADS, GRID.tokens, D).to(dtype) for name in "qkv"}
    return {"qkv": torch.randn(batch, *IMAGE[:2], 3 * HEADS * D).to(dtype)}


def compute(backend, inputs, terms, mask=None):
    if "qkv" in inputs:
        return window_attention(inputs["qkv"], terms, IMAGE, GRID[:2], (1, 2), HEADS, backend=backend)
    return attention(*inputs.values(), terms, GRID, mask, backend=backend)


def runner(entry, name, axis):
    """Return run(backend, leaf) and a leaf: the input, the mask or the tensor of the terms with this name."""
    inputs = inputs_of(entry)
    if name in inputs:
        terms = terms_with("bias", axis, leaf_of("bias", axis))
        return lambda backend, leaf: compute(backend, inputs | {name: leaf}, terms), inputs[name]
    if name == "mask":
        terms = terms_with("bias", axis, leaf_of("bias", axis))
        return lambda backend, leaf: compute(backend, inputs, terms, leaf), draw(GRID.tokens, GRID.tokens)
    return lambda backend, leaf: compute(backend, inputs, terms_with(name, axis, leaf)), leaf_of(name, axis)


CASES = [("attention", name, "h") for name in ("q", "k", "v", "mask")] + [("window_attention", "qkv", "h")]
CASES += [(entry, name, "h") for entry in ENTRIES for name in (*IN_TABLES, *OUTSIDE)]
CASES += [(entry, name, "hw") for entry in ENTRIES for name in IN_TABLES if not INTERPRETED]


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.slow
@each(("entry", "name", "axis"), CASES)
def test_one_tensor_alone_requires_a_gradient(entry, name, axis):
    """Its gradient is the reference's, and no backend refuses for a gradient."""
    run, leaf = runner(entry, name, axis)
    leaf.requires_grad_()
    weight = torch.randn(run("reference", leaf).shape)
    (expected,) = torch.autograd.grad((run("reference", leaf) * weight).sum(), leaf)
    assert expected.any()
    for backend in NAMES:
        with torch.no_grad():
            alone = served(lambda backend=backend: run(backend, leaf))
        out = served(lambda backend=backend: run(backend, leaf))
        assert (out is None) == (alone is None), backend
        if out is not None:
            assert out.requires_grad, f"{backend} drops the gradient"
            assert_near(torch.autograd.grad((out * weight).sum(), leaf)[0], expected)


@each(("entry", "name", "axis"), CASES)
def test_one_tensor_alone_in_forward_mode(entry, name, axis):
    run, leaf = runner(entry, name, axis)
    tangent, found = torch.randn_like(leaf), {}
    with forward_ad.dual_level():
        for backend in ["reference", *NAMES]:
            out = served(lambda backend=backend: run(backend, forward_ad.make_dual(leaf, tangent)))
            if out is not None:
                found[backend] = forward_ad.unpack_dual(out).tangent
                assert found[backend] is not None, f"{backend} drops the tangent"
                assert_near(found[backend], found["reference"])
    assert INTERPRETED or len(found) > 1 or name == "value"


@each(("entry", "name", "axis"), CASES)
def test_one_tensor_alone_is_mapped(entry, name, axis):
    """torch.func.vmap over it, as over the parameters of an ensemble: values and gradients of a loop."""
    run, leaf = runner(entry, name, axis)
    stacked = torch.stack((leaf, -0.5 * leaf)).requires_grad_()
    expected = torch.stack([run("reference", x) for x in stacked])
    weight, count = torch.randn(expected.shape), 0
    (gradient,) = torch.autograd.grad((expected * weight).sum(), stacked)
    for backend in NAMES:
        out = served(lambda backend=backend: vmap(lambda x: run(backend, x))(stacked))
        if out is not None:
            count += 1
            assert_near(out, expected)
            assert_near(torch.autograd.grad((out * weight).sum(), stacked)[0], gradient)
    assert INTERPRETED or count > 1 or name == "value"


def test_tokens_need_no_derivative_in_attention():
    """They are added before it. All other tensors are looked at."""
    leaves = [torch.zeros(1, requires_grad=True) for _ in range(14)]
    table = Table("hw", *leaves[:4], (leaves[4], leaves[5]))
    terms = Terms(leaves[6], (leaves[7], leaves[8]), (leaves[9], leaves[10]), leaves[11], 1.0, leaves[12], (table,))
    assert {*map(id, terms.in_attention)} == {*map(id, tensors(terms))} - {id(terms.tokens)}
    assert all(needs_gradient(leaf) for leaf in terms.in_attention) and not needs_gradient(None, torch.zeros(1))
    with torch.no_grad():
        assert not needs_gradient(*leaves)


@pytest.mark.slow(seconds=4)
@pytest.mark.skipif(INTERPRETED, reason="the same for every backend")
@pytest.mark.parametrize("entry", ENTRIES)
def test_terms_alone_in_a_compiled_graph(entry):
    inputs, bias = inputs_of(entry), leaf_of("bias", "hw").requires_grad_()
    weight = torch.randn(compute("reference", inputs, Terms()).shape)

    def gradient(run):
        return torch.autograd.grad((run(bias) * weight).sum(), bias)[0]

    expected = gradient(lambda bias: compute("reference", inputs, Terms(tables=(Table(bias=bias),))))
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(bias):
        return compute("auto", inputs, Terms(tables=(Table(bias=bias),)))

    assert_near(gradient(run), expected)


def far(dtype):
    """A bias out of the range of `dtype`, within that of float32."""
    return 1e5 if dtype == torch.float16 else torch.finfo(torch.float32).max


RANGES = ["one bonus", "bonuses", "penalties", "penalties and hidden", "penalties of two axes", "penalties and content"]


def out_of_range(kind, size):
    """A bias in float32 and the terms made of it."""
    axis = "hw" if kind in ("one bonus", "bonuses") else "h"
    bias = torch.zeros(HEADS, GRID.classes(axis))
    if kind == "one bonus":
        bias[:, GRID.classes("hw") // 2 + 1] = size  # the left neighbor, if there is one
    elif kind == "bonuses":
        bias += size
    else:
        bias -= size * (0.45 if "two axes" in kind else 1)
    if kind == "penalties and hidden":
        bias[:, ::2] = -torch.inf
        bias[:, GRID.h - 1] = -size  # of the own row
    bias.requires_grad_()
    tables = [Table(axis, bias=bias)]
    if kind == "penalties of two axes":
        tables.append(Table("w", bias=torch.full((HEADS, GRID.classes("w")), -0.45 * size)))
    if kind == "penalties and content":
        with torch.no_grad():
            bias[:, 1::2] = 0.0
        tables[0] = tables[0]._replace(query=draw(HEADS, GRID.classes("h"), D))
    return bias, Terms(tables=tuple(tables))


@pytest.mark.slow
@each(("dtype", "cast"), HALVES)
@each("kind", ["one bonus", "penalties and hidden"] if INTERPRETED else RANGES)
@each("entry", ENTRIES)
def test_finite_biases_out_of_range_stay_finite(entry, kind, dtype, cast):
    """Rounded to half precision they would be infinite: NaN for a bonus, and a penalty of all keys would hide them."""
    bias, terms = out_of_range(kind, far(dtype))
    inputs = inputs_of(entry, 1, torch.float32 if cast else dtype)
    leaves = [x.requires_grad_() for x in inputs.values()]
    exact = compute("reference", {name: x.float() for name, x in inputs.items()}, terms)
    weight, count = torch.randn(exact.shape), 0
    expected = torch.autograd.grad((exact * weight).sum(), leaves)
    for backend in NAMES:
        with torch.autocast("cpu", dtype, enabled=cast):
            out = served(lambda backend=backend: compute(backend, inputs, terms))
        if out is None:
            continue
        count += 1
        torch.testing.assert_close(out.float(), exact, atol=0.06, rtol=0.06, msg=prefixed(backend))
        *gradients, of_bias = torch.autograd.grad((out.float() * weight).sum(), [*leaves, bias])
        assert of_bias.isfinite().all()
        for a, b in zip(gradients, expected, strict=True):
            assert a.isfinite().all()
            if dtype == torch.float16:  # at 1e38 the log-sum-exp of flash attention, in float32, has no digits left
                torch.testing.assert_close(a.float(), b.float(), atol=0.1, rtol=0.1, msg=prefixed(backend))
    assert INTERPRETED or count > 1


@each("dtype", [torch.float16, torch.float32], ids=str)
@each("backend", ["sdpa", "reference"])
def test_masks_and_biases_of_a_wider_type(backend, dtype):
    """In float64, at its limit: finite, and no pair is hidden."""
    k, v = (torch.randn(1, HEADS, GRID.tokens, D).to(dtype) for _ in range(2))
    lowest = torch.full((1,), torch.finfo(torch.float64).min, dtype=torch.float64)
    biased = Terms(tables=(Table(bias=lowest.expand(HEADS, GRID.classes())),))
    for terms, mask in ((Terms(), lowest.expand(12, 12)), (biased, None)):
        out = attention(torch.zeros_like(k), k, v, terms, GRID, mask, backend=backend)
        assert out.dtype == dtype
        torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(v), atol=2e-3, rtol=2e-3)


@each("key", ["table", "factorized", "rope_mixed"] if INTERPRETED else IN_ATTENTION)
@each("entry", ENTRIES)
def test_a_batch_of_no_image_gives_gradients_of_zero(entry, key):
    """As the sum over an empty batch: not None, which an optimizer or a distributed reduction would take otherwise."""
    encoding = perturbed(make(key, GRID, HEADS, D))
    inputs = inputs_of(entry, batch=0)
    leaves = [*(x.requires_grad_() for x in inputs.values()), *encoding.parameters()]
    for backend in NAMES:
        out = served(lambda backend=backend: compute(backend, inputs, encoding(GRID)))
        if out is not None:
            assert out.shape == compute("reference", inputs, encoding(GRID)).shape and not out.numel()
            for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves, allow_unused=True), strict=True):
                assert gradient is not None and torch.equal(gradient, torch.zeros_like(leaf)), backend
        with torch.no_grad():
            served(lambda backend=backend: compute(backend, inputs, encoding(GRID)))
