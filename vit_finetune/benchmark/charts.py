"""Bar charts of a suite: time, accuracy and memory side by side."""

import statistics
from pathlib import Path
from typing import Any

from vit_finetune.benchmark.records import Result

# One color for all bars, of the palette of Okabe and Ito: nothing is told by color alone.
BLUE = "#0072B2"
PANELS = (
    ("Time of fit, s", "seconds", 1.0, ".1f"),
    ("Images a second", "images_per_second", 1.0, ",.0f"),
    ("Test accuracy, %", "test_acc", 100.0, ".1f"),
    ("Peak memory, GB", "peak_memory_gb", 1.0, ".2f"),
)


def save(path: Path, name: str, results: dict[str, list[Result]]) -> None:
    """Draws the charts as ``<path>.png`` and ``<path>.svg``.

    Args:
        path: Without a suffix.
        name: Of the suite, for the title.
        results: The runs of each variant, from top to bottom.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(_values(runs, panel[1]) for runs in results.values())]
    figure = Figure(figsize=(2 + 2.9 * len(panels), 1.5 + 0.42 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _draw(axes, panel, results)
    runs = [run for runs in results.values() for run in runs]
    figure.suptitle(f"Suite {name}: median, and range over seeds and repeats", fontsize=11)
    figure.supxlabel(_footer(runs), fontsize=6, color="#444444")
    metadata = {"Title": f"Suite {name}", "Description": "; ".join(_origins(runs))}
    figure.savefig(path.with_suffix(".png"), dpi=150, metadata=metadata)
    figure.savefig(path.with_suffix(".svg"), metadata={**metadata, "Date": None})


def _draw(axes: Any, panel: tuple[str, str, float, str], results: dict[str, list[Result]]) -> None:
    title, name, factor, form = panel
    highest = max(factor * max(_values(runs, name), default=0) for runs in results.values())
    for row, runs in enumerate(results.values()):
        found = [factor * value for value in _values(runs, name)]
        if not found:
            continue
        middle = statistics.median(found)
        axes.barh(row, middle, 0.7, color=BLUE)
        if len(found) > 1:
            axes.plot([min(found), max(found)], [row, row], color="black", linewidth=1.5, marker="|", markersize=8)
        axes.text(max(found) + 0.03 * highest, row, format(middle, form), va="center", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_yticks(range(len(results)), list(results))
    axes.set_xlim(0, 1.28 * highest or 1)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _values(runs: list[Result], name: str) -> list[float]:
    return [value for run in runs if (value := getattr(run, name)) is not None]


def _origins(runs: list[Result]) -> list[str]:
    return list(dict.fromkeys(f"{run.machine}; {run.versions}; commit {run.commit}" for run in runs))


def _footer(runs: list[Result]) -> str:
    """Machine and commit, the first where there are several: the table lists all."""
    origins = _origins(runs)
    return origins[0] + (f"; and {len(origins) - 1} more, see results.md" if len(origins) > 1 else "")
