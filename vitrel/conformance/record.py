"""A recorded forward pass of any model: the operands and logits of every attention, and position added to tokens.

The pass runs under a dispatch mode that sees PyTorch's own operators, so no class of any library is known or changed, and
attention is computed by its definition (a product, a softmax), not by a fused kernel. Three settings make position visible:

constant: the outputs of the linear layers that queries and keys are made of are replaced by the same rows for every token,
    and the products of queries and keys by zeros. What differs between tokens then is position: rotations are left in the
    operands, and biases and masks are the whole of the logits.
isolated: the softmax gives zeros, so no token sees another one.
plain: nothing is replaced.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from vitrel.common.modules import evaluating

_SOFTMAX = ("aten._softmax.default", "aten._safe_softmax.default", "aten.softmax.int")
_LINEAR = ("aten.addmm.default", "aten.mm.default", "aten.convolution.default", "aten.linear.default")
_PRODUCT = ("aten.bmm.default", "aten.baddbmm.default", "aten.matmul.default")
_ADD = ("aten.add.Tensor", "aten.add_.Tensor")


@dataclass
class Attention:
    """One softmax over tokens: leading dimensions are flattened, with the batch as the slowest of them."""

    where: str  # path of the module that calls it
    logits: Tensor  # [B*L, Q, K] input of the softmax; L: windows times heads
    product: int  # number of the product of queries and keys in the pass
    query: Tensor  # [B*L, Q, D] operand of the product
    key: Tensor  # [B*L, K, D]
    linears: frozenset[int]  # numbers of the linear layers that query and key are made of
    before: tuple[list[Tensor], list[Tensor]] = field(
        default_factory=lambda: ([], [])
    )  # what query and key may be rotated from


@dataclass
class Added:
    """A tensor that does not depend on the image, added to tokens before the first attention."""

    where: str
    tokens: Tensor  # what it is added to, [B, ..., C]
    position: Tensor  # as it was added


@dataclass
class Pass:
    """What one forward pass did, in its order."""

    attentions: list[Attention] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    output: Any = None


class Replace(NamedTuple):
    """What a pass replaces, by the numbers that a plain pass found."""

    products: frozenset[int] = frozenset()  # by zeros
    linears: frozenset[int] = frozenset()  # by rows that are the same for every token (and image)
    content: int = 0  # seed of those rows
    softmax: bool = False  # by zeros


class _EnoughError(Exception):
    """Raised to end a pass after its last attention of interest."""


def record(
    call: Callable[[Tensor], Any], model: nn.Module, images: Tensor, replace: Replace = Replace(), last: int | None = None
) -> Pass:
    """Run `call(images)`, which runs `model`, and return what its attention did. Raises what the model raises.

    Args:
        images: [B, C, height, width].
        replace: by default nothing.
        last: number of the attention after which the pass ends.
    """
    stack: list[str] = [""]
    hooks = _named(model, stack)
    mode, fastpath = _Recorder(images, replace, stack, last), torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # of nn.MultiheadAttention, which is one operator
        with ExitStack() as stack_of:
            stack_of.enter_context(suppress(_EnoughError))
            for context in (evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager")):
                stack_of.enter_context(context)
            stack_of.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack_of.enter_context(mode)
            mode.found.output = call(images)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for hook in hooks:
            hook.remove()
    return mode.found


def constant(plain: Pass, content: int) -> Replace:
    """The replacements of a `constant` pass, from a plain pass of the same model at the same size.

    Args:
        content: a seed.
    """
    products = frozenset(attention.product for attention in plain.attentions)
    return Replace(products, frozenset(number for attention in plain.attentions for number in attention.linears), content)


def first_tensor(output: Any) -> Tensor:
    """The first floating-point tensor in what a model returns: a tensor, tuple, dictionary or an output of transformers."""
    if isinstance(output, Tensor):
        return output
    values = [output[name] for name in ("logits", "last_hidden_state") if hasattr(output, "keys") and name in output]
    for value in [*values, *tree_leaves(dict(output) if hasattr(output, "keys") else output)]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError(f"the model returns no tensor, but {type(output).__name__}: wrap it in a module that returns one")


def _named(model: nn.Module, stack: list[str]) -> list[RemovableHandle]:
    """Hooks that keep the path of the running module at the end of `stack`."""
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True))
    return hooks


class _Recorder(TorchDispatchMode):
    """Sees every operator, and follows values from linear layers to products and from products to softmax."""

    def __init__(self, images: Tensor, replace: Replace, stack: list[str], last: int | None):
        super().__init__()
        self.found, self._replace, self._stack, self._last = Pass(), replace, stack, last
        self._alive: list[Any] = [images]  # so that no id is used twice
        self._image = {id(images)}
        self._batch = len(images)
        self._linears: dict[int, frozenset[int]] = {}  # id of a tensor: numbers of the linear layers it is made of
        self._parents: dict[int, list[Tensor]] = {}
        self._products: dict[int, frozenset[int]] = {}  # id of a tensor: numbers of the products it is made of
        self._operands: list[tuple[Tensor, Tensor, bool]] = []  # query and key of a product; whether both depend on the image
        self._sources: list[tuple[Tensor, Tensor]] = []  # the operands themselves, the second one transposed
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, read = str(func), _tensors((args, kwargs or {}))
        image = [value for value in read if id(value) in self._image]
        if name in _ADD and image and not self.found.attentions and len(read) == 2:
            self._note_added(read)
        if name in _SOFTMAX and image and self._products.get(id(args[0])):
            self._note_attention(args[0])
            if self._last is not None and len(self.found.attentions) > self._last:
                raise _EnoughError
        out = func(*args, **(kwargs or {}))
        made = _tensors(out)
        self._alive.append(out)
        if not image:
            return out
        self._image.update(id(value) for value in made)
        if name in _LINEAR:
            self._linears[id(out)], self._count = frozenset({self._count}), self._count + 1
            if self._count - 1 in self._replace.linears:
                seed = 1000 * self._replace.content + self._count
                out.copy_(_same_rows(out, seed, channels=1 if "conv" in name else -1))
        elif name in _PRODUCT:
            both = len(image) == 2 or (len(image) == 1 and len(read) == 1)  # a product of the image's values with each other
            self._products[id(out)] = frozenset({len(self._operands)} if both else ())
            self._operands.append((args[-2], args[-1].mT, both))
            self._sources.append(args[-2:])
            if len(self._operands) - 1 in self._replace.products:
                out.zero_()
        elif name in _SOFTMAX:
            if self._replace.softmax:
                out.zero_()
        else:
            self._follow(image, made)
        return out

    def _follow(self, read: list[Tensor], made: list[Tensor]) -> None:
        linears = frozenset().union(*(self._linears.get(id(value), frozenset()) for value in read))
        products = frozenset().union(*(self._products.get(id(value), frozenset()) for value in read))
        for value in made:
            if linears:
                self._linears[id(value)] = linears
                self._parents[id(value)] = read
            if products:
                self._products[id(value)] = products

    def _note_attention(self, logits: Tensor) -> None:
        shape = logits.shape[-2:]
        fitting = [n for n in self._products[id(logits)] if self._operands[n][2] and self._shape(n) == shape]
        if len(fitting) != 1:
            return
        query, key, _ = self._operands[fitting[0]]
        sources = self._sources[fitting[0]]
        linears = frozenset().union(*(self._linears.get(id(value), frozenset()) for value in sources))
        before: tuple[list[Tensor], list[Tensor]] = ([], [])
        if self._replace.linears:
            before = self._before(sources[0], query.shape), self._before(sources[1], query.shape)
        query, key = query.reshape(-1, *query.shape[-2:]), key.reshape(-1, *key.shape[-2:])
        where = self._stack[-1]
        attention = Attention(where, logits.reshape(-1, *shape), fitting[0], query, key, linears, before)
        self.found.attentions.append(attention)

    def _shape(self, number: int) -> tuple[int, int]:
        query, key, _ = self._operands[number]
        return query.shape[-2], key.shape[-2]

    def _before(self, operand: Tensor, shape: torch.Size) -> list[Tensor]:
        """The nearest ancestors of an operand whose rows [..., D] are the same for every token, as distinct rows [1, H, D].

        One of them is what a rotation is applied to, after norms of queries and keys; queries and keys that are rotated
        together have the ancestors of both.

        Args:
            shape: of the operand, [..., N, D], for keys before they are transposed.
        """
        seen, level = set(), [operand]
        while level:
            found, above = [], []
            for value in level:
                if id(value) in seen:
                    continue
                seen.add(id(value))
                fits = value.dim() >= 3 and value.shape[-1] == shape[-1]
                rows = _distinct(value, self._batch, shape) if fits else None
                if rows is not None:
                    found.append(rows)
                above += self._parents.get(id(value), [])
            if found:
                return found
            level = above
        return []

    def _note_added(self, read: list[Tensor]) -> None:
        tokens, position = read if id(read[0]) in self._image else read[::-1]
        if id(position) in self._image or position.dim() < 2 or tokens.dim() < 3:
            return
        if max(position.shape[:-1], default=1) > 1 and position.numel() >= tokens[0].numel() // tokens.shape[1]:
            self.found.added.append(Added(self._stack[-1], tokens.clone(), position.clone()))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _same_rows(out: Tensor, seed: int, channels: int) -> Tensor:
    """A tensor like `out` [..., C] (or [B, C, h, w] with channels = 1) whose rows are the same for every token."""
    row = torch.randn(out.shape[channels], generator=torch.Generator().manual_seed(seed)).to(out)
    return (row[:, None, None] if channels == 1 else row).expand_as(out)


def _distinct(value: Tensor, batch: int, shape: torch.Size) -> Tensor | None:
    """[B, H, D]: the rows of `value` if they are the same for all tokens, and differ along one dimension (of heads) at most.

    Args:
        shape: of queries or keys, [..., N, D]; tokens may be fewer than N, without prefix tokens.
    """
    if value.shape[0] % batch:
        return None
    rows = value.reshape(batch, -1, *value.shape[1:])  # [B, 1 or heads, ..., D]
    sides = range(1, rows.dim() - 1)
    same = [s for s in sides if rows.shape[s] == 1 or torch.equal(rows, rows.narrow(s, 0, 1).expand_as(rows))]
    if len(sides) - len(same) > 1 or not any(rows.shape[s] >= max(2, shape[-2] - 32) for s in same):
        return None
    for side in reversed(same):
        rows = rows.select(side, 0)
    return rows if rows.dim() == 3 else rows[:, None]
