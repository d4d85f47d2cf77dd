"""Losses of twenty steps under each precision and speed config, compared with a 32-true reference on a CPU."""

from pathlib import Path

import pytest

from tests.conftest import CPU, REPOSITORY, TINY_MODEL, make_tree, only, scalars, weights
from vit_finetune import main

CONFIGS = REPOSITORY / "configs"

# Largest allowed difference of a loss from 32-true over twenty steps; the losses fall from 1.05 to 0.68.
TOLERANCE = {
    "precision/32-true": 0.0,
    "precision/tf32": 0.0,  # a CPU has no TF32
    "precision/16-mixed-cpu": 0.07,  # equal to 0.001 until the first loss scale overflows, and that step is skipped
    "precision/16-mixed": 0.02,  # runs as bf16-mixed on a CPU
    "precision/bf16-mixed": 0.02,
    # The random weights are drawn in 16 bits, so they differ; small updates are lost afterwards.
    "precision/bf16-true": 0.35,
    "speed/grad_checkpointing": 0.0,
    "speed/compile": 1e-4,
}


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Twenty steps of batch 8 over 160 images, in a fixed order and without augmentation."""
    tree = make_tree(tmp_path / "images", {"train": 54, "val": 1}, side=32)
    data = ["--data=ImageFolder", f"--data.root={tree}", "--data.shift=0", "--data.crop_scale=0", "--data.flip=false"]
    return ["fit", *TINY_MODEL, *CPU, *data, "--trainer.log_every_n_steps=1", "--trainer.limit_train_batches=20"]


def losses(run: Path) -> list[float]:
    return [value for _, value in scalars(run)["train/loss_step"]]


@pytest.mark.parametrize(
    "overlay", [pytest.param(n, marks=pytest.mark.slow if n == "speed/compile" else ()) for n in TOLERANCE]
)
def test_losses_stay_close_to_the_reference(overlay: str, options: list[str], tmp_path: Path) -> None:
    steps = ["--trainer.max_epochs=1", "--data.batch_size=8", "--model.lr=1e-3"]
    main([*options, *steps, "--experiment=reference"])
    main([*options, *steps, f"--config={CONFIGS / overlay}.yaml", "--experiment=other"])
    reference, other = losses(tmp_path / "runs" / "reference"), losses(tmp_path / "runs" / "other")
    assert len(reference) == len(other) == 20 and reference[-1] < reference[0]
    assert max(abs(a - b) for a, b in zip(reference, other, strict=True)) <= TOLERANCE[overlay]


def test_float16_without_loss_scale_trains_or_fails_clearly(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """AdamW's epsilon of 1e-8 is zero in float16; some releases of PyTorch train despite that, others do not."""
    code: object = 0
    try:
        main([*options, "--data.batch_size=8", f"--config={CONFIGS / 'precision' / '16-true'}.yaml"])
    except SystemExit as stop:
        code = stop.code
    assert code == (1 if "loss is not finite" in capsys.readouterr().err else 0)


def test_two_small_batches_equal_a_large_one(options: list[str], tmp_path: Path) -> None:
    """Accumulation of 2 x 8 against 16: the same weights within 1e-5."""
    main([*options, "--trainer.max_epochs=1", "--data.batch_size=16", "--trainer.limit_train_batches=10"])
    two = ["--data.batch_size=8", "--trainer.accumulate_grad_batches=2", "--trainer.limit_train_batches=20"]
    main([*options, "--trainer.max_epochs=1", *two, "--experiment=two"])
    runs = [tmp_path / "runs" / name for name in ("imagefolder", "two")]
    left, right = (weights(only(run, "last.ckpt")) for run in runs)
    for key, value in left.items():
        assert (value - right[key]).abs().max() <= 1e-5, key
