"""Small variants of the families that keep timm's trunk, and the table of docs/how_to/any_size.md.

python -m tools.docs.any_size    # print the table of families; --names counts timm's entry points, --logits compares them with
                                 # from_timm's models; --graphs tries GRAPHS
"""

import argparse
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from vitrel.any_size import ADAPTERS, adapter_of, any_size, takes
from vitrel.export import export_model
from vitrel.inspect.any_model import trained_size
from vitrel.models.create import on_meta
from vitrel.weights.from_timm import from_timm
from vitrel.weights.recognize import recognize

DEEP = dict(depth=2, img_size=64)
VARIANTS: dict[str, dict[str, Any]] = {  # {name of timm: arguments that make it small}
    "vit_tiny_r_s16_p8_224": DEEP,
    "vitamin_small_224": DEEP,
    "aimv2_large_patch14_224": dict(depth=2, img_size=56, embed_dim=64, num_heads=2),
    "vit_small_patch16_18x2_224": DEEP,
    "vit_dpwee_patch16_reg1_gap_256": DEEP,
    "vit_pe_core_tiny_patch16_384": DEEP,
    "samvit_base_patch16": dict(depth=2, img_size=128, embed_dim=64, num_heads=2, window_size=3, global_attn_indexes=(1,)),
    "swin_s3_tiny_224": dict(depths=(1, 2, 2, 1), embed_dim=24, num_heads=(1, 2, 2, 2), img_size=112),
    "swinv2_cr_tiny_ns_224": dict(depths=(1, 2, 1, 1), embed_dim=24, num_heads=(1, 2, 2, 2), img_size=128),
    "maxvit_tiny_tf_224": dict(depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64), img_size=64),
    "maxvit_rmlp_pico_rw_256": dict(depths=(1, 1, 1, 1), img_size=64),
    "maxvit_tiny_pm_256": dict(depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64), img_size=64),
    "coatnet_nano_rw_224": dict(depths=(1, 1, 1, 1), img_size=64),
    "coatnet_rmlp_nano_rw_224": dict(depths=(1, 1, 1, 1), img_size=64),
    "hiera_tiny_224": dict(stages=(1, 1, 1, 1), embed_dim=24, img_size=64),
    "hiera_small_abswin_256": dict(stages=(1, 1, 1, 1), embed_dim=24, img_size=64),
    "sam2_hiera_tiny": dict(stages=(1, 2, 2, 1), embed_dim=32, global_att_blocks=(4,)),
    "gcvit_xxtiny": dict(img_size=64, window_size=2),
    "mvitv2_tiny": dict(img_size=64),
    "levit_128s": dict(depth=(1, 1, 1), img_size=64),
    "levit_conv_128s": dict(depth=(1, 1, 1), img_size=64),
    "efficientformer_l1": dict(depths=(1, 1, 1, 2), embed_dims=(16, 32, 64, 64)),
    "efficientformerv2_s0": dict(depths=(1, 1, 1, 2), img_size=64),
    "tiny_vit_5m_224": dict(depths=(1, 1, 2, 1), embed_dims=(16, 32, 64, 64), num_heads=(1, 1, 2, 2)),
    "cait_xxs24_224": DEEP,
    "convit_tiny": DEEP | dict(local_up_to_layer=1),
    "crossvit_tiny_240": dict(depth=((1, 1, 0),)),
    "nest_tiny": dict(img_size=64),
    "pit_xs_224": dict(depth=(1, 1, 1), img_size=64),
    "tnt_s_patch16_224": DEEP,
    "visformer_tiny": dict(depth=(1, 1, 1), img_size=64),
    "volo_d1_224": dict(img_size=64),
    "xcit_nano_12_p16_224": dict(depth=2),
    "coat_lite_tiny": dict(serial_depths=(1, 1, 1, 1), img_size=64),
    "coat_tiny": dict(serial_depths=(1, 1, 1, 1), parallel_depth=1, img_size=64),
    "twins_pcpvt_small": dict(depths=(1, 1, 1, 1), embed_dims=(16, 32, 80, 64)),
    "twins_svt_small": dict(depths=(1, 1, 2, 1), embed_dims=(16, 32, 64, 64)),
    "pvt_v2_b0": dict(depths=(1, 1, 1, 1)),
    "davit_tiny": dict(depths=(1, 1, 1, 1), embed_dims=(32, 64, 64, 64), num_heads=(1, 2, 2, 2)),
    "csatv2": dict(dims=(8, 16, 24, 32)),
    "edgenext_xx_small": dict(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "efficientvit_m0": dict(depth=(1, 1, 1), img_size=64),
    "naflexvit_base_patch16_gap": dict(depth=2, embed_dim=64, num_heads=2, img_size=64),
    "naflexvit_base_patch16_parfac_gap": dict(depth=2, embed_dim=64, num_heads=2, img_size=64),
}

# Factor of the random weights. With 1, EfficientViT's attention is so sharp that float32 is off by 1e-4 of its logits.
GAIN = {"efficientvit_m0": 0.7}


# Number of graphs that torch.compile makes for SIZES; tests/any_size/test_graphs.py compiles one of them. On a CPU
# torch has other code for convolutions of 16 images or more; EfficientViT's images are windows.
GRAPHS = dict.fromkeys(VARIANTS, 2) | {"efficientvit_m0": 3}

# Image sizes (h, w) for which a model is compiled. No stage has a map of one row or column, for which torch compiles anew.
SIZES = ((192, 192), (128, 192), (192, 128), (128, 256), (320, 128), (160, 160), (128, 352), (224, 160))


def variant(name: str, **options: Any) -> nn.Module:
    """Return timm's model with the arguments of VARIANTS and `options`, in eval mode, with random parameters and statistics."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **VARIANTS[name], **options).eval()
    for level in getattr(model, "levels", ()):  # of Nest, which takes no depths
        level.transformer_encoder = level.transformer_encoder[:1]
    return randomized(model, GAIN.get(name, 1.0))


@torch.no_grad()
def randomized(model: nn.Module, gain: float = 1.0) -> nn.Module:
    """Fill a model with random parameters and statistics, position's among them, and return it."""
    for key, value in model.named_parameters():
        if value.dim() < 2:
            value.normal_(float(key.endswith("weight")), 0.1)
        elif any(word in key for word in ("pos", "bias", "rel")):
            value.normal_(0, 0.5)
        else:
            value.normal_(0, gain * value[0].numel() ** -0.5)
    for key, value in model.named_buffers():
        if key.endswith("running_var"):
            value.uniform_(0.5, 1.5)
    return model


def native(name: str, model: nn.Module) -> tuple[int, int]:
    """Return the image size (h, w) in pixels at which the variant is compared with timm."""
    if name == "sam2_hiera_tiny" or not adapter_of(model).exchanged:
        return 128, 128  # timm's takes any multiple of 32 too, and its own size costs more
    size = VARIANTS[name].get("img_size", model.pretrained_cfg["input_size"][-1])
    return (size, size)


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest value of b."""
    return float((a - b).abs().max() / b.abs().max())


def graphs(name: str) -> int:
    """Return the number of graphs that torch.compile(dynamic=True) makes of a variant for all SIZES, each result checked."""
    model, counter = from_timm(variant(name)).requires_grad_(False), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for size in SIZES:
        image = torch.randn(2, 3, *size)
        if apart(compiled(image), model(image)) > 1e-5:
            raise RuntimeError(f"{name} compiled differs at {size}")
    return counter.frame_count


def written(name: str, format: str, folder: Path) -> float:
    """Write a variant with dynamic batch, height and width, and return the largest error of its checks (`export_model`)."""
    model = from_timm(variant(name)).requires_grad_(False)
    suffix = {"exported": ".pt2", "onnx": ".onnx"}[format]
    checks = export_model(model, folder / f"{name}{suffix}", format, size=(160, 192), dynamic_size=True)
    return max(check.error for check in checks)


def try_graphs(names: list[str]) -> bool:
    """Print for each variant the number of graphs, and the largest errors of the exported program and of ONNX, or an error.

    Return whether all are written, and compiled into as many graphs as GRAPHS has.
    """
    fine = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            tries = {
                "compile": partial(graphs, name),
                "export": partial(written, name, "exported", Path(folder)),
                "ONNX": partial(written, name, "onnx", Path(folder)),
            }
            for what, tried in tries.items():
                try:
                    value = tried()
                    fine &= what != "compile" or value == GRAPHS[name]
                    print(f"{name}: {what} {value:.2g}", flush=True)
                except Exception as error:
                    fine = False
                    print(f"{name}: {what} {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
    return fine


def taken(model: nn.Module) -> str:
    """Return how from_timm takes a model of timm: "vitrel", "timm", "none" (it has no position), or why not."""
    try:
        recognize(model)
        return "vitrel"
    except ValueError as error:
        reason = str(error)
    if adapter_of(model) is not None:
        try:
            any_size(model)
            return "timm"
        except ValueError as error:
            return str(error)
    return "none" if takes(model) else reason.partition(": ")[2]


def entry_points() -> list[str]:
    """Return timm's own names."""
    return [name for name in timm.list_models() if not name.startswith("vitrel_")]


def ways() -> dict[str, str]:
    """Return {entry point of timm: how it is taken}, from models on the meta device."""
    models = ((name, _on_meta(name)) for name in entry_points())
    return {name: "cannot be built on the meta device" if model is None else taken(model) for name, model in models}


LARGE = 100e6  # parameters above which a model is cut as the first of CUTS that it takes, and left out if it is still as large
CUTS: tuple[dict[str, Any], ...] = ({"depth": 2}, {"depths": (2,) * 4}, {"depths": (1,) * 4}, {"stages": (1,) * 4})


def try_logits(names: list[str]) -> bool:
    """Print for each name that from_timm takes how far its logits are from timm's, at the model's own size.

    Names whose models are the same modules and shapes are one architecture: the first of them is built, with random values.
    Return whether all are equal but for rounding.
    """
    counts: Counter[str] = Counter()
    known: dict[str, float | None] = {}
    for name in names:
        probe = _on_meta(name)
        if probe is None:
            continue
        shapes = [(key, value.shape) for key, value in (*probe.named_parameters(), *probe.named_buffers())]
        key = str((probe, shapes, probe.pretrained_cfg["input_size"]))
        how = taken(probe)  # which changes it
        if how not in ("vitrel", "timm"):
            continue
        if key not in known:
            try:
                known[key] = _logits_apart(name, probe)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                known[key] = float("inf")
        found = known[key]
        kind = "not compared" if found is None else "equal" if found < 1e-5 else "different"
        counts[kind] += 1
        print(f"{name} ({how}): {kind}" + ("" if found is None else f", {found:.2g}"), flush=True)
    largest = max((found for found in known.values() if found is not None), default=0.0)
    print(f"{len(known)} architectures of {counts.total()} names {dict(counts)}, largest difference {largest:.2g}")
    return not counts["different"]


@torch.no_grad()
def _logits_apart(name: str, probe: nn.Module) -> float | None:
    """Return how far the logits of from_timm's model are from timm's, in float64 where rounding shows; None: too large."""
    cut: dict[str, Any] | None = {}
    if _parameters(probe) > LARGE:
        cut = next((cut for cut in CUTS if _parameters(_on_meta(name, **cut)) <= LARGE), None)
    if cut is None:
        return None
    torch.manual_seed(0)
    model = randomized(timm.create_model(name, **cut).eval())
    ours, image = from_timm(model).eval(), torch.randn(1, *model.pretrained_cfg["input_size"])
    h, w = trained_size(ours)  # whole patches
    found = apart(ours(image[..., :h, :w]), model(image))
    if found < 1e-5:
        return found
    image = image.double()
    return apart(ours.double()(image[..., :h, :w]), model.double()(image))


def _on_meta(name: str, **options: Any) -> Any:
    """Return a model on the meta device, None where it cannot be built there."""
    try:
        with on_meta():
            return timm.create_model(name, **options)
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, StopIteration, TypeError):
        return None


def _parameters(model: nn.Module | None) -> float:
    return float("inf") if model is None else sum(value.numel() for value in model.parameters())


def table() -> str:
    """Return the table of the families that keep timm's trunk, in Markdown."""
    lines = ["| family | position | at another size | sides |", "|---|---|---|---|"]
    for adapter in ADAPTERS:
        files = dict.fromkeys(kind.__module__.rpartition(".")[2] for kind in adapter.models)
        sides = f"multiples of {adapter.multiple}" if adapter.multiple > 1 else "any"
        lines.append(f"| {', '.join(files)} | {adapter.position} | {adapter.elsewhere} | {sides} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or with --names the number of entry points by how they are taken, and the refusals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="count timm's entry points, some minutes")
    parser.add_argument("--logits", nargs="*", metavar="NAME", help="compare from_timm's logits, default all: an hour")
    parser.add_argument("--graphs", nargs="*", metavar="NAME", help="compile and export variants, default all: half an hour")
    args = parser.parse_args()
    if args.graphs is not None:
        if not try_graphs(args.graphs or [*VARIANTS]):
            raise SystemExit("not all are written, or in other numbers of graphs, see above")
        return
    if args.logits is not None:
        if not try_logits(args.logits or entry_points()):
            raise SystemExit("logits differ, see above")
        return
    if not args.names:
        print(table())
        return
    found = ways()
    kinds = Counter(how if how in ("vitrel", "timm", "none") else "refused" for how in found.values())
    print(f"{len(found)} entry points: {dict(kinds)}")
    for name, how in found.items():
        if how not in ("vitrel", "timm", "none"):
            print(f"{name}: {how}")


if __name__ == "__main__":
    main()
