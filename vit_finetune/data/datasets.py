"""Datasets of labeled images that return whole batches."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from typing_extensions import Required, Self, TypedDict, override

from vit_finetune.data.decode import MAX_PIXELS, Resize, Source, decode
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
    aspect: Tensor
    """float32, shape ``(B,)``: width over height of the original images, if they were stretched to be stored."""
    target: Tensor
    """float32, shape ``(B, C)``: soft targets, only with mixup or cutmix."""
    error: list[str | None]
    """Why an image could not be decoded; only from :class:`UnlabeledImageDataset`."""


class ImageDataset(Dataset[Batch]):
    """Images with labels and names; a subclass implements ``images_at``.

    A DataLoader calls ``__getitems__`` once per batch, so a dataset in memory needs one index operation per batch.

    Args:
        labels: int64, shape ``(N,)``; -1 if unknown.
        names: One per image: its path, or its position in the source.
        aspects: Width over height of the original images, float32 ``(N,)``, if they are stretched; ``None`` if not.
    """

    def __init__(self, labels: Tensor, names: Sequence[str], aspects: Tensor | None = None) -> None:
        self.labels = labels
        self.names = list(names)
        self.aspects = aspects

    def images_at(self, positions: Tensor) -> Tensor:
        """Return uint8 ``(B, 3, H, W)`` for int64 ``(B,)`` positions."""
        raise NotImplementedError

    def subset(self, positions: Tensor) -> Self:
        """Return a dataset of the same kind with only these images, in this order."""
        part = copy.copy(self)
        part.labels = self.labels[positions]
        part.names = [self.names[position] for position in positions.tolist()]
        part.aspects = None if self.aspects is None else self.aspects[positions]
        return part

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
        batch: Batch = {
            "image": self.images_at(real),
            "label": self.labels[real].masked_fill(padding, UNKNOWN),
            "index": real.masked_fill(padding, UNKNOWN),
        }
        if self.aspects is not None:
            batch["aspect"] = self.aspects[real]
        return batch


class InMemoryDataset(ImageDataset):
    """Decoded images of one size, held in memory.

    Args:
        images: uint8, shape ``(N, 3, H, W)``.
        labels: int64, shape ``(N,)``.
        names: One per image.
        aspects: See :class:`ImageDataset`.
    """

    def __init__(self, images: Tensor, labels: Tensor, names: Sequence[str], aspects: Tensor | None = None) -> None:
        super().__init__(labels, names, aspects)
        self.images = images

    @override
    def images_at(self, positions: Tensor) -> Tensor:
        return self.images[positions]

    @override
    def subset(self, positions: Tensor) -> Self:
        part = super().subset(positions)
        part.images = self.images[positions]
        return part


def as_path(name: str) -> Source:
    """Return the name of an image as the path of its file."""
    return name


@dataclass(frozen=True)
class ImageReader:
    """Function from the name of an image to its pixels.

    Attributes:
        size: Height and width of the result; ``None`` for those of the image.
        resize: ``crop`` or ``stretch``, see :func:`~vit_finetune.data.decode.decode`.
        crop_pct: Fraction of the height and width that a crop keeps.
        max_pixels: Larger images are refused.
        source: Function from the name of an image to its path or its encoded content.
    """

    size: tuple[int, int] | None = (224, 224)
    resize: Resize = "crop"
    crop_pct: float = 1.0
    max_pixels: int = MAX_PIXELS
    source: Callable[[str], Source] = as_path

    def __call__(self, name: str) -> Tensor:
        """Return the pixels, uint8 ``(3, *size)``.

        Raises:
            ImageDecodeError: The image cannot be read; the message starts with its name.
        """
        return decode(
            self.source(name), self.size, resize=self.resize, crop_pct=self.crop_pct, max_pixels=self.max_pixels
        )


class ImageFileDataset(ImageDataset):
    """Images that are decoded each time they are read.

    Args:
        names: Paths of files, or the names that ``reader.source`` knows.
        labels: int64, shape ``(N,)``.
        reader: Decodes an image to a fixed size.
        aspects: See :class:`ImageDataset`.
    """

    def __init__(
        self,
        names: Sequence[str],
        labels: Tensor,
        reader: ImageReader = ImageReader(),  # immutable
        aspects: Tensor | None = None,
    ) -> None:
        super().__init__(labels, names, aspects)
        self.reader = reader

    @override
    def images_at(self, positions: Tensor) -> Tensor:
        return torch.stack([self.image_at(position) for position in positions.tolist()])

    def image_at(self, position: int) -> Tensor:
        """Decode one image to uint8 ``(3, H, W)``.

        Raises:
            ImageDecodeError: The file cannot be read; the message starts with its path.
        """
        return self.reader(self.names[position])


class UnlabeledImageDataset(ImageFileDataset):
    """Images to predict; those that cannot be decoded do not stop the run.

    A batch has one more entry, ``error``: for each image ``None``, or the reason why it cannot be decoded. Such an
    image is black.

    Args:
        names: Paths of files, or the names that ``reader.source`` knows.
        reader: Decodes an image to a fixed size.
    """

    def __init__(self, names: Sequence[str], reader: ImageReader) -> None:
        super().__init__(names, torch.full((len(names),), UNKNOWN), reader)
        self.errors: dict[int, str] = {}

    @override
    def image_at(self, position: int) -> Tensor:
        try:
            return super().image_at(position)
        except ImageDecodeError as error:
            self.errors[position] = str(error).removeprefix(f"{self.names[position]!r}: ")
            assert self.reader.size is not None
            return torch.zeros(3, *self.reader.size, dtype=torch.uint8)

    @override
    def __getitems__(self, positions: list[int]) -> Batch:
        batch = super().__getitems__(positions)
        batch["error"] = [self.errors.pop(position, None) for position in batch["index"].tolist()]
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
