"""`metrics.csv`, the log that every run has."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vitrel.common.files import atomic_write


class CSVLog(Logger):
    """`metrics.csv` in the run's folder: one row per logging step, a column per metric.

    Lightning's CSVLogger deletes the file when a run is resumed; this logger keeps the rows that `resume` reads.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.rows: list[dict[str, Any]] = []

    def resume(self, updates: int) -> None:
        """Read the rows of the first `updates` updates from an existing `metrics.csv`, and drop the others at the next save."""
        if self.path.is_file():
            with self.path.open(newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if int(row["step"]) < updates]

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `config.yaml` holds the hyper-parameters."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if self.rows and int(self.rows[-1]["step"]) == step:
            self.rows[-1] |= metrics
        else:
            self.rows.append({"step": step, **metrics})

    @rank_zero_only
    def save(self) -> None:
        """Write all rows to the file, if there are any; its folder must exist.

        Called before every checkpoint and at the end of the run.
        """
        if not self.rows:  # a run that is refused leaves the file of the former one
            return
        columns = list(dict.fromkeys(["epoch", "step", *sorted({key for row in self.rows for key in row})]))
        with atomic_write(self.path) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.path.parent.is_dir():  # a removed folder is the reason why the run ends
            self.save()
