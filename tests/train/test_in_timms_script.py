"""timm's train.py, which is not in timm's wheel, with a vitrel model: a script that calls timm with the same keywords."""

import runpy
import sys
import textwrap

import pytest
import timm
import torch

import vitrel  # noqa: F401  registers the model

SCRIPT = """
    import sys
    import torch
    from timm import create_model
    from timm.data import resolve_data_config
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    assert __name__ == "__main__"
    name, out = sys.argv[2], sys.argv[4]
    model = create_model(
        name, pretrained=False, in_chans=3, num_classes=5, drop_rate=0.0, drop_path_rate=0.1, drop_block_rate=None,
        global_pool=None, bn_momentum=None, bn_eps=None, scriptable=False, checkpoint_path="", img_size=64, depths=(1, 1, 1, 1),
    )
    config = resolve_data_config({"img_size": 64}, model=model, verbose=False)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    ema = ModelEmaV3(model, decay=0.99)
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(torch.randn(2, *config["input_size"]))
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 4])).backward()
        optimizer.step()
        ema.update(model)
    torch.save({"epoch": 1, "arch": name, "state_dict": model.state_dict(), "state_dict_ema": ema.module.state_dict()}, out)
    """


@pytest.mark.slow
def test_a_script_of_timm_trains_a_model_of_ours(tmp_path, monkeypatch):
    script, out = tmp_path / "train.py", tmp_path / "last.pth.tar"
    script.write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr(sys, "argv", [str(script), "--model", "vitrel_swin_t", "--out", str(out)])
    runpy.run_path(str(script), run_name="__main__")
    saved = torch.load(out, weights_only=True)
    assert saved["arch"] == "vitrel_swin_t" and saved["state_dict"]["head.fc.weight"].shape[0] == 5
    model = timm.create_model("vitrel_swin_t", depths=(1, 1, 1, 1), img_size=64, num_classes=5)
    model.load_state_dict(saved["state_dict"])
