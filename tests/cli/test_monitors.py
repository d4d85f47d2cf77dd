"""Monitored metrics are checked against what this run will log, before it starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.conftest import TINY_KWARGS, make_tree, scalars
from vit_finetune import ImageFolder, ViTClassifier, main
from vit_finetune.callbacks import BestCheckpoint
from vit_finetune.cli.monitors import LOGGER_ONLY, LOGGER_ONLY_GROUPS, problems
from vit_finetune.module import METRICS


@pytest.mark.parametrize(
    ("monitor", "reason"),
    [
        ("train/grad_norm", "which goes to the logger only and is not available to callbacks. Expected one of: train/"),
        ("precision/loss_scale", "which goes to the logger only"),
        ("train/f1", "which is not logged. Expected one of: train/loss"),
        ("val_acc", "which is not logged"),
    ],
)
def test_unavailable_metrics(monitor: str, reason: str, folder_args: list[str], fails: Callable[..., str]) -> None:
    message = fails("fit", *folder_args, f"--best_checkpoint.monitor={monitor}")
    assert f"--best_checkpoint monitors '{monitor}', {reason}" in message
    assert not Path("runs").exists()


def test_step_is_for_checkpoints_only(folder_args: list[str], fails: Callable[..., str]) -> None:
    stopping = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=step"]
    assert "EarlyStopping monitors 'step', which is not logged" in fails("fit", *folder_args, *stopping)


@pytest.mark.parametrize("data", [["--data=ImageFolder"], ["--data=Shapes", "--model.class_names=[a, b, c]"]])
def test_top5_of_few_classes_is_refused_before_the_first_epoch(
    data: list[str], folder_args: list[str], fails: Callable[..., str]
) -> None:
    """The classes of a folder are known when it is read; nothing is left of the run."""
    options = [arg for arg in folder_args if "Shapes" not in data[0] or not arg.startswith("--data")]
    message = fails("fit", *options, *data, "--best_checkpoint.monitor=val/acc_top5")
    assert "--best_checkpoint monitors 'val/acc_top5', which needs more than five classes; the data has 3" in message
    assert "train/acc_top5" not in message.partition("Expected")[2]
    assert not Path("runs").exists()


def test_top5_of_six_classes(tmp_path: Path, folder_args: list[str]) -> None:
    make_tree(tmp_path / "more", {"train": 2, "val": 1})
    for split in ("train", "val"):
        for name in "abc":
            (tmp_path / "images" / split / f"{name}2").mkdir(parents=True)
            image = tmp_path / "more" / split / name / "00.png"
            image.rename(tmp_path / "images" / split / f"{name}2" / "00.png")
    main(["fit", *folder_args, "--best_checkpoint.monitor=val/acc_top5"])
    assert list(Path("runs").rglob("best-epoch00-acc_top5*.ckpt"))


class WithEntropy(ViTClassifier):
    """Logs a metric of its own."""


class LogsEntropy(Callback):
    """Logs a metric of its own."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("val/entropy", 0.5)


def test_metrics_of_the_users_own_classes_are_left_to_lightning(folder_args: list[str]) -> None:
    options = {"pretrained": False, "timm_kwargs": TINY_KWARGS}
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[BestCheckpoint("val/entropy")])
    assert problems(trainer, WithEntropy(**options), None) == []
    assert len(problems(trainer, ViTClassifier(**options), None)) == 1
    callback = f"--trainer.callbacks+={__name__}.LogsEntropy"
    main(["fit", *folder_args, callback, "--best_checkpoint.monitor=val/entropy"])
    assert list(Path("runs").rglob("best-epoch00-entropy0.5000.ckpt"))


def test_tags_are_known(folder_args: list[str]) -> None:
    """Each tag of an event file is either available to callbacks or known not to be."""
    main(["fit", *folder_args, "--trainer.precision=bf16-mixed"])
    tags = {*scalars(Path("runs"))} - {"epoch", "hp_metric"}
    assert tags - {*METRICS, *LOGGER_ONLY} == {tag for tag in tags if tag.startswith(LOGGER_ONLY_GROUPS)}


def test_python_trainer_of_a_subclass(tree: Path) -> None:
    model = WithEntropy(
        "vit_tiny_patch16_224", 32, pretrained=False, timm_kwargs=TINY_KWARGS, class_names=["a", "b", "c"]
    )
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[BestCheckpoint("val/loss")])
    trainer.fit(model, datamodule=ImageFolder(tree, batch_size=4))
    assert list(Path("checkpoints").glob("best-epoch00-loss*.ckpt"))
