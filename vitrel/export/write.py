"""export_model: write a model as a torch.export program, an ONNX graph, or a folder that timm reads.

A file is written under a temporary name, loaded, and compared with the eager model at several batch and image sizes before it
gets its final name.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.fx.experimental._config as fx_config
from timm.layers import to_2tuple
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.utils._sympy.value_ranges import ValueRanges

import vitrel.models  # noqa: F401  registers our names with timm
from vitrel.any_size import side_multiple
from vitrel.common.extras import EXTRAS, require
from vitrel.inspect.any_model import channels_of, trained_size
from vitrel.models.backbone import Backbone, backbone_of
from vitrel.models.config import PREPROCESSING, preprocessing_of
from vitrel.models.segmenter import Segmenter
from vitrel.ops.why import use_backend
from vitrel.weights.saving import save

TOLERANCE = 1e-4  # maximum difference of logits, relative to the largest one if that is above 1
METADATA = "vitrel.json"  # name of the extra file in a torch.export program
FOLDER = {"config.json", "model.safetensors"}
SUFFIXES = {"exported": ".pt2", "onnx": ".onnx", "safetensors": ""}

Run = Callable[[Tensor], Tensor]


class Check(NamedTuple):
    """One comparison of an exported file with the eager model."""

    batch: int  # number of images
    size: tuple[int, int]  # (h, w) of the images in pixels
    error: float  # largest difference of logits, relative to the largest logit if that is above 1


@use_backend("auto")  # a backend set by the user would be required wherever the file is loaded
def export_model(
    model: nn.Module,
    path: str | Path,
    format: str,
    size: int | tuple[int, int] | None = None,
    dynamic_size: bool = False,
    about: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> list[Check]:
    """Export a model in evaluation mode, in float32 on the CPU, and return the comparisons of the file with the model.

    The file is written under a temporary name beside `path`, loaded, run at the sizes of `check_sizes` and moved to `path`.

    Args:
        model: a ViT or Swin of vitrel, built by timm.create_model, a Segmenter of one, or any result of `vitrel.from_timm`.
        path: the file to write, or for "safetensors" the folder.
        format: "exported", a torch.export program (.pt2); "onnx", by the dynamo exporter (.onnx), checked in onnxruntime;
            "safetensors", a folder for `timm.create_model("local-dir:...", pretrained=True)` or a hub, which serves every size
            (vitrel's ViT and Swin only).
        size: an int or (h, w) in pixels of the images of a program or ONNX file; default: that of training. The batch size is
            free.
        dynamic_size: the file takes any height and width that leave two tokens or more; where timm's trunk is kept, two along
            each side.
        about: plain values to store: in the extra file "vitrel.json", as entries of metadata_props (both as JSON), or in
            config.json, which has only classes, img_size, mean, std, crop_pct, crop_mode and interpolation. The model's
            preprocessing is stored in any case, where `about` does not replace it.
        overwrite: replace an existing file, or a folder with nothing but an export in it; any other is a ValueError.

    Raises:
        ValueError: an argument is impossible.
        FileExistsError: the path exists and `overwrite` is False.
        MissingExtra: onnx, onnxscript or onnxruntime is not installed, for "onnx".
        RuntimeError: tracing or a check fails. No file is written in any of these cases.
    """
    _check_model(model, format)
    path, size = Path(path), to_2tuple(trained_size(model) if size is None else size)
    _check_path(path, format, overwrite)
    _check_size(model, size, dynamic_size and format != "safetensors")
    part = path.with_name(f".{os.getpid()}.{path.name}")
    about = _preprocessing(model) | (about or {}) | {"size": size, "dynamic_size": dynamic_size}
    try:
        run = _WRITERS[format](model, part, size, dynamic_size, about)
        checks = [_check(model, run, format, *at) for at in check_sizes(model, size, dynamic_size or format == "safetensors")]
        _move(part, path)
    finally:
        _remove(part)
    return checks


def check_sizes(model: nn.Module, size: tuple[int, int], dynamic_size: bool) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the batch size and the image size (h, w) in pixels of every comparison of an exported file with the model.

    These are `size` with 1, 2 and 3 images and, if dynamic_size, three other sizes that the model takes with 1, 3 and 1.
    """
    h, w = size
    yield from ((1, size), (2, size), (3, size))
    if dynamic_size:
        least, multiple = _least_size(model), side_multiple(model) or 1
        for batch, sides in ((1, (h // 2 + 1, w - w // 4 + 1)), (3, (h + h // 4 + 3, w // 2 + 1)), (1, (least, w + w // 2))):
            y, x = (-(-max(n, least) // multiple) * multiple for n in sides)
            yield batch, (y, x)


def _preprocessing(model: nn.Module) -> dict[str, Any]:
    """Return {"model": architecture, "img_size": (h, w) of training} | `preprocessing_of` (mean, std, ...), for every file."""
    return {"model": model.pretrained_cfg["architecture"], "img_size": trained_size(model)} | preprocessing_of(model)


def _check_model(model: nn.Module, format: str) -> None:
    own = isinstance(model, Backbone | Segmenter) and backbone_of(model) is not None  # no other module around a vitrel model
    if not own and not side_multiple(model):
        raise ValueError(f"only models of vitrel and of vitrel.from_timm can be exported, not {type(model).__name__}")
    if isinstance(model, Segmenter) and format == "safetensors":
        raise ValueError("timm builds no segmenter from such a folder: write it with vitrel.save, and read it with vitrel.load")
    if not isinstance(model, Backbone) and format == "safetensors":
        raise ValueError(
            f"this {type(model).__name__} keeps timm's trunk and names: timm.models.save_for_hf writes such a folder"
        )
    if not hasattr(model, "pretrained_cfg"):
        raise ValueError(f"this {type(model).__name__} has no configuration: build it by timm.create_model")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if others := [n for n, p in model.named_parameters() if p.dtype != torch.float32 or p.device.type != "cpu"]:
        p = model.get_parameter(others[0])
        raise ValueError(
            f"export needs float32 on the CPU, but {others[0]} is {p.dtype} on {p.device}: call model.float().cpu()"
        )


def _check_path(path: Path, format: str, overwrite: bool) -> None:
    if format not in SUFFIXES:
        raise ValueError(f"unknown format {format!r}; choose {', '.join(SUFFIXES)}")
    if path.suffix != SUFFIXES[format] and SUFFIXES[format]:
        raise ValueError(f"format {format!r} writes a {SUFFIXES[format]} file, not {path.name}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it first")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another path or pass overwrite")
    if path.exists() and path.is_dir() != (format == "safetensors"):
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'a file'}, which is not overwritten; choose another")
    if path.is_dir() and (other := sorted(item.name for item in path.iterdir() if item.name not in FOLDER)):
        raise ValueError(f"{path} contains {other[0]}, which is not part of an export; choose another folder")
    if format == "onnx":
        require(*EXTRAS["onnx"])


def _check_size(model: nn.Module, size: tuple[int, int], dynamic_size: bool) -> None:
    """Raise ValueError for an image size that the model does not take, or with which dynamic sizes cannot be traced."""
    if multiple := side_multiple(model):
        if any(n % multiple or n < multiple for n in size):
            raise ValueError(f"size {size[0]}x{size[1]}: its sides must be multiples of {multiple} pixels")
        return
    (h, w), least = size, _least_size(model) - 1
    patch = backbone_of(model).patch_embed.patch_size  # type: ignore[union-attr]
    if h < patch[0] or w < patch[1]:
        raise ValueError(f"size {h}x{w} is smaller than one patch of {patch[0]}x{patch[1]} pixels")
    if dynamic_size and h <= least and w <= least:
        raise ValueError(
            f"size {h}x{w} leaves one token, from which other sizes cannot be traced: use more than {least} pixels along a side"
        )


def _least_size(model: nn.Module) -> int:
    """Return the least side in pixels that leaves two tokens after the last stage, in timm's trunks two along that side."""
    own = backbone_of(model)
    reduction = max([info["reduction"] for info in getattr(own or model, "feature_info", ())], default=32)
    return 2 * reduction if own is None else reduction + 1  # timm's trunks pad less


def _check(model: nn.Module, run: Run, format: str, batch: int, size: tuple[int, int]) -> Check:
    """Run the model and a written file (`run`: images -> logits) on one batch of random images, and return their comparison.

    RuntimeError if the file fails, or logits differ by more than TOLERANCE times the largest logit (or 1 if that is below 1).
    """
    where = f"batch {batch}, {size[0]}x{size[1]} pixels"
    image = torch.randn((batch, channels_of(model), *size), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(image)
    try:
        logits = run(image)
    except Exception as error:  # runtimes raise exceptions of many types
        raise RuntimeError(f"the {format} file fails at {where}: {_first_line(error)}; nothing was written") from error
    largest = torch.inf
    if logits.shape == expected.shape:
        largest = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not largest <= TOLERANCE:  # also refuses NaN
        raise RuntimeError(
            f"the {format} file differs from the model at {where} by {largest:.1e}, above {TOLERANCE:.0e}; nothing was written"
        )
    return Check(batch, size, largest)


def _trace(model: nn.Module, size: tuple[int, int], dynamic_size: bool) -> torch.export.ExportedProgram:
    """Return the torch.export program of a model, for any batch size, and for any image size if dynamic_size, else `size`.

    RuntimeError if it cannot be traced.
    """
    if dynamic_size and backbone_of(model) is None:
        size = 2 * size[0], 2 * size[1]  # more than one window in the last stage, which a graph would take for granted
    free, image = torch.export.Dim.DYNAMIC, torch.randn((2, channels_of(model), *size))
    shapes = {0: free, 2: free, 3: free} if dynamic_size else {0: free}
    try:
        # Keeps sizes dynamic even if one is 1 or equal to another in this example.
        with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
            program = torch.export.export(model, (image,), dynamic_shapes=(shapes,))
    except Exception as error:
        raise RuntimeError(f"torch.export cannot trace this model at {size[0]}x{size[1]}: {_first_line(error)}") from error
    if backbone_of(model) is None:
        _free_sizes(program)
    return program


def _free_sizes(program: torch.export.ExportedProgram) -> None:
    """Remove conditions from a program of timm's trunk that exclude sizes for no reason, in place.

    They are those on the batch size alone, that a size differs from another, such as "not 1", and that the batch size times a
    number of windows is above 1. PyTorch compares sizes where it derives memory layouts, as of a convolution, and records each
    outcome as a condition on the image. The layout that was recorded serves the excluded sizes too; where it does not, an
    operator of the program fails, as is tried with one image (`check_sizes`). Conditions that sides are multiples, or not too
    small, stay.
    """
    image = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == program.graph_signature.user_inputs[0])
    batch = image.meta["val"].shape[0].node.expr
    program.range_constraints[batch] = ValueRanges(1, program.range_constraints[batch].upper)
    conditions = program._guards_code  # noqa: SLF001  the only place where they stand
    several = re.compile(r".*size\(\)\[0\].* > 1\)?")
    conditions[:] = [
        code
        for code in conditions
        if not (" != " in code or {*re.findall(r"size\(\)\[(\d)\]", code)} == {"0"} or several.fullmatch(code))
    ]


def _write_program(model: nn.Module, part: Path, size: tuple[int, int], dynamic_size: bool, about: dict[str, Any]) -> Run:
    program = _trace(model, size, dynamic_size)
    torch.export.save(program, part, extra_files={METADATA: json.dumps(about)})
    run = torch.export.load(part).module()
    return lambda image: run(image).detach()


def _write_onnx(model: nn.Module, part: Path, size: tuple[int, int], dynamic_size: bool, about: dict[str, Any]) -> Run:
    import onnxruntime

    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it logs every constant that it does not fold
    program = _trace(model, size, dynamic_size)
    try:
        with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
            graph = torch.onnx.export(program, verbose=False, input_names=["image"], output_names=["logits"])
    except Exception as error:
        raise RuntimeError(f"this model cannot be exported to ONNX: {_first_line(_origin(error))}") from error
    axes = zip(graph.model.graph.inputs[0].shape, ("batch", "", "height", "width"), strict=True)
    graph.rename_axes({axis: name for axis, name in axes if not isinstance(axis, int)})
    graph.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
    graph.save(part, external_data=False)  # one file
    session = onnxruntime.InferenceSession(part, providers=["CPUExecutionProvider"])
    return lambda image: torch.from_numpy(session.run(None, {"image": image.numpy()})[0])


def _write_folder(model: nn.Module, part: Path, size: tuple[int, int], dynamic_size: bool, about: dict[str, Any]) -> Run:
    data = {key: about[key] for key in PREPROCESSING}
    data["input_size"] = (channels_of(model), *about["img_size"])
    about_model: dict[str, Any] = {"label_names": list(about["classes"])} if "classes" in about else {}
    about_model["pretrained_cfg"] = {"license": None}  # timm would write that of the architecture's first weights
    save_for_hf(model, part, model_config=about_model, data_config=data, safe_serialization=True)
    save(model, part / "model.safetensors")  # with the training grids, which timm does not store
    return timm.create_model(f"local-dir:{part}", pretrained=True).eval().requires_grad_(False)


_WRITERS = {  # each writes to a path and returns a function that runs what it wrote: images -> logits
    "exported": _write_program,
    "onnx": _write_onnx,
    "safetensors": _write_folder,
}


def _move(part: Path, path: Path) -> None:
    """Rename a finished file or folder to `path`, in place of what is there; `part` is in the same folder."""
    if part.is_dir() and path.exists():  # a folder cannot replace another atomically
        old = part.with_name(f"{part.name}.old")
        path.replace(old)
        part.replace(path)
        _remove(old)
    else:
        part.replace(path)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)


def _origin(error: BaseException) -> BaseException:
    """Return the error at the end of the chain of `__cause__`: the one that was raised first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
