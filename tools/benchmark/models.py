"""Models to measure, vitrel's and other libraries', with the same weights, as calls that a worker times."""

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrel
from tools.benchmark.shapes import STD
from vitrel.ops.why import use_backend
from vitrel.weights.load import plan_weights

Translate = Callable[[dict[str, Tensor]], dict[str, Tensor]]
LIBRARIES = ("timm", "torchvision", "transformers")
_PART = 4 * 224 * 224  # pixels per pass of the definition, which holds all scores in float64
_TABLES = re.compile(r".*(bias_table|pos_embed\w*|position_embeddings)")
_TORCHVISION_VIT = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
)
_TRANSFORMERS_VIT = (
    (r"^vit\.embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^vit\.embeddings\.position_embeddings$", "pos_embed"),
    (r"^vit\.embeddings\.cls_token$", "cls_token"),
    (r"^vit\.layers\.", "blocks."),
    (r"^vit\.layernorm\.", "norm."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^classifier\.", "head."),
)


class Model(NamedTuple):
    """A model's name in vitrel and in other libraries; "" if a library lacks it or vitrel cannot read its weights."""

    ours: str
    timm: str
    ours_args: dict[str, Any]
    timm_args: dict[str, Any]
    torchvision: str = ""
    transformers: str = ""
    transformers_args: dict[str, Any] = {}  # noqa: RUF012
    small: str = ""  # a small model of the same kind, for slow gates


def _swin(ours: str, peer: str, **more: Any) -> Model:
    """Return a Swin; drop path is 0, since with random drops no two contenders compute the same step."""
    args = more.pop("args", {})
    window = dict(window_size=12) if "window12" in peer else {}
    timm_args = dict(drop_path_rate=0.0, dynamic_img_size=True, **args)
    return Model(ours, peer, dict(drop_path_rate=0.0, **window, **args), timm_args, **more)


def _vit(letter: str, kind: str, **args: Any) -> Model:
    """kind: "absolute"; "table" and "none" have no class token; "rope" and "none scaled" have layer scale."""
    size, width = {"s": ("small", 384), "b": ("base", 768)}[letter]
    ours, peer, small = f"vitrel_vit_{letter}16_{kind}", f"vit_{size}_patch16", "" if args else f"ViT nano {kind}"
    plain, any_size = dict(class_token=False, global_pool="avg"), dict(dynamic_img_size=True)
    if kind == "table":
        timm_args = dict(rel_pos_type="bias", qkv_bias=True, init_values=None, fc_norm=True, **plain)
        return Model(ours, f"vit_relpos_{size}_patch16_224", plain | args, timm_args | args, small=small)
    if kind == "none":
        timm_args = dict(pos_embed="none", fc_norm=True, **plain, **any_size)
        return Model(ours, f"{peer}_224", plain | args, timm_args | args, small=small)
    scaled = dict(block_args=dict(init_values=1.0))  # without layer scale, RoPE-ViT's weights look like vitrel's
    if kind == "none scaled":
        timm_args = dict(pos_embed="none", init_values=1.0, **any_size)
        return Model(ours.removesuffix(" scaled"), f"{peer}_224", scaled | args, timm_args | args, small=small)
    if kind == "rope":
        rope_args = dict(position_args=dict(base=100.0, reference=None), **scaled)
        return Model(
            f"{ours}_axial", f"{peer}_rope_224", rope_args | args, dict(init_values=1.0) | any_size | args, small=small
        )
    config = dict(hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width, layer_norm_eps=1e-6)
    return Model(ours, f"{peer}_224", args, any_size | args, "vit_b_16" if letter == "b" else "", "ViT", config, small)


_TINY = "swin_tiny_patch4_window7_224"
_VITS = ("table", "absolute", "rope", "none", "none scaled")
MODELS = {
    "Swin-T": _swin(
        "vitrel_swin_t",
        _TINY,
        torchvision="swin_t",
        transformers="Swin",
        transformers_args=dict(drop_path_rate=0.0),
        small="Swin nano",
    ),
    "Swin-B": _swin("vitrel_swin_b", "swin_base_patch4_window7_224", torchvision="swin_b", small="Swin nano"),
    "Swin-B w12": _swin("vitrel_swin_b", "swin_base_patch4_window12_384", small="Swin nano"),
    "Swin nano": _swin("vitrel_swin_t", _TINY, args=dict(embed_dim=32, depths=(2, 2), num_heads=(2, 4))),
    **{f"ViT-S {kind}": _vit("s", kind) for kind in _VITS},
    **{f"ViT-B {kind}": _vit("b", kind) for kind in _VITS},
    **{f"ViT nano {kind}": _vit("s", kind, embed_dim=96, depth=2, num_heads=3) for kind in _VITS},
}


def peer_model(library: str, name: str, size: tuple[int, int]) -> nn.Module:
    """Return a library's model for images of (h, w), with weights drawn from a fixed seed; in train mode.

    Raises ImportError if the library is not installed, ValueError if it has no such model.
    """
    spec, square = MODELS[name], size[0] == size[1]
    torch.manual_seed(0)
    if library == "timm":
        net = timm.model_entrypoint(spec.timm)(img_size=size, **spec.timm_args)  # create_model would drop a None
    elif not getattr(spec, library):
        raise ValueError(f"{library} has no {name} with weights that load_pretrained reads")
    elif library == "torchvision":
        from torchvision import models

        net = getattr(models, spec.torchvision)()
        for module in net.modules():
            if type(module).__name__ == "StochasticDepth":
                module.p = 0.0
    else:
        import transformers

        config = getattr(transformers, f"{spec.transformers}Config")
        kind = getattr(transformers, f"{spec.transformers}ForImageClassification")
        config = config(image_size=size[0] if square else list(size), num_labels=1000, **spec.transformers_args)
        config._attn_implementation = "sdpa"
        net = kind(config)
    return draw_weights(net)


def our_model(weights: str, name: str, size: tuple[int, int]) -> nn.Module:
    """Return vitrel's model with the weights of `peer_model(weights, name, size)`; in train mode."""
    net = timm.create_model(MODELS[name].ours, img_size=size, **MODELS[name].ours_args)
    state = peer_model(weights, name, size).state_dict()
    return vitrel.load_pretrained(net, renamed(state, weights))


def draw_weights(net: nn.Module) -> nn.Module:
    """Draw weights so large that errors show: position of STD, vectors changed by 0.1, matrices of 1/sqrt(fan-in)."""
    with torch.no_grad():
        for name, value in net.named_parameters():
            if _TABLES.fullmatch(name) or value.shape[:1] == (1,):
                value.normal_(std=STD)
            elif value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
            else:
                value.normal_(std=value[0].numel() ** -0.5)
    return net


def renamed(state: dict[str, Tensor], library: str) -> dict[str, Tensor]:
    """Return a peer's state dict, or gradients, under names that load_pretrained reads."""
    rules = ()
    if "class_token" in state and library == "torchvision":
        rules = _TORCHVISION_VIT
    elif library == "transformers" and any(name.startswith("vit.") for name in state):
        rules = _TRANSFORMERS_VIT
    result = {}
    for name, value in state.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        result[name] = value
    return result


def under_our_names(net: nn.Module, gradients: dict[str, Tensor], library: str) -> dict[str, Tensor]:
    """Return a peer's gradients under the names of `net`, vitrel's model: rearranged as the weights are, which is linear."""
    return {name: value for name, value in plan_weights(net, renamed(gradients, library)).state.items() if value is not None}


class ModelCall:
    """One call of a model: a forward pass, or a training step of forward, cross entropy, backward and fused AdamW.

    Returns {"output"} or {"loss"} and the gradients by parameter. Images are random; `set` draws images of another size.
    translate: maps gradients of a peer's parameters to the names of vitrel's, for gates.
    """

    def __init__(self, net: nn.Module, how: str, batch: int, dtype: str, mode: str, device: str, translate: Translate | None):
        self.training, self.how, self.batch, self.device = mode == "training", how, batch, device
        self.translate = translate
        self.net = net.to(device, _cast(dtype)).train(self.training)
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
                return {"output": self._logits(self.images)}
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.images, self.targets)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()} | self._gradients()

    def checked(self, returned: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for the gate, with gradients under the names of vitrel's parameters."""
        if self.translate is None or not self.training:
            return returned
        return {"loss": returned["loss"]} | self.translate({name: x for name, x in returned.items() if name != "loss"})

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

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        with self._around():
            logits = self._logits(images)
        return F.cross_entropy(logits.double() if self.dtype == "float64" else logits.float(), targets)

    def _logits(self, images: Tensor) -> Tensor:
        out = self.forward(images)
        return getattr(out, "logits", out)

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
    """Return the call of a worker. library: "ours" (vitrel, timm's weights), "ours/<library>" (its weights), or of LIBRARIES.

    how: "eager", "optimized", "compiled", "compiled, max-autotune", "reference". size: (h, w) that the model is built for.
    image: size of its images, default `size`. dtype: "float32", "float64", "bfloat16" (weights too) or "amp".
    """
    ours, _, weights = library.partition("/")
    net = our_model(weights or "timm", model, size) if ours == "ours" else peer_model(library, model, size)
    translate = None if ours == "ours" else lambda found: under_our_names(our_model(library, model, size), found, library)
    call = ModelCall(net, how, batch, dtype, mode, device, translate)
    call.set(image or size)
    return call


def _cast(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "amp" else getattr(torch, dtype)
