"""What a run prints and logs: a header, a line an epoch and a minute with the speed, and the best result at the end."""

import math
import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.common.sizes import Budget, Size, format_size, short_size, sizes_in_words
from vitrel.train.running.saving import Best

SPEED = {"images_per_s": "images/s {:.0f}", "data_wait": "data wait {:.0%}", "memory_mb": "memory {:,.0f} MiB"}


class Progress(Callback):
    """Prints a header, a line an epoch, lines within long epochs and the best result, on rank 0; logs speed and memory.

    Speed and memory are logged at the end of an epoch. The line of an epoch is printed when the next one begins, since the
    module has not logged the epoch's means in `on_train_epoch_end` yet. Lowers `trainer.log_every_n_steps` to the number of
    updates in an epoch if it is larger.

    Args:
        best: the checkpoint of the best evaluation, in the run's folder.
        prints: whether anything is printed.
        every: seconds after which a line within an epoch follows the last line; infinite beside a bar.
    """

    def __init__(self, best: Best, prints: bool = True, every: float = 60.0) -> None:
        self.best, self.prints, self.every, self.ended = best, prints, every, False
        self.evaluated = False  # since the last line of an epoch
        self.speed: dict[str, float] = {}  # of the epoch so far

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        # in an epoch shorter than the logging interval, no metrics of single steps would be logged
        trainer.log_every_n_steps = max(1, min(trainer.log_every_n_steps, module.updates_per_epoch()))
        self.prints = self.prints and trainer.is_global_zero

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self.prints:
            data, parameters = trainer.datamodule, sum(p.numel() for p in module.model.parameters())  # type: ignore[misc]
            print(
                f"{module.name}, {parameters / 1e6:.2f} M parameters, {module.num_classes} classes, at "
                f"{sizes_in_words(module.train_sizes)}\n"
                f"{len(data.train_set):,} training and {len(data.val_set):,} evaluation images of {data.data}; "
                f"epochs: {trainer.max_epochs}, written to {trainer.default_root_dir}\n{update_line(trainer, module)}",
                flush=True,
            )

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self.prints and trainer.ckpt_path is not None:
            done = f"{trainer.current_epoch} of {trainer.max_epochs} epochs done"
            print(f"resumed after update {trainer.global_step}, {done}: {trainer.ckpt_path}", flush=True)
        self.begin, self.first_step, self.printed = time.monotonic(), trainer.global_step, time.monotonic()
        self._reset()  # Lightning does not call the next hook in a run that resumes within an epoch

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._print_epoch(trainer, module)
        self._reset()

    def _reset(self) -> None:
        self.images, self.waited = 0, 0.0
        self.start = self.batch_end = time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.waited += time.monotonic() - self.batch_end

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch_end = time.monotonic()
        self.images += len(batch[0]) * trainer.world_size
        elapsed = self.batch_end - self.start
        self.speed = {"images_per_s": self.images / elapsed, "data_wait": self.waited / elapsed}
        if module.device.type == "cuda":
            self.speed["memory_mb"] = torch.cuda.max_memory_allocated(module.device) / 2**20
        self._print_within(trainer, module, f"batch {batch_idx + 1}/{trainer.num_training_batches}", "_step")

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validation = time.monotonic()

    def on_validation_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._print_within(trainer, module, f"evaluation {batch_idx + 1}/{sum(trainer.num_val_batches)}", "")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:  # the speed is that of training
            elapsed = time.monotonic() - self.validation
            self.start, self.batch_end = self.start + elapsed, self.batch_end + elapsed
            self.evaluated = True

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log_dict(self.speed, sync_dist=True)  # averaged over ranks; each images_per_s counts all devices
        self.ended = True

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._print_epoch(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.prints and self.best.best_model_score is not None:
            folder = trainer.default_root_dir
            print(f"best {module.task.title} {float(self.best.best_model_score):.4f}: {self.best.best_model_path}")
            data = trainer.datamodule
            command = evaluate_line(folder, data.data, module.train_sizes, f"{folder}/evaluation")
            if data.reading.val_fraction is not None:  # the same images as here
                command += f" --val-fraction {data.reading.val_fraction}"
            command += " --follow-links" * data.reading.follow_links
            print(f"at other sizes (a run's folder stands for its last.ckpt):\n  {command}", flush=True)

    def _print_epoch(self, trainer: Trainer, module: LightningModule) -> None:
        """Print the line of an epoch that has ended, once."""
        if self.ended:
            self.ended = False
            self._print(trainer, module, f"epoch {trainer.current_epoch}{_end(trainer)}", "_epoch")
            self.evaluated = False

    def _print_within(self, trainer: Trainer, module: LightningModule, where: str, suffix: str) -> None:
        """Print a line within an epoch if `every` seconds have passed since the last; `where` is as "batch 3/9"."""
        if time.monotonic() - self.printed >= self.every:
            self._print(trainer, module, f"epoch {trainer.current_epoch + 1}{_end(trainer)}  {where}", suffix)

    def _print(self, trainer: Trainer, module: LightningModule, where: str, suffix: str) -> None:
        """Print a line, if this rank prints: `where` (epoch and batch), metrics, speed and the time left.

        The metrics are those of training whose names end in `suffix`, "_step" or "_epoch", with "_epoch" also those of an
        evaluation since the last epoch's line; "" for none.
        """
        names = {f"train/{name}{suffix}": name for name in ("loss", module.task.learned)} if suffix else {}
        if suffix == "_epoch" and self.evaluated:
            names |= {f"val/{name}": f"val {name}" for name in ("loss", module.task.metric)}
        known = trainer.callback_metrics
        parts = [f"{short} {float(known[name]):.4f}" for name, short in names.items() if name in known]
        for name, form in SPEED.items():
            if name in self.speed:
                parts.append(form.format(self.speed[name]))
        if (updates := module.updates()) and (done := trainer.global_step - self.first_step):
            seconds = (time.monotonic() - self.begin) / done * (updates - trainer.global_step)
            parts.append(f"eta {timedelta(seconds=round(seconds))}")
        if self.prints:
            print("  ".join([where, *parts]), flush=True)
        self.printed = time.monotonic()


def update_line(trainer: Trainer, module: LightningModule) -> str:
    """Return one line: the images of an update, how devices and batches divide them, and the peak learning rate for them."""
    data, optim = trainer.datamodule, module.optim
    images, devices, accumulated = data.batch_size, trainer.world_size, trainer.accumulate_grad_batches
    update = images * devices * accumulated
    meant = data.global_batch_size
    why = f" instead of {meant:,} (data.global_batch_size)" if meant not in (None, update) else ""
    why = f" (chosen for {len(data.train_set):,}; --batch-size)" if data.chose_batch and meant is None else why
    rate = f"learning rate {optim.scaled_lr(update):.2g}"
    if optim.lr_base_size not in (None, update):
        rate += f" ({optim.lr:.2g} for {optim.lr_base_size:,} images, {optim.lr_base_scale} scaling)"
    return (
        f"updates of {update:,} images{why}: {devices} device{'s' * (devices > 1)}, batches of {images}, {accumulated} "
        f"accumulated; {rate}"
    )


def _end(trainer: Trainer) -> str:
    """Return "/EPOCHS", which follows the number of an epoch; "" if the run has no number of epochs."""
    return f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""


def evaluate_line(model: str | Path, data: str, trained: Sequence[Size | Budget], out: str | Path) -> str:
    """Return the shell command that evaluates `model` at its training sizes, and at smaller and larger ones.

    These have half the sides of the smallest, and 1.5 and 2 times the sides of the largest training size.

    Args:
        model, data, out: the run's folder or a model file, the data set, and the folder for the results.
        trained: sizes (h, w) in pixels; or budgets of tokens of a model trained at native shape, which is evaluated at it too.
    """

    def scaled(size: Size | Budget, factor: float) -> Size | Budget:
        if isinstance(size, Budget):
            return Budget(max(1, round(size.tokens * factor**2)))
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))

    by_area = sorted(trained, key=lambda size: size.tokens if isinstance(size, Budget) else math.prod(size))
    sizes = dict.fromkeys([scaled(by_area[0], 0.5), *by_area, scaled(by_area[-1], 1.5), scaled(by_area[-1], 2)])
    texts = [format_size(size) if isinstance(size, Budget) else short_size(size) for size in sizes]
    protocol = ["--protocol", "native"] if any(isinstance(size, Budget) for size in trained) else []
    return shlex.join(["vitrel", "evaluate", str(model), "--data", data, "--size", *texts, *protocol, "--out", str(out)])
