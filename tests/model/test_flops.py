"""Floating-point operations by hand, and the peak of known GPUs."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_KWARGS, scalars
from vit_finetune import main
from vit_finetune.model import flops
from vit_finetune.model.config import ViTConfig


def config(**options: Any) -> ViTConfig:
    return ViTConfig("vit_tiny_patch16_224", 32, TINY_KWARGS, **options)


def test_flops_by_hand() -> None:
    """Tiny ViT with 17 tokens of width 24, two heads, two blocks: the backward pass takes twice the forward pass.

    The images need no gradient, which saves half of the backward pass of the patch embedding.
    """
    tokens, width, depth, classes = 17, 24, 2, 10
    patches = 2 * 16 * (8 * 8 * 3) * width
    block = 2 * tokens * width * (3 * width + width + 8 * width) + 2 * 2 * tokens * tokens * width
    head = 2 * width * classes
    assert flops.forward_flops(config(), classes) == patches + depth * block + head
    assert flops.flops_per_image(config(), classes) == 2 * patches + 3 * (depth * block + head)
    assert flops.flops_per_image(config(freeze_backbone=True), classes) == patches + depth * block + 2 * head


def test_flops_of_lora_by_hand() -> None:
    """Frozen weights save a third, the first layer more since its input needs no gradient; updates save nothing."""
    pytest.importorskip("peft")
    tokens, width, rank, classes = 17, 24, 4, 10
    patches = 2 * 16 * (8 * 8 * 3) * width
    frozen = 2 * tokens * width * (3 * width + width + 8 * width)
    attention = 2 * 2 * tokens * tokens * width
    updates = 2 * tokens * rank * ((width + 3 * width) + (width + width))
    first_input = 2 * tokens * width * 3 * width + 2 * tokens * width * rank  # nothing below it trains
    expected = patches + 2 * (2 * frozen + 3 * attention + 3 * updates) - first_input + 3 * 2 * width * classes
    assert flops.flops_per_image(config(lora_rank=rank), classes) == expected
    assert flops.forward_flops(config(lora_rank=rank), classes) == flops.forward_flops(config(), classes)


def test_no_flops_if_their_number_changes_by_epoch(folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args, "--model.unfreeze_by=2", "--trainer.limit_train_batches=2"])
    tags = scalars(tmp_path / "runs")
    assert "train/images_per_second" in tags and "train/tflops" not in tags


@pytest.mark.parametrize(
    ("name", "precision", "matmul", "peak"),
    [
        ("NVIDIA H200", "bf16-mixed", "highest", 989e12),
        ("NVIDIA H200", "32-true", "high", 494e12),
        ("NVIDIA H200", "32-true", "highest", 67e12),
        ("NVIDIA H200 NVL", "bf16-mixed", "highest", 835e12),
        ("NVIDIA GB200", "bf16-mixed", "highest", None),
        ("NVIDIA H100 PCIe", "16-mixed", "highest", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16-true", "highest", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", "highest", 312e12),
        ("Tesla T4", "16-mixed", "highest", 65e12),
        ("Tesla T4", "bf16-mixed", "highest", None),
        ("Tesla T4", "32-true", "high", 8.1e12),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16-mixed", "highest", None),
        ("NVIDIA H200", "64-true", "highest", None),
        ("NVIDIA RTX A1000 Laptop GPU", "bf16-mixed", "highest", None),
        ("NVIDIA T400 4GB", "16-mixed", "highest", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16-mixed", "highest", None),
        ("Some other GPU", "bf16-mixed", "highest", None),
    ],
)
def test_peak_of_known_devices(name: str, precision: str, matmul: str, peak: float | None) -> None:
    assert flops.peak_of(name, precision, matmul) == peak
