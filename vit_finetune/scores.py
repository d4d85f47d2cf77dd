"""Loss and accuracy of one stage."""

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy


class Scores(nn.Module):
    """Means over all pictures of a stage, on any number of processes and with uneven batches.

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
        """Counts pictures.

        Args:
            losses: For each picture its loss, or the mean loss of the batch it came in, shape ``(B,)``.
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.

        Returns:
            ``loss`` and ``acc`` of these pictures alone, this process's share.
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
