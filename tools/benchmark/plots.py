"""What the plots of measurements share: colours, and names at the ends of lines instead of a legend."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {  # ours warm, peers cold, all told apart with the common colour blindnesses
    "ours": ("#D55E00", "#E69F00", "#CC79A7", "#8C2D04"),
    "both": ("#000000",),
    "peer": ("#0072B2", "#56B4E9", "#009E73", "#4D4D4D", "#332288", "#117733", "#88CCEE"),
    "floor": ("0.5",),
}
_APART = 0.05  # of the height of a panel


class LineEnd(NamedTuple):
    """The last point of a line, in data coordinates."""

    name: str
    colour: str
    x: float
    y: float


def label_ends(axes: "Axes", ends: Iterable[LineEnd]) -> None:
    """Names right of the panel, in the order of the ends and apart, each tied to its line; limits and scales have to be set."""
    places = axes.transData + axes.transAxes.inverted()
    found = sorted(((places.transform((end.x, end.y))[1], end) for end in ends), key=lambda one: one[0])
    at = -1.0
    for place, end in found:
        at = max(place, at + _APART)
        axes.annotate(
            end.name,
            (end.x, end.y),
            (1.03, at),
            textcoords="axes fraction",
            color=end.colour,
            fontsize=8,
            va="center",
            arrowprops=dict(arrowstyle="-", color=end.colour, linewidth=0.5, alpha=0.6),
            annotation_clip=False,
        )
