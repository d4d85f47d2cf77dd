"""A test report as one HTML page, which can be read and sent around without any other file."""

from __future__ import annotations  # matplotlib is imported only where something is drawn

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from PIL import Image
from torch import Tensor

from vit_finetune.evaluation.report import ClassMetrics, Mistake, Report
from vit_finetune.formatting import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SIDE = 256  # pixels; larger images of mistakes are reduced
LOSSLESS_SIDE = 64  # up to this side, images are stored without loss
CHARTS = {
    "confusion": ("Confusion matrix", "True classes in rows, predicted classes in columns."),
    "reliability": ("Calibration", "Reliability diagram: accuracy against confidence, above the number of images."),
}

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --link: light-dark(#0060a0, #7ab8ff); }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { margin: 0; } h2 { margin: 2rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
tbody tr:hover { background: var(--soft); } tfoot { font-weight: 600; }
th button { all: unset; cursor: pointer; color: var(--link); } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
.chart img { background: white; } .chart img.reliability { max-width: 100%; }
.mistakes { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: 1rem; }
figure { margin: 0; } .mistakes img { width: 100%; max-height: 16rem; object-fit: contain; background: var(--soft); }
img.small { image-rendering: pixelated; }
figcaption, .note { font-size: .875rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { display: block; } th, td { padding: .25rem; } table { font-size: .875rem; } }
"""

SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, column = head.cellIndex, body = head.closest("table").tBodies[0];
  const order = head.ariaSort === "descending" ? "ascending" : "descending", sign = order === "ascending" ? 1 : -1;
  const value = row => row.cells[column].dataset.value;
  const compare = (a, b) => column ? a - b : a.localeCompare(b, undefined, {numeric: true});
  const rows = [...body.rows].sort((a, b) =>  // undefined values stay at the end
    (value(a) === "") - (value(b) === "") || sign * compare(value(a), value(b)));
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.ariaSort = order;
  body.append(...rows);
};
"""


def page(
    report: Report,
    metrics: Iterable[tuple[str, str, str]],
    charts: Mapping[str, Figure],
    images: Sequence[Tensor] = (),
) -> str:
    """Return the page; it holds images and charts itself and loads nothing.

    Args:
        report: The results.
        metrics: Name, value and details of each metric over all images.
        charts: Figures by name; ``confusion`` and ``reliability`` are shown.
        images: The images of ``report.mistakes``, uint8, each ``(3, H, W)``.
    """
    about = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in report.about.items())
    parts = [
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">',
        f"<title>Test report: {report.top1.value:.2%} of {report.images} images</title>",
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n<body>',
        f"<h1>Test report</h1>\n<dl>{about}</dl>",
        "<h2>Metrics</h2>",
        _metrics_table(metrics),
        "<h2>Classes</h2>",
        _class_table(report.classes, report.macro),
        *(_chart(name, charts[name], *texts) for name, texts in CHARTS.items()),
        "<h2>Worst mistakes</h2>",
        _mistakes(report.mistakes, images),
        f"<script>{SCRIPT}</script>\n</body>\n</html>",
    ]
    return "\n".join(parts) + "\n"


def _text(name: str) -> str:
    r"""Escape a name from outside; bytes that are not text are shown as ``\xff``."""
    return escape(one_line(name))


def _metrics_table(metrics: Iterable[tuple[str, str, str]]) -> str:
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td>{value}</td><td class="text">{_text(details)}</td></tr>'
        for name, value, details in metrics
    )
    return f'<div class="wide"><table><tbody>{rows}</tbody></table></div>'


def _class_table(classes: Iterable[ClassMetrics], macro: ClassMetrics) -> str:
    """Return a table that can be sorted by each column."""
    names = ("class", "precision", "recall", "F1", "images")
    head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in names)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(map(_class_row, classes))}</tbody>'
        f"<tfoot>{_class_row(macro)}</tfoot></table></div>\n<p class=note>Select a column to sort by it.</p>"
    )


def _class_row(row: ClassMetrics) -> str:
    values = "".join(
        f'<td data-value="{"" if value is None else value}">{"-" if value is None else f"{value:.4f}"}</td>'
        for value in (row.precision, row.recall, row.f1)
    )
    name = _text(row.name)
    return f'<tr><td data-value="{name}">{name}</td>{values}<td data-value="{row.support}">{row.support}</td></tr>'


def _chart(name: str, figure: Figure, title: str, description: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    source = _data_uri("svg+xml", buffer.getvalue())
    return (
        f'<h2>{title}</h2>\n<p class="note">{description}</p>\n'
        f'<div class="wide chart"><img class="{name}" src="{source}" alt="{title}. {description}"></div>'
    )


def _mistakes(mistakes: Sequence[Mistake], images: Sequence[Tensor]) -> str:
    if not mistakes:
        return "<p>None.</p>"
    shown = images if len(images) else [None] * len(mistakes)
    figures = "\n".join(_mistake(mistake, image) for mistake, image in zip(mistakes, shown, strict=True))
    return f'<div class="mistakes">\n{figures}\n</div>'


def _mistake(mistake: Mistake, pixels: Tensor | None) -> str:
    true, predicted = _text(mistake.true), _text(mistake.predicted)
    image = "" if pixels is None else _image(pixels, f"{true} predicted as {predicted}")
    return (
        f"<figure>{image}<figcaption>true: <b>{true}</b><br>predicted: <b>{predicted}</b> "
        f"({mistake.probability:.1%})<br>{_text(mistake.path)}</figcaption></figure>"
    )


def _image(pixels: Tensor, description: str) -> str:
    """Return an image element; ``description`` is escaped already."""
    image, buffer = Image.fromarray(pixels.permute(1, 2, 0).numpy()), io.BytesIO()
    small = max(image.size) <= LOSSLESS_SIDE
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(buffer, "PNG") if small else image.save(buffer, "JPEG", quality=85)
    source = _data_uri("png" if small else "jpeg", buffer.getvalue())
    return f'<img{" class=small" if small else ""} src="{source}" alt="{description}">'


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
