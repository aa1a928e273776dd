"""Checkpoints as `vitrel train` writes them."""

import torch

CLASSES = ["left", "right", "above"]


def write_checkpoint(path, model, edit=None, /, **about):
    """Save a model with what training records; return the path.

    Args:
        edit: function that changes in place what is saved.
        about: records, such as classes and img_size, in place of those below.
    """
    about = {
        "model": model.pretrained_cfg["architecture"], "model_args": {}, "classes": CLASSES, "img_size": [32, 48],
        "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic",
        "data": "shapes", "seed": 7, "epoch": 1,
    } | about  # fmt: skip
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    stored = {"state_dict": state, "hyper_parameters": {}, "vitrel": about}
    if edit:
        edit(stored)
    torch.save(stored, path)
    return path
