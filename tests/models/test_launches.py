"""Operators that a model launches, and none that reads a value back from the device."""

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import vitrel
from helpers.variants import MODELS
from tools.benchmark.traffic import Traffic
from vitrel.ops import use_backend

READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal", "is_nonzero", "item")


def few_blocks(name):
    """Keywords for one block, a Swin for a stage with and without a shift and one after it."""
    return {"depth": 1} if "_vit_" in name else {"depths": (2, 1), "num_heads": (1, 2)}


class Unread(TorchDispatchMode):
    """Refuses operators whose result depends on values that have to be fetched from a device."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().removeprefix("aten::").partition(".")[0]
        reads = name.startswith(READS) or (name in ("index", "index_put", "_index_put_impl_") and any(map(is_mask, args[1])))
        assert not reads, f"{name} reads back from the device"
        return operator(*args, **(kwargs or {}))


def is_mask(index):
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def launches(model, size, train):
    """Operators of the second forward pass, with `train` of a step without the optimizer."""

    image = torch.zeros(1, 3, size, size)

    def run():
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(train):
            out = model(image)
        if train:
            out.sum().backward()

    model.train(train)
    run()
    with Traffic() as counted:
        run()
    return len(counted.launches)


NARROW = {"swin": {"embed_dim": 24}, "vit": {"embed_dim": 48}}  # the width changes no number of operators


def beit(size):
    return timm.create_model("beit_base_patch16_224", embed_dim=48, num_heads=6, init_values=None, img_size=size)


def at(name, **how):
    return lambda size: timm.create_model(name, **how | NARROW["swin" if "swin" in name else "vit"])


SWIN, ANY = {"strict_img_size": False, "drop_path_rate": 0.0}, {"dynamic_img_size": True}
TWINS = {  # (ours, timm's of the same function): {size: operators of ours, forward and training}
    ("vitrel_swin_t", at("swin_tiny_patch4_window7_224", **SWIN)): {224: (193, 714), 256: (195, 718)},
    ("vitrel_swinv2_t", at("swinv2_tiny_window8_256", drop_path_rate=0.0)): {256: (397, 1278)},
    ("vitrel_vit_s16_absolute", at("vit_small_patch16_224", **ANY)): {224: (126, 376), 256: (129, 384)},
    ("vitrel_vit_s16_table", beit): {224: (137, 577), 256: (173, 601)},
    ("vitrel_vit_s16_rope_axial", at("vit_small_patch16_rope_224", **ANY)): {256: (233, 589)},
    ("vitrel_vit_s16_rope_mixed", at("vit_small_patch16_rope_mixed_224", **ANY)): {256: (293, 925)},
}


@pytest.mark.parametrize(("ours", "twin"), TWINS, ids=lambda given: given if isinstance(given, str) else "timm")
def test_at_most_as_many_operators_as_timms(ours, twin):
    """At the native size, and at another, which rotations do not tell apart; forward and training."""
    for size, allowed in TWINS[ours, twin].items():
        model = vitrel.create_model(ours, **(NARROW["swin"] | {"drop_path_rate": 0.0} if "swin" in ours else NARROW["vit"]))
        other = twin(size)
        for train in (False, True):
            theirs, here = launches(other, size, train), launches(model, size, train)
            with use_backend("sdpa"):  # which a GPU takes
                count = launches(model, size, train)
            assert count <= allowed[train], f"{ours} at {size}, {train=}: {count} operators"
            assert max(count, here) <= 1.02 * theirs, f"{ours} at {size}, {train=}: {count}, {here}, timm's {theirs}"


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_read_back(name):
    model = vitrel.create_model(name, num_classes=2, **few_blocks(name))
    with Unread():
        model(torch.zeros(1, 3, 48, 80)).sum().backward()


def test_what_reads_back_is_found():
    with pytest.raises(AssertionError, match="_local_scalar_dense reads back"), Unread():
        torch.ones(()).item()
    with pytest.raises(AssertionError, match="index reads back"), Unread():
        torch.ones(3)[torch.ones(3) > 0]


@pytest.mark.parametrize("name", MODELS)
def test_forward_on_a_device_that_holds_no_values(name):
    """With whatever backend "auto" takes on a GPU."""
    model = vitrel.create_model(name, num_classes=2, device="meta", **few_blocks(name))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cuda")
        out = model(torch.zeros(2, 3, 48, 80, device="cuda"))
        assert out.shape == (2, 2) and out.device.type == "cuda"
