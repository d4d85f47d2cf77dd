"""Loss, accuracy and answers of one stage."""

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat


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


class Outputs(Metric):
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
        """Keeps pictures.

        Args:
            logits: float32, shape ``(B, C)``.
            labels: int64, shape ``(B,)``.
            index: int64, shape ``(B,)``, their positions in the set.
        """
        for kept, new in zip((self.logits, self.labels, self.index), (logits, labels, index), strict=True):
            kept.append(new)

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, labels and index of all pictures, each once, in the order of the index."""
        logits, labels, index = (dim_zero_cat(kept) for kept in (self.logits, self.labels, self.index))
        order = index.argsort()
        # Processes that share the work on a picture (tensor parallel) all have its answer.
        order = order[index[order].diff(prepend=index.new_tensor([-1])) > 0]
        return logits[order], labels[order], index[order]
