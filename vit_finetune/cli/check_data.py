"""Looks through a dataset, before anything is trained on it, for what would stop or spoil a training."""

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
from vit_finetune.data.decode import EXTENSIONS, decode
from vit_finetune.data.file_listing import SYSTEM_FOLDERS, list_classes, report, try_files
from vit_finetune.data.image_folder import SPLITS, ImageFolder
from vit_finetune.errors import ImageDecodeError

TINY = 32  # pixels; a shorter side below shows less than an image of CIFAR-10
LONG = 3.0  # times the shorter side; the center cut leaves out two thirds of what is longer
HUGE = 50e6  # pixels; more than most cameras have, and slow to decode
UNEVEN = 10.0  # times the smallest class
HARMLESS = "equal images in the same split and class"


class ImageRecord(NamedTuple):
    """What is kept of an image that can be read."""

    split: str
    label: str
    """The name of its class."""
    path: str
    position: int
    """Its place in the split."""
    width: int
    height: int
    digest: bytes
    """Hash of size and pixels: copies are found whatever their names, file types and metadata."""


@dataclass(frozen=True)
class Finding:
    """Something to know about the data."""

    problem: bool
    """Whether a training would be refused or its figures wrong; anything else is a note."""
    text: str
    details: list[str] = field(default_factory=list)
    """Files, one or a group of copies an entry."""


@dataclass
class DataCheck:
    """What was found."""

    class_names: list[str]
    splits: list[str]
    read: Callable[[ImageRecord], Tensor]
    """Returns the pixels of an image, uint8 ``(3, H, W)``."""
    images: list[ImageRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Number of readable images by split and class."""
        return Counter((image.split, image.label) for image in self.images)

    @property
    def problems(self) -> int:
        """Number of findings that have to be mended."""
        return sum(finding.problem for finding in self.findings)


def check(data: ImageDataModule, known: list[str] | None = None) -> DataCheck:
    """Decodes every image once and keeps its name, size and hash.

    Args:
        data: A folder of images is looked through as it lies on the disk, before anything is split off at random; of
            other datasets the training, validation and test images are.
        known: The classes of a model that the data is meant for.

    Raises:
        MisconfigurationException: There is nothing to look through.
    """
    data.prepare_data()
    found, looks = _folder(data, known) if isinstance(data, ImageFolder) else _sets(data)
    broken = []
    for look in looks:
        if isinstance(look, ImageDecodeError):
            broken.append(str(look))
        else:
            found.images.append(look)
    if broken:
        found.findings.append(Finding(True, "files that cannot be read", broken))
    found.findings += [*_missing(found), *_copies(found), *_odd_sizes(found.images), *_uneven(found)]
    found.findings.sort(key=lambda finding: not finding.problem)
    return found


# Where the images come from


def _folder(data: ImageFolder, known: list[str] | None) -> tuple[DataCheck, Iterator[ImageRecord | ImageDecodeError]]:
    if problem := data.missing():
        raise MisconfigurationException(problem)
    trees = {split: data.root / split for split in SPLITS if (data.root / split).is_dir()} or {"all": data.root}
    classes = {split: list_classes(tree) for split, tree in trees.items()}
    if not any(paths for tree in classes.values() for paths in tree.values()):
        raise MisconfigurationException(
            f"--data.root {data.root} has no images in class folders. They lie in root/<class>/ or root/train/<class>/."
        )
    names = known or sorted(classes.get("train") or set().union(*classes.values()))
    found = DataCheck(names, list(trees), read=lambda image: decode(image.path))
    for split, tree in classes.items():
        unknown = sorted(set(tree) - set(names))
        if unknown:
            folders = [str(trees[split] / name) for name in unknown]
            found.findings.append(Finding(True, f"{split}: unknown classes", folders))
    listed = {path for tree in classes.values() for paths in tree.values() for path in paths}
    found.findings += _left_out(data.root, listed)

    def looks() -> Iterator[ImageRecord | ImageDecodeError]:
        for split, tree in classes.items():
            places = {path: (label, path, i) for label, paths in tree.items() for i, path in enumerate(paths)}

            def look(path: str, split: str = split, places: dict[str, tuple[str, str, int]] = places) -> ImageRecord:
                return _look(split, *places[path], decode(path))

            yield from try_files(look, list(places), f"{split}: images checked")

    return found, looks()


def _sets(data: ImageDataModule) -> tuple[DataCheck, Iterator[ImageRecord | ImageDecodeError]]:
    data.setup("fit")
    data.setup("test")
    names = data.class_names or []
    sets = {split: data.datasets[split] for split in SPLITS}

    def looks() -> Iterator[ImageRecord | ImageDecodeError]:
        for split, images in sets.items():
            for i in report(range(len(images)), f"{split}: images checked", len(images)):
                image = images.images_at(torch.tensor([i]))[0]
                yield _look(split, names[int(images.labels[i])], images.names[i], i, image)

    def read(item: ImageRecord) -> Tensor:
        return sets[item.split].images_at(torch.tensor([item.position]))[0]

    return DataCheck(names, list(sets), read), looks()


def _look(split: str, label: str, path: str, position: int, image: Tensor) -> ImageRecord:
    _, height, width = image.shape
    digest = hashlib.blake2b(f"{width} {height}".encode(), digest_size=16)
    digest.update(image.contiguous().numpy().data)
    return ImageRecord(split, label, path, position, width, height, digest.digest())


# What may be wrong


def _left_out(root: Path, listed: set[str]) -> Iterator[Finding]:
    """Files that no training reads, hidden ones aside."""
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
        yield Finding(False, f"files of other types, left out: {', '.join(counts)}")
    if stray:
        yield Finding(False, "images outside the class folders, left out", stray)


def _missing(found: DataCheck) -> Iterator[Finding]:
    counts = found.counts
    for split in found.splits:
        lacking = [name for name in found.class_names if not counts[split, name]]
        if lacking:
            yield Finding(True, f"{split}: classes without images", lacking)


def _copies(found: DataCheck) -> Iterator[Finding]:
    """Groups of equal images, each under the worst that it does."""
    groups: dict[bytes, list[ImageRecord]] = defaultdict(list)
    for image in found.images:
        groups[image.digest].append(image)
    divided = {"all"} if "val" in found.splits else {"all", "train"}  # these are split further, at random

    def kind(group: list[ImageRecord]) -> str:
        if len({image.split for image in group}) > 1:
            return "equal images in several splits"
        if len({image.label for image in group}) > 1:
            return "equal images in several classes"
        return "equal images that a random split can tear apart" if group[0].split in divided else HARMLESS

    kinds: dict[str, list[str]] = defaultdict(list)
    for group in groups.values():
        if len(group) > 1:
            kinds[kind(group)].append(" = ".join(image.path for image in group))
    for text, copies in kinds.items():
        yield Finding(text != HARMLESS, text, copies)


def _odd_sizes(images: list[ImageRecord]) -> Iterator[Finding]:
    kinds: dict[str, Callable[[int, int], bool]] = {
        f"images with a side of less than {TINY} pixels": lambda short, _: short < TINY,
        f"images more than {LONG:g} times as long as wide, of which the center cut leaves out most": (
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


def _uneven(found: DataCheck) -> Iterator[Finding]:
    split, counts = found.splits[0], found.counts
    known = sorted((counts[split, name], name) for name in found.class_names if counts[split, name])
    if known and known[-1][0] > UNEVEN * known[0][0]:
        (least, rare), (most, common) = known[0], known[-1]
        yield Finding(False, f"{split}: uneven classes, from {least} of {rare} to {most} of {common}")
