"""Why a run ended early, and limits in a resumed run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from tests.conftest import only
from vit_finetune import main

STOPPING = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/acc", "--trainer.callbacks.mode=max"]


class StopsAtOnce(Callback):
    """A callback of the user."""

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [*STOPPING, "--trainer.callbacks.min_delta=2", "--trainer.callbacks.patience=1"],
            "EarlyStopping: val/acc did not improve in its last 1 values, best ",
        ),
        (
            [*STOPPING, "--trainer.callbacks.stopping_threshold=-1"],
            "EarlyStopping: Stopping threshold reached: val/acc",
        ),
        (["--trainer.max_time=00:00:00:00"], "Timer: the time limit of 0:00:00 is used up (--trainer.max_time)"),
        (["--trainer.max_steps=3"], "--trainer.max_steps 3"),
        (
            ["--trainer.callbacks+=tests.callbacks.test_stop_reason.StopsAtOnce"],
            "a callback that set trainer.should_stop: StopsAtOnce",
        ),
    ],
)
def test_one_line_says_what_ended_the_run(
    options: list[str], message: str, folder_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *folder_args, "--trainer.max_epochs=4", *options])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stopped by ")]
    assert line.startswith(f"stopped by {message}")


def test_run_that_ends_as_planned_has_no_such_line(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *folder_args, "--trainer.max_time=00:01:00:00", *STOPPING])
    assert "stopped by" not in capsys.readouterr().out


def test_time_limit_is_that_of_the_call(folder_args: list[str], tmp_path: Path) -> None:
    """The first call has used two hours."""
    main(["fit", *folder_args, "--trainer.max_time=00:03:00:00"])
    last = only(tmp_path, "last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["callbacks"]["Timer"]["time_elapsed"]["train"] = 7200.0
    torch.save(checkpoint, last)
    main(["fit", *folder_args, "--trainer.max_time=00:01:00:00", "--trainer.max_epochs=2", f"--ckpt_path={last}"])
    assert torch.load(last, weights_only=True)["global_step"] == 10


def test_typed_patience_overrides_the_checkpoint(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in epoch 2 after one value without improvement; with a patience of three two more epochs follow."""
    options = ["fit", *folder_args, *STOPPING, "--trainer.callbacks.min_delta=2", "--trainer.max_epochs=9"]
    main([*options, "--trainer.callbacks.patience=1"])
    last = only(tmp_path, "last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 10
    capsys.readouterr()
    main([*options, "--trainer.callbacks.patience=3", f"--ckpt_path={last}"])
    assert torch.load(last, weights_only=True)["global_step"] == 20
    assert "did not improve in its last 3 values" in capsys.readouterr().out
