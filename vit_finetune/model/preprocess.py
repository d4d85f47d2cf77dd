"""Preprocessing on the device of the model: normalize the stored images, then resize them."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class Preprocess(nn.Module):
    """Convert uint8 images of any size to the normalized input of one model.

    As a part of the model, it is the same in training, evaluation, prediction and an exported file. Images are
    normalized at their stored size and resized by two small matrix products, one for the rows and one for the columns.
    The result equals ``F.interpolate(mode=..., antialias=True)`` and is much cheaper for small images. Unlike image
    libraries, it does not clip where the cubic kernel overshoots the range of the source.

    Args:
        size: Height and width of the output in pixels.
        mean: Channel means on a 0-1 scale, red, green, blue.
        std: Channel standard deviations on a 0-1 scale.
        interpolation: ``bicubic`` or ``bilinear``, both with antialiasing.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, size: tuple[int, int], mean: Sequence[float], std: Sequence[float], interpolation: str = "bicubic"
    ) -> None:
        super().__init__()
        self.size = size
        self.mean, self.std = tuple(mean), tuple(std)
        self.interpolation = interpolation
        channel_mean, channel_std = torch.tensor(self.mean), torch.tensor(self.std)
        # (x / 255 - mean) / std as one multiplication and one addition per value.
        self.register_buffer("scale", (1 / (255 * channel_std))[:, None, None], persistent=False)
        self.register_buffer("shift", (-channel_mean / channel_std)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Preprocess a batch.

        Args:
            images: uint8, shape ``(B, 3, h, w)``.

        Returns:
            Shape ``(B, 3, *size)``; float32, or the dtype of autocast or of a model in half precision.
        """
        x = images.to(self.scale.dtype) * self.scale + self.shift
        height, width = x.shape[-2:]
        if (height, width) == self.size:
            return x
        rows = resize_matrix(height, self.size[0], self.interpolation, x.device, x.dtype)
        columns = resize_matrix(width, self.size[1], self.interpolation, x.device, x.dtype)
        return rows @ (x @ columns.T)

    @override
    def extra_repr(self) -> str:
        return f"size={self.size}, mean={self.mean}, std={self.std}, interpolation={self.interpolation!r}"


@lru_cache(maxsize=64)
def resize_matrix(source: int, target: int, mode: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix that resizes ``source`` pixels to ``target`` pixels along one axis.

    Resizing is linear, so ``F.interpolate`` of the identity matrix is the matrix.

    Returns:
        Shape ``(target, source)``, each row with the sum 1.
    """
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        identity = torch.eye(source, dtype=torch.float32)[None, None]
        weights = F.interpolate(identity, size=(target, source), mode=mode, antialias=True)[0, 0]
        return weights.to(device, dtype)
