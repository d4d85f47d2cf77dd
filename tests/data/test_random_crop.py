"""Random resized crops: the boxes that torchvision would draw, and its pixels box by box."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from tests.conftest import make_tree
from vit_finetune.data import ImageFolder, Shapes
from vit_finetune.data.random_crop import crop_and_resize, crop_batch, random_boxes, random_resized_crop


@pytest.fixture
def images() -> Tensor:
    """32 images of 64 by 48 pixels, as smooth as photographs are."""
    torch.manual_seed(0)
    small = torch.randint(0, 256, (32, 3, 16, 12)).float()
    return functional.resize(small, [64, 48], antialias=True).clamp(0, 255).round().to(torch.uint8)


def expected(images: Tensor, boxes: Tensor, size: tuple[int, int], flipped: Tensor) -> Tensor:
    """Pixels of torchvision in float32, before rounding, one image at a time."""
    bicubic = v2.InterpolationMode.BICUBIC
    crops = [
        functional.resized_crop(image.float(), *box, size=list(size), interpolation=bicubic, antialias=True)
        for image, box in zip(images, boxes.tolist(), strict=True)
    ]
    crops = [functional.horizontal_flip(crop) if flip else crop for crop, flip in zip(crops, flipped, strict=True)]
    return torch.stack(crops).clamp(0, 255)


@pytest.mark.parametrize("size", [(32, 32), (64, 48), (20, 90)])
def test_pixels_agree_with_torchvision_box_by_box(images: Tensor, size: tuple[int, int]) -> None:
    """Both ways, the one for a CPU and the one for a GPU; torchvision's kernel for uint8 rounds between the axes."""
    boxes = random_boxes(images, 0.05, size)
    flipped = torch.arange(32) % 2 == 0
    exact = expected(images, boxes, size, flipped)
    batch = crop_batch(images, boxes, size, flipped)
    assert batch.dtype == torch.uint8 and batch.shape == (32, 3, *size) and batch.is_contiguous()
    assert float((batch - exact).abs().max()) <= 0.51
    one_by_one = crop_and_resize(images, boxes, size, flipped)
    assert float((one_by_one - exact).abs().mean()) <= 0.4 and float((one_by_one - exact).abs().max()) <= 4


@pytest.mark.parametrize(("height", "width"), [(60, 60), (60, 200), (300, 60)])
def test_boxes_are_distributed_as_in_torchvision(height: int, width: int) -> None:
    """Means and spreads of place and size agree, also where most boxes of an elongated image do not fit."""
    count = 5000
    torch.manual_seed(0)
    image = torch.zeros(1, height, width)
    drawn = random_boxes(image.expand(count, 1, height, width), 0.35, (32, 32)).float()
    theirs = v2.RandomResizedCrop(32, scale=(0.35, 1))
    params = [theirs.make_params([image]) for _ in range(count)]
    reference = torch.tensor([[box[key] for key in ("top", "left", "height", "width")] for box in params]).float()
    error = 4 * reference.std(0) / count**0.5 + 0.5  # and half a pixel of rounding
    assert bool(((drawn.mean(0) - reference.mean(0)).abs() <= error).all())
    assert torch.allclose(drawn.std(0), reference.std(0), rtol=0.05, atol=0.5)


def test_stretched_images_are_cropped_as_the_originals() -> None:
    """A box of a stretched image is that of the original, stretched; ratios are relative to those of the result."""
    torch.manual_seed(0)
    boxes = random_boxes(torch.zeros(2000, 1, 90, 90), 0.2, (32, 64), torch.full((2000,), 1.5)).float()
    top, left, height, width = boxes.unbind(1)
    assert bool(((top + height <= 90) & (left + width <= 90) & (top >= 0) & (left >= 0)).all())
    ratio = (width * 1.5) / height / 2  # in the original, relative to the result
    assert 0.72 < float(ratio.min()) < 0.8 and 1.25 < float(ratio.max()) < 1.38
    assert float((width * height / 90**2).min()) == pytest.approx(0.2, abs=0.02)


def test_full_scale_takes_the_whole_image_and_flips_half() -> None:
    torch.manual_seed(0)
    images = torch.arange(100).expand(400, 1, 100, 100).to(torch.uint8)
    same = random_resized_crop(images, 1.0, flip=True)
    flipped = (same == images.flip(-1)).flatten(1).all(1)
    assert bool(((same == images).flatten(1).all(1) | flipped).all()) and 150 < int(flipped.sum()) < 250


def test_photographs_are_cropped_and_small_images_shifted(tmp_path: Path) -> None:
    """Resized files are stored whole and larger than the input, images of the model's size are not cropped."""
    tree = make_tree(tmp_path / "p", {"train": 4, "val": 1}, side=40)
    data = ImageFolder(str(tree))
    data.input_size = (28, 28)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert (
        data.crop_scale == 0.35 and batch["image"].shape == (12, 3, 32, 32) and batch["aspect"].tolist() == [1.0] * 12
    )
    assert data.augment(batch)["image"].shape == (12, 3, 28, 28)
    assert next(iter(data.val_dataloader()))["image"].shape == (3, 3, 28, 28)
    data.input_size = (40, 40)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert data.crop_scale == 0 and batch["image"].shape == (12, 3, 40, 40) and "aspect" not in batch


def test_crops_are_a_function_of_seed_and_step() -> None:
    data = Shapes(train_size=100, val_fraction=0.1, batch_size=8, crop_scale=0.3)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    crops = []
    for step in (1, 1, 2):
        data.seed_step(torch.device("cpu"), step)
        crops.append(data.augment({**batch})["image"])
    assert torch.equal(crops[0], crops[1]) and not torch.equal(crops[0], crops[2])
    assert crops[0].shape == (8, 3, 32, 32)
