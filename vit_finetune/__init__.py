"""Fine-tune a Vision Transformer with PyTorch Lightning, then make the project your own.

>>> from vit_finetune import ViTClassifier, CIFAR10  # model and data, for any Lightning Trainer
>>> from vit_finetune import main                    # the command line: main(["fit", ...])
>>> model = ViTClassifier.load("runs/quickstart")    # best weights of the newest run
>>> from vit_finetune import runs                    # runs.scalars("runs"), runs.runs("runs"): data frames
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_finetune.__main__ import main as main
    from vit_finetune.data import CIFAR10 as CIFAR10
    from vit_finetune.data import CIFAR100 as CIFAR100
    from vit_finetune.data import Contours as Contours
    from vit_finetune.data import HuggingFace as HuggingFace
    from vit_finetune.data import ImageDataModule as ImageDataModule
    from vit_finetune.data import ImageFolder as ImageFolder
    from vit_finetune.data import ImageTable as ImageTable
    from vit_finetune.data import Shapes as Shapes
    from vit_finetune.evaluation import runs as runs
    from vit_finetune.module import ViTClassifier as ViTClassifier

__version__ = "0.1.0"

_HOMES = {
    "main": "__main__",
    "ViTClassifier": "module",
    "ImageDataModule": "data",
    "CIFAR10": "data",
    "CIFAR100": "data",
    "Contours": "data",
    "HuggingFace": "data",
    "ImageFolder": "data",
    "ImageTable": "data",
    "Shapes": "data",
    "runs": "evaluation",
}
__all__ = [
    "CIFAR10",
    "CIFAR100",
    "Contours",
    "HuggingFace",
    "ImageDataModule",
    "ImageFolder",
    "ImageTable",
    "Shapes",
    "ViTClassifier",
    "__version__",
    "main",
    "runs",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use, which keeps ``import vit_finetune`` fast."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
