"""Whether a backend is right: its outputs and gradients on random tensors, held to the definition (vitrel.ops.reference).

The truth is computed in float64 on a small grid that is not square and that no window divides, with a shift. The error of a
tensor is the norm of the difference over the norm of the truth. Its limit is FLOORS (a rounding or two) or twice the error of
sdpa if that is more, and never more than CAPS; the largest difference over the largest element is held to CAPS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.capability import TABLE, refusal
from vitrel.ops.dispatch import attention, window_attention
from vitrel.ops.profile import Traits, traits
from vitrel.ops.reference import Call
from vitrel.position.terms import Table, Terms

FLOORS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2.4e-3}
CAPS = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
STD = 0.5  # of drawn tables; with values near zero, wrong indices would not show

Values = dict[str, Tensor]


def candidates(call: Call) -> list[str]:
    """Return the backends to measure for a call, sdpa first.

    The reference is slower than sdpa, and is one only where sdpa refuses. On a CPU Triton's interpreter and flex_attention,
    which runs uncompiled there, are for tests.
    """
    out = {"triton", "flex"} if call.device.type == "cpu" else set()
    names = [name for name in TABLE if name not in out and not refusal(name, call)]
    if "sdpa" in names:
        return ["sdpa", *(name for name in names if name not in ("sdpa", "reference"))]
    return sorted(names, key=lambda name: name != "reference")


class Problem(NamedTuple):
    """Random tensors of a call. inputs: q, k and v, or qkv. leaves: all tensors that get gradients, by name."""

    call: Call
    inputs: tuple[Tensor, ...]
    leaves: Values
    grad: Tensor  # of the output

    @classmethod
    def draw(cls, call: Call, seed: int = 0) -> "Problem":
        """Draw inputs of standard deviation 1 and tables of STD, in the shapes of the call. Only terms that require gradients
        in the call do so here.
        """
        generator = torch.Generator(call.device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=call.device)

        b, heads, width, grid = call.batch, call.heads, call.width, call.grid
        inputs: tuple[Tensor, ...]
        if call.window is not None:
            inputs = (normal(b, grid.h, grid.w, 3 * heads * width).to(call.dtype),)
            grad = normal(b, grid.h, grid.w, heads * width).to(call.dtype)
        else:  # as a linear layer leaves them: [B, N, 3, H, D], seen as [B, H, N, D]
            q, k, v = normal(b, grid.tokens, 3, heads, width).to(call.dtype).permute(2, 0, 3, 1, 4)
            inputs = (q[:, :, -call.queries :], k, v)
            grad = normal(b, call.queries, heads, width).to(call.dtype).transpose(1, 2)
        call = call._replace(terms=_drawn(call, normal))
        return cls(call, inputs, {}, grad)._with_leaves()

    def double(self) -> "Problem":
        """Return the same numbers in float64."""
        terms = _mapped(self.call.terms, lambda x: x.detach().double().requires_grad_(x.requires_grad))
        inputs = tuple(x.detach().double() for x in self.inputs)
        call = self.call._replace(terms=terms, dtype=torch.float64)
        return Problem(call, inputs, {}, self.grad.double())._with_leaves()

    def output(self, backend: str) -> Tensor:
        """Compute the call by a backend."""
        call = self.call
        if call.window is None:
            q, k, v = self.inputs
            return attention(q, k, v, call.terms, call.grid, call.mask, 0.0, backend)
        return window_attention(self.inputs[0], call.terms, call.grid, call.window, call.shift, call.heads, 0.0, backend)

    def runner(self, backend: str, function: Callable[[str], Tensor] | None = None) -> Callable[[], Values]:
        """Return run(): the output of a backend and, in training, gradients by name."""
        function = self.output if function is None else function

        def run() -> Values:
            with torch.set_grad_enabled(self.call.grad):
                out = function(backend)
            if not self.call.grad:
                return {"output": out}
            given = torch.autograd.grad(out, list(self.leaves.values()), self.grad, allow_unused=True)
            pairs = zip(self.leaves.items(), given, strict=True)
            return {"output": out.detach()} | {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}

        return run

    def _with_leaves(self) -> "Problem":
        if not self.call.grad:
            return self
        inputs = tuple(x.requires_grad_() for x in (y.detach() for y in self.inputs))
        named: Values = {}
        _mapped(self.call.terms, lambda x: named.setdefault(f"term {len(named)}", x))
        names = ("qkv",) if self.call.window is not None else ("q", "k", "v")
        learned = {name: x for name, x in named.items() if x.requires_grad}
        return self._replace(inputs=inputs, leaves=dict(zip(names, inputs, strict=True)) | learned)


class Gate:
    """The check of backends on small, hard problems, which is made once for calls that differ in sizes only."""

    def __init__(self) -> None:
        self._found: dict[tuple[Traits, str], str] = {}
        self._problems: dict[Traits, tuple[Problem, Values, float]] = {}

    def check(self, call: Call, name: str) -> str:
        """Return what is wrong with a backend for calls like this one, "" if nothing is.

        Twice the error of sdpa, or where it does not serve the call, of the reference in this dtype, is allowed.
        """
        hard = hard_call(call)._replace(compiled=False)
        key = traits(hard)
        if (key, name) in self._found:
            return self._found[key, name]
        if refusal(name, hard):
            return ""
        if key not in self._problems:
            problem = Problem.draw(hard, seed=1)
            truth = problem.double().runner("reference")()
            yardstick = max(errors(problem.runner(candidates(hard)[0])(), truth).values())
            self._problems[key] = problem, truth, yardstick
        problem, truth, yardstick = self._problems[key]
        limit = min(CAPS[hard.dtype], max(FLOORS[hard.dtype], 2 * yardstick))
        text = compare(problem.runner(name)(), truth, limit, CAPS[hard.dtype])
        self._found[key, name] = f"on a grid of {hard.grid.h}x{hard.grid.w}: {text}" if text else ""
        return self._found[key, name]


def hard_call(call: Call) -> Call:
    """Return a small call for the same kernels: two images, not square, divided by no window, shifted."""
    heads = min(call.heads, 3)
    if call.window is None:
        grid = Grid(9, 21, call.grid.prefix)
        queries = grid.tokens if call.queries == call.grid.tokens else min(call.queries, grid.tokens - 1)
        return call._replace(grid=grid, batch=2, heads=heads, queries=queries, mask=None)
    h, w = call.window
    grid = Grid(2 * h + 3, w + 2)
    shift = min(h - 1, max(1, h // 2 - 1)), min(w - 1, max(1, w // 2))
    return call._replace(grid=grid, batch=2, heads=heads, queries=grid.tokens, shift=shift)


def errors(values: Values, truth: Values) -> dict[str, float]:
    """Return the error of each tensor: the norm of the difference over the norm of the truth."""
    smallest = torch.finfo(torch.float32).tiny
    return {
        name: ((values[name].double() - x.double()).norm() / x.double().norm().clamp(min=smallest)).item()
        for name, x in truth.items()
    }


def compare(values: Values, truth: Values, limit: float, cap: float | None = None) -> str:
    """Return what is wrong with the tensors of a backend, "" if nothing is.

    limit: of the error of each tensor. cap: of the largest difference over the largest element; None: `limit`.
    """
    wrong = []
    for name, error in errors(values, truth).items():
        difference, largest = (values[name].double() - truth[name].double()).abs().max(), truth[name].abs().max().double()
        what = name if name == "output" else f"gradient of {name}"
        if not error <= limit:
            wrong.append(f"error of {what} {error:.1e} (limit {limit:.1e})")
        elif not difference <= (limit if cap is None else cap) * largest.clamp(min=torch.finfo(torch.float32).tiny):
            wrong.append(f"largest error of {what} {difference / largest:.1e}")
    return ", ".join(wrong[:4])


def _drawn(call: Call, normal: Callable[..., Tensor]) -> Terms:
    """Random terms of the structure of a call's, on its grid, with its number of heads."""
    terms, grid = call.terms, call.grid if call.window is None else Grid(*call.window)

    def like(x: Tensor | None, *size: int, std: float = STD) -> Tensor | None:
        if x is None:
            return None
        heads = 1 if x.dim() == 3 and x.shape[0] == 1 else call.heads
        return (normal(heads, *size) * std).to(x.dtype).requires_grad_(call.grad and x.requires_grad)

    def rotations(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...] | None:
        if pair is None:
            return None
        angle = normal(1 if pair[0].shape[0] == 1 else call.heads, grid.tokens, call.width // 2)
        grad = call.grad and pair[0].requires_grad
        return tuple(f(angle).to(x.dtype).requires_grad_(grad) for f, x in zip((torch.cos, torch.sin), pair, strict=True))

    tables = []
    for table in terms.tables:
        rows, width = grid.classes(table.axis), call.width
        gated: Any = None
        if table.gated is not None:
            gates, weights = table.gated
            gated = like(gates, gates.shape[1], width), like(weights, rows, gates.shape[1])
        query, key, value = (like(part, rows, width) for part in (table.query, table.key, table.value))
        tables.append(Table(table.axis, like(table.bias, rows), query, key, value, gated))
    temperature = None if terms.temperature is None else terms.temperature.detach().to(call.device)
    return terms._replace(
        tokens=None, rotary=rotations(terms.rotary), key_rotary=rotations(terms.key_rotary), temperature=temperature,
        query_bias=like(terms.query_bias, call.width), tables=tuple(tables),
    )  # fmt: skip


def _mapped(terms: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The terms with a function applied to every tensor, in a fixed order."""
    if isinstance(terms, Tensor):
        return function(terms)
    if isinstance(terms, tuple):
        parts = [_mapped(part, function) for part in terms]
        return terms._make(parts) if hasattr(terms, "_make") else tuple(parts)
    return terms
