"""Weights from other code bases: timm's and Microsoft's Swin v1, timm's ViT, and our own.

Layouts differ from ours in names only, but for three things. The bias table lives in `attn` there, in `position` here.
Microsoft downsamples at the end of a stage, timm and we at the start of the next. A table or an absolute embedding trained on
another grid is resampled into the model's own (by the table's `resize` policy; bicubic antialiased as DeiT).
"""

import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.position.absolute import Absolute
from vitrel.position.resize import resize_embedding, resize_table
from vitrel.position.table import OffsetTable

_BUFFERS = re.compile(r"relative_position_index$|attn_mask$|relative_coords_table$|rope\.")
_TABLE = "relative_position_bias_table"


def load_pretrained(model: nn.Module, source: str | Path | dict[str, Tensor], reset_head: bool = False) -> nn.Module:
    """Load a state dict, or a file that holds one, into a vitrel model and return the model.

    source: .safetensors, or anything torch.load reads with weights_only=True; a dictionary with the weights under "model" or
    "state_dict" is unwrapped. Layouts: timm ViT and Swin v1, Microsoft Swin v1, vitrel. reset_head: leave the classifier as
    initialised, for another number of classes. Everything that would stay unused or unset raises RuntimeError and is listed.
    """
    state = filter_state_dict(source if isinstance(source, dict) else read_state_dict(source), model)
    own = model.state_dict()
    head = {name for name in own if name.startswith("head.")}
    if reset_head:
        state = {name: value for name, value in state.items() if name not in head} | {name: own[name] for name in head}
    missing, unused = [n for n in own if n not in state], [n for n in state if n not in own]
    shapes = [f"{n}: {tuple(state[n].shape)} in the file, {tuple(own[n].shape)} in the model" for n in own if n in state]
    shapes = [line for n, line in zip([n for n in own if n in state], shapes, strict=True) if state[n].shape != own[n].shape]
    if missing or unused or shapes:
        raise RuntimeError(
            _mismatch(missing, unused, shapes, any(n.startswith("head.") for n in missing) or "head." in str(shapes))
        )
    bad = [name for name, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise RuntimeError(f"the weights hold NaN or infinity in {', '.join(bad[:5])}; nothing was loaded")
    model.load_state_dict(state)
    return model


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint file by name. FileNotFoundError or ValueError with path, size and what is wrong."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    size = path.stat().st_size
    try:
        loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, OSError, TypeError) as error:
        reason = str(error).partition("\n")[0] or "it is empty or cut off"
        raise ValueError(f"{path} ({size} bytes) is no readable checkpoint: {reason}") from error
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} ({size} bytes) was refused: it holds more than tensors ({reason})") from error
    return _unwrap(loaded, str(path))


def filter_state_dict(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A foreign state dict renamed and, where the grids differ, resampled for `model`; timm's `checkpoint_filter_fn`."""
    try:
        return _filter(_unwrap(state, "the state dict"), model)
    except TypeError as error:  # timm would retry with one argument and hide this
        raise RuntimeError(f"cannot read these weights: {error}") from error


def _filter(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    microsoft = "layers.0.downsample.reduction.weight" in state
    patch = state.get("patch_embed.proj.weight")
    if patch is not None and patch.shape[2:] != model.patch_embed.proj.weight.shape[2:]:
        raise ValueError(
            f"the weights have patches of {patch.shape[2]}x{patch.shape[3]} pixels, the model of "
            f"{'x'.join(map(str, model.patch_embed.patch_size))}; build it with that patch_size"
        )
    encodings = dict(model.named_modules())
    out = {}
    for name, value in state.items():
        if _BUFFERS.search(name):
            continue
        if microsoft:
            name = re.sub(r"^layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) + 1}.downsample", name)
            name = re.sub(r"^head\.", "head.fc.", name)
        if name == "pos_embed":
            name = next((f"{n}.pos_embed" for n, m in encodings.items() if isinstance(m, Absolute)), name)
        elif name.endswith(f"attn.{_TABLE}"):
            block = name.removesuffix(f"attn.{_TABLE}") + "position"
            found = (n for n, m in encodings.items() if n.startswith(block) and isinstance(m, OffsetTable))
            name = next((f"{n}.{_TABLE}" for n in found), name)
        owner = encodings.get(name.rpartition(".")[0])
        if isinstance(owner, OffsetTable):
            value = _fit_table(name, value, owner)
        elif isinstance(owner, Absolute):
            value = _fit_embedding(name, value, owner)
        out[name] = value
    return out


def _fit_table(name: str, value: Tensor, owner: OffsetTable) -> Tensor:
    extra = 3 if owner.grid.prefix else 0
    if len(value) == owner.grid.classes():
        return value
    side = _square(name, len(value) - extra)
    if side % 2 == 0:
        raise ValueError(f"{name} has {len(value)} rows, which no square window gives")
    source = Grid((side + 1) // 2, (side + 1) // 2)
    rows = len(value) - extra
    return torch.cat((resize_table(value[:rows], source, owner.grid, owner.resize), value[rows:]))


def _fit_embedding(name: str, value: Tensor, owner: Absolute) -> Tensor:
    if value.shape[1] == owner.grid.tokens:
        return value
    prefix = owner.grid.prefix
    side = _square(name, value.shape[1] - prefix)
    grown = resize_embedding(value[0, prefix:].unflatten(0, (side, side)), owner.grid)
    return torch.cat((value[:, :prefix], grown[None]), 1)


def _square(name: str, rows: int) -> int:
    side = round(max(rows, 0) ** 0.5)
    if side < 1 or side * side != rows:
        raise ValueError(f"{name} has {rows} rows for positions, no square: its grid cannot be told; resize it before loading")
    return side


def _unwrap(loaded: object, origin: str) -> dict[str, Tensor]:
    for key in ("model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise ValueError(f"{origin} holds no state dict (a dictionary of tensors, perhaps under 'model' or 'state_dict')")
    if all(name.startswith("model.") for name in loaded):  # a training checkpoint: the classifier around the backbone
        loaded = {name.removeprefix("model."): value for name, value in loaded.items()}
    return loaded


def _mismatch(missing: list[str], unused: list[str], shapes: list[str], head: bool) -> str:
    parts = ["the weights do not fit the model; nothing was loaded."]
    for title, names in (("not in the file", missing), ("not in the model", unused), ("of another shape", shapes)):
        if names:
            more = f", and {len(names) - 8} more" if len(names) > 8 else ""
            parts.append(f"{title}: {', '.join(names[:8])}{more}.")
    if head:
        parts.append("For another number of classes pass reset_head=True.")
    return " ".join(parts)
