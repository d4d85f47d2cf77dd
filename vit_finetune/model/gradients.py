"""The gradients of a step: how large they are, what float16 would make of them, and their clipping."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

FP16_UNDERFLOW = 2.0**-25
"""Up to here float16 rounds to zero: half of its smallest number, 2^-24; a tie goes to the even neighbor, zero."""
FP16_OVERFLOW = 65520.0
"""From here on float16 rounds to infinity: halfway between its largest number, 65504, and the next step."""


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, a scalar on their device.

    Gradients that are spread over devices (DTensor) count as a whole; all processes have to call then.
    """
    norms = [_whole(get_total_norm(group)).float() for group in _by_place(gradients)]
    norm: Tensor = torch.stack(norms).norm()
    return norm


def clip_norm(gradients: Sequence[Tensor], most: float) -> None:
    """Scales all gradients down, in place, where their common norm is above ``most``.

    PyTorch's own function cannot put whole tensors and parts on different meshes into one norm.
    """
    factor = (most / (total_norm(gradients) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


def fp16_underflow_stats(gradients: Iterable[Tensor], held: float, scale: float) -> Tensor:
    """What would become of the gradients in float16, counted value by value.

    Args:
        gradients: Any float; all processes have to call if they are spread over devices.
        held: The factor that they are multiplied by at present: the loss scale, or 1.
        scale: The loss scale to look at.

    Returns:
        float32, shape ``(3,)``: the share of all values that would be zero without a loss scale, the share that would
        be zero with it, and the share that would be infinite with it. Values that are zero already count as zero.
    """
    counts: list[Callable[[Tensor], Tensor]] = [
        lambda size: (size <= FP16_UNDERFLOW * held).sum(),
        lambda size: (size <= FP16_UNDERFLOW * held / scale).sum(),
        lambda size: (~(size < FP16_OVERFLOW * held / scale)).sum(),  # what is no number counts here
    ]
    groups = [[gradient.abs() for gradient in group] for group in _by_place(gradients)]
    total = sum(gradient.numel() for group in groups for gradient in group)
    found = [sum(_whole(reduce(add, map(count, group))) for group in groups) for count in counts]
    return torch.stack([torch.as_tensor(number) for number in found]).float() / total


def _by_place(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups those that can meet in one operation: on one set of devices, of one type."""
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        groups.setdefault((mesh, gradient.dtype), []).append(gradient)
    return list(groups.values())


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
