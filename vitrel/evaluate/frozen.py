"""Accuracy of frozen features at many image sizes: k nearest neighbors and a linear probe, for any model of timm or vitrel.

Features are those before the classifier (`forward_head(..., pre_logits=True)`). At each size both methods learn from training
images at that size and are judged on evaluation images at that size: the question is what the features hold there, not whether
they stay the same (that is the agreement of `vitrel.inspect.features`).

k-NN is that of DINO and DINOv2 (arXiv 2104.14294, 2304.07193, after 1805.01978): features of length 1, the 20 nearest training
images by cosine, each with a vote of exp(cosine / 0.07). The linear probe is logistic regression on standardized features by
L-BFGS, with the weight decay that is best on every fifth training image; DINOv2 tunes SGD on the evaluation images instead.
Intervals are those of the evaluation (`vitrel.evaluate.statistics`).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.common.modules import evaluating
from vitrel.common.sizes import Size, format_size
from vitrel.data.readers.splits import Split
from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.images import Images, View, scale
from vitrel.evaluate.predict import AtSizes, Runner, predict
from vitrel.evaluate.statistics import estimate
from vitrel.tasks import Row

NEIGHBORS, TEMPERATURE = 20, 0.07
DECAYS = (1e-3, 1e-2, 1e-1, 1.0)  # weight decays of the linear probe
STEPS = 100  # iterations of L-BFGS


class Pooled(nn.Module):
    """Returns the features of a model before its classifier, instead of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features [B, C] of images [B, 3, H, W]."""
        return self.model.forward_head(self.model.forward_features(pixels), pre_logits=True)


def frozen_rows(
    trained: TrainedModel,
    data: str,
    sizes: Sequence[Size],
    train_images: int | None = None,
    val_images: int | None = None,
    batch_size: int = 32,
) -> Iterator[Row]:
    """Yield a row for each size and method ("k-NN", "linear") on frozen features, as soon as it is measured.

    A row has label, size, method, top1 in percent with low and high, its 95 % interval over images, images and train_images.

    Args:
        trained: the model with its preprocessing, on the CPU; it is not changed.
        data: name or folder as `create_dataset` takes it, with images for training and evaluation.
        sizes: (h, w) in pixels.
        train_images, val_images: number of images at most, sampled with a fixed seed; None: all.
        batch_size: number of images in a forward pass.

    Raises:
        ValueError: the data cannot be read, the model does not take a size, or its task is not classification.
    """
    check_task(trained)
    view = scale(trained, trained.img_size)
    of_training = _at_most(train_images, data, view, batch_size, "train")
    of_evaluation = _at_most(val_images, data, view, batch_size, "val")
    classes = len(of_training.classes or ())
    for size in sizes:
        at = view._replace(size=size)
        (bank, known), (queries, labels) = (features_of(trained, images, at) for images in (of_training, of_evaluation))
        for method, answers in (("k-NN", knn), ("linear", linear_probe)):
            right = (answers(bank, known, queries, classes).argmax(1) == labels).double().numpy()
            found = estimate([right[None]])
            numbers = {"top1": found.mean, "low": found.low(), "high": found.high()}
            yield {
                "label": trained.label,
                "size": format_size(size),
                "method": method,
                **{name: round(float(value), 2) for name, value in numbers.items()},
                "images": len(labels),
                "train_images": len(known),
            }


def _at_most(n: int | None, data: str, view: View, batch_size: int, split: Split) -> Images:
    """Return n random images of a split, or all if there are fewer or n is None."""
    images = Images(data, view, batch_size=batch_size, split=split)
    return images if n is None or n >= images.total else Images(data, view, n=n, batch_size=batch_size, split=split)


def check_task(trained: TrainedModel) -> None:
    """Raise ValueError for a model of another task than classification."""
    if trained.task != "classification":
        raise ValueError(f"k-NN and the linear probe need one class an image: {trained.label} has the task {trained.task}")


def features_of(trained: TrainedModel, images: Images, view: View) -> tuple[Tensor, Tensor]:
    """Return the features [n, C] of all images of a view before the classifier, and their labels [n], on the CPU.

    The passes are on the model's device; afterwards the model is on the CPU. `BadImage` (a ValueError) names an image that
    cannot be read.
    """
    device = next(trained.model.parameters()).device
    with evaluating(trained.model), AtSizes(trained.model, "none", device) as at:
        runner = Runner(Pooled(at(view.size)), device, images.batch_size)
        kept = predict(
            runner, images.batches(view), images.order(view), lambda found, labels: {"features": found, "labels": labels}
        )
    return torch.from_numpy(kept.arrays["features"]), torch.from_numpy(kept.arrays["labels"])


def knn(
    bank: Tensor, known: Tensor, queries: Tensor, classes: int, k: int = NEIGHBORS, temperature: float = TEMPERATURE
) -> Tensor:
    """Return votes [n, classes] on `queries` [n, C] of the k nearest rows of `bank` [m, C] with classes `known` [m].

    Nearest is by cosine, and the vote of a row for its class is exp(cosine / temperature).
    """
    cosine, nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).mT).topk(min(k, len(bank)), 1)
    return torch.zeros(len(queries), classes).scatter_add_(1, known[nearest], (cosine / temperature).exp())


def linear_probe(bank: Tensor, known: Tensor, queries: Tensor, classes: int) -> Tensor:
    """Return logits [n, classes] of `queries` [n, C] by logistic regression on `bank` [m, C] with classes `known` [m].

    Features are standardized as those of `bank`. The weight decay is that of DECAYS (the first if equal, or with fewer than 5
    rows) with the highest accuracy on every fifth row of `bank`, fitted to the others. Rows of class -100 add no loss.
    """
    mean, spread = bank.mean(0), bank.std(0, correction=0).clamp(min=1e-6)
    bank, queries = (bank - mean) / spread, (queries - mean) / spread
    held = torch.arange(len(bank)) % 5 == 4
    best = DECAYS[0]
    if held.any():
        scores = [
            float((_logits(bank[~held], known[~held], bank[held], classes, decay).argmax(1) == known[held]).double().mean())
            for decay in DECAYS
        ]
        best = DECAYS[scores.index(max(scores))]
    return _logits(bank, known, queries, classes, best)


def _logits(bank: Tensor, known: Tensor, queries: Tensor, classes: int, decay: float) -> Tensor:
    """Return logits [n, classes] of `queries` [n, C] from a linear layer fitted to `bank` [m, C] with classes `known` [m].

    It minimizes cross-entropy + decay / 2 times the mean over classes of the squared length of the weights of a class.
    """
    weight = torch.zeros(classes, bank.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(bank @ weight.mT + bias, known) + decay / 2 * weight.square().sum() / classes
        value.backward()
        return value

    with torch.inference_mode(False), torch.enable_grad():
        optimizer.step(loss)
    return (queries @ weight.mT + bias).detach()
