"""Images/s of training Swin-T at 224 px, batch 256: on data that lie on the device, with timm's loader, by `vitrel train`.

All rows are the same compiled step: forward in bfloat16 autocast, cross entropy, backward, fused AdamW. Photographs come from
the folder that `pack` made, each as often as needed for the updates. `vitrel train` needs the extra "train", of which OpenCV
alone has 60 MB of wheels; where it is missing, that row is left out.
"""

import csv
import itertools
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from timm.data import create_dataset, create_loader
from torch import Tensor

from tools.benchmark.models import ModelCall, model_call
from tools.benchmark.samples import ROOT, Samples
from tools.benchmark.tables import markdown
from tools.gpu import SCRATCH
from tools.gpu.parts import CODE, Job, Setting, known, measuring, run_again, sync
from vitrel.common.extras import EXTRAS, absent

TRAINED = (*CODE, "vitrel/train/**/*.py", "vitrel/data/**/*.py", "tools/gpu/train.py")
DEVICE, TIMM, OURS = "data on the device", "timm's loader", "vitrel train"
_WARM = 8
_SPARED = 2  # cores that load no images


def run_part(setting: Setting) -> None:
    """Measure what has no row, in one process."""
    env = {"TORCHDYNAMO_DISABLE": "1"} if setting.small else {}
    run_again(setting, Job("train", env=env), setting.samples(TRAINED))


def work(setting: Setting, name: str) -> None:
    """Measure what has no row."""
    samples = setting.samples(TRAINED)
    model, side, batch, updates = _sizes(setting)
    workers = 1 if setting.small else max(1, (os.cpu_count() or 1) - _SPARED)
    if any(not known(samples, "train", **_key(setting, name)) for name in (DEVICE, TIMM)):
        call = model_call("ours", model, "compiled", side, "amp", setting.device.type, side=side, batch=batch, mode="training")
        for _ in range(1 if setting.small else _WARM):
            call()
        with measuring(samples, **_key(setting, DEVICE)):
            given = ((call.images, call.targets) for _ in range(updates))
            samples.add("train", **_key(setting, DEVICE), **rate(call, given, setting.device), workers=0)
        folder = photographs(setting, batch * (updates + 1))
        with measuring(samples, **_key(setting, TIMM)):
            batches = itertools.islice(timm_loader(folder, side, batch, workers, setting.device), updates + 1)
            samples.add("train", **_key(setting, TIMM), **rate(call, batches, setting.device), workers=workers)
        del call
    missing = absent(*EXTRAS["train"])
    if missing:
        print(f"{OURS} is not measured: {', '.join(missing)} are not installed")
    elif not known(samples, "train", **_key(setting, OURS)):
        with measuring(samples, **_key(setting, OURS)):
            ours(setting, samples, photographs(setting, batch * (updates + 1)), side, batch)


def _sizes(setting: Setting) -> tuple[str, int, int, int]:
    """Return model, side of the images, batch and updates."""
    return ("Swin nano", 56, 4, 4) if setting.small else ("Swin-T", 224, 256, 120)


def _key(setting: Setting, contender: str) -> dict[str, str]:
    model, side, batch, _ = _sizes(setting)
    return {"case": f"{model}, {side} px, batch {batch}", "mode": "training", "contender": contender}


def rate(call: ModelCall, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> dict[str, float]:
    """Return images/s over all batches but the first, the share of the time that the step waits for them, and their number.

    One step is in flight at most: so a wait for data is no wait for the device.
    """
    waited, images, updates = 0.0, 0, 0
    iterator: Iterator[tuple[Tensor, Tensor]] = iter(batches)
    call.images, call.targets = next(iterator)
    call()
    sync(device)
    ended: list[torch.cuda.Event] = []
    start = time.perf_counter()
    while True:
        if len(ended) > 1:
            ended[-2].synchronize()
        asked = time.perf_counter()
        batch = next(iterator, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        call.images, call.targets = batch
        call()
        images, updates = images + len(batch[0]), updates + 1
        if device.type == "cuda":
            ended = [*ended[-1:], torch.cuda.Event()]
            ended[-1].record()
    sync(device)
    seconds = time.perf_counter() - start
    return {"images_per_s": round(images / seconds, 1), "data_wait": round(waited / seconds, 4), "updates": updates}


def photographs(setting: Setting, images: int) -> Path:
    """Return a folder of train/<class>/ and val/<class>/ with so many images in train, those of the archive in turns."""
    if setting.data is None or not (archive := setting.data / "photographs.zip").exists():
        raise SystemExit("train needs --data, a folder made by `python -m tools.gpu pack FOLDER --images DATA`")
    folder = SCRATCH / f"photographs-{images}-{archive.stat().st_size}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        with zipfile.ZipFile(archive) as file:
            names = [name for name in file.namelist() if name.startswith("train/")]
            val = [name for name in file.namelist() if name.startswith("val/")]
            file.extractall(part, [*names[:images], *val])
        for number in range(len(names), images):
            path = part / names[number % len(names)]
            path.with_stem(f"{path.stem}_{number}").hardlink_to(path)
        part.rename(folder)
    return folder


def timm_loader(folder: Path, side: int, batch: int, workers: int, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Return timm's loader of uint8 batches, which are normalized on the device: crop, flip, RandAugment, erasing."""
    return create_loader(
        create_dataset("", root=str(folder / "train")), (3, side, side), batch, is_training=True, num_workers=workers,
        auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, interpolation="bicubic", device=device,
        pin_memory=device.type == "cuda", use_prefetcher=True, persistent_workers=False,
    )  # fmt: skip


def ours(setting: Setting, samples: Samples, folder: Path, side: int, batch: int) -> None:
    """Train by the command with the defaults of this machine, and add a row with what its log says of the last epoch."""
    model = "vitrel_swin_n" if setting.small else "vitrel_swin_t"
    command = [sys.executable, "-m", "vitrel", "train", "--model", model, "--data", str(folder), "--size", str(side)]
    begun = time.time()
    with tempfile.TemporaryDirectory(prefix="vitrel-train-") as out:
        given = ["--epochs", "2", "--data.batch_size", str(batch), "--out", out]
        subprocess.run([*command, *given], cwd=ROOT, check=True, timeout=max(1.0, setting.until - begun))
        with (Path(out) / "metrics.csv").open(newline="") as file:
            said = [row for row in csv.DictReader(file) if row["images_per_s"]][-1]
    found = {"updates": int(said["step"]) + 1, **{name: float(said[name]) for name in ("images_per_s", "data_wait")}}
    samples.add("train", **_key(setting, OURS), **found, seconds=round(time.time() - begun, 1))


def table(setting: Setting) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether something is wrong."""
    rows = setting.samples(TRAINED).current()
    lines = [f"- {row['contender']}: {row['text'][:300]}" for row in rows if row["kind"] == "failed"]
    return [*train_table(rows), "", *lines], bool(lines)


def train_table(rows: list[dict]) -> list[str]:
    """Return the table of training: images/s, over those of data on the device, and the share of waiting."""
    found = {row["contender"]: row for row in rows if row["kind"] == "train"}
    best = found.get(DEVICE, {}).get("images_per_s")
    body = []
    for name, row in found.items():
        over = f"{row['images_per_s'] / best:.2f}" if best else ""
        body.append((name, f"{row['images_per_s']:,.0f}", over, f"{row['data_wait']:.0%}", str(row["updates"])))
    head = (next((row["case"] for row in found.values()), ""), "images/s", "over the first", "data wait", "updates")
    return markdown(head, "|---|---:|---:|---:|---:|", body)
