"""Steps of a run read nothing back from the device, and what only a GPU does is done."""

from lightning.pytorch import Callback

from helpers.gpu import Unread
from helpers.small_runs import fit, small
from vitrel.train import Optimization
from vitrel.train.objective import Mixing


class EveryBatch(Callback):
    """Refuses reads within every batch."""

    def __init__(self):
        self.mode, self.batches = Unread(), 0

    def begin(self, *_):
        self.mode.__enter__()
        self.batches += 1

    def end(self, *_):
        self.mode.__exit__(None, None, None)

    on_train_batch_start, on_validation_batch_start = begin, begin
    on_train_batch_end, on_validation_batch_end = end, end


def test_a_step_reads_nothing_back():
    """Forward, loss, backward, clipping and update in bf16-mixed, and an evaluation batch."""
    unread, optim = EveryBatch(), Optimization(lr=1e-3, warmup_epochs=0.5)
    module = small("vitrel_vit_n8_table", num_classes=6, mixing=Mixing(mixup=0.2, cutmix=1.0), optim=optim)
    fit(module, callbacks=[unread], max_epochs=1, gradient_clip_val=1.0, precision="bf16-mixed")
    assert unread.batches == 6 + 2
