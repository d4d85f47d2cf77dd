"""What is noted while a front end trains, equally for all: times, losses, accuracy."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from vit_finetune.data import Shapes
from vit_finetune.data.datasets import Batch, MemoryPictures, PictureSet

clock: list[float] = []
"""When each training batch was asked for, in seconds."""
losses: list[Tensor] = []
"""Loss of each step, left on its device."""
accuracies: list[float] = []
"""Share of the held-out pictures that were told right, after each evaluation."""


def clear() -> None:
    """Forgets an earlier run of this process."""
    for noted in (clock, losses, accuracies):
        noted.clear()


class TimedPictures(MemoryPictures):
    """Notes when each batch is asked for."""

    def __getitems__(self, positions: list[int]) -> Batch:
        """Returns the batch."""
        clock.append(time.perf_counter())
        return super().__getitems__(positions)


class TimedShapes(Shapes):
    """The generated pictures, those to train on with a clock."""

    def load(self, stage: str) -> dict[str, PictureSet]:
        """Draws the same pictures as :class:`Shapes`."""
        sets = super().load(stage)
        if "train" in sets:
            sets["train"].__class__ = TimedPictures
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
