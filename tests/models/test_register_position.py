"""An encoding of a user's own, as docs/how_to/write_an_encoding.md shows it: named, trained, saved, evaluated, exported."""

import os
import re
import sys

import pytest
import timm
import torch

import vitrel
from helpers import ROOT
from helpers.runs import in_child, status

PAGE = (ROOT / "docs" / "how_to" / "write_an_encoding.md").read_text("utf-8")
USE = """
import linear_decay, timm, torch, vitrel
assert timm.is_model("vitrel_vit_s16_linear_decay") and timm.is_model("vitrel_swin_t_linear_decay")
model = vitrel.create_model("vitrel_vit_n8_linear_decay", num_classes=3).eval()
assert timm.create_model("vitrel_vit_s16_linear_decay").unseen((384, 384)) > 0.66  # as alibi, the same geometry
assert torch.equal(vitrel.position_bias(linear_decay.LinearDecay((2, 2), 1, 8), (1, 3))[0, 0], -torch.arange(3.0))
vitrel.save(model, "model.safetensors")
image = torch.randn(2, 3, 96, 64)
with torch.no_grad():
    assert torch.equal(vitrel.load("model.safetensors")(image), model(image))
    assert timm.create_model("vitrel_swin_n_linear_decay", num_classes=3).eval()(image).shape == (2, 3)
"""


@pytest.mark.slow(seconds=4)
def test_an_encoding_of_a_users_own_goes_all_the_way(tmp_path, capfd):
    """In a process of its own, since it is registered for good, in a folder that holds the module of the page.

    The commands of the page, which train, evaluate and export, are run with those of the other pages (tests/docs).
    """
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "linear_decay.py").write_text(code)

    def use(folder):
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        exec(compile(USE, "use.py", "exec"), {})

    ended, (printed, errors) = status(in_child(tmp_path, main=use)), capfd.readouterr()
    assert ended == 0 and (tmp_path / "model.safetensors").is_file(), printed + errors
    with pytest.raises(Exception, match="--import linear_decay"):  # in this process it is not registered
        vitrel.load(tmp_path / "model.safetensors")


def test_what_cannot_be_registered_is_named():
    with pytest.raises(ValueError, match=r"position 'table' is that of vitrel.position.table.OffsetTable: choose another key"):
        vitrel.register_position("table")(type("Mine", (vitrel.PositionEncoding,), {}))
    with pytest.raises(ValueError, match=r"'table' is that of vitrel\.position\.table\.OffsetTable"):  # of the same name
        vitrel.register_position("table")(type("OffsetTable", (vitrel.PositionEncoding,), {}))
    with pytest.raises(ValueError, match="small letters, digits and underscores, not 'a\\+b'"):
        vitrel.register_position("a+b")
    with pytest.raises(TypeError, match=r"subclass of vitrel\.PositionEncoding"):
        vitrel.register_position("mine")(dict)
    assert "mine" not in vitrel.POSITIONS


def test_a_class_that_is_defined_again_replaces_the_former(monkeypatch):
    first, second = (type("Mine", (vitrel.PositionEncoding,), {}) for _ in range(2))
    monkeypatch.setitem(vitrel.POSITIONS, "mine", first)
    assert vitrel.register_position("mine")(second) is second is vitrel.POSITIONS["mine"]


class Normalized(vitrel.PositionEncoding):
    """A bias of the offset over the sides of the grid, which keeps no grid itself; with a constant that nothing reads."""

    def __init__(self, grid, num_heads, head_dim, **factory):
        super().__init__()
        self.register_buffer("row", torch.full((3,), 0.25), persistent=False)
        self.slope = torch.nn.Parameter(torch.ones(num_heads, **factory))

    def terms(self, grid):
        device = self.slope.device
        share = (grid.offsets(device=device) / torch.tensor(grid[:2], device=device)).norm(dim=-1)
        return vitrel.Terms(tables=(vitrel.Table("hw", bias=vitrel.pad_prefix(-self.slope[:, None] * share, grid)),))


def test_what_an_encoding_of_a_users_own_does_at_another_size(monkeypatch):
    """Offsets are counted from the grids, and biases are compared between them, without a line in the class about it."""
    monkeypatch.setitem(vitrel.POSITIONS, "normalized", Normalized)
    encoding = vitrel.create_position("normalized+rope_axial", (14, 14), 3, 64).parts["normalized"]
    assert encoding.unseen(vitrel.Grid(14, 14)) == 0 == encoding.saturated(vitrel.Grid(24, 24))
    assert encoding.unseen(vitrel.Grid(24, 24)) == pytest.approx(1 - 27**2 / 47**2)
    model = timm.create_model("vitrel_vit_n8_none", position="normalized", depth=1)
    own = model.blocks[0].position  # initialized by itself
    assert (own.row == 0.25).all() and (own.slope == 1).all() and model.resampled((128, 128)) == {}
    assert model.unseen((128, 128)) == timm.create_model("vitrel_vit_n8_alibi", depth=1).unseen((128, 128))
    found = vitrel.diagnose(model, [64, 128])
    assert found.findings.keys() == {"bias", "unseen"} and [len(line.changes) for line in found.sizes] == [0, 1]
    swin = timm.create_model("vitrel_swin_n", position="normalized")
    assert swin.unseen((128, 96)) == 0  # in windows the grid stays
    with pytest.raises(ValueError, match=r"Normalized does not know its training grid: build it with vitrel\.create_position"):
        Normalized((14, 14), 3, 64).unseen(vitrel.Grid(24, 24))


def test_a_module_that_is_not_there_is_named():
    from vitrel import cli

    with pytest.raises(SystemExit, match="error: --import no_such_module: there is no module no_such_module in "):
        cli.main(["list", "--import", "no_such_module"])
