"""Runs that are resumed with another batch size, accumulation or number of devices."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import CPU, TINY_MODEL, make_tree, only, run_command, scalars
from vit_finetune import ViTClassifier, main
from vit_finetune.data.position import GlobalBatch, refusal

IMAGES = 48


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Two epochs of 12 steps, one learning rate for all parameters."""
    tree = make_tree(tmp_path / "images", {"train": IMAGES // 3, "val": 1})
    data = ["--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4"]
    return [
        "fit",
        *TINY_MODEL,
        *data,
        *CPU,
        "--trainer.max_epochs=2",
        "--trainer.log_every_n_steps=1",
        "--model.layer_decay=null",
        "--model.warmup=0",
    ]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Positions of the images trained on, by epoch."""
    train, found = ViTClassifier.training_step, dict[int, list[int]]()

    def records(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        found.setdefault(self.current_epoch, []).extend(batch["index"].tolist())
        return train(self, batch, batch_idx)

    monkeypatch.setattr(ViTClassifier, "training_step", records)
    return found


def learning_rate(fraction: float) -> float:
    """Cosine schedule without warm-up after a fraction of the run."""
    return 1e-6 + (1.5e-4 - 1e-6) * (1 + math.cos(math.pi * fraction)) / 2


def batches(size: int, accumulated: int) -> list[str]:
    return [f"--data.batch_size={size}", f"--trainer.accumulate_grad_batches={accumulated}"]


@pytest.mark.parametrize(
    ("steps", "before", "after", "more"),
    [
        (14, (4, 1), (2, 1), []),  # out of memory: half the batch size
        (14, (4, 1), (2, 2), ["--trainer.val_check_interval=0.5"]),  # the same global batch
        (2, (8, 2), (4, 1), []),
        (14, (4, 1), (1, 8), []),
    ],
)
def test_rest_of_an_epoch_is_trained_once(
    steps: int,
    before: tuple[int, int],
    after: tuple[int, int],
    more: list[str],
    options: list[str],
    tmp_path: Path,
    seen: dict[int, list[int]],
) -> None:
    """Each image once over both parts; validation and files at the end; the schedule ends at its minimum."""
    main([*options, *batches(*before), f"--trainer.max_steps={steps}", *more])
    last = only(tmp_path, "last.ckpt")
    done = steps * math.prod(before)
    main([*options, *batches(*after), f"--ckpt_path={last}", *more])
    assert all(sorted(images) == list(range(IMAGES)) for images in seen.values()) and len(seen) == 2
    total = steps + (2 * IMAGES - done) // math.prod(after)
    points = scalars(tmp_path / "runs" / "imagefolder" / "version_0")
    assert [step for step, _ in points["val/acc"]][-1] == [step for step, _ in points["train/acc"]][-1] == total - 1
    assert dict(points["train/lr"])[steps] == pytest.approx(learning_rate(done / (2 * IMAGES)))
    checkpoint = torch.load(last, weights_only=True)
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (total, 1)
    assert {group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]} == {1e-6}


@pytest.mark.parametrize("after", [(8, 1), (3, 2), (4, 3)])
def test_other_batches_from_the_end_of_an_epoch(after: tuple[int, int], options: list[str], tmp_path: Path) -> None:
    """The schedule continues at the same fraction of the run, and ends at its minimum."""
    main([*options, "--trainer.max_epochs=1"])
    last = only(tmp_path, "last.ckpt")
    main([*options, f"--ckpt_path={last}", *batches(*after)])
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["global_step"] == 12 + IMAGES // math.prod(after)
    assert {group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]} == {1e-6}
    points = scalars(tmp_path / "runs" / "imagefolder" / "version_0")
    assert dict(points["train/lr"])[12] == pytest.approx(learning_rate(0.5))


def test_other_batches_within_an_epoch_are_refused(
    options: list[str], tmp_path: Path, fails: Callable[..., str]
) -> None:
    """Nothing is written; both ways out that the message names work."""
    main([*options, "--trainer.max_steps=14"])
    last = only(tmp_path, "last.ckpt")
    files = sorted(tmp_path.rglob("*"))
    message = fails(*options, f"--ckpt_path={last}", "--data.batch_size=3")
    assert "after 8 of its images" in message and "8 is not divisible by 3" in message
    for way in ("--data.batch_size 4 --trainer.accumulate_grad_batches 1", *AS_TYPED):
        assert f"with {way} on 1 device" in message
    assert sorted(tmp_path.rglob("*")) == files
    main([*options, f"--ckpt_path={last}", *AS_TYPED[0].split()])
    assert torch.load(last, weights_only=True)["global_step"] == 24


@pytest.mark.slow
def test_rest_of_an_epoch_on_two_devices(options: list[str], tmp_path: Path, fails: Callable[..., str]) -> None:
    main([*options, "--trainer.max_steps=15"])
    last = only(tmp_path, "last.ckpt")
    ddp = [*options, f"--ckpt_path={last}", "--trainer.devices=2", "--trainer.strategy=ddp"]
    way = "--data.batch_size 2 --trainer.accumulate_grad_batches 1"
    assert f"or with {way} on 2 devices" in fails(*ddp)  # 12 images are not divisible by 8
    run_command(*ddp, *way.split(), folder=tmp_path)
    checkpoint = torch.load(last, weights_only=True)
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (24, 1)
    assert {group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]} == {1e-6}


AS_TYPED = ["--data.batch_size 2 --trainer.accumulate_grad_batches 2"]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ((4, 1, 2), None),  # unchanged
        ((2, 2, 2), None),
        ((8, 1, 1), None),
        (
            (1, 3, 2),
            "--data.batch_size 4 --trainer.accumulate_grad_batches 1 on 2 devices, or with --data.batch_size 1 "
            "--trainer.accumulate_grad_batches 4 on 2 devices.",
        ),
        ((4, 1, 3), "Resume with --data.batch_size 4 --trainer.accumulate_grad_batches 1 on 2 devices. At the end"),
        ((16, 1, 4), "or with --data.batch_size 2 --trainer.accumulate_grad_batches 1 on 4 devices"),
    ],
)
def test_images_must_be_whole_steps(now: tuple[int, int, int], expected: str | None) -> None:
    """Ten batches of four on each of two devices, and other devices."""
    state = {"images_done": 20, **GlobalBatch(4, 1, 2)._asdict()}
    found = refusal(state, GlobalBatch(*now))
    assert found is None if expected is None else expected in str(found)
    assert refusal({"images_done": 20}, GlobalBatch(*now)) is None or 20 * now[2] % math.prod(now)
