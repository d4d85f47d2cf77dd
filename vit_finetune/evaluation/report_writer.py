"""A test report in words: for the terminal and as Markdown."""

from collections.abc import Iterable, Sequence

from vit_finetune.evaluation.calibration import BINS
from vit_finetune.evaluation.report import ClassMetrics, Proportion, Report
from vit_finetune.formatting import escape_markdown, shorten

PRINTED = 20  # classes up to which a terminal shows them all
PAIRS = 10  # pairs of classes that Markdown names as those most often confused
HEADER = ("class", "precision", "recall", "F1", "images")
MEANING = (
    "Loss is the mean negative log-likelihood in nats; ece is the expected calibration error, the mean distance "
    f"between confidence and accuracy over {BINS} bins of equal width "
    "([Guo et al. 2017](https://arxiv.org/abs/1706.04599)). The temperature was fitted on validation images and "
    "changes no prediction. Intervals are Wilson's. A dash means that there are no images to tell from."
)


def terminal(report: Report) -> str:
    """The figures in lines of text; of many classes only the worst."""
    lines = [f"{name:14s} {first}   {more}".rstrip() for name, first, more in _totals(report)]
    worst = sorted(report.classes, key=lambda score: 2 if score.f1 is None else score.f1)[:PRINTED]
    shown = report.classes if len(report.classes) <= PRINTED else worst
    rows = [HEADER, *(_cells(score) for score in (*shown, report.macro))]
    width = max(len(shorten(row[0], 30)) for row in rows)
    lines.append("")
    lines += [f"{shorten(name, 30):{width}s}  {p:>9s}  {r:>6s}  {f:>6s}  {n:>8s}" for name, p, r, f, n in rows]
    if len(shown) < len(report.classes):
        lines.append(f"the {PRINTED} of {len(report.classes)} classes with the lowest F1")
    return "\n".join(lines)


def markdown(report: Report, charts: Sequence[str]) -> str:
    """The whole report.

    Args:
        report: The figures.
        charts: Names of the PNG files beside the text, without their ending.
    """
    parts = ["# Test report", "\n".join(f"- {name}: {escape_markdown(value)}" for name, value in report.about.items())]
    parts += [_table(("", "as trained", ""), _totals(report)), MEANING]
    parts += ["## Classes", _table(HEADER, ([escape_markdown(n), *rest] for n, *rest in map(_cells, _scores(report))))]
    parts += ["## Confusion", "![Which classes are taken for which](confusion.png)", _pairs(report)]
    parts += ["## Calibration", "![Accuracy against confidence](reliability.png)", "## Worst mistakes"]
    if "mistakes" in charts:
        parts.append("![The most confident wrong predictions](mistakes.png)")
    rows = [
        (*map(escape_markdown, (m.path, m.true, m.predicted)), f"{100 * m.probability:.1f} %") for m in report.mistakes
    ]
    parts.append(_table(("image", "true class", "predicted", "probability"), rows) if rows else "None.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _totals(report: Report) -> list[tuple[str, str, str]]:
    """Name, value, and what to know about it."""
    plain = report.plain
    loss = ece = "no temperature was fitted"
    if report.temperature != 1.0:
        divided = f"at temperature {report.temperature:.3f}"
        loss, ece = f"{report.calibrated.loss:.4f} {divided}", f"{report.calibrated.ece:.4f} {divided}"
    return [
        ("test/acc", f"{report.top1.value:.4f}", f"{_interval(report.top1)}, {report.images} images"),
        *([("test/acc_top5", f"{report.top5.value:.4f}", _interval(report.top5))] if report.top5 else []),
        ("test/loss", f"{plain.loss:.4f}", loss),
        ("test/ece", f"{plain.ece:.4f}", ece),
    ]


def _interval(share: Proportion) -> str:
    return f"95 % interval {share.low:.4f} to {share.high:.4f}"


def _scores(report: Report) -> list[ClassMetrics]:
    return [*report.classes, report.macro]


def _cells(score: ClassMetrics) -> tuple[str, str, str, str, str]:
    numbers = ("-" if value is None else f"{value:.4f}" for value in (score.precision, score.recall, score.f1))
    return (score.name, *numbers, str(score.support))  # type: ignore[return-value]


def _pairs(report: Report) -> str:
    """The pairs of classes most often confused."""
    wrong = report.confusion.clone().fill_diagonal_(0)
    order = wrong.flatten().argsort(descending=True, stable=True)[:PAIRS].tolist()
    names = [escape_markdown(score.name) for score in report.classes]
    rows = [(names[i // len(names)], names[i % len(names)], str(int(wrong.flatten()[i]))) for i in order]
    rows = [row for row in rows if row[2] != "0"]
    return _table(("true class", "taken for", "images"), rows) if rows else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
