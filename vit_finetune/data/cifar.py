"""CIFAR-10 and CIFAR-100 as published: 50,000 training and 10,000 test images of 32 by 32 pixels."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torchvision import datasets

from vit_finetune.data.datamodule import ImageDataModule
from vit_finetune.data.datasets import ImageDataset, InMemoryDataset
from vit_finetune.data.file_listing import find_images

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TIMEOUT = 5.0  # seconds without an answer after which a download counts as impossible


class CIFAR10(ImageDataModule):
    """CIFAR-10 (Krizhevsky 2009), downloaded once and checked against the published checksums.

    The published training images are split into training and validation; the published test images serve ``test``
    and ``predict`` only.

    Args:
        root: Folder that holds ``cifar-10-batches-py`` or receives it (170 MB).
        download: Download the dataset when it is missing.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    published: type[datasets.CIFAR10] = datasets.CIFAR10
    title = "CIFAR-10"
    names: list[str] | None = NAMES

    def __init__(self, root: str = "data", download: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = Path(root)
        self.download = download
        self.class_names = self.names
        self._verified = False

    def missing(self) -> str | None:
        """Says in a sentence why the dataset cannot be had, ``None`` if it can; downloads nothing."""
        if self._complete():
            return None
        if not self.download:
            return self._explain("--data.download is off")
        try:
            with urllib.request.urlopen(urllib.request.Request(self.published.url, method="HEAD"), timeout=TIMEOUT):
                return None
        except OSError as error:
            return self._explain(f"its server is out of reach ({error})")

    def prepare_data(self) -> None:
        """Downloads the dataset where it is missing; runs in one process a node.

        Raises:
            MisconfigurationException: It is missing and cannot be downloaded.
        """
        if self._complete():
            return
        if not self.download:
            raise MisconfigurationException(self._explain("--data.download is off"))
        if self.trainer is not None and self.trainer.state.fn == "predict" and find_images(self.root):
            raise MisconfigurationException(
                f"--data.root {self.root} holds images, not CIFAR-10. For your own images add --data ImageFolder."
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Two runs started at once must not write the same files; the second finds the work done.
            with FileLock(self.root / f".{self.published.base_folder}.lock"), _impatient_sockets():
                if not self._complete():
                    self.published(os.fspath(self.root), download=True)
        except (OSError, RuntimeError) as error:  # no network, a proxy's page instead of the archive, a full disk
            raise MisconfigurationException(self._explain(f"the download failed ({error})")) from error

    def load(self, stage: str) -> dict[str, ImageDataset]:
        """Reads the published files; checksums were compared before."""
        if stage in ("fit", "validate"):
            return self.split_train_val(self._read(train=True))
        test = self._read(train=False)
        return {"test": test, "predict": test}

    def _read(self, train: bool) -> ImageDataset:
        try:
            published = self.published(os.fspath(self.root), train=train)
        except RuntimeError as error:
            raise MisconfigurationException(self._explain("it was not prepared")) from error
        self.class_names = self.class_names or list(published.classes)
        images = torch.from_numpy(published.data).permute(0, 3, 1, 2).contiguous()
        split = "train" if train else "test"
        return InMemoryDataset(
            images, torch.tensor(published.targets), [f"{split}/{i:05d}" for i in range(len(images))]
        )

    def _complete(self) -> bool:
        if not self._verified:
            try:
                self.published(os.fspath(self.root))
            except RuntimeError:  # a file is missing or its checksum is wrong
                return False
            self._verified = True
        return True

    def _explain(self, reason: str) -> str:
        archive, folder = self.published.filename, self.published.base_folder
        found = [name for name in (archive, folder) if (self.root / name).exists()]
        state = f"has {' and '.join(found)}, incomplete or damaged" if found else f"has no {folder}"
        return (
            f"{self.title} is missing: --data.root {self.root} {state}, and {reason}. Either delete what is damaged "
            f"and start again with a network, or unpack the published {archive} into {self.root}. Without any "
            "download: fit --config configs/quickstart.yaml"
        )


class CIFAR100(CIFAR10):
    """CIFAR-100 (Krizhevsky 2009) with its 100 fine classes, downloaded once and checked like CIFAR-10.

    Args:
        root: Folder that holds ``cifar-100-python`` or receives it (169 MB).
        download: Download the dataset when it is missing.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    published = datasets.CIFAR100
    title = "CIFAR-100"
    names = None  # the published ones, read with the images


@contextmanager
def _impatient_sockets() -> Iterator[None]:
    """Lets a firewall that swallows packets cost seconds, not minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
