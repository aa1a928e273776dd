"""A recorder of attention: `run` passes images through any model once and sees every attention in it.

The pass runs under a TorchDispatchMode, which sees PyTorch's operators, so no class of any library has to be known. Fused
kernels are switched off, so that attention is a product, a softmax and a second product. FlexAttention stays one operator, and
its logits are computed beside it. vitrel's own attention is seen by a hook, since its terms say which scale is of position.

A pass can follow three things beside the values:

places: the pixel at which the patch of each token begins, through every operator that moves values (views, rolls, padding,
windows). They show the grid, the windows and their slots, in whatever order tokens are.
plain: queries, keys and logits without position. Cosines that queries and keys are multiplied by are taken as 1, sines as 0,
and what is added to the product of queries and keys is left out, except for pairs that a mask hides.
bias: what is added to the product of queries and keys, without the product.

With an image of `blank`, what depends on the image has a shape and no values. What does not (biases, masks, rotations,
interpolated embeddings) is computed as usual. Such a pass costs little at any size.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from vitrel.common.modules import evaluating
from vitrel.layers import Attention as OwnAttention

HIDDEN = -80.0  # logits so far below the largest of their query are a mask: -100 in Swin V2, whose biases are 0 to 16
_SOFTMAX = {"_softmax", "_safe_softmax", "softmax"}
_LINEAR = {"addmm", "mm", "convolution", "linear"}
_PRODUCT = {"bmm", "baddbmm", "matmul"}
_SUM = {"add", "add_", "sub", "sub_"}
_INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "linear", "grid_sampler")
_SAME = {"clone", "detach", "alias", "_to_copy", "contiguous", "lift_fresh", "dropout", "native_dropout"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_MOVES = {
    "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "unbind",
    "cat", "stack", "roll", "flip", "constant_pad_nd", "index", "index_select", "unfold", "repeat", "as_strided", "narrow",
    "pixel_shuffle", "pixel_unshuffle", "gather", "unsafe_split", "take_along_dim",
}  # fmt: skip


class _Product(NamedTuple):
    """A matrix product left @ right with an operand that depends on the image; if both do, it is one of queries and keys."""

    number: int  # in the pass
    left: Tensor  # [..., Q, D]
    right: Tensor  # [..., D, K]
    both: bool


@dataclass(slots=True)
class _Trail:
    """What the recorder knows of a tensor that depends on the image: what it is made of, and the token of each value.

    `linears` are indices of linear layers, `entered` names of parameters, `rotation` the cosines and sines in it. `plain` is
    the tensor without position, `bias` what was added to a product of queries and keys, `place` the pixel at which each value's
    patch begins, -1 for none. `mixed`: a value is made of several tokens, as by a convolution.
    """

    linears: frozenset[int] = frozenset()  # numbers of the linear layers that it is made of
    products: tuple[_Product, ...] = ()  # that it is made of
    entered: frozenset[str] = frozenset()  # parameters that entered since the linear layers
    rotation: tuple[Tensor, ...] = ()  # cosines and sines that it was multiplied by
    plain: Tensor | None = None  # the same without position; None: position did not enter
    bias: Tensor | None = None  # what was added to the product; None: nothing
    place: Tensor | None = None  # of its shape: the pixel (row times width plus column) of its token, -1 for none
    mixed: bool = False  # it was made of several tokens otherwise than by attention, as by a convolution


@dataclass
class Attention:
    """One attention, recorded at its softmax: logits [B*L, Q, K] of B images, L windows times heads; images are the slowest.

    `plain` and `unrotated` are without position, `bias` is what was added to the product of `query` and `key`, and `places` are
    the pixels at which the patches of queries and keys begin. `linears` are the indices of the linear layers that make queries
    and keys, `entered` the parameters that enter after these.
    """

    where: str  # path of the module that calls it
    logits: Tensor  # [B*L, Q, K] input of the softmax; L: windows times heads
    product: int  # number of the product of queries and keys in the pass
    query: Tensor  # [B*L, Q, D] operand of the product
    key: Tensor  # [B*L, K, D]
    linears: frozenset[int]  # numbers of the linear layers that query and key are made of
    plain: Tensor | None = None  # [B*L, Q, K] logits without position, -inf where masked; None: position adds nothing
    bias: Tensor | None = None  # [L, Q, K] what is added to the product of the first image, masks included; None: nothing
    unrotated: tuple[Tensor | None, Tensor | None] = (None, None)  # query and key without rotation, None: as they are
    rotation: tuple[Tensor, ...] = ()  # cosines and sines [..., N, D] that queries and keys are multiplied by
    entered: frozenset[str] = frozenset()  # names of the parameters that enter between the linear layers and the softmax
    mixed: bool = False  # queries and keys were made of several tokens before attention
    places: tuple[Tensor, Tensor] | None = None  # [L, Q], [L, K] pixel of each query and key of an image, -1 for none


@dataclass
class Added:
    """A tensor `position` that does not depend on the image and is added to tokens before the first attention: an embedding.

    `place` [N] is the pixel at which each token's patch begins, `parameter` the name of what the tensor is made of, "" for
    none.
    """

    where: str
    shape: torch.Size  # of what it is added to, [B, ..., C]
    position: Tensor  # as it was added, with the channels last
    place: Tensor  # [N] the pixel of each token of an image
    parameter: str  # name of the first parameter or buffer that it is made of; "" if there is none


@dataclass
class Pass:
    """The result of `run`: attentions and added tensors in the order of the pass.

    `softmaxes` counts those of what depends on the image, recognized as attention or not; `resampled` the values that
    interpolation reads, {parameter and policy: number}.
    """

    attentions: list[Attention] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    softmaxes: int = 0  # of what depends on the image, attention or not
    resampled: dict[str, int] = field(default_factory=dict)  # {parameter's leaf name and policy: number of values interpolated}


class Replace(NamedTuple):
    """The results that a pass replaces, by the indices of linear layers and of products in an earlier pass of the model.

    Those of products become 0, those of linear layers random rows (of the seed `content`) that are the same for all tokens.
    """

    products: frozenset[int] = frozenset()  # by zeros
    linears: frozenset[int] = frozenset()  # by rows that are the same for every token (and image)
    content: int = 0  # seed of those rows


class _Layout(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


_LAYOUTS: dict[tuple, Any] = {}  # a _Layout for each output of an operator, as it returns them, by the operator and its inputs


class _Blank(Tensor):
    """A tensor with the shape of `shape` (on meta) and a device, but no values; operators return others of the kind."""

    shape_only: Tensor  # on the meta device

    @staticmethod
    def __new__(cls, shape: Tensor, device: torch.device) -> "_Blank":
        how = dict(strides=shape.stride(), storage_offset=shape.storage_offset(), dtype=shape.dtype, device=device)
        return Tensor._make_wrapper_subclass(cls, shape.size(), **how)

    def __init__(self, shape: Tensor, device: torch.device) -> None:
        self.shape_only = shape

    def __repr__(self) -> str:  # type: ignore[override]
        return f"blank({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, _base(func)
        if name == "_fused_sdp_choice":
            return SDPBackend.MATH.value
        given = [value for value in _tensors((args, kwargs)) if isinstance(value, cls)]
        device = given[0].device
        if name.startswith("new_") or name.endswith("_like"):  # values that follow from the shape
            real = torch.empty(1, dtype=given[0].dtype, device=device).expand(given[0].shape)
            return func(real, *args[1:], **kwargs)
        known = {id(value.shape_only): value for value in given}

        def shape(value: Any) -> Any:
            if isinstance(value, cls):
                return value.shape_only
            return value.to("meta") if isinstance(value, Tensor) else value

        key = (func, *map(_layout, _leaves((args, kwargs))))
        if key in _LAYOUTS:  # blocks are alike, and shapes take Python as long as values take a small model

            def like(how: _Layout) -> _Blank:
                return cls(torch.empty_strided(how.size, how.stride, dtype=how.dtype, device="meta"), device)

            return _mapped(like, _LAYOUTS[key])
        inner_args, inner = _mapped(shape, args), _mapped(shape, kwargs)
        if inner.get("device") is not None:
            inner["device"] = torch.device("meta")
        out = func(*inner_args, **inner)
        if name.endswith("_") and not isinstance(args[0], cls):  # written into a tensor with values
            return args[0]
        made = _leaves(out)
        if made and all(isinstance(one, Tensor) and id(one) not in known for one in made):
            if len(_LAYOUTS) > 10_000:
                _LAYOUTS.clear()
            _LAYOUTS[key] = _mapped(_layout, out)

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else cls(value, device)

        return _mapped(wrapped, out)


def blank(model: nn.Module, size: tuple[int, int], channels: int) -> Tensor:
    """Return an image [1, channels, h, w] without values, of the dtype and device of the model. `size` is (h, w) in pixels."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return _Blank(torch.empty(1, channels, *size, dtype=like.dtype, device="meta"), like.device)


def run(
    call: Callable[[Tensor], Any],
    model: nn.Module,
    images: Tensor,
    replace: Replace = Replace(),
    use: Callable[[Attention], None] | None = None,
    follow: bool = False,
    plain: bool = False,
    own: Callable[[str, OwnAttention, Tensor, tuple], None] | None = None,
) -> Pass:
    """Call `call(images)`, in which `model` runs in evaluation mode, uncompiled and without gradients; return what was seen.

    Errors of the model are raised.

    Args:
        call: calls the model.
        model: gives modules and parameters their names.
        images: [B, C, height, width], or the result of `blank`.
        replace: results to replace; by default none.
        use: called with each attention as it runs; attention is not in the result then.
        follow: record `places` (the pixels of tokens) and `bias` of each `Attention`.
        plain: record its `plain` and `unrotated`: queries, keys and logits without position.
        own: called after each attention of vitrel with its name, module, projected tokens and the arguments after the tokens;
            that attention is neither in the result nor given to `use`. None: it is recorded as any other.
    """
    with ExitStack() as stack:
        mode = _Recorder(model, images, replace, use, follow, plain)
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # of nn.MultiheadAttention, which is one operator
        for hook in (*_path_hooks(model, mode.stack), *(() if own is None else _own_hooks(model, mode, own))):
            stack.callback(hook.remove)
        # Not inference mode: a tensor that a model caches here could not be used in training afterwards.
        for context in (torch.inference_mode(False), evaluating(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH)):
            stack.enter_context(context)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mode)
        call(images)
    return mode.found


def constant(plain: Pass, content: int) -> Replace:
    """Return what a further pass of a model at the same size has to replace, so that only position makes tokens differ.

    The linear layers that make queries and keys give rows that are the same for every token, drawn with the seed `content`, and
    the products of queries and keys are zeros. `plain` is a pass without replacements.
    """
    products = frozenset(attention.product for attention in plain.attentions)
    return Replace(products, frozenset(number for attention in plain.attentions for number in attention.linears), content)


def first_tensor(output: Any) -> Tensor:
    """Return a tensor that a model returned, or of a tuple, dictionary or output of transformers the first of floating point.

    "logits" and "last_hidden_state" come first. ValueError if there is none.
    """
    if isinstance(output, Tensor):
        return output
    values = [output[name] for name in ("logits", "last_hidden_state") if hasattr(output, "keys") and name in output]
    for value in [*values, *tree_leaves(dict(output) if hasattr(output, "keys") else output)]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError(f"the model returns no tensor, but {type(output).__name__}: wrap it in a module that returns one")


def _path_hooks(model: nn.Module, stack: list[str]) -> tuple[RemovableHandle, RemovableHandle]:
    """Register global hooks that keep the path of the running module of `model` at the end of `stack`; return their handles.

    nn.Softmax is left out: its softmax belongs to the module that calls it.
    """
    paths = {module: name for name, module in model.named_modules() if not isinstance(module, nn.Softmax)}

    def enter(module: nn.Module, args: tuple) -> None:
        if module in paths:
            stack.append(paths[module])

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        if module in paths:
            stack.pop()

    return register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)


def _own_hooks(
    model: nn.Module, mode: "_Recorder", use: Callable[[str, OwnAttention, Tensor, tuple], None]
) -> Iterator[RemovableHandle]:
    """Register hooks that call `use` after each attention of vitrel, as `own` of `run`, and count in `mode` those that run now.

    Yield the handles of the hooks.
    """
    for name, module in model.named_modules():
        if isinstance(module, OwnAttention):
            projected: list[Tensor] = []  # output of the linear layer, [..., 3C]

            def enter(*_: Any) -> None:
                mode.inside_own += 1

            def leave(
                m: OwnAttention, args: tuple, kwargs: dict[str, Any], out: Tensor, name: str = name, qkv: list = projected
            ) -> None:
                with mode.paused():
                    use(name, m, qkv.pop(), (*args[1:], *kwargs.values()))

            def left(*_: Any) -> None:
                mode.inside_own -= 1

            yield module.register_forward_pre_hook(enter)
            yield module.qkv.register_forward_hook(lambda _, args, out, qkv=projected: qkv.append(out))
            yield module.register_forward_hook(leave, with_kwargs=True)
            yield module.register_forward_hook(left, always_call=True)


class _Recorder(TorchDispatchMode):
    """The dispatch mode of `run`: follows values from linear layers to products, and from products to softmax.

    Its methods take an operator as `func`, with its `name` without overload and its arguments. `image` are those of its
    arguments that depend on the image, `made` the tensors that it returns.
    """

    supports_higher_order_operators = True  # FlexAttention

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        replace: Replace,
        use: Callable[[Attention], None] | None,
        follow: bool,
        plain: bool,
    ):
        super().__init__()
        self.found, self.stack, self.inside_own = Pass(), [""], 0
        self._replace, self._follows, self._plain = replace, follow, plain
        self._use = self.found.attentions.append if use is None else use
        self._batch = len(images)
        self._trail = WeakTensorKeyDictionary()
        self._origin: Any = WeakTensorKeyDictionary()  # name of the parameter that a tensor is made of
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            self._origin[value] = name
        self._linear_layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._linears, self._products = 0, 0  # seen so far
        self._attended, self._off = False, False
        h, w = images.shape[-2:]
        place = torch.arange(h * w, dtype=torch.int32).view(1, 1, h, w).expand(images.shape) if follow else None
        self._trail[images] = _Trail(place=place)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which the recorder does not see operators."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "flex_attention" and not hasattr(func, "overloadpacket"):
            return self._flex(func, args, kwargs)
        name, read = _base(func), _tensors((args, kwargs))
        if name in _PRODUCT and self.stack[-1] in self._linear_layers:  # of tokens whose layout is no plain matrix
            name = "mm"
        image = [value for value in read if value in self._trail]
        if not image:
            out = func(*args, **kwargs)
            self._note_origin(func.__name__, args, read, out)
            return out
        if name in ("add", "add_") and not self._attended and len(read) == 2:
            self._note_added(read)
        self.found.softmaxes += name in _SOFTMAX
        if name in _SOFTMAX and any(product.both for product in self._trail[args[0]].products):
            self._note_attention(args[0])
        plain = bias = None
        factor = None if self.inside_own else self._factor(name, read)
        if not self.inside_own:
            bias = self._bias(func, name, args, kwargs, image) if self._follows else None
            plain = self._without_position(func, name, args, kwargs, image) if self._plain and factor is None else None
        out = func(*args, **kwargs)
        if self._plain and factor is not None:
            x = self._trail[image[0]].plain
            plain = (image[0] if x is None else x).expand_as(out) * rotates(factor)
        self._follow(func, name, args, kwargs, image, out, (plain, bias), factor)
        if name in _LINEAR and self._linears - 1 in self._replace.linears:
            seed = 1000 * self._replace.content + self._linears
            out.copy_(_same_rows(out, seed, channels=1 if name == "convolution" else -1))
        if name in _PRODUCT and self._products - 1 in self._replace.products:
            out.zero_()
        return out

    def _follow(
        self,
        func: Any,
        name: str,
        args: tuple,
        kwargs: dict,
        image: list[Tensor],
        out: Any,
        beside: tuple[Any, Any],
        factor: Tensor | None,
    ) -> None:
        """Store what is known of the outputs `out` of an operator.

        `beside` has the outputs without position and the biases in them, each None where there is none; `factor` the cosines or
        sines by which the operator multiplies queries or keys, None for other operators.
        """
        trails, made = [self._trail[value] for value in image], _tensors(out)
        trail = _Trail()
        if name in _LINEAR:
            trail.linears, self._linears = frozenset({self._linears}), self._linears + 1
        elif name not in _SOFTMAX:
            others = [v for v in _tensors((args, kwargs)) if v not in self._trail and v in self._origin]
            if name in _SUM and not any(t.products for t in trails):  # of linear layers
                others = [v for v in others if v.dim() > 1]
            names = {self._origin[v] for v in others}
            trail.entered = frozenset(names).union(*(t.entered for t in trails))
            factors = (*(r for t in trails for r in t.rotation), *(() if factor is None else (factor,)))
            trail.rotation = tuple({id(r): r for r in factors}.values())
        if name in _PRODUCT:
            left, right = args[-2:]
            both = left in self._trail and right in self._trail
            trail.products, self._products = (_Product(self._products, left, right, both),), self._products + 1
        elif name not in _SOFTMAX and name not in _LINEAR:
            trail.linears = frozenset().union(*(t.linears for t in trails))
            trail.products = tuple({p.number: p for t in trails for p in t.products}.values())
        trail.mixed = name == "native_group_norm" or any(t.mixed for t in trails) or _overlaps(name, args)
        empty: list = [None] * len(made)
        plains, biases = (_tensors(part) or empty for part in beside)
        places = self._places(func, name, args, kwargs, image, made) if self._follows else empty
        for value, plain, bias, place in zip(made, plains, biases, places, strict=True):
            self._trail[value] = replace(trail, plain=plain, bias=bias, place=place)

    def _factor(self, name: str, read: list[Tensor]) -> Tensor | None:
        """Return which of the operator's tensors `read` is cosines or sines that multiply queries or keys, None if none is."""
        if name != "mul" or len(read) != 2 or (read[0] in self._trail) == (read[1] in self._trail):
            return None
        x, factor = read if read[0] in self._trail else read[::-1]
        trail = self._trail[x]
        return factor if trail.linears and not trail.products and rotates(factor) is not None else None

    # What position adds

    def _without_position(self, func: Any, name: str, args: tuple, kwargs: dict, image: list[Tensor]) -> Any:
        """Return the output of the operator without position, None if position has no part in it."""
        if name in _SOFTMAX:
            return None
        trails = {id(value): self._trail[value] for value in image}
        logits = [value for value in image if any(product.both for product in trails[id(value)].products)]
        if name in _SUM and logits and len(args) == 2 and isinstance(args[1], Tensor):
            main = next((v for v in args if v is logits[0]), args[0])
            other = args[1] if main is args[0] else args[0]
            if all(other is not value for value in logits):
                alone = trails[id(main)].plain
                alone = main.clone() if alone is None else alone
                return _hide(alone, -other if name.startswith("sub") and other is args[1] else other)
        if name == "baddbmm":
            args = (torch.zeros_like(args[0]), *args[1:])
        elif not any(t.plain is not None for t in trails.values()):
            return None

        def swap(value: Any) -> Any:
            if isinstance(value, Tensor) and id(value) in trails and trails[id(value)].plain is not None:
                return trails[id(value)].plain
            return value

        if name.endswith("_") and trails.get(id(args[0])) is not None and trails[id(args[0])].plain is None:
            args = (args[0].clone(), *args[1:])
        return func(*_mapped(swap, args), **_mapped(swap, kwargs))

    def _bias(self, func: Any, name: str, args: tuple, kwargs: dict, image: list[Tensor]) -> Any:
        """Return the part of the operator's output that was added to a product of queries and keys, None if none or unknown."""
        products = [product.both for value in image for product in self._trail[value].products]
        if name in _SOFTMAX or name in _PRODUCT or not any(products):
            return None
        unknown = [value for value in image if self._trail[value].bias is None]
        if name in _SUM or name in ("masked_fill", "masked_fill_", "where"):
            shape = torch.broadcast_shapes(*(value.shape for value in _tensors(args)))

            def known(value: Any) -> Any:  # zeros for the product, and for what else depends on the image
                if not isinstance(value, Tensor) or value not in self._trail:
                    return value
                bias = self._trail[value].bias
                return value.new_zeros([1] * value.dim()) if bias is None else bias

            if name in _SUM and len(unknown) == len(_tensors(args)):
                return None
            return getattr(torch.ops.aten, name.removesuffix("_"))(*_mapped(known, args), **kwargs).expand(shape)
        if unknown:
            return None
        swapped = _mapped(lambda v: self._trail[v].bias if isinstance(v, Tensor) and v in self._trail else v, (args, kwargs))
        if name in _VIEWS:
            return swapped[0][0].reshape(args[1])
        return func(*swapped[0], **swapped[1])

    def _flex(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run FlexAttention, record its attention and return its output.

        The logits are score_mod of the products of all pairs that mask_mod lets see each other.
        """
        query, key, value, score_mod, block_mask, scale = args[:6]
        extra, mask_extra = args[7:9] if len(args) >= 9 else ((), ())
        trails = [self._trail.get(part) or _Trail() for part in (query, key)]
        shape = (*query.shape[:3], key.shape[2])
        index = [
            part.flatten() for part in torch.meshgrid(*(torch.arange(n, device=query.device) for n in shape), indexing="ij")
        ]

        def products(q: Tensor, k: Tensor) -> Tensor:
            return (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * scale

        def modified(scores: Tensor) -> Tensor:
            found = torch.vmap(lambda s, b, h, q, k: score_mod(s, b, h, q, k, *extra))(scores.flatten(), *index)
            return found.view(shape).masked_fill(~seen, -math.inf)

        seen = torch.vmap(lambda b, h, q, k: block_mask[-1](b, h, q, k, *mask_extra))(*index).view(shape)
        scores, zeros = products(query, key), torch.zeros(shape, dtype=query.dtype, device=query.device)
        blank = isinstance(query, _Blank)
        logits = scores if blank else modified(scores)
        bias = modified(zeros) if self._follows else None
        plain = [part if t.plain is None else t.plain for part, t in zip((query, key), trails, strict=True)]
        held = [cell.cell_contents for mod in (score_mod, block_mask[-1]) for cell in getattr(mod, "__closure__", None) or ()]
        names = frozenset(self._origin[v] for v in _tensors((extra, mask_extra, held)) if v in self._origin)
        self._trail[logits] = _Trail(
            products=(_Product(self._products, query, key.repeat_interleave(shape[1] // key.shape[1], 1).mT, True),),
            entered=names,
            plain=products(*plain).masked_fill(~seen, -math.inf) if self._plain else None,
            bias=bias if bias is not None and bool(bias.any()) else None,
        )
        self._products += 1
        for part in (query, self._trail[logits].products[0].right):
            self._trail[part] = self._trail.get(part) or _Trail(place=self._key_place(key, part))
        self._note_attention(logits)
        if blank:
            made = (*query.shape[:3], value.shape[-1]), shape[:3], shape[:3]
            out: Any = tuple(_Blank(torch.empty(s, device="meta", dtype=query.dtype), query.device) for s in made)
        else:
            out = func(*args, **kwargs)
        row = self._rows(query) if self._follows else None
        for number, part in enumerate(_tensors(out)):
            self._trail[part] = _Trail(place=None if row is None else row.expand(part.shape) if not number else _nowhere(part))
        return out

    def _key_place(self, key: Tensor, columns: Tensor) -> Tensor | None:
        """Return the place (pixel of the token) of each value of `columns` [B, H, D, N], made of `key`; None if unknown."""
        place = self._trail[key].place if key in self._trail else None
        return None if place is None else place.repeat_interleave(columns.shape[1] // key.shape[1], 1).mT

    # Places

    def _places(self, func: Any, name: str, args: tuple, kwargs: dict, image: list[Tensor], made: list[Tensor]) -> list:
        """Return the places of the tensors that an operator made: for each value the pixel of its token, -1 for none."""
        first = self._trail[image[0]].place
        try:
            if name in _SAME and first is not None:
                return [first] * len(made)
            if name in _VIEWS:
                shape = made[0].shape
                if first.stride(-1) == 0 and shape[-1] == first.shape[-1]:  # all channels have the place of their token
                    return [first[..., :1].reshape(*shape[:-1], 1).expand(shape)]
                return [first.reshape(shape)]
            if name in _MOVES:
                return self._moved(func, name, args, kwargs, made)
            if name in _LINEAR and name != "convolution":
                left = args[-2] if args[-2] in self._trail else None
                return [_nowhere(made[0]) if left is None else self._row(left).expand(made[0].shape)]
            if name in _PRODUCT:
                return [self._product_place(args[-2], args[-1], made[0])]
            if "conv" in name or "pool" in name or "upsample" in name:
                return [_nearest(first, value.shape) for value in made]
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            return [_nowhere(value) for value in made]
        return [self._pointwise(image, value) for value in made]

    def _moved(self, func: Any, name: str, args: tuple, kwargs: dict, made: list[Tensor]) -> list[Tensor]:
        """Apply `func`, which moves values, to its inputs' places; return those of `made` (pixels of tokens, -1: none)."""

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value in self._trail:
                return self._trail[value].place
            return value.cpu() if value.dtype in (torch.int64, torch.bool) else _nowhere(value)

        inputs = [_mapped(place, part) for part in args]
        if name == "constant_pad_nd":
            inputs[2:] = [-1]
        moved = func(*inputs, **_mapped(place, kwargs))
        return _tensors(moved) if len(_tensors(moved)) == len(made) else [_nowhere(value) for value in made]

    def _pointwise(self, image: list[Tensor], made: Tensor) -> Tensor:
        """Return the places (pixels of tokens) of `made`: of an operand with its shape, else of the first, expanded, or -1."""
        for value in image:
            place = self._trail[value].place
            if place is not None and value.shape == made.shape:
                return place
        place = self._trail[image[0]].place
        try:
            return _compact(place.expand(made.shape))
        except RuntimeError:
            return _nowhere(made)

    def _row(self, value: Tensor) -> Tensor:
        """Return the smallest place (pixel of a token) in each row of a tensor [..., D], as [..., 1]; -1 if a row has none."""
        place = self._trail[value].place
        if place.stride(-1) == 0 or place.shape[-1] == 1:
            return place[..., :1]
        large = torch.iinfo(torch.int32).max
        first = place.masked_fill(place < 0, large).amin(-1, keepdim=True)
        return first.masked_fill(first == large, -1)

    def _rows(self, value: Tensor, columns: bool = False) -> Tensor | None:
        """Return the place (pixel of the token) of each row or column, [..., N, 1]; None if unknown, or if one has several."""
        if value not in self._trail or self._trail[value].place is None:
            return None
        place = self._trail[value].place
        place = place.mT if columns else place
        if place.stride(-1) != 0 and bool((place != place[..., :1]).any()):
            return None
        return place[..., :1]

    def _product_place(self, left: Tensor, right: Tensor, made: Tensor) -> Tensor:
        """Return the places (pixels of tokens) of a product: of the rows of `left`, else of the columns of `right`, else -1."""
        row = self._rows(left)
        if row is not None:
            return row.expand(made.shape)
        column = self._rows(right, columns=True)
        return _nowhere(made) if column is None else column.mT.expand(made.shape)

    # Attention, embeddings and interpolation

    def _note_attention(self, logits: Tensor) -> None:
        """Give the attention with these logits to `use`, unless they come from no product of queries and keys, or from several.

        Inside vitrel's own attention, which a hook records, nothing is given.
        """
        if self.inside_own:
            self._attended = True
            return
        shape, trail = logits.shape[-2:], self._trail[logits]
        fitting = [p for p in trail.products if p.both and (p.left.shape[-2], p.right.shape[-1]) == shape]
        if len(fitting) != 1:
            return
        self._attended = True
        product = fitting[0]
        sources = [self._trail[value] for value in (product.left, product.right)]
        query, key = product.left, product.right.mT
        places = self._rows(product.left), self._rows(product.right, columns=True)
        left, right = (t.plain for t in sources)
        unrotated = (
            None if left is None else left.reshape(-1, *left.shape[-2:]),
            None if right is None else right.mT.reshape(-1, *query.shape[-2:]) if right.mT.shape == query.shape else None,
        )
        flat = (-1, *shape)
        attention = Attention(
            self.stack[-1],
            logits.reshape(flat),
            product.number,
            query.reshape(-1, *query.shape[-2:]),
            key.reshape(-1, *key.shape[-2:]),
            sources[0].linears | sources[1].linears,
            None if trail.plain is None else trail.plain.reshape(flat),
            None if trail.bias is None else self._first(trail.bias.expand(logits.shape)).reshape(flat),
            unrotated,
            tuple({id(r): r for t in sources for r in t.rotation}.values()),
            trail.entered.union(*(t.entered for t in sources)),
            any(t.mixed for t in sources),
            None if any(p is None for p in places) else tuple(self._first(p).reshape(-1, p.shape[-2]) for p in places),
        )
        self._use(attention)

    def _first(self, value: Tensor) -> Tensor:
        """Return the rows of `value`, along its first dimension, that belong to the first image of the batch."""
        return value[: value.shape[0] // self._batch]

    def _note_added(self, read: list[Tensor]) -> None:
        """Store in `found` which of the two is added to tokens, if it has several rows and the tokens' pixels are known."""
        tokens, position = read if read[0] in self._trail else read[::-1]
        if not self._follows or position in self._trail or position.dim() < 2 or tokens.dim() < 3:
            return
        place, origin = None if self._trail[tokens].mixed else self._rows(tokens), self._origin.get(position, "")
        if place is None and tokens.dim() == position.dim() == 4 and not self._trail[tokens].mixed:  # channels first
            pixels = self._trail[tokens].place.movedim(1, -1)
            if bool((pixels == pixels[..., :1]).all()):
                tokens, position, place = tokens.movedim(1, -1), position.movedim(1, -1), pixels[..., :1]
        large = max(position.shape[:-1], default=1) > 1 and position.numel() >= tokens[0].numel() // tokens.shape[1]
        if large and place is not None:
            where = self._first(place).flatten()
            self.found.added.append(Added(self.stack[-1], tokens.shape, position.clone(), where, origin))

    def _note_origin(self, operator: str, args: tuple, read: list[Tensor], out: Any) -> None:
        """Store of which parameter an operator's output is made; count the values that an interpolation to a new size reads."""
        origin = next((self._origin[value] for value in read if value in self._origin), None)
        if origin is None:
            return
        for value in _tensors(out):
            self._origin[value] = origin
        if ("upsample" in operator or "grid_sampler" in operator) and out.shape != args[0].shape:
            kind = next((k for k in _INTERPOLATIONS if k in operator), None)
            if kind is not None:
                policy = f"{origin.rpartition('.')[2]} {kind.replace('grid_sampler', 'sampled')}"
                self.found.resampled[policy] = self.found.resampled.get(policy, 0) + args[0].numel()


def rotates(factor: Tensor) -> float | None:
    """Return 1 for cosines [..., N, D] of positions or complex rotations, 0 for sines (their values at 0), None for others.

    Where positions begin at 0, there is a token where all cosines are 1 and all sines 0. Where they are on both sides of 0,
    cosines are even and sines odd. Elsewhere the lowest frequency tells, whose angles are small on the whole grid.
    """
    if isinstance(factor, _Blank) or factor.dim() < 2 or factor.shape[-2] < 2 or factor.shape[-1] < 2:
        return None
    if factor.is_complex():
        return 1.0 if bool(((factor.abs() - 1).abs() < 1e-2).all()) and _differs(factor) else None
    if not factor.is_floating_point() or float(factor.abs().max()) > 1.01 or not _differs(factor):
        return None
    rows = factor.float().movedim(-2, 0).flatten(1)  # [N, H * D]
    to_one, to_zero = ((rows - value).abs().amax(1).min() for value in (1.0, 0.0))
    if float(torch.minimum(to_one, to_zero)) < 0.3:
        return 1.0 if to_one < to_zero else 0.0
    for value, other in ((1.0, rows.flip(0)), (0.0, -rows.flip(0))):
        if float((rows - other).abs().max()) < 1e-2:
            return value
    slow = rows[:, (rows.amax(0) - rows.amin(0)).argmin()].mean().abs()
    return 1.0 if slow > 0.8 else 0.0 if slow < 0.5 else None


def _differs(factor: Tensor) -> bool:
    """Return whether a factor [..., N, D] differs between tokens."""
    return bool((factor != factor[..., :1, :]).any())


def _hide(logits: Tensor, added: Tensor) -> Tensor:
    """Return logits with -inf where `added`, a mask or a bias with a mask, hides a pair."""
    if isinstance(added, _Blank) or added.dim() < 2:
        return logits
    hidden = hidden_pairs(added)
    return logits if hidden is None else logits.masked_fill(hidden, -math.inf)


def hidden_pairs(added: Tensor) -> Tensor | None:
    """Return where `added`, which is added to logits, hides a key: bool of its shape, None if it hides none.

    A key is hidden by -inf, or by a value more than 80 below the largest of its query.
    """
    low, high = added.aminmax()
    if low >= high + HIDDEN and low > -math.inf:
        return None
    hidden = (added < added.amax(-1, keepdim=True) + HIDDEN) | (added == -math.inf)
    return hidden if bool(hidden.any()) else None


def _base(func: Any) -> str:
    """Return the name of an operator without its overload: "add" for aten.add.Tensor."""
    return str(func).split(".")[1] if str(func).startswith("aten.") else str(func)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in _leaves(values) if isinstance(value, Tensor)]


def _leaves(values: Any) -> list:
    """Return a list of the values in nested arguments or outputs of an operator, faster than torch's `tree_leaves`."""
    if isinstance(values, dict):
        values = [*values.values()]
    return [leaf for value in values for leaf in _leaves(value)] if type(values) in (tuple, list) else [values]


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Return nested arguments or outputs of an operator with a function applied to each value in them."""
    if isinstance(values, dict):
        return {name: _mapped(function, value) for name, value in values.items()}
    return type(values)(_mapped(function, value) for value in values) if type(values) in (tuple, list) else function(values)


def _overlaps(name: str, args: tuple) -> bool:
    """Return whether an operator makes a value of several tokens: interpolation, or convolution or pooling that overlaps."""
    if name == "convolution":
        return any(kernel > stride for kernel, stride in zip(args[1].shape[2:], args[3], strict=False))
    if "upsample" in name:
        return True
    if "pool2d" not in name or "adaptive" in name:
        return False
    stride = args[2] if len(args) > 2 and args[2] else args[1]
    return any(kernel > step for kernel, step in zip(args[1], stride, strict=False))


def _layout(value: Any) -> Any:
    return _Layout(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _nowhere(value: Tensor) -> Tensor:
    """Return a tensor of the shape of `value` that has -1 everywhere: no value belongs to a token."""
    return torch.full((), -1, dtype=torch.int32).expand(value.shape)


def _compact(place: Tensor) -> Tensor:
    """Return `place` in a tensor that stores one number for each dimension along which all are equal, to save memory."""
    shape = place.shape
    for axis, n in enumerate(shape):
        first = place.narrow(axis, 0, 1)
        if place.stride(axis) == 0 or (n > 1 and bool((place == first).all())):
            place = first
    return place.expand(shape)


def _nearest(place: Tensor, shape: torch.Size) -> Tensor:
    """Return the tokens' pixels for the output [B, C, h, w] of convolution or pooling: of the nearest values above and left."""
    for axis in (-2, -1) if len(shape) == 4 else (-1,):
        at = torch.arange(shape[axis]) * place.shape[axis] // shape[axis]
        place = place.index_select(axis, at)
    return (place if place.shape[1] == shape[1] else place[:, :1]).expand(shape)


def _same_rows(out: Tensor, seed: int, channels: int) -> Tensor:
    """Return random values in the shape of `out`, equal for all tokens; `channels` is its axis of channels, -1 or 1."""
    row = torch.randn(out.shape[channels], generator=torch.Generator().manual_seed(seed)).to(out)
    return (row[:, None, None] if channels == 1 else row).expand_as(out)
