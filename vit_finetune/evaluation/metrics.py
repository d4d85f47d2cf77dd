"""Loss and accuracy of a stage, its collected predictions, and the training metrics logged every few steps."""

import math
import os
import re
import shlex
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from vit_finetune.errors import NonFiniteLossError


def direction(metric: str) -> str | None:
    """Return ``min`` for a loss, ``max`` for an accuracy, such as ``val/acc_top5``, and ``None`` for other metrics."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    lower, higher = "loss" in words, bool(words & {"acc", "accuracy"})
    return None if lower == higher else "min" if lower else "max"


class MacroAccuracy(Metric):
    """Mean recall of the classes that have images.

    The macro average of torchmetrics counts a class without images as 0 as soon as it is predicted. Its metrics per
    class also count pairs of classes, in memory and time that grow with the square of their number.

    Args:
        num_classes: Number of classes.
    """

    correct: Tensor
    images: Tensor
    full_state_update = False

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        for name in ("correct", "images"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")

    @override
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count the images of a batch.

        Args:
            logits: Shape ``(B, C)``.
            labels: int64, shape ``(B,)``.
        """
        # bincount would make the host wait for the GPU.
        self.images = self.images.index_add(0, labels, torch.ones_like(labels))
        self.correct = self.correct.index_add(0, labels, (logits.argmax(-1) == labels).long())

    @override
    def compute(self) -> Tensor:
        """Return the mean, a scalar; NaN without images."""
        return (self.correct / self.images).nanmean()


class StageMetrics(nn.Module):
    """Mean loss and accuracy over all images of a stage, exact for any number of processes and uneven batches.

    Args:
        num_classes: With more than five classes, top-5 accuracy is computed too.
        macro: Compute the mean accuracy of the classes too.
    """

    def __init__(self, num_classes: int, macro: bool = False) -> None:
        super().__init__()
        top = {"acc": 1} | ({"acc_top5": 5} if num_classes > 5 else {})
        self.loss = MeanMetric(nan_strategy="disable")  # a NaN loss must be visible, not skipped
        self.accuracy = MetricCollection(
            {
                name: MulticlassAccuracy(num_classes, top_k=k, average="micro", validate_args=False)
                for name, k in top.items()
            }
        )
        if macro:
            self.accuracy.add_metrics({"acc_macro": MacroAccuracy(num_classes)})

    def add(self, losses: Tensor, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Update the metrics.

        Args:
            losses: Loss of each image, or the mean loss of its batch, shape ``(B,)``.
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.

        Returns:
            ``loss`` and ``acc`` of these images only, in this process; empty without images.
        """
        if not len(labels):
            return {}
        self.loss.update(losses)
        self.accuracy.update(logits, labels)
        return {"loss": losses.mean(), "acc": (logits.argmax(-1) == labels).float().mean()}

    def log(self, module: LightningModule, stage: str) -> None:
        """Log ``stage/loss``, ``stage/acc``, ``stage/acc_top5`` and ``stage/acc_macro`` at the end of an epoch."""
        module.log(f"{stage}/loss", self.loss, prog_bar=True)
        for name, metric in self.accuracy.items():
            module.log(f"{stage}/{name}", metric, prog_bar=name == "acc")


class PredictionCollector(Metric):
    """Logits and labels of a whole stage, gathered from all processes.

    Used for results that cannot be accumulated batch by batch: the temperature and the test report.
    """

    logits: list[Tensor]
    labels: list[Tensor]
    index: list[Tensor]
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("logits", "labels", "index"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @override
    def update(self, logits: Tensor, labels: Tensor, index: Tensor) -> None:
        """Keep a batch.

        Args:
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.
            index: Position of each image in its dataset, int64, shape ``(B,)``.
        """
        self.logits.append(logits)
        self.labels.append(labels)
        self.index.append(index)

    @override
    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, labels and index of all images, each once, sorted by index."""
        logits, labels, index = (dim_zero_cat(batches) for batches in (self.logits, self.labels, self.index))
        order = index.argsort()
        # Processes that compute the same images together (tensor parallel) all have their predictions.
        order = order[index[order].diff(prepend=index.new_tensor([-1])) > 0]
        return logits[order], labels[order], index[order]

    def predictions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``compute()`` with its dimensions; torchmetrics drops them from a tensor with a single element."""
        logits, labels, index = self.compute()
        return logits, labels.flatten(), index.flatten()


class StepLogger:
    """Training loss and accuracy, computed and logged once per logging interval.

    ``self.log`` costs about half a millisecond per key and step, and a value shown in the progress bar makes the host
    wait for the GPU in every step. Here the logits of the interval stay in memory until it ends.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}  # the values logged last, for progress bars
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []  # losses, logits, labels

    def clear(self) -> None:
        """Drop the steps that were not logged."""
        self._steps.clear()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Keep a step.

        Args:
            loss: Mean loss of the batch, a scalar.
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.
        """
        self._steps.append((loss.detach().expand(len(logits)), logits.detach(), labels))

    def log(self, module: LightningModule, metrics: StageMetrics, step: int) -> None:
        """Add the steps to ``metrics``; log their mean loss and accuracy, and the learning rate.

        Raises:
            NonFiniteLossError: The loss is NaN or inf.
        """
        if not self._steps:
            return
        means = metrics.add(*(torch.cat(column) for column in zip(*self._steps, strict=True)))
        self.clear()
        self.latest = {f"train/{name}_step": float(value) for name, value in means.items()}
        self.latest["train/lr"] = learning_rate(module.trainer)
        require_finite(module.trainer, self.latest["train/loss_step"], "training")
        for logger in module.loggers:
            logger.log_metrics(self.latest, step=step)


def learning_rate(trainer: Trainer) -> float:
    """Return the largest learning rate of all parameter groups, which is that of the head."""
    return max((group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups), default=0.0)


def require_finite(trainer: Trainer, loss: float, stage: str) -> None:
    """Stop all processes if the loss of one is NaN or inf, before a good checkpoint is overwritten.

    Raises:
        NonFiniteLossError: The loss of a process is NaN or inf.
    """
    if not trainer.strategy.reduce_boolean_decision(math.isfinite(loss), all=True):
        state = f"learning rate {learning_rate(trainer):.3g}, precision {trainer.precision}"
        last = _resumable(trainer)
        again = f"The last good checkpoint is kept; resume with --ckpt_path {last} and" if last else "Start again with"
        raise NonFiniteLossError(
            f"The {stage} loss is not finite by step {trainer.global_step} ({state}). {again} a lower --model.lr, a "
            "longer --model.warmup, --trainer.gradient_clip_val 1, or --trainer.precision bf16-mixed or 32-true."
        )


def _resumable(trainer: Trainer) -> str | None:
    """Return the checkpoint that the run has saved to resume from, ``None`` before the first one."""
    for callback in trainer.checkpoint_callbacks:
        path = getattr(callback, "path", None)  # that of ResumeCheckpoint, which this module cannot import
        if isinstance(path, Path) and path.exists() and not getattr(callback, "save_weights_only", False):
            return shlex.quote(os.path.relpath(path))
    return None
