"""Plots of results and images, for files, TensorBoard and notebooks.

Each function returns a new matplotlib ``Figure``, independent of pyplot and of a display, for
``figure.savefig("name.png")`` or ``SummaryWriter.add_figure``. Colors are safe for color-blind readers.
"""

from __future__ import annotations  # matplotlib is imported only where something is drawn

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from vit_finetune.evaluation.calibration import Bins
from vit_finetune.formatting import one_line, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From the palette of Okabe and Ito, https://jfly.uni-koeln.de/color/
BLUE, ORANGE, PURPLE, GRAY = "#0072B2", "#E69F00", "#CC79A7", "#999999"
STYLES = ((ORANGE, "s", "--"), (BLUE, "o", "-"))  # also distinguishable in black and white
MAX_NUMBERED = 20  # classes up to which the cells show numbers
MAX_NAMED = 120  # classes up to which the axes show every name


def confusion_figure(matrix: Tensor, class_names: Sequence[str]) -> Figure:
    """Draw a confusion matrix.

    Args:
        matrix: Numbers of images, shape ``(C, C)``, true classes in rows and predictions in columns.
        class_names: One per class.

    Returns:
        A figure that grows with the number of classes. The color is the fraction of the true class, on a square-root
        scale that shows rare mistakes; classes without images are gray.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts = np.asarray(matrix)
    classes = len(counts)
    support = counts.sum(1, keepdims=True)
    fraction = np.divide(counts, support, out=np.full(counts.shape, np.nan), where=support > 0)
    side = min(3.5 + 0.16 * classes, 20) if classes > MAX_NUMBERED else max(4.0, 2 + 0.42 * classes)
    figure = Figure((side + 0.8, side), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted class", ylabel="true class")
    axes.set_facecolor("lightgray")
    axes.grid(False)  # a notebook may have enabled grids
    cells = axes.imshow(fraction, cmap="cividis", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    bar = figure.colorbar(cells, ax=axes, shrink=0.8, aspect=30, label="fraction of the true class (%)")
    ticks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1]
    bar.set_ticks(ticks, labels=[f"{100 * tick:.0f}" for tick in ticks])
    shown = range(0, classes, math.ceil(classes / MAX_NAMED))
    names = [drawable(shorten(class_names[i], 24)) for i in shown]
    size = 9 if classes <= MAX_NUMBERED else 7
    rotation = 90 if max(map(len, names)) * len(names) > 40 else 0
    axes.set_xticks(shown, names, rotation=rotation, fontsize=size)
    axes.set_yticks(shown, names, fontsize=size)
    if classes <= MAX_NUMBERED:
        for row, column in np.argwhere(counts):
            color = "black" if fraction[row, column] > 0.3 else "white"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=color, fontsize=8)
    return figure


def reliability_figure(curves: Mapping[str, Bins]) -> Figure:
    """Draw a reliability diagram, accuracy against confidence, above a histogram of the confidence.

    Args:
        curves: Up to two curves by their names in the legend, such as uncalibrated and calibrated; see
            :func:`vit_finetune.evaluation.calibration.reliability_bins`.
    """
    from matplotlib.figure import Figure

    figure = Figure((5, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot((0, 100), (0, 100), color=GRAY, linewidth=1, linestyle=":", label="perfectly calibrated")
    for (name, bins), (color, marker, line) in zip(curves.items(), STYLES, strict=False):
        filled = np.asarray(bins.images) > 0
        confidence, accuracy = (100 * np.asarray(values)[filled] for values in (bins.confidence, bins.accuracy))
        top.plot(confidence, accuracy, color=color, marker=marker, linestyle=line, markersize=5, label=name)
        edges = np.linspace(0, 100, len(bins.images) + 1)
        bottom.stairs(np.asarray(bins.images), edges, color=color, linestyle=line, linewidth=1.5)
    top.set(ylabel="accuracy (%)", xlim=(0, 100), ylim=(0, 100))
    top.legend(loc="upper left", fontsize=9)
    bottom.set(xlabel="confidence: probability of the predicted class (%)", ylabel="images")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return figure


def image_grid(
    images: Tensor | Sequence[Tensor], captions: Sequence[str], columns: int = 8, title: str | None = None
) -> Figure:
    """Draw images in rows, each below its caption.

    Args:
        images: uint8, shape ``(N, 3, H, W)``, or a list of ``(3, H, W)`` of any sizes.
        captions: One per image. Each line is shortened to the width of the image; escape names that may contain line
            breaks with :func:`vit_finetune.formatting.one_line`.
        columns: Images per row.
        title: Title of the figure.

    Raises:
        ValueError: The list of images is empty.
    """
    from matplotlib.figure import Figure

    if not len(images):
        raise ValueError("image_grid needs at least one image.")
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    lines = max(caption.count("\n") + 1 for caption in captions)
    cell, text = 1.5, 0.13 * lines + 0.1  # inches: side of a cell, height of its caption
    width, height, head = columns * cell, rows * (cell + text), 0.3 if title else 0.0
    figure = Figure((width, height + head))
    if title:
        figure.text(0.5, 1 - 0.08 / (height + head), drawable(title), ha="center", va="top", fontsize=9)
    # One coordinate system in inches for all images: hundreds of axes would take seconds.
    axes: Any = figure.add_axes((0, 0, 1, height / (height + head)))
    axes.axis("off")
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = number % columns * cell, number // columns * (cell + text) + text
        drawn = "\n".join(drawable(shorten(line, 27)) for line in caption.split("\n"))
        axes.text(left + cell / 2, top - 0.02, drawn, ha="center", va="bottom", fontsize=6, linespacing=1.1)
        _, high, wide = image.shape
        x, y = left + cell / 2, top + cell / 2
        half_width, half_height = (max(0.47 * cell * side / max(high, wide), 0.01) for side in (wide, high))
        extent = (x - half_width, x + half_width, y + half_height, y - half_height)
        axes.imshow(thumbnail(image.cpu()).permute(1, 2, 0).numpy(), extent=extent, aspect="auto")
    axes.set(xlim=(0, width), ylim=(height, 0))
    return figure


def thumbnail(image: Tensor, side: int = 300) -> Tensor:
    """Shrink an image to the resolution of a grid cell.

    Args:
        image: uint8, shape ``(3, H, W)``.
        side: Maximum length of the longer side in pixels.
    """
    scale = side / max(image.shape[1:])
    if scale >= 1:
        return image
    size = [max(1, round(scale * length)) for length in image.shape[1:]]
    return F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]


def drawable(line: str) -> str:
    r"""Escape characters that the font does not have, as ``\u732b``, and the dollar sign, which starts a formula.

    Set matplotlib's ``font.family`` to a font with these characters to draw them.
    """
    known = _characters()
    escaped = (c if ord(c) in known else c.encode("unicode_escape").decode() for c in one_line(line))
    return "".join(escaped).replace("$", r"\$")


@lru_cache(1)
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())
