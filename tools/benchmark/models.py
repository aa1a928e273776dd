"""The suites of whole models: vitrel's and timm's with the same weights, at one image size and over eight."""

import contextlib
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrel
from tools.benchmark.engine import Case, Contender, Visit
from tools.benchmark.shapes import STD
from tools.benchmark.worker import Repeats
from vitrel.ops.why import use_backend
from vitrel.weights.load import plan_weights

_PART = 4 * 224 * 224  # pixels per pass of the definition, which holds all scores in float64
RESOLUTIONS = ((224, 224), (96, 96), (128, 128), (128, 192), (160, 224), (320, 256), (384, 320), (448, 448))  # native first
QUICK_RESOLUTIONS = ((112, 112), (96, 144), (128, 128))
_FEW = ((224, 224), (128, 128), (320, 256), (448, 448))  # for peers whose compilation takes a minute per size on a CPU
_PATIENCE = 1200.0  # seconds, for the longest compilation
_PLANS = {"quick": Repeats(1, 2, 0.2, 2), "cpu": Repeats(3, 7, 3.0, 3), "gpu": Repeats(20, 7, 0.5, 20)}


class Model(NamedTuple):
    """A model's name in vitrel and in timm, with arguments."""

    ours: str
    timm: str
    ours_args: dict[str, Any]
    timm_args: dict[str, Any]


def _swin(ours: str, peer: str, **args: Any) -> Model:
    """Return a Swin; drop path is 0, since with random drops no two contenders compute the same step."""
    window = dict(window_size=12) if "window12" in peer else {}
    timm_args = dict(drop_path_rate=0.0, dynamic_img_size=True, **args)
    return Model(ours, peer, dict(drop_path_rate=0.0, **window, **args), timm_args)


def _vit(letter: str, kind: str, **args: Any) -> Model:
    """kind: "absolute"; "table" and "none" have no class token; "rope" and "none scaled" have layer scale."""
    size = {"s": "small", "b": "base"}[letter]
    ours, peer = f"vitrel_vit_{letter}16_{kind}", f"vit_{size}_patch16"
    plain, any_size = dict(class_token=False, global_pool="avg"), dict(dynamic_img_size=True)
    scaled = dict(block_args=dict(init_values=1.0))  # without layer scale, RoPE-ViT's weights look like vitrel's
    if kind == "table":
        timm_args = dict(rel_pos_type="bias", qkv_bias=True, init_values=None, fc_norm=True, **plain)
        return Model(ours, f"vit_relpos_{size}_patch16_224", plain | args, timm_args | args)
    if kind == "none":
        return Model(ours, f"{peer}_224", plain | args, dict(pos_embed="none", fc_norm=True, **plain, **any_size) | args)
    if kind == "none scaled":
        timm_args = dict(pos_embed="none", init_values=1.0, **any_size)
        return Model(ours.removesuffix(" scaled"), f"{peer}_224", scaled | args, timm_args | args)
    if kind == "rope":
        rope_args = dict(position_args=dict(base=100.0, reference=None), **scaled)
        return Model(f"{ours}_axial", f"{peer}_rope_224", rope_args | args, dict(init_values=1.0) | any_size | args)
    return Model(ours, f"{peer}_224", args, any_size | args)


_TINY = "swin_tiny_patch4_window7_224"
_VITS = ("table", "absolute", "rope", "none", "none scaled")
MODELS = {
    "Swin-T": _swin("vitrel_swin_t", _TINY),
    "Swin-B": _swin("vitrel_swin_b", "swin_base_patch4_window7_224"),
    "Swin-B w12": _swin("vitrel_swin_b", "swin_base_patch4_window12_384"),
    "Swin nano": _swin("vitrel_swin_t", _TINY, embed_dim=32, depths=(2, 2), num_heads=(2, 4)),
    **{f"ViT-S {kind}": _vit("s", kind) for kind in _VITS},
    **{f"ViT-B {kind}": _vit("b", kind) for kind in _VITS},
    **{f"ViT nano {kind}": _vit("s", kind, embed_dim=96, depth=2, num_heads=3) for kind in _VITS},
}


def peer_model(name: str, size: tuple[int, int]) -> nn.Module:
    """Return timm's model for images of (h, w), in train mode, with weights drawn from a fixed seed.

    They are so large that errors show: position of STD, vectors changed by 0.1, matrices of 1/sqrt(fan-in).
    """
    spec = MODELS[name]
    torch.manual_seed(0)
    net = timm.model_entrypoint(spec.timm)(img_size=size, **spec.timm_args)  # create_model would drop a None
    with torch.no_grad():
        for key, value in net.named_parameters():
            if "bias_table" in key or "pos_embed" in key or value.shape[:1] == (1,):
                value.normal_(std=STD)
            elif value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
            else:
                value.normal_(std=value[0].numel() ** -0.5)
    return net


def our_model(name: str, size: tuple[int, int]) -> nn.Module:
    """Return vitrel's model with the weights of `peer_model(name, size)`; in train mode."""
    net = timm.create_model(MODELS[name].ours, img_size=size, **MODELS[name].ours_args)
    return vitrel.load_pretrained(net, peer_model(name, size).state_dict())


class ModelCall:
    """One call of a model: a forward pass, or a training step of forward, cross entropy, backward and fused AdamW.

    Returns {"output"} or {"loss"} and the gradients by parameter. Images are random; `set` draws images of another size.
    ours: vitrel's model, for timm's gradients under our names in gates; None if `net` is that.
    """

    def __init__(self, net: nn.Module, ours: nn.Module | None, how: str, batch: int, dtype: str, mode: str, device: str):
        self.training, self.how, self.batch, self.device = mode == "training", how, batch, device
        self.net, self.ours = net.to(device, _cast(dtype)).train(self.training), ours
        self.dtype, self.forward = dtype, self.net
        torch.backends.cudnn.allow_tf32 = dtype != "float32"  # the patch embedding is a convolution
        if how == "optimized":
            vitrel.optimize(self.net)
        elif how.startswith("compiled"):
            self.forward = torch.compile(self.net, mode=how.partition(", ")[2] or None)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=True) if self.training else None

    def set(self, image: tuple[int, int]) -> None:
        """New images of (h, w), the same in every process; a model that takes one size alone is changed to it."""
        size = tuple(image)
        if getattr(getattr(self.net, "patch_embed", None), "strict_img_size", False) and self.net.patch_embed.img_size != size:
            self.net.set_input_size(img_size=size)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch, 3, *size, generator=generator, dtype=torch.float64)
        self.images = images.to(self.device, _cast(self.dtype))
        self.targets = torch.randint(1000, (self.batch,), generator=generator).to(self.device)

    def __call__(self) -> dict[str, Tensor]:
        if self.how == "reference":
            return self._definition()
        if not self.training:
            with torch.inference_mode(), self._around():
                return {"output": self.forward(self.images)}
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.images, self.targets)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()} | self._gradients()

    def checked(self, returned: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for the gate, gradients under the names of vitrel's parameters: rearranged as weights are."""
        if self.ours is None or not self.training:
            return returned
        gradients = {name: x for name, x in returned.items() if name != "loss"}
        planned = plan_weights(self.ours, gradients).state
        return {"loss": returned["loss"]} | {name: x for name, x in planned.items() if x is not None}

    def _definition(self) -> dict[str, Tensor]:
        """Return the same by the backend `reference`, a few images at a time and without an update of the weights."""
        self.net.zero_grad()
        part = max(1, _PART // self.images[0, 0].numel())
        parts = list(zip(self.images.split(part), self.targets.split(part), strict=True))
        with use_backend("reference"):
            if not self.training:
                with torch.inference_mode():
                    return {"output": torch.cat([self.forward(images) for images, _ in parts])}
            total = 0.0
            for images, targets in parts:
                loss = self._loss(images, targets) * (len(images) / self.batch)
                loss.backward()
                total += loss.detach()
        return {"loss": total} | self._gradients()

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        with self._around():
            logits = self.forward(images)
        return F.cross_entropy(logits.double() if self.dtype == "float64" else logits.float(), targets)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self.net.named_parameters() if value.grad is not None}

    def _around(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == "amp" else contextlib.nullcontext()


def model_call(
    library: str,
    model: str,
    how: str,
    size: tuple[int, int],
    batch: int,
    dtype: str = "float32",
    mode: str = "inference",
    device: str = "cpu",
    image: tuple[int, int] | None = None,
) -> ModelCall:
    """Return the call of a worker. library: "ours" (vitrel with timm's weights) or "timm". size: (h, w).

    how: "eager", "optimized", "compiled", "compiled, max-autotune", "reference". dtype: "float32", "float64", "bfloat16"
    (weights too) or "amp". image: size of the images, default `size`.
    """
    net, ours = (our_model(model, size), None) if library == "ours" else (peer_model(model, size), our_model(model, size))
    call = ModelCall(net, ours, how, batch, dtype, mode, device)
    call.set(image or size)
    return call


def _cast(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "amp" else getattr(torch, dtype)


class Task(NamedTuple):
    """A measurement of one model, or of several against each other. size: (h, w) in pixels.

    dtype: "float32", "bfloat16" (weights too) or "amp". mode: "inference" or "training". thorough: include contenders that
    take minutes to compile.
    """

    name: str
    models: tuple[str, ...]
    size: tuple[int, int]
    batch: int
    dtype: str
    mode: str
    thorough: bool = False


def _task(models: str, side: int, batch: int, mode: str, dtype: str = "float32", title: str = "", **more: Any) -> Task:
    """models: names of MODELS, joined by " against "."""
    words = dict(float32="fp32", bfloat16="bf16", amp="bf16 amp")[dtype]
    name = f"{title or models}, {side}, batch {batch}, {words}"
    return Task(name, tuple(models.split(" against ")), (side,) * 2, batch, dtype, mode, **more)


_POSITIONS = "ViT-B table against ViT-B none against ViT-B rope against ViT-B none scaled"
CPU_TASKS = (  # the most important first
    _task("Swin-T", 224, 8, "inference", thorough=True),
    _task("Swin-T", 224, 1, "inference"),
    _task("Swin-T", 224, 8, "training"),
    _task("ViT-S table", 448, 1, "inference"),
    _task("Swin-T against ViT-S absolute", 224, 8, "inference"),
    _task("Swin-T", 224, 1, "inference", "bfloat16"),
    _task(_POSITIONS, 224, 1, "inference", title="ViT-B with and without position"),
    _task("ViT-S table", 224, 8, "training"),
    *(_task(f"ViT-S {kind}", 224, batch, "inference") for kind in ("table", "absolute", "rope") for batch in (8, 1)),
)
GPU_TASKS = (
    _task("Swin-T", 224, 256, "training", "amp", thorough=True),
    _task("Swin-T", 224, 256, "inference", "bfloat16", thorough=True),
    _task("ViT-B table", 448, 64, "training", "amp"),
    _task("ViT-B table", 1024, 8, "training", "amp"),
    _task(_POSITIONS, 224, 256, "inference", "bfloat16", title="ViT-B with and without position"),
    _task("Swin-T", 224, 1, "inference", "bfloat16"),
    _task("ViT-B table", 1024, 16, "inference", "bfloat16"),
    _task("Swin-B", 224, 128, "training", "amp"),
    _task("Swin-B w12", 384, 64, "inference", "bfloat16"),
)
QUICK_TASKS = (  # smoke test
    _task("Swin nano", 112, 2, "inference"),
    _task("Swin nano", 112, 2, "training"),
    _task("ViT nano table", 96, 2, "inference"),
    _task("Swin nano against ViT nano absolute", 112, 2, "inference"),
)


def model_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases of a device, the most important first."""
    return [model_case(task, gpu, quick) for task in (QUICK_TASKS if quick else GPU_TASKS if gpu else CPU_TASKS)]


def model_case(task: Task, gpu: bool, quick: bool = False) -> Case:
    """Return the case of a task. quick: nothing compiled."""
    contenders = [contender for model in task.models for contender in _of_model(model, task, gpu, quick)]
    return _case(task, contenders, (Visit(task.mode),), gpu, quick, dict(size=list(task.size), batch=task.batch))


def _case(
    task: Task, contenders: list[Contender], visits: tuple[Visit, ...], gpu: bool, quick: bool, row: dict[str, Any]
) -> Case:
    plan = _PLANS["quick" if quick else "gpu" if gpu else "cpu"]
    build = f"{__name__}:model_call"
    return Case(task.name, build, tuple(contenders), visits, plan, task.dtype, row=row, patience=_PATIENCE)


def _of_model(model: str, task: Task, gpu: bool, quick: bool) -> list[Contender]:
    several, swin = len(task.models) > 1, "swin" in MODELS[model].timm
    optimizes = not gpu and task.mode == "inference"
    ways = [("timm", "eager", False), ("ours", "eager", False)]  # library, how, timm's fused attention
    ways += [("timm", "eager", True)] if swin and not several else []
    ways += [("ours", "optimized", False), ("timm", "optimized", swin)] if optimizes else []
    if not quick and (gpu or not several):
        ways += [("ours", "compiled", False), ("timm", "compiled", False)]
        ways += [("timm", "compiled", True)] if swin and not several else []
        ways += [("timm", "compiled, max-autotune", False)] if task.thorough else []
        ways += [("ours", "compiled, max-autotune", False)] if task.thorough and gpu else []
    return [_contender(library, model, how, task, fused, several) for library, how, fused in ways]


def _contender(
    library: str,
    model: str,
    how: str,
    task: Task,
    fused: bool = False,
    several: bool = False,
    skips: tuple[str, ...] = (),
) -> Contender:
    """Return a contender: a model of a library, run one way. fused: fused attention in timm's Swin, which is off by default."""
    name = f"{model}: " * several + library + f", {how}" * (how != "eager") + ", fused attention" * fused
    of = "ours" if library == "ours" else "both" if how == "optimized" else "peer"
    common = dict(model=model, size=task.size, batch=task.batch, mode=task.mode)
    args = common | dict(library=library, how=how, dtype=task.dtype)
    truth = common | dict(library="ours", how="reference", dtype="float64")
    env = {"TIMM_FUSED_ATTN": "2" if fused else "1"}
    return Contender(name, of, args, truth, dict(model=model, how=how), env, skips)


def resolution_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases over resolutions: speed, memory, and the time to the first result at a new size."""
    return [resolution_case(model, gpu, quick) for model in (("Swin nano",) if quick else ("Swin-T", "ViT-S table"))]


def resolution_case(model: str, gpu: bool, quick: bool = False) -> Case:
    """Return the case of a model over resolutions.

    Peers are checked at the native size only: at other sizes they resize tables or attend to padding by other rules.
    """
    sizes, swin = QUICK_RESOLUTIONS if quick else RESOLUTIONS, "swin" in MODELS[model].timm
    batch, dtype = (32, "bfloat16") if gpu else (1, "float32")
    task = Task(f"{model} over resolutions, batch {batch}", (model,), sizes[0], batch, dtype, "inference")
    visits = tuple(Visit(f"inference, {h}x{w}", {"image": (h, w)}, {"size": [h, w]}, (h, w) != sizes[0]) for h, w in sizes)
    contenders = [
        _contender("timm", model, "eager", task, swin)._replace(name="timm"),
        _contender("ours", model, "eager", task),
    ]
    if not gpu:
        contenders.append(_contender("ours", model, "optimized", task))
    if not quick:  # minutes, even for small models
        contenders.append(_contender("ours", model, "compiled", task))
        skips = () if gpu else tuple(visit.mode for visit, size in zip(visits, sizes, strict=True) if size not in _FEW)
        contenders.append(_contender("timm", model, "compiled", task, swin, skips=skips)._replace(name="timm, compiled"))
    return _case(task, contenders, visits, gpu, quick, dict(batch=batch))
