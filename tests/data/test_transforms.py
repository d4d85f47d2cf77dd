"""Random draws per image, exact pixels, mixup and cutmix, and reproducible random numbers."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import scalars
from vit_finetune import ImageFolder, main
from vit_finetune.data.transforms import mix, per_image_transform, random_shift_flip


def test_nothing_to_do_changes_nothing() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 6), dtype=torch.uint8)
    assert torch.equal(random_shift_flip(images, 0.0, flip=False), images)


def test_each_image_draws_for_itself() -> None:
    torch.manual_seed(0)
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(200, 3, 8, 8)
    out = random_shift_flip(image, 0.25, flip=True)
    assert out.shape == image.shape and out.dtype == torch.uint8
    # Two pixels in each direction on both axes, flipped or not: 5 * 5 * 2 variants.
    assert 40 <= len({tuple(shifted.flatten().tolist()) for shifted in out}) <= 50


def test_flip_and_fill_by_reflection() -> None:
    row = torch.arange(8, dtype=torch.uint8).view(1, 1, 1, 8).expand(500, 1, 8, 8)
    torch.manual_seed(0)
    seen = {tuple(image[0, 0].tolist()) for image in random_shift_flip(row, 0.125, flip=True)}
    moved = [(0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 6), (1, 0, 1, 2, 3, 4, 5, 6)]
    assert seen == set(moved) | {image[::-1] for image in moved}


def test_same_seed_same_images() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(random_shift_flip(images, 0.5, flip=True))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.parametrize("auto_augment", ["trivial", "rand"])
def test_policies_draw_for_each_image(auto_augment: str) -> None:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8).expand(100, 3, 16, 16)
    augment = per_image_transform(auto_augment, 0.0)
    assert augment is not None
    out = augment(image)
    assert out.shape == image.shape and out.dtype == torch.uint8
    assert len({augmented.numpy().tobytes() for augmented in out}) > 30
    torch.manual_seed(0)
    torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(augment(image), out)


def test_erasing_makes_one_gray_rectangle_of_the_stated_area() -> None:
    torch.manual_seed(0)
    erase = per_image_transform(None, 0.5)
    assert erase is not None
    erased = erase(torch.zeros(400, 3, 32, 32, dtype=torch.uint8))[:, 0] == 128
    areas = erased.flatten(1).float().mean(1)
    hit = areas > 0
    assert 0.4 < float(hit.float().mean()) < 0.6  # the probability
    assert float(areas[hit].min()) > 0.015 and float(areas.max()) < 0.35
    rows, columns = erased.any(2), erased.any(1)
    assert torch.equal(erased, rows[:, :, None] & columns[:, None, :])  # a rectangle


def test_no_options_give_no_transform() -> None:
    assert per_image_transform(None, 0.0) is None


def test_mixup_blends_images_and_targets_in_the_same_proportion() -> None:
    torch.manual_seed(0)
    images = torch.tensor([0, 100, 200], dtype=torch.uint8)[:, None, None, None].expand(3, 3, 4, 4)
    mixed, targets = mix(images, torch.tensor([0, 1, 2]), 1.0, 0.0, 3)
    assert mixed.dtype == torch.uint8 and targets.dtype == torch.float32
    assert torch.allclose(targets.sum(1), torch.ones(3))
    weight = targets[0, 0]
    assert 0 < weight < 1 and targets.diagonal().tolist() == [weight] * 3
    assert targets[1, 0] == targets[2, 1] == targets[0, 2] == 1 - weight  # each with the image before it
    expected = torch.tensor([0 * weight + 200 * (1 - weight), 100 * weight, 200 * weight + 100 * (1 - weight)])
    assert torch.allclose(mixed[:, 0, 0, 0].float(), expected.round())


def test_cutmix_targets_are_the_areas() -> None:
    images = torch.tensor([0, 100], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 32, 32)
    areas = set()
    for seed in range(20):
        torch.manual_seed(seed)
        mixed, targets = mix(images, torch.tensor([0, 1]), 0.0, 1.0, 2)
        pasted = float((mixed[0, 0] == 100).float().mean())
        assert targets[0].tolist() == pytest.approx([1 - pasted, pasted], abs=1e-6)
        areas.add(pasted)
    assert len(areas) > 10


def test_each_batch_draws_one_of_both() -> None:
    images = torch.tensor([0, 200], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 32, 32)
    kinds = []
    for seed in range(100):
        torch.manual_seed(seed)
        mixed, _ = mix(images, torch.tensor([0, 1]), 1.0, 1.0, 2)
        kinds.append(set(mixed.unique().tolist()) <= {0, 200})
    assert 30 < sum(kinds) < 70


def test_training_on_mixed_images(folder_args: list[str], tmp_path: Path) -> None:
    """The loss uses soft targets with label smoothing; accuracy uses the dominant label."""
    options = ["--data.mixup=0.2", "--data.cutmix=1", "--data.auto_augment=rand", "--data.erase=1"]
    main(["fit", *folder_args, *options, "--model.label_smoothing=0.1", "--trainer.precision=bf16-mixed"])
    last = scalars(tmp_path / "runs")
    assert 0.5 < last["train/loss"][-1][1] < 2 and 0 <= last["train/acc"][-1][1] <= 1


def test_mixed_batch_has_the_documented_entries(tree: Path) -> None:
    data = ImageFolder(tree, mixup=0.2, cutmix=1.0)
    data.setup("fit")
    trainer = Namespace(training=True, fit_loop=Namespace(total_batch_idx=4), distributed_sampler_kwargs=None)
    data.trainer = trainer  # type: ignore[assignment]
    batches = [data.on_after_batch_transfer(data.datasets["train"].__getitems__([0, 7, 13]), 0) for _ in range(2)]
    for key in ("image", "label", "target", "index"):
        assert torch.equal(batches[0][key], batches[1][key])  # the same step, the same draws
    assert batches[0]["image"].dtype == torch.uint8 and batches[0]["label"].dtype == torch.int64
    assert torch.equal(batches[0]["label"], batches[0]["target"].argmax(1))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.erase=1.5", "--data.erase is 1.5; expected a value between 0 and 1"),
        ("--data.mixup=-1", "--data.mixup is -1.0; expected at least 0"),
        ("--data.auto_augment=strong", "--data.auto_augment"),
    ],
)
def test_values_out_of_range_are_refused(
    folder_args: list[str], fails: Callable[..., str], option: str, message: str
) -> None:
    assert message in fails("fit", *folder_args, option)
