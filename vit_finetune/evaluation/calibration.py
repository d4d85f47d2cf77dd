"""Calibration of probabilities by temperature scaling (Guo et al. 2017, arXiv:1706.04599)."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TEMPERATURE = 4.0  # and at least 1/4: values beyond come from too few or too easily separable images
BINS = 15  # of equal width, as Guo et al. use for the expected calibration error


class Bins(NamedTuple):
    """Predictions grouped by confidence into bins of equal width."""

    confidence: Tensor
    """Mean probability of the predicted class, float64, shape ``(bins,)``; NaN for an empty bin."""
    accuracy: Tensor
    """Fraction of correct predictions, float64, shape ``(bins,)``; NaN for an empty bin."""
    images: Tensor
    """Number of images, int64, shape ``(bins,)``."""


def reliability_bins(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Bins:
    """Group predictions by confidence, for a reliability diagram.

    Args:
        confidence: Probability of the predicted class, shape ``(N,)``.
        correct: True where the prediction is correct, shape ``(N,)``.
        bins: Number of bins between 0 and 1.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype)
    indices = (torch.bucketize(confidence, edges, right=True) - 1).clamp(max=bins - 1)
    count = torch.bincount(indices, minlength=bins)
    confidence_sum, correct_sum = (torch.bincount(indices, values.double(), bins) for values in (confidence, correct))
    return Bins(confidence_sum / count, correct_sum / count, count)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Find the divisor of the logits that minimizes the cross-entropy of validation images.

    It changes no prediction, only the confidence. The checkpoint stores it, and all probabilities that are returned,
    written or exported use it; losses are those of the logits as they are.

    Args:
        logits: float32, shape ``(N, C)``.
        labels: int64, shape ``(N,)``.

    Returns:
        The temperature, between 1/4 and 4; above 1 if the network is overconfident. 1 for a single image, which says
        nothing about calibration.
    """
    if len(labels) < 2:
        return 1.0
    logits, labels = logits.detach().double().cpu(), labels.cpu()
    low, high = -math.log(MAX_TEMPERATURE), math.log(MAX_TEMPERATURE)

    def slope(log_temperature: float) -> float:
        with torch.enable_grad(), torch.inference_mode(False):
            x = torch.tensor(log_temperature, dtype=torch.float64, requires_grad=True)
            loss = F.cross_entropy(logits.clone() / x.exp(), labels)
            return float(torch.autograd.grad(loss, x)[0])

    for _ in range(30):  # bisection: cross-entropy is convex in 1 / temperature, so its slope changes sign once
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) >= 0 else (middle, high)
    return math.exp((low + high) / 2)
