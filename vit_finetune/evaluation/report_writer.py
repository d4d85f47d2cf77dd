"""A test report as files, figures, Markdown and lines for the terminal; for HTML, see ``report_html.py``."""

from __future__ import annotations  # matplotlib is imported only where something is drawn

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from vit_finetune.evaluation import plots, report_html
from vit_finetune.evaluation.calibration import BINS
from vit_finetune.evaluation.report import ClassMetrics, Proportion, Report
from vit_finetune.formatting import escape_markdown, markdown_table, one_line, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 20  # classes up to which the terminal lists all of them
MAX_PAIRS = 10  # most frequent confusions listed in Markdown
HEADER = ("class", "precision", "recall", "F1", "images")
NOTES = (
    "Loss is the mean negative log-likelihood in nats. ECE is the expected calibration error, the mean distance "
    f"between confidence and accuracy over {BINS} bins of equal width "
    "([Guo et al. 2017](https://arxiv.org/abs/1706.04599)). The temperature was fitted on validation images and "
    "changes no prediction. Intervals are Wilson score intervals. A dash marks an undefined value."
)


def save(report: Report, folder: Path, images: Sequence[Tensor] = ()) -> dict[str, Figure]:
    """Write ``report.json``, ``report.md``, ``report.html`` and the charts as PNG files.

    Args:
        report: The results.
        folder: Created if it does not exist.
        images: The images of ``report.mistakes``; without them there is no ``mistakes.png``.

    Returns:
        The figures, see :func:`figures`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    charts = figures(report, images)
    for name, figure in charts.items():
        figure.savefig(folder / f"{name}.png")
    # JSON escapes bytes of a path that are not text as lone surrogates, from which os.fsencode restores them.
    (folder / "report.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report, list(charts)), encoding="utf-8")
    page = report_html.page(report, _totals(report), charts, images)
    (folder / "report.html").write_text(page, encoding="utf-8")
    return charts


def figures(report: Report, images: Sequence[Tensor] = (), columns: int = 6) -> dict[str, Figure]:
    """Draw the charts.

    Args:
        report: The results.
        images: The images of ``report.mistakes``, uint8, each ``(3, H, W)``.
        columns: Images per row.

    Returns:
        Figures by name: ``confusion``, ``reliability``, and ``mistakes`` if there are images.
    """
    curves = {
        "uncalibrated": report.uncalibrated.bins,
        f"temperature {report.temperature:.2f}": report.calibrated.bins,
    }
    charts = {
        "confusion": plots.confusion_figure(report.confusion, [row.name for row in report.classes]),
        "reliability": plots.reliability_figure(curves),
    }
    if len(images):
        captions = [
            f"{one_line(m.path)}\ntrue: {shorten(m.true, 20)}\n"
            f"predicted: {shorten(m.predicted, 10)} {100 * m.probability:.0f} %"
            for m in report.mistakes
        ]
        charts["mistakes"] = plots.image_grid(images, captions, columns)
    return charts


def terminal(report: Report) -> str:
    """Return the metrics as lines of text; with more than 20 classes, only those with the lowest F1."""
    lines = [f"{name:14s} {value}   {details}".rstrip() for name, value, details in _totals(report)]
    lowest = sorted(report.classes, key=lambda row: 2 if row.f1 is None else row.f1)[:MAX_ROWS]
    shown = report.classes if len(report.classes) <= MAX_ROWS else lowest
    rows = [HEADER, *(_cells(row) for row in (*shown, report.macro))]
    width = max(len(shorten(row[0], 30)) for row in rows)
    lines.append("")
    lines += [f"{shorten(name, 30):{width}s}  {p:>9s}  {r:>6s}  {f:>6s}  {n:>8s}" for name, p, r, f, n in rows]
    if len(shown) < len(report.classes):
        lines.append(f"the {MAX_ROWS} of {len(report.classes)} classes with the lowest F1")
    return "\n".join(lines)


def markdown(report: Report, charts: Sequence[str]) -> str:
    """Return the whole report.

    Args:
        report: The results.
        charts: Names of the PNG files in the same folder, without their suffix.
    """
    classes = [_cells(row) for row in (*report.classes, report.macro)]
    mistakes = [
        (*map(escape_markdown, (m.path, m.true, m.predicted)), f"{100 * m.probability:.1f} %") for m in report.mistakes
    ]
    parts = [
        "# Test report",
        "\n".join(f"- {name}: {escape_markdown(value)}" for name, value in report.about.items()),
        markdown_table(("metric", "value", "details"), _totals(report)),
        NOTES,
        "## Classes",
        markdown_table(HEADER, ([escape_markdown(name), *numbers] for name, *numbers in classes)),
        "## Confusion",
        "![Confusion matrix](confusion.png)",
        _confused_pairs(report),
        "## Calibration",
        "![Reliability diagram](reliability.png)",
        "## Worst mistakes",
        "![The most confident wrong predictions](mistakes.png)" if "mistakes" in charts else "",
        markdown_table(("image", "true class", "predicted as", "probability"), mistakes) if mistakes else "None.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _totals(report: Report) -> list[tuple[str, str, str]]:
    """Return name, value and details of each metric over all images."""
    loss = ece = "no temperature was fitted"
    if report.temperature != 1.0:
        condition = f"at temperature {report.temperature:.3f}"
        loss, ece = f"{report.calibrated.loss:.4f} {condition}", f"{report.calibrated.ece:.4f} {condition}"
    with_images = sum(row.support > 0 for row in report.classes)
    return [
        ("test/acc", f"{report.top1.value:.4f}", f"{_interval(report.top1)}, {report.images} images"),
        *([("test/acc_top5", f"{report.top5.value:.4f}", _interval(report.top5))] if report.top5 else []),
        ("test/acc_macro", f"{report.acc_macro:.4f}", f"mean recall of the {with_images} classes that have images"),
        ("test/loss", f"{report.uncalibrated.loss:.4f}", loss),
        ("test/ece", f"{report.uncalibrated.ece:.4f}", ece),
    ]


def _interval(proportion: Proportion) -> str:
    return f"95 % interval {proportion.low:.4f} to {proportion.high:.4f}"


def _cells(row: ClassMetrics) -> tuple[str, str, str, str, str]:
    precision, recall, f1 = ("-" if value is None else f"{value:.4f}" for value in (row.precision, row.recall, row.f1))
    return row.name, precision, recall, f1, str(row.support)


def _confused_pairs(report: Report) -> str:
    """Return a table of the pairs of classes that are confused most often."""
    wrong = report.confusion.clone().fill_diagonal_(0).flatten()
    names = [escape_markdown(row.name) for row in report.classes]
    order = wrong.argsort(descending=True, stable=True)[:MAX_PAIRS].tolist()
    rows = [(names[i // len(names)], names[i % len(names)], str(int(wrong[i]))) for i in order if wrong[i]]
    return markdown_table(("true class", "predicted as", "images"), rows) if rows else ""
