"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images of 32 by 32 pixels."""

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
from typing_extensions import override

from vit_finetune.data.datamodule import ImageDataModule
from vit_finetune.data.datasets import ImageDataset, InMemoryDataset
from vit_finetune.data.file_listing import find_images

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TIMEOUT = 5.0  # seconds without a response after which a download fails


class CIFAR10(ImageDataModule):
    """CIFAR-10 (Krizhevsky 2009), downloaded once and verified by checksums.

    The official training images are split into training and validation; the official test images are used by ``test``
    and ``predict`` only.

    Args:
        root: Folder that contains ``cifar-10-batches-py``, or where to download it (170 MB).
        download: Download the dataset if it is missing.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    source: type[datasets.CIFAR10] = datasets.CIFAR10
    title = "CIFAR-10"
    names: list[str] | None = NAMES

    def __init__(self, root: str = "data", download: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = Path(root)
        self.download = download
        self.class_names = self.names
        self._verified = False

    @override
    def unavailable_reason(self) -> str | None:
        if self._complete():
            return None
        if not self.download:
            return self._explain("--data.download is false")
        try:
            with urllib.request.urlopen(urllib.request.Request(self.source.url, method="HEAD"), timeout=TIMEOUT):
                return None
        except OSError as error:
            return self._explain(f"its server cannot be reached ({error})")

    @override
    def prepare_data(self) -> None:
        if self._complete():
            return
        if not self.download:
            raise MisconfigurationException(self._explain("--data.download is false"))
        if self.trainer is not None and self.trainer.state.fn == "predict" and find_images(self.root):
            raise MisconfigurationException(
                f"--data.root {self.root} contains image files, not {self.title}. For your own images, use "
                "--data ImageFolder."
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Two runs that start at the same time must not write the same files; the second one waits.
            with FileLock(self.root / f".{self.source.base_folder}.lock"), _socket_timeout():
                if not self._complete():
                    self.source(os.fspath(self.root), download=True)
        except (OSError, RuntimeError) as error:  # no network, a proxy's page instead of the archive, disk full
            raise MisconfigurationException(self._explain(f"the download failed ({error})")) from error

    @override
    def load_datasets(self, stage: str) -> dict[str, ImageDataset]:
        if stage in ("fit", "validate"):
            return self.split_train_val(self._read(train=True))
        test = self._read(train=False)
        return {"test": test, "predict": test}

    def _read(self, train: bool) -> ImageDataset:
        try:
            source = self.source(os.fspath(self.root), train=train)
        except RuntimeError as error:
            raise MisconfigurationException(self._explain("prepare_data was not called")) from error
        self.class_names = self.class_names or list(source.classes)
        images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()
        split = "train" if train else "test"
        return InMemoryDataset(images, torch.tensor(source.targets), [f"{split}/{i:05d}" for i in range(len(images))])

    def _complete(self) -> bool:
        if not self._verified:
            try:
                self.source(os.fspath(self.root))
            except RuntimeError:  # a file is missing or its checksum is wrong
                return False
            self._verified = True
        return True

    def _explain(self, reason: str) -> str:
        archive, folder = self.source.filename, self.source.base_folder
        found = [name for name in (archive, folder) if (self.root / name).exists()]
        state = f"contains {' and '.join(found)}, incomplete or damaged" if found else f"does not contain {folder}"
        return (
            f"{self.title} is missing: --data.root {self.root} {state}, and {reason}. Delete damaged files and run "
            f"again with network access, or extract the official {archive} into {self.root}. To train without a "
            "download, use fit --config configs/quickstart.yaml."
        )


class CIFAR100(CIFAR10):
    """CIFAR-100 (Krizhevsky 2009) with its 100 fine classes, downloaded once and verified by checksums.

    Args:
        root: Folder that contains ``cifar-100-python``, or where to download it (169 MB).
        download: Download the dataset if it is missing.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    source = datasets.CIFAR100
    title = "CIFAR-100"
    names = None  # read from the dataset's own files


@contextmanager
def _socket_timeout() -> Iterator[None]:
    """Limit how long a connection may stall; a firewall that drops packets then costs seconds instead of minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
