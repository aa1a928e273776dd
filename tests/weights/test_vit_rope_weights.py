"""ViT weights of timm with rotary position: random ones give timm's logits and, in its layout, its gradients."""

import pytest
from timm.models.eva import Eva

import vitrel
from helpers import each
from helpers.vit_peers import SMALL, ours

EVA = dict(base=10000.0, reference=(16, 16))


def eva(**own):
    return Eva(**SMALL | dict(use_rot_pos_emb=True, dynamic_img_size=True) | own)


EVA02 = dict(mlp_ratio=4 * 2 / 3, swiglu_mlp=True, ref_feat_shape=(16, 16))


ROPE_VIT = dict(attn_type="rope", init_values=1.0, global_pool="token", rope_grid_indexing="xy")


DINOV3 = dict(
    init_values=1.0, rope_type="dinov3", rope_temperature=100.0, rope_rotate_half=True, use_abs_pos_emb=False, num_reg_tokens=4
)


@pytest.mark.parametrize("state", [ROPE_VIT, ROPE_VIT | dict(rope_type="mixed"), DINOV3, EVA02])
@each("position", ["table", "rope_axial", "rope_mixed"])
def test_names_do_not_show_a_rotation(position, state):
    """Fixed frequencies are not in a file, and layouts of one shape differ: the model has to be named, whatever it is for."""
    peer = eva(**dict(use_abs_pos_emb=False) | state)
    with pytest.raises(ValueError, match=r"of timm's EVA and BEiT models, .* load vitrel\.from_timm\(it\)"):
        vitrel.load_pretrained(ours(position), peer.state_dict())
