"""What of a Swin's file is refused and in which words, and tables of windows that are no squares."""

import pytest
import timm
import torch

import vitrel
from vitrel.models import Swin

WINDOW = (3, 5)
SMALL = dict(patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5, img_size=(24, 40))


def swin(**options):
    return Swin(**(SMALL | dict(window_size=WINDOW) | options)).eval()


def of_timm():
    return timm.create_model("swin_tiny_patch4_window7_224", window_size=WINDOW, **SMALL).state_dict()


def test_a_table_that_no_square_gives_has_the_grid_of_its_model():
    ours, state = swin(window_size=(6, 7)), of_timm()
    with pytest.raises(ValueError, match=r"bias_table has 45 rows, which no square grid gives: build the model"):
        vitrel.load_pretrained(ours, state)
    vitrel.load_pretrained(ours, vitrel.load_pretrained(swin(), state))
    table = ours.layers[1].blocks[1].position.relative_position_bias_table
    assert torch.equal(table[5 * 13 + 6], state["layers.1.blocks.1.attn.relative_position_bias_table"][2 * 9 + 4])


def refused(model, state, *texts):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(RuntimeError) as error:
        vitrel.load_pretrained(model, state)
    for text in ("nothing was loaded", *texts):
        assert text in str(error.value), str(error.value)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    return str(error.value)


def test_refusals():
    state, second = of_timm(), swin(version=2, position="cpb").state_dict()
    refused(swin(version=2), state, "not in the file: layers.0.blocks.0.attn.logit_scale")
    refused(swin(), second, "not in the model: layers.0.blocks.0.attn.logit_scale")
    refused(swin(position="rope_axial"), state, "attn.relative_position_bias_table")
    refused(swin(position="rope_mixed+table"), state, "not in the file: layers.0.blocks.0.position.parts.rope_mixed.freqs")
    refused(swin(position="absolute+table"), state, "not in the file: pos_embed.pos_embed.")
    refused(swin(depths=(2, 3)), state, "not in the file: layers.1.blocks.2.")
    plain = timm.create_model("vit_tiny_patch16_224", depth=1, patch_size=2, img_size=16).state_dict()
    refused(swin(), plain, "The first others are cls_token, pos_embed, blocks.0.norm1.weight")


def test_at_most_ten_names_of_a_kind_are_given():
    said = refused(swin(depths=(1, 2)), of_timm(), "not in the model: layers.0.blocks.1.", ", and 3 more. ")
    assert said.count("layers.0.blocks.1.") == 10
