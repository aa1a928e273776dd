"""The notebooks run from top to bottom without a network, in an empty folder, on few images."""

import json
import socket

import pytest

from helpers import ROOT

FEW = {
    "SCENES, IMAGES, EPOCHS = 2000, 40, 5": "SCENES, IMAGES, EPOCHS = 32, 4, 1",
    '[48, 64, "64x96", 96]': '[64, "64x96"]',
}


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize(
    ("name", "printed"),
    [("another_size", "largest difference at 224x224"), ("finetune_and_evaluate", "epoch 1/1")],
)
def test_cells_run(name, printed, tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise AssertionError(f"the notebook asks the network: {arguments}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if name == "finetune_and_evaluate":
        assert all(any(many in cell for cell in code) for many in FEW)
    namespace = {"__name__": "__main__"}
    for cell in code:
        for many, few in FEW.items():
            cell = cell.replace(many, few)
        exec(compile(cell, name, "exec"), namespace)
    assert printed in capsys.readouterr().out
    if name == "finetune_and_evaluate":
        assert {"64x64", "64x96"} == {*namespace["frame"]["img_size"]}
