"""Lightning's Trainer with a LightningModule of your own, and everything that can be turned off turned off.

It does for you: the loop with validation, devices, strategies, precision, gradient accumulation and clipping. Progress
bar, logger, checkpoints and model summary are off here, so that the overhead per step is that of the Trainer alone.

It leaves to you: the network, optimizer and schedule, and what a run logs and saves.

Mixed precision is ``Trainer(precision=...)`` and covers the whole ``training_step``. 16-mixed on a CPU is replaced by
bf16-mixed, with a warning; real float16 there needs an explicit plugin, as below.
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from vit_finetune.benchmark.frameworks.task import Task, record
from vit_finetune.data.datasets import Batch


class Classifier(LightningModule):
    """The shared network with the loss, the optimizer and the schedule."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.optimizer = task.build()
        self.schedule = task.schedule(self.optimizer)
        self.correct = self.total = 0

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch["image"]).float(), batch["label"])
        record.losses.append(loss.detach())
        return loss

    @override
    def on_train_batch_end(self, outputs: object, batch: Batch, batch_idx: int) -> None:
        self.schedule.step_update(batch_idx + 1 + self.trainer.current_epoch * int(self.trainer.num_training_batches))

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.correct += int((self.model(batch["image"]).argmax(-1) == batch["label"]).sum())
        self.total += len(batch["label"])

    @override
    def configure_optimizers(self) -> Optimizer:
        return self.optimizer


def run(task: Task) -> None:
    """Train and evaluate."""
    float16_on_cpu = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    by_plugin = task.precision == "16-mixed" and task.device == "cpu"
    model = Classifier(task)
    trainer = Trainer(
        accelerator=task.device,
        devices=1,
        precision=None if by_plugin else task.precision,
        plugins=[float16_on_cpu] if by_plugin else None,
        max_epochs=task.epochs,
        check_val_every_n_epoch=task.epochs,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=task.data())
    record.accuracy = model.correct / model.total
