"""The suite of whole models: vitrel's and timm's with the same weights, other libraries' with weights of their own."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vitrel
from tools.benchmark.engine import Arguments, Case, Contender, Visit
from tools.benchmark.worker import Repeats
from vitrel.ops.why import use_backend
from vitrel.weights.plan import plan_weights

STD = 0.5  # of bias and query tables; with values near zero, wrong indices would not show
_PART = 4 * 224 * 224  # pixels per pass of the definition, which holds all scores in float64
_PATIENCE = 1200.0  # seconds, for the longest compilation
_PLANS = {"quick": Repeats(1, 2, 0.2, 2), "cpu": Repeats(1, 5, 0.5, 3)}


class Model(NamedTuple):
    """A model's name in vitrel and in timm, with arguments."""

    ours: str
    timm: str
    ours_args: dict[str, Any]
    timm_args: dict[str, Any]


def _swin(ours: str, peer: str, **args: Any) -> Model:
    """Return a Swin. Its drop path is 0, since with random drops no two contenders would compute the same step."""
    any_size = dict(strict_img_size=False) if "v2" in peer else dict(dynamic_img_size=True)
    return Model(ours, peer, dict(drop_path_rate=0.0, **args), dict(drop_path_rate=0.0) | any_size | args)


def _vit(letter: str, kind: str, **args: Any) -> Model:
    """Return a ViT of a size, letter "s" or "b", and a kind of position.

    kind: "absolute"; "table" and "none", both without class token; "rope" and "none scaled", both with layer scale.
    """
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
_VITS = ("absolute", "table", "rope", "none", "none scaled")
MODELS = {
    "Swin-T": _swin("vitrel_swin_t", _TINY),
    "SwinV2-T": _swin("vitrel_swinv2_t", "swinv2_tiny_window8_256"),
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
    return vitrel.load_pretrained(net, vitrel.from_timm(peer_model(name, size)))


def model_without_position(name: str, size: tuple[int, int]) -> nn.Module:
    """Return vitrel's model without position, with weights of its own, in train mode."""
    torch.manual_seed(0)
    options = {key: value for key, value in MODELS[name].ours_args.items() if key != "position_args"}
    return timm.create_model(MODELS[name].ours, img_size=size, **options, position="none")


def other_model(library: str, name: str, side: int) -> nn.Module:
    """Return the model of torchvision or transformers of the same shape, with weights of its own, in train mode."""
    torch.manual_seed(0)
    common = dict(depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], embed_dim=96)
    if library == "torchvision":
        from torchvision.models import swin_transformer

        common |= dict(patch_size=[4, 4], window_size=[8, 8] if "V2" in name else [7, 7], stochastic_depth_prob=0.0)
        if "V2" in name:
            parts = swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2
            common |= dict(block=parts[0], downsample_layer=parts[1])
        return swin_transformer.SwinTransformer(**common)
    import transformers

    options = dict(image_size=side, num_labels=1000, attn_implementation="sdpa")
    if "ViT" in name:
        sizes = dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536)
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **options))
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(window_size=7, drop_path_rate=0.0, **common, **options)
    )


class Launches(TorchDispatchMode):
    """Counts operators without views and allocations; on a GPU each is a kernel launch."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = operator.name().partition("::")[2].partition(".")[0]
        self.count += not (operator.is_view or name in ("detach", "alias", "_unsafe_view") or "empty" in name)
        return operator(*args, **(kwargs or {}))


class ModelCall:
    """One call of a model: a forward pass, or a training step of forward, cross entropy, backward and fused AdamW.

    Returns {"output"} or {"loss"} and the gradients by parameter. Images are random; `set` changes size, batch and mode.
    ours: builds vitrel's model, for timm's gradients under our names in gates; None if `net` is that. Compiled graphs are of
    one shape (dynamic=False).
    """

    def __init__(self, net: nn.Module, ours: Callable[[], nn.Module] | None, how: str, dtype: str, device: str):
        self.how, self.device = how, device
        self.net, self.ours = net.to(device, _cast(dtype)), ours
        self.dtype, self.forward, self.optimizer = dtype, self.net, None
        torch.backends.cudnn.allow_tf32 = dtype != "float32"  # the patch embedding is a convolution
        if how == "compiled":
            self.forward = torch.compile(self.net, dynamic=False)

    def set(self, side: int, batch: int, mode: str) -> None:
        """Draw images, the same in every process; a model that takes one size alone is changed to it."""
        self.training, self.batch, size = mode == "training", batch, (side, side)
        self.net.train(self.training)
        embed = getattr(self.net, "patch_embed", None)
        if getattr(embed, "strict_img_size", False) and embed.img_size != size:
            self.net.set_input_size(img_size=size)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(batch, 3, *size, generator=generator, dtype=torch.float64)
        self.images = images.to(self.device, _cast(self.dtype))
        self.targets = torch.randint(1000, (batch,), generator=generator).to(self.device)
        if self.training and self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.0, fused=True)  # weights stay

    def launches(self) -> int | None:
        """Return the operators of one call of a model that is not compiled, for one image; else None."""
        if self.how == "compiled" or self.batch > 1:
            return None
        with Launches() as counted:
            self()
        return counted.count

    def __call__(self) -> dict[str, Tensor]:
        if self.how == "reference":
            return self._definition()
        if not self.training:
            with torch.inference_mode(), self._around():
                return {"output": self._logits(self.images)}
        loss = self._loss(self.images, self.targets)
        loss.backward()
        self.optimizer.step()
        found = {"loss": loss.detach()} | self._gradients()
        self.optimizer.zero_grad(set_to_none=True)  # at the end, so that the memory of every call includes its gradients
        return found

    def checked(self, returned: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for the gate, gradients under the names of vitrel's parameters: rearranged as weights are."""
        if self.ours is None or not self.training:
            return returned
        gradients = {name: x for name, x in returned.items() if name != "loss"}
        planned = plan_weights(self.ours(), gradients).state
        return {"loss": returned["loss"]} | {name: x for name, x in planned.items() if x is not None}

    def _definition(self) -> dict[str, Tensor]:
        """Return the same by the backend `reference`, a few images at a time and without an update of the weights."""
        self.net.zero_grad()
        part = max(1, _PART // self.images[0, 0].numel())
        parts = list(zip(self.images.split(part), self.targets.split(part), strict=True))
        with use_backend("reference"):
            if not self.training:
                with torch.inference_mode():
                    return {"output": torch.cat([self._logits(images) for images, _ in parts])}
            total = 0.0
            for images, targets in parts:
                loss = self._loss(images, targets) * (len(images) / self.batch)
                loss.backward()
                total += loss.detach()
        return {"loss": total} | self._gradients()

    def _logits(self, images: Tensor) -> Tensor:
        out = self.forward(images)
        return out if isinstance(out, Tensor) else out.logits

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        with self._around():
            logits = self._logits(images)
        return F.cross_entropy(logits.double() if self.dtype == "float64" else logits.float(), targets)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self.net.named_parameters() if value.grad is not None}

    def _around(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == "amp" else contextlib.nullcontext()


def model_call(
    library: str, model: str, how: str, native: int, dtype: str = "float32", device: str = "cpu", **visit: Any
) -> ModelCall:
    """Return the call of a worker. library: "ours" (vitrel with timm's weights), "timm", "none" (ours without position),
    "torchvision" or "transformers".

    how: "eager", "compiled", "reference". native: side of the images for which the model is built. dtype:
    "float32", "float64" or "amp". visit: arguments of ModelCall.set.
    """
    size, builders = (native, native), {"ours": our_model, "timm": peer_model, "none": model_without_position}
    net = builders[library](model, size) if library in builders else other_model(library, model, native)
    call = ModelCall(net, partial(our_model, model, size) if library == "timm" else None, how, dtype, device)
    call.set(**visit)
    return call


def _cast(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "amp" else getattr(torch, dtype)


class Setting(NamedTuple):
    """What is measured. groups: models timed against each other. batches: small and large. sides: native and another."""

    groups: tuple[tuple[str, ...], ...]
    batches: tuple[int, int]
    sides: tuple[int, int]
    compiled: bool = True


_VIT_S = ("ViT-S absolute", "ViT-S table", "ViT-S rope")
SETTINGS = {
    "cpu": Setting((_VIT_S, ("Swin-T",), ("SwinV2-T",)), (1, 8), (224, 320)),
    "quick": Setting((("ViT nano absolute", "ViT nano table"), ("Swin nano",)), (1, 2), (112, 96), False),
}
_THOROUGH = ("ViT-S table", "Swin-T")  # compiled also in training and at another size, which takes minutes
_FEW = Repeats(1, 3, 0.0, 1)  # for calls that take seconds on a CPU


def model_cases(quick: bool) -> list[Case]:
    """Return the cases: for every group of models what is not compiled, then for every model what is."""
    kind = "quick" if quick else "cpu"
    setting, cases = SETTINGS[kind], []
    for group in setting.groups:
        plain = [contender for model in group for contender in _plain(model, setting, kind)]
        cases.append(_case(", ".join(group), group[0], plain, setting, kind))
    for model in (model for group in setting.groups for model in group if setting.compiled):
        skips = _modes(model, setting, lambda v: v["batch"] != setting.batches[0])
        if model not in _THOROUGH:
            skips += _modes(model, setting, lambda v: v["mode"] == "training" or v["side"] == setting.sides[1])
        ways = [("timm", False), ("ours", False)] + [("timm", True)] * (model == "Swin-T")
        first = tuple(visit.mode for visit in visits_of(model, setting)[1:])
        contenders = [
            _contender(library, model, "compiled", setting, fused, first if fused else skips) for library, fused in ways
        ]
        cases.append(_case(f"{model}, compiled", model, contenders, setting, kind))
    return cases


def visits_of(model: str, setting: Setting) -> tuple[Visit, ...]:
    """Return the measurements of a model: inference and training, small and large batch, then inference at another size.

    Results are checked at the small batch, those of peers at the native size alone: they resize tables or see padding by other
    rules.
    """
    (few, many), side = setting.batches, _native(model, setting)
    known = [
        ("inference", few, side, ("ours", "peer")),
        ("inference", many, side, ()),
        ("training", few, side, ("ours", "peer")),
        ("training", many, side, ()),
        ("inference", few, setting.sides[1], ("ours",)),
    ]
    return tuple(
        Visit(
            f"{mode}, batch {batch}, {at} px",
            dict(side=at, batch=batch, mode=mode),
            dict(side=at, batch=batch),
            checks,
            _FEW if batch == 8 else None,
        )
        for mode, batch, at, checks in known
    )


def _modes(model: str, setting: Setting, chosen: Callable[[Arguments], bool]) -> tuple[str, ...]:
    """Return the names of the visits of a model whose arguments are chosen."""
    return tuple(visit.mode for visit in visits_of(model, setting) if chosen(visit.set))


def _native(model: str, setting: Setting) -> int:
    return 256 if "V2" in model else setting.sides[0]


def _case(name: str, model: str, contenders: list[Contender], setting: Setting, kind: str) -> Case:
    build = f"{__name__}:model_call"
    return Case(name, build, tuple(contenders), visits_of(model, setting), _PLANS[kind], patience=_PATIENCE)


def _plain(model: str, setting: Setting, kind: str) -> list[Contender]:
    """Return the contenders that are not compiled: timm's first, ours, other libraries'."""
    few, (native, other) = setting.batches[0], (_native(model, setting), setting.sides[1])
    training = _modes(model, setting, lambda v: v["mode"] == "training")
    large = _modes(model, setting, lambda v: v["batch"] != few)
    large_training = tuple(mode for mode in training if mode in large)
    found = [_contender("timm", model, "eager", setting), _contender("ours", model, "eager", setting)]
    if model == "Swin-T":
        found.append(_contender("timm", model, "eager", setting, True, large_training))
    if kind != "quick" and "Swin" in model:
        found.append(_contender("torchvision", model, "eager", setting, skips=large))
    if kind != "quick" and model in ("ViT-S absolute", "Swin-T"):
        skips = large + _modes(model, setting, lambda v: v["side"] == other != native)
        found.append(_contender("transformers", model, "eager", setting, skips=skips))
    return found


def _contender(
    library: str, model: str, how: str, setting: Setting, fused: bool = False, skips: tuple[str, ...] = ()
) -> Contender:
    """Return a contender: a model of a library, run one way. fused: fused attention in timm's Swin, which is off by default."""
    name = f"{model}: {library}" + f", {how}" * (how != "eager") + ", fused attention" * fused
    common = dict(model=model, native=_native(model, setting))
    args = common | dict(library=library, how=how)
    truth = common | dict(library="ours", how="reference", dtype="float64") if library in ("ours", "timm") else None
    row = dict(model=model, library=library, how=how, fused=fused)
    env = {"TIMM_FUSED_ATTN": "2" if fused else "1"}
    return Contender(name, "ours" if library == "ours" else "peer", args, truth, row, env, skips)
