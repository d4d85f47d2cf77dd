"""Bar charts of benchmark results, side by side in panels."""

from __future__ import annotations  # matplotlib is imported where something is drawn

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vit_finetune.evaluation.plots import BLUE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Bar(NamedTuple):
    """A measured value and its range over repeated runs."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Bar:
        """Return the median and range of several values."""
        return cls(statistics.median(values), min(values), max(values))


class Panel(NamedTuple):
    """One quantity.

    Attributes:
        title: Quantity and unit.
        digits: Number of decimal places.
        bars: One per row; rows without a value are left out.
    """

    title: str
    digits: int
    bars: dict[str, Bar]


def save(path: Path, title: str, panels: Sequence[Panel], rows: Sequence[str], origins: Sequence[str]) -> None:
    """Draw the panels and save them as ``<path>.png`` and ``<path>.svg``.

    Args:
        path: Without a suffix.
        title: Above all panels.
        panels: From left to right.
        rows: Names of the bars from top to bottom, shared by all panels.
        origins: Machines and commits, stored in the metadata of the files; the first is also printed below the panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 2.9 * len(panels), 1.5 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _draw(axes, panel, rows)
    figure.suptitle(title, fontsize=11)
    more = f"; and {len(origins) - 1} more, see results.md" if len(origins) > 1 else ""
    footer = textwrap.fill("".join([*origins[:1], more]), 60 * len(panels))
    figure.supxlabel(footer, fontsize=6, color="#444444")
    metadata = {"Title": title, "Description": "; ".join(origins)}
    figure.savefig(path.with_suffix(".png"), dpi=150, metadata=metadata)
    figure.savefig(path.with_suffix(".svg"), metadata={**metadata, "Date": None})


def _draw(axes: Axes, panel: Panel, rows: Sequence[str]) -> None:
    highest = max(0.0, *(bar.high for bar in panel.bars.values()))
    lowest = min(0.0, *(bar.low for bar in panel.bars.values()))
    for row, name in enumerate(rows):
        if name not in panel.bars:
            continue
        bar = panel.bars[name]
        axes.barh(row, bar.value, 0.7, color=BLUE)
        if bar.low < bar.high:
            axes.plot([bar.low, bar.high], [row, row], color="black", linewidth=1.5, marker="|", markersize=8)
        axes.text(max(0, bar.high) + 0.03 * highest, row, f"{bar.value:,.{panel.digits}f}", va="center", fontsize=9)
    axes.set_title(panel.title, fontsize=10)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(1.28 * lowest, 1.28 * highest or 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
