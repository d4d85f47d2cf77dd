"""What is noted while a framework trains, equally for all: times, losses, accuracy."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from vit_finetune.data import Shapes
from vit_finetune.data.datasets import Batch, ImageDataset, InMemoryDataset

clock: list[float] = []
"""When each training batch was asked for, in seconds."""
losses: list[Tensor] = []
"""Loss of each step, left on its device."""
accuracies: list[float] = []
"""Share of the held-out images that were told right, after each evaluation."""


def clear() -> None:
    """Forgets an earlier run of this process."""
    for noted in (clock, losses, accuracies):
        noted.clear()


class TimedDataset(InMemoryDataset):
    """Notes when each batch is asked for."""

    def __getitems__(self, positions: list[int]) -> Batch:
        """Returns the batch."""
        clock.append(time.perf_counter())
        return super().__getitems__(positions)


class TimedShapes(Shapes):
    """The generated images, those to train on with a clock."""

    def load(self, stage: str) -> dict[str, ImageDataset]:
        """Draws the same images as :class:`Shapes`."""
        sets = super().load(stage)
        if "train" in sets:
            sets["train"].__class__ = TimedDataset
        return sets


class Recorder(Callback):
    """Notes losses and accuracy of a Lightning run."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Keeps the loss without reading it."""
        losses.append(outputs["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the accuracy of the last validation."""
        accuracies.append(float(trainer.callback_metrics["val/acc"]))
