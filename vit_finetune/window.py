"""Logging within an epoch at next to no cost, and the check that the loss is still a number."""

import math

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from vit_finetune.scores import Scores


class NotFinite(RuntimeError):
    """The loss is not a number any more; the message says where and what may help."""


class TrainWindow:
    """The steps since the last logged point; metrics are fed when a point is due, all steps at once.

    ``self.log`` in every step would cost about half a millisecond a key, and what it shows in a bar is read, on a GPU
    waited for, at every step. Until the point is due, the logits of the window stay in memory.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}  # the last point, for progress displays
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []  # losses, logits, labels

    def clear(self) -> None:
        """Forgets the steps that were not logged."""
        self._steps.clear()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Keeps a step.

        Args:
            loss: Mean loss of the batch, a scalar.
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.
        """
        self._steps.append((loss.detach().expand(len(logits)), logits.detach(), labels))

    def log(self, module: LightningModule, scores: Scores, step: int) -> None:
        """Counts the steps into ``scores`` and logs their mean loss and accuracy, and the learning rate.

        Raises:
            NotFinite: The loss is not a number.
        """
        if not self._steps:
            return
        means = scores.add(*(torch.cat(column) for column in zip(*self._steps, strict=True)))
        self._steps.clear()
        self.latest = {f"train/{name}_step": float(value) for name, value in means.items()}
        self.latest["train/lr"] = learning_rate(module.trainer)
        require_finite(module.trainer, self.latest["train/loss_step"], "training")
        for logger in module.loggers:
            logger.log_metrics(self.latest, step=step)


def learning_rate(trainer: Trainer) -> float:
    """The largest rate of all parameter groups: with layer decay that of the head."""
    return max((group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups), default=0.0)


def require_finite(trainer: Trainer, loss: float, stage: str) -> None:
    """Stops all processes when one has lost its numbers, before anything is saved over a good checkpoint.

    Raises:
        NotFinite: The loss of some process is not a number.
    """
    if not trainer.strategy.reduce_boolean_decision(math.isfinite(loss), all=True):
        state = f"learning rate {learning_rate(trainer):.3g}, precision {trainer.precision}"
        raise NotFinite(
            f"The {stage} loss is not finite by step {trainer.global_step} ({state}). The "
            "last good checkpoint is kept: --ckpt_path last. Try a lower --model.lr, a longer --model.warmup, "
            "--trainer.gradient_clip_val 1, or --trainer.precision bf16-mixed or 32-true."
        )
