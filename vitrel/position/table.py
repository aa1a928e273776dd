"""table: one learned bias per offset and head (Swin, arXiv 2103.14030, eq. 4; BEiT), logit[i, j] += B[y_i - y_j, x_i - x_j].

The parameter has Swin's name and layout, [(2h-1)(2w-1), H]; with prefix tokens BEiT's three rows follow. On another grid, an
axis that shrinks reads the exact center of the table, and an axis that grows is resampled by the option `policy`. In a windowed
model the grid is the window; while the window stays the same, the table is read unchanged at any image size.
"""

from collections.abc import Mapping
from typing import Self, Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resample import POLICIES, resample_table
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_choice, check_prefix


class OffsetTable(PositionEncoding):
    """Learned bias per head and offset (dy, dx); an axis longer than in training is resampled by `policy`.

    Args:
        per_head: False for one bias for all heads, a table [R, 1].
        init_std: standard deviation of the initial values.

    Attributes:
        relative_position_bias_table: learned biases [R, H], R = (2h-1)(2w-1) on the training grid, +3 with prefix tokens.
    """

    at_larger_grid = "resampled"
    policies = POLICIES
    lr_scale = 10.0  # rows are logits, which have to move by tenths in some hundred updates

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        per_head: bool = True,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid, self.num_heads, self.init_std = grid, num_heads, init_std
        table = torch.empty(grid.classes(), num_heads if per_head else 1, **factory)
        self.relative_position_bias_table = nn.Parameter(table)
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        check_prefix("table", self.grid, grid)
        table = resample_table(self.relative_position_bias_table, self.grid, grid, self.policy)
        return Terms(tables=(Table("hw", bias=table.mT.expand(self.num_heads, -1)),))

    @torch.no_grad()
    def set_biases(self, biases: Mapping[tuple[int, int], float], offset: str = "query-key") -> Self:
        """Set the bias of the listed offsets in place, the same in all heads, and 0 elsewhere; return the encoding.

        The rows of prefix tokens become 0 too.

        Args:
            biases: {(dy, dx) in patches: bias}.
            offset: "query-key", as everywhere in vitrel, or "key-query", as T5 and MaxViT count.

        Raises:
            ValueError: an offset does not occur on the training grid, or `offset` is another word.
        """
        sign = 1 if check_choice("table", "offset", offset, ("query-key", "key-query")) == "query-key" else -1
        h, w = self.grid.h, self.grid.w  # type: ignore[union-attr]
        for dy, dx in biases:
            if abs(dy) >= h or abs(dx) >= w:
                raise ValueError(f"table has no offset ({dy}, {dx}) on a {h}x{w} grid")
        self.relative_position_bias_table.zero_()
        for (dy, dx), bias in biases.items():
            self.relative_position_bias_table[(sign * dy + h - 1) * (2 * w - 1) + sign * dx + w - 1] = bias
        return self

    def resampled(self, grid: Grid) -> dict[str, int]:
        if grid.h <= self.grid.h and grid.w <= self.grid.w:
            return {}
        heads = self.relative_position_bias_table.shape[1]
        return {f"table {self.policy}": 0 if self.policy == "clip" else self.grid.offset_classes() * heads}
