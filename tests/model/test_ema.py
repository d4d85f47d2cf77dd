"""EMA of the weights: values, validation and checkpoints, exact resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.conftest import CPU, TINY, TINY_MODEL, equal, make_tree, only, read_events, scalars, weights
from vit_finetune import ViTClassifier, main

HEAD = "net.head.weight"
SEEN: list[torch.Tensor] = []


class Record(Callback):
    """Copy the head before training and after each batch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        SEEN[:] = [pl_module.get_parameter(HEAD).detach().clone()]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        SEEN.append(pl_module.get_parameter(HEAD).detach().clone())


class StopAfterOne(Callback):
    """End the run after the first epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 0


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """18 training images: five batches of four."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 2, "test": 1}, side=32)
    return ["--data=ImageFolder", f"--data.root={tree}"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_ema_is_validated_and_saved(data: list[str], tmp_path: Path, precision: str) -> None:
    """Equal to a computation by hand from the recorded weights: three optimizer steps in five batches."""
    options = [*TINY, *data, "--model.lr=0.01", "--model.ema=0.2", "--trainer.accumulate_grad_batches=2"]
    main(["fit", *options, f"--trainer.precision={precision}", "--trainer.callbacks+=tests.model.test_ema.Record"])
    average = SEEN[0].float()
    for step, batch in ((1, 2), (2, 4), (3, 5)):
        average = average.lerp(SEEN[batch].float(), 1 - min(0.2, (1 + step) / (10 + step)))
    last, best = (torch.load(only(tmp_path, name), weights_only=True) for name in ("last.ckpt", "best-*.ckpt"))
    assert torch.equal(last["state_dict"][HEAD], average)
    assert torch.equal(last["training_weights"][HEAD], SEEN[-1]) and not torch.equal(SEEN[-1].float(), average)
    assert equal(last["state_dict"], best["state_dict"]) and "training_weights" not in best
    module = ViTClassifier.load_from_checkpoint(only(tmp_path, "best-*.ckpt"))
    assert equal(module.state_dict(), last["state_dict"])
    if precision == "32-true":
        fit = dict(scalars(tmp_path / "runs"))["val/loss"][-1][1]
        main(["validate", "--ckpt_path=best", "--trainer.accelerator=cpu", "--experiment=again"])
        assert fit == pytest.approx(_newest(tmp_path / "runs", "val/loss"), abs=1e-6)


def _newest(runs: Path, tag: str) -> float:
    newest = max(runs.rglob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    events = read_events(newest)
    events.Reload()
    return float(events.Scalars(tag)[-1].value)


def test_resumed_equals_uninterrupted_with_everything_random(data: list[str], tmp_path: Path) -> None:
    """Bit for bit, with every augmentation and EMA."""
    options = [*TINY_MODEL, *CPU, *data, "--data.batch_size=4", "--trainer.max_epochs=3", "--model.ema=0.9"]
    options += ["--data.auto_augment=trivial", "--data.erase=0.5", "--data.mixup=0.2", "--data.cutmix=1"]
    main(["fit", *options, "--experiment=whole"])
    main(["fit", *options, "--experiment=parts", "--trainer.callbacks=tests.model.test_ema.StopAfterOne"])
    last = only(tmp_path / "runs" / "parts", "last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 5
    main(["fit", *options, f"--ckpt_path={last}"])
    whole, parts = (
        torch.load(only(tmp_path / "runs" / name, "last.ckpt"), weights_only=True) for name in ("whole", "parts")
    )
    assert equal(whole["state_dict"], parts["state_dict"])
    assert equal(whole["training_weights"], parts["training_weights"])


def test_run_without_ema_can_resume_with_one_but_not_the_reverse(
    data: list[str], tmp_path: Path, fails: Callable[..., str]
) -> None:
    main(["fit", *TINY, *data])
    last = only(tmp_path, "last.ckpt")
    before = weights(last)
    main(["fit", f"--ckpt_path={last}", *CPU, "--model.ema=0.999", "--model.lr=0", "--trainer.max_epochs=2"])
    assert weights(last)[HEAD] == pytest.approx(before[HEAD], abs=1e-5)
    message = fails("fit", f"--ckpt_path={last}", *CPU, "--model.ema=null", "--trainer.max_epochs=3")
    assert "--model.ema" in message


@pytest.mark.parametrize("value", ["1", "-0.1"])
def test_decay_out_of_range_is_refused(data: list[str], fails: Callable[..., str], value: str) -> None:
    assert f"--model.ema is {float(value)}" in fails("fit", *TINY, *data, f"--model.ema={value}")
