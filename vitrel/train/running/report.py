"""What a run prints at its start and end, and a warning of an encoding that does nothing."""

import warnings

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.common.commands import evaluate_line
from vitrel.common.sizes import sizes_in_words
from vitrel.inspect.attention import NEGLIGIBLE, position_shares
from vitrel.train.metrics import CSVLog, best_of
from vitrel.train.running.execution import ShardedStrategy

SHARE_IMAGES = 2  # training images by which the share of position in attention is measured
TITLES = {"top1": "top-1", "miou": "mIoU"}


class Report(Callback):
    """Prints a header at the start of a run, and the best result and the next command at its end, on rank 0.

    Args:
        log: the log of metrics, which lies in the run's folder.
    """

    def __init__(self, log: CSVLog) -> None:
        self.csv, self.folder = log, log.path.parent

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        data, parameters = trainer.datamodule, sum(p.numel() for p in module.model.parameters())  # type: ignore[misc]
        print(
            f"{module.name}, {parameters / 1e6:.2f} M parameters, {module.num_classes} classes, at "
            f"{sizes_in_words(module.train_sizes)}\n"
            f"{len(data.train_set):,} training and {len(data.val_set):,} evaluation images of {data.data}; "
            f"{trainer.max_epochs} epochs, written to {self.folder}\n{_update(trainer, module)}",
            flush=True,
        )

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero and trainer.ckpt_path is not None:
            done = f"{trainer.current_epoch} of {trainer.max_epochs} epochs done"
            print(f"resumed after update {trainer.global_step}, {done}: {trainer.ckpt_path}", flush=True)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        metric = module.task.metric
        if trainer.is_global_zero and (best := best_of(self.csv.rows, metric)):
            value, epoch = best[f"val/{metric}"], int(best["epoch"]) + 1
            print(f"best {TITLES[metric]} {value:.4f} after epoch {epoch}: {self.folder}/checkpoints/best.ckpt")
            command = evaluate_line(self.folder, trainer.datamodule.data, module.train_sizes, self.folder / "evaluation")
            print(f"at other sizes (a run's folder stands for its last.ckpt):\n  {command}", flush=True)


class IdlePosition(Callback):
    """Warns at the end of training if an added encoding does not change attention.

    Sharded models are not measured: a forward pass would need all processes.
    """

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        tuning = module.tuning
        if tuning.position is None or not trainer.is_global_zero or isinstance(trainer.strategy, ShardedStrategy):
            return
        try:
            with torch.random.fork_rng(), module.eager():
                images = trainer.datamodule.unaugmented(SHARE_IMAGES).to(module.device)
                shares = position_shares(module.model, images)
        except (ValueError, OSError, RuntimeError) as error:  # the run itself has succeeded
            warnings.warn(f"how far {tuning.position} changes attention could not be measured: {error}", stacklevel=2)
            return
        in_attention = max((share for name, share in shares.items() if name != "tokens"), default=1.0)
        if in_attention < NEGLIGIBLE:
            fit = "fit it before training (leave out --fit 0), or " if tuning.fit == 0 else ""
            warnings.warn(
                f"the encoding {tuning.position} does nothing: it changes attention logits by {100 * in_attention:.2g} % of "
                f"their spread at most; {fit}train it longer or faster (--model.optim.position_lr_scale)",
                stacklevel=2,
            )


def _update(trainer: Trainer, module: LightningModule) -> str:
    """One line: the images of an update, how they are divided, and the learning rate that follows from them."""
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
