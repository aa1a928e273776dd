"""Training that gives every pixel a class: loss and metrics against sums by hand, whole runs, resumption, what is refused."""

import math
import signal

import pytest
import torch
import torch.nn.functional as F

import vitrel
from helpers.runs import assert_same_run, at, in_child, on_two, read, resumed, rows, status
from vitrel.data import create_dataset
from vitrel.models.segmenter import Segmenter
from vitrel.tasks import task_named
from vitrel.train import run
from vitrel.train.objective import Objective

IGNORED = 255
CLASSES = ("field", "house", "lake")


@pytest.fixture
def segment(command, town):
    """segment(name, *extra, epochs=3): arguments of a run that learns the town."""

    def build(name, *extra, epochs=3):
        options = f"--data.data={town}", "--model.task=segmentation", "--data.augment={flip: true}", "--data.batch_size=8"
        return command(name, *options, *extra, epochs=epochs)

    return build


def task(**options):
    return task_named("segmentation").learning(3, Objective(**options), 0.0)


def test_loss_is_the_mean_over_pixels_that_have_a_class():
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randint(3, (2, 4, 5))
    target[0, :3], target[1, 1] = IGNORED, IGNORED
    summed, count = 0.0, 0
    for b in range(2):
        for y in range(4):
            for x in range(5):
                if target[b, y, x] != IGNORED:
                    summed -= float(logits.detach()[b, :, y, x].log_softmax(0)[target[b, y, x]])
                    count += 1
    torch.testing.assert_close(float(task().loss(logits, target)), summed / count)
    right = [[logits[b, :, y, x].argmax() == target[b, y, x] for y in range(4) for x in range(5)] for b in range(2)]
    seen = [int((one != IGNORED).sum()) for one in target]
    want = torch.tensor([sum(map(bool, one)) / n for one, n in zip(right, seen, strict=True)])
    torch.testing.assert_close(task().right(logits, target), want)


def test_classes_are_weighted():
    logits, target = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    target[0, 0] = IGNORED
    weights, labeled = [0.2, 1.0, 2.0], target != IGNORED
    want = F.cross_entropy(logits.movedim(1, -1)[labeled], target[labeled], torch.tensor(weights))
    torch.testing.assert_close(task(class_weights=weights).loss(logits, target), want)
    with pytest.raises(ValueError, match="holds 2 numbers for 3 classes"):
        task(class_weights=[1.0, 2.0])


def test_a_batch_without_classes_teaches_nothing():
    logits, target = torch.randn(2, 3, 4, 5, requires_grad=True), torch.full((2, 4, 5), IGNORED)
    loss = task().loss(logits, target)
    loss.backward()
    assert loss == 0 and not logits.grad.any() and not task().right(logits, target).any()


def test_dice_is_added_to_the_cross_entropy():
    losses = pytest.importorskip("segmentation_models_pytorch").losses
    logits, target = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    target[0, 0] = IGNORED
    want = task().loss(logits, target) + 0.5 * losses.DiceLoss("multiclass", ignore_index=IGNORED)(logits, target)
    torch.testing.assert_close(task(dice=0.5).loss(logits, target), want)


def test_metrics_are_those_at_the_masks_own_resolution():
    """A map of 2x2 logits, read at masks of 4x4 and 2x2 pixels; what fills the batches of ranks does not count."""
    one = torch.full((3, 2, 2), -9.0)
    one[0, :, 0], one[1, :, 1] = 9.0, 9.0  # class 0 on the left, class 1 on the right
    wide = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [IGNORED, 0, 0, 1]])
    small = torch.tensor([[0, 1], [2, IGNORED]])
    it = task()
    it.update(torch.stack((one, one, one)), [wide, small, -1])
    # class 0: 6 right of 7 + 1 (wide) and 1 of 1 + 1 (small); class 1: 7 and 1 right; class 2: one pixel, missed
    iou = (6 + 1) / (8 + 2), (7 + 1) / (9 + 1), 0.0
    assert float(it.miou.compute()) == pytest.approx(sum(iou) / 3)
    assert float(it.accuracy.compute()) == pytest.approx((13 + 2) / (15 + 3))
    assert float(it.mean_loss.images) == 2


def test_settings_of_classification_are_refused():
    with pytest.raises(ValueError, match="segmentation learns by cross-entropy"):
        task(loss="bce")
    with pytest.raises(ValueError, match="dice and class_weights are of segmentation"):
        task_named("classification").learning(3, Objective(dice=1.0), 0.0)
    with pytest.raises(ValueError, match=r"unknown task 'boxes': choose from classification, multilabel, segmentation"):
        task_named("boxes")


@pytest.mark.slow
def test_mixup_is_refused(segment):
    with pytest.raises(ValueError, match=r"leave out model\.mixing for segmentation"):
        run(segment("run", "--model.mixing={mixup: 0.2}"))


@pytest.mark.slow
def test_a_run_learns_and_its_checkpoint_is_the_model(segment, tmp_path, town):
    cli = run(segment("run", epochs=8))
    log = [row for row in rows(tmp_path / "run" / "metrics.csv") if row["val/loss"]]
    assert float(log[-1]["val/miou"]) > 0.7 > float(log[0]["val/miou"])
    assert float(log[-1]["val/pixel_accuracy"]) > 0.85 and float(log[-1]["train/pixel_accuracy_epoch"]) > 0.8
    entry = read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]
    assert (entry["task"], entry["head"], entry["classes"]) == ("segmentation", "linear", list(CLASSES))
    model, images = vitrel.load(tmp_path / "run"), torch.randn(2, 3, 32, 32)
    assert isinstance(model, Segmenter) and model.pretrained_cfg["label_names"] == list(CLASSES)
    torch.testing.assert_close(model(images), cli.model.eval()(images))
    best = max(float(row["val/miou"]) for row in log)
    assert math.isclose(float(cli.trainer.checkpoint_callbacks[0].best_model_score), best, abs_tol=1e-6)
    whole, other = read(tmp_path / "run" / "checkpoints" / "last.ckpt"), tmp_path / "other.ckpt"
    torch.save(whole | {"vitrel": whole["vitrel"] | {"head": "fpn"}}, other)
    with pytest.raises(ValueError, match="checkpoint's head is fpn, this run's is linear"):
        run([*segment("other", epochs=9), f"--ckpt_path={other}"])


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(segment, tmp_path):
    """Killed just after an evaluation inside an epoch."""
    extra = "--data.train_sizes=[24, 32]", "--model.ema={decay: 0.9}", "--trainer.val_check_interval=2", "--run.save_every=1"
    args = segment("cut", *extra, epochs=2)
    assert status(in_child(args, at(3, signal.SIGKILL))) == -signal.SIGKILL
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    run(segment("whole", *extra, epochs=2))
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_an_encoding_is_fitted_to_the_attention_of_pretrained_weights(segment, tmp_path, capsys):
    """As in classification: from images alone, and the head of segmentation stays new."""
    weights = tmp_path / "weights.safetensors"
    source = vitrel.create_model(
        "vitrel_vit_n8_absolute", img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=4, global_pool="avg"
    )
    vitrel.save(source, weights)
    args = [arg for arg in segment("run", epochs=1) if not arg.startswith(("--model.model=", "--model.model_args="))]
    cli = run([*args, f"--model.model={weights}", "--model.tuning={position: table, fit: 8}"])
    assert "table" in cli.model.stored[1]["position"] and "absolute" not in cli.model.stored[1]["position"]
    assert "fitted to 8 images" in capsys.readouterr().out
    assert vitrel.load(tmp_path / "run").backbone.arguments["position"] == "table"


@pytest.mark.slow
def test_two_processes_sum_their_metrics(segment, tmp_path):
    """The evaluation set is an odd number of images: one rank fills its share, and the metrics are those of one process."""
    args = segment(
        "two",
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
        "--data.batch_size=4",
        "--trainer.limit_train_batches=2",
        epochs=1,
    )
    assert on_two(args) == [0, 0]
    [row] = [row for row in rows(tmp_path / "two" / "metrics.csv") if row["val/loss"]]
    model, seen = vitrel.load(tmp_path / "two"), task()
    entry = read(tmp_path / "two" / "checkpoints" / "last.ckpt")["vitrel"]
    how = {name: entry[name] for name in ("mean", "std", "interpolation")}
    images = create_dataset(entry["data"], "val", (32, 32), task="segmentation", **how)
    with torch.no_grad():
        for i in range(len(images)):
            image, mask = images[i]
            seen.update(model(image[None]), [mask])
    for name in ("miou", "pixel_accuracy"):
        assert float(row[f"val/{name}"]) == pytest.approx(float(seen.values[f"val/{name}"].compute()), abs=1e-5)
