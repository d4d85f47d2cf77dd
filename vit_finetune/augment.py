"""Augmentation of a batch on the device, drawn anew for each picture."""

import torch
from torch import Tensor


def shift_and_flip(images: Tensor, shift: float, flip: bool) -> Tensor:
    """Moves every picture by a random offset and mirrors every second one.

    The usual "pad by 4 pixels and crop" of CIFAR-10 is ``shift=0.125`` at 32 pixels. What the move leaves empty is
    filled by reflection. Pixels are moved, never interpolated, so uint8 pictures stay exact.

    Args:
        images: Shape ``(B, C, H, W)``, any dtype.
        shift: Largest offset in each direction as a share of height and width, from 0 to below 1.
        flip: Mirror left and right with probability one half.

    Returns:
        The same shape, dtype and device.
    """
    batch, channels, height, width = images.shape
    device = images.device
    rows = _shifted(batch, height, int(shift * height), device)
    columns = _shifted(batch, width, int(shift * width), device)
    if flip:
        mirrored = torch.rand(batch, 1, device=device) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
    # One gather for the whole batch: the four index tensors broadcast to (B, C, H, W).
    return images[
        torch.arange(batch, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def _shifted(batch: int, length: int, most: int, device: torch.device) -> Tensor:
    """Source positions ``(batch, length)`` along one axis after a random move, reflected at both ends."""
    offset = torch.randint(-most, most + 1, (batch, 1), device=device)
    position = (torch.arange(length, device=device) + offset).abs()
    return (length - 1) - ((length - 1) - position).abs()
