"""Gradients, also spread over devices: total norm, clipping, and values that float16 cannot represent."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

FP16_UNDERFLOW = 2.0**-25
"""Largest size that float16 rounds to zero: half of its smallest number, 2^-24; ties go to the even neighbor, zero."""
FP16_OVERFLOW = 65520.0
"""Smallest size that float16 rounds to infinity: halfway between its largest number, 65504, and the next step."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor; one that is spread over processes (DTensor) is gathered, so all of them must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory; all of it unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, a scalar on their device.

    If they are spread over processes (DTensor), all processes must call, and get the norm of the whole gradients.
    """
    norms = [full_tensor(get_total_norm(group)).float() for group in _by_placement(gradients)]
    norm: Tensor = torch.stack(norms).norm()
    return norm


def clip_norm(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale all gradients down, in place, if their total norm is above ``max_norm``.

    Other than :func:`torch.nn.utils.clip_grad_norm_`, it accepts whole tensors and DTensors of several meshes together.
    """
    factor = (max_norm / (total_norm(gradients) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        local_tensor(gradient).mul_(factor)


def fp16_underflow_stats(gradients: Iterable[Tensor], current_scale: float, scale: float) -> Tensor:
    """Count the gradient values that float16 would round to zero or infinity.

    Args:
        gradients: Of any floating-point type; if they are spread over processes, all processes must call.
        current_scale: Factor that the gradients contain at present: the loss scale, or 1.
        scale: Loss scale to examine.

    Returns:
        float32, shape ``(3,)``: the fraction of all values that would be zero without a loss scale, that would be zero
        with it, and that would be infinite with it. Values that are zero already count as zero, NaN as infinite.
    """
    counts: list[Callable[[Tensor], Tensor]] = [
        lambda size: (size <= FP16_UNDERFLOW * current_scale).sum(),
        lambda size: (size <= FP16_UNDERFLOW * current_scale / scale).sum(),
        lambda size: (~(size < FP16_OVERFLOW * current_scale / scale)).sum(),  # NaN is not smaller
    ]
    groups = [[gradient.abs() for gradient in group] for group in _by_placement(gradients)]
    total = sum(gradient.numel() for group in groups for gradient in group)
    found = [sum(full_tensor(reduce(add, map(count, group))) for group in groups) for count in counts]
    return torch.stack([torch.as_tensor(number) for number in found]).float() / total


def _by_placement(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group gradients that can be combined in one operation: on the same devices and of the same type."""
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        groups.setdefault((mesh, gradient.dtype), []).append(gradient)
    return list(groups.values())
