"""Models as functions of their parameters, by torch.func: ensembles and gradients per image, with every encoding."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

from helpers import each
from helpers.variants import KEYS, small_model

NAMES = [f"vitrel_vit_n8_{key}" for key in (*KEYS, "absolute_rope_mixed")]
NAMES += ["vitrel_swin_n_shaw", "vitrel_swin_n_rope_mixed_table", "vitrel_swinv2_n"]


def build(name, **options):
    shape = dict(depth=1, num_heads=2) if "_vit_" in name else dict(depths=(2,), num_heads=(2,), embed_dim=16)
    return small_model(name, **shape, **options).double()


def gradients(model, images):
    """Gradients of the sum of the squared outputs, by name."""
    model.zero_grad(set_to_none=True)
    model(images).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found, expected):
    """Two dictionaries of tensors; fixed encodings are computed in float32."""
    largest = max(x.abs().max() for x in expected.values())
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, atol=1e-6 * largest, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@each("name", NAMES)
def test_an_ensemble_and_gradients_per_image(name):
    """On a grid that is not the training grid and, in a Swin, is no multiple of the shifted windows."""
    models, images = [build(name) for _ in range(2)], torch.randn(2, 3, 24, 56 if "_vit_" in name else 14).double()
    parameters, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")

    out = vmap(lambda *state: functional_call(skeleton, state, (images,)))(parameters, buffers)
    torch.testing.assert_close(out, torch.stack([model(images) for model in models]), atol=1e-6, rtol=1e-6)
    out.square().sum().backward()
    for i, model in enumerate(models):
        assert_close({name: x.grad[i] for name, x in parameters.items()}, gradients(model, images))

    def loss(parameters, image):
        return functional_call(models[0], parameters, (image[None],)).square().sum()

    of_images = vmap(grad(loss), (None, 0))(dict(models[0].named_parameters()), images)
    for i, image in enumerate(images):
        assert_close({name: x[i] for name, x in of_images.items()}, gradients(models[0], image[None]))


@each("key", ["rope_axial", "absolute"])
def test_an_ensemble_in_training_draws_for_each_model(key):
    """Perturbed coordinates, with randomness="different"."""
    model = build(f"vitrel_vit_n8_{key}", position_args={"rescale_coords": 2.0}).train()
    parameters, buffers = stack_module_state([model, copy.deepcopy(model)])
    image = torch.randn(1, 3, 64, 64).double()
    a, b = vmap(lambda *state: functional_call(model, state, (image,)), randomness="different")(parameters, buffers)
    assert (a - b).abs().max() > 1e-4


@each("name", ["vitrel_vit_n8_rope_mixed_table", "vitrel_swin_n"])
def test_forward_derivatives(name):
    """torch.func.jvp against the product with the gradient."""
    model, images = build(name), torch.randn(2, 3, 24, 24).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    _, found = torch.func.jvp(lambda p: functional_call(model, p, (images,)).square().sum(), (parameters,), (tangents,))
    expected = sum((tangents[name] * gradient).sum() for name, gradient in gradients(model, images).items())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@each("name", ["vitrel_vit_n8_table", "vitrel_vit_n8_shaw", "vitrel_swin_n"])
def test_a_batch_of_no_image_trains_nothing(name):
    model = build(name).train()
    out = model(torch.zeros(0, 3, 64, 64).double())
    out.sum().backward()
    assert out.shape == (0, 5)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
