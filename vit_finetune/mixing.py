"""Mixup and cutmix: training pictures that are two at once, with soft targets."""

import torch
from torch import Tensor
from torchvision.transforms import v2


def mix(images: Tensor, labels: Tensor, mixup: float, cutmix: float, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mixes every picture of a batch with its neighbour, by torchvision.

    Mixup blends the two (Zhang et al. 2017, arXiv:1710.09412), cutmix pastes a box of one into the other (Yun et al.
    2019, arXiv:1905.04899). The share of each is drawn once a batch from a Beta distribution, as in both papers. With
    both on, each batch draws one of the two. All draws come from the CPU's generator; nothing is read back from the
    device.

    Args:
        images: uint8, shape ``(B, 3, H, W)``.
        labels: int64, shape ``(B,)``.
        mixup: Both parameters of mixup's Beta distribution; 0 for no mixup.
        cutmix: The same for cutmix; at least one of the two is not 0.
        num_classes: Width of the targets.

    Returns:
        Mixed images, uint8 of the same shape, and targets, float32 ``(B, C)``, whose rows sum to 1.
    """
    cut = bool(cutmix) and (not mixup or float(torch.rand(())) < 0.5)
    if cut:
        mixed, targets = v2.CutMix(alpha=cutmix, num_classes=num_classes)(images, labels)
    else:
        blended, targets = v2.MixUp(alpha=mixup, num_classes=num_classes)(images.float(), labels)
        mixed = blended.round().to(images.dtype)
    return mixed, targets
