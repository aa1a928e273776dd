"""Rescue without training: the search, its halves, what it may look at, and that what it prints applies what it found."""

import dataclasses

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import vitrel
from vitrel.evaluate import rescue as module
from vitrel.evaluate.checkpoint import load_checkpoint, trained_model
from vitrel.evaluate.policies import with_policy
from vitrel.evaluate.predict import state_hash
from vitrel.evaluate.prepare import Images
from vitrel.evaluate.rescue import (
    TEMPERATURES,
    VARIANTS,
    Setting,
    as_it_is,
    chosen,
    code_of,
    halves,
    in_words,
    rescue,
    rescue_text,
    search,
    steps_at,
    write_rescue,
)
from vitrel.evaluate.sweep import Sweep
from vitrel.evaluate.table import read_rescue
from vitrel.position.rope_policies import POLICIES

pytestmark = pytest.mark.usefixtures("brief_evaluations")
ROPE = "vitrel_vit_n8_rope_axial"


def model_of(name=ROPE, **how):
    torch.manual_seed(1)
    model = timm.create_model(name, img_size=32, depth=2, num_classes=3, **how).eval()
    with torch.no_grad():  # as drawn, attention is nearly uniform, and no position matters
        for block in model.blocks:
            block.attn.qkv.weight.mul_(16)
        model.head.weight.mul_(20)
    return model


def images_of(sweep, n=24, labels=None):
    pixels = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(n) % 3 if labels is None else labels

    def at(size, **how):
        return TensorDataset(F.interpolate(pixels, size), labels)

    return Images(sweep, at)


def sweep_of(*sizes, **how):
    return Sweep("given", sizes, ("scale",), device="cpu", **how)


def found_by(model, sizes, **how):
    sweep = sweep_of(*sizes)
    return rescue([trained_model(model)], sweep, images_of(sweep, **how))


@pytest.mark.parametrize("n", [2, 7, 40, 5000])
def test_no_image_is_tuned_on_and_judged_on(n):
    tuned, judged = halves(n, 0)
    assert not (tuned & judged).any() and judged.sum() == n - n // 2 and tuned.sum() == min(n // 2, module.TUNED)
    assert n == 2 or not torch.equal(tuned, halves(n, 1)[0])


def test_a_setting_is_taken_where_it_is_better_by_more_than_noise():
    start, other, third = (Setting("none", (("temperature", value),)) for value in (1.0, 2.0, 3.0))
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert chosen({start: noise, other: noise + 0.5 + 0.1 * noise.flip(0), third: noise - 1})[0] == other
    found, z, needed = chosen({start: noise, other: noise.flip(0) + 0.01})
    assert found == start and 0 < z < needed
    assert chosen({start: noise, other: noise.clone()})[0] == start
    assert chosen({start: noise})[0] == start


def test_the_search_keeps_the_best_value_of_every_option_and_its_bound():
    steps = steps_at(model_of(), (64, 64))
    best = Setting("linear", (("policy_strength", 1.25), ("temperature", 2.0)))

    def scores(settings):
        return [torch.tensor([float(len({*one.options} & {*best.options}) + (one.policy == best.policy))]) for one in settings]

    tried = search(Setting("none"), steps, scores)
    assert max(tried, key=tried.get) == best and len(tried) < module.MOST
    assert len(search(Setting("none"), steps, scores, most=5)) == 5


def test_what_there_is_to_try():
    def names(model, size):
        start = as_it_is(model, size)
        tried = {setting for step in steps_at(model, size) for setting in step(start)}
        return {name for setting in tried for name, _ in setting.options} | {one.policy for one in tried}

    assert names(model_of(), (64, 64)) == {*POLICIES, "policy_strength", "yarn_turns", "temperature"}
    assert names(model_of(), (16, 16)) == {"none", "temperature"}  # a smaller grid changes no frequency
    assert steps_at(model_of(), (32, 32)) == []
    assert names(model_of("vitrel_vit_n8_table"), (64, 64)) == {"geometric", "clip", "bicubic", "temperature"}
    counted = model_of(position_args={"reference": 4})  # positions on a grid that does not grow
    assert names(counted, (64, 64)) == {"none", "temperature"}
    swin = timm.create_model("vitrel_swin_n_rope_mixed", img_size=64)
    assert "temperature" not in names(swin, (96, 96))  # in a window the number of keys stays


def test_nothing_changes_at_the_training_size_and_afterwards():
    model, native, larger = model_of(), torch.randn(2, 3, 32, 32), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(native), model(larger)
        arguments, attributes = dict(model.arguments), [sorted(vars(part)) for part in model.modules()]
        different, settings = 0, [*((policy, {}) for policy in POLICIES), *VARIANTS]
        for policy, numbers in settings:
            for value in TEMPERATURES:
                changed = with_policy(model, (64, 64), policy, {**numbers, "temperature": value})
                assert torch.equal(changed(native), before[0])
                different += not torch.equal(changed(larger), before[1])
        assert different == len(settings) * len(TEMPERATURES) - 1
        assert torch.equal(model(larger), before[1])
    assert model.arguments == arguments and attributes == [sorted(vars(part)) for part in model.modules()]


def test_rows_lines_and_files(tmp_path):
    model, sweep = model_of(), sweep_of((64, 64), (32, 48), (16, 16))
    before = state_hash(model)
    text = write_rescue([trained_model(model, label="mine")], sweep, images_of(sweep), tmp_path)
    rows = read_rescue(tmp_path)
    assert state_hash(model) == before and [row["img_size"] for row in rows] == ["64x64", "32x48", "16x16"]
    for row in rows:
        assert int(row["tuned_n"]) == int(row["judged_n"]) == 12 and 1 < int(row["tried"]) <= module.MOST
        assert row["top1_trained_set"] == row["top1_trained"]
        assert float(row["difference_low"]) <= float(row["difference"]) <= float(row["difference_high"])
    assert "64x64" in text and text == (tmp_path / "rescue.md").read_text()
    assert {row["label"] for row in rows} == {"mine"} and read_rescue(tmp_path / "none") == []


def test_labels_are_for_judging_alone():
    free = ("top1", "lost", "regained", "difference", "seconds")
    first, *others = [
        [
            {name: value for name, value in row.items() if not name.startswith(free)}
            for row in found_by(model_of(), [(64, 64)], labels=labels).rows
        ]
        for labels in (None, torch.zeros(24, dtype=torch.long), torch.randint(3, (24,)))
    ]
    assert others == [first, first] and first[0]["tried"] > 10


def test_a_setting_that_restores_the_prediction_is_found(monkeypatch):
    """What is predicted at the training size is here what the larger one gives with a hidden setting, labels included."""
    size, hidden, own = (64, 64), Setting("linear"), module._predicted

    def predicted(place, settings, which, sweep, images):
        if place.size == size:
            return own(place, settings, which, sweep, images)
        found, _ = own(dataclasses.replace(place, size=size), [hidden] * len(settings), which | True, sweep, images)
        return [one[which] for one in found], found[0].argmax(1)

    monkeypatch.setattr(module, "_predicted", predicted)
    sweep = sweep_of(size)
    (row,) = rescue([trained_model(model_of())], sweep, images_of(sweep, n=120)).rows
    assert row["policy"] == "linear" and "linear" in row["setting"] and row["code"]
    assert row["top1_set"] > row["top1"] and row["top1_trained"] == 100 and row["regained"] > 50


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (ROPE, Setting("yarn", (("policy_strength", 0.5), ("yarn_turns", (0.25, 1.0))))),
        (ROPE, Setting("keep", (("temperature", 1.0),))),
        ("vitrel_vit_n8_table", Setting("clip", (("temperature", "log_n"),))),
    ],
)
def test_the_code_applies_the_setting(tmp_path, name, setting):
    made, size, path = model_of(name), (64, 64), tmp_path / "model.safetensors"
    vitrel.save(made, path)
    trained = load_checkpoint(path)
    start, images = as_it_is(trained.model, size), torch.randn(2, 3, *size)
    with torch.no_grad():
        wanted = with_policy(trained.model, size, setting.policy, dict(setting.options))(images)
        assert not torch.equal(wanted, trained.model(images))
        loaded = {"vitrel": vitrel}
        exec(code_of(trained, setting, start, size), loaded)
        torch.testing.assert_close(loaded["model"](images), wanted)
        code = code_of(dataclasses.replace(trained, path=tmp_path), setting, start, size)  # a model in memory
        exec(code, {"model": made})
        torch.testing.assert_close(made(images), wanted)
        vitrel.save(made, tmp_path / "set.safetensors")  # its arguments followed
        torch.testing.assert_close(vitrel.load(tmp_path / "set.safetensors")(images), wanted)
    assert code_of(trained, start, start, size) == "" and in_words(start, start) == "as it is"
    assert in_words(setting, start) != "as it is"


def test_models_with_nothing_to_try_are_named_in_one_line():
    found = found_by(model_of(), [(32, 32)])
    assert found.rows == [] and found.notes == []
    other = trained_model(timm.create_model("resnet10t", num_classes=3).eval(), img_size=(32, 32))
    sweep = sweep_of((64, 64))
    found = rescue([other], sweep, images_of(sweep))
    assert found.rows == [] and len(found.notes) == 1 and "nothing to try" in rescue_text(found)


def test_timm_models_are_converted():
    sweep = sweep_of((48, 48))
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    (row,) = rescue([trained_model(model, img_size=(32, 32))], sweep, images_of(sweep)).rows
    assert row["tried"] == len(TEMPERATURES)
    assert row["code"] == "" or "vitrel.from_timm(model)" in row["code"]


def test_options_that_cannot_be_switched_are_refused_and_nothing_is_changed():
    model = model_of()
    for options in ({"policy": "clip"}, {"policy": "pi"}, {"base": 3.0}, {"temperature": -1}, {"policy_strength": 0}):
        with pytest.raises(ValueError, match=next(iter(options)).partition("_")[0]):
            model.set_position_options(policy="linear", **options) if "policy" not in options else model.set_position_options(
                **options
            )
        assert model.blocks[0].position.policy == "keep" and not model.arguments["position_args"]
