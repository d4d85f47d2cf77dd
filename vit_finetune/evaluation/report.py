"""What a trained network is worth on labeled images: figures, tables, charts."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import (
    multiclass_calibration_error,
    multiclass_confusion_matrix,
    multiclass_f1_score,
    multiclass_precision,
    multiclass_recall,
)

from vit_finetune.evaluation.calibration import BINS, Bins, reliability_bins
from vit_finetune.formatting import one_line, shorten

WORST = 24  # mistakes that are shown


class Proportion(NamedTuple):
    """A share of images and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """How far probabilities can be believed."""

    loss: float
    """Mean negative log-likelihood of the true class, in nats."""
    ece: float
    """Expected calibration error: mean distance of confidence from accuracy over 15 bins of equal width (Guo et al.
    2017, arXiv:1706.04599), between 0 and 1."""
    bins: Bins
    """The reliability diagram."""


@dataclass(frozen=True)
class ClassMetrics:
    """One class; what nothing is known about is ``None``."""

    name: str
    precision: float | None
    """Of the images taken for this class, the share that are; ``None`` if there are none."""
    recall: float | None
    """Of the images of this class, the share found; ``None`` if there are none."""
    f1: float | None
    """Harmonic mean of the two; ``None`` if there are no images of this class."""
    support: int
    """Images of this class."""


@dataclass(frozen=True)
class Mistake:
    """An image taken for something else."""

    index: int
    """Its position among the logits."""
    path: str
    true: str
    predicted: str
    probability: float
    """Calibrated probability of the predicted class."""


@dataclass(frozen=True)
class Report:
    """The figures of a test, all computed in 32 bits; build it with :meth:`from_logits`."""

    images: int
    top1: Proportion
    top5: Proportion | None
    """``None`` with five classes or fewer."""
    temperature: float
    plain: Calibration
    """Probabilities as trained."""
    calibrated: Calibration
    """Probabilities of logits divided by the temperature."""
    classes: list[ClassMetrics]
    macro: ClassMetrics
    """Means over the classes for which the value is known."""
    confusion: Tensor
    """int64, shape ``(C, C)``: true classes in rows, predictions in columns."""
    mistakes: list[Mistake]
    """Up to 24 wrong predictions, the most confident first."""
    about: dict[str, str] = field(default_factory=dict)
    """What was tested: checkpoint, data and so on."""

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        labels: Tensor,
        class_names: Sequence[str],
        temperature: float = 1.0,
        paths: Sequence[str] | None = None,
        about: Mapping[str, str] | None = None,
    ) -> "Report":
        """Computes everything.

        Args:
            logits: Any float, shape ``(N, C)``.
            labels: int64, shape ``(N,)``.
            class_names: In the order of the labels.
            temperature: Divisor of the logits, fitted on other images than these.
            paths: One per image; by default its position.
            about: What was tested.

        Raises:
            ValueError: There are no images.
        """
        logits, labels, count = logits.detach().float().cpu(), labels.cpu(), len(class_names)
        if not len(labels):
            raise ValueError("A report needs at least one image.")
        predicted = logits.argmax(-1)
        top5 = (logits.topk(5).indices == labels[:, None]).any(1) if count > 5 else None
        matrix = multiclass_confusion_matrix(predicted, labels, count)
        classes = _class_metrics(predicted, labels, class_names, matrix)
        return cls(
            images=len(labels),
            top1=_proportion(predicted == labels),
            top5=None if top5 is None else _proportion(top5),
            temperature=temperature,
            plain=_calibration(logits, labels),
            calibrated=_calibration(logits / temperature, labels),
            classes=classes,
            macro=ClassMetrics(
                name="mean over classes",
                precision=_mean(score.precision for score in classes),
                recall=_mean(score.recall for score in classes),
                f1=_mean(score.f1 for score in classes),
                support=len(labels),
            ),
            confusion=matrix,
            mistakes=_mistakes((logits / temperature).softmax(-1), labels, class_names, paths),
            about=dict(about or {}),
        )

    def scalars(self) -> dict[str, float]:
        """The figures beyond loss and accuracy by their names in TensorBoard."""
        known = {
            "temperature": self.temperature,
            "loss_calibrated": self.calibrated.loss,
            "ece": self.plain.ece,
            "ece_calibrated": self.calibrated.ece,
            "precision": self.macro.precision,
            "recall": self.macro.recall,
            "f1": self.macro.f1,
        }
        return {f"test/{name}": value for name, value in known.items() if value is not None}

    def figures(self, images: Sequence[Tensor] = (), columns: int = 6) -> dict[str, Any]:
        """Draws the charts.

        Args:
            images: The images of ``mistakes``, uint8, each ``(3, H, W)``.
            columns: Images in a row.

        Returns:
            matplotlib figures: ``confusion``, ``reliability``, and ``mistakes`` if there are images.
        """
        from vit_finetune.evaluation import plots

        names = [score.name for score in self.classes]
        curves = {"as trained": self.plain.bins, f"temperature {self.temperature:.2f}": self.calibrated.bins}
        drawn = {
            "confusion": plots.confusion_figure(self.confusion, names),
            "reliability": plots.reliability_figure(curves),
        }
        if len(images):
            captions = [
                f"{one_line(m.path)}\ntrue: {shorten(m.true, 20)}\n"
                f"said: {shorten(m.predicted, 13)} {100 * m.probability:.1f} %"
                for m in self.mistakes
            ]
            drawn["mistakes"] = plots.image_grid(images, captions, columns)
        return drawn

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; what is unknown is ``None``."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def save(self, folder: Path, images: Sequence[Tensor] = ()) -> dict[str, Any]:
        """Writes ``report.json``, ``report.md``, ``confusion.png``, ``reliability.png`` and ``mistakes.png``.

        Args:
            folder: Where to write; made if it is missing.
            images: The images of ``mistakes``; without them there is no ``mistakes.png``.

        Returns:
            The charts, see :meth:`figures`.
        """
        from vit_finetune.evaluation.report_writer import markdown

        folder.mkdir(parents=True, exist_ok=True)
        charts = self.figures(images)
        for name, figure in charts.items():
            figure.savefig(folder / f"{name}.png")
        # Bytes that are no text become lone surrogates, which json.loads and os.fsencode turn back into the same bytes.
        (folder / "report.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(markdown(self, list(charts)), encoding="utf-8")
        return charts


def _proportion(right: Tensor) -> Proportion:
    """Counts, with the interval of Wilson (1927), which holds for few images and near 0 and 1 too."""
    n, p, z = len(right), float(right.double().mean()), 1.959964
    center, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((center + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
    return Proportion(p, max(0.0, low), min(1.0, high))


def _calibration(logits: Tensor, labels: Tensor) -> Calibration:
    probabilities = logits.softmax(-1)
    confidence, predicted = probabilities.max(-1)
    return Calibration(
        loss=float(F.cross_entropy(logits, labels)),
        ece=float(multiclass_calibration_error(probabilities, labels, logits.shape[1], n_bins=BINS, norm="l1")),
        bins=reliability_bins(confidence, predicted == labels),
    )


def _class_metrics(predicted: Tensor, labels: Tensor, names: Sequence[str], matrix: Tensor) -> list[ClassMetrics]:
    """What torchmetrics calls 0 where nothing is known becomes ``None``."""
    support, taken = matrix.sum(1), matrix.sum(0)
    columns = [
        [float(value) if number else None for value, number in zip(values, known, strict=True)]
        for values, known in (
            (multiclass_precision(predicted, labels, len(names), average="none"), taken),
            (multiclass_recall(predicted, labels, len(names), average="none"), support),
            (multiclass_f1_score(predicted, labels, len(names), average="none"), support),
        )
    ]
    return [ClassMetrics(*row) for row in zip(names, *columns, support.tolist(), strict=True)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mistakes(
    probabilities: Tensor, labels: Tensor, names: Sequence[str], paths: Sequence[str] | None
) -> list[Mistake]:
    confidence, predicted = probabilities.max(-1)
    wrong = (predicted != labels).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:WORST].tolist()
    return [
        Mistake(i, paths[i] if paths else str(i), names[int(labels[i])], names[int(predicted[i])], float(confidence[i]))
        for i in worst
    ]


def _plain(value: Any) -> Any:
    """Dataclasses, named tuples and tensors as dicts and lists; NaN, which JSON does not know, as ``None``."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
