"""Gradual unfreezing: parts of the network that change in each epoch, exact resume, plain DDP."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from tests.conftest import CPU, TINY_MODEL, equal, make_tree, only, weights
from vit_finetune import main
from vit_finetune.model.unfreeze import ddp_conflict

PARTS = {"patch_embed": set[int](), "blocks.0": set[int](), "blocks.1": set[int](), "norm": set[int](), "head": set()}


class Changes(Callback):
    """Record the epochs in which each part of the network changes."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for epochs in PARTS.values():
            epochs.clear()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = {name: weight.detach().clone() for name, weight in pl_module.net.named_parameters()}  # type: ignore[union-attr]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, weight in pl_module.net.named_parameters():  # type: ignore[union-attr]
            for part, epochs in PARTS.items():
                if name.startswith(part) and not torch.equal(weight, self.before[name]):
                    epochs.add(trainer.current_epoch)


class StopAfterTwo(Callback):
    """End the run after two epochs."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 1


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    tree = make_tree(tmp_path / "images", {"train": 4, "val": 1}, side=32)
    data = ["--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4"]
    return [*TINY_MODEL, *CPU, *data, "--trainer.max_epochs=4", "--model.unfreeze_by=2", "--model.lr=0.01"]


def test_blocks_join_from_the_top(options: list[str]) -> None:
    main(["fit", *options, "--trainer.callbacks+=tests.model.test_unfreeze.Changes"])
    assert {
        "head": {0, 1, 2, 3},
        "norm": {1, 2, 3},
        "blocks.1": {1, 2, 3},
        "blocks.0": {2, 3},
        "patch_embed": {2, 3},
    } == PARTS


def test_resumed_equals_uninterrupted(options: list[str], tmp_path: Path) -> None:
    options += ["--model.ema=0.9", "--trainer.gradient_clip_val=1"]
    main(["fit", *options, "--experiment=whole"])
    main(["fit", *options, "--experiment=parts", "--trainer.callbacks=tests.model.test_unfreeze.StopAfterTwo"])
    last = only(tmp_path / "runs" / "parts", "last.ckpt")
    main(["fit", *options, f"--ckpt_path={last}"])
    assert equal(weights(only(tmp_path / "runs" / "whole", "last.ckpt")), weights(last))


def test_plain_ddp_is_refused() -> None:
    assert "ddp_find_unused_parameters_true" in str(ddp_conflict(DDPStrategy()))
    assert ddp_conflict(DDPStrategy(find_unused_parameters=True)) is None
    assert ddp_conflict(SingleDeviceStrategy("cpu")) is None
