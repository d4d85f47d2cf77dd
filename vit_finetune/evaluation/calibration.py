"""How far probabilities can be believed: temperature scaling (Guo et al. 2017, arXiv:1706.04599)."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 4.0  # beyond a factor of four either way, the images are too few, or too easy, to tell
BINS = 15  # of equal width, the number that Guo et al. use for the expected calibration error


class Bins(NamedTuple):
    """Predictions sorted by how sure they are, one entry a bin of equal width; NaN where a bin is empty."""

    confidence: Tensor
    """Mean probability of the predicted class, float64, shape ``(bins,)``."""
    accuracy: Tensor
    """Share of right predictions, float64, shape ``(bins,)``."""
    images: Tensor
    """Number of images, int64, shape ``(bins,)``."""


def reliability_bins(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Bins:
    """Sorts predictions by their confidence, for a reliability diagram.

    Args:
        confidence: Probability of the predicted class, between 0 and 1, shape ``(N,)``.
        correct: Whether the prediction is right, shape ``(N,)``.
        bins: Number of bins between 0 and 1.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype)
    place = (torch.bucketize(confidence, edges, right=True) - 1).clamp(max=bins - 1)
    count = torch.bincount(place, minlength=bins)
    sure, right = (torch.bincount(place, values.double(), bins) for values in (confidence, correct))
    return Bins(sure / count, right / count, count)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Finds the divisor of the logits under which the probabilities explain held-out labels best.

    It changes no prediction, only how sure each one claims to be. Fitted on validation images, it is stored in the
    checkpoint and used by every probability that this project hands out; losses are always those of plain logits.

    Args:
        logits: float32, shape ``(N, C)``.
        labels: int64, shape ``(N,)``.

    Returns:
        The temperature with the least cross-entropy, between 1/4 and 4; above 1 for an overconfident network.
    """
    logits, labels = logits.detach().double().cpu(), labels.cpu()
    low, high = -math.log(LARGEST), math.log(LARGEST)

    def slope(log_temperature: float) -> float:
        with torch.enable_grad(), torch.inference_mode(False):
            x = torch.tensor(log_temperature, dtype=torch.float64, requires_grad=True)
            loss = F.cross_entropy(logits.clone() / x.exp(), labels)
            return float(torch.autograd.grad(loss, x)[0])

    for _ in range(30):  # bisection: cross-entropy is convex in 1 / temperature, so the slope changes its sign once
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) >= 0 else (middle, high)
    return math.exp((low + high) / 2)
