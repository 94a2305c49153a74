"""Labels at the ends of plotted lines, in place of a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

GAP = 0.055  # Smallest distance between two labels, as a fraction of the axes' height.


def name_lines(axes: Axes, lines: Sequence[Line2D], size: int = 8) -> None:
    """Write the label of each line at the line's right end, without overlaps."""
    axes.figure.canvas.draw()  # Draw first, since `transData` needs the final scales of the axes.
    ends = []
    for line in lines:
        end = line.get_xydata()[-1]  # type: ignore[index]
        shown = axes.transAxes.inverted().transform(axes.transData.transform(end))
        ends.append((float(shown[1]), line, end))
    ends.sort(key=lambda end: end[0])
    heights: list[float] = []
    for height, _, _ in ends:
        heights.append(max(height, heights[-1] + GAP) if heights else max(height, 0.0))
    below = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], below)
        below = heights[i] - GAP
    for (_, line, end), height in zip(ends, heights, strict=True):
        axes.annotate(
            str(line.get_label()), end, (1.03, height), textcoords="axes fraction", va="center",
            color=line.get_color(), fontsize=size, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "lw": 0.5, "alpha": 0.6},
        )  # fmt: skip
