"""The suites of whole models: vitrel's and the peers' at their best setting, at one image size and over eight resolutions.

vitrel's models are first checked at an image size that windows and patches do not divide, where timm attends to padding: there
vitrel's plain model is the yardstick.
"""

from typing import Any, NamedTuple

from tools.benchmark.engine import Case, Contender, Visit
from tools.benchmark.models import MODELS
from tools.benchmark.worker import Repeats

HARD = (200, 232)  # pixels: neither windows nor patches divide it, and it is not square
RESOLUTIONS = ((224, 224), (96, 96), (128, 128), (128, 192), (160, 224), (320, 256), (384, 320), (448, 448))  # native first
QUICK_RESOLUTIONS = ((112, 112), (96, 144), (128, 128))
_FEW = ((224, 224), (128, 128), (320, 256), (448, 448))  # for peers whose compilation takes a minute per size on a CPU
# Gradients that nearly cancel (biases of norms) have errors up to 0.7 in bf16; a missing gradient has an error of 1.
_HALF_GRADIENT = 0.99
_BUILD, _PATIENCE = "tools.benchmark.models:model_call", 1200.0  # seconds, for the longest compilation
_PLANS = {"quick": Repeats(1, 2, 0.2, 2), "cpu": Repeats(3, 7, 3.0, 3), "gpu": Repeats(20, 7, 0.5, 20)}
_SWEEPS = {"quick": Repeats(1, 2, 0.2, 2), "cpu": Repeats(2, 7, 1.0, 3), "gpu": Repeats(20, 7, 0.3, 20)}


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


def _task(models: str, side: int, batch: int, mode: str, dtype: str = "float32", **more: Any) -> Task:
    """models: names of MODELS, joined by " against "."""
    words = dict(float32="fp32", bfloat16="bf16", amp="bf16 amp")[dtype]
    title = more.pop("title", models)
    return Task(
        f"{title}, {side}, batch {batch}, {words}", tuple(models.split(" against ")), (side,) * 2, batch, dtype, mode, **more
    )


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
    _task("ViT-S table", 224, 8, "inference"),
    _task("ViT-S table", 224, 1, "inference"),
    _task("ViT-S absolute", 224, 8, "inference"),
    _task("ViT-S absolute", 224, 1, "inference"),
    _task("ViT-S rope", 224, 8, "inference"),
    _task("ViT-S rope", 224, 1, "inference"),
    _task("ViT-B absolute", 224, 1, "inference", thorough=True),
)
GPU_TASKS = (
    _task("Swin-T", 224, 256, "training", "amp", thorough=True),
    _task("Swin-T", 224, 256, "inference", "bfloat16", thorough=True),
    _task("ViT-B table", 448, 64, "training", "amp"),
    _task("ViT-B table", 1024, 8, "training", "amp"),
    _task(_POSITIONS, 224, 256, "inference", "bfloat16", title="ViT-B with and without position"),
    _task("Swin-T against ViT-S absolute", 224, 256, "inference", "bfloat16"),
    _task(_POSITIONS, 224, 128, "training", "amp", title="ViT-B with and without position"),
    _task("Swin-T", 224, 1, "inference", "bfloat16"),
    _task("ViT-S table", 448, 64, "inference", "bfloat16"),
    _task("ViT-B table", 1024, 16, "inference", "bfloat16"),
    _task("Swin-B", 224, 128, "training", "amp"),
    _task("Swin-B", 224, 256, "inference", "bfloat16"),
    _task("Swin-B w12", 384, 64, "inference", "bfloat16"),
    _task("ViT-S rope", 224, 256, "inference", "bfloat16"),
    _task("ViT-S absolute", 224, 256, "inference", "bfloat16"),
    _task("ViT-B absolute", 224, 256, "inference", "bfloat16", thorough=True),
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
    """Return the case of a task; for every model timm's comes first, as the yardstick. quick: nothing compiled."""
    contenders = [contender for model in task.models for contender in _of_model(model, task, gpu, quick)]
    row = dict(size=list(task.size), batch=task.batch)
    plan = _PLANS["quick" if quick else "gpu" if gpu else "cpu"]
    return _case(task.name, contenders, (Visit(task.mode),), task.dtype, plan=plan, row=row)


def _case(name: str, contenders: list[Contender], visits: tuple[Visit, ...], dtype: str, **more: Any) -> Case:
    half = None if dtype == "float32" else _HALF_GRADIENT
    return Case(name, _BUILD, tuple(contenders), visits, dtype, gradient_cap=half, patience=_PATIENCE, **more)


def _of_model(model: str, task: Task, gpu: bool, quick: bool) -> list[Contender]:
    spec, contenders, several = MODELS[model], [], len(task.models) > 1
    swin = "swin" in spec.timm
    optimizes = not gpu and task.mode == "inference"
    ways = ["eager", "optimized"] if optimizes else ["eager"]

    def add(library: str, how: str, fused: bool = False) -> None:
        name = library if how == "eager" else f"{library}, {how}"
        name = f"{model}: {name}" if several else name
        before = None
        if library == "ours":
            small = how.startswith("compiled")
            gate = hard_case(spec.small or model, task.mode, ["eager", how]) if small else hard_case(model, task.mode, ways)
            before = gate, f"ours, {how}"
        contenders.append(_contender(f"{name}, fused attention" if fused else name, library, model, how, task, fused, before))

    add("timm", "eager")
    if swin and not several:
        add("timm", "eager", fused=True)
    add("ours", "eager")
    if optimizes:
        add("ours", "optimized")
        add("timm", "optimized", fused=swin)
    if quick or (several and not gpu):
        return contenders
    add("ours", "compiled")
    add("timm", "compiled")
    if several:
        return contenders
    if swin:
        add("timm", "compiled", fused=True)
    if task.thorough:
        add("timm", "compiled, max-autotune")
    if task.thorough and gpu:
        add("ours", "compiled, max-autotune")
    for library in ("torchvision", "transformers"):
        if getattr(spec, library):
            add(library, "eager")
            if task.thorough:
                add(library, "compiled")
    return contenders


def _contender(
    name: str,
    library: str,
    model: str,
    how: str,
    task: Task,
    fused: bool = False,
    before: tuple[Case, str] | None = None,
    **more: Any,
) -> Contender:
    """Return a contender: a model of a library, run one way. Its truth is vitrel's definition with the same weights.

    vitrel's models have timm's weights. fused: fused attention in timm's Swin, which is off by default.
    """
    of = "ours" if library == "ours" else "both" if how == "optimized" else "peer"
    common = dict(model=model, size=task.size, batch=task.batch, mode=task.mode)
    args = common | dict(library=library, how=how, dtype=task.dtype)
    weights = "timm" if library == "ours" else library
    truth = common | dict(library=f"ours/{weights}", how="reference", dtype="float64")
    env = {"TIMM_FUSED_ATTN": "2" if fused else "1"}
    return Contender(name, of, args, truth, of != "peer", dict(model=model, how=how), env, before=before, **more)


def hard_case(model: str, mode: str, ways: list[str]) -> Case:
    """Return the case that checks vitrel's model at size HARD, run in several ways, and times nothing."""
    task = Task(f"{model}, {HARD[0]}x{HARD[1]}", (model,), (224, 224), 2, "float32", mode)
    contenders = [_contender(f"ours, {how}", "ours", model, how, task) for how in ways]
    image = dict(image=HARD)
    contenders = [contender._replace(args=contender.args | image, truth=contender.truth | image) for contender in contenders]
    return _case(task.name, contenders, (Visit(mode),), task.dtype, kind="gate")


def resolution_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases over resolutions: speed, memory, and the time to the first result at a new size."""
    models = ("Swin nano", "ViT nano table") if quick else ("Swin-T", "ViT-S table")
    return [resolution_case(model, gpu, quick) for model in models]


def resolution_case(model: str, gpu: bool, quick: bool = False) -> Case:
    """Return the case of a model over resolutions, timm's plain model first, whose error at the native size is the yardstick.

    Peers are checked at the native size only: at other sizes they resize tables or attend to padding by other rules.
    """
    sizes, swin = QUICK_RESOLUTIONS if quick else RESOLUTIONS, "swin" in MODELS[model].timm
    batch, dtype = (32, "bfloat16") if gpu else (1, "float32")
    task = Task(f"{model} over resolutions, batch {batch}", (model,), sizes[0], batch, dtype, "inference")
    visits = tuple(
        Visit(f"inference, {h}x{w}", {"image": (h, w)}, {"size": [h, w]}, exact_only=(h, w) != sizes[0]) for h, w in sizes
    )
    contenders = [_contender("timm", "timm", model, "eager", task, swin), _contender("ours", "ours", model, "eager", task)]
    if not gpu:
        contenders.append(_contender("ours, optimized", "ours", model, "optimized", task))
    if not quick:  # minutes, even for small models
        contenders.append(_contender("ours, compiled", "ours", model, "compiled", task))
        skips = () if gpu else tuple(visit.mode for visit, size in zip(visits, sizes, strict=True) if size not in _FEW)
        contenders.append(_contender("timm, compiled", "timm", model, "compiled", task, swin, skips=skips))
    plan = _SWEEPS["quick" if quick else "gpu" if gpu else "cpu"]
    return _case(task.name, contenders, visits, dtype, plan=plan, row=dict(batch=batch))
