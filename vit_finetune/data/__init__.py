"""Data modules: everything between files and a batch of uint8 pictures on the device."""

from vit_finetune.data.base import ImageDataModule
from vit_finetune.data.cifar10 import CIFAR10, CIFAR100
from vit_finetune.data.contours import Contours
from vit_finetune.data.folder import ImageFolder
from vit_finetune.data.shapes import Shapes

__all__ = ["CIFAR10", "CIFAR100", "Contours", "ImageDataModule", "ImageFolder", "Shapes"]
