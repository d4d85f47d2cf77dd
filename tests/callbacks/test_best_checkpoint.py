"""The best checkpoint by any metric, and of a run that moves to another folder."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import CPU, only, scalars
from vit_finetune import main


def test_direction_and_file_name_follow_from_the_metric(folder_args: list[str]) -> None:
    """A learning rate that ruins the weights: the lowest loss is not the last."""
    ruin = ["--trainer.max_epochs=3", "--model.lr=0.5", "--model.optimizer=sgd", "--model.warmup=1"]
    main(["fit", *folder_args, *ruin, "--best_checkpoint.monitor=val/loss"])
    best = only(Path("runs"), "best-*.ckpt")
    losses = [value for _, value in scalars(Path("runs"))["val/loss"]]
    assert best.name == f"best-epoch{losses.index(min(losses)):02d}-loss{min(losses):.4f}.ckpt"
    assert losses.index(min(losses)) != 2


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--best_checkpoint.monitor=train/loss"], r"best-epoch01-loss\d\.\d{4}\.ckpt"),
        (["--best_checkpoint.monitor=step"], r"best-epoch01-step10\.0000\.ckpt"),
        (["--best_checkpoint.monitor=null"], r"best-epoch01\.ckpt"),
        (["--best_checkpoint.monitor=val/loss", "--best_checkpoint.filename=best-mine"], r"best-mine\.ckpt"),
    ],
)
def test_other_things_to_monitor(
    options: list[str], pattern: str, folder_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *folder_args, "--trainer.max_epochs=2", "--model.lr=0.01", *options])
    best = only(Path("runs"), "best-*.ckpt")
    assert re.fullmatch(pattern, best.name), best.name
    out = capsys.readouterr().out
    assert str(best) in out and "test --ckpt_path best" in out


@pytest.mark.parametrize(
    ("metric", "mode", "right"), [("val/loss", "max", "min"), ("val/acc", "min", "max"), ("train/acc", "min", "max")]
)
def test_contradiction_is_refused(
    metric: str, mode: str, right: str, folder_args: list[str], fails: Callable[..., str]
) -> None:
    message = fails("fit", *folder_args, f"--best_checkpoint.monitor={metric}", f"--best_checkpoint.mode={mode}")
    assert f"--best_checkpoint monitors '{metric}' with mode {mode}" in message and f"set mode {right}" in message
    assert not Path("runs").exists()


def test_early_stopping_goes_the_right_way(folder_args: list[str], fails: Callable[..., str]) -> None:
    stopping = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/acc"]
    main(["fit", *folder_args, *stopping])
    config = yaml.safe_load(only(Path("runs"), "config.yaml").read_text())
    assert config["trainer"]["callbacks"][0]["init_args"]["mode"] == "max"
    Path("my.yaml").write_text(
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/acc, mode: min}}]}\n"
    )
    message = fails("fit", *folder_args, "--config=my.yaml")
    assert "EarlyStopping monitors 'val/acc' with mode min" in message
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/acc"]
    main(["fit", *folder_args, *own, "--experiment=own"])
    state = torch.load(only(Path("runs/own"), "last.ckpt"), weights_only=True)["callbacks"]
    kinds = [key.partition("{")[0] for key in state if "'monitor': 'val/acc', 'mode': 'max'" in key]
    assert kinds == ["ModelCheckpoint", "BestCheckpoint"]


def test_moved_run_goes_on_with_its_best_values(folder_args: list[str]) -> None:
    """The first epoch stays the best, under its new path, and is deleted when a better one comes."""
    main(["fit", *folder_args, "--best_checkpoint.monitor=step", "--best_checkpoint.mode=min"])
    best = only(Path("runs"), "best-*.ckpt")
    shutil.move("runs/imagefolder/version_0", "moved")
    last = "--ckpt_path=moved/checkpoints/last.ckpt"
    main(["fit", *CPU, last, "--trainer.max_epochs=2", "--best_checkpoint.monitor=step", "--best_checkpoint.mode=min"])
    assert only(Path("moved"), "best-*.ckpt").name == best.name
    lone = shutil.copy("moved/checkpoints/last.ckpt", "lone.ckpt")
    options = ["--trainer.max_epochs=3", "--best_checkpoint.monitor=step", "--best_checkpoint.mode=min"]
    main(["fit", *CPU, f"--ckpt_path={lone}", *options])
    assert only(Path("runs"), "best-*.ckpt").name == "best-epoch02-step15.0000.ckpt"
