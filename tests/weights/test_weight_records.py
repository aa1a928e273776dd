"""What a state dict does not hold goes along: training grids and options, so that the same numbers are the same function."""

import pytest
import timm
import torch
from safetensors import safe_open

from vitrel import save
from vitrel.weights.plan import load_pretrained, plan_weights
from vitrel.weights.read import read_file
from vitrel.weights.record import position_record


def build(name, **options):
    torch.manual_seed(0)
    return timm.create_model(f"vitrel_{name}", num_classes=3, **options).eval()


@pytest.fixture
def saved(tmp_path):
    def saved(model):
        save(model, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    return saved


def test_a_file_has_the_names_of_the_model_and_the_record(saved):
    path = saved(model := build("vit_n8_absolute_rope_mixed"))
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    assert read_file(path)["vitrel"]["position"] == position_record(model)


def test_grids_of_tables_need_no_naming(saved):
    """A 4x16 table has as many rows as no square; an embedding of 4x16 as many as one of 8x8: the record tells."""
    for name in ("vit_n8_table", "vit_n8_absolute"):
        wide = build(name, img_size=(32, 128))
        path, ours = saved(wide), build(name)
        resampled = [row for row in plan_weights(ours, path).rows if row.resampled]
        assert resampled
        assert all(row.resampled.startswith("4x16 -> 8x8, ") for row in resampled)
        by_hand = load_pretrained(build(name), wide)
        load_pretrained(ours, path)
        assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), by_hand.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "vit_n8_fire",
            dict(img_size=96),
            r"position \(fire\) refers to its training grid, 8x8, which is 12x12 in",
        ),
        ("vit_n8_xpos", dict(img_size=96), r"scale_base=4\.0, the model has 6\.0"),
        (
            "vit_n8_cpb",
            dict(img_size=96),
            r"the model has \[12, 12\]: position_args=dict\(pretrained_window=\[8, 8\]\)",
        ),
        ("vit_n8_rope_axial", dict(position="rope_normalized"), r"trained as 'rope_axial', the model has 'rope_normalized'"),
        (
            "vit_n8_rope_axial",
            dict(position_args=dict(base=50.0)),
            r"base=100\.0, the model has 50\.0: position_args=dict\(base",
        ),
        ("vit_n8_lookhere", dict(position="alibi"), r"trained as 'lookhere', the model has 'alibi'"),
    ],
)
def test_another_function_is_refused(name, options, message, saved):
    path = saved(build(name))
    with pytest.raises(ValueError, match=message):
        load_pretrained(build(name, **options), path)


def test_policies_and_scaling_are_the_users_choice(saved):
    path = saved(build("vit_n8_table"))
    load_pretrained(build("vit_n8_table", position_args=dict(policy="clip")), path)
    path = saved(build("vit_n8_rope_axial"))
    load_pretrained(build("vit_n8_rope_axial", position_args=dict(policy="ntk")), path)
    load_pretrained(build("vit_n8_rope_axial", position_args=dict(temperature="log_n")), path)
    load_pretrained(build("vit_n8_rope_axial", img_size=96), path)  # the grid is no part of the function
    with pytest.raises(ValueError, match="refers to its training grid, 8x8, which is 12x12 in"):
        load_pretrained(build("vit_n8_rope_axial", img_size=96, position_args=dict(policy="ntk")), path)
