"""Whether an exported file answers as its checkpoint does, on every validation image."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.progress import track
from torch import Tensor

from vit_finetune.callbacks import progress_bar
from vit_finetune.data import ImageDataModule
from vit_finetune.data.datasets import Batch
from vit_finetune.export.formats import InferenceFn
from vit_finetune.module import ViTClassifier

LIMIT = 1e-4  # largest difference of a probability; kernels of two libraries in float32 differ by about 1e-6


@dataclass
class VerificationResult:
    """How far a file and its checkpoint agree.

    Args:
        images: Number of validation images.
        changed: Images whose most probable class is another one.
        difference: Largest difference of any probability.
        accuracy: Share of images that the checkpoint answers correctly.
        accuracy_of_file: Share of images that the file answers correctly.
    """

    images: int
    changed: int
    difference: float
    accuracy: float
    accuracy_of_file: float

    @property
    def holds(self) -> bool:
        """Whether the file may be used in place of the checkpoint; false too where a difference is no number."""
        return not self.changed and self.difference <= LIMIT

    def __str__(self) -> str:
        same = self.images - self.changed
        return (
            f"checkpoint  val/acc {self.accuracy:.4f}  {self.images} images, float32\n"
            f"file        val/acc {self.accuracy_of_file:.4f}  top-1 equal on {same} of {self.images}, largest "
            f"difference of a probability {self.difference:.1e} (limit {LIMIT:.0e})"
        )


class _Answers(Callback):
    """Keeps what a validation answered."""

    logits: Tensor
    labels: Tensor

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the answers before the module forgets them."""
        outputs: Any = pl_module.val_predictions
        self.logits, self.labels, _ = outputs.compute()


def reference(model: ViTClassifier, data: ImageDataModule) -> tuple[Tensor, Tensor]:
    """Scores the checkpoint as ``validate`` does, in float32 in one process on the CPU.

    Afterwards the data is set up for this model, and ``val_dataloader`` gives the same images again.

    Returns:
        Probabilities, float32 ``(N, C)``, and labels, int64 ``(N,)``.
    """
    answers = _Answers()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[answers, progress_bar()],
    )
    trainer.validate(model, datamodule=data, verbose=False)
    return model.probabilities(answers.logits), answers.labels


def compare(probabilities: Tensor, labels: Tensor, run: InferenceFn, loader: Iterable[Batch]) -> VerificationResult:
    """Runs a file over the images that the checkpoint was scored on."""
    with torch.inference_mode():
        batches = track(loader, "checking the file", transient=True, disable=not sys.stdout.isatty())
        found = torch.cat([run(batch["image"]) for batch in batches])
    top, top_of_file = probabilities.argmax(-1), found.argmax(-1)
    return VerificationResult(
        images=len(labels),
        changed=int((top != top_of_file).sum()),
        difference=float((probabilities - found).abs().max()),
        accuracy=float((top == labels).float().mean()),
        accuracy_of_file=float((top_of_file == labels).float().mean()),
    )
