"""Options that depend on the number of batches in an epoch: 5 for training and 3 for validation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import only, scalars
from vit_finetune import main

STOPPING = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.val_check_interval=1000"], "val_check_interval is 1000, but an epoch has 5 batches; expected at"),
        (["--trainer.val_check_interval=3", "--trainer.limit_train_batches=2"], "an epoch has 2 batches"),
        (["--trainer.val_check_interval=4", "--data.batch_size=6"], "an epoch has 3 batches"),
        (["--trainer.limit_train_batches=0.1"], "limit_train_batches is 0.1, which is less than one of the 5 train"),
        (["--trainer.limit_val_batches=0.1"], "less than one of the 3 val batches; expected at least 0.34."),
        (["--trainer.overfit_batches=0.1"], "Found 2 problems:\n  1. --trainer.overfit_batches is 0.1"),
        (["--trainer.limit_train_batches=0"], "limit_train_batches is 0, so nothing would be trained"),
        (
            [*STOPPING, "--trainer.check_val_every_n_epoch=2"],
            "EarlyStopping monitors 'val/loss', but --trainer.check_v",
        ),
        (
            [*STOPPING, "--trainer.check_val_every_n_epoch=null", "--trainer.val_check_interval=6"],
            "val_check_interval 6 is more than the 5 batches of the run, so validation does not run.",
        ),
    ],
)
def test_refused_before_anything_is_written(
    options: list[str], message: str, folder_args: list[str], fails: Callable[..., str]
) -> None:
    assert message in fails("fit", *folder_args, *options)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--trainer.val_check_interval=5"], [4]),
        (["--trainer.val_check_interval=0.1"], [0, 1, 2, 3, 4]),  # less than a batch: after each
        (["--trainer.limit_val_batches=0.34"], [4]),
        (["--trainer.check_val_every_n_epoch=null", "--trainer.val_check_interval=8", "--trainer.max_epochs=2"], [7]),
    ],
)
def test_reached_in_time(options: list[str], steps: list[int], folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args, *options])
    assert [step for step, _ in scalars(tmp_path / "runs")["val/acc"]] == steps


def test_run_without_validation_is_announced(folder_args: list[str], tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="check_val_every_n_epoch 2 is more than --trainer.max_epochs 1: validation do"
    ):
        main(["fit", *folder_args, "--trainer.check_val_every_n_epoch=2"])
    assert only(tmp_path, "last.ckpt") and not list(tmp_path.rglob("best-*"))


def test_shorter_epoch_than_already_trained_is_refused(
    folder_args: list[str], tmp_path: Path, fails: Callable[..., str]
) -> None:
    main(["fit", *folder_args, "--trainer.max_steps=3"])
    last = only(tmp_path, "last.ckpt")
    message = fails("fit", *folder_args, f"--ckpt_path={last}", "--trainer.limit_train_batches=2")
    assert "after 3 of its batches; with these options an epoch has 2 batches" in message
    assert not (last.parent.parent / "config-1.yaml").exists()
    main(["fit", *folder_args, f"--ckpt_path={last}", "--trainer.limit_train_batches=4"])
    assert torch.load(last, weights_only=True)["global_step"] == 4
