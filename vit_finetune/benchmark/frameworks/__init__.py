"""The same fine-tune through five frameworks, measured side by side: ``python -m vit_finetune.benchmark.frameworks``.

Plain PyTorch, Lightning Fabric, Hugging Face Accelerate, the Hugging Face Trainer and this project's command line train
the same network from the same weights, on the same batches in the same order, with the same augmentation, optimizer and
schedule. Each has a file of its own here, short enough to compare by reading; what they share is in ``task.py``.
"""

from pathlib import Path
from typing import Any


def compare(output: Path, **options: Any) -> None:
    """Compares all of them; see :func:`vit_finetune.benchmark.frameworks.compare.compare`."""
    from vit_finetune.benchmark.frameworks import compare  # not above: each framework's own process needs less

    compare.compare(output, **options)
