import pytest
import torch

from vitrel.common.processes import local_device
from vitrel.evaluate.sweep import Sweep

SIZES = ((32, 32), (64, 64), (32, 48))


def sweep(**given):
    return Sweep(**{"data": "noise", "sizes": SIZES, "batch_size": 5, "device": "cpu", "attention_n": 0} | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protocols": ("scale", "zoom")}, "unknown protocol 'zoom': choose from scale, canvas"),
        ({"dtype": "float16"}, "dtype is float32 or bfloat16, got 'float16'"),
        ({"dtype": "bfloat16"}, "bfloat16 evaluation needs a GPU"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"protocols": ()}, "at least one protocol is needed: scale, canvas"),
        ({"device": "gpu"}, "device is auto, cpu, cuda, cuda:1, ..., got 'gpu'"),
        ({"device": "cuda:99"}, "there is no device cuda:99 .*[0-9]+ GPUs.*use auto or cpu"),
        ({"device": "meta"}, r"there is no device meta .*\(.+\); use auto or cpu"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        sweep(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"crop_pct": (0.0,)}, "crop_pct takes shares of the image, above 0 and at most 1, got 0.0"),
        ({"crop_pct": 1.5}, "crop_pct takes shares of the image, above 0 and at most 1, got 1.5"),
        ({"translations": [4, -1]}, "translations takes whole numbers of pixels, 0 or more, got -1"),
        ({"translations": [0.5]}, "translations takes whole numbers of pixels, 0 or more, got 0.5"),
        ({"attention_n": -1}, "attention_n must be at least 0, got -1"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        sweep(**given)
    assert sweep(crop_pct=1, translations=4) == sweep(crop_pct=[1.0], translations=[4, 4])


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == local_device("auto") == torch.device("cuda", 3)
    assert local_device("cuda:1") == torch.device("cuda", 1) and local_device("cpu") == torch.device("cpu")
