"""Names of splits and classes, as people write them."""

import re
from collections.abc import Iterable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from vit_finetune.data.decode import EXTENSIONS

SPLITS = ("train", "val", "test")
ACCEPTED_TYPES = f"accepted types are {' '.join(sorted(EXTENSIONS))}"
ALL = "all"  # images that are not assigned to a split yet
SPELLINGS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
Splits = dict[str, dict[str, list[str]]]
"""Names of the images by split and class; the only split may be ``all``, which is divided at random."""


def split_of(name: str) -> str | None:
    """Return ``train``, ``val`` or ``test`` for any usual spelling, in any case; ``None`` for other names."""
    return next((split for split, names in SPELLINGS.items() if name.lower() in names), None)


def names_split(name: str) -> bool:
    """Return True if a name has the name of a split as one of its words, such as ``set_train`` or ``test2017``."""
    words = re.findall("[a-z]+", name.lower())
    return any(word in names for names in SPELLINGS.values() for word in words)


def spellings() -> str:
    """Return the accepted names of splits for a message."""
    return "; ".join(f"{split}: {', '.join(names)}" for split, names in SPELLINGS.items())


def class_names(splits: Splits, known: list[str] | None, title: str) -> list[str]:
    """Return the classes of the model if they are known, otherwise those of the training images, sorted.

    Args:
        splits: The images.
        known: Class names of the model, or of the data if it states their order.
        title: Option that names the data, for messages.

    Raises:
        MisconfigurationException: A class has no training images, or a split has a class that the model does not know.
    """
    trained = splits.get("train") or splits.get(ALL)
    names = known or sort_classes(trained or set().union(*splits.values()))
    if known is None and trained is not None and (empty := [name for name in names if not trained[name]]):
        raise MisconfigurationException(f"{title}: no images of the class {', '.join(empty)}; {ACCEPTED_TYPES}.")
    for split, classes in splits.items():
        if unknown := sorted(set(classes) - set(names)):
            raise MisconfigurationException(
                f"{title}, {split}: unknown class: {', '.join(unknown)}. The classes are {', '.join(names)}."
            )
        if empty := [name for name in names if not classes.get(name)]:
            rank_zero_info(
                f"{title}, {split}: no images of {', '.join(empty)}. The labels of other classes do not change."
            )
    return names


def labels_of(classes: dict[str, list[str]], names: list[str]) -> tuple[list[str], Tensor]:
    """Return the names of the images of all classes, and their labels, int64 ``(N,)``.

    Args:
        classes: Names of the images by class.
        names: Class names in the order of the labels.
    """
    labels = [label for name, images in classes.items() for label in [names.index(name)] * len(images)]
    return [image for images in classes.values() for image in images], torch.tensor(labels).long()


def sort_classes(names: Iterable[str]) -> list[str]:
    """Sort class names: integers by value, anything else alphabetically."""
    found = list(names)
    return sorted(found, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, found)) else None)
