"""Windows at a new size: exact against a model that was built with that window and holds the same (sub-)table."""

import pytest
import timm
import torch

from vitrel import resolution_report
from vitrel.evaluate.policies import in_force
from vitrel.evaluate.window_policies import window_policies_at, window_policy
from vitrel.grid import Grid
from vitrel.position.resize import resize_table


def swin(img_size, window, depths=(2,), **how):
    torch.manual_seed(0)
    heads = (1, 2, 4)[: len(depths)]
    how = dict(img_size=img_size, window_size=window, depths=depths, num_heads=heads, num_classes=3) | how
    model = timm.create_model("vitrel_swin_n", **how).eval().double()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # far from zero, so that the bias matters
            torch.nn.init.normal_(parameter, std=2.0 if "table" in name else 0.3)
    return model


def with_tables(other, model, policy):
    """`other` with the weights of `model`, whose tables are brought to its window by `policy`."""
    source, target = (Grid(*m.layers[0].blocks[0].attn.window) for m in (model, other))
    state = model.state_dict()
    for name in state:
        if "table" in name:
            state[name] = resize_table(state[name], source, target, policy)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize(
    ("size", "window"),
    [((18, 18), (3, 3)), ((18, 16), (3, 4)), ((10, 6), (1, 3)), ((26, 24), (1, 4))],
)
def test_divisor_is_the_model_with_that_window_and_the_centre_of_the_table(size, window):
    model, images = swin((16, 16), 4), torch.randn(2, 3, *size, dtype=torch.float64)
    built = with_tables(swin(size, window), model, "clip")  # which reads the centre of what is larger
    with torch.no_grad(), in_force(model, "divisor", size):
        assert model.resized(size) == {} and model.unseen(size) == 0
        [stage] = resolution_report(model, size).stages
        assert (stage.window, stage.padding, stage.padded_share) == (window, (0, 0), 0.0)
        torch.testing.assert_close(model(images), built(images), rtol=0, atol=1e-12)
    with torch.no_grad():
        assert (model(images) - built(images)).abs().max() > 0.1  # with its own window it is another model


@pytest.mark.parametrize("policy", ["geometric", "clip", "bicubic"])
@pytest.mark.parametrize(("size", "window"), [((32, 32), (8, 8)), ((24, 40), (6, 10)), ((28, 16), (7, 4))])
def test_rescale_is_the_model_with_that_window_and_the_resized_table(policy, size, window):
    model, images = swin((16, 16), 4, depths=(2, 2)), torch.randn(2, 3, *size, dtype=torch.float64)
    built = with_tables(swin(size, window, depths=(2, 2)), model, policy)
    tables = [name for name, _ in model.named_parameters() if "table" in name]
    values = sum(model.state_dict()[name].numel() for name in tables)
    with torch.no_grad(), in_force(model, f"rescale+{policy}", size):
        assert model.resized(size) == {f"table {policy}": 0 if policy == "clip" else values}
        assert model.unseen(size) == pytest.approx(1 - min(1, 7 / (2 * window[0] - 1)) * min(1, 7 / (2 * window[1] - 1)))
        assert [grid[:2] for _, grid in model.encodings(size)] == [window] * 4
        torch.testing.assert_close(model(images), built(images), rtol=0, atol=1e-12)
    assert model.resized(size) == {}


def test_a_smaller_window_reads_the_centre_and_rounds_down():
    model = swin((16, 16), 4)
    with window_policy(model, "rescale", (14, 10)):
        attn = model.layers[0].blocks[1].attn
        assert (attn.window, attn.shift) == ((3, 2), (1, 1)) and model.resized((14, 10)) == {}
    wide = swin((16, 24), (4, 6))
    with window_policy(wide, "rescale", (32, 12)):  # each axis by its own trained side
        assert wide.layers[0].blocks[0].attn.window == (8, 3)
    with window_policy(model, "rescale", (2, 6)):
        assert model.layers[0].blocks[1].attn.window == (1, 1)


def test_every_stage_has_its_own_divisor():
    model = timm.create_model("vitrel_swin_n")
    with window_policy(model, "divisor", (80, 72)):
        stages = resolution_report(model, (80, 72)).stages
    assert [(s.grid, s.window) for s in stages] == [((40, 36), (4, 4)), ((20, 18), (4, 3)), ((10, 9), (2, 3))]
    assert all(stage.padded_share == 0 for stage in stages)


def test_policies_are_listed_where_they_differ():
    model = timm.create_model("vitrel_swin_n")  # trained at 64, grids 32, 16, 8
    assert window_policies_at(model, (64, 64)) == ()
    assert window_policies_at(model, (128, 128)) == ("keep", "rescale")
    assert window_policies_at(model, (80, 64)) == ("keep", "divisor", "rescale")
    assert window_policies_at(model, (66, 64)) == ("keep", "divisor")  # 4 * 66 // 64 = 4
    assert window_policies_at(swin((32, 32), 4), (6, 6)) == ("keep", "rescale")  # 3 tokens: one masked window is exact too
    assert window_policies_at(timm.create_model("vitrel_vit_n8_table"), (80, 80)) == ()
    assert window_policies_at(timm.create_model("resnet10t"), (80, 80)) == ()


def test_blocks_of_a_plain_trunk_that_have_a_window():
    how = dict(class_token=False, global_pool="avg", block_args={"window": 4, "global_blocks": (3,)}, num_classes=3)
    model = timm.create_model("vitrel_vit_n8_table", img_size=64, **how).eval()
    assert window_policies_at(model, (96, 96)) == ("keep", "rescale")
    with window_policy(model, "rescale", (96, 96)):
        assert [block.window and block.window[:2] for block in model.blocks] == [(6, 6)] * 3 + [None]
    assert model.blocks[0].window == Grid(4, 4)


def test_windows_are_back_after_an_error():
    model = swin((16, 16), 4)
    before = [(block.attn.window, block.attn.shift) for block in model.layers[0].blocks]
    with pytest.raises(KeyError), window_policy(model, "rescale", (32, 32)):
        raise KeyError
    assert (
        [(block.attn.window, block.attn.shift) for block in model.layers[0].blocks]
        == before
        == [((4, 4), (0, 0)), ((4, 4), (2, 2))]
    )
    with pytest.raises(ValueError, match="unknown window policy 'grow'; choose one of keep, divisor, rescale"):
        window_policy(model, "grow", (32, 32)).__enter__()


def test_the_report_of_a_size_knows_the_window_trained_on():
    model = timm.create_model("vitrel_swin_n", img_size=64, patch_size=4)
    with window_policy(model, "rescale", (128, 128)):
        report = resolution_report(model, 128)
    assert {(e.grid, e.trained) for e in report.encodings} == {((8, 8), (4, 4))}
    assert all("resampled by table geometric" in e.effect for e in report.encodings)
