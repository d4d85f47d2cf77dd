"""Check a dataset for problems that would stop a training or falsify its metrics."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from vit_finetune.data.datamodule import ImageDataModule
from vit_finetune.data.decode import EXTENSIONS
from vit_finetune.data.file_listing import SYSTEM_FOLDERS, log_progress, try_files
from vit_finetune.data.image_files import ImageFiles
from vit_finetune.data.image_folder import ImageFolder
from vit_finetune.data.splits import ALL, SPLITS, sort_classes
from vit_finetune.errors import ImageDecodeError
from vit_finetune.model.class_weights import imbalance

TINY = 32  # pixels of the shorter side; CIFAR-10 has as many
LONG = 3.0  # aspect ratio; beyond it the center crop removes more than two thirds of the image
HUGE = 50e6  # pixels; more than most cameras have, and slow to decode
HARMLESS = "duplicates in the same split and class"


class ImageRecord(NamedTuple):
    """Properties of a readable image."""

    split: str
    label: str
    """Name of its class."""
    path: str
    position: int
    """Index in the split."""
    width: int
    height: int
    digest: bytes
    """Hash of size and pixels: finds duplicates with other names, file types and metadata."""


@dataclass(frozen=True)
class Finding:
    """A problem of the data, or a note."""

    problem: bool
    """It would stop a training or falsify its metrics; otherwise it is a note."""
    text: str
    details: list[str] = field(default_factory=list)
    """Files; a group of duplicates is one entry."""


@dataclass
class DataCheck:
    """Result of a check."""

    class_names: list[str]
    splits: list[str]
    read: Callable[[ImageRecord], Tensor]
    """Return the pixels of an image, uint8 ``(3, H, W)``."""
    images: list[ImageRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Number of readable images by split and class."""
        return Counter((image.split, image.label) for image in self.images)

    @property
    def problems(self) -> int:
        """Number of problems."""
        return sum(finding.problem for finding in self.findings)


def check(data: ImageDataModule, known: list[str] | None = None) -> DataCheck:
    """Decode every image once and look for problems.

    Args:
        data: Of image files, all are checked before any random split; of other datasets, the training, validation and
            test split.
        known: Classes of the model that the data is meant for.

    Raises:
        MisconfigurationException: The dataset is empty.
    """
    data.prepare_data()
    found, records = _of_files(data, known) if isinstance(data, ImageFiles) else _of_splits(data)
    broken = []
    for record in records:
        if isinstance(record, ImageDecodeError):
            broken.append(str(record))
        else:
            found.images.append(record)
    if broken:
        found.findings.append(Finding(True, "unreadable files", broken))
    found.findings += [*_empty_classes(found), *_duplicates(found), *_odd_sizes(found.images)]
    found.findings += _imbalance(found)
    found.findings.sort(key=lambda finding: not finding.problem)
    return found


# Sources of images


def _of_files(data: ImageFiles, known: list[str] | None) -> tuple[DataCheck, Iterator[ImageRecord | ImageDecodeError]]:
    if problem := data.unavailable_reason():
        raise MisconfigurationException(problem)
    splits = data.list_splits()
    if not any(images for classes in splits.values() for images in classes.values()):
        raise MisconfigurationException(f"{data.title} has no images in any class.")
    names = known or data.declared_classes or sort_classes(splits.get("train") or set().union(*splits.values()))
    found = DataCheck(names, list(splits), read=lambda image: data.reader(image.path))
    for split, classes in splits.items():
        if unknown := sorted(set(classes) - set(names)):
            listed_classes = [f"{name} ({len(classes[name])} images)" for name in unknown]
            found.findings.append(Finding(True, f"{split}: unknown classes", listed_classes))
    if isinstance(data, ImageFolder):
        listed = {image for classes in splits.values() for images in classes.values() for image in images}
        found.findings += _skipped_files(data.root, listed)

    def records() -> Iterator[ImageRecord | ImageDecodeError]:
        for split, classes in splits.items():
            places = {image: (label, image, i) for label, images in classes.items() for i, image in enumerate(images)}

            def record(image: str, split: str = split, places: dict[str, tuple[str, str, int]] = places) -> ImageRecord:
                return _record(split, *places[image], data.reader(image))

            listed = [image for images in classes.values() for image in images]  # a table may list an image twice
            yield from try_files(record, listed, f"{split}: images checked")

    return found, records()


def _of_splits(data: ImageDataModule) -> tuple[DataCheck, Iterator[ImageRecord | ImageDecodeError]]:
    data.setup("fit")
    data.setup("test")
    names = data.class_names or []
    datasets = {split: data.datasets[split] for split in SPLITS}

    def records() -> Iterator[ImageRecord | ImageDecodeError]:
        for split, dataset in datasets.items():
            for i in log_progress(range(len(dataset)), f"{split}: images checked", len(dataset)):
                image = dataset.images_at(torch.tensor([i]))[0]
                yield _record(split, names[int(dataset.labels[i])], dataset.names[i], i, image)

    def read(image: ImageRecord) -> Tensor:
        return datasets[image.split].images_at(torch.tensor([image.position]))[0]

    return DataCheck(names, list(datasets), read), records()


def _record(split: str, label: str, path: str, position: int, image: Tensor) -> ImageRecord:
    _, height, width = image.shape
    digest = hashlib.blake2b(f"{width} {height}".encode(), digest_size=16)
    digest.update(image.contiguous().numpy().data)
    return ImageRecord(split, label, path, position, width, height, digest.digest())


# Findings


def _skipped_files(root: Path, listed: set[str]) -> Iterator[Finding]:
    """Find files that training does not read, except hidden ones."""
    others: Counter[str] = Counter()
    stray = []
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name.lower() not in SYSTEM_FOLDERS)
        for name in sorted(names):
            extension = os.path.splitext(name)[1].lower()
            if name.startswith(".") or (path := str(Path(parent, name))) in listed:
                continue
            if extension in EXTENSIONS:
                stray.append(path)
            else:
                others[extension or "no extension"] += 1
    if others:
        counts = [f"{count} {extension}" for extension, count in sorted(others.items())]
        yield Finding(False, f"files of other types, skipped: {', '.join(counts)}")
    if stray:
        yield Finding(False, "images outside the class folders, skipped", stray)


def _empty_classes(found: DataCheck) -> Iterator[Finding]:
    counts = found.counts
    for split in found.splits:
        empty = [name for name in found.class_names if not counts[split, name]]
        if empty:
            yield Finding(True, f"{split}: classes without images", empty)


def _duplicates(found: DataCheck) -> Iterator[Finding]:
    """Find groups of equal images; each is reported once, under its most severe kind."""
    groups: dict[bytes, list[ImageRecord]] = defaultdict(list)
    for image in found.images:
        groups[image.digest].append(image)
    divided = {ALL} if "val" in found.splits else {ALL, "train"}  # split further at random

    def kind(group: list[ImageRecord]) -> str:
        if len({image.split for image in group}) > 1:
            return "duplicates in several splits"
        if len({image.label for image in group}) > 1:
            return "duplicates in several classes"
        return "duplicates that a random split can separate" if group[0].split in divided else HARMLESS

    kinds: dict[str, list[str]] = defaultdict(list)
    for group in groups.values():
        if len(group) > 1:
            kinds[kind(group)].append(" = ".join(image.path for image in group))
    for text, duplicates in kinds.items():
        yield Finding(text != HARMLESS, text, duplicates)


def _odd_sizes(images: list[ImageRecord]) -> Iterator[Finding]:
    kinds: dict[str, Callable[[int, int], bool]] = {
        f"images with a side of less than {TINY} pixels": lambda short, _: short < TINY,
        f"images with an aspect ratio over {LONG:g}, mostly removed by the center crop": (
            lambda short, longer: longer > LONG * short
        ),
        f"images of more than {HUGE / 1e6:g} million pixels, slow to decode": lambda short, longer: (
            short * longer > HUGE
        ),
    }
    for text, is_odd in kinds.items():
        odd = [p for p in images if is_odd(*sorted((p.width, p.height)))]
        if odd:
            yield Finding(False, text, [f"{p.path} ({p.width} x {p.height})" for p in odd])


def _imbalance(found: DataCheck) -> Iterator[Finding]:
    split, counts = found.splits[0], found.counts
    if extremes := imbalance(found.class_names, [counts[split, name] for name in found.class_names]):
        least, rare, most, common = extremes
        text = f"{split}: imbalanced classes, from {least} of {rare} to {most} of {common}"
        yield Finding(False, f"{text}; fit --model.class_weights balanced weights the loss")
