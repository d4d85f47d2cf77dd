"""Data modules: from image files to augmented uint8 batches on the device."""

from vit_finetune.data.cifar import CIFAR10, CIFAR100
from vit_finetune.data.contours import Contours
from vit_finetune.data.datamodule import ImageDataModule
from vit_finetune.data.hugging_face import HuggingFace
from vit_finetune.data.image_folder import ImageFolder
from vit_finetune.data.image_table import ImageTable
from vit_finetune.data.shapes import Shapes

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "Contours",
    "HuggingFace",
    "ImageDataModule",
    "ImageFolder",
    "ImageTable",
    "Shapes",
]
