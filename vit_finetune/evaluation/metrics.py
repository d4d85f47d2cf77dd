"""Loss, accuracy and answers of one stage."""

import math

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat

from vit_finetune.errors import NonFiniteLossError


class StageMetrics(nn.Module):
    """Means over all images of a stage, on any number of processes and with uneven batches.

    Args:
        num_classes: With more than five, top-5 accuracy is counted too.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        top = {"acc": 1} | ({"acc_top5": 5} if num_classes > 5 else {})
        self.loss = MeanMetric(nan_strategy="disable")  # a loss that is not a number must show, not be left out
        self.accuracy = MetricCollection(
            {
                name: MulticlassAccuracy(num_classes, top_k=k, average="micro", validate_args=False)
                for name, k in top.items()
            }
        )

    def add(self, losses: Tensor, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Counts images.

        Args:
            losses: For each image its loss, or the mean loss of the batch it came in, shape ``(B,)``.
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.

        Returns:
            ``loss`` and ``acc`` of these images alone, this process's share.
        """
        if not len(labels):
            return {}
        self.loss.update(losses)
        self.accuracy.update(logits, labels)
        return {"loss": losses.mean(), "acc": (logits.argmax(-1) == labels).float().mean()}

    def log(self, module: LightningModule, stage: str) -> None:
        """Logs ``stage/loss``, ``stage/acc`` and so on at the end of an epoch."""
        module.log(f"{stage}/loss", self.loss, prog_bar=True)
        for name, metric in self.accuracy.items():
            module.log(f"{stage}/{name}", metric, prog_bar=name == "acc")


class PredictionCollector(Metric):
    """Everything a stage answered, gathered from all processes when it is asked for.

    For what cannot be counted batch by batch: the temperature, the test report.
    """

    logits: list[Tensor]
    labels: list[Tensor]
    index: list[Tensor]
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("logits", "labels", "index"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor, index: Tensor) -> None:
        """Keeps images.

        Args:
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.
            index: int64, shape ``(B,)``, their positions in the set.
        """
        for kept, new in zip((self.logits, self.labels, self.index), (logits, labels, index), strict=True):
            kept.append(new)

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, labels and index of all images, each once, in the order of the index."""
        logits, labels, index = (dim_zero_cat(kept) for kept in (self.logits, self.labels, self.index))
        order = index.argsort()
        # Processes that share the work on an image (tensor parallel) all have its answer.
        order = order[index[order].diff(prepend=index.new_tensor([-1])) > 0]
        return logits[order], labels[order], index[order]


class StepLogger:
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

    def log(self, module: LightningModule, scores: StageMetrics, step: int) -> None:
        """Counts the steps into ``scores`` and logs their mean loss and accuracy, and the learning rate.

        Raises:
            NonFiniteLossError: The loss is not a number.
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
        NonFiniteLossError: The loss of some process is not a number.
    """
    if not trainer.strategy.reduce_boolean_decision(math.isfinite(loss), all=True):
        state = f"learning rate {learning_rate(trainer):.3g}, precision {trainer.precision}"
        raise NonFiniteLossError(
            f"The {stage} loss is not finite by step {trainer.global_step} ({state}). The "
            "last good checkpoint is kept: --ckpt_path last. Try a lower --model.lr, a longer --model.warmup, "
            "--trainer.gradient_clip_val 1, or --trainer.precision bf16-mixed or 32-true."
        )
