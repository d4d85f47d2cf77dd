"""Weights of the classes in the training loss, for datasets with few images of some classes."""

import math
from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from vit_finetune.formatting import shorten

BALANCED = "balanced"
IMBALANCED = 10  # images of the largest class over those of the smallest, from which fit and check-data say so
SHOWN = 100  # characters of a list in a message


def for_training(
    option: str | Sequence[float] | None, class_names: Sequence[str], counts: Sequence[int] | None, device: torch.device
) -> Tensor | None:
    """Return the weights of ``--model.class_weights``; without weights, warn if the classes are imbalanced.

    ``balanced`` is N / (C * n) for a class with n of the N training images, as in scikit-learn's
    ``class_weight="balanced"``: each of the C classes has the same sum of weights, and their mean over all images is 1.

    Args:
        option: ``balanced``, one positive number for each class, or ``None``.
        class_names: In the order of the labels.
        counts: Training images of each class; ``None`` if unknown.
        device: Device of the loss.

    Returns:
        float32, shape ``(C,)``; ``None`` for an unweighted loss.

    Raises:
        MisconfigurationException: The value does not fit the classes or their training images.
    """
    if reason := invalid_reason(option, class_names):
        raise MisconfigurationException(reason)
    if option is None:
        if extremes := imbalance(class_names, counts or ()):
            least, rare, most, common = extremes
            rank_zero_warn(
                f"The classes are imbalanced, from {least} training images of {rare} to {most} of {common}. "
                f"--model.class_weights {BALANCED} weights the loss, and --best_checkpoint.monitor val/acc_macro "
                "selects the checkpoint by the mean accuracy of the classes."
            )
        return None
    weights = _balanced(class_names, counts) if option == BALANCED else option
    return torch.tensor(weights, dtype=torch.float32, device=device)


def invalid_reason(option: str | Sequence[float] | None, class_names: Sequence[str] | None) -> str | None:
    """Return why a value of ``--model.class_weights`` is not valid, ``None`` if it is.

    Args:
        option: As given.
        class_names: In the order of the labels; ``None`` if not known yet.
    """
    if option is None or option == BALANCED:
        return None
    given = f"--model.class_weights {shorten(str(option), SHOWN)}"
    if isinstance(option, str):
        return f"{given}: expected {BALANCED}, a list of one positive number for each class, or null."
    if wrong := [weight for weight in option if not 0 < weight < math.inf]:
        return f"{given}: {wrong[0]} is not a positive number; expected one for each class, or {BALANCED}."
    if class_names is not None and len(option) != len(class_names):
        names = shorten(", ".join(class_names), SHOWN)
        return (
            f"{given} has the length {len(option)}; expected one positive number for each of the {len(class_names)} "
            f"classes ({names}), or {BALANCED}."
        )
    return None


def _balanced(class_names: Sequence[str], counts: Sequence[int] | None) -> list[float]:
    given = f"--model.class_weights {BALANCED}"
    if counts is None:
        raise MisconfigurationException(
            f"{given} needs the class counts of an ImageDataModule; expected a list of one positive number for each "
            "class instead."
        )
    if empty := [name for name, count in zip(class_names, counts, strict=True) if not count]:
        raise MisconfigurationException(
            f"{given}: no training images of {shorten(', '.join(empty), SHOWN)}; expected at least one of each class. "
            "Add images, or set a list of one positive number for each class."
        )
    return [sum(counts) / (len(counts) * count) for count in counts]


def imbalance(class_names: Sequence[str], counts: Sequence[int]) -> tuple[int, str, int, str] | None:
    """Return the smallest and the largest of imbalanced classes: images and name of each; ``None`` if balanced.

    Args:
        class_names: In the order of ``counts``.
        counts: Images of each class; classes without images do not count.
    """
    known = sorted((count, name) for count, name in zip(counts, class_names, strict=False) if count)
    if not known or known[-1][0] < IMBALANCED * known[0][0]:
        return None
    return *known[0], *known[-1]
