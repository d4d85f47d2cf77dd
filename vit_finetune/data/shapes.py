"""Synthetic images in the format of CIFAR-10, without a download, too hard for a linear model."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vit_finetune.data.datamodule import ImageDataModule
from vit_finetune.data.datasets import ImageDataset, InMemoryDataset
from vit_finetune.errors import require

PIXELS = 32
CHUNK = 2000  # images drawn at once, to bound memory

NAMES = ["bar", "crescent", "cross", "disc", "heart", "pentagon", "ring", "square", "star", "triangle"]


class Shapes(ImageDataModule):
    """Synthetic images of ten shapes, 32 by 32 pixels in color.

    Each image shows a bright shape on a darker background. Position, size, rotation, colors, brightness gradient and
    noise are random. Neither color nor any single pixel predicts the class, so a linear model performs far worse than
    a neural network. Training and test images have different seeds; the same options always give the same images.

    Args:
        train_size: Number of training images, including validation images.
        test_size: Number of test images.
        noise: Standard deviation of the pixel noise on a 0-1 scale.
        seed: Seed of the images.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    def __init__(
        self, train_size: int = 10_000, test_size: int = 2_000, noise: float = 0.05, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        require("--data.train_size", train_size, 1)
        require("--data.test_size", test_size, 1)
        require("--data.noise", noise, 0)
        self.train_size, self.test_size = train_size, test_size
        self.noise = noise
        self.seed = seed
        self.class_names = NAMES

    @override
    def load_datasets(self, stage: str) -> dict[str, ImageDataset]:
        if stage in ("fit", "validate"):
            return self.split_train_val(self._draw("train", self.train_size, 2 * self.seed))
        test = self._draw("test", self.test_size, 2 * self.seed + 1)
        return {"test": test, "predict": test}

    def _draw(self, split: str, count: int, seed: int) -> ImageDataset:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % len(NAMES)
        images = torch.cat([draw(chunk, self.noise, generator) for chunk in labels.split(CHUNK)])
        return InMemoryDataset(images, labels, [f"{split}/{i:05d}" for i in range(count)])


def draw(labels: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Draw one shape per label.

    Args:
        labels: int64, shape ``(N,)``, indices into ``NAMES``.
        noise: Standard deviation of the pixel noise on a 0-1 scale.
        generator: Source of all randomness.

    Returns:
        uint8, shape ``(N, 3, 32, 32)``.
    """
    count = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    radius = uniform(7, 12, 1, 1)
    center = uniform(-1, 1, 2, 1, 1) * (PIXELS / 2 - 1 - radius)[:, None].clamp(min=0)
    angle = uniform(0, 2 * math.pi, 1, 1)
    axis = torch.arange(PIXELS) - (PIXELS - 1) / 2
    dx, dy = axis[None, None, :] - center[:, 0], axis[None, :, None] - center[:, 1]
    x = (dx * angle.cos() + dy * angle.sin()) / radius
    y = (dy * angle.cos() - dx * angle.sin()) / radius

    distance = torch.empty(count, PIXELS, PIXELS)
    for label, outline in enumerate(OUTLINES):
        chosen = labels == label
        distance[chosen] = outline(x[chosen], y[chosen])
    coverage = (0.5 - distance * radius).clamp(0, 1)[:, None]  # about one pixel of antialiasing

    background, color = uniform(0, 0.4, 3, 1, 1), uniform(0.6, 1, 3, 1, 1)
    slope = uniform(-0.25, 0.25, 2, 1, 1) * 2 / PIXELS
    shade = slope[:, 0] * axis[None, None, :] + slope[:, 1] * axis[None, :, None]
    pixels = background + coverage * (color - background) + shade[:, None]
    pixels = pixels + noise * torch.randn(pixels.shape, generator=generator)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


# Signed distances to outlines, approximately in units of the shape's radius; negative inside.


def _polygon(corners: int, x: Tensor, y: Tensor) -> Tensor:
    sector = 2 * math.pi / corners
    angle = torch.remainder(torch.atan2(y, x) + sector / 2, sector) - sector / 2
    return torch.hypot(x, y) * angle.cos() - math.cos(sector / 2)


def _star(x: Tensor, y: Tensor) -> Tensor:
    sector = 2 * math.pi / 5
    angle = (torch.remainder(torch.atan2(y, x) + sector / 2, sector) - sector / 2).abs()
    distance = torch.hypot(x, y)
    # The edge from the tip (1, 0) to the inner corner at radius 0.42 and half a sector.
    corner_x, corner_y = 0.42 * math.cos(sector / 2), 0.42 * math.sin(sector / 2)
    edge = math.hypot(1 - corner_x, corner_y)
    return ((distance * angle.cos() - 1) * corner_y + distance * angle.sin() * (1 - corner_x)) / edge


def _box(x: Tensor, y: Tensor, width: float, height: float) -> Tensor:
    return torch.maximum(x.abs() - width, y.abs() - height)


def _disc(x: Tensor, y: Tensor, radius: float) -> Tensor:
    return torch.hypot(x, y) - radius


def _heart(x: Tensor, y: Tensor) -> Tensor:
    lobes = torch.minimum(_disc(x - 0.38, y - 0.3, 0.5), _disc(x + 0.38, y - 0.3, 0.5))
    tip = _box((x + y + 0.05) / math.sqrt(2), (y - x + 0.05) / math.sqrt(2), 0.58, 0.58)
    return torch.minimum(lobes, tip)


OUTLINES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: _box(x, y, 1.0, 0.28),
    lambda x, y: torch.maximum(_disc(x, y, 0.95), -_disc(x - 0.45, y, 0.75)),
    lambda x, y: torch.minimum(_box(x, y, 1.0, 0.27), _box(x, y, 0.27, 1.0)),
    lambda x, y: _disc(x, y, 0.85),
    _heart,
    lambda x, y: _polygon(5, x, y),
    lambda x, y: _disc(x, y, 0.72).abs() - 0.2,
    lambda x, y: _box(x, y, 0.75, 0.75),
    _star,
    lambda x, y: _polygon(3, x, y),
)
