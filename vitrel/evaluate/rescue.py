"""Rescue without training: what acts at other sizes alone, tuned for a size on images without labels.

Options of rotations (`scaling`), the attention temperature (`logit_scale`), and the policies of windows and encodings change
nothing at the training size, so any of them may be taken for another size. Which one helps there depends on the model and on
the images. It is chosen without labels: half of the images, drawn by a seed, are shown at the training size and at the new
size, and a setting is the better, the higher the mean log-likelihood that it gives at the new size to the class that the model
predicts at the training size. (That went along with accuracy better than the share of equal predictions, the mean probability
and the confidence did.) The setting as it is stays unless another is better by more than noise: a paired, one-sided test at
5 %, divided by the number of settings tried. Top-1 is then measured, with labels, on the other half.

The search takes one option after the other, in the order scaling, policy, temperature, strength of the scaling, and keeps the
best value so far, so that its cost is the sum and not the product of the choices: at most MOST settings at every size and
protocol.
"""

import csv
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from vitrel.convert import from_timm
from vitrel.cpu.optimize import optimize, restore
from vitrel.evaluate.images import Images
from vitrel.evaluate.measure import Runner, Task, classes_of, line_columns, sizes_of
from vitrel.evaluate.metrics import mcnemar, paired_interval, wilson
from vitrel.evaluate.models import Trained
from vitrel.evaluate.policies import WINDOW_POLICIES, at_size_with, in_force, policies_at
from vitrel.evaluate.settings import Row, Sweep
from vitrel.files import atomic_write, guarded, shown, write_cells
from vitrel.layers import Attention
from vitrel.models.backbone import Backbone
from vitrel.position import PositionEncoding
from vitrel.position.rope_scaling import OPTIONS, Scaling
from vitrel.progress import progress
from vitrel.sizes import Size, format_size

FILES = ("rescue.csv", "rescue.md")
MOST = 24  # settings tried at one size and protocol, the one as it is included
TUNED = 500  # images that settings are chosen on, at most; half of all where there are fewer
LEVEL = 0.05  # of the test that a setting must pass, divided by the number of settings tried
SCALING: tuple[dict[str, Any], ...] = (
    {"scaling": "none"},
    {"scaling": "linear"},
    {"scaling": "ntk"},
    {"scaling": "yarn"},
    {"scaling": "linear", "scaling_strength": 0.5},
    {"scaling": "yarn", "yarn_turns": (0.25, 1.0)},  # the default is for language: few patches make no band turn once
)
TEMPERATURES: tuple[str | float, ...] = ("none", "log_n", 1.0, 2.0)
STEPS = (-0.25, 0.25, 0.5)  # from the strength found to others
COLUMNS = {
    "label": "name in tables",
    "seed": "seed of training",
    "train_size": "trained at, height x width in pixels",
    "img_size": "evaluated at, height x width in pixels",
    "protocol": "how images fill a size",
    "crop_pct": "share of the resized image that the centre crop keeps",
    "data": "data evaluated on",
    "setting": "the setting chosen, in words",
    "policy": "policies in force in it, of windows, then of encodings",
    "options": "options of position that it sets, JSON",
    "tried": "number of settings tried, the one as it is included",
    "passes": "forward passes of one image that this took, those at the training size not included",
    "seconds": "time of the search and of the judgement",
    "tuned_n": "images that it was chosen on, without labels",
    "score_as_is": "mean log-likelihood, as it is, of the class predicted at the training size, on those images, nats",
    "score": "the same of the best setting found",
    "z": "mean of their paired difference over its standard error",
    "z_needed": "what z had to reach",
    "judged_n": "images that top-1 is measured on, none of them among the others",
    "top1_trained": "top-1 at the training size, percent",
    "top1_trained_set": "the same with the setting chosen",
    "top1": "top-1 at this size as it is, percent",
    "top1_low": "lower end of its 95 % Wilson interval",
    "top1_high": "upper end",
    "top1_set": "top-1 with the setting chosen, percent",
    "top1_set_low": "lower end of its 95 % Wilson interval",
    "top1_set_high": "upper end",
    "difference": "top1_set - top1, points",
    "difference_low": "lower end of its 95 % interval, images paired",
    "difference_high": "upper end",
    "mcnemar_p": "exact two-sided p of McNemar's test that both are equally often right",
    "lost": "top1_trained - top1, points",
    "regained": "difference / lost, percent; empty where no points are lost",
    "code": "Python that applies it",
}


class Setting(NamedTuple):
    """A policy of `policies_at` and options of `Backbone.set_position_options`, as pairs."""

    policy: str
    options: tuple[tuple[str, Any], ...] = ()

    def having(self, options: Mapping[str, Any], instead_of: Iterable[str] = ()) -> "Setting":
        """The same with other options, and without those `instead_of` which they stand."""
        left = {name: value for name, value in self.options if name not in {*instead_of}}
        return self._replace(options=tuple(sorted({**left, **options}.items())))


class Rescued(NamedTuple):
    """Rows, by COLUMNS, and a line for each model and size at which there was nothing to try."""

    rows: list[Row]
    notes: list[str]


def as_it_is(model: Backbone, size: Size) -> Setting:
    """The setting in use."""
    return Setting(policies_at(model, size, ())[0])


def steps_at(model: Backbone, size: Size) -> list[Callable[[Setting], list[Setting]]]:
    """What a search at `size` (h, w) pixels tries one after the other: functions of the best setting so far. [] for nothing."""
    both = zip(model.encodings(size), model.trained_encodings(), strict=True)
    met = [(encoding, grid, own) for (encoding, grid), (_, own) in both]
    rotations = [part for encoding, *_ in met for part in encoding.modules() if _can_scale(part)]
    scale = met[0][0].logit_scale if met else "none"
    scales = bool(rotations) and any(grid.h > own.h or grid.w > own.w for encoding, grid, own in met)
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    flattens = all(part.window is None for part in layers) and any(grid.tokens != own.tokens for _, grid, own in met)
    steps: list[Callable[[Setting], list[Setting]]] = []
    if scales:
        steps.append(lambda best: [best.having(_unlike(rotations[0].scaling, options), OPTIONS) for options in SCALING])
    if len(policies := policies_at(model, size)) > 1:
        steps.append(lambda best: [best._replace(policy=policy) for policy in policies])
    if flattens:
        steps.append(
            lambda best: [
                best.having({"logit_scale": value} if value != scale else {}, ["logit_scale"]) for value in TEMPERATURES
            ]
        )
    if scales:
        steps.append(_strengths)
    return steps


def search(
    start: Setting,
    steps: Sequence[Callable[[Setting], list[Setting]]],
    scores: Callable[[Sequence[Setting]], list[Tensor]],
    most: int = MOST,
) -> dict[Setting, Tensor]:
    """The settings tried, at most so many, `start` first, with what `scores` gives for each: one number per image, [n]."""
    tried = {start: scores([start])[0]}
    for step in steps:
        best = max(tried, key=lambda setting: tried[setting].mean().item())
        new = [setting for setting in dict.fromkeys(step(best)) if setting not in tried][: most - len(tried)]
        tried |= zip(new, scores(new) if new else [], strict=True)
    return tried


def chosen(tried: Mapping[Setting, Tensor]) -> tuple[Setting, float, float]:
    """The best of the settings tried, or the first where no other is better by more than noise; z of the best, and z needed."""
    start, *others = tried
    needed = NormalDist().inv_cdf(1 - LEVEL / max(len(others), 1))
    best = max(tried, key=lambda setting: tried[setting].mean().item())
    gain = (tried[best] - tried[start]).double()
    error = gain.std(correction=1).item() / len(gain) ** 0.5 if len(gain) > 1 else float("inf")
    z = gain.mean().item() / error if error > 0 else 0.0
    return (best if z > needed else start), z, needed


def halves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """The images settings are chosen on and those they are judged on, bool [n] each; drawn by seed, no image in both."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    tuned, judged = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    tuned[order[: min(n // 2, TUNED)]] = True
    judged[order[n // 2 :]] = True
    return tuned, judged


def agreement(log_probability: Tensor, reference: Tensor) -> Tensor:
    """The log-likelihood of every image's class in `reference` [n], that predicted at the training size: [n, K] -> [n]."""
    return log_probability.gather(1, reference[:, None])[:, 0]


def rescue(models: Sequence[Trained], sweep: Sweep, images: Images) -> Rescued:
    """Searches settings for every model, size and protocol of a sweep but "native", and judges each. See the module."""
    found = Rescued([], [])
    places = [_places(trained, sweep, found.notes) for trained in models]
    count = sum(map(len, places))
    if not count:
        return found
    n = len(images.dataset(next(own[0] for own in places if own).preprocessing))
    tuned, judged = (int(half.sum()) for half in halves(n, sweep.data_seed))
    most = count * (MOST * tuned + 2 * judged) + sum(n + judged for place in places if place)
    print(
        f"rescue: {count} places, at most {MOST} settings at each on {tuned} images without labels, judged on {judged} others: "
        f"at most {most:,} forward passes of one image",
        flush=True,
    )
    with progress(count, "places searched") as tell:
        for own in places:
            if own:
                found.rows.extend(_rescued(own, sweep, images, tell))
    return found


def write_rescue(models: Sequence[Trained], sweep: Sweep, images: Images, folder: Path) -> str:
    """`rescue` into rescue.csv and rescue.md in `folder`; returns the text of the latter."""
    found = rescue(models, sweep, images)
    lines = [[guarded(row[name]) for name in COLUMNS] for row in found.rows]
    write_cells(folder / FILES[0], [tuple(COLUMNS), *lines])
    text = rescue_text(found)
    with atomic_write(folder / FILES[1]) as part:
        part.write_text(text, "utf-8")
    return text


def rescue_text(found: Rescued) -> str:
    """What was found, as Markdown."""
    head = "| model | size | protocol | trained | as it is | set | difference | p | regained | setting |"
    lines = [
        f"| {row['label']} | {row['img_size']} | {row['protocol']} | {row['top1_trained']:.1f} | "
        f"{row['top1']:.1f} ({row['top1_low']:.1f} to {row['top1_high']:.1f}) | "
        f"{row['top1_set']:.1f} ({row['top1_set_low']:.1f} to {row['top1_set_high']:.1f}) | "
        f"{row['difference']:+.1f} ({row['difference_low']:+.1f} to {row['difference_high']:+.1f}) | {row['mcnemar_p']:.2g} | "
        f"{'-' if row['regained'] == '' else format(row['regained'], '.0f') + ' %'} | {row['setting']} |"
        for row in found.rows
    ]
    table = "\n".join([head, "|" + " --- |" * 10, *lines]) + "\n" if lines else ""
    codes = dict.fromkeys(f"# {row['label']}: {row['setting']}\n{row['code']}" for row in found.rows if row["code"])
    applied = "\nTo apply a setting:\n\n```python\n" + "\n".join(codes) + "\n```\n" if codes else ""
    about = (
        f"Top-1 in percent with 95 % intervals on {found.rows[0]['judged_n']} images; settings were chosen without labels on "
        f"{found.rows[0]['tuned_n']} others, by agreement with the model's own predictions at its training size. Nothing was "
        "trained, and nothing changes at the training size.\n\n"
        if found.rows
        else ""
    )
    notes = "".join(f"{note}\n" for note in found.notes)
    return f"# Rescue without training\n\n{about}{table}{notes}{applied}"


def read_rescue(folder: str | Path) -> list[dict[str, str]]:
    """The rows of rescue.csv in `folder`, as text; [] where there is none."""
    path = Path(folder) / FILES[0]
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def rescue_lines(folder: str | Path) -> dict[str, str]:
    """{label: one line, what rescue found to help this model most, or that nothing did}; {} where no rescue was tried."""
    by_label: dict[str, list[dict[str, str]]] = {}
    for row in read_rescue(folder):
        by_label.setdefault(row["label"], []).append(row)
    lines = {}
    for label, rows in by_label.items():
        best = max(rows, key=lambda row: float(row["difference_low"]))
        if float(best["difference_low"]) > 0:
            lines[label] = (
                f"at {best['img_size']} ({best['protocol']}) {best['setting']} raises top-1 from {float(best['top1']):.1f} to "
                f"{float(best['top1_set']):.1f} % without training ({float(best['difference']):+.1f} points, 95 % interval "
                f"{float(best['difference_low']):+.1f} to {float(best['difference_high']):+.1f}): {best['code']}"
            )
        else:
            sizes = ", ".join(dict.fromkeys(row["img_size"] for row in rows))
            lines[label] = f"no setting that acts at other sizes alone was shown to help at {sizes}"
    return lines


def in_words(setting: Setting, start: Setting) -> str:
    """A setting as a reader says it: "yarn of strength 0.5, temperature log_n, policy clip"; "as it is" for `start`."""
    if setting == start:
        return "as it is"
    options, parts = dict(setting.options), []
    if "scaling" in options:
        strength, turns = options.get("scaling_strength"), options.get("yarn_turns")
        parts.append(
            f"scaling {options['scaling']}"
            + (f" of strength {strength:g}" if strength is not None else "")
            + (f" with yarn_turns {turns[0]:g} to {turns[1]:g}" if turns is not None else "")
        )
    if "logit_scale" in options:
        power = options["logit_scale"]
        parts.append(f"temperature {power}" if isinstance(power, str) else f"temperature log N to the power {power:g}")
    if setting.policy != start.policy:
        parts.append(f"policy {setting.policy}")
    return ", ".join(parts)


def code_of(trained: Trained, setting: Setting, start: Setting, size: Size, converted: bool = False) -> str:
    """Python that applies a setting; "" for `start`. converted: by vitrel.from_timm, from the user's."""
    if setting == start:
        return ""
    options: dict[str, Any] = dict(setting.options)
    first = "model = vitrel.from_timm(model); " if converted else ""
    if setting.policy.partition("+")[0] in WINDOW_POLICIES:
        return f"{first}vitrel.evaluate.policies.in_force(model, {setting.policy!r}, {tuple(size)}, {options})  # a with"
    if setting.policy != start.policy:
        options["resize"] = setting.policy
    if trained.path.is_file():
        own: Any = trained.model.arguments  # of a Backbone
        position_args = (own["position_args"] or {}) | options
        return f"model = vitrel.load({str(trained.path)!r}, position_args={position_args})"
    return f"{first}model.set_position_options({', '.join(f'{name}={value!r}' for name, value in options.items())})"


class _Place(NamedTuple):
    """Where a model is to be rescued. trained: with a vitrel model, `converted` or its own."""

    trained: Trained
    size: Size
    protocol: str
    crop_pct: float
    converted: bool

    @property
    def preprocessing(self) -> Any:
        return self.task.preprocessing

    @property
    def task(self) -> Task:
        return Task(self.trained, self.size, self.protocol, "none", self.crop_pct)

    def at_training_size(self) -> "_Place":
        return self._replace(size=self.trained.img_size)


def _places(trained: Trained, sweep: Sweep, notes: list[str]) -> list[_Place]:
    """The sizes and protocols at which there is something to try for a model; where there is nothing, a note is added."""
    sizes = [size for size in dict.fromkeys(sizes_of(trained, sweep)) if size != trained.img_size]
    protocols = [protocol for protocol in sweep.protocols if protocol != "native"]  # which shows many sizes at a time
    converted = not isinstance(trained.model, Backbone)
    if converted:
        try:
            trained = replace(trained, model=from_timm(trained.model).eval())
        except ValueError as error:
            notes.append(f"{trained.label}: nothing to try, since it is no vitrel model and cannot be made one: {error}")
            return []
    places, idle = [], []
    for size in sizes:
        with at_size_with(trained.model, size, as_it_is(trained.model, size).policy):
            pass  # a ValueError now for a size that it does not take
        if not steps_at(trained.model, size):
            idle.append(format_size(size))
            continue
        for protocol in (one for one in protocols if f"{format_size(size)} {one}" not in sweep.skip):
            places.append(_Place(trained, size, protocol, (sweep.crop_pct or (trained.crop_pct,))[0], converted))
    if idle:
        notes.append(f"{trained.label}: nothing to try at {', '.join(idle)}: no option of its acts at another size")
    return places


def _rescued(places: Sequence[_Place], sweep: Sweep, images: Images, tell: Callable[[float, str], None]) -> Iterator[Row]:
    """The rows of one model."""
    native = places[0].at_training_size()
    start = as_it_is(native.trained.model, native.size)
    everything = torch.ones(len(images.dataset(native.preprocessing)), dtype=torch.bool)
    (probabilities,), labels = _predicted(native, [start], everything, sweep, images)
    reference, right_trained = probabilities.argmax(1), probabilities.argmax(1) == labels
    tuned, judged = halves(len(labels), sweep.data_seed)
    tuned, judged = tuned & (labels >= 0), judged & (labels >= 0)  # without those left out, which no setting sees
    made: list[tuple[Row, Setting]] = []
    for place in places:
        began, own = time.perf_counter(), as_it_is(place.trained.model, place.size)
        steps = steps_at(place.trained.model, place.size)

        def scores(settings: Sequence[Setting], place: _Place = place) -> list[Tensor]:
            found, _ = _predicted(place, settings, tuned, sweep, images)
            tell(len(settings) / MOST, f"{place.trained.label} at {format_size(place.size)} ({place.protocol})")
            return [agreement(one, reference[tuned]) for one in found]

        tried = search(own, steps, scores)
        best = max(tried, key=lambda setting: tried[setting].mean().item())
        setting, z, needed = chosen(tried)
        wanted = [own] if setting == own else [own, setting]
        found, _ = _predicted(place, wanted, judged, sweep, images)
        right = [one.argmax(1) == labels[judged] for one in found]
        counted = len(tried) * int(tuned.sum()) + len(wanted) * int(judged.sum())
        tell(1 - len(tried) / MOST, f"{place.trained.label} at {format_size(place.size)} ({place.protocol})")
        about = line_columns(place.task) | {
            "data": shown(sweep.data),
            "train_size": format_size(place.trained.img_size),
            "setting": in_words(setting, own),
            "policy": setting.policy,
            "options": json.dumps(dict(setting.options)),
            "tried": len(tried),
            "passes": counted,
            "seconds": round(time.perf_counter() - began, 1),
            "tuned_n": int(tuned.sum()),
            "score_as_is": round(tried[own].mean().item(), 4),
            "score": round(tried[best].mean().item(), 4),
            "z": round(z, 2),
            "z_needed": round(needed, 2),
            "code": code_of(place.trained, setting, own, place.size, place.converted),
        }
        made.append((about | _judgement(right[0], right[-1], right_trained[judged]), setting))
    yield from _with_training_size(native, made, judged, labels, sweep, images)


def _judgement(as_is: Tensor, changed: Tensor, trained: Tensor) -> Row:
    """Columns of which of the judged images are right, bool [n] each: as it is, with the setting, and at the training size."""
    n = len(as_is)
    one, other, native = (100 * right.double().mean().item() for right in (as_is, changed, trained))
    gained, spoilt = int((changed & ~as_is).sum()), int((as_is & ~changed).sum())
    low, high = paired_interval(n, gained, spoilt)
    lost = native - one
    columns: Row = {"judged_n": n, "top1_trained": round(native, 4), "top1": round(one, 4), "top1_set": round(other, 4)}
    for name, right in (("top1", as_is), ("top1_set", changed)):
        ends = wilson(int(right.sum()), n)
        columns |= {f"{name}_low": round(ends[0], 4), f"{name}_high": round(ends[1], 4)}
    return columns | {
        "difference": round(other - one, 4),
        "difference_low": round(low, 4),
        "difference_high": round(high, 4),
        "mcnemar_p": mcnemar(gained, spoilt),
        "lost": round(lost, 4),
        "regained": round(100 * (other - one) / lost, 2) if lost > 0 else "",
    }


def _with_training_size(
    native: _Place, made: list[tuple[Row, Setting]], judged: Tensor, labels: Tensor, sweep: Sweep, images: Images
) -> Iterator[Row]:
    """The rows with top-1 at the training size under the setting of each."""
    settings = [*dict.fromkeys(setting for _, setting in made)]
    found, _ = _predicted(native, settings, judged, sweep, images)
    top1 = {
        setting: round(100 * (one.argmax(1) == labels[judged]).double().mean().item(), 4)
        for setting, one in zip(settings, found, strict=True)
    }
    for row, setting in made:
        yield {name: (row | {"top1_trained_set": top1[setting]})[name] for name in COLUMNS}


def _predicted(
    place: _Place, settings: Sequence[Setting], which: Tensor, sweep: Sweep, images: Images
) -> tuple[list[Tensor], Tensor]:
    """Log probabilities of the images `which`, bool [n], in every setting, [which, K] each, and the labels of all, [n].

    Labels are the outputs of the classes; -1 for images that cannot be read.
    """
    trained, size, device = place.trained, place.size, sweep.torch_device
    _, outputs = classes_of(place.task, sweep, images)
    output_of = torch.arange(len(outputs)) if trained.restrict else torch.tensor(outputs)
    found: list[list[Tensor]] = [[] for _ in settings]
    labels, start = [], 0
    try:
        model = trained.model.to(device)
        model = optimize(model) if sweep.optimize else model
        runner = Runner(model, device, sweep.batch_size, sweep.dtype, sweep.compile)
        for pixels, own in images.batches(place.preprocessing):
            here, read = which[start : start + len(own)], own >= 0
            start += len(own)
            labels.append(torch.where(read, output_of[own.clamp(min=0)], -1))
            if here.any():
                pixels = pixels[here]
                for setting, parts in zip(settings, found, strict=True):
                    with in_force(trained.model, setting.policy, size, dict(setting.options)):
                        logits = runner(pixels)
                    logits = logits[:, torch.tensor(outputs)] if trained.restrict else logits
                    if not logits[read[here]].isfinite().all():
                        raise FloatingPointError(f"{place.task.name}: the logits hold NaN or infinity")
                    parts.append(log_softmax(logits, 1))
    finally:
        restore(trained.model).cpu()
    count = trained.model.num_classes if not trained.restrict else len(outputs)
    return [torch.cat(parts) if parts else torch.zeros(0, count) for parts in found], torch.cat(labels)


def _can_scale(part: Any) -> bool:
    return isinstance(part, PositionEncoding) and part.scaling is not None and getattr(part, "reference", None) is None


def _unlike(own: Scaling, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, with defaults for the others where `own` has values of its own; {} where they say what `own` is."""
    wanted = Scaling(own.key, "none", own.trained, (1.0, 32.0)).switched(options)
    if wanted == own:
        return {}
    return {
        name: getattr(wanted, field)
        for name, field in OPTIONS.items()
        if name in options or getattr(own, field) != getattr(wanted, field)
    }


def _strengths(best: Setting) -> list[Setting]:
    options = dict(best.options)
    if options.get("scaling", "none") == "none":
        return []
    strength = options.get("scaling_strength", 1.0)
    return [best.having({"scaling_strength": strength + step}) for step in STEPS if strength + step > 0]
