"""Plots: contents, and names with characters that the font does not have."""

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from vit_finetune.evaluation.calibration import reliability_bins
from vit_finetune.evaluation.plots import confusion_figure, image_grid, reliability_figure
from vit_finetune.formatting import one_line

ODD = ["猫", "b\udcff", "$x$ and $y$", "line\nbreak", "Ünïcode", "long " * 40]


@pytest.mark.parametrize("classes", [2, 6, 30, 150])
def test_confusion_is_drawn_as_fraction_of_the_true_class(classes: int, tmp_path: Path) -> None:
    matrix = 3 * torch.eye(classes, dtype=torch.long)
    matrix[0, 1] = 1
    matrix[1] = 0  # a class without images
    names = [ODD[i % len(ODD)] + str(i) for i in range(classes)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = confusion_figure(matrix, names)
        figure.savefig(tmp_path / "confusion.png")
    axes = figure.axes[0]
    drawn = axes.images[0].get_array()
    assert drawn[0, :2].tolist() == [0.75, 0.25] and bool(drawn.mask[1].all())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    assert sorted(text.get_text() for text in axes.texts) == (
        ["1", *["3"] * (classes - 1)] if classes == 6 else ["1", "3"] if classes == 2 else []
    )
    assert len(axes.get_xticklabels()) == min(classes, 75)  # every second of 150
    assert (tmp_path / "confusion.png").stat().st_size < 500_000


def test_reliability_shows_filled_bins_only(tmp_path: Path) -> None:
    bins = reliability_bins(torch.tensor([0.61, 0.65, 1.0, 0.0]), torch.tensor([True, False, True, False]), bins=10)
    assert bins.images.tolist() == [1, 0, 0, 0, 0, 0, 2, 0, 0, 1]
    assert bins.accuracy[[0, 6, 9]].tolist() == [0, 0.5, 1]
    figure = reliability_figure({"uncalibrated": bins, "temperature 1.50": bins})
    figure.savefig(tmp_path / "reliability.png")
    _, before, after = figure.axes[0].lines
    assert before.get_xdata() == pytest.approx([0, 63, 100]) and after.get_ydata() == pytest.approx([0, 50, 100])
    assert [text.get_text() for text in figure.axes[0].get_legend().texts][1:] == ["uncalibrated", "temperature 1.50"]


def test_grid_of_any_sizes_and_captions(tmp_path: Path) -> None:
    images = [
        torch.zeros(3, h, w, dtype=torch.uint8) for h, w in ((1, 1), (2000, 3), (3, 2000), (32, 32), (500, 700), (9, 9))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = image_grid(images, [f"{one_line(name)}\nsecond line" for name in ODD], columns=4, title="odd 猫")
        SummaryWriter(str(tmp_path)).add_figure("grid", figure)
        figure.savefig(tmp_path / "grid.png")
    assert len(figure.axes[0].images) == len(figure.axes[0].texts) == 6
    assert figure.axes[0].texts[0].get_text() == "\\u732b\nsecond line"
    with pytest.raises(ValueError, match="at least one image"):
        image_grid([], [])
