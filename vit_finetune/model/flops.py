"""Floating-point operations of a network, and the peak rate of known GPUs."""

import re
from functools import lru_cache

import torch
from torch import nn

from vit_finetune.model.config import ViTConfig
from vit_finetune.model.precision import compute_dtype

# Dense TFLOP/s from NVIDIA's data sheets (half of the figures that assume sparsity): float16 and bfloat16 with float32
# accumulation, TF32, float32. The keys are parts of torch.cuda.get_device_name; the first that occurs in it counts.
# bfloat16 needs Ampere or later; V100 and T4 have float16 only. Lightning's own table (get_available_flops) does not
# know the name that an H200 reports, and has figures with sparsity for it.
PEAK_TFLOPS: dict[str, tuple[float, float | None, float]] = {
    "B200": (2250, 1100, 75),  # HGX B200 data sheet, per GPU
    "H200 NVL": (835, 418, 60),  # H200 data sheet
    "H200": (989, 494, 67),  # H200 data sheet, SXM
    "H100 PCIe": (756, 378, 51),  # H100 data sheet
    "H100 NVL": (835, 418, 60),
    "H100": (989, 494, 67),  # SXM
    "A100": (312, 156, 19.5),  # A100 data sheet, SXM and PCIe
    "L40S": (362, 183, 91.6),  # L40S data sheet
    "RTX 4090": (165, 82.6, 82.6),  # Ada architecture white paper, appendix A
    "RTX 3090": (71, 35.6, 35.6),  # GA102 architecture white paper, table 9 (not the Ti)
    "V100-SXM2": (125, None, 15.7),  # V100 data sheet
    "T4": (65, None, 8.1),  # T4 data sheet
}
LOOKALIKES = ("MIG", "GB200", "RTX 3090 Ti", "RTX 4090 D", "RTX 4090 Laptop")


@lru_cache
def flops_per_image(config: ViTConfig, num_classes: int) -> int:
    """Return the operations of the forward and backward pass for one image; a multiply-add counts as two.

    The gradients that a frozen backbone does not need are left out. Activations that gradient checkpointing recomputes
    count once, as in the definition of model FLOPs utilization (MFU; Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B). With ``--model.unfreeze_by`` the result holds for the epochs in which everything trains.

    Args:
        config: Options of the model.
        num_classes: Number of outputs of the head.
    """
    from vit_finetune.model import lora

    return _count(lora.build_meta(config, num_classes), config, backward=True)


@lru_cache
def forward_flops(config: ViTConfig, num_classes: int) -> int:
    """Return the operations of the forward pass for one image, with LoRA merged; a multiply-add counts as two.

    Args:
        config: Options of the model.
        num_classes: Number of outputs of the head.
    """
    from vit_finetune.model import vit

    return _count(vit.build_meta(config, num_classes), config, backward=False)


def _count(net: nn.Module, config: ViTConfig, backward: bool) -> int:
    """Count matrix products, convolutions and attention by :mod:`torch.utils.flop_counter` on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    from vit_finetune.model import vit

    # Without the fused kernel: it recomputes products in the backward pass, and the counter includes them.
    vit.set_attention_kernel(net, torch.device("cpu"), torch.bfloat16)
    # Anomaly detection reads values, which tensors on the meta device do not have.
    with torch.autograd.set_detect_anomaly(False), FlopCounterMode(display=False) as counter:
        logits = net(torch.zeros(1, 3, *vit.data_config(config)["size"], device="meta"))
        if backward:
            logits.sum().backward()
    return int(counter.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak operations per second of a device for matrix products, ``None`` if unknown.

    Args:
        device: Device that training runs on.
        precision: As in ``--trainer.precision``; for float32, ``--matmul_precision`` decides whether TF32 is used.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision, torch.get_float32_matmul_precision())


def peak_of(name: str, precision: str, matmul_precision: str = "highest") -> float | None:
    """Return the peak operations per second from the data sheet of a GPU, ``None`` if unknown.

    Args:
        name: As returned by ``torch.cuda.get_device_name``.
        precision: As in ``--trainer.precision``.
        matmul_precision: ``highest``, ``high`` or ``medium``, see ``torch.set_float32_matmul_precision``.
    """
    # An A1000 is not an A100, and a T400 is not a T4.
    known = next((peaks for part, peaks in PEAK_TFLOPS.items() if re.search(rf"{part}(?!\d)", name)), None)
    if known is None or any(part in name for part in LOOKALIKES):
        return None
    half, tf32, full = known
    by_dtype = {
        torch.float16: half,
        torch.bfloat16: half if tf32 else None,
        torch.float32: full if matmul_precision == "highest" or not tf32 else tf32,
    }
    peak = by_dtype.get(compute_dtype(precision))
    return peak * 1e12 if peak else None
