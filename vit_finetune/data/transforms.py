"""Augmentation of a batch on the device, with separate random draws for each image."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms import v2

GRAY = 128.0  # about zero after normalization, with the usual channel means


def random_shift_flip(images: Tensor, shift: float, flip: bool) -> Tensor:
    """Shift every image by a random offset and flip it horizontally with probability 0.5.

    The usual "pad by 4 pixels and crop" of CIFAR-10 is ``shift=0.125`` at 32 pixels. Borders are filled by reflection.
    Pixels are moved, never interpolated, so uint8 images stay exact.

    Args:
        images: Shape ``(B, C, H, W)``, any dtype.
        shift: Maximum offset in each direction as a fraction of height and width, from 0 to below 1.
        flip: Flip horizontally with probability 0.5.

    Returns:
        Tensor of the same shape, dtype and device.
    """
    batch, channels, height, width = images.shape
    device = images.device
    rows = _shifted(batch, height, int(shift * height), device)
    columns = _shifted(batch, width, int(shift * width), device)
    if flip:
        flipped = torch.rand(batch, 1, device=device) < 0.5
        columns = torch.where(flipped, width - 1 - columns, columns)
    # One gather for the whole batch: the four index tensors broadcast to (B, C, H, W).
    return images[
        torch.arange(batch, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def _shifted(batch: int, length: int, limit: int, device: torch.device) -> Tensor:
    """Return source positions ``(batch, length)`` along one axis after a random shift, reflected at both ends."""
    offset = torch.randint(-limit, limit + 1, (batch, 1), device=device)
    position = (torch.arange(length, device=device) + offset).abs()
    return (length - 1) - ((length - 1) - position).abs()


def per_image_transform(auto_augment: str | None, erase: float) -> Callable[[Tensor], Tensor] | None:
    """Build the transforms that torchvision draws, applied to one image at a time.

    Given a batch, torchvision's random transforms draw once for all of its images. One CPU thread (AMD EPYC) needs
    0.11 ms for TrivialAugment and 0.03 ms for erasing per image of 32 pixels, 0.54 and 0.06 ms at 224 pixels. This is
    negligible next to a training step on a CPU; on a fast GPU the host may become the bottleneck.

    Args:
        auto_augment: ``trivial`` for TrivialAugment Wide (Mueller and Hutter 2021, arXiv:2103.10158), ``rand`` for
            RandAugment with two operations of magnitude 9 (Cubuk et al. 2019, arXiv:1909.13719), ``None`` for neither.
        erase: Probability that a rectangle of 2 % to 33 % of the image becomes gray (Zhong et al. 2017,
            arXiv:1708.04896).

    Returns:
        Function from uint8 ``(B, 3, H, W)`` to the same; ``None`` if both options are off.
    """
    steps: list[Callable[[Tensor], Tensor]] = []
    if auto_augment is not None:
        policy = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment}[auto_augment]
        steps.append(policy(interpolation=v2.InterpolationMode.BILINEAR, fill=[GRAY]))
    if erase:
        steps.append(v2.RandomErasing(erase, value=GRAY))
    if not steps:
        return None
    transform = v2.Compose(steps)
    return lambda images: torch.stack([transform(image) for image in images])


def mix(images: Tensor, labels: Tensor, mixup: float, cutmix: float, num_classes: int) -> tuple[Tensor, Tensor]:
    """Apply torchvision's mixup or cutmix, which combine every image of a batch with the one before it.

    Mixup blends the two (Zhang et al. 2017, arXiv:1710.09412); cutmix pastes a box of one into the other (Yun et al.
    2019, arXiv:1905.04899). The mixing coefficient is drawn once per batch from a Beta distribution, as in both papers.
    With both on, each batch uses one of the two at random. All draws use the CPU generator, so the host never waits
    for the device.

    Args:
        images: uint8, shape ``(B, 3, H, W)``.
        labels: int64, shape ``(B,)``.
        mixup: Both parameters of mixup's Beta distribution; 0 for no mixup.
        cutmix: The same for cutmix; at least one of the two is not 0.
        num_classes: Width of the targets.

    Returns:
        Mixed images, uint8 of the same shape, and soft targets, float32 ``(B, C)``, whose rows sum to 1.
    """
    if cutmix and (not mixup or float(torch.rand(())) < 0.5):
        mixed, targets = v2.CutMix(alpha=cutmix, num_classes=num_classes)(images, labels)
    else:
        blended, targets = v2.MixUp(alpha=mixup, num_classes=num_classes)(images.float(), labels)
        mixed = blended.round().to(images.dtype)
    return mixed, targets
