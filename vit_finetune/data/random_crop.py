"""Random resized crop of a batch on the device, with a box of its own for each image."""

import math

import torch
from torch import Tensor

RATIO = 4 / 3  # largest change of the aspect ratio, and its inverse the smallest; torchvision's default
ATTEMPTS = 10  # boxes drawn per image, of which the first that fits is taken, as in torchvision
CUBIC = -0.5  # parameter of the bicubic kernel that Pillow and PyTorch use with antialiasing (Keys 1981)


def random_resized_crop(
    images: Tensor, scale: float, flip: bool, size: tuple[int, int] | None = None, aspect: Tensor | None = None
) -> Tensor:
    """Crop a random box of every image, resize it, and flip it horizontally with probability 0.5.

    Args:
        images: uint8, shape ``(B, C, h, w)``.
        scale: Smallest area of a box as a fraction of the image; the largest is 1.
        flip: Flip with probability 0.5.
        size: Height and width of the result; ``None`` keeps those of the images.
        aspect: Width over height of the original images, float32 ``(B,)``, if they were stretched to be stored;
            ``None`` if they were not.

    Returns:
        uint8, shape ``(B, C, *size)``.
    """
    size = size or (images.shape[-2], images.shape[-1])
    boxes = random_boxes(images, scale, size, aspect)
    flipped = torch.rand(len(images), device=images.device) < (0.5 if flip else 0.0)
    return crop_and_resize(images, boxes, size, flipped)


def random_boxes(images: Tensor, scale: float, size: tuple[int, int], aspect: Tensor | None = None) -> Tensor:
    """Draw a box for every image as ``torchvision.transforms.RandomResizedCrop`` does.

    The area is uniform between ``scale`` and 1; the logarithm of the aspect ratio is uniform between 3/4 and 4/3 times
    that of the result. Boxes that do not fit are drawn again, up to ten times; then the largest centered box is taken.

    Args:
        images: Shape ``(B, C, h, w)``.
        scale: Smallest area as a fraction of the image.
        size: Height and width of the result.
        aspect: See :func:`random_resized_crop`.

    Returns:
        Top, left, height and width in pixels, int64 ``(B, 4)``.
    """
    batch, height, width = len(images), images.shape[-2], images.shape[-1]
    device = images.device
    # Aspect ratio of the whole image relative to that of the result; boxes are fractions of the image's sides.
    relative = torch.full((batch,), width / height, device=device) if aspect is None else aspect.to(device)
    relative = relative[:, None] * (size[0] / size[1])
    area = torch.empty(batch, ATTEMPTS, device=device).uniform_(scale, 1)
    ratio = torch.empty(batch, ATTEMPTS, device=device).uniform_(-math.log(RATIO), math.log(RATIO)).exp()
    wide, high = (area * ratio / relative).sqrt(), (area * relative / ratio).sqrt()
    fits = (wide <= 1) & (high <= 1)
    first = fits.int().argmax(1, keepdim=True)
    found = fits.any(1)
    limited = relative[:, 0].clamp(1 / RATIO, RATIO) / relative[:, 0]  # below 1 where the image is too wide
    wide = torch.where(found, wide.gather(1, first)[:, 0], limited.clamp(max=1))
    high = torch.where(found, high.gather(1, first)[:, 0], (1 / limited).clamp(max=1))
    box_width = (wide * width).round().clamp(1, width)
    box_height = (high * height).round().clamp(1, height)
    place = torch.where(found, torch.rand(2, batch, device=device), 0.5)
    top = (place[0] * (height - box_height + 1)).floor().clamp(max=height - 1)
    left = (place[1] * (width - box_width + 1)).floor().clamp(max=width - 1)
    return torch.stack([top, left, box_height, box_width], 1).long()


def crop_and_resize(images: Tensor, boxes: Tensor, size: tuple[int, int], flipped: Tensor) -> Tensor:
    """Crop one box of every image and resize it, bicubic with antialiasing.

    On a CPU, torchvision's kernel for uint8 is called once per image: measured on one thread (AMD EPYC, 256 to 224
    pixels), that is four times as fast as matrix products in bf16 and ten times as fast as in float32. On a GPU one
    call per image would keep the host busy, so there the whole batch takes two matrix products.

    Args:
        images: uint8, shape ``(B, C, h, w)``.
        boxes: Top, left, height and width in pixels, int64 ``(B, 4)``.
        size: Height and width of the result.
        flipped: Flip the image horizontally, bool ``(B,)``.

    Returns:
        uint8, shape ``(B, C, *size)``.
    """
    if images.device.type == "cpu":
        return crop_one_by_one(images, boxes, size, flipped)
    return crop_batch(images, boxes, size, flipped)


def crop_one_by_one(images: Tensor, boxes: Tensor, size: tuple[int, int], flipped: Tensor) -> Tensor:
    """Do the same as :func:`crop_and_resize` with torchvision's ``resized_crop``."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    crops = torch.stack(
        [
            functional.resized_crop(image, *box, size=list(size), interpolation=InterpolationMode.BICUBIC)
            for image, box in zip(images, boxes.tolist(), strict=True)
        ]
    )
    crops[flipped] = crops[flipped].flip(-1)
    return crops


def crop_batch(images: Tensor, boxes: Tensor, size: tuple[int, int], flipped: Tensor) -> Tensor:
    """Do the same as :func:`crop_and_resize` with matrices of their own for each image, and no loop over images."""
    top, left, height, width = boxes.unbind(1)
    # Matrices in float16 keep 8-bit values and use the tensor cores of a GPU.
    dtype = torch.float16 if images.device.type == "cuda" else torch.float32
    rows = _resize_matrices(top, height, images.shape[-2], size[0]).to(dtype)
    columns = _resize_matrices(left, width, images.shape[-1], size[1])
    columns = torch.where(flipped[:, None, None], columns.flip(1), columns).to(dtype)
    # Channels next to columns, so that two plain batched products need no copies of the matrices. With 128 less, the
    # range is half as large and so is the rounding error; each row of a matrix has the sum 1.
    x = images.permute(0, 2, 1, 3).to(dtype, memory_format=torch.contiguous_format) - 128
    x = x.flatten(1, 2) @ columns.transpose(1, 2)
    x = rows @ x.unflatten(1, (images.shape[2], -1)).flatten(2)
    x = (x.float() + 128).round_().clamp_(0, 255).to(torch.uint8)
    result: Tensor = x.unflatten(2, (images.shape[1], -1)).permute(0, 2, 1, 3).contiguous()
    return result


def _resize_matrices(start: Tensor, length: Tensor, source: int, target: int) -> Tensor:
    """Return the matrices ``(B, target, source)`` that resize one interval of each image along one axis."""
    scale = length / target
    stretch = scale.clamp(min=1)[:, None, None]  # antialiasing widens the kernel where the interval is reduced
    center = (torch.arange(target, device=start.device) + 0.5) * scale[:, None]
    taps = math.ceil(4 * max(source / target, 1)) + 1
    first = (center - 2 * stretch[:, 0] + 0.5).floor()
    pixel = first[..., None] + torch.arange(taps, device=start.device)
    distance = ((pixel + 0.5 - center[..., None]) / stretch).abs()
    inside = (pixel >= 0) & (pixel < length[:, None, None])
    weights = _cubic(distance) * inside
    weights = weights / weights.sum(-1, keepdim=True)
    matrices = torch.zeros(len(start), target, source, device=start.device)
    position = (pixel.long() + start[:, None, None]).clamp(0, source - 1)
    matrices.scatter_add_(2, position, weights)
    return matrices


def _cubic(distance: Tensor) -> Tensor:
    """Return the bicubic kernel (Keys 1981) at non-negative distances, 0 from 2 on."""
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
