"""Test report: metrics per class, confidence intervals, calibration and the worst mistakes of a trained model."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
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

MAX_MISTAKES = 24


class Proportion(NamedTuple):
    """Fraction of images with its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """Quality of the predicted probabilities."""

    loss: float
    """Mean negative log-likelihood of the true class, in nats."""
    ece: float
    """Expected calibration error: mean distance between confidence and accuracy over 15 bins of equal width (Guo et
    al. 2017, arXiv:1706.04599), between 0 and 1."""
    bins: Bins
    """Points of the reliability diagram."""


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class; ``None`` where they are undefined."""

    name: str
    precision: float | None
    """Fraction of the images predicted as this class that belong to it; ``None`` if there are none."""
    recall: float | None
    """Fraction of the images of this class that are predicted as it; ``None`` if there are none."""
    f1: float | None
    """Harmonic mean of precision and recall; ``None`` without images of this class."""
    support: int
    """Number of images of this class."""


@dataclass(frozen=True)
class Mistake:
    """A misclassified image."""

    index: int
    """Row in the logits."""
    path: str
    true: str
    predicted: str
    probability: float
    """Calibrated probability of the predicted class."""


@dataclass(frozen=True)
class Report:
    """Results of a test, computed in float32; create it with :meth:`from_logits`."""

    images: int
    """Number of images."""
    top1: Proportion
    top5: Proportion | None
    """``None`` with five classes or fewer."""
    acc_macro: float
    """Mean accuracy of the classes that have images: equal to ``macro.recall``, and logged as ``test/acc_macro``."""
    temperature: float
    uncalibrated: Calibration
    """Of the probabilities at temperature 1."""
    calibrated: Calibration
    """Of the probabilities at ``temperature``."""
    classes: list[ClassMetrics]
    macro: ClassMetrics
    """Means over the classes for which a metric is defined."""
    confusion: Tensor
    """Confusion matrix, int64, shape ``(C, C)``: true classes in rows, predictions in columns."""
    mistakes: list[Mistake]
    """Up to 24 wrong predictions, the most confident first."""
    about: dict[str, str] = field(default_factory=dict)
    """Origin of the predictions: checkpoint, data, precision."""

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
        """Compute all metrics.

        Args:
            logits: Any floating-point type, shape ``(N, C)``.
            labels: int64, shape ``(N,)``.
            class_names: In the order of the labels.
            temperature: Divisor of the logits, fitted on other images than these.
            paths: One per image; defaults to the row in the logits.
            about: Origin of the predictions.

        Raises:
            ValueError: The list of images is empty.
        """
        logits, labels, count = logits.detach().float().cpu(), labels.cpu(), len(class_names)
        if not len(labels):
            raise ValueError("A report needs at least one image.")
        predicted = logits.argmax(-1)
        top5 = (logits.topk(5).indices == labels[:, None]).any(1) if count > 5 else None
        confusion = multiclass_confusion_matrix(predicted, labels, count)
        classes = _class_metrics(predicted, labels, class_names, confusion)
        macro = _macro(classes)
        assert macro.recall is not None
        return cls(
            images=len(labels),
            top1=_proportion(predicted == labels),
            top5=None if top5 is None else _proportion(top5),
            acc_macro=macro.recall,
            temperature=temperature,
            uncalibrated=_calibration(logits, labels),
            calibrated=_calibration(logits / temperature, labels),
            classes=classes,
            macro=macro,
            confusion=confusion,
            mistakes=_mistakes((logits / temperature).softmax(-1), labels, class_names, paths),
            about=dict(about or {}),
        )

    def scalars(self) -> dict[str, float]:
        """Return the metrics other than loss and accuracy by their TensorBoard tags."""
        values = {
            "temperature": self.temperature,
            "loss_calibrated": self.calibrated.loss,
            "ece": self.uncalibrated.ece,
            "ece_calibrated": self.calibrated.ece,
            "precision": self.macro.precision,
            "recall": self.macro.recall,
            "f1": self.macro.f1,
        }
        return {f"test/{name}": value for name, value in values.items() if value is not None}

    def to_dict(self) -> dict[str, object]:
        """Return all fields as plain values for JSON; undefined values are ``None``."""
        plain: dict[str, object] = _plain(self)
        return plain


def _proportion(correct: Tensor) -> Proportion:
    """Return the fraction with Wilson's interval (1927), which also holds for few images and near 0 and 1."""
    n, p, z = len(correct), float(correct.double().mean()), 1.959964
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


def _class_metrics(predicted: Tensor, labels: Tensor, names: Sequence[str], confusion: Tensor) -> list[ClassMetrics]:
    """Return the metrics of each class, with ``None`` where torchmetrics returns 0 for an undefined value."""
    support, predictions = confusion.sum(1), confusion.sum(0)
    columns = [
        [float(value) if number else None for value, number in zip(values, numbers, strict=True)]
        for values, numbers in (
            (multiclass_precision(predicted, labels, len(names), average="none"), predictions),
            (multiclass_recall(predicted, labels, len(names), average="none"), support),
            (multiclass_f1_score(predicted, labels, len(names), average="none"), support),
        )
    ]
    return [ClassMetrics(*row) for row in zip(names, *columns, support.tolist(), strict=True)]


def _macro(classes: Sequence[ClassMetrics]) -> ClassMetrics:
    return ClassMetrics(
        name="mean over classes",
        precision=_mean(row.precision for row in classes),
        recall=_mean(row.recall for row in classes),
        f1=_mean(row.f1 for row in classes),
        support=sum(row.support for row in classes),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def _mistakes(
    probabilities: Tensor, labels: Tensor, names: Sequence[str], paths: Sequence[str] | None
) -> list[Mistake]:
    confidence, predicted = probabilities.max(-1)
    wrong = (predicted != labels).nonzero().flatten()
    worst = wrong[confidence[wrong].argsort(descending=True, stable=True)][:MAX_MISTAKES].tolist()
    return [
        Mistake(i, paths[i] if paths else str(i), names[int(labels[i])], names[int(predicted[i])], float(confidence[i]))
        for i in worst
    ]


def _plain(value: object) -> Any:
    """Convert dataclasses, named tuples and tensors to dicts and lists; NaN, which JSON does not have, to ``None``."""
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
