"""The picture of a diagnosis: whose tokens see across borders, and what one of them sees."""

import pytest
import timm

import vitrel
from vitrel.inspect.plot import leak

SWIN = dict(embed_dim=12, num_heads=(1, 1), depths=(2, 2), num_classes=2)


@pytest.mark.slow
def test_all_rows_show_one_stage():
    """The stage where the first model leaks most decides, whatever leaks most in the others."""
    theirs = timm.create_model("swin_tiny_patch4_window7_224", dynamic_img_size=True, **SWIN)
    found = [vitrel.diagnose(model, [80, 56]) for model in (theirs, timm.create_model("vitrel_swin_t", **SWIN))]
    panels = leak(found).axes
    values = [panel.images[0].get_array() for panel in panels]
    assert [shape.shape for shape in values] == [(20, 20)] * 4
    assert "stage 1 at 80x80 px: 20x20 tokens, window 7x7" in panels[0].get_title()
    assert panels[2].get_title().startswith("vitrel_swin_t\n")
    assert values[0].max() > 0 and values[2].max() == 0  # ours sees its windows alone
    assert [(seen == 3).sum() for seen in values[1::2]] == [1, 1]


def test_without_windows_there_is_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw: no windows were seen in vitrel_vit_n8_table"):
        leak([vitrel.diagnose("vitrel_vit_n8_table", [64])])
