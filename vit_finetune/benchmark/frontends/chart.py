"""The comparison as a picture: loss curves laid over one another, and what a step costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_finetune.benchmark.frontends.report import Cost

# Okabe and Ito's palette, which readers with any kind of colour vision can tell apart (jfly.uni-koeln.de/color).
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")
# Equal curves hide one another: the first is broad, each later one thinner and with longer gaps.
WIDTHS = (7.0, 4.5, 2.5, 1.5, 1.0)
DASHES: tuple[Any, ...] = ("-", "-", "-", (0, (6, 4)), (0, (2, 6)))


def draw(
    curves: dict[str, dict[str, list[float]]], costs: dict[str, dict[str, "Cost"]], names: Sequence[str], folder: Path
) -> None:
    """Writes ``chart.png`` and ``chart.svg``.

    Args:
        curves: For each precision the loss of each step by front end.
        costs: For each network the cost of a step by front end; plain PyTorch's is left out, being the zero.
        names: All front ends, plain PyTorch first; the place decides on the colour.
        folder: Where to write.
    """
    from matplotlib.figure import Figure

    panels = len(curves) + bool(costs)
    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis, (precision, lines) in zip(axes, curves.items(), strict=False):
        _draw_losses(axis, lines, names)
        axis.set_title(f"Training loss, {precision}", fontsize=11)
    if costs:
        _draw_costs(axes[-1], costs, names)
    for kind in ("png", "svg"):
        figure.savefig(folder / f"chart.{kind}", dpi=150)


def _draw_losses(axis: Any, lines: dict[str, list[float]], names: Sequence[str]) -> None:
    for name, losses in lines.items():
        style = names.index(name)
        axis.plot(losses, color=COLOURS[style], linewidth=WIDTHS[style], linestyle=DASHES[style], label=name)
    axis.set(xlabel="step", ylabel="cross-entropy (nats)")
    axis.legend(frameon=False, handlelength=4)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_costs(axis: Any, costs: dict[str, dict[str, "Cost"]], names: Sequence[str]) -> None:
    """Bars by network, one for each front end, with the range over rounds."""
    others = [name for name in names[1:] if any(name in by_name for by_name in costs.values())]
    height = 0.8 / max(1, len(others))
    for row, name in enumerate(others):
        found = [(group, by_name[name]) for group, by_name in enumerate(costs.values()) if name in by_name]
        values = [cost.value for _, cost in found]
        ranges = [[max(0, c.value - c.low) for _, c in found], [max(0, c.high - c.value) for _, c in found]]
        places = [group + (row - (len(others) - 1) / 2) * height for group, _ in found]
        colour = COLOURS[names.index(name)]
        axis.barh(places, values, height * 0.9, xerr=ranges, color=colour, label=name, error_kw={"elinewidth": 1})
    axis.set_yticks(range(len(costs)), list(costs))
    axis.invert_yaxis()
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("time a step beyond plain PyTorch (µs), 10th percentile; lines: range over rounds")
    axis.set_title("Cost of a step, 32-true", fontsize=11)
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
