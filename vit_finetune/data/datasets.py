"""Sets of labeled images that hand out whole batches, and the order in which they are visited."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit_finetune.data.decode import decode
from vit_finetune.errors import ImageDecodeError

Batch = dict[str, Any]
"""``image`` uint8 ``(B, 3, H, W)``; ``label`` int64 ``(B,)``, -1 where unknown; ``index`` int64 ``(B,)``, the image's
position in its set, -1 for a filler that only evens out the work of several processes. Files to predict also have
``error``, a list of ``None`` or text, see :class:`vit_finetune.data.datasets.UnlabeledImageDataset`. A training batch that was
mixed has ``target``, float32 ``(B, C)``; its ``label`` is the class with the largest share."""

UNKNOWN = -1


class ImageDataset(Dataset[Batch]):
    """Images with labels and names; a subclass knows where the pixels are.

    A DataLoader asks it for a batch at a time (``__getitems__``), so a set in memory costs one index operation a batch.

    Args:
        labels: int64, shape ``(N,)``, -1 where unknown.
        names: For each image its path, or where in the dataset it comes from.
    """

    def __init__(self, labels: Tensor, names: Sequence[str]) -> None:
        self.labels = labels
        self.names = list(names)

    def images_at(self, positions: Tensor) -> Tensor:
        """Returns uint8 ``(B, 3, H, W)`` for int64 ``(B,)`` positions."""
        raise NotImplementedError

    def subset(self, positions: Tensor) -> "ImageDataset":
        """Returns a set of the same kind with only these images, in this order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, position: int) -> Batch:
        return {key: value[0] for key, value in self.__getitems__([position]).items()}

    def __getitems__(self, positions: list[int]) -> Batch:
        """Returns a batch; positions beyond the end (see :class:`DistributedEvalSampler`) give fillers."""
        asked = torch.tensor(positions)
        real = asked % len(self)
        padding = asked >= len(self)
        return {
            "image": self.images_at(real),
            "label": self.labels[real].masked_fill(padding, UNKNOWN),
            "index": real.masked_fill(padding, UNKNOWN),
        }


class InMemoryDataset(ImageDataset):
    """Images of one size, decoded and held in memory.

    Args:
        images: uint8, shape ``(N, 3, H, W)``.
        labels: int64, shape ``(N,)``.
        names: One per image.
    """

    def __init__(self, images: Tensor, labels: Tensor, names: Sequence[str]) -> None:
        super().__init__(labels, names)
        self.images = images

    def images_at(self, positions: Tensor) -> Tensor:
        """Returns uint8 ``(B, 3, H, W)`` by one index operation."""
        return self.images[positions]

    def subset(self, positions: Tensor) -> "InMemoryDataset":
        """Returns the images at these positions as a set of their own."""
        names = [self.names[position] for position in positions.tolist()]
        return InMemoryDataset(self.images[positions], self.labels[positions], names)


class ImageFileDataset(ImageDataset):
    """Images that are decoded each time they are asked for.

    Args:
        paths: The files.
        labels: int64, shape ``(N,)``.
        size: Side in pixels of the square that every image becomes.
    """

    def __init__(self, paths: Sequence[str], labels: Tensor, size: int = 224) -> None:
        super().__init__(labels, paths)
        self.size = size

    def images_at(self, positions: Tensor) -> Tensor:
        """Decodes a batch, uint8 ``(B, 3, size, size)``.

        Raises:
            ImageDecodeError: Names the first file that cannot be read.
        """
        return torch.stack([self.image_at(position) for position in positions.tolist()])

    def image_at(self, position: int) -> Tensor:
        """Decodes one image, uint8 ``(3, size, size)``."""
        return decode(self.names[position], self.size)

    def subset(self, positions: Tensor) -> "ImageFileDataset":
        """Returns the images at these positions as a set of their own."""
        names = [self.names[position] for position in positions.tolist()]
        return ImageFileDataset(names, self.labels[positions], self.size)


class UnlabeledImageDataset(ImageFileDataset):
    """Files without labels, some of which may turn out not to be images.

    A batch has one more entry, ``error``: for each image ``None``, or why it cannot be read; it is black then.

    Args:
        paths: The files.
        size: Side in pixels of the square that every image becomes.
    """

    def __init__(self, paths: Sequence[str], size: int) -> None:
        super().__init__(paths, torch.full((len(paths),), UNKNOWN), size)
        self.errors: dict[int, str] = {}

    def image_at(self, position: int) -> Tensor:
        """Decodes one image, uint8 ``(3, size, size)``; keeps the error if it is broken."""
        try:
            return super().image_at(position)
        except ImageDecodeError as error:
            self.errors[position] = str(error).removeprefix(f"{self.names[position]!r}: ")
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8)

    def __getitems__(self, positions: list[int]) -> Batch:
        """Returns a batch with its errors."""
        batch = super().__getitems__(positions)
        return {**batch, "error": [self.errors.get(position) for position in batch["index"].tolist()]}
