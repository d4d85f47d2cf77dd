"""Datasets of labeled images that return whole batches."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from typing_extensions import Required, TypedDict, override

from vit_finetune.data.decode import decode
from vit_finetune.errors import ImageDecodeError

UNKNOWN = -1


class Batch(TypedDict, total=False):
    """A batch of ``B`` images, before and after augmentation."""

    image: Required[Tensor]
    """uint8, shape ``(B, 3, H, W)``."""
    label: Required[Tensor]
    """int64, shape ``(B,)``; -1 if unknown. With mixup or cutmix, the dominant label: the argmax of ``target``."""
    index: Required[Tensor]
    """int64, shape ``(B,)``: the image's position in its dataset; -1 for a padding sample, which fills up a batch so
    that all processes have equally many."""
    target: Tensor
    """float32, shape ``(B, C)``: soft targets, only with mixup or cutmix."""
    error: list[str | None]
    """Why an image could not be decoded; only from :class:`UnlabeledImageDataset`."""


class ImageDataset(Dataset[Batch]):
    """Images with labels and names; subclasses implement ``images_at`` and ``subset``.

    A DataLoader calls ``__getitems__`` once per batch, so a dataset in memory needs one index operation per batch.

    Args:
        labels: int64, shape ``(N,)``; -1 if unknown.
        names: One per image: its path, or its position in the source.
    """

    def __init__(self, labels: Tensor, names: Sequence[str]) -> None:
        self.labels = labels
        self.names = list(names)

    def images_at(self, positions: Tensor) -> Tensor:
        """Return uint8 ``(B, 3, H, W)`` for int64 ``(B,)`` positions."""
        raise NotImplementedError

    def subset(self, positions: Tensor) -> "ImageDataset":
        """Return a dataset of the same kind with only these images, in this order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.names)

    @override
    def __getitem__(self, position: int) -> Batch:
        batch = self.__getitems__([position])
        return {"image": batch["image"][0], "label": batch["label"][0], "index": batch["index"][0]}

    def __getitems__(self, positions: list[int]) -> Batch:
        """Return a batch; positions beyond the end, see ``DistributedEvalSampler``, become padding samples."""
        requested = torch.tensor(positions)
        real = requested % len(self)
        padding = requested >= len(self)
        return {
            "image": self.images_at(real),
            "label": self.labels[real].masked_fill(padding, UNKNOWN),
            "index": real.masked_fill(padding, UNKNOWN),
        }


class InMemoryDataset(ImageDataset):
    """Decoded images of one size, held in memory.

    Args:
        images: uint8, shape ``(N, 3, H, W)``.
        labels: int64, shape ``(N,)``.
        names: One per image.
    """

    def __init__(self, images: Tensor, labels: Tensor, names: Sequence[str]) -> None:
        super().__init__(labels, names)
        self.images = images

    @override
    def images_at(self, positions: Tensor) -> Tensor:
        return self.images[positions]

    @override
    def subset(self, positions: Tensor) -> "InMemoryDataset":
        names = [self.names[position] for position in positions.tolist()]
        return InMemoryDataset(self.images[positions], self.labels[positions], names)


class ImageFileDataset(ImageDataset):
    """Image files, decoded each time they are read.

    Args:
        paths: The files.
        labels: int64, shape ``(N,)``.
        size: Every image is resized and center-cropped to a square with sides of this many pixels.
    """

    def __init__(self, paths: Sequence[str], labels: Tensor, size: int = 224) -> None:
        super().__init__(labels, paths)
        self.size = size

    @override
    def images_at(self, positions: Tensor) -> Tensor:
        return torch.stack([self.image_at(position) for position in positions.tolist()])

    def image_at(self, position: int) -> Tensor:
        """Decode one image to uint8 ``(3, size, size)``.

        Raises:
            ImageDecodeError: The file cannot be read; the message starts with its path.
        """
        return decode(self.names[position], self.size)

    @override
    def subset(self, positions: Tensor) -> "ImageFileDataset":
        names = [self.names[position] for position in positions.tolist()]
        return ImageFileDataset(names, self.labels[positions], self.size)


class UnlabeledImageDataset(ImageFileDataset):
    """Image files to predict; files that cannot be decoded do not stop the run.

    A batch has one more entry, ``error``: for each image ``None``, or the reason why it cannot be decoded. Such an
    image is black.

    Args:
        paths: The files.
        size: Every image is resized and center-cropped to a square with sides of this many pixels.
    """

    def __init__(self, paths: Sequence[str], size: int) -> None:
        super().__init__(paths, torch.full((len(paths),), UNKNOWN), size)
        self.errors: dict[int, str] = {}

    @override
    def image_at(self, position: int) -> Tensor:
        try:
            return super().image_at(position)
        except ImageDecodeError as error:
            self.errors[position] = str(error).removeprefix(f"{self.names[position]!r}: ")
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8)

    @override
    def __getitems__(self, positions: list[int]) -> Batch:
        batch = super().__getitems__(positions)
        batch["error"] = [self.errors.get(position) for position in batch["index"].tolist()]
        return batch


def collate_shared(batch: Batch) -> Batch:
    """Return the batch as it is (datasets return whole batches), in shared memory if called in a worker process.

    Without this, the queue between the processes would move the tensors there in a background thread. If /dev/shm is
    full, that thread fails silently and the run hangs; here the error reaches the main process.
    """
    if get_worker_info() is not None:
        for value in batch.values():
            if isinstance(value, Tensor):
                value.share_memory_()
    return batch
