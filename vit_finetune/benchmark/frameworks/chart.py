"""The comparison as an image: loss curves laid over one another, and what a step costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_finetune.benchmark.frameworks.runs_of_frameworks import Cost

# Okabe and Ito's palette, which readers with any kind of color vision can tell apart (jfly.uni-koeln.de/color).
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")
# Equal curves hide one another: the first is broad, each later one thinner.
WIDTHS = (9.0, 7.0, 5.0, 3.0, 1.0)


def draw(
    curves: dict[str, dict[str, list[float]]], costs: dict[str, dict[str, "Cost"]], names: Sequence[str], folder: Path
) -> None:
    """Writes ``chart.png`` and ``chart.svg``: losses above, cost of a step below.

    Args:
        curves: The loss of each step by panel title and framework.
        costs: For each network the cost of a step by framework; plain PyTorch's is left out, being the zero.
        names: All frameworks, plain PyTorch first; the place decides on the color.
        folder: Where to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = bool(curves) + bool(costs)
    figure = Figure(figsize=(4.2 * max(2, len(curves)), 1 + 3.4 * max(1, rows)), layout="constrained")
    grid = figure.add_gridspec(max(1, rows), max(1, len(curves)))
    for column, (title, lines) in enumerate(curves.items()):
        _draw_losses(figure.add_subplot(grid[0, column]), title, lines, names)
    if costs:
        _draw_costs(figure.add_subplot(grid[-1, :]), costs, names)
    handles = [Patch(color=color, label=name) for color, name in zip(COLORS, names, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False)
    for kind in ("png", "svg"):
        figure.savefig(folder / f"chart.{kind}", dpi=150)


def _draw_losses(axis: Any, title: str, lines: dict[str, list[float]], names: Sequence[str]) -> None:
    for name, losses in lines.items():
        axis.plot(losses, color=COLORS[names.index(name)], linewidth=WIDTHS[names.index(name)])
    axis.set(xlabel="step", ylabel="training loss, cross-entropy (nats)")
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_costs(axis: Any, costs: dict[str, dict[str, "Cost"]], names: Sequence[str]) -> None:
    """Bars by network, one for each framework, with the range over rounds."""
    others = [name for name in names[1:] if any(name in by_name for by_name in costs.values())]
    height = 0.8 / max(1, len(others))
    for row, name in enumerate(others):
        found = [(group, by_name[name]) for group, by_name in enumerate(costs.values()) if name in by_name]
        values = [cost.value for _, cost in found]
        ranges = [[max(0, c.value - c.low) for _, c in found], [max(0, c.high - c.value) for _, c in found]]
        places = [group + (row - (len(others) - 1) / 2) * height for group, _ in found]
        color = COLORS[names.index(name)]
        axis.barh(places, values, height * 0.9, xerr=ranges, color=color, error_kw={"elinewidth": 1, "capsize": 2})
    axis.set_yticks(range(len(costs)), list(costs))
    axis.invert_yaxis()
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("time a step beyond plain PyTorch (µs), 10th percentile; black: range over rounds")
    axis.set_title("Cost of a step, 32-true", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
