"""`leak`: the figure of a diagnosis, with the tokens that see across a border and all that one of them sees."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from vitrel.common.sizes import Size, format_size
from vitrel.inspect.diagnose import Diagnosis, StageDiagnosis
from vitrel.inspect.leaks import Leaks

# Okabe and Ito's colors, which remain distinct in common color blindness
_COLORS = ("#e8e8e8", "#d55e00", "#56b4e9", "#000000")
_MEANING = (
    "attends within its window",
    "attends across the image border",
    "attends to padding",
    "attends across the border and to padding",
)
_SEEN = ("#ffffff", "#009e73", "#d55e00", "#000000")
_SEEN_MEANING = ("not attended", "attended", "attended across the image border", "the query token")


def leak(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Draw leaks, a row per model, at the size and stage where the first of the `diagnoses` with windows leaks most.

    Left: whether each token of that stage, at that size, sees across a border or attends to padding. Right: all that one
    token sees in one block. Models without examined windows there are left out; ValueError if none remains.
    """
    shown = list(_shown(diagnoses))
    if not shown:
        raise ValueError(f"nothing to draw: no windows were seen in {', '.join(d.model for d in diagnoses)}")
    figure = Figure(figsize=(8.4, 4.5 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 2, squeeze=False)
    for (left, right), (model, size, number, stage, leaks) in zip(axes, shown, strict=True):
        windows = stage.windows
        where = f"{format_size(windows.grid)} tokens, window {format_size(windows.window or windows.grid)}"
        kinds = leaks.across.int() + 2 * leaks.padding
        _draw(left, kinds, _COLORS, f"{model}\nstage {number} at {format_size(size)} px: {where}")
        seen = leaks.sees.clone()
        seen[leaks.token] = 3
        _draw(
            right, seen, _SEEN, f"tokens attended by the one at row {leaks.token[0]}, column {leaks.token[1]}\nin {stage.layer}"
        )
    for panel, colors, meaning in zip(axes[-1], (_COLORS, _SEEN), (_MEANING, _SEEN_MEANING), strict=True):
        handles = [Patch(facecolor=color, edgecolor="#999999") for color in colors]
        panel.legend(handles, meaning, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False, fontsize=9)
    return figure


def _shown(diagnoses: Sequence[Diagnosis]) -> Iterator[tuple[str, Size, int, StageDiagnosis, Leaks]]:
    """Yield (model, size, number of the stage from 1, stage, its leaks) for each row of the figure."""
    chosen = None
    for diagnosis in diagnoses:
        candidates = [
            (diagnosis.model, line.size, number, stage, stage.leaks)
            for line in diagnosis.sizes
            for number, stage in enumerate(line.stages, 1)
            if stage.leaks is not None and chosen in (None, (line.size, number))
        ]
        if candidates:
            worst = max(candidates, key=lambda candidate: candidate[3].leaking)
            chosen = chosen or worst[1:3]
            yield worst


def _draw(axes: Axes, values: Tensor, colors: Sequence[str], title: str) -> None:
    """Draw the values [h, w], each the index of a color, as cells of the grid."""
    axes.imshow(values.numpy(), cmap=ListedColormap(colors), vmin=-0.5, vmax=len(colors) - 0.5)
    axes.set_xticks([x - 0.5 for x in range(1, values.shape[1])], labels=[])
    axes.set_yticks([y - 0.5 for y in range(1, values.shape[0])], labels=[])
    axes.grid(color="white", linewidth=0.5)
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=9)
