"""The protocol native: whole images at their own aspect ratios, within a budget of tokens."""

import math
import re
from collections import Counter

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import Dataset

from helpers.pictures import picture, tensor
from vitrel.common.sizes import Budget, format_size, native_size, parse_size_or_budget
from vitrel.data import Prepare
from vitrel.evaluate import at_sizes, images, policies, run
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.images import Images
from vitrel.evaluate.run import dry_run
from vitrel.evaluate.sweep import Settings, trials
from vitrel.tasks.classification import TASK

pytestmark = pytest.mark.usefixtures("brief_evaluations")
FILES = [(40, 40), (64, 32), (66, 34), (30, 61), (50, 37), (24, 33), (48, 20), (40, 41), (16, 80)]  # (h, w) in pixels
HOW = {"device": "cpu", "attention_n": 0, "border_leak": False, "batch_size": 3, "protocols": ("native",), "policies": ("all",)}


@pytest.fixture
def trained(trained):
    """As in conftest.py, on the classes of `folder`."""
    return lambda name, **how: trained(name, **{"classes": ("a", "b", "c")} | how)


@pytest.fixture
def folder(tmp_path):
    """Images in three classes, of several shapes, no two alike."""
    for i, size in enumerate(FILES):
        place = tmp_path / "data" / "val" / "abc"[i % 3]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(*size, i)).save(place / f"{i}.png")
    return tmp_path / "data"


def evaluate(models, folder, *sizes, **given):
    """The rows of models on a folder at native shape, of (20 tokens)."""
    return at_sizes(models, str(folder), sizes or ("20t",), **HOW | {"report": False} | given).to_dict("records")


def plan(models, *sizes, **given):
    return trials(models, [(0, 1, 2)] * len(models), Settings(sizes=sizes, **HOW | given))


def by_hand(trained, folder, budget, patch):
    """Of every image in the order of the data: the pixels that the model should see, from its file alone."""
    found = []
    for path in sorted((folder / "val").glob("*/*.png")):
        image = Image.open(path)
        height, width = native_size(image.height, image.width, budget, patch)
        resized = torch.from_numpy(np.array(image.resize((width, height), Image.BICUBIC))).permute(2, 0, 1)
        found.append((resized / 255 - 0.5) / 0.5)
    return found


@pytest.fixture
def logits(monkeypatch):
    """All logits of an evaluation, in the order of its batches."""
    seen, keep = [], type(TASK).keep

    def record(self, given, *rest, **how):
        seen.append(given)
        return keep(self, given, *rest, **how)

    monkeypatch.setattr(type(TASK), "keep", record)
    return lambda: torch.cat(seen)


def peer(**how):
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3, **how
    ).eval()
    torch.nn.init.normal_(model.head.weight)
    return trained_model(model, preprocessing={"mean": (0.5,) * 3, "std": (0.5,) * 3})


MODELS = {
    "windows": lambda trained: trained("vitrel_swin_n"),
    "timm, dynamic size": lambda trained: peer(dynamic_img_size=True),
    "timm, set to a size": lambda trained: peer(),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_every_image_alone(trained, folder, logits, kind):
    model = MODELS[kind](trained)
    patch, budget = model.patch, 20 if model.patch == (8, 8) else 80
    skip = (f"{format_size(model.img_size)} native",)
    [*_, trial] = plan([model], Budget(budget), model.img_size, skip=skip)
    [*_, row] = evaluate([model], folder, Budget(budget), model.img_size, skip=skip)
    shown = by_hand(model, folder, budget, patch)
    order = Images(str(folder), trial.view).order(trial.view)
    assert sorted(order) == list(range(len(FILES)))
    with torch.no_grad():
        for index, found in zip(order, logits()[-len(FILES) :], strict=True):
            ready = policies.at_size_with(model.model, tuple(shown[index].shape[-2:]), trial.policy)
            torch.testing.assert_close(found, ready.model(shown[index][None])[0], atol=1e-5, rtol=1e-5)
    grids = [(image.shape[1] // patch[0], image.shape[2] // patch[1]) for image in shown]
    assert row["tokens"] == pytest.approx(sum(h * w for h, w in grids) / len(grids), abs=0.01)
    assert row["budget"] == budget and row["n"] == len(FILES) and row["crop_pct"] == 1.0


def test_a_budget_is_a_square_of_the_models_own_patches(trained, folder):
    models = [trained("vitrel_vit_n8_none"), trained("vitrel_swin_n")]  # patches of 8 and of 2
    found = [
        (trial.trained.patch, format_size(trial.size), trial.protocol, trial.view.budget)
        for trial in plan(models, Budget(20), (24, 40), protocols=("scale", "native"))
    ]
    assert [place[1:] for place in found if place[0] == (8, 8)] == [
        ("32x32", "scale", None), ("32x32", "native", 16), ("32x32", "native", 20),
        ("24x40", "scale", None), ("24x40", "native", 15),
    ]  # fmt: skip
    assert [place[1:] for place in dict.fromkeys(found) if place[0] == (2, 2) and place[2] == "native"] == [
        ("32x32", "native", 256), ("8x8", "native", 20), ("24x40", "native", 240)
    ]  # fmt: skip
    skipped = plan(models[:1], Budget(20), protocols=("scale", "native"), skip=("20t native",))
    assert [(trial.protocol, trial.view.budget) for trial in skipped] == [("scale", None), ("native", 16)]


@pytest.mark.slow
def test_columns_tell_of_all_shapes(trained, folder, monkeypatch):
    monkeypatch.setattr(policies, "gflops", lambda model, size: math.prod(size) / 1000)
    model = trained("vitrel_vit_n8_table")
    training, other = evaluate([model], folder, Budget(30), attention_n=3, policies=("geometric",))
    in_order = sorted(range(len(FILES)), key=lambda index: index % 3)  # as the folders of the classes have them
    sizes = [native_size(*FILES[index], 30, (8, 8)) for index in in_order]
    assert other["img_size"] == "40x40" and training["img_size"] == "32x32" and training["budget"] == 16
    assert other["retention"] == pytest.approx(other["top1"] / training["top1"], abs=1e-4) and training["retention"] == 1
    assert other["unseen"] == pytest.approx(max(model.model.unseen(size) for size in sizes), abs=1e-4)
    assert other["resampled"] != "nothing" and other["attention_entropy"] > 0
    costs = {size: policies.gflops(model.model, size) for size in set(sizes)}
    assert min(costs.values()) < other["gflops"] < max(costs.values())
    reported = policies.sample_shapes(Counter(sizes))
    assert {min(sizes, key=lambda s: s[0] / s[1]), max(sizes, key=lambda s: s[0] / s[1])} <= set(reported)
    shown = Counter(sizes)
    mean = sum(costs[size] * shown[size] for size in reported) / sum(shown[size] for size in reported)
    assert other["gflops"] == pytest.approx(mean, abs=1e-4)


def test_a_folder_goes_on_and_keeps_budgets_of_one_square_apart(trained, folder, tmp_path):
    model, out = trained("vitrel_vit_n8_none"), tmp_path / "out"
    evaluate([model], folder, out=out)
    text = dry_run([model], str(folder), Settings(sizes=(Budget(20), Budget(17)), **HOW), out)
    assert re.search(r"\| native +\| +17 \|", text) and f"in {out} already: 2" in text
    rows = evaluate([model], folder, "20t", "17t", protocols=("scale", "native"), out=out)
    assert [(row["protocol"], row["budget"] == row["budget"] and int(row["budget"])) for row in rows] == [
        ("native", 16), ("native", 20), ("scale", False), ("native", 17),
    ]  # fmt: skip
    assert {row["img_size"] for row in rows} == {"32x32"}
    # native: whole images, which no mode crops; and a model without position has nothing that sizes change
    assert {(row["protocol"], row["crop_mode"]) for row in rows} == {("native", ""), ("scale", model.crop_mode)}
    assert {row["resampled"] for row in rows} == {"nothing"}


def test_images_that_cannot_be_read_are_left_out(trained, folder):
    (folder / "val" / "b" / "empty.png").write_bytes(b"no image")
    (folder / "val" / "c" / "wide.png").write_bytes((folder / "val" / "c" / "8.png").read_bytes()[:200])  # its header is whole
    model = trained("vitrel_vit_n8_none")
    with pytest.raises(ValueError, match=r"empty\.png"):
        evaluate([model], folder)
    for row in evaluate([model], folder, on_bad_image="count"):
        assert (row["n"], row["left_out"]) == (len(FILES), 2)


class Pictures(Dataset):
    """PIL images of several shapes."""

    classes = ("a", "b", "c")

    def __len__(self):
        return len(FILES)

    def __getitem__(self, index):
        return Image.fromarray(picture(*FILES[index], index)), index % 3


@pytest.mark.slow
def test_a_data_set_of_the_user_is_shown_so(trained):
    model = trained("vitrel_vit_n8_absolute")
    frame = at_sizes(model, Pictures(), ["20t"], workers=2, **HOW)
    prepared = [
        Prepare(native_size(*size, 20, (8, 8)), model.mean, model.std, protocol="native")(tensor(picture(*size, index)))
        for index, size in enumerate(FILES)
    ]
    with torch.no_grad():
        alone = torch.cat([model.model(image[None]) for image in prepared])
    nll = torch.nn.functional.cross_entropy(alone, torch.arange(len(FILES)) % 3).item()
    assert frame["nll"].tolist()[-1] == pytest.approx(nll, abs=1e-5) and len(frame) == 2


@pytest.mark.slow
def test_processes_share_the_images_of_every_shape(trained, folder, pretend_world):
    model = trained("vitrel_vit_n8_absolute")
    alone = evaluate([model], folder, attention_n=1)
    pretend_world(2)
    for row, one in zip(evaluate([model], folder, attention_n=1), alone, strict=True):
        assert row["nll"] == pytest.approx(one["nll"], abs=2e-6)
        same = ("n", "top1", "tokens", "gflops", "unseen", "attention_entropy", "budget")
        assert {name: row[name] for name in same} == {name: one[name] for name in same}


def test_memory_that_runs_out_makes_smaller_batches_of_one_shape(trained, folder, monkeypatch):
    model = trained("vitrel_vit_n8_none")
    [alone] = evaluate([model], folder, (32, 32), batch_size=8)
    batch, loaded = images._batch, []

    def collate(items, **how):
        loaded.append(len(items))
        if len(items) > 2:
            raise MemoryError
        return batch(items, **how)

    monkeypatch.setattr(images, "_batch", collate)
    [row] = evaluate([model], folder, (32, 32), batch_size=8)
    assert max(loaded) > 2 and row["batch_size"] <= 2 and row["n"] == len(FILES)
    assert row["nll"] == pytest.approx(alone["nll"], abs=1e-5)


def test_models_that_cannot_are_refused_before_anything_runs(folder, monkeypatch):
    monkeypatch.setattr(run, "_share", lambda *given: pytest.fail("it ran"))
    fixed = timm.models.MlpMixer(num_classes=3, img_size=32, patch_size=8, embed_dim=8, num_blocks=1).eval()
    with pytest.raises(ValueError, match="--protocol scale"):
        at_sizes(fixed, str(folder), [32], **HOW)
    convolutions = timm.create_model("resnet10t", num_classes=3).eval()
    for requested in ({"sizes": ["9t"], "protocols": ["scale"]}, {"sizes": [32], "protocols": ["native"]}):
        with pytest.raises(ValueError, match="patch_size"):
            at_sizes(convolutions, str(folder), requested.pop("sizes"), **HOW | requested)


def test_sizes_and_budgets_are_read():
    assert [parse_size_or_budget(text) for text in ("196t", "1T", "32x48", 96)] == [Budget(196), Budget(1), (32, 48), (96, 96)]
    for text in ("0t", "t", "-4t", "1.5t", "32x32t", True):
        with pytest.raises(ValueError, match="196t"):
            parse_size_or_budget(text)
