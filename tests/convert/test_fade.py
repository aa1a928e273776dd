"""The absolute embedding of a relativized model, faded out and removed."""

import pytest
import torch

from helpers.relativize_models import build, image
from vitrel.convert.fade import Fade, absolute_scale, drop_absolute
from vitrel.convert.relativize import relativize


@pytest.mark.parametrize("name", ["vit", "no_embed_class", "deit", "cat", "vitrel"])
def test_fade(name):
    x, model = image(), relativize(build(name), absolute="fade", fade_steps=4)
    full, bare = relativize(build(name))(x), relativize(build(name), absolute="drop")(x)
    assert absolute_scale(model) == 1 and torch.equal(model(x), full)
    with pytest.raises(ValueError, match="still acts, at scale 1: train on, or pass force=True"):
        drop_absolute(model)
    scales = []
    for _ in range(5):
        model.train()(x)
        model.eval()(x)
        scales.append(absolute_scale(model))
    assert scales == [0.75, 0.5, 0.25, 0, 0]
    torch.testing.assert_close(model(x), bare, atol=1e-6, rtol=1e-6)
    faded = model(x)
    assert drop_absolute(model) is model and torch.equal(model(x), faded)
    assert not any("absolute_fade" in key or "pos_embed" in key for key in model.state_dict())
    assert absolute_scale(model) == 0
    with pytest.raises(ValueError, match="no absolute embedding"):
        drop_absolute(model)


def test_fade_resumes():
    model = relativize(build("vit"), absolute="fade", fade_steps=8).train()
    with torch.no_grad():
        model(image())
    assert absolute_scale(model) == 1, "a forward pass without gradients is no training step"
    for _ in range(3):
        model(image())
    resumed = relativize(build("vit"), absolute="fade", fade_steps=8)
    resumed.load_state_dict(model.state_dict())
    assert absolute_scale(resumed) == absolute_scale(model) == 0.625
    resumed.set_input_size((24, 40))
    assert absolute_scale(resumed) == 0.625 and resumed.pos_embed.shape[1] == 16
    assert absolute_scale(drop_absolute(resumed, force=True)) == 0
    half = Fade(3).bfloat16()
    half.steps += 1
    assert half(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16 and half.steps == 2
