"""`leak`: the figure of a diagnosis, with the tokens that see across a border and all that one of them sees."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy import ndarray

from vitrel.inspect.diagnose import Diagnosis, SizeDiagnosis, StageDiagnosis, WayDiagnosis

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
    """Draw leaks found by `vitrel.diagnose`, one row per model, at the size and stage where the first model's leak is largest.

    Left: whether each token of that stage sees across a border or attends to padding. Right: all that one token sees in one
    block. Models without examined windows at that size and stage are left out; raises ValueError if none remains.
    """
    shown = list(_shown(diagnoses))
    if not shown:
        raise ValueError(f"nothing to draw: no windows were seen in {', '.join(d.model for d in diagnoses)}")
    figure = Figure(figsize=(8.4, 4.5 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 2, squeeze=False)
    for (left, right), (diagnosis, way, line, number, stage) in zip(axes, shown, strict=True):
        (h, w), size = stage.windows.grid, "x".join(map(str, line.size))
        where = f"stage {number} at {size} px: {h}x{w} tokens, window {'x'.join(map(str, stage.windows.window))}"
        _draw(left, stage.map, _COLORS, f"{diagnosis.model}, {way.way}\n{where}")
        seen = stage.sees.copy()
        seen[stage.token] = 3
        _draw(
            right, seen, _SEEN, f"tokens attended by the one at row {stage.token[0]}, column {stage.token[1]}\nin {stage.block}"
        )
    for panel, colors, meaning in zip(axes[-1], (_COLORS, _SEEN), (_MEANING, _SEEN_MEANING), strict=True):
        handles = [Patch(facecolor=color, edgecolor="#999999") for color in colors]
        panel.legend(handles, meaning, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False, fontsize=9)
    return figure


def _shown(
    diagnoses: Sequence[Diagnosis],
) -> Iterator[tuple[Diagnosis, WayDiagnosis, SizeDiagnosis, int, StageDiagnosis]]:
    chosen = None
    for diagnosis in diagnoses:
        candidates = [
            (diagnosis, way, line, number, stage)
            for way in diagnosis.ways
            for line in way.sizes
            for number, stage in enumerate(line.stages, 1)
            if stage.examined and chosen in (None, (line.size, number))
        ]
        if candidates:
            worst = max(candidates, key=lambda candidate: candidate[-1].leaking)
            chosen = chosen or (worst[2].size, worst[3])
            yield worst


def _draw(axes: Axes, values: ndarray, colors: Sequence[str], title: str) -> None:
    axes.imshow(values, cmap=ListedColormap(colors), vmin=-0.5, vmax=len(colors) - 0.5)
    axes.set_xticks([x - 0.5 for x in range(1, values.shape[1])], labels=[])
    axes.set_yticks([y - 0.5 for y in range(1, values.shape[0])], labels=[])
    axes.grid(color="white", linewidth=0.5)
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=9)
