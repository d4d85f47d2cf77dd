"""Verification of an exported file: its predictions against those of the checkpoint on all validation images."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.progress import track
from torch import Tensor
from typing_extensions import override

from vit_finetune.callbacks import progress_bar
from vit_finetune.data import ImageDataModule
from vit_finetune.data.datasets import Batch
from vit_finetune.export.formats import InferenceFn
from vit_finetune.module import ViTClassifier

TOLERANCE = 1e-4  # of a probability; float32 kernels of two libraries differ by about 1e-6


@dataclass(frozen=True)
class VerificationResult:
    """Comparison of an exported file with its checkpoint.

    Attributes:
        images: Number of validation images.
        mismatches: Images for which the predicted class differs.
        max_difference: Largest absolute difference of a probability.
        accuracy: Top-1 accuracy of the checkpoint.
        file_accuracy: Top-1 accuracy of the file.
    """

    images: int
    mismatches: int
    max_difference: float
    accuracy: float
    file_accuracy: float

    @property
    def passed(self) -> bool:
        """True if the file can replace the checkpoint; false if a difference is NaN."""
        return not self.mismatches and self.max_difference <= TOLERANCE

    def __str__(self) -> str:
        equal = self.images - self.mismatches
        difference = f"{self.max_difference:.1e} (tolerance {TOLERANCE:.0e})"
        return (
            f"checkpoint  val/acc {self.accuracy:.4f}  {self.images} images, float32\n"
            f"file        val/acc {self.file_accuracy:.4f}  top-1 equal for {equal} of {self.images} images, "
            f"largest difference of a probability {difference}"
        )


class _ValPredictions(Callback):
    """Keep the validation predictions, which the module drops after the epoch."""

    logits: Tensor
    labels: Tensor

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ViTClassifier)
        self.logits, self.labels, _ = pl_module.val_predictions.predictions()


def reference(model: ViTClassifier, data: ImageDataModule) -> tuple[Tensor, Tensor]:
    """Compute the checkpoint's predictions as ``validate`` does, in float32 in one process on the CPU.

    Afterwards the data is set up for this model, and ``data.val_dataloader()`` returns the same images again.

    Returns:
        Probabilities, float32 ``(N, C)``, and labels, int64 ``(N,)``.
    """
    predictions = _ValPredictions()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[predictions, progress_bar()],
    )
    trainer.validate(model, datamodule=data, verbose=False)
    return model.probabilities(predictions.logits), predictions.labels


def compare(probabilities: Tensor, labels: Tensor, infer: InferenceFn, loader: Iterable[Batch]) -> VerificationResult:
    """Run the file on the validation images and compare.

    Args:
        probabilities: Those of the checkpoint, float32 ``(N, C)``.
        labels: int64, shape ``(N,)``.
        infer: The exported file.
        loader: The same images in the same order.
    """
    with torch.inference_mode():
        batches = track(loader, "verifying the file", transient=True, disable=not sys.stdout.isatty())
        exported = torch.cat([infer(batch["image"]) for batch in batches])
    predicted, predicted_by_file = probabilities.argmax(-1), exported.argmax(-1)
    return VerificationResult(
        images=len(labels),
        mismatches=int((predicted != predicted_by_file).sum()),
        max_difference=float((probabilities - exported).abs().max()),
        accuracy=float((predicted == labels).float().mean()),
        file_accuracy=float((predicted_by_file == labels).float().mean()),
    )
