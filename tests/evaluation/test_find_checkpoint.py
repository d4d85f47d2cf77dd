"""``best`` is the best by the monitored value, of the newest run, wherever the word is understood."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.conftest import equal, only, weights
from vit_finetune import ViTClassifier, main
from vit_finetune.evaluation.find_checkpoint import find, newest
from vit_finetune.evaluation.metrics import direction

VALUES = [0.2, 0.9, 0.5]


class Score(Callback):
    """Logs a metric whose best value, of whichever mode, is not that of the last epoch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("val/my/score", VALUES[trainer.current_epoch])


SCORE = [f"--trainer.callbacks+={__name__}.Score", "--best_checkpoint.monitor=val/my/score", "--trainer.max_epochs=3"]


@pytest.mark.parametrize(("mode", "keep", "name"), [("max", 3, "epoch01-score0.9000"), ("min", -1, "epoch00-score0.2")])
def test_best_of_several_by_value(
    mode: str, keep: int, name: str, folder_args: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    main(["fit", *folder_args, *SCORE, f"--best_checkpoint.mode={mode}", f"--best_checkpoint.save_top_k={keep}"])
    assert len(list(Path("runs").rglob("best-*.ckpt"))) == 3
    best = only(Path("runs"), f"best-{name}*.ckpt")
    assert torch.load(best, weights_only=True)["vit_finetune"]["monitored"] == {
        "metric": "val/my/score",
        "mode": mode,
        "value": pytest.approx(float(name.rpartition("score")[2])),
    }
    shutil.move("runs", "moved")
    best = Path("moved", *best.parts[1:])
    root = "--trainer.default_root_dir=moved"
    for source, args in (("best", ["--ckpt_path=best", root]), ("run", [f"--ckpt_path={best}", root])):
        caplog.clear()
        with caplog.at_level("INFO"):
            main(["test", *args, "--trainer.accelerator=cpu"])
        assert f"checkpoint: {best}, val/my/score {float(name.rpartition('score')[2]):.4f}" in caplog.text, source
    for folder in ("moved", best.parent.parent, best.parent):
        assert equal(ViTClassifier.load(folder).state_dict(), weights(best))
    assert f"checkpoint: {best}, val/my/score" in caplog.text
    assert equal(ViTClassifier.load("best", "moved").state_dict(), weights(best))


def save(path: Path, metric: str | None, mode: str, value: float, time: int) -> Path:
    """Write a checkpoint that stores a monitored value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    monitored = {"metric": metric, "mode": mode, "value": value} if metric else None
    torch.save({"pytorch-lightning_version": "2.6.6", "vit_finetune": {"monitored": monitored}}, path)
    os.utime(path, (time, time))
    return path


def test_newest_run_not_newest_file() -> None:
    """A run that began earlier ended later; the newest run without a best one does not count."""
    for number, started in ((0, 100), (1, 200), (2, 300)):
        config = Path(f"runs/x/version_{number}/config.yaml")
        config.parent.mkdir(parents=True)
        config.touch()
        os.utime(config, (started, started))
    save(Path("runs/x/version_0/checkpoints/best-0.ckpt"), "val/acc", "max", 0.9, 900)
    expected = save(Path("runs/x/version_1/checkpoints/best-0.ckpt"), "val/acc", "max", 0.7, 250)
    save(Path("runs/x/version_1/checkpoints/best-1.ckpt"), "val/acc", "max", 0.6, 260)
    last = save(Path("runs/x/version_2/checkpoints/last.ckpt"), "val/acc", "max", 0.5, 350)
    assert newest(Path("runs"), "best") == expected and find("runs/x", Path("none")) == expected
    assert newest(Path("runs"), "last") == last and find("runs/x/version_2", Path("none")) == last


def test_equal_nan_foreign_and_damaged_values() -> None:
    folder = Path("runs/x/version_0/checkpoints")
    save(folder / "best-0.ckpt", "val/acc", "max", 1.0, 1)  # monitored before the run was resumed
    save(folder / "best-1.ckpt", "val/loss", "min", float("nan"), 2)
    expected = save(folder / "best-2.ckpt", "val/loss", "min", 0.4, 3)
    save(folder / "best-3.ckpt", "val/loss", "min", 0.4, 4)
    (folder / "best-4.ckpt").write_bytes(b"cut short")
    os.utime(folder / "best-4.ckpt", (3, 3))
    save(folder / "best-5.ckpt", "val/loss", "min", 0.8, 5)
    assert newest(Path("runs"), "best") == expected


def test_unknown_values_mean_the_newest_file() -> None:
    save(Path("runs/x/version_0/checkpoints/best-0.ckpt"), None, "max", 0, 1)
    expected = save(Path("runs/x/version_0/checkpoints/best-1.ckpt"), None, "max", 0, 2)
    assert newest(Path("runs"), "best") == expected


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("val/loss", "min"),
        ("train/loss_step", "min"),
        ("val/acc", "max"),
        ("val/acc_top5", "max"),
        ("val_accuracy", "max"),
        ("val/entropy", None),
        ("step", None),
        ("val/glossiness", None),
        ("loss_of_acc", None),
    ],
)
def test_direction_of_a_metric(metric: str, expected: str | None) -> None:
    assert direction(metric) == expected
