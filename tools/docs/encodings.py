"""Generate a page of the site per encoding: formula, picture, cost, effect of a larger grid, source, oracle.

The content comes from the code (docstrings, POSITIONS, tests/oracles), the costs in docs/encodings/index.md and the accuracies
in docs/studies/scenes.md.
"""

import importlib
import inspect
import io
import re

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from oracles import ORACLES
from vitrel.grid import Grid
from vitrel.ops.reference import masked_logits
from vitrel.position import POSITIONS, PositionEncoding, create_position

TRAINED, LARGER = Grid(11, 11), Grid(25, 33)  # patches; the larger grid has further offsets
HEADS, SHOWN, WIDTH = 6, (0, 2, 5), 32
AT_LARGER_GRID = {
    "nothing": "There is nothing to resample.",
    "nothing changes": "Nothing changes: every row or function value that a larger grid reads was trained. Offsets beyond the "
    "trained ones share the last row or continue the same function.",
    "evaluated": "Evaluated: nothing is resampled, but the function is evaluated at offsets or angles that training never "
    "reached.",
    "resampled": "Resampled: the values were learned for the training grid, and a larger grid interpolates or clips them by a "
    "policy.",
}
SETTINGS = ("added values", "what attention is given", "forward 224", "training 224", "forward 448")


def page(key: str, costs: str, evidence: str, arxiv: str) -> str:
    """Return the Markdown page of an encoding. costs, evidence: texts of the pages with these tables; arxiv: URL prefix."""
    cls = POSITIONS[key]
    first, _, rest = inspect.getdoc(importlib.import_module(cls.__module__)).partition("\n\n")
    what, formula = _split(first)
    papers = list(dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", first + rest)))
    lines = [f"# {key}", "", f"{what}", ""]
    if formula:
        lines += ["``` { .text .formula }", formula, "```", ""]
    lines += [rest, "", "## Picture", "", f"![{_caption(key)}]({key}.png)", "", f"*{_caption(key)}*", ""]
    lines += ["## At a larger grid", "", _at_larger_grid(cls), ""]
    lines += ["## Cost", "", *_cost(key, costs), ""]
    measured = _evidence(key, evidence)
    if measured:
        lines += ["## Measured at four times the tokens", "", *measured, ""]
    lines += ["## Source and oracle", ""]
    lines += [f"- paper: [arXiv {number}]({arxiv}{number})" for number in papers]
    oracle = ORACLES[key]
    module = oracle.__module__.replace(".", "/")
    lines += [
        f"- code: `{cls.__module__}.{cls.__name__}`",
        f"- oracle: `{oracle.__name__}` in `tests/{module}.py`, a double loop that imports nothing of the package",
        "",
        '??? note "The oracle"',
        "    ```python",
        *(f"    {line}" for line in inspect.getsource(oracle).rstrip().splitlines()),
        "    ```",
        "",
        "## Options",
        "",
        f'Through `position_args`, for example `timm.create_model("vitrel_vit_s16_{key}", position_args=dict(...))`.',
        "",
        f"::: {cls.__module__}.{cls.__name__}",
        "    options:",
        "      heading_level: 3",
        "      members: false",
        "      show_bases: false",
        "",
    ]
    return "\n".join(lines)


def picture(key: str) -> bytes:
    """Return a PNG of the untrained logits of the middle patch with every key, where all patches have the same content.

    Learned tables have random values of standard deviation 1, so cells of equal color share a parameter.
    """
    torch.manual_seed(0)
    options = {"init_std": 1.0} if _drawn(key) else {}
    encoding = create_position(key, TRAINED, HEADS, WIDTH, **options)
    q, k = torch.randn(2, HEADS, 1, WIDTH)
    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    panels = figure.subplots(2, len(SHOWN), squeeze=False)
    for row, grid in zip(panels, (TRAINED, LARGER), strict=True):
        values = _logits(encoding, grid, q, k)
        for axes, head in zip(row, SHOWN, strict=True):
            logits = values[head].masked_fill(values[head].isinf(), float("nan"))
            axes.set_facecolor("0.6")
            image = axes.imshow(logits, cmap="viridis", interpolation="nearest")
            axes.set_title(f"{grid.h}×{grid.w}, head {head}", fontsize=9)
            axes.plot(grid.w // 2, grid.h // 2, marker="+", color="white", markersize=9, markeredgewidth=2)
            axes.set_xticks([0, grid.w // 2, grid.w - 1])
            axes.set_yticks([0, grid.h // 2, grid.h - 1])
            figure.colorbar(image, ax=axes, shrink=0.85)
            if grid == LARGER:
                h, w = TRAINED.h - 1, TRAINED.w - 1  # the largest offsets of the training grid
                corner = grid.w // 2 - w - 0.5, grid.h // 2 - h - 0.5
                box = Rectangle(corner, 2 * w + 1, 2 * h + 1, fill=False, edgecolor="white", linestyle="--")
                axes.add_patch(box)
        row[0].set_ylabel("key row (patches)")
    panels[1][len(SHOWN) // 2].set_xlabel("key column (patches)")
    what = f"{key}: {_quantity(key)} of the middle patch (+) with every key"
    figure.suptitle(f"{what}, trained on {TRAINED.h}×{TRAINED.w}", fontsize=11)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _logits(encoding: PositionEncoding, grid: Grid, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return [H, h, w] of the middle patch with every key: logits, or cosines of the rows that are added to tokens."""
    middle = grid.h // 2 * grid.w + grid.w // 2
    with torch.no_grad():
        terms = encoding(grid)
        if terms.tokens is not None:
            rows = torch.nn.functional.normalize(terms.tokens.unflatten(-1, (HEADS, -1)), dim=-1)  # [N, H, D]
            return torch.einsum("hd,nhd->hn", rows[middle], rows).unflatten(-1, grid[:2])
        same = (x.expand(-1, grid.tokens, -1) for x in (q, k))
        return masked_logits(*same, terms, grid)[:, middle].unflatten(-1, grid[:2])


def _quantity(key: str) -> str:
    return "cosine of the added rows" if POSITIONS[key].site == "tokens" else "logit"


def _caption(key: str) -> str:
    return (
        f"{key} before training: the {_quantity(key)} of the patch marked + with every key, for three of {HEADS} heads, where "
        "all patches have the same content. Top: the training grid. Bottom: a larger one; offsets inside the dashed box occur "
        "in the training grid. Gray: masked." + (" Learned rows are random here." if _drawn(key) else "")
    )


def _drawn(key: str) -> bool:
    """Return whether the encoding has learned rows drawn with the option `init_std`."""
    return "init_std" in inspect.signature(POSITIONS[key]).parameters


def _split(first: str) -> tuple[str, str]:
    """Split the first paragraph of an encoding's module docstring into (description, formula)."""
    text = first.partition(": ")[2]
    found = re.search(r"[,:]\s((?:logit\[|x_i|angle =)[\s\S]*)", text)
    if not found:
        return text[0].upper() + text[1:].replace("\n", " "), ""
    what = text[: found.start()].replace("\n", " ").rstrip(",:")
    return what[0].upper() + what[1:] + ".", found[1]


def _at_larger_grid(cls: type[PositionEncoding]) -> str:
    text = AT_LARGER_GRID.get(cls.at_larger_grid, cls.at_larger_grid)
    if cls.policies:
        text += " Policies (`policy=`, the first is the default): " + ", ".join(f"`{name}`" for name in cls.policies) + "."
    return text + " Inside a window that stays as trained, nothing changes at any image size."


def _row(key: str, text: str) -> list[list[str]]:
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    own = re.compile(rf"`?{key}`?(, .*|\+.*)?$")
    return [line for line in lines if own.match(line[0])]


def _cost(key: str, text: str) -> list[str]:
    table = text.split("<!-- costs -->")[1].split("<!-- /costs -->")[0]
    [row] = [row for row in _row(key, table) if row[0] == f"`{key}`"]
    table = [f"| {' | '.join(SETTINGS)} |", "|" + "---|" * len(SETTINGS), f"| {' | '.join(row[1:])} |"]
    note = "Values added to a ViT-S/16; time of a ViT-Tiny/16 over the same model without position ([measured](index.md#cost))."
    return [note, "", *table]


def _evidence(key: str, text: str) -> list[str]:
    table = text.split("<!-- evidence -->")[1].split("<!-- /evidence -->")[0]
    rows = _row(key, table)
    if not rows:
        return []
    head = "| model, policy | resampled | top-1 % at 64 px | `canvas`, 128 px | `scale`, 128 px |"
    note = "Built-in scenes, nano ViT, 3 seeds, ± half the 95 % interval, chance 25 ([study](../studies/scenes.md))."
    return [note, "", head, "|---|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
