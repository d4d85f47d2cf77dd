"""Sets of pictures that stay in their files until they are asked for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vit_finetune.data.decode import BrokenPicture, decode
from vit_finetune.data.pictures import UNKNOWN, Batch, PictureSet


class FilePictures(PictureSet):
    """Pictures that are decoded each time they are asked for.

    Args:
        paths: The files.
        labels: int64, shape ``(N,)``.
        size: Side in pixels of the square that every picture becomes.
    """

    def __init__(self, paths: Sequence[str], labels: Tensor, size: int = 224) -> None:
        super().__init__(labels, paths)
        self.size = size

    def images_at(self, positions: Tensor) -> Tensor:
        """Decodes a batch, uint8 ``(B, 3, size, size)``.

        Raises:
            BrokenPicture: Names the first file that cannot be read.
        """
        return torch.stack([self.image_at(position) for position in positions.tolist()])

    def image_at(self, position: int) -> Tensor:
        """Decodes one picture, uint8 ``(3, size, size)``."""
        return decode(self.names[position], self.size)

    def subset(self, positions: Tensor) -> "FilePictures":
        """Returns the pictures at these positions as a set of their own."""
        names = [self.names[position] for position in positions.tolist()]
        return FilePictures(names, self.labels[positions], self.size)


class PicturesToPredict(FilePictures):
    """Files without labels, some of which may turn out not to be pictures.

    A batch has one more entry, ``error``: for each picture ``None``, or why it cannot be read; it is black then.

    Args:
        paths: The files.
        size: Side in pixels of the square that every picture becomes.
    """

    def __init__(self, paths: Sequence[str], size: int) -> None:
        super().__init__(paths, torch.full((len(paths),), UNKNOWN), size)
        self.errors: dict[int, str] = {}

    def image_at(self, position: int) -> Tensor:
        """Decodes one picture, uint8 ``(3, size, size)``; keeps the error if it is broken."""
        try:
            return super().image_at(position)
        except BrokenPicture as error:
            self.errors[position] = str(error).removeprefix(f"{self.names[position]!r}: ")
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8)

    def __getitems__(self, positions: list[int]) -> Batch:
        """Returns a batch with its errors."""
        batch = super().__getitems__(positions)
        return {**batch, "error": [self.errors.get(position) for position in batch["index"].tolist()]}
