"""A tour by timm's public API and torch alone: training, folders, features, pruning and export, at any size."""

import tempfile

import pytest
import timm
import timm.optim
import torch

import vitrel  # noqa: F401, registers the models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_n8_absolute_rope_mixed", "swinv2_n"])
def test_a_timm_model_in_every_respect(name):
    free, labels = torch.export.Dim.DYNAMIC, torch.tensor([0, 1, 2, 3])
    model = timm.create_model(f"vitrel_{name}", num_classes=10, **({"depths": (1, 1, 1)} if "swin" in name else {"depth": 3}))

    # One step of training, with layer decay.
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.8)
    torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), labels).backward()
    optimizer.step()

    # To a folder and back: the model, and a pyramid of its features at any size.
    image, wide = torch.randn(1, 3, 96, 96), torch.randn(2, 3, 224, 320)
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        timm.models.save_for_hf(model, folder, safe_serialization=True)
        again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        backbone = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True).eval()
    assert torch.equal(again(image), model(image)) and torch.equal(again(wide), model(wide))
    for x in (image, wide):
        for feature, reduction in zip(backbone(x), backbone.feature_info.reduction(), strict=True):
            assert feature.shape[2:] == (x.shape[2] // reduction, x.shape[3] // reduction)

    # Only as deep as needed, with a new head, and exported: one program for every batch, height and width.
    model.prune_intermediate_layers(indices=[0, 1])
    model.reset_classifier(4, "avg")
    program = torch.export.export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=({0: free, 2: free, 3: free},))
    with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
        torch.export.save(program, file.name)
        exported = torch.export.load(file.name).module()
    for x in (image, wide):
        torch.testing.assert_close(exported(x), model(x), atol=1e-4, rtol=1e-4)
