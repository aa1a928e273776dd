"""Which models are measured in which shapes, and who takes part: ours, and the peers at their best setting."""

from typing import Any, NamedTuple

from tools.benchmark.models import MODELS


class ModelCase(NamedTuple):
    """What is done with one model, or with several that are timed against each other. size: (h, w) in pixels."""

    name: str
    models: tuple[str, ...]
    size: tuple[int, int]
    batch: int
    dtype: str  # "float32" | "bfloat16" (weights too) | "amp"
    mode: str  # "inference" | "training"
    thorough: bool = False  # with what takes minutes to compile


class ModelContender(NamedTuple):
    """One way to compute a case in a process of its own. of: "ours", "peer", or "both": a peer's model, optimized by us.

    fused: with fused attention in timm's Swin, which it has to be asked for.
    """

    name: str
    of: str
    model: str
    library: str
    how: str
    fused: bool = False

    @property
    def env(self) -> dict[str, str]:
        """The environment of its process."""
        return {"TIMM_FUSED_ATTN": "2" if self.fused else "1"}

    def args(self, case: ModelCase) -> dict[str, Any]:
        """The arguments of `model_call`, but the device."""
        own = dict(library=self.library, model=self.model, how=self.how)
        return own | dict(size=case.size, batch=case.batch, dtype=case.dtype, mode=case.mode)


def case(models: str, side: int, batch: int, mode: str, dtype: str = "float32", **more: Any) -> ModelCase:
    """models: names of MODELS, joined by " against "."""
    words = dict(float32="fp32", bfloat16="bf16", amp="bf16 amp")[dtype]
    title = more.pop("title", models)
    return ModelCase(
        f"{title}, {side}, batch {batch}, {words}", tuple(models.split(" against ")), (side,) * 2, batch, dtype, mode, **more
    )


_POSITIONS = "ViT-B table against ViT-B none against ViT-B rope against ViT-B none scaled"
CPU_MODEL_CASES = (  # what matters most comes first
    case("Swin-T", 224, 8, "inference", thorough=True),
    case("Swin-T", 224, 1, "inference"),
    case("Swin-T", 224, 8, "training"),
    case("ViT-S table", 448, 1, "inference"),
    case("Swin-T against ViT-S absolute", 224, 8, "inference"),
    case("Swin-T", 224, 1, "inference", "bfloat16"),
    case(_POSITIONS, 224, 1, "inference", title="ViT-B with and without position"),
    case("ViT-S table", 224, 8, "training"),
    case("ViT-S table", 224, 8, "inference"),
    case("ViT-S table", 224, 1, "inference"),
    case("ViT-S absolute", 224, 8, "inference"),
    case("ViT-S absolute", 224, 1, "inference"),
    case("ViT-S rope", 224, 8, "inference"),
    case("ViT-S rope", 224, 1, "inference"),
    case("ViT-B absolute", 224, 1, "inference", thorough=True),
)
GPU_MODEL_CASES = (
    case("Swin-T", 224, 256, "training", "amp", thorough=True),
    case("Swin-T", 224, 256, "inference", "bfloat16", thorough=True),
    case("ViT-B table", 448, 64, "training", "amp"),
    case("ViT-B table", 1024, 8, "training", "amp"),
    case(_POSITIONS, 224, 256, "inference", "bfloat16", title="ViT-B with and without position"),
    case("Swin-T against ViT-S absolute", 224, 256, "inference", "bfloat16"),
    case(_POSITIONS, 224, 128, "training", "amp", title="ViT-B with and without position"),
    case("Swin-T", 224, 1, "inference", "bfloat16"),
    case("ViT-S table", 448, 64, "inference", "bfloat16"),
    case("ViT-B table", 1024, 16, "inference", "bfloat16"),
    case("Swin-B", 224, 128, "training", "amp"),
    case("Swin-B", 224, 256, "inference", "bfloat16"),
    case("Swin-B w12", 384, 64, "inference", "bfloat16"),
    case("ViT-S rope", 224, 256, "inference", "bfloat16"),
    case("ViT-S absolute", 224, 256, "inference", "bfloat16"),
    case("ViT-B absolute", 224, 256, "inference", "bfloat16", thorough=True),
)
QUICK_MODEL_CASES = (  # to see that all of it runs
    case("Swin nano", 112, 2, "inference"),
    case("Swin nano", 112, 2, "training"),
    case("ViT nano table", 96, 2, "inference"),
    case("Swin nano against ViT nano absolute", 112, 2, "inference"),
)


def model_contenders(case: ModelCase, gpu: bool, quick: bool = False) -> list[ModelContender]:
    """All for a case; of every model timm's own comes first, whose error is the yardstick. quick: nothing compiled."""
    found = []
    for model in case.models:
        found += _of_model(model, case, gpu, quick)
    return found


def _of_model(model: str, case: ModelCase, gpu: bool, quick: bool) -> list[ModelContender]:
    spec, found, several = MODELS[model], [], len(case.models) > 1
    swin = "swin" in spec.timm

    def add(library: str, how: str, fused: bool = False) -> None:
        of = "ours" if library == "ours" else "both" if how == "optimized" else "peer"
        name = library if how == "eager" else f"{library}, {how}"
        name = f"{model}: {name}" if several else name
        found.append(ModelContender(f"{name}, fused attention" if fused else name, of, model, library, how, fused))

    add("timm", "eager")
    if swin and not several:
        add("timm", "eager", fused=True)
    add("ours", "eager")
    if not gpu:
        add("ours", "optimized")
        add("timm", "optimized", fused=swin)
    if quick or (several and not gpu):
        return found
    add("ours", "compiled")
    add("timm", "compiled")
    if several:
        return found
    if swin:
        add("timm", "compiled", fused=True)
    if case.thorough:
        add("timm", "compiled, max-autotune")
    if case.thorough and gpu:
        add("ours", "compiled, max-autotune")
    for library in ("torchvision", "transformers"):
        if getattr(spec, library):
            add(library, "eager")
            if case.thorough:
                add(library, "compiled")
    return found
