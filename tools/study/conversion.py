"""Accuracy of a ViT whose absolute embedding is converted to relative position: without training, distilled, fine-tuned.

    python -m tools.study.conversion configs/absolute_to_relative.yaml

Writes results.csv, table.md and accuracy.png into runs/<name>/. Differences are to the interpolated absolute model.
"""

import argparse
import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import timm
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import vitrel
from vitrel.convert import relativize
from vitrel.convert.absolute_to_relative import absolute_to_relative
from vitrel.data import Folder, Prepare
from vitrel.evaluate.metrics import Z95, t_interval, wilson
from vitrel.evaluate.policies import policies_at, resize_policy
from vitrel.evaluate.report import markdown
from vitrel.evaluate.report.plots import COLOURS, MARKERS
from vitrel.exits import reported, terminable
from vitrel.plain_yaml import read_yaml

HALF = (0.5, 0.5, 0.5)  # mean and standard deviation that the weights were trained with
BOTH = ["imagenet", "flowers"]
Config = dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit with a message and status 1 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the results; default runs")
    parser.add_argument("--parts", nargs="+", default=BOTH, choices=BOTH, help="which parts; default both")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with reported("finished rows are in the CSV file of their part; the same command starts again"), terminable():
        config = read_yaml(args.config)
        data = [config.get(part, {}).get("data", part) for part in args.parts]
        places = [config["weights"], *config["fit"]["sources"].values(), *data]
        if missing := [place for place in places if not Path(place).exists()]:
            raise FileNotFoundError(f"{args.config} names {missing[0]}, which does not exist: change its path there")
        (folder := args.runs / config["name"]).mkdir(parents=True, exist_ok=True)
        for part in args.parts:
            rows = []
            for row in {"imagenet": on_imagenet, "flowers": on_flowers}[part](config):
                rows.append({"part": part, **row})
                pd.DataFrame(rows).to_csv(folder / f"{part}.csv", index=False)
                print({k: row[k] for k in ("label", "seed", "img_size", "policy", "top1", "closed", "difference")}, flush=True)
        table = pd.concat([pd.read_csv(path) for part in BOTH if (path := folder / f"{part}.csv").exists()])
        table.to_csv(folder / "results.csv", index=False)
        (folder / "table.md").write_text(tables(table), "utf-8")
        plot(table, folder / "accuracy.png")


def on_imagenet(config: Config) -> Iterator[Config]:
    """Yield rows without training and after distillation: top-1 among 1000 classes, `closed` among those of the images."""
    part, original = config["imagenet"], load(config)
    index = Path(part["data"], "imagenet_index.tsv").read_text("utf-8").splitlines()[1:]
    classes = {line.split("\t")[0]: int(line.split("\t")[1]) for line in index if line.startswith("n0")}
    images = Validation(part, classes)
    pool = torch.cat([*unlabelled(config, part["distil"]["n"]).values()])
    reference: dict = {}
    for entry in part["models"]:
        start = time.perf_counter()
        model = convert(original, entry, config)
        seconds = time.perf_counter() - start
        yield from measure(model, entry, images, reference, {"seed": 0, "seconds": round(seconds, 1)})
        if entry.get("distil"):
            start = time.perf_counter()
            distil(original, model, pool, **part["distil"])
            done = {"seed": 0, "seconds": round(time.perf_counter() - start, 1)}
            yield from measure(model, entry | {"label": f"{entry['label']}, distilled"}, images, reference, done)


def on_flowers(config: Config) -> Iterator[Config]:
    """Yield rows after fine-tuning, for every seed of every model."""
    part, original, reference = config["flowers"], load(config), {}
    stored = (part["train"]["stored"],) * 2
    data = Folder(part["data"], "train", Prepare(stored, HALF, HALF))
    pixels, labels = stack(data)
    images = Validation(part, {name: i for i, name in enumerate(data.classes)})
    for entry in part["models"]:
        for seed in entry.get("seeds", [0]):
            torch.manual_seed(seed)
            start = time.perf_counter()
            steps = part["train"]["epochs"] * (len(labels) // part["train"]["batch"])
            model = convert(original, entry | {"fade_steps": steps // 2}, config)
            model.reset_classifier(len(data.classes))
            finetune(model, pixels, labels, **part["train"])
            done = {"seed": seed, "seconds": round(time.perf_counter() - start, 1)}
            yield from measure(model, entry, images, reference, done)


def load(config: Config) -> nn.Module:
    """Return the absolute model with its trained weights."""
    return vitrel.load_pretrained(timm.create_model(config["model"]), config["weights"]).eval()


def convert(original: nn.Module, entry: Config, config: Config) -> nn.Module:
    """Return a converted copy of the model: fitted if `entry` names images (fit), else with tables of zeros or no position."""
    position, absolute = entry.get("position"), entry.get("absolute", "drop" if "fit" in entry else "keep")
    if "fit" in entry:
        images = unlabelled(config, config["fit"]["n"], entry["fit"])
        fade = {"fade_steps": entry["fade_steps"]} if absolute == "fade" else {}
        model = absolute_to_relative(
            original, torch.cat([*images.values()]), position, absolute=absolute, refit=entry.get("refit", True), **fade
        )
        print(model.conversion, flush=True)
        return model
    model = copy.deepcopy(original)
    if position:
        return relativize(model, position, absolute=absolute)
    model.pos_embed = model.pos_embed if absolute == "keep" else None
    return model


def unlabelled(config: Config, n: int, sources: list[str] | None = None) -> dict[str, Tensor]:
    """Return {source: training images}, n in all in equal shares, drawn by a fixed seed and without validation images."""
    fit = config["fit"]
    sources, size = sources or [*fit["sources"]], (fit["size"],) * 2
    images = {}
    for source in sources:
        data = Folder(fit["sources"][source], "train", Prepare(size, HALF, HALF))
        allowed = [i for i in range(len(data)) if fit["exclude"] not in data.name(i)]
        chosen = torch.randperm(len(allowed), generator=torch.Generator().manual_seed(0))[: n // len(sources)]
        images[source] = torch.stack([data[allowed[i]][0] for i in chosen.tolist()])
    return images


class Validation:
    """Validation images at any size, decoded once per size; above a size set by `large` only every n-th, to save time."""

    def __init__(self, part: Config, classes: dict[str, int]) -> None:
        self.part, self.classes, self._stored = part, classes, {}

    def __call__(self, size: int) -> tuple[Tensor, Tensor]:
        """Return images [n, 3, size, size] in half precision, and labels [n]."""
        if size not in self._stored:
            data = Folder(self.part["data"], "val", Prepare((size, size), HALF, HALF))
            every = self.part["large"]["every"] if size > self.part["large"]["above"] else 1
            pixels, labels = stack(data, every)
            names = torch.tensor([self.classes[name] for name in data.classes])
            self._stored[size] = pixels, names[labels]
        return self._stored[size]


def stack(data: Folder, every: int = 1) -> tuple[Tensor, Tensor]:
    """Return every `every`-th image of a folder, [n, 3, h, w] in half precision, and their labels."""
    indices = range(0, len(data), every)
    return torch.stack([data[i][0].half() for i in indices]), torch.tensor([data.label(i) for i in indices])


def measure(model: nn.Module, entry: Config, images: Validation, reference: dict, about: Config) -> Iterator[Config]:
    """Yield a row per size and resize policy. reference: filled with the first model's predictions, for paired differences."""
    model.eval()
    for size in entry.get("sizes", images.part["sizes"]):
        pixels, labels = images(size)
        for policy in policies_at(model, (size, size), entry.get("policies")):
            with resize_policy(model, policy), torch.inference_mode():
                logits = torch.cat([model(batch.float()) for batch in pixels.split(50)])
                resized = " + ".join(model.resized((size, size))) or "nothing"
            right, guess = logits.argmax(1) == labels, logits.argmax(1)
            kinds = labels.unique()
            paired = reference.setdefault((size, about["seed"]), (right, guess))
            gap = 100 * (right.float() - paired[0].float())
            half = Z95 * gap.std().item() / math.sqrt(len(gap))
            low, high = wilson(int(right.sum()), len(right))
            yield {
                "label": entry["label"], "img_size": size, "policy": policy, "resized": resized, "n": len(right), **about,
                "top1": 100 * right.float().mean().item(), "top1_low": low, "top1_high": high,
                "closed": 100 * (kinds[logits[:, kinds].argmax(1)] == labels).float().mean().item(),
                "agrees": 100 * (guess == paired[1]).float().mean().item(),
                "difference": gap.mean().item(), "difference_low": gap.mean().item() - half,
                "difference_high": gap.mean().item() + half,
            }  # fmt: skip


def distil(teacher: nn.Module, student: nn.Module, pixels: Tensor, batch: int, lr: float, temperature: float, **_: Any) -> None:
    """Train the student to the teacher's distribution over classes, one pass over images without labels."""
    torch.manual_seed(0)
    for chosen in steps(student, len(pixels), batch, 1, lr, 0.0):
        with torch.no_grad():
            target = (teacher(pixels[chosen]) / temperature).softmax(-1)
        F.cross_entropy(student(pixels[chosen]) / temperature, target).backward()


def finetune(
    model: nn.Module,
    pixels: Tensor,
    labels: Tensor,
    size: int,
    epochs: int,
    batch: int,
    lr: float,
    weight_decay: float,
    **_: Any,
) -> None:
    """Train on random crops of `size` px and mirror images."""
    for chosen in steps(model, len(labels), batch, epochs, lr, weight_decay):
        top, left = torch.randint(pixels.shape[-1] - size + 1, (2,)).tolist()
        crop = pixels[chosen, :, top : top + size, left : left + size].float()
        mirrored = torch.rand(len(crop), 1, 1, 1) < 0.5
        F.cross_entropy(model(torch.where(mirrored, crop.flip(3), crop)), labels[chosen], label_smoothing=0.1).backward()


def steps(model: nn.Module, n: int, batch: int, epochs: int, lr: float, weight_decay: float) -> Iterator[Tensor]:
    """Yield the indices of each batch; after each, do an AdamW step (10 % warm-up, cosine, gradients clipped at 1)."""
    model.train()
    free = model.no_weight_decay()
    groups = [[p for name, p in model.named_parameters() if (name in free or p.dim() < 2) == plain] for plain in (True, False)]
    decays = ({"params": groups[0], "weight_decay": 0.0}, {"params": groups[1], "weight_decay": weight_decay})
    adam, total = torch.optim.AdamW(decays, lr=lr), epochs * (n // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, lr, total_steps=total, pct_start=0.1, cycle_momentum=False)
    for _ in range(epochs):
        for chosen in torch.randperm(n)[: n // batch * batch].view(-1, batch):
            yield chosen
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            schedule.step()
            adam.zero_grad()


def tables(table: pd.DataFrame) -> str:
    """Return Markdown tables per part: top-1 against size with intervals, paired difference to the absolute model."""
    parts = [
        "± is half the 95 % interval: over images, with two or more seeds Student's if that is wider. A model fitted or "
        "trained on images of few classes favours these: compare models among the classes shown.\n"
    ]
    for part, rows in table.groupby("part", sort=False):
        sizes, lines = sorted(rows["img_size"].unique()), {"top1": [], "closed": [], "difference": []}
        for label, policy, curve in curves(rows):
            for column, cells in lines.items():
                cells.append([label, policy, *(cell(curve[curve["img_size"] == size], column) for size in sizes)])
        titles = {"top1": "top-1 %", "closed": "top-1 % among the classes shown", "difference": "paired difference of top-1"}
        for column, cells in lines.items():
            if column != "closed" or part == "imagenet":
                parts.append(f"## {part}: {titles[column]}\n\n{markdown(['model', 'policy', *map(str, sizes)], cells)}")
    return "\n".join(parts)


def curves(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield (label, policy, rows), a curve per resize policy; sizes where policies agree are in all curves of a model."""
    for label, model_rows in rows.groupby("label", sort=False):
        for policy in [p for p in model_rows["policy"].unique() if p != "none"] or ["none"]:
            yield label, policy, model_rows[model_rows["policy"].isin(["none", policy])]


def cell(rows: pd.DataFrame, column: str) -> str:
    """Format the mean over seeds ± half its interval: Student's for two or more seeds, but at least that over images."""
    if rows.empty:
        return "-"
    mean = rows[column].mean()
    if column == "closed":
        return f"{mean:.1f}"
    half = ((rows[f"{column}_high"] - rows[f"{column}_low"]) / 2).mean()
    if len(rows) > 1:
        low, high = t_interval(rows[column].tolist())
        half = max(half, (high - low) / 2)
    return f"{mean:.1f} ±{half:.1f}"


def plot(table: pd.DataFrame, path: Path) -> None:
    """Plot accuracy against size with intervals over images, a panel per part, each model with its first resize policy."""
    names = list(table["part"].unique())
    figure = Figure(figsize=(6.2 * len(names), 5.2), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        part_rows = table[table["part"] == part]
        drawn = {label: (policy, rows) for label, policy, rows in reversed([*curves(part_rows)])}
        for i, (label, (policy, rows)) in enumerate(reversed(drawn.items())):
            mean = rows.groupby("img_size")[["top1", "top1_low", "top1_high"]].mean()
            spread = [mean["top1"] - mean["top1_low"], mean["top1_high"] - mean["top1"]]
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "capsize": 2}
            if i >= len(COLOURS):
                style |= {"linestyle": "--", "markerfacecolor": "white"}
            name = label if policy in ("none", "bicubic") else f"{label} ({policy})"
            x = mean.index * 2 ** (0.012 * (i - (len(drawn) - 1) / 2))  # so that intervals at one size do not overlap
            axes.errorbar(x, mean["top1"], yerr=spread, label=name, elinewidth=0.8, **style)
        sizes = sorted(part_rows["img_size"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
        axes.set(title=part, xlabel="image side (px)", ylabel="top-1 accuracy (%)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
