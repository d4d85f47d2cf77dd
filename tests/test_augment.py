"""Per-picture draws, exact pixels."""

import torch

from vit_finetune.augment import shift_and_flip


def test_nothing_to_do_changes_nothing() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 6), dtype=torch.uint8)
    assert torch.equal(shift_and_flip(images, 0.0, flip=False), images)


def test_each_picture_draws_for_itself() -> None:
    torch.manual_seed(0)
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(200, 3, 8, 8)
    out = shift_and_flip(image, 0.25, flip=True)
    assert out.shape == image.shape and out.dtype == torch.uint8
    # Two pixels each way in both directions, mirrored or not: 5 * 5 * 2 variants.
    assert 40 <= len({tuple(picture.flatten().tolist()) for picture in out}) <= 50


def test_flip_mirrors_and_reflection_fills() -> None:
    row = torch.arange(8, dtype=torch.uint8).view(1, 1, 1, 8).expand(500, 1, 8, 8)
    torch.manual_seed(0)
    seen = {tuple(picture[0, 0].tolist()) for picture in shift_and_flip(row, 0.125, flip=True)}
    moved = [(0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 6), (1, 0, 1, 2, 3, 4, 5, 6)]
    assert seen == set(moved) | {picture[::-1] for picture in moved}


def test_same_seed_same_pictures() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(shift_and_flip(images, 0.5, flip=True))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
