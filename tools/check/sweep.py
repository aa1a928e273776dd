"""Check many right models for false alarms, and write results/check/models.csv.

    python -m tools.check.sweep [--part 0/2] [--most 200]

Models have random weights, two layers (stages of two), few channels and small images, which leaves position as it is. A
row per model: identified encoding, findings, checks passed, seconds of the processor. Rows that exist are not computed
again. Versions are in the last columns.
"""

import argparse
import csv
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import nn

from vitrel.conformance import check
from vitrel.conformance.run import CHECKS

OUT = Path(__file__).parents[2] / "results" / "check"
SLOW = ("compile", "export")  # left out: they take most of the time, and test the tracing of one size
SECONDS = 150  # of the processor, most for a model
BIG = ("giant", "7b", "gigantic", "5b", "3b", "1b", "enormous")  # left out: a layer of theirs takes minutes
BIG_STILL = ("huge_patch16_sapiens2", "large_patch16_sapiens2")  # left out: their depth cannot be changed
COLUMNS = ("model", "encoding", "findings", "where", "passed", "not_applicable", "seconds", "timm", "torch", "transformers")
MODULES = {  # timm's files of transformers: number of models of each
    "vision_transformer": 40, "eva": 34, "beit": 12, "vision_transformer_relpos": 14, "vision_transformer_sam": 3, "deit": 10,
    "swin_transformer": 10, "swin_transformer_v2": 10, "swin_transformer_v2_cr": 8, "naflexvit": 8, "cait": 2, "levit": 2,
    "xcit": 2, "mvitv2": 2, "pvt_v2": 2, "twins": 2, "volo": 1, "maxxvit": 3, "coat": 1, "convit": 2, "crossvit": 1, "davit": 1,
    "efficientformer": 1, "gcvit": 1, "hiera": 2, "hieradet_sam2": 1, "nest": 1, "pit": 1, "tnt": 1, "tiny_vit": 1,
}  # fmt: skip


def models(most: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield (name, function that builds the model), those of transformers and torchvision first."""
    made, later = {**_transformers(), **_torchvision()}, []
    for module, number in MODULES.items():
        names = [n for n in timm.list_models(module=module) if not any(big in n for big in BIG)]
        for place, name in enumerate(names[:: max(1, len(names) // number)][:number]):
            if not name.endswith(BIG_STILL):
                later.append((place, f"timm/{name}", lambda name=name: small(name)))
    later.sort(key=lambda one: (any(size in one[1] for size in ("large", "huge")), one[0]))  # a family after another, in turn
    made |= {name: build for _, name, build in later}
    yield from list(made.items())[:most]


def small(name: str, **options: Any) -> nn.Module:
    """Return a model of timm with two layers, or stages of two, narrow and of small images, where its arguments allow it."""
    flat, stages = {"depth": 2}, {"depths": (2, 2, 2, 2)}
    thin, few = {"embed_dim": 192, "num_heads": 3}, {"embed_dim": 48, "num_heads": (1, 2, 4, 8)}
    patch = re.search(r"patch(\d+)", name)
    grid = {"img_size": 7 * int(patch[1])} if patch else {}
    half = {"img_size": timm.get_pretrained_cfg(name).input_size[-1] // 2}
    for short in (flat | thin | grid, flat | thin, flat, stages | few | half, stages | few, stages, {}):
        try:
            return timm.create_model(name, **short, **options)
        except (TypeError, IndexError, AssertionError, KeyError, ValueError):
            continue
    raise ValueError(f"{name} cannot be built")


def _transformers() -> dict[str, Callable[[], nn.Module]]:
    import transformers as t

    wide = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64)
    flat = [
        ("ViT", 8, {}), ("ViT", 16, {}), ("ViT", 4, {}), ("DeiT", 8, {}), ("Dinov2", 14, {}), ("Dinov2", 8, {}),
        ("Dinov2WithRegisters", 8, {}), ("DINOv3ViT", 8, {"num_register_tokens": 4}), ("DINOv3ViT", 16, {}),
        ("Beit", 8, {"use_relative_position_bias": True}), ("Beit", 16, {"use_shared_relative_position_bias": True}),
        ("Data2VecVision", 8, {"use_relative_position_bias": True}), ("ViTMSN", 8, {}), ("IJepa", 8, {}), ("YolosViT", 8, {}),
        ("SiglipVision", 8, {}), ("CLIPVision", 8, {}),
    ]  # fmt: skip
    made: dict[str, Callable[[], nn.Module]] = {}
    for family, patch, more in flat:
        if hasattr(t, f"{family}Config") and hasattr(t, f"{family}Model"):
            config = dict(image_size=8 * patch, patch_size=patch, **wide, **more)
            made[f"transformers/{family}/{patch}"] = lambda f=family, c=config: _model(t, f, c)
    for window in (4, 5, 7):
        for family in ("Swin", "Swinv2", "DonutSwin", "MaskFormerSwin"):
            config = dict(image_size=64, patch_size=4, embed_dim=12, depths=[2, 2], num_heads=[1, 2], window_size=window)
            if hasattr(t, f"{family}Config") and hasattr(t, f"{family}Model"):
                made[f"transformers/{family}/window{window}"] = lambda f=family, c=config: _model(t, f, c)
    return made


def _model(library: Any, family: str, config: dict[str, Any]) -> nn.Module:
    return getattr(library, f"{family}Model")(getattr(library, f"{family}Config")(**config))


def _torchvision() -> dict[str, Callable[[], nn.Module]]:
    m = torchvision.models
    swin = dict(patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[1, 2])
    v2 = dict(block=m.swin_transformer.SwinTransformerBlockV2, downsample_layer=m.swin_transformer.PatchMergingV2)
    return {
        "torchvision/SwinTransformer/window7": lambda: m.SwinTransformer(window_size=[7, 7], **swin),
        "torchvision/SwinTransformer/window4": lambda: m.SwinTransformer(window_size=[4, 4], **swin),
        "torchvision/SwinTransformer/v2": lambda: m.SwinTransformer(window_size=[8, 8], **swin, **v2),
        "torchvision/VisionTransformer": lambda: m.VisionTransformer(64, 8, 2, 2, 32, 64),
    }


def row(name: str, build: Callable[[], nn.Module], checks: list[str]) -> dict[str, Any]:
    """Return the row of a model; one that cannot be built or examined has its error as the encoding."""
    import transformers

    versions = {"timm": timm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    start = time.process_time()
    try:
        torch.manual_seed(0)
        report = check(build(), checks=checks)
    except Exception as error:  # of any library
        return dict.fromkeys(COLUMNS, "") | {"model": name, "encoding": f"error: {str(error).splitlines()[:1]}"} | versions
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    findings = "; ".join(f"{f.check}: {f.found}" for f in report.findings)
    where = "; ".join(f"{f.where} ({f.input})" for f in report.findings)
    results = {"passed": len(report.passed), "not_applicable": len(report.skipped), "seconds": f"{seconds:.1f}"}
    about = {"model": name, "encoding": "; ".join(report.encodings), "findings": findings, "where": where}
    return about | results | versions


def _stop(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    """Check the models of a part and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th model, beginning with number I")
    parser.add_argument("--most", type=int, default=200, metavar="N")
    parser.add_argument("--out", type=Path, default=OUT / "models.csv", metavar="FILE")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = set()
    if args.out.exists():
        with args.out.open(newline="") as file:
            done = {line["model"] for line in csv.DictReader(file)}
    warnings.simplefilter("ignore")
    names = [name for name in CHECKS if name not in SLOW]
    for name, build in list(models(args.most))[part::parts]:
        if name in done:
            continue
        found = row(name, build, names)
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(found)
        print(name, "|", found["encoding"], "|", found["findings"], flush=True)


if __name__ == "__main__":
    main()
