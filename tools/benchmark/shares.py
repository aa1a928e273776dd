"""The suite "profile": the time of a model's step by kind of work.

Hooks put profiler ranges around modules, and an operator belongs to the kind of its range. Inside attention and between modules
the operator's name and the last dimensions of its input decide. A gradient belongs to the kind of the forward operator with the
same sequence number.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from tools.benchmark.engine import Case, Contender, Visit
from tools.benchmark.worker import Stopwatch

PRODUCTS, BIAS, LAYOUT, RESIDUAL, PATCHES, HEAD = "attention", "bias", "layout", "residual", "patch embedding", "head"
DISPATCH, UNKNOWN = "Python and dispatch", "unattributed"
KINDS = {  # kind of work: explanation
    "qkv": "linear layer, as the next three",
    "proj": "of attention's output",
    "fc1": "of the MLP",
    "fc2": "of the MLP",
    PRODUCTS: "softmax and the two products, scaled_dot_product_attention",
    BIAS: "looking up the tables, masks, adding them to logits",
    LAYOUT: "tokens into windows, heads and chunks of a batch, and back: gather, roll, copy",
    "norm": "layer norms",
    "GELU": "where it is a pass of its own",
    RESIDUAL: "sums, drop path, layer scale, adding up gradients",
    PATCHES: "its norm and prefix tokens included",
    "merging": "Swin's patch merging, its norm included",
    HEAD: "pooling, classifier, loss",
    DISPATCH: "between operators, views, autograd's engine; on a GPU all time in which no kernel runs",
    UNKNOWN: "operators of which nothing above is known",
}
MODES = ("inference", "training")
_EAGER, _OPTIMIZED, _TIMM = "ours, eager", "ours, optimized", "timm, eager"
_WARM_UP, _STEPS, _QUICK_STEPS = 1, 5, 2
_STEP, _RANGE = "vitrel step", "vitrel: "
# Ranges that are no kinds: in them the operator decides.
_ATTENTION, _FUNCTION = "inside attention", "inside a function of attention"
_PARTS = {  # name of a submodule: kind
    "patch_embed": PATCHES, "pos_embed": PATCHES, "downsample": "merging", "head": HEAD, "norm": "norm", "norm1": "norm",
    "norm2": "norm", "fc_norm": "norm", "attn": _ATTENTION, "qkv": "qkv", "proj": "proj", "position": BIAS,
    "shared_position": BIAS, "fc1": "fc1", "act": "GELU", "fc2": "fc2", "ls1": RESIDUAL, "ls2": RESIDUAL,
    "drop_path1": RESIDUAL, "drop_path2": RESIDUAL,
}  # fmt: skip
_OPERATORS = {  # kind: names of operators without aten::
    PRODUCTS: "scaled_dot_product_attention matmul bmm baddbmm softmax _softmax mul",
    LAYOUT: "index_select index gather reshape flatten contiguous clone copy_ roll pad stack",
    DISPATCH: "view unflatten permute transpose mT t unbind select slice expand as_strided unsqueeze squeeze alias detach to "
    "empty empty_like new_empty _unsafe_view split chunk",
    "norm": "layer_norm",
    "GELU": "gelu gelu_",
    RESIDUAL: "add add_",
    PATCHES: "cat conv2d",
    HEAD: "mean cross_entropy_loss",
    BIAS: "arange ones zeros new_full new_zeros where eq lt gt ge __or__ bitwise_not sub floor_divide clamp masked_fill flip "
    "all is_nonzero item",
}
_KIND_OF = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
_OF_TOKENS = {f"aten::{name}" for name in (*_OPERATORS[LAYOUT].split(), "add", "add_", "mul")}
_ENGINE = "autograd::engine::evaluate_function"


def profile_step(step: Callable[[], object], model: nn.Module, device: torch.device) -> dict[str, float]:
    """Return {kind: milliseconds} of one `step` of `model` for all KINDS; their sum is the time of the step.

    CPU: self time of the operators in the profiler. GPU: time of their kernels. The numbers of tokens (of the image, of
    a window) must differ from the model's widths, which distinguish tokens from biases.
    """
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with _ranges(model), profile(activities=activities, record_shapes=True) as profiler, record_function(_STEP):
        step()
        if gpu:
            torch.cuda.synchronize(device)
    return _Attribution(model, gpu).milliseconds(profiler.events())


@contextlib.contextmanager
def _ranges(model: nn.Module) -> Iterator[None]:
    handles = [handle for module, kind in _parts(model) for handle in _mark(module, kind)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark(module: nn.Module, kind: str) -> tuple[RemovableHandle, RemovableHandle]:
    opened = []

    def enter(module: nn.Module, args: tuple) -> None:
        opened.append(record_function(_RANGE + kind))
        opened[-1].__enter__()

    def leave(module: nn.Module, args: tuple, out: object) -> None:
        opened.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, kind) of the outermost submodules with a kind; inside attention, of its parts too."""
    for name, child in module.named_children():
        kind = _PARTS.get(name)
        if isinstance(child, nn.Identity):
            continue
        if kind is not None:
            yield child, kind
        if kind in (None, _ATTENTION):
            yield from _parts(child)


class _Attribution:
    """Sums the self times of a step's profiler events by kind."""

    def __init__(self, model: nn.Module, gpu: bool):
        self.gpu = gpu
        self.times = dict.fromkeys(KINDS, 0.0)
        self.forward: dict[int, tuple[str, str]] = {}  # kind and range of the forward operator with this sequence number
        self.widths: set[int] = set()  # of x, qkv and a head; a tensor with other last dimensions is a bias or its index
        for name, module in model.named_modules():
            kind = _PARTS.get(name.rpartition(".")[2], UNKNOWN)
            if kind == _ATTENTION:
                width = module.proj.in_features
                self.widths |= {width, 3 * width, width // module.num_heads}

    def milliseconds(self, events: list[FunctionEvent]) -> dict[str, float]:
        events = sorted((e for e in events if e.device_type == DeviceType.CPU), key=lambda e: e.time_range.start)
        for event in events:
            if event.cpu_parent is None:
                self._visit(event, "", "")
        if self.gpu:
            took = next(e for e in events if e.name == _STEP).cpu_time_total
            self.times[DISPATCH] = took - (sum(self.times.values()) - self.times[DISPATCH])
        return {kind: us / 1e3 for kind, us in self.times.items()}

    def _visit(self, event: FunctionEvent, place: str, kind: str) -> None:
        """Add an event and its children. place: the innermost range. kind: that of the enclosing operator, or ""."""
        own_kind = DISPATCH
        if event.name.startswith(_RANGE):
            place = event.name.removeprefix(_RANGE)
        elif event.name.startswith(_ENGINE):
            kind, place = self._gradient(event)
        elif place == _ATTENTION and "::" not in event.name and not kind:  # an autograd.Function
            place = _FUNCTION
            self.forward[event.sequence_nr] = "", place
        elif event.name != _STEP and event.scope != 1:  # 1: a gradient's node, whose operators are counted
            parent = event.cpu_parent
            if parent is not None and parent.name.startswith(_ENGINE) and event.name in ("aten::add", "aten::add_"):
                kind = RESIDUAL  # gradients of a tensor that is used twice
            own_kind = kind = kind or self._kind(event, place)
            if event.sequence_nr >= 0:
                self.forward[event.sequence_nr] = (LAYOUT if kind == DISPATCH else kind), ""  # a view's gradient may copy
        self.times[own_kind] += sum(k.duration for k in event.kernels) if self.gpu else event.self_cpu_time_total
        for child in sorted(event.cpu_children, key=lambda e: e.time_range.start):
            self._visit(child, place, kind)

    def _gradient(self, event: FunctionEvent) -> tuple[str, str]:
        """Return (kind, range) of the forward operator whose gradient this event computes."""
        if event.name.endswith("AccumulateGrad"):
            return RESIDUAL, ""
        numbers = (node.sequence_nr for node in event.cpu_children if node.scope == 1)
        return next((self.forward[n] for n in numbers if n in self.forward), (UNKNOWN, ""))

    def _kind(self, event: FunctionEvent, place: str) -> str:
        if place not in ("", _ATTENTION, _FUNCTION):
            return place
        kind, shape = _KIND_OF.get(event.name.removeprefix("aten::"), UNKNOWN), (event.input_shapes or [[]])[0]
        if event.name in _OF_TOKENS and self.widths.isdisjoint(shape[-2:]):
            return BIAS
        if (place and kind == PATCHES) or (place == _ATTENTION and kind == RESIDUAL):
            return BIAS
        return PRODUCTS if place == _FUNCTION and kind in (RESIDUAL, UNKNOWN) else kind


class Profiled(NamedTuple):
    """A step to profile, on `batch` square images of `size` px: (name, arguments) of vitrel's model and perhaps timm's."""

    name: str
    size: int
    batch: int
    ours: tuple[str, dict[str, Any]]
    peer: tuple[str, dict[str, Any]] | None = None

    def contenders(self, mode: str) -> tuple[str, ...]:
        """Names of the contenders; optimized models are for inference."""
        return (_EAGER, *([_OPTIMIZED] if mode == "inference" else []), *([_TIMM] if self.peer is not None else []))


_PROFILED = (
    Profiled("Swin-T 224, batch 8", 224, 8, ("vitrel_swin_t", {}), ("swin_tiny_patch4_window7_224", {})),
    Profiled("ViT-S table 224, batch 8", 224, 8, ("vitrel_vit_s16_table", {})),
    Profiled("ViT-S table 448, batch 1", 448, 1, ("vitrel_vit_s16_table", {"img_size": 448})),
)
_SMALL = {"img_size": 64, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (1, 2)}
_QUICK_PROFILED = (
    Profiled("Swin-N 64, batch 2", 64, 2, ("vitrel_swin_n", {}), ("swin_tiny_patch4_window7_224", _SMALL)),
    Profiled("ViT-N table 64, batch 2", 64, 2, ("vitrel_vit_n8_table", {})),
)


def share_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases of the suite: steps of vitrel's models, plain and optimized, and of timm's."""
    return [share_case(profiled, mode, quick) for profiled in (_QUICK_PROFILED if quick else _PROFILED) for mode in MODES]


def share_case(profiled: Profiled, mode: str, quick: bool = False) -> Case:
    """Return the case of one step, run several times with and without the profiler in turn."""
    common = dict(
        size=profiled.size, batch=profiled.batch, training=mode == "training", steps=_QUICK_STEPS if quick else _STEPS
    )
    contenders = []
    for name in profiled.contenders(mode):
        model, args = profiled.peer if name == _TIMM else profiled.ours
        arguments = common | dict(model=model, args=args, optimized=name == _OPTIMIZED)
        contenders.append(Contender(name, "peer" if name == _TIMM else "ours", arguments, None))
    return Case(profiled.name, f"{__name__}:ProfiledCall", tuple(contenders), (Visit(mode),), kind="shares", together=False)


class ProfiledCall:
    """A forward pass, or forward, cross entropy and backward, of a model with its default drop path."""

    def __init__(
        self,
        model: str,
        args: dict[str, Any],
        size: int,
        batch: int,
        training: bool,
        optimized: bool,
        steps: int,
        device: str = "cpu",
    ):
        torch.manual_seed(0)
        self.device, self.training, self.steps = torch.device(device), training, steps
        self.model = timm.create_model(model, **args).to(device).train(training)
        if optimized:
            from vitrel.cpu.optimize import optimize

            optimize(self.model)
        self.image = torch.randn(batch, 3, size, size, device=device)
        self.target = torch.zeros(batch, dtype=torch.long, device=device)

    def __call__(self) -> dict[str, Tensor]:
        if self.training:
            F.cross_entropy(self.model(self.image), self.target).backward()
            return {}
        with torch.inference_mode():
            return {"output": self.model(self.image)}

    def about(self) -> dict[str, Any]:
        """Return milliseconds by kind of work in each profiled step, and of the same steps without profiler and hooks."""
        watch, unprofiled = Stopwatch(self.device, isolated=False), []
        times_by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(-_WARM_UP, self.steps):
            self.model.zero_grad()
            times = profile_step(self, self.model, self.device)
            self.model.zero_grad()
            duration, _ = watch(self)
            if number >= 0:
                unprofiled.append(round(duration, 4))
                for kind, ms in times.items():
                    times_by_kind[kind].append(round(ms, 4))
        return {"ms": times_by_kind, "not_profiled_ms": unprofiled}
