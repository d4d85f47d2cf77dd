"""Synthetic images for pretraining: textured figures on textured backgrounds; each class is a formula."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from vit_finetune.data.datamodule import ImageDataModule
from vit_finetune.data.datasets import ImageDataset, InMemoryDataset
from vit_finetune.errors import require

PIXELS = 32
CHUNK = 2000  # images drawn at once, to bound memory
WAVES = 3  # cosines per formula


class Contours(ImageDataModule):
    """Synthetic images for pretraining without photographs, 32 by 32 pixels in color.

    Formula-driven supervised learning (Kataoka et al. 2020, arXiv:2101.08515): to distinguish the classes, a model has
    to recognize edges, curves, textures and colors, and separate figure from background. Outline classes are sums of
    cosines around a circle in any colors, like the radial contours of Kataoka et al. 2022 (arXiv:2206.09132) and the
    visual atoms of Takashima et al. 2023 (arXiv:2303.01112). Material classes are textures that fill the image: sums
    of plane waves in two colors. Position, size, rotation, aspect ratio, colors, background, lighting and noise are
    random.

    Args:
        outlines: Number of outline classes.
        materials: Number of material classes.
        train_size: Number of training images, including validation images.
        test_size: Number of test images.
        turn: Maximum rotation in either direction, in radians.
        noise: Maximum standard deviation of the pixel noise on a 0-1 scale.
        seed: Seed of formulas and images.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    def __init__(
        self,
        outlines: int = 40,
        materials: int = 20,
        train_size: int = 60_000,
        test_size: int = 3_000,
        turn: float = 0.8,
        noise: float = 0.06,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require("--data.outlines", outlines, 1)
        require("--data.materials", materials, 1)
        require("--data.train_size", train_size, 1)
        require("--data.test_size", test_size, 1)
        require("--data.noise", noise, 0)
        self.outlines, self.materials = outlines, materials
        self.train_size, self.test_size = train_size, test_size
        self.turn, self.noise = turn, noise
        self.seed = seed
        self.class_names = [f"outline {i}" for i in range(outlines)] + [f"material {i}" for i in range(materials)]

    @override
    def load_datasets(self, stage: str) -> dict[str, ImageDataset]:
        if stage in ("fit", "validate"):
            return self.split_train_val(self._draw("train", self.train_size, 3 * self.seed + 1))
        test = self._draw("test", self.test_size, 3 * self.seed + 2)
        return {"test": test, "predict": test}

    def _draw(self, split: str, count: int, seed: int) -> ImageDataset:
        formulas = Formulas.random(self.outlines, self.materials, torch.Generator().manual_seed(3 * self.seed))
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % (self.outlines + self.materials)
        images = torch.cat([draw(chunk, formulas, self.turn, self.noise, generator) for chunk in labels.split(CHUNK)])
        return InMemoryDataset(images, labels, [f"{split}/{i:06d}" for i in range(count)])


class Waves(NamedTuple):
    """Sums of cosines; each field has the shape ``(N, WAVES)``."""

    frequency: Tensor
    amplitude: Tensor
    angle: Tensor  # phase of an outline's cosine, direction of a texture's wave

    def at(self, index: Tensor) -> "Waves":
        """Return the rows at these positions."""
        return Waves(*(field[index] for field in self))

    def terms(self) -> list[tuple[Tensor, ...]]:
        """Return frequency, amplitude and angle of each cosine, in shapes that broadcast to ``(N, H, W)``."""
        return [tuple(field[:, k, None, None] for field in self) for k in range(WAVES)]


class Formulas(NamedTuple):
    """Formulas of the classes.

    An outline has a ``hole``, shape ``(outlines,)``: the inner edge of a ring as a fraction of the outer one, 0 for
    none. A material has a ``texture`` and a ``palette`` of two colors, shape ``(materials, 2, 3, 1, 1)``.
    """

    outline: Waves
    hole: Tensor
    texture: Waves
    palette: Tensor

    @staticmethod
    def random(outlines: int, materials: int, generator: torch.Generator) -> "Formulas":
        """Draw random formulas."""

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.rand(shape, generator=generator) * (high - low) + low

        frequency = torch.randint(2, 8, (outlines, WAVES), generator=generator).float()
        frequency[:, 0] = 2 + torch.arange(outlines) // 2 % 6  # the strongest wave: two to seven lobes
        amplitude = torch.tensor([0.6, 0.25, 0.15]) * uniform(0.5, 1.2, outlines, 1) / frequency[:, :1].sqrt()
        outline = Waves(frequency, amplitude, uniform(0, 2 * math.pi, outlines, WAVES))
        hole = uniform(-0.7, 0.7, outlines).clamp(min=0)  # about half of the outlines have none
        return Formulas(outline, hole, random_textures(materials, generator), uniform(0, 1, materials, 2, 3, 1, 1))


def random_textures(count: int, generator: torch.Generator) -> Waves:
    """Draw plane waves of 0.8 to 8 periods across the image: gradients, stripes, dots and weaves."""
    frequency = 0.8 * 10 ** torch.rand(count, WAVES, generator=generator)
    amplitude = torch.rand(count, WAVES, generator=generator) ** 2
    amplitude = amplitude / amplitude.sum(1, keepdim=True)
    return Waves(frequency, amplitude, math.pi * torch.rand(count, WAVES, generator=generator))


def draw(labels: Tensor, formulas: Formulas, turn: float, noise: float, generator: torch.Generator) -> Tensor:
    """Draw one image per label.

    Args:
        labels: int64, shape ``(N,)``, outlines first.
        formulas: Formulas of the classes.
        turn: Maximum rotation in radians.
        noise: Maximum standard deviation of the pixel noise on a 0-1 scale.
        generator: Generator of all random numbers.

    Returns:
        uint8, shape ``(N, 3, 32, 32)``.
    """
    count = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    radius, stretch, angle = uniform(0.5, 1.1, 1, 1), uniform(0.7, 1, 1, 1), uniform(-turn, turn, 1, 1)
    axis = torch.linspace(-1, 1, PIXELS)
    dx, dy = axis[None, None, :] - uniform(-0.3, 0.3, 1, 1), axis[None, :, None] - uniform(-0.3, 0.3, 1, 1)
    x = (dx * angle.cos() + dy * angle.sin()) / radius
    y = (dy * angle.cos() - dx * angle.sin()) / (radius * stretch)
    inside = _coverage(x, y, labels, formulas, radius)[:, None]

    waves, contrast, colors = _surfaces(labels, formulas, generator)
    colors = colors + uniform(0, 0.3, 1, 1, 1, 1) * uniform(-1, 1, 4, 3, 1, 1)
    figure = _texture(waves, angle, uniform(0.85, 1.18, 1, 1), generator)[:, None]
    clutter = _texture(random_textures(count, generator), angle, uniform(0.4, 1, 1, 1), generator)[:, None]
    figure = torch.lerp(colors[:, 0], colors[:, 1], figure * contrast)
    background = torch.lerp(colors[:, 2], colors[:, 3], clutter * uniform(0, 0.7, 1, 1, 1))
    light = uniform(-0.25, 0.25, 1, 1, 1) * axis + uniform(-0.25, 0.25, 1, 1, 1) * axis[:, None]
    pixels = torch.lerp(background, figure, inside) + light
    pixels = pixels + uniform(0, noise, 1, 1, 1) * torch.randn(pixels.shape, generator=generator)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def _surfaces(labels: Tensor, formulas: Formulas, generator: torch.Generator) -> tuple[Waves, Tensor, Tensor]:
    """Return textures, their contrast ``(N, 1, 1, 1)``, two figure and two background colors ``(N, 4, 3, 1, 1)``.

    For contrast of both signs, a figure is brighter than its background in even classes and darker in odd ones. A
    material has the texture and the colors of its formula.
    """
    waves = random_textures(len(labels), generator)
    contrast = torch.rand(len(labels), 1, 1, 1, generator=generator)
    colors = torch.rand(len(labels), 4, 3, 1, 1, generator=generator) * 0.5
    colors[:, :2] += 0.5
    colors[labels % 2 == 1] = 1 - colors[labels % 2 == 1]

    filled = labels >= len(formulas.hole)
    material = labels[filled] - len(formulas.hole)
    for field, formula in zip(waves, formulas.texture.at(material), strict=True):
        field[filled] = formula
    contrast[filled] = contrast[filled] / 2 + 0.5
    colors[filled, :2] = formulas.palette[material]
    return waves, contrast, colors


def _coverage(x: Tensor, y: Tensor, labels: Tensor, formulas: Formulas, radius: Tensor) -> Tensor:
    """Return the fraction of each pixel inside the outline and outside its hole; 1 everywhere for a material."""
    outlines = len(formulas.hole)
    index = labels.clamp(max=outlines - 1)
    outline, hole = formulas.outline.at(index), formulas.hole[index, None, None]
    around, distance = torch.atan2(y, x), torch.hypot(x, y)
    edge = torch.ones(())
    for frequency, amplitude, phase in outline.terms():
        edge = edge + amplitude * (frequency * around + phase).cos()
    edge = edge / (1 + outline.amplitude.sum(1))[:, None, None]  # at most 1
    sharpness = radius * PIXELS / 2
    outer = ((edge - distance) * sharpness + 0.5).clamp(0, 1)
    inner = ((distance - hole * edge) * sharpness + 0.5).clamp(0, 1)
    coverage = outer * torch.where(hole > 0, inner, 1)
    return coverage.masked_fill((labels >= outlines)[:, None, None], 1)


def _texture(waves: Waves, turn: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """Sum plane waves, rotated, scaled and with random phases, to values from 0 to 1, shape ``(N, 32, 32)``."""
    axis = torch.linspace(-1, 1, PIXELS)
    value = torch.zeros(())
    for frequency, amplitude, direction in waves.terms():
        phase = 2 * math.pi * torch.rand(turn.shape, generator=generator)
        across = (direction + turn).cos() * axis[None, None, :] + (direction + turn).sin() * axis[None, :, None]
        value = value + amplitude * (math.pi * frequency * scale * across + phase).cos()
    return 0.5 + 0.5 * torch.tanh(3 * value)
