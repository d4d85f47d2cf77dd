"""Looks through a data set, before anything is trained on it, for what would stop or spoil a training."""

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
from vit_finetune.data.decode import EXTENSIONS, BrokenPicture, decode
from vit_finetune.data.file_listing import SYSTEM_FOLDERS, list_classes, report, try_files
from vit_finetune.data.image_folder import SPLITS, ImageFolder

TINY = 32  # pixels; a shorter side below shows less than a picture of CIFAR-10
LONG = 3.0  # times the shorter side; the centre cut leaves out two thirds of what is longer
HUGE = 50e6  # pixels; more than most cameras have, and slow to decode
UNEVEN = 10.0  # times the smallest class
HARMLESS = "equal pictures in the same split and class"


class Picture(NamedTuple):
    """What is kept of a picture that can be read."""

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
    read: Callable[[Picture], Tensor]
    """Returns the pixels of a picture, uint8 ``(3, H, W)``."""
    pictures: list[Picture] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Number of readable pictures by split and class."""
        return Counter((picture.split, picture.label) for picture in self.pictures)

    @property
    def problems(self) -> int:
        """Number of findings that have to be mended."""
        return sum(finding.problem for finding in self.findings)


def check(data: ImageDataModule, known: list[str] | None = None) -> DataCheck:
    """Decodes every picture once and keeps its name, size and hash.

    Args:
        data: A folder of pictures is looked through as it lies on the disk, before anything is split off at random; of
            other data sets the training, validation and test pictures are.
        known: The classes of a model that the data is meant for.

    Raises:
        MisconfigurationException: There is nothing to look through.
    """
    data.prepare_data()
    found, looks = _folder(data, known) if isinstance(data, ImageFolder) else _sets(data)
    broken = []
    for look in looks:
        if isinstance(look, BrokenPicture):
            broken.append(str(look))
        else:
            found.pictures.append(look)
    if broken:
        found.findings.append(Finding(True, "files that cannot be read", broken))
    found.findings += [*_missing(found), *_copies(found), *_odd_sizes(found.pictures), *_uneven(found)]
    found.findings.sort(key=lambda finding: not finding.problem)
    return found


# Where the pictures come from


def _folder(data: ImageFolder, known: list[str] | None) -> tuple[DataCheck, Iterator[Picture | BrokenPicture]]:
    if problem := data.missing():
        raise MisconfigurationException(problem)
    trees = {split: data.root / split for split in SPLITS if (data.root / split).is_dir()} or {"all": data.root}
    classes = {split: list_classes(tree) for split, tree in trees.items()}
    if not any(paths for tree in classes.values() for paths in tree.values()):
        raise MisconfigurationException(
            f"--data.root {data.root} has no pictures in class folders. They lie in root/<class>/ or "
            "root/train/<class>/."
        )
    names = known or sorted(classes.get("train") or set().union(*classes.values()))
    found = DataCheck(names, list(trees), read=lambda picture: decode(picture.path))
    for split, tree in classes.items():
        unknown = sorted(set(tree) - set(names))
        if unknown:
            folders = [str(trees[split] / name) for name in unknown]
            found.findings.append(Finding(True, f"{split}: unknown classes", folders))
    listed = {path for tree in classes.values() for paths in tree.values() for path in paths}
    found.findings += _left_out(data.root, listed)

    def looks() -> Iterator[Picture | BrokenPicture]:
        for split, tree in classes.items():
            places = {path: (label, path, i) for label, paths in tree.items() for i, path in enumerate(paths)}

            def look(path: str, split: str = split, places: dict[str, tuple[str, str, int]] = places) -> Picture:
                return _look(split, *places[path], decode(path))

            yield from try_files(look, list(places), f"{split}: pictures checked")

    return found, looks()


def _sets(data: ImageDataModule) -> tuple[DataCheck, Iterator[Picture | BrokenPicture]]:
    data.setup("fit")
    data.setup("test")
    names = data.class_names or []
    sets = {split: data.sets[split] for split in SPLITS}

    def looks() -> Iterator[Picture | BrokenPicture]:
        for split, pictures in sets.items():
            for i in report(range(len(pictures)), f"{split}: pictures checked", len(pictures)):
                image = pictures.images_at(torch.tensor([i]))[0]
                yield _look(split, names[int(pictures.labels[i])], pictures.names[i], i, image)

    def read(picture: Picture) -> Tensor:
        return sets[picture.split].images_at(torch.tensor([picture.position]))[0]

    return DataCheck(names, list(sets), read), looks()


def _look(split: str, label: str, path: str, position: int, image: Tensor) -> Picture:
    _, height, width = image.shape
    digest = hashlib.blake2b(f"{width} {height}".encode(), digest_size=16)
    digest.update(image.contiguous().numpy().data)
    return Picture(split, label, path, position, width, height, digest.digest())


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
        yield Finding(False, "pictures outside the class folders, left out", stray)


def _missing(found: DataCheck) -> Iterator[Finding]:
    counts = found.counts
    for split in found.splits:
        lacking = [name for name in found.class_names if not counts[split, name]]
        if lacking:
            yield Finding(True, f"{split}: classes without pictures", lacking)


def _copies(found: DataCheck) -> Iterator[Finding]:
    """Groups of equal pictures, each under the worst that it does."""
    groups: dict[bytes, list[Picture]] = defaultdict(list)
    for picture in found.pictures:
        groups[picture.digest].append(picture)
    divided = {"all"} if "val" in found.splits else {"all", "train"}  # these are split further, at random

    def kind(group: list[Picture]) -> str:
        if len({picture.split for picture in group}) > 1:
            return "equal pictures in several splits"
        if len({picture.label for picture in group}) > 1:
            return "equal pictures in several classes"
        return "equal pictures that a random split can tear apart" if group[0].split in divided else HARMLESS

    kinds: dict[str, list[str]] = defaultdict(list)
    for group in groups.values():
        if len(group) > 1:
            kinds[kind(group)].append(" = ".join(picture.path for picture in group))
    for text, copies in kinds.items():
        yield Finding(text != HARMLESS, text, copies)


def _odd_sizes(pictures: list[Picture]) -> Iterator[Finding]:
    kinds: dict[str, Callable[[int, int], bool]] = {
        f"pictures with a side of less than {TINY} pixels": lambda short, _: short < TINY,
        f"pictures more than {LONG:g} times as long as wide, of which the centre cut leaves out most": (
            lambda short, longer: longer > LONG * short
        ),
        f"pictures of more than {HUGE / 1e6:g} million pixels, slow to decode": lambda short, longer: (
            short * longer > HUGE
        ),
    }
    for text, is_odd in kinds.items():
        odd = [p for p in pictures if is_odd(*sorted((p.width, p.height)))]
        if odd:
            yield Finding(False, text, [f"{p.path} ({p.width} x {p.height})" for p in odd])


def _uneven(found: DataCheck) -> Iterator[Finding]:
    split, counts = found.splits[0], found.counts
    known = sorted((counts[split, name], name) for name in found.class_names if counts[split, name])
    if known and known[-1][0] > UNEVEN * known[0][0]:
        (least, rare), (most, common) = known[0], known[-1]
        yield Finding(False, f"{split}: uneven classes, from {least} of {rare} to {most} of {common}")
