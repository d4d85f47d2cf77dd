"""The commands beyond those of Lightning's Trainer: each is a method, whose docstring is the command's help."""

from lightning.pytorch import Trainer

from vit_finetune.data import ImageDataModule
from vit_finetune.module import ViTClassifier

EXTRA_COMMANDS = ("doctor",)


class ViTTrainer(Trainer):
    """Lightning's Trainer with more commands."""

    def doctor(self, model: ViTClassifier, datamodule: ImageDataModule, ckpt_path: str | None = None) -> None:
        """Print the machine and check a fit with these options without starting it.

        Args:
            model: The model that would be trained.
            datamodule: The data that it would be trained on.
            ckpt_path: The checkpoint that training would go on from.
        """
