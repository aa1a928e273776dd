"""Training at native shape: every image once, at about its own aspect ratio, on a grid without padding."""

import itertools
import shutil
import signal
from math import log

import pytest
from torch.utils.data import DataLoader

from helpers import each, shared
from helpers.runs import EVERYTHING, assert_same_run, at, in_child, resumed, rows, status
from vitrel.common.sizes import Budget, native_size
from vitrel.data import Augmentation, create_dataset
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.train import run
from vitrel.train.batch_order import NativeOrder, evaluation_batches
from vitrel.train.datamodule import ImageData

PATCH = (8, 8)
SIZES = [(height, width) for height in range(40, 80) for width in (40, 60, 90)]  # 120 images


def order(sizes=SIZES, batch_size=8, tokens=36, **how):
    return NativeOrder(sizes, batch_size, tokens, PATCH, **how)


def flat(batches):
    return list(itertools.chain(*batches))


def native_shares(sizes, batch_size, tokens, *ranks):
    return evaluation_batches([native_size(*size, tokens, PATCH) for size in sizes], batch_size, *ranks)


def aspect_error(draw, sizes):
    (h, w), (height, width) = draw.size, sizes[draw.index]
    return abs(log(h / w * width / height))


@each("n", [3, 8, 9, 17, 119, 120])
def test_every_image_once_in_an_epoch(n):
    made = order(SIZES[:n]).batches(4)
    assert sorted(draw.index for draw in flat(made)) == list(range(n))
    counts = sorted(map(len, made))
    assert counts[-1] <= 8 and (n < 8 or counts[0] >= 4)  # what is left is shared by two batches


def test_a_batch_has_one_grid_within_the_budget_near_its_images():
    made = order()
    for batch in made.batches(0):
        assert len({draw.size for draw in batch}) == 1
        h, w = batch[0].size
        assert h % 8 == w % 8 == 0 and h * w <= 36 * 64
    errors = sorted(aspect_error(draw, SIZES) for draw in flat(made.batches(0)))
    assert errors[len(errors) // 2] < 0.1 and errors[-1] < 0.3  # one patch of six is 0.15
    square = sorted(abs(log(height / width)) for height, width in SIZES)
    assert errors[len(errors) // 2] < square[len(square) // 2] / 2


def test_a_function_of_seed_and_epoch():
    assert order().batches(3) == order().batches(3)
    made = [order(seed=seed).batches(epoch) for seed in range(2) for epoch in range(3)]
    assert len({str(batches) for batches in made}) == 6
    together = [{frozenset(draw.index for draw in batch) for batch in batches} for batches in made]
    assert together[0] != together[1]  # not only the order of the batches


@each(("n", "world"), [(120, 2), (119, 2), (101, 4)])
def test_ranks_share_the_batches_of_one(n, world):
    whole = order(SIZES[:n], 8).batches(1)
    ranks = [order(SIZES[:n], 8 // world, rank=rank, world=world).batches(1) for rank in range(world)]
    for parts, batch in zip(zip(*ranks, strict=True), whole, strict=True):
        assert sorted(flat(parts)) == sorted(batch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1 and min(map(len, parts)) >= 1
        assert len({draw.size for draw in flat(parts)}) == 1
    assert sorted(draw.index for draw in flat(flat(ranks))) == list(range(n))


def test_mixed_batches_are_even():
    for n, world in ((120, 1), (119, 1), (113, 2)):
        ranks = [order(SIZES[:n], 6, even=True, rank=rank, world=world).batches(0) for rank in range(world)]
        assert all(len(batch) in (2, 4, 6) for batch in flat(ranks))
        seen = [draw.index for draw in flat(flat(ranks))]
        assert len(seen) == len(set(seen)) >= n - 2 * world


def test_views_are_repeated_at_one_size():
    made = order(repeats=3).batches(0)
    draws = flat(made)
    assert len(draws) == len(SIZES) and len({draw.index for draw in draws}) == len(SIZES) // 3
    assert sorted(draw.repeat for draw in draws) == sorted([0, 1, 2] * (len(SIZES) // 3))


def test_budgets_take_turns_at_the_same_tokens():
    made = order(batch_size=8, budgets=[36, 72, 18])
    batches = made.batches(0)
    assert sorted(draw.index for draw in flat(batches)) == list(range(len(SIZES)))
    full = {}
    for batch in batches:
        h, w = batch[0].size
        tokens = h * w // 64
        budget = min(budget for budget in (18, 36, 72) if tokens <= budget)
        full[budget] = max(full.get(budget, 0), len(batch))
    assert full == {18: 16, 36: 8, 72: 4}


def test_what_leaves_a_rank_without_images_is_refused():
    with pytest.raises(ValueError, match="3 training images are too few for 4 devices"):
        order(SIZES[:3], world=4)
    with pytest.raises(ValueError, match=r"less than 1 of 576 tokens: raise data\.batch_size"):
        order(batch_size=8, budgets=[576])


@each("world", [1, 2, 3])
def test_evaluation_sees_every_image_once_at_its_own_size(world):
    shares = [native_shares(SIZES, 8, 36, rank, world) for rank in range(world)]
    for parts in zip(*shares, strict=True):
        assert len({len(part) for part in parts}) == 1 and len(parts[0]) <= 8
        assert len({draw.size for draw in flat(parts)}) == 1
    real = [draw for draw in flat(flat(shares)) if draw.index >= 0]
    assert sorted(draw.index for draw in real) == list(range(len(SIZES)))
    assert all(draw.size == native_size(*SIZES[draw.index], 36, PATCH) for draw in real)


NATIVE = ("--data.protocol=native", "--data.tokens=16")


@pytest.fixture
def native(native_folder):
    return f"--data.data={native_folder}", *NATIVE


@pytest.mark.slow
def test_a_run_is_resumed_inside_an_epoch_at_its_shape_alone(command, whole, native, tmp_path):
    """With everything that is drawn, averaged weights, repeated views, even batches and two budgets: bit-equal once resumed."""
    extra = (*EVERYTHING, *native, "--data.train_sizes=[32, 40]", "--data.repeats=2", "--run.save_every=1")
    args, folder = command("cut", *extra, epochs=2), tmp_path / "cut"
    assert status(in_child(args, at(9, signal.SIGKILL))) == -signal.SIGKILL
    for change, text in (("--data.tokens=20", "data.tokens: 16, now 20"), ("--data.train_sizes=null", "train_sizes: ")):
        with pytest.raises(ValueError, match=text):
            run([*resumed(args, folder), change])
    assert status(in_child(resumed(args, folder))) == 0
    assert_same_run(folder, whole(*extra, epochs=2))
    top1 = float(rows(folder / "metrics.csv")[-1]["val/top1"])
    assert top1 * 28 == pytest.approx(round(top1 * 28), abs=1e-3)  # of 28 images, each once
    trained = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert trained.train_sizes == (Budget(16), Budget(25)) and trained.img_size == (32, 32)


def test_settings_without_a_native_shape_are_refused(native_folder):
    with pytest.raises(ValueError, match=r"data.protocol must be scale or native, not 'own'"):
        ImageData(str(native_folder), 32, protocol="own")
    with pytest.raises(ValueError, match=r"data.tokens \(16\) .* needs data.protocol native"):
        ImageData(str(native_folder), 32, tokens=16)
    with pytest.raises(ValueError, match=r"data.tokens \(0\) must be at least 1"):
        ImageData(str(native_folder), 32, protocol="native", tokens=0)
    with pytest.raises(ValueError, match="shapes are drawn at any size"):
        ImageData("shapes", 32, protocol="native")


@pytest.mark.slow
def test_models_of_one_size_are_refused(command, native):
    fixed = "--model.model_args={embed_dim: 32, depth: 1, num_heads: 2}"
    with pytest.raises(ValueError, match="any image size, which this VisionTransformer has not"):
        run(command("run", *native, "--model.model=vit_tiny_patch16_224", fixed))


@pytest.mark.slow
def test_images_without_a_header_are_left_out(command, native_folder, tmp_path):
    shutil.copytree(native_folder, tmp_path / "data")
    for split in ("train", "val"):
        (tmp_path / "data" / split / "red" / "3.png").write_bytes(b"")
    run(command("run", f"--data.data={tmp_path / 'data'}", *NATIVE, "--data.reading.bad_share=0.1", epochs=1))
    listed = (tmp_path / "run" / "bad_images.csv").read_text().splitlines()[1:]
    assert listed == [str(tmp_path / "data" / split / "red" / "3.png") for split in ("train", "val")]


@pytest.mark.slow
def test_all_tokens_of_photographs_are_image():
    """Every patch of every batch, augmented and evaluated, holds pixels of its image: padding would have the mean color."""
    flowers = str(shared("data/flowers256"))
    data = {
        split: create_dataset(flowers, split, (224, 224), mean=(0.5,) * 3, std=None, protocol="native", **how)
        for split, how in (("train", {"augment": Augmentation(scale=(0.08, 1.0))}), ("val", {}))
    }
    sizes = {split: images.image_sizes() for split, images in data.items()}
    batches = order(sizes["train"], 64, 196).batches(0)
    errors = sorted(aspect_error(draw, sizes["train"]) for draw in flat(batches))
    assert errors[len(errors) // 2] < 0.05 and errors[int(0.95 * len(errors))] < 0.12
    for split, chosen in (("train", batches[:2]), ("val", native_shares(sizes["val"], 64, 196)[:2])):
        for images, _ in DataLoader(data[split], batch_sampler=[batch[:16] for batch in chosen]):
            patches = images.unfold(2, 8, 8).unfold(3, 8, 8)
            assert patches.shape[2] * patches.shape[3] <= 196 and images.shape[-2:].numel() == patches[0, 0].numel()
            filled = (patches == 128).all(-1).all(-1).all(1)  # [B, h, w]
            assert (~filled).float().mean() >= 0.98
