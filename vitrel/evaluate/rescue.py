"""Rescue: a search for settings that raise accuracy at other sizes without training, on images without labels.

The policies of windows and encodings, their numbers, and the attention `temperature` do not change the
model at the training size, so they can be set freely for another size. Which of them helps depends on the model and the images.
The score of a setting needs no labels: it is the mean log-likelihood, at the new size, of the class that the model predicts at
the training size, over half of the images, drawn by a seed. (It correlated better with accuracy than the share of equal
predictions, the mean probability and the confidence did.) The current setting is replaced only if another is significantly
better: a paired, one-sided test at 5 % divided by the number of settings tried. Top-1 is then measured, with labels, on the
other half.

The search changes one option at a time, in the order policy, VARIANTS, temperature, strength of a rotary policy, and keeps the
best value of each. Its cost is then the sum and not the product of the numbers of values: at most MOST settings per size and
protocol.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from vitrel.common.files import atomic_write, guarded, shown, write_cells
from vitrel.common.progress import Advance, progress
from vitrel.common.sizes import Size, format_size
from vitrel.convert import from_timm
from vitrel.cpu.optimize import optimize, restore
from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.policies import WINDOW_POLICIES, at_size_with, policies_at, with_policy
from vitrel.evaluate.predict import Runner
from vitrel.evaluate.prepare import Images
from vitrel.evaluate.statistics import estimate
from vitrel.evaluate.sweep import Row, Sweep
from vitrel.evaluate.tasks import Task, classes_of, line_columns, sizes_of
from vitrel.evaluate.text import markdown
from vitrel.layers import Attention
from vitrel.models.backbone import Backbone
from vitrel.position.rope import RotaryEncoding
from vitrel.position.rope_policies import POLICIES

FILES = ("rescue.csv", "rescue.md")
MOST = 24  # maximum number of settings tried at one size and protocol, the current one included
TUNED = 500  # maximum number of images for the search; half of all images where that is fewer
LEVEL = 0.05  # significance level of the test, divided by the number of settings tried
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (  # rotary policies with numbers other than the default
    ("linear", {"policy_strength": 0.5}),
    ("yarn", {"yarn_turns": (0.25, 1.0)}),  # the default suits long texts; over few patches no band rotates once
)
TEMPERATURES: tuple[str | float, ...] = ("none", "log_n", 1.0, 2.0)
STEPS = (-0.25, 0.25, 0.5)  # changes of the best strength of a rotary policy that are tried
COLUMNS = {
    "label": "name in tables",
    "seed": "seed of training",
    "train_size": "size of training, height x width in pixels",
    "img_size": "size of evaluation, height x width in pixels",
    "protocol": "how images fill a size",
    "crop_pct": "share of the resized image that the center crop keeps",
    "data": "data evaluated on",
    "setting": "the chosen setting, in words; as it is: the current one",
    "policy": "its policies, of windows, then of encodings",
    "options": "its options of position, JSON",
    "tried": "number of settings tried, the current one included",
    "passes": "number of forward passes of one image, without those at the training size",
    "seconds": "time of the search and of measuring top-1",
    "tuned_n": "number of images for the search, without labels",
    "score_as_is": "mean log-likelihood, with the current setting, of the class predicted at the training size, nats",
    "score": "the same for the best setting tried",
    "z": "mean of the paired difference of these two, divided by its standard error",
    "z_needed": "the z above which the best setting is chosen",
    "judged_n": "number of images for top-1, none of them used in the search",
    "top1_trained": "top-1 at the training size, percent",
    "top1_trained_set": "top-1 at the training size with the chosen setting, percent",
    "top1": "top-1 at this size with the current setting, percent",
    "top1_low": "lower end of its 95 % Wilson interval",
    "top1_high": "upper end of its 95 % Wilson interval",
    "top1_set": "top-1 at this size with the chosen setting, percent",
    "top1_set_low": "lower end of its 95 % Wilson interval",
    "top1_set_high": "upper end of its 95 % Wilson interval",
    "difference": "top1_set - top1, points",
    "difference_low": "lower end of its 95 % interval, images paired",
    "difference_high": "upper end of its 95 % interval, images paired",
    "lost": "top1_trained - top1, points",
    "regained": "difference / lost, percent; empty where no points are lost",
    "code": "Python code that applies the setting",
}


HEAD = (
    "model", "size", "protocol", "at training size", "as it is", "with setting", "difference", "regained", "setting",
)  # fmt: skip


class Setting(NamedTuple):
    """A policy of `policies_at`, and options of `Backbone.set_position_options` as sorted pairs (name, value).

    Options that are not listed stay as the model has them.
    """

    policy: str
    options: tuple[tuple[str, Any], ...] = ()

    def having(self, options: Mapping[str, Any], without: Iterable[str] = ()) -> "Setting":
        """Return the setting without the options named in `without`, then updated with `options`."""
        kept = {name: value for name, value in self.options if name not in {*without}}
        return self._replace(options=tuple(sorted({**kept, **options}.items())))


class Rescued(NamedTuple):
    """The results of `rescue`.

    rows: one per model, size and protocol, with the columns COLUMNS: the chosen setting, and top-1 with and without it.
    notes: sentences on models and sizes with nothing to try.
    """

    rows: list[Row]
    notes: list[str]


def as_it_is(model: Backbone, size: Size) -> Setting:
    """Return the model's current setting at `size` (h, w) pixels: its policy there, and no options, so none is changed."""
    return Setting(policies_at(model, size, ())[0])


def steps_at(model: Backbone, size: Size) -> list[Callable[[Setting], list[Setting]]]:
    """Return the steps of a search at `size` (h, w) pixels: functions from the best setting so far to the settings to try next.

    Steps that cannot change the model at this size are left out; [] where none can.
    """
    both = zip(model.encodings(size), model.trained_encodings(), strict=True)
    grids = [(encoding, grid, trained_grid) for (encoding, grid), (_, trained_grid) in both]
    parts = [part for encoding, *_ in grids for part in encoding.modules()]
    rotations = [part for part in parts if isinstance(part, RotaryEncoding) and part.policies]
    current = grids[0][0].temperature if grids else "none"
    larger = any(grid.h > trained.h or grid.w > trained.w for _, grid, trained in grids)
    scales = bool(rotations) and larger
    strength = rotations[0].policy_strength if rotations else 1.0
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    # more tokens flatten attention, unless windows keep their number
    flattens = all(part.window is None for part in layers) and any(grid.tokens != own.tokens for _, grid, own in grids)
    steps: list[Callable[[Setting], list[Setting]]] = []
    if len(policies := policies_at(model, size)) > 1:
        steps.append(lambda best: [best._replace(policy=policy) for policy in policies])
    if scales:
        steps.append(lambda best: [_with_rotary(best, name).having(options) for name, options in VARIANTS])
    if flattens:
        steps.append(
            lambda best: [
                best.having({"temperature": value} if value != current else {}, ["temperature"]) for value in TEMPERATURES
            ]
        )
    if scales:
        steps.append(lambda best: _strengths(best, strength))
    return steps


def search(
    start: Setting,
    steps: Sequence[Callable[[Setting], list[Setting]]],
    scores: Callable[[Sequence[Setting]], list[Tensor]],
    most: int = MOST,
) -> dict[Setting, Tensor]:
    """Search settings step by step from `start`; return {setting: its scores, one per image [n]}, `start` first.

    Every step gets the setting with the highest mean score so far. steps: see `steps_at`. scores: function from settings to the
    scores of each. most: maximum number of settings tried, `start` included.
    """
    tried = {start: scores([start])[0]}
    for step in steps:
        best = max(tried, key=lambda setting: tried[setting].mean().item())
        new = [setting for setting in dict.fromkeys(step(best)) if setting not in tried][: most - len(tried)]
        tried |= zip(new, scores(new) if new else [], strict=True)
    return tried


def chosen(tried: Mapping[Setting, Tensor]) -> tuple[Setting, float, float]:
    """Return (setting, z, z needed): the setting with the best mean score where it is significantly better than the first one.

    tried: scores of every setting, the current one first, which is returned where z (the mean paired difference over its
    standard error) does not exceed the z needed. z is that of the best setting, even where the first one is returned; 0 where
    all differences are equal.
    """
    start, *others = tried
    needed = NormalDist().inv_cdf(1 - LEVEL / max(len(others), 1))
    best = max(tried, key=lambda setting: tried[setting].mean().item())
    gain = (tried[best] - tried[start]).double()
    error = gain.std(correction=1).item() / len(gain) ** 0.5 if len(gain) > 1 else float("inf")
    z = gain.mean().item() / error if error > 0 else 0.0
    return (best if z > needed else start), z, needed


def halves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return two disjoint masks bool [n], drawn by seed: images for the search, and the other half, for measuring top-1.

    The search has at most TUNED images; the rest of its half is in neither mask.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    tuned, judged = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    tuned[order[: min(n // 2, TUNED)]] = True
    judged[order[n // 2 :]] = True
    return tuned, judged


def agreement(log_probability: Tensor, reference: Tensor) -> Tensor:
    """Return the log-likelihood [n] of each image's class in `reference` [n], given log probabilities [n, K]."""
    return log_probability.gather(1, reference[:, None])[:, 0]


def rescue(models: Sequence[TrainedModel], sweep: Sweep, images: Images) -> Rescued:
    """Search a setting for every model, size and protocol of a sweep, and measure top-1 with and without it.

    Left out are the training size, the protocol "native", combinations of `sweep.skip`, crops after the first, and sizes where
    no option changes the model (the notes name these). timm's models are converted first. Prints the cost. The method is
    described at the top of this module. ValueError for a size that a model does not support.
    """
    rescued = Rescued([], [])
    by_model = [_places(trained, sweep, rescued.notes) for trained in models]
    count = sum(map(len, by_model))
    if not count:
        return rescued
    n = len(images.dataset(next(places[0] for places in by_model if places).preprocessing))
    tuned, judged = (int(half.sum()) for half in halves(n, sweep.data_seed))
    most = count * (MOST * tuned + 2 * judged) + sum(n + judged for places in by_model if places)
    print(
        f"rescue: {count} combinations of model, size and protocol, at most {MOST} settings each on {tuned} images without "
        f"labels, then top-1 on {judged} others: at most {most:,} forward passes of one image",
        flush=True,
    )
    work = sum(math.prod(place.size) for places in by_model for place in places)
    with progress(count, "combinations searched", work=work) as advance:
        for places in by_model:
            if places:
                rescued.rows.extend(_rescued(places, sweep, images, advance, {id(trained.model) for trained in models}))
    return rescued


def write_rescue(models: Sequence[TrainedModel], sweep: Sweep, images: Images, folder: Path) -> str:
    """Run `rescue`, write rescue.csv and rescue.md into `folder`, and return the text of rescue.md."""
    rescued = rescue(models, sweep, images)
    lines = [[guarded(row[name]) for name in COLUMNS] for row in rescued.rows]
    write_cells(folder / FILES[0], [tuple(COLUMNS), *lines])
    text = rescue_text(rescued)
    with atomic_write(folder / FILES[1]) as part:
        part.write_text(text, "utf-8")
    return text


def rescue_text(rescued: Rescued) -> str:
    """Return the results as Markdown (rescue.md): a table, notes, and the code that applies each setting."""

    def of_top1(row: Row, name: str) -> str:
        return f"{row[name]:.1f} ({row[f'{name}_low']:.1f} to {row[f'{name}_high']:.1f})"

    lines = [
        [
            row["label"],
            row["img_size"],
            row["protocol"],
            f"{row['top1_trained']:.1f}",
            of_top1(row, "top1"),
            of_top1(row, "top1_set"),
            f"{row['difference']:+.1f} ({row['difference_low']:+.1f} to {row['difference_high']:+.1f})",
            "-" if row["regained"] == "" else f"{row['regained']:.0f} %",
            row["setting"],
        ]
        for row in rescued.rows
    ]
    table = markdown(HEAD, lines) if lines else ""
    codes = dict.fromkeys(f"# {row['label']}: {row['setting']}\n{row['code']}" for row in rescued.rows if row["code"])
    applied = "\nTo apply a setting:\n\n```python\n" + "\n".join(codes) + "\n```\n" if codes else ""
    intro = (
        f"Top-1 in percent with 95 % intervals on {rescued.rows[0]['judged_n']} images; settings were chosen without labels on "
        f"{rescued.rows[0]['tuned_n']} others, by agreement with the model's own predictions at its training size. Nothing was "
        "trained, and nothing changes at the training size.\n\n"
        if rescued.rows
        else ""
    )
    notes = "".join(f"{note}\n" for note in rescued.notes)
    return f"# Rescue without training\n\n{intro}{table}{notes}{applied}"


def in_words(setting: Setting, start: Setting) -> str:
    """Describe a setting: "policy yarn of strength 0.5, temperature log_n"; "as it is" for `start`."""
    if setting == start:
        return "as it is"
    options, parts = dict(setting.options), []
    strength, turns = options.get("policy_strength"), options.get("yarn_turns")
    if setting.policy != start.policy or strength is not None or turns is not None:
        parts.append(
            f"policy {setting.policy}"
            + (f" of strength {strength:g}" if strength is not None else "")
            + (f" with yarn_turns {turns[0]:g} to {turns[1]:g}" if turns is not None else "")
        )
    if "temperature" in options:
        power = options["temperature"]
        parts.append(f"temperature {power}" if isinstance(power, str) else f"temperature log N to the power {power:g}")
    return ", ".join(parts)


def code_of(trained: TrainedModel, setting: Setting, start: Setting, size: Size, converted: bool = False) -> str:
    """Return Python code that applies a setting at `size` (h, w) pixels; "" for `start`.

    The code loads the model where `trained.path` is a file, and else changes a variable `model`; for a window policy it
    replaces the variable by a copy for this size.

    converted: the user's model is timm's, so the code begins with vitrel.from_timm.
    """
    if setting == start:
        return ""
    options: dict[str, Any] = dict(setting.options)
    first = "model = vitrel.from_timm(model); " if converted else ""
    if setting.policy.partition("+")[0] in WINDOW_POLICIES:
        return f"{first}model = vitrel.evaluate.policies.with_policy(model, {tuple(size)}, {setting.policy!r}, {options})"
    if setting.policy != start.policy:
        options["policy"] = setting.policy
    if trained.path.is_file():
        arguments: Any = trained.model.arguments  # of a Backbone
        position_args = (arguments["position_args"] or {}) | options
        return f"model = vitrel.load({str(trained.path)!r}, position_args={position_args})"
    return f"{first}model.set_position_options({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _places(trained: TrainedModel, sweep: Sweep, notes: list[str]) -> list[Task]:
    """One task for each size and protocol with settings to try, at the first crop; not the training size or "native".

    Appends a sentence to `notes` where there is nothing to try. A timm model is replaced by its conversion. ValueError for a
    size that the model does not support.
    """
    sizes = [size for size in dict.fromkeys(sizes_of(trained, sweep)) if size != trained.img_size]
    protocols = [protocol for protocol in sweep.protocols if protocol != "native"]  # native has many image shapes at once
    if not isinstance(trained.model, Backbone):
        try:
            trained = replace(trained, model=from_timm(trained.model).eval())
        except ValueError as error:
            notes.append(f"{trained.label}: nothing to try, because vitrel.from_timm cannot convert it: {error}")
            return []
    places, idle = [], []
    for size in sizes:
        at_size_with(trained.model, size, as_it_is(trained.model, size).policy)  # ValueError where it is not supported
        if not steps_at(trained.model, size):
            idle.append(format_size(size))
            continue
        for protocol in protocols:
            if f"{format_size(size)} {protocol}" not in sweep.skip:
                places.append(Task(trained, size, protocol, "none", (sweep.crop_pct or (trained.crop_pct,))[0]))
    if idle:
        notes.append(f"{trained.label}: nothing to try at {', '.join(idle)}: none of the options changes this model there")
    return places


def _rescued(places: Sequence[Task], sweep: Sweep, images: Images, advance: Advance, given: Collection[int]) -> Iterator[Row]:
    """Search a setting for each task of one model and measure top-1; yield a row per task, all at the end.

    given: ids of the user's models, to tell a model that was converted.
    """
    native = replace(places[0], size=places[0].trained.img_size)
    start = as_it_is(native.trained.model, native.size)
    everything = torch.ones(len(images.dataset(native.preprocessing)), dtype=torch.bool)
    (probabilities,), labels = _predicted(native, [start], everything, sweep, images)
    reference, right_trained = probabilities.argmax(1), probabilities.argmax(1) == labels
    tuned, judged = halves(len(labels), sweep.data_seed)
    tuned, judged = tuned & (labels >= 0), judged & (labels >= 0)  # without unreadable images
    results: list[tuple[Row, Setting]] = []
    for place in places:
        began, current = time.perf_counter(), as_it_is(place.trained.model, place.size)
        steps = steps_at(place.trained.model, place.size)

        def scores(settings: Sequence[Setting], place: Task = place) -> list[Tensor]:
            log_probabilities, _ = _predicted(place, settings, tuned, sweep, images)
            advance(len(settings) / MOST, place.name, math.prod(place.size))
            return [agreement(values, reference[tuned]) for values in log_probabilities]

        tried = search(current, steps, scores)
        best = max(tried, key=lambda setting: tried[setting].mean().item())
        setting, z, needed = chosen(tried)
        compared = [current] if setting == current else [current, setting]
        log_probabilities, _ = _predicted(place, compared, judged, sweep, images)
        right = [values.argmax(1) == labels[judged] for values in log_probabilities]
        passes = len(tried) * int(tuned.sum()) + len(compared) * int(judged.sum())
        advance(1 - len(tried) / MOST, place.name, math.prod(place.size))
        row = line_columns(place) | {
            "data": shown(sweep.data),
            "train_size": format_size(place.trained.img_size),
            "setting": in_words(setting, current),
            "policy": setting.policy,
            "options": json.dumps(dict(setting.options)),
            "tried": len(tried),
            "passes": passes,
            "seconds": round(time.perf_counter() - began, 1),
            "tuned_n": int(tuned.sum()),
            "score_as_is": round(tried[current].mean().item(), 4),
            "score": round(tried[best].mean().item(), 4),
            "z": round(z, 2),
            "z_needed": round(needed, 2),
            "code": code_of(place.trained, setting, current, place.size, id(place.trained.model) not in given),
        }
        results.append((row | _accuracy_columns(right[0], right[-1], right_trained[judged]), setting))
    yield from _with_training_size(native, results, judged, labels, sweep, images)


def _accuracy_columns(as_is: Tensor, changed: Tensor, trained: Tensor) -> Row:
    """Columns on top-1, from masks bool [n] of correctly classified images: with the current setting, with the chosen one, and
    at the training size.
    """
    top1, top1_set, top1_trained = (100 * right.double().mean().item() for right in (as_is, changed, trained))
    sides = {"top1": as_is.numpy()[None], "top1_set": changed.numpy()[None]}  # one seed: [1, n]
    gain, lost = estimate([sides["top1_set"]], [sides["top1"]]), top1_trained - top1
    columns: Row = {"judged_n": len(as_is)}
    columns |= {"top1_trained": round(top1_trained, 4), "top1": round(top1, 4), "top1_set": round(top1_set, 4)}
    for name, right in sides.items():
        ends = estimate([right]).of_share()
        columns |= {f"{name}_low": round(ends[0], 4), f"{name}_high": round(ends[1], 4)}
    return columns | {
        "difference": round(top1_set - top1, 4),
        "difference_low": round(float(gain.low()), 4),
        "difference_high": round(float(gain.high()), 4),
        "lost": round(lost, 4),
        "regained": round(100 * (top1_set - top1) / lost, 2) if lost > 0 else "",
    }


def _with_training_size(
    native: Task, results: list[tuple[Row, Setting]], judged: Tensor, labels: Tensor, sweep: Sweep, images: Images
) -> Iterator[Row]:
    """Yield the rows with top1_trained_set added, top-1 at the training size with the row's setting, and only COLUMNS.

    native: the task at the training size, not of the native protocol. results: (row, its chosen setting). judged: bool [n],
    images for top-1. labels: int [n], see `_predicted`.
    """
    settings = [*dict.fromkeys(setting for _, setting in results)]
    log_probabilities, _ = _predicted(native, settings, judged, sweep, images)
    top1 = {
        setting: round(100 * (values.argmax(1) == labels[judged]).double().mean().item(), 4)
        for setting, values in zip(settings, log_probabilities, strict=True)
    }
    for row, setting in results:
        yield {name: (row | {"top1_trained_set": top1[setting]})[name] for name in COLUMNS}


def _predicted(
    place: Task, settings: Sequence[Setting], mask: Tensor, sweep: Sweep, images: Images
) -> tuple[list[Tensor], Tensor]:
    """Log probabilities [m, K] with every setting, of the m images of `mask`, bool [n], and the labels of all images [n].

    Labels are indices in K (the model's outputs, or the data's classes where `restrict` is set); -1 for images that could not
    be read, whose log probabilities are meaningless. The model is on the CPU and not optimized afterwards.
    """
    trained, size, device = place.trained, place.size, sweep.torch_device
    _, outputs = classes_of(place, sweep, images)
    output_of = torch.arange(len(outputs)) if trained.restrict else torch.tensor(outputs)
    by_setting: list[list[Tensor]] = [[] for _ in settings]
    labels, start = [], 0
    try:
        model = trained.model.to(device)
        model = optimize(model) if sweep.optimize else model
        models = [with_policy(model, size, setting.policy, dict(setting.options)) for setting in settings]
        runners = [Runner(each, device, sweep.batch_size, sweep.dtype, sweep.compile) for each in models]
        for pixels, classes in images.batches(place.preprocessing):
            selected, read = mask[start : start + len(classes)], classes >= 0
            start += len(classes)
            labels.append(torch.where(read, output_of[classes.clamp(min=0)], -1))
            if selected.any():
                pixels = pixels[selected]
                for runner, parts in zip(runners, by_setting, strict=True):
                    logits = runner(pixels)
                    logits = logits[:, torch.tensor(outputs)] if trained.restrict else logits
                    if not logits[read[selected]].isfinite().all():
                        raise FloatingPointError(f"{place.name}: the logits hold NaN or infinity")
                    parts.append(log_softmax(logits, 1))
    finally:
        restore(trained.model).cpu()
    count = trained.model.num_classes if not trained.restrict else len(outputs)
    return [torch.cat(parts) if parts else torch.zeros(0, count) for parts in by_setting], torch.cat(labels)


def _with_rotary(setting: Setting, name: str) -> Setting:
    """The setting with the policy `name` of rotary encodings, and the others as they are."""
    names = [name if policy in POLICIES else policy for policy in setting.policy.split("+")]
    return setting._replace(policy="+".join(names))


def _strengths(best: Setting, current: float) -> list[Setting]:
    """`best` with other strengths of its rotary policy; [] where that keeps frequencies. current: the model's own strength."""
    if not {*POLICIES[1:]} & {*best.policy.split("+")}:
        return []
    strength = dict(best.options).get("policy_strength", current)
    return [best.having({"policy_strength": strength + step}) for step in STEPS if strength + step > 0]
